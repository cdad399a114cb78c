"""The time of a step on a network known by its name, with the range in which it should be believed.

On the paper's three clusters the range is the model's largest error on tables it has not seen. Ethernet is
not in the tables: its range goes from a line that is used to the full, to that line behind hosts as slow as
the slowest cluster. Beyond 8 nodes it widens from a network that becomes no slower to one that slows down
in a line.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from fastclip.text import did_you_mean
from fastclip.tools.profiling.network import Beyond, Network, StepTime, line_behind, predict_step
from fastclip.tools.profiling.traffic import Traffic

if TYPE_CHECKING:
    from fastclip.tools.profiling.fitting import Fit

ETHERNET = {"10gbe": 10e9, "25gbe": 25e9, "100gbe": 100e9}
"""Line rates in bits a second; for one line a node."""
MEASURED = {
    "ib": "the paper's InfiniBand cluster",
    "slingshot-1": "the paper's first Slingshot cluster",
    "slingshot-2": "the paper's second Slingshot cluster",
}
NETWORKS = (*ETHERNET, *MEASURED)


def check_network(name: str) -> None:
    """Refuse a name that is not known, before anything heavy is imported."""
    if name not in NETWORKS:
        hint = did_you_mean(name.lower(), NETWORKS)
        raise ValueError(f"--network {name} is unknown.{hint} Choose one of: {', '.join(NETWORKS)}.")


class Bounds(NamedTuple):
    """A network, and the fastest and the slowest that it may turn out to be."""

    fast: Network
    likely: Network
    slow: Network


def bounds(name: str, fit: Fit) -> Bounds:
    """What is known of a network of this name."""
    check_network(name)
    if name in MEASURED:
        network = fit.networks[name]
        return Bounds(network, network, network)
    clusters = sorted(fit.networks.values(), key=lambda cluster: cluster.pace)
    inside = sorted(cluster.inside for cluster in clusters)
    rate = ETHERNET[name]
    likely, slow = (
        line_behind(rate, replace(host, inside=alone), name)
        for host, alone in ((clusters[0], inside[len(inside) // 2]), (clusters[-1], inside[-1]))
    )
    return Bounds(Network(name, 8e9 / rate, 0.0, inside[0]), likely, slow)


class Prediction(NamedTuple):
    """A step's likely time, and its range in ms."""

    step: StepTime
    low: float
    high: float


def predict(
    traffic: Traffic,
    nodes: int,
    network: Bounds,
    fit: Fit,
    error: float,
    *,
    computation: float,
    others: float,
) -> Prediction:
    """The step on the likely network; its range from the bounds, widened by the model's own error."""

    def step(network: Network, beyond: Beyond) -> StepTime:
        return predict_step(
            traffic, nodes, network, fit.hiding, computation=computation, others=others, beyond=beyond
        )

    low, high = step(network.fast, "no slower").total, step(network.slow, "in a line").total
    return Prediction(
        step(network.likely, "as before"),
        max(computation + others, low / (1 + error)),  # no network makes it faster than that
        high / (1 - error),
    )
