"""From bytes to milliseconds: the simplest model of a step that fits the paper's tables.

    communication = (bytes that a worker sends) × pace(nodes)
    pace(nodes)   = pace of two nodes + growth × (doublings of the nodes beyond two)
    hidden        = the smaller of  φ × computation  and  ψ × (1 − 1/buckets) × that of the weights' gradients
    step          = computation + others + communication − hidden

Every doubling of the nodes slows a megabyte down by about as much; a latency per collective instead fits
less well. φ, about two thirds of the computation, is the backward pass, in which the weights' gradients
travel; ψ is the share of them that hides, without DDP's last bucket, which leaves after the backward pass.
Features and scalars are not hidden: the loss waits for them. (fastclip's own step starts some of them while
the towers run, of which the tables know nothing.)

The constants are the fit of `benchmarks/plan_fit.py`. On the paper's three clusters a step's range is the
model's largest error on tables left out of the fit. Ethernet is not in the tables: its range goes from a line
used to the full to that line behind hosts as slow as the slowest cluster. Beyond 8 nodes it widens from a
network that gets no slower to one that slows down linearly.
"""

from __future__ import annotations

from math import log, log2
from typing import Literal, NamedTuple

from fastclip.text import did_you_mean
from fastclip.tools.profiling.traffic import Traffic

GPUS_PER_NODE = 4  # in all of the paper's tables
MOST_NODES = 8  # in any of them: what is said of more is a guess

Beyond = Literal["no slower", "as before", "in a line"]  # how the pace continues beyond MOST_NODES


class Network(NamedTuple):
    """How fast bytes travel: ms for a megabyte (10⁶ bytes) of what one worker sends."""

    name: str
    pace: float  # between two nodes
    growth: float  # what each doubling of the nodes adds
    inside: float  # between the workers of one node

    def ms_per_megabyte(self, nodes: int, beyond: Beyond = "as before") -> float:
        if nodes == 1:
            return self.inside
        doublings = log2(nodes) - 1
        if nodes > MOST_NODES and beyond != "as before":
            doublings = log2(MOST_NODES) - 1
            if beyond == "in a line":  # of the same slope as at MOST_NODES
                doublings += (nodes - MOST_NODES) / (MOST_NODES * log(2))
        return self.pace + self.growth * doublings

    @property
    def bits_per_second(self) -> float:
        """What a worker gets of it between two nodes."""
        return 8e9 / self.pace


class Hiding(NamedTuple):
    """How much of the communication hides behind computation."""

    of_computation: float  # φ: the share of the computation behind which anything can hide
    of_weights: float  # ψ: the share that can hide of the weights' communication without the last bucket

    def share(self, buckets: int) -> float:
        """Of all of the weights' communication: what can hide of it."""
        return self.of_weights * (1 - 1 / buckets)


class ErrorSize(NamedTuple):
    """Of relative errors, without their signs."""

    mean: float
    largest: float


class ModelErrors(NamedTuple):
    """How wrong the model is on the paper's cells with more than one node."""

    step_seen: ErrorSize
    step_unseen: ErrorSize  # on tables left out of the fit
    ratio_seen: ErrorSize  # of the step of FastCLIP-v3 over that of OpenCLIP
    ratio_unseen: ErrorSize
    ratio_one: ErrorSize  # of taking both algorithms to be equally fast


# The fit: `python -m benchmarks.plan_fit` prints these, and a test compares them.
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

ETHERNET = {"10gbe": 10e9, "25gbe": 25e9, "100gbe": 100e9}  # line rates in bits a second; for one line a node
MEASURED = {
    "ib": "the paper's InfiniBand cluster",
    "slingshot-1": "the paper's first Slingshot cluster",
    "slingshot-2": "the paper's second Slingshot cluster",
}
NETWORKS = (*ETHERNET, *MEASURED)


class StepTime(NamedTuple):
    """Where the time of a step goes, in ms."""

    computation: float
    others: float  # neither computation nor communication: the host's own work, waiting for data
    communication: float
    hidden: float  # communication while something is computed

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
    beyond: Beyond = "as before",
) -> StepTime:
    """The time of a step.

        sent = step_traffic("fastclip-v3", workers=4, local_batch=32, features=64, trained_bytes=13_000_000)
        predict_step(sent, 4, CLUSTERS["ib"], computation=80.0).total

    Args:
        computation: ms a step that each worker computes at its local batch.
        others: ms a step in which it neither computes nor communicates.
    """
    pace = network.ms_per_megabyte(nodes, beyond)
    weights, exchange = traffic.weights / 1e6 * pace, traffic.exchange / 1e6 * pace
    hidden = min(hiding.of_computation * computation, hiding.share(traffic.buckets) * weights)
    return StepTime(computation, others, weights + exchange, hidden)


class Bounds(NamedTuple):
    """A network, and the fastest and the slowest that it may turn out to be."""

    fast: Network
    likely: Network
    slow: Network


def check_network(name: str | None) -> str:
    """The name; ValueError if it is missing or not known."""
    if name is None or name not in NETWORKS:
        problem = f"{name} is unknown.{did_you_mean(name.lower(), NETWORKS)}" if name else "is missing."
        raise ValueError(f"--network {problem} Choose one of: {', '.join(NETWORKS)}.")
    return name


def bounds(name: str) -> Bounds:
    """What is known of a network of this name."""
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
    """A line of known rate at each worker's end, and what such hosts take themselves, one after the other."""
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
    """The step on the likely network; its range from the bounds, widened by the model's own error."""

    def step(network: Network, beyond: Beyond) -> StepTime:
        return predict_step(traffic, nodes, network, computation=computation, others=others, beyond=beyond)

    low, high = step(network.fast, "no slower").total, step(network.slow, "in a line").total
    return Prediction(
        step(network.likely, "as before"),
        max(computation + others, low / (1 + error)),  # no network makes it faster than that
        high / (1 - error),
    )
