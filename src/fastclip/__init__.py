"""fastclip: CLIP training with global contrastive losses, for users with few GPUs.

`from fastclip import GlobalContrastiveLoss` is all that your own training loop needs;
`fastclip.load("runs/mine")` loads a trained model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "GlobalContrastiveLoss",
    "LossOutput",
    "Model",
    "caption_group",
    "load",
]

if TYPE_CHECKING:
    from fastclip.data.caption_groups import caption_group
    from fastclip.objective.algorithms import ALGORITHMS, Algorithm
    from fastclip.objective.loss import GlobalContrastiveLoss
    from fastclip.objective.loss_step import LossOutput
    from fastclip.run.load import Model, load

_HOME = {
    "ALGORITHMS": "fastclip.objective.algorithms",
    "Algorithm": "fastclip.objective.algorithms",
    "GlobalContrastiveLoss": "fastclip.objective.loss",
    "LossOutput": "fastclip.objective.loss_step",
    "Model": "fastclip.run.load",
    "caption_group": "fastclip.data.caption_groups",
    "load": "fastclip.run.load",
}


def __getattr__(name: str) -> object:
    """Import torch only when something is used, so `import fastclip` stays instant."""
    if name not in _HOME:
        raise AttributeError(f"module 'fastclip' has no attribute {name!r}; it offers {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
