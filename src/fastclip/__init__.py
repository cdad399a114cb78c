"""fastclip: CLIP training with global contrastive losses, for people with few GPUs.

`from fastclip import GlobalContrastiveLoss` is all that a training loop of one's own needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["ALGORITHMS", "Algorithm", "GlobalContrastiveLoss", "LossOutput"]

if TYPE_CHECKING:
    from fastclip.objective.algorithms import ALGORITHMS, Algorithm
    from fastclip.objective.loss import GlobalContrastiveLoss, LossOutput

_HOME = {
    "ALGORITHMS": "algorithms",
    "Algorithm": "algorithms",
    "GlobalContrastiveLoss": "loss",
    "LossOutput": "loss",
}


def __getattr__(name: str) -> object:
    """Import torch only when something is used: `import fastclip` alone stays instant."""
    if name not in _HOME:
        raise AttributeError(f"module 'fastclip' has no attribute {name!r}; it offers {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(f"fastclip.objective.{_HOME[name]}"), name)
