"""From bytes to milliseconds: the simplest model of a step that fits the paper's tables.

    communication = (bytes that a rank sends) × pace(nodes)
    pace(nodes)   = pace of two nodes + growth × (doublings of the nodes beyond two)
    hidden        = min(φ × computation, ψ × (1 − 1/buckets) × communication of the weight gradients)
    step          = computation + others + communication − hidden

Every doubling of the nodes adds about the same time per megabyte; a latency per collective instead fits
worse. φ, about two thirds of the computation, is the backward pass, during which the weight gradients are
sent; ψ is the share of them that hides, without DDP's last bucket, which is sent after the backward pass.
Features and scalars are not hidden: the loss waits for them. (fastclip's own step sends some of them while
the towers run; the tables do not show that.)

The constants are fitted by `benchmarks/plan_fit.py`. On the paper's three clusters a step's range is the
model's largest error on tables held out of the fit. Ethernet is not in the tables: its range is from a fully
used link to that link with hosts as slow as the slowest cluster. Beyond 8 nodes the range widens: from a
network that gets no slower to one that slows down linearly.
"""

from __future__ import annotations

from math import log, log2
from typing import Literal, NamedTuple

from fastclip.errors import OptionError
from fastclip.text import did_you_mean
from fastclip.tools.profiling.traffic import Traffic

GPUS_PER_NODE = 4  # in all of the paper's tables
MOST_NODES = 8  # in any of them: beyond, it is extrapolated

Beyond = Literal["flat", "logarithmic", "linear"]  # how the pace continues beyond MOST_NODES


class Network(NamedTuple):
    """The speed of a network: ms per megabyte (10⁶ bytes) that one rank sends."""

    name: str
    pace: float  # between two nodes
    growth: float  # added by each doubling of the nodes
    inside: float  # between the ranks of one node

    def ms_per_megabyte(self, nodes: int, beyond: Beyond = "logarithmic") -> float:
        if nodes == 1:
            return self.inside
        doublings = log2(nodes) - 1
        if nodes > MOST_NODES and beyond != "logarithmic":
            doublings = log2(MOST_NODES) - 1
            if beyond == "linear":  # with the slope at MOST_NODES
                doublings += (nodes - MOST_NODES) / (MOST_NODES * log(2))
        return self.pace + self.growth * doublings

    @property
    def bits_per_second(self) -> float:
        """The rate of a rank between two nodes."""
        return 8e9 / self.pace


class Hiding(NamedTuple):
    """How much of the communication hides behind computation."""

    of_computation: float  # φ: the share of the computation behind which anything can hide
    of_weights: float  # ψ: the share of the weight gradients, without the last bucket, that can hide

    def share(self, buckets: int) -> float:
        """The share of all weight gradients that can hide."""
        return self.of_weights * (1 - 1 / buckets)


class ErrorSize(NamedTuple):
    """Absolute values of relative errors."""

    mean: float
    largest: float


class ModelErrors(NamedTuple):
    """The model's errors on the paper's cells with more than one node."""

    step_seen: ErrorSize
    step_unseen: ErrorSize  # on tables held out of the fit
    ratio_seen: ErrorSize  # of the ratio FastCLIP-v3 / OpenCLIP of step times
    ratio_unseen: ErrorSize
    ratio_one: ErrorSize  # of assuming that both are equally fast


# Printed by `python -m benchmarks.plan_fit`; a test compares them.
CLUSTERS = {
    "ib": Network("ib", 0.5967569140175565, 0.13323798489830974, 0.378649216608282),
    "slingshot-1": Network("slingshot-1", 0.3574961972231476, 0.029587111943855167, 0.043351986457819895),
    "slingshot-2": Network("slingshot-2", 0.1491744270650685, 0.03204089059833856, 0.04449495053953115),
}
HIDING = Hiding(0.6601465402217637, 0.7952824736225459)
ERRORS = ModelErrors(
    step_seen=ErrorSize(0.03829705490129583, 0.09265461431135369),
    step_unseen=ErrorSize(0.054794941474850124, 0.13280315169200452),
    ratio_seen=ErrorSize(0.010743811512606602, 0.042121157897991646),
    ratio_unseen=ErrorSize(0.010602093857152559, 0.04182472366338863),
    ratio_one=ErrorSize(0.012380351901850972, 0.06186131886797619),
)

ETHERNET = {"10gbe": 10e9, "25gbe": 25e9, "100gbe": 100e9}  # bits/s; one link per node
MEASURED = {
    "ib": "the paper's InfiniBand cluster",
    "slingshot-1": "the paper's first Slingshot cluster",
    "slingshot-2": "the paper's second Slingshot cluster",
}
NETWORKS = (*ETHERNET, *MEASURED)


class StepTime(NamedTuple):
    """Where the time of a step goes, in ms."""

    computation: float
    others: float  # neither computation nor communication: host work, waiting for data
    communication: float
    hidden: float  # communication during computation

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
    *,
    computation: float,
    others: float = 0.0,
    hiding: Hiding = HIDING,
    beyond: Beyond = "logarithmic",
) -> StepTime:
    """Estimate the time of a step.

        sent = step_traffic("fastclip-v3", workers=4, local_batch=32, features=64, trained_bytes=13_000_000)
        predict_step(sent, 4, CLUSTERS["ib"], computation=80.0).total

    Args:
        computation: ms per step that each rank computes at its local batch.
        others: ms per step in which it neither computes nor communicates.
    """
    pace = network.ms_per_megabyte(nodes, beyond)
    weights, exchange = traffic.weights / 1e6 * pace, traffic.exchange / 1e6 * pace
    hidden = min(hiding.of_computation * computation, hiding.share(traffic.buckets) * weights)
    return StepTime(computation, others, weights + exchange, hidden)


class Bounds(NamedTuple):
    """The likely network, with the fastest and slowest it may be."""

    fast: Network
    likely: Network
    slow: Network


def check_network(name: str | None) -> str:
    """Return the name, or raise an OptionError if it is missing or unknown."""
    if name is None or name not in NETWORKS:
        hint = did_you_mean(name.lower(), NETWORKS).strip() if name else "Pass --network."
        raise OptionError("network", name, f"must be one of: {', '.join(NETWORKS)}", advice=hint)
    return name


def bounds(name: str) -> Bounds:
    """The network of this name, with its range."""
    if cluster := CLUSTERS.get(name):
        return Bounds(cluster, cluster, cluster)
    hosts = sorted(CLUSTERS.values(), key=lambda cluster: cluster.pace)
    least, middle, most = sorted(host.inside for host in hosts)
    rate = ETHERNET[name]
    return Bounds(
        Network(name, 8e9 / rate, 0.0, least),
        line_behind(rate, hosts[0]._replace(inside=middle), name),
        line_behind(rate, hosts[-1]._replace(inside=most), name),
    )


def line_behind(bits_per_second: float, host: Network, name: str) -> Network:
    """A link of known rate in series with hosts as slow as this one's."""
    return Network(name, 8e9 / bits_per_second + host.pace, host.growth, host.inside)


class Prediction(NamedTuple):
    """A step's likely time, and its range in ms."""

    step: StepTime
    low: float
    high: float


def predict(
    traffic: Traffic,
    nodes: int,
    network: Bounds,
    *,
    computation: float,
    others: float,
    error: float = ERRORS.step_unseen.largest,
) -> Prediction:
    """Estimate the step on the likely network, with a range: the bounds, widened by the model's error."""

    def step(network: Network, beyond: Beyond) -> StepTime:
        return predict_step(traffic, nodes, network, computation=computation, others=others, beyond=beyond)

    low, high = step(network.fast, "flat").total, step(network.slow, "linear").total
    return Prediction(
        step(network.likely, "logarithmic"),
        max(computation + others, low / (1 + error)),  # a lower bound on any network
        high / (1 - error),
    )
