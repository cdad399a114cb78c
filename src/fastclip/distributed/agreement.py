"""What must be the same on every rank, compared before ranks that differ could hang or train a mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastclip.distributed.world import World


class RanksDiffer(ValueError):
    """A rank was started differently: "Rank 1 has optim.lr=0.002, rank 0 has 0.001: …"

    Args:
        name: what differs, e.g. the full name of an option.
        rank: the first rank that differs from rank 0.
        value: of that rank; None if it is not set.
        first: rank 0's value.
    """

    def __init__(self, name: str, rank: int, value: object, first: object):
        self.name, self.rank, self.value, self.first = name, rank, value, first
        shown = f"{name}={value}" if value is not None else f"no {name}"
        expected = "none" if first is None else first
        super().__init__(
            f"Rank {rank} has {shown}, rank 0 has {expected}: start all ranks with the same options, data, "
            "software and kind of device."
        )

    def __reduce__(self):
        return type(self), (self.name, self.rank, self.value, self.first)


def require_same(world: World, facts: Mapping[str, Any]) -> None:
    """Raise RanksDiffer on every rank if these differ on one; the first in rank 0's order is named.

    All ranks call it at the same point, with any facts: this cannot hang, whatever they are.
    """
    if differ := first_difference(world.gather(dict(facts))):
        raise differ


def first_difference(facts: Sequence[Mapping[str, Any]]) -> RanksDiffer | None:
    """Compare the facts of all ranks, in their order, with rank 0's."""
    first = facts[0]
    for name in dict.fromkeys(name for of_rank in facts for name in of_rank):
        for rank, of_rank in enumerate(facts):
            if of_rank.get(name) != first.get(name):
                return RanksDiffer(name, rank, of_rank.get(name), first.get(name))
    return None
