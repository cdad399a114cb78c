"""From bytes to milliseconds: the simplest model of a step that fits the paper's tables.

    communication = (bytes that a worker sends) × pace(nodes)
    pace(nodes)   = pace of two nodes + growth × (doublings of the nodes beyond two)
    hidden        = the smaller of  φ × computation  and  ψ × (1 − 1/buckets) × that of the weights' gradients
    step          = computation + others + communication − hidden

Every doubling of the nodes makes a megabyte slower by about as much. A latency of each collective in its
place fits the tables less well. What a step hides ends at φ, about two thirds of the computation: the
backward pass, in which the weights' gradients travel; and at ψ of them, without the last of the buckets in
which DDP sends them: it leaves when the backward pass is over. Features and scalars are not hidden: the loss
waits for them. (fastclip's own step starts some of them while the towers run. The tables know nothing of
that, nor does this.)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, log2
from typing import Literal, NamedTuple

from fastclip.tools.profiling.paper import MOST_NODES
from fastclip.tools.profiling.traffic import Traffic

Beyond = Literal["no slower", "as before", "in a line"]
"""How the pace goes on beyond the largest number of nodes that was measured."""


@dataclass(frozen=True)
class Network:
    """How fast bytes travel: ms for a megabyte (10⁶ bytes) of what one worker sends."""

    name: str
    pace: float
    """Between two nodes."""
    growth: float
    """What each doubling of the nodes adds."""
    inside: float
    """Between the workers of one node."""

    def ms_per_megabyte(self, nodes: int, beyond: Beyond = "as before") -> float:
        if nodes == 1:
            return self.inside
        return self.pace + self.growth * _doublings(nodes, beyond)

    @property
    def bits_per_second(self) -> float:
        """What a worker gets of it between two nodes."""
        return 8e9 / self.pace


def line_behind(bits_per_second: float, host: Network, name: str) -> Network:
    """A line of known rate at each worker's end, and what such hosts take themselves, one after the other."""
    return Network(name, 8e9 / bits_per_second + host.pace, host.growth, host.inside)


class Hiding(NamedTuple):
    """How much of the communication hides behind computation."""

    of_computation: float
    """φ: the share of the computation behind which anything can hide."""
    of_weights: float
    """ψ: the share that can hide of all of the weights' communication but the last bucket."""

    def hidden(self, computation: float, weights: float, buckets: int) -> float:
        """ms, of so many that the weights take."""
        return min(self.of_computation * computation, self.share(buckets) * weights)

    def share(self, buckets: int) -> float:
        """Of the weights' communication: what can hide of it."""
        return self.of_weights * (1 - 1 / buckets)


class StepTime(NamedTuple):
    """Where the time of a step goes, in ms."""

    computation: float
    others: float
    """Neither computation nor communication: the host's own work, waiting for data."""
    communication: float
    hidden: float
    """Communication while something is computed."""

    @property
    def pure(self) -> float:
        """Communication that the step waits for."""
        return self.communication - self.hidden

    @property
    def total(self) -> float:
        return self.computation + self.others + self.pure


def predict_step(
    traffic: Traffic,
    nodes: int,
    network: Network,
    hiding: Hiding,
    *,
    computation: float,
    others: float = 0.0,
    beyond: Beyond = "as before",
) -> StepTime:
    """The time of a step.

        sent = step_traffic("fastclip-v3", workers=4, local_batch=32, features=64, trained_bytes=13_000_000)
        predict_step(sent, 4, fitted().networks["ib"], fitted().hiding, computation=80.0).total

    Args:
        traffic: what each worker sends.
        nodes: machines with a network between them.
        computation: ms a step that each worker computes at its local batch.
        others: ms a step in which it neither computes nor communicates.
    """
    pace = network.ms_per_megabyte(nodes, beyond)
    weights, exchange = traffic.weights / 1e6 * pace, traffic.exchange / 1e6 * pace
    hidden = hiding.hidden(computation, weights, traffic.buckets)
    return StepTime(computation, others, weights + exchange, hidden)


def _doublings(nodes: int, beyond: Beyond) -> float:
    """Beyond two nodes; past what was measured they stop, go on, or become a line of the same slope."""
    if nodes <= MOST_NODES or beyond == "as before":
        return log2(nodes) - 1
    last = log2(MOST_NODES) - 1
    return last if beyond == "no slower" else last + (nodes - MOST_NODES) / (MOST_NODES * log(2))
