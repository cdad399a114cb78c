"""The paper's algorithms as rows of a table: a loss, an inner schedule, a temperature rule (Table 1).

Defaults are the paper's for its medium setting (CC3M, 37 epochs, batch 1024).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf, isfinite, log
from typing import Any, Literal

from fastclip.objective.schedules import cosine
from fastclip.text import did_you_mean

Loss = Literal["MBCL", "GCL", "RGCL", "RGCL-g", "SigLIP"]
Schedule = Literal["constant", "cosine"]
Temperature = Literal["constant", "learnable", "individual"]
Estimator = Literal["paper", "released"]

# Table tuned_gamma, Medium: γ and γ_min, for a row whose schedule is changed; E is half of the epochs
GAMMA: dict[Schedule, float] = {"constant": 0.6, "cosine": 0.2}
GAMMA_DECAY_EPOCHS = 18
TAU_BETAS = (0.9, 0.999)  # Table default_hyperparams, Medium
TAU_MAX = 1.0
EPSILON = 1e-14  # all settings but xLarge, which takes 1e-6
TILE_MIB = 256


@dataclass(frozen=True)
class Algorithm:
    """One row of the table."""

    name: str
    loss: Loss
    """Which objective of the paper is minimised."""
    inner_schedule: Schedule | None
    """How γ, the learning rate of the estimators u, moves; None where there are no estimators."""
    temperature: Temperature
    """One τ that stays, one τ that learns, or one τ per sample and side that learns."""
    tau: float
    """The (initial) temperature."""
    gamma: float | None = None
    """γ of a constant schedule, γ_min of a cosine one (Table tuned_gamma)."""
    gamma_decay_epochs: int | None = None
    """E, the length of the cosine (Table tuned_gamma)."""
    tau_lr: float | None = None
    """Learning rate of τ."""
    rho: float | None = None
    """Radius ρ of the robust losses."""
    peer: Literal["ClipLoss", "SigLipLoss"] | None = None
    """open_clip's own class that computes it; None for GlobalContrastiveLoss."""
    logit_bias: bool = False
    """The model has a bias beside its temperature, as SigLIP's."""
    slow_tau: bool = False
    """τ takes a third of its rate while it is below 0.03 (Section on FastCLIP-v3)."""

    @property
    def fcco(self) -> bool:
        """Whether it keeps an estimator u per sample (finite-sum coupled compositional optimisation)."""
        return self.inner_schedule is not None

    @property
    def tau_power(self) -> int:
        """1 where the loss of a sample is multiplied by τ; 0 for v0 and the mini-batch losses."""
        return int(self.fcco and not (self.loss == "GCL" and self.temperature == "learnable"))


_ROWS = (
    # The paper gives no value for OpenCLIP's τ: 0.07 is open_clip's own, and learns at the model's rate.
    Algorithm("openclip", "MBCL", None, "learnable", tau=0.07, tau_lr=1e-3, peer="ClipLoss"),
    Algorithm("sogclr", "GCL", "constant", "constant", tau=0.03, gamma=0.6),
    Algorithm("isogclr", "RGCL", "constant", "individual", tau=0.03, gamma=0.6, tau_lr=1e-2, rho=9.0),
    # The paper gives no rate for v0's τ: ours is the model's, as in the works that v0 follows.
    Algorithm(
        "fastclip-v0", "GCL", "cosine", "learnable", tau=0.03, gamma=0.2, gamma_decay_epochs=18, tau_lr=1e-3
    ),
    Algorithm("fastclip-v1", "GCL", "cosine", "constant", tau=0.03, gamma=0.2, gamma_decay_epochs=18),
    Algorithm(
        "fastclip-v2",
        "RGCL",
        "cosine",
        "individual",
        tau=0.03,
        gamma=0.2,
        gamma_decay_epochs=18,
        tau_lr=1e-2,
        rho=7.0,
    ),
    Algorithm(
        "fastclip-v3",
        "RGCL-g",
        "cosine",
        "learnable",
        tau=0.07,
        gamma=0.2,
        gamma_decay_epochs=18,
        tau_lr=2e-4,
        rho=6.5,
        slow_tau=True,
    ),
    # Not in the paper's table. SigLIP starts at 1/τ = 10; `mbcl` is OpenCLIP's loss computed by our kernel.
    Algorithm(
        "siglip", "SigLIP", None, "learnable", tau=0.1, tau_lr=1e-3, peer="SigLipLoss", logit_bias=True
    ),
    Algorithm("mbcl", "MBCL", None, "learnable", tau=0.07, tau_lr=1e-3),
)
ALGORITHMS: dict[str, Algorithm] = {row.name: row for row in _ROWS}


@dataclass(frozen=True)
class LossOptions:
    """Values of the algorithm; what is left out comes from the recipe's row for it."""

    tau: float | None = None
    """The (initial) temperature."""
    tau_lr: float | None = None
    """Learning rate of τ, without warm-up and decay; fastclip-v3 takes a third of it while τ < 0.03."""
    tau_min: float | None = None
    """τ never falls below this; 0.01 if left out."""
    tau_betas: tuple[float, float] | None = None
    """Adam's betas for individual temperatures."""
    rho: float | None = None
    """Radius ρ of the robust losses."""
    rho_share: float | None = None
    """ρ as a share of log(B−1), the most that the radius can be at γ = 1: instead of rho, for small B."""
    gamma: float | None = None
    """Rate γ of the estimators u: the γ of a constant schedule, the final γ_min of a cosine one."""
    gamma_schedule: Schedule | None = None
    """How γ moves over the epochs: `constant`, or `cosine` from 1 down to `gamma`."""
    gamma_decay_epochs: int | None = None
    """Length E of the cosine; half of the epochs if left out."""
    epsilon: float | None = None
    """ε inside the logarithm; 1e-14 if left out."""
    estimator: Estimator | None = None
    """`paper`, or `released`: the temperature gradient and the scale of the authors' code."""
    wire_dtype: Literal["float16", "bfloat16"] | None = None
    """Send features between workers in `float16` or `bfloat16`: half the bytes."""
    tile_mib: int | None = None
    """Memory for similarities, MiB; those that need more are computed twice, in tiles. 256 if left out."""

    def given(self) -> dict[str, Any]:
        """Those that were not left out."""
        return {name: value for name, value in vars(self).items() if value is not None}


OPTION_NAMES = tuple(field.name for field in fields(LossOptions))


@dataclass(frozen=True)
class Settings:
    """An algorithm's row after the user's options: every value that the loss needs, checked."""

    algorithm: Algorithm
    gamma_schedule: Schedule | None
    gamma: float
    """γ of a constant schedule, γ_min of a cosine one; 1 where there are no estimators."""
    gamma_decay_epochs: int
    tau: float
    tau_lr: float
    tau_betas: tuple[float, float]
    tau_min: float
    rho: float
    epsilon: float | None
    """ε; None for the mini-batch loss, where it is 1/(B−1)."""
    estimator: Estimator
    wire_dtype: str | None
    """The torch dtype in which features travel; None sends them as they are."""
    tile_bytes: int
    """Memory for similarities."""

    @property
    def scale(self) -> float:
        """What multiplies the loss: ½ for the mini-batch loss (as in open_clip) and in the released code."""
        return 0.5 if self.algorithm.loss == "MBCL" or self.estimator == "released" else 1.0

    def log_epsilon(self, global_batch: int) -> float:
        """log ε, the mini-batch loss's 1/(B−1) included."""
        if self.epsilon is None:
            return -log(global_batch - 1)
        return log(self.epsilon) if self.epsilon > 0 else -inf

    def gamma_at(self, epoch: int) -> float:
        """γ in this epoch (the paper's section on the inner LR schedule)."""
        if self.gamma_schedule != "cosine":
            return self.gamma
        return cosine(epoch, self.gamma_decay_epochs, start=1.0, end=self.gamma)


def find_algorithm(name: str) -> Algorithm:
    """The row of this name; a misspelt name gets a suggestion."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    hint = did_you_mean(name, ALGORITHMS)
    raise ValueError(f"algorithm={name!r} is unknown.{hint} Choose one of: {', '.join(ALGORITHMS)}.")


def resolve(
    name: str,
    options: LossOptions | None = None,
    *,
    batch: int | None = None,
    epochs: float | None = None,
    rate: float = 1.0,
) -> Settings:
    """Fill what was left out from the algorithm's row, and refuse options that would have no effect.

    Args:
        batch: the global batch, of which rho_share is a share.
        epochs: of the run; the cosine of γ takes half of them if its length is left out.
        rate: what multiplies tau_lr, as the learning rate scales with the batch.
    """
    row, given = find_algorithm(name), options or LossOptions()
    schedule = given.gamma_schedule or row.inner_schedule
    useless = inapplicable_options(row, schedule)
    for option, value in given.given().items():
        if option in useless:
            raise ValueError(
                f"{option}={value!r} has no effect with {row.name}: {useless[option]}. Leave it out."
            )
    if schedule not in (None, "constant", "cosine"):
        raise ValueError(f"gamma_schedule={schedule!r} is unknown. Choose 'constant' or 'cosine'.")
    default_gamma = GAMMA[schedule] if schedule and schedule != row.inner_schedule else row.gamma
    half = GAMMA_DECAY_EPOCHS if epochs is None else max(1, round(epochs / 2))
    settings = Settings(
        algorithm=row,
        gamma_schedule=schedule,
        gamma=_first(given.gamma, default_gamma, 1.0),
        gamma_decay_epochs=_first(given.gamma_decay_epochs, half),
        tau=_first(given.tau, row.tau),
        tau_lr=_first(given.tau_lr, row.tau_lr, 0.0) * rate,
        tau_betas=_first(given.tau_betas, TAU_BETAS),
        tau_min=_first(given.tau_min, 0.01),
        rho=_first(_rho(given, batch), row.rho, 0.0),
        epsilon=_first(given.epsilon, EPSILON) if row.fcco else None,
        estimator=_first(given.estimator, "paper"),
        wire_dtype=given.wire_dtype,
        tile_bytes=_first(given.tile_mib, TILE_MIB) << 20,
    )
    _check(settings)
    return settings


def inapplicable_options(row: Algorithm, schedule: Schedule | None) -> dict[str, str]:
    """Options that have no effect with an algorithm under this schedule of γ, and why."""
    if row.peer:
        why = "it is open_clip's own loss and takes only tau, which learns at the model's rate"
        return {name: why for name in OPTION_NAMES if name != "tau"}
    useless: dict[str, str] = {}
    if not row.fcco:
        useless |= dict.fromkeys(("gamma", "gamma_schedule"), "it keeps no estimators u")
        useless["epsilon"] = "its ε is 1/(B−1)"
    if schedule != "cosine":
        useless["gamma_decay_epochs"] = "its γ does not follow a cosine"
    if row.temperature == "constant":
        useless["tau_lr"] = "its τ is constant"
    if row.temperature != "individual":
        useless["tau_betas"] = "only individual temperatures update themselves"
    if row.rho is None:
        useless |= dict.fromkeys(("rho", "rho_share"), "its loss has no ρ")
    return useless


def written_options(settings: Settings, options: LossOptions) -> LossOptions:
    """Every value that means something for this algorithm, to be written down; tau_lr before its scaling."""
    useless = inapplicable_options(settings.algorithm, settings.gamma_schedule)
    if options.rho_share is not None:
        useless["rho"] = "rho_share says it"
    values = {name: getattr(settings, name, None) for name in OPTION_NAMES if name not in useless}
    if "tau_lr" in values:
        values["tau_lr"] = settings.algorithm.tau_lr
    return LossOptions(**values | options.given())


def _first(*values):
    """The first that is not None."""
    return next(value for value in values if value is not None)


def _rho(given: LossOptions, batch: int | None) -> float | None:
    share = given.rho_share
    if share is None:
        return given.rho
    if given.rho is not None:
        raise ValueError(
            f"rho={given.rho} says the same thing as rho_share={share} in another way: "
            "give one of them, and null for the other if a recipe's row has it."
        )
    if not 0 <= share < inf:
        raise ValueError(f"rho_share={share} must be finite and not negative; try 0.6.")
    if batch is None:
        raise ValueError(f"rho_share={share} needs the global batch, which is not known here: give rho.")
    return share * log(batch - 1)


def _check(s: Settings) -> None:
    """An error names the field, its value, and a value that works."""
    if not 0 < s.gamma <= 1:
        raise ValueError(f"gamma={s.gamma} is outside (0, 1]. γ = 1 forgets the past; try {GAMMA['cosine']}.")
    if s.gamma_decay_epochs < 1:
        raise ValueError(
            f"gamma_decay_epochs={s.gamma_decay_epochs} must be at least 1; try half of your epochs."
        )
    if not 0 < s.tau_min <= s.tau <= TAU_MAX:
        raise ValueError(
            f"tau={s.tau} and tau_min={s.tau_min} must satisfy 0 < tau_min ≤ tau ≤ {TAU_MAX}; "
            f"try tau={s.algorithm.tau}, tau_min=0.01."
        )
    if not (s.tau_lr >= 0 and isfinite(s.tau_lr)):
        raise ValueError(f"tau_lr={s.tau_lr} must be finite and not negative; try {s.algorithm.tau_lr}.")
    if len(s.tau_betas) != 2 or not all(0 <= beta < 1 for beta in s.tau_betas):
        raise ValueError(f"tau_betas={s.tau_betas} must be two numbers in [0, 1); try {TAU_BETAS}.")
    if not (s.rho >= 0 and isfinite(s.rho)):
        raise ValueError(f"rho={s.rho} must be finite and not negative; try {s.algorithm.rho}.")
    if s.tile_bytes < 1:
        raise ValueError(f"tile_mib={s.tile_bytes >> 20} must be at least 1; try {TILE_MIB}.")
    if s.epsilon is not None and not (s.epsilon >= 0 and isfinite(s.epsilon)):
        raise ValueError(f"epsilon={s.epsilon} must be finite and not negative; try {EPSILON}.")
    if s.estimator not in ("paper", "released"):
        raise ValueError(f"estimator={s.estimator!r} is unknown. Choose 'paper' or 'released'.")
    if s.estimator == "released" and (not s.algorithm.fcco or s.algorithm.temperature == "individual"):
        raise ValueError(
            f"estimator='released' is not defined for {s.algorithm.name}; it exists for the algorithms with "
            "one τ and estimators u (sogclr, fastclip-v0, fastclip-v1, fastclip-v3). Leave it out."
        )
