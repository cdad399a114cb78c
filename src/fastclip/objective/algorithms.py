"""The paper's algorithms as rows of a table: a loss, an inner schedule, a temperature rule (Table 1).

Defaults are the paper's for its medium setting (CC3M, 37 epochs, batch 1024).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil, inf, isfinite, log
from typing import Any, Literal, get_args

from fastclip.errors import OptionError
from fastclip.objective.schedules import cosine

Loss = Literal["MBCL", "GCL", "RGCL", "RGCL-g", "SigLIP"]
Schedule = Literal["constant", "cosine"]
InnerSchedule = Schedule | Literal["adaptive"]
Negatives = Literal["all", "distinct"]
Temperature = Literal["constant", "learnable", "individual"]
Estimator = Literal["paper", "released"]

# Table tuned_gamma, Medium: γ and γ_min of a row whose schedule is changed; E is half of the epochs
GAMMA: dict[Schedule, float] = {"constant": 0.6, "cosine": 0.2}
GAMMA_DECAY_EPOCHS = 18
SCENT_GAMMA = 0.1  # the minimum γ of `scent`
RHO_SHARE = 0.7  # ρ by rule, as a share of log(B−1): docs/choosing.md has the evidence
TAU_BETAS = (0.9, 0.999)  # Table default_hyperparams, Medium
TAU_MAX = 1.0
EPSILON = 1e-14  # all settings except xLarge, which has 1e-6
TILE_MIB = 256


@dataclass(frozen=True)
class Algorithm:
    """One row of the table."""

    name: str
    loss: Loss
    """The objective, by its name in the paper."""
    inner_schedule: InnerSchedule | None
    """Schedule of γ, the learning rate of the estimators u; None without estimators. `adaptive`: a separate γ
    for each sample, which follows its u."""
    temperature: Temperature
    """One constant τ, one learned τ, or one learned τ per sample and side."""
    tau: float
    """The (initial) temperature."""
    gamma: float | None = None
    """γ of a constant schedule, γ_min of a cosine one (Table tuned_gamma), the minimum of an adaptive one."""
    gamma_decay_epochs: int | None = None
    """E, the length of the cosine (Table tuned_gamma)."""
    tau_lr: float | None = None
    """Learning rate of τ."""
    peer: Literal["ClipLoss", "SigLipLoss"] | None = None
    """The open_clip class that computes it; None for GlobalContrastiveLoss."""
    logit_bias: bool = False
    """Whether the model has a learned logit bias, as in SigLIP."""
    slow_tau: bool = False
    """Whether τ learns at a third of its rate while below 0.03 (section on FastCLIP-v3)."""

    @property
    def fcco(self) -> bool:
        """Whether it has an estimator u per sample (finite-sum coupled compositional optimization)."""
        return self.inner_schedule is not None

    @property
    def robust(self) -> bool:
        """Whether its loss has a radius ρ."""
        return self.loss in ("RGCL", "RGCL-g")

    @property
    def tau_power(self) -> int:
        """1 if a sample's loss is multiplied by τ; 0 for v0 and the mini-batch losses."""
        return int(self.fcco and not (self.loss == "GCL" and self.temperature == "learnable"))


_ROWS = (
    # The paper gives no initial τ for OpenCLIP: 0.07 is open_clip's. It learns at the model's rate.
    Algorithm("openclip", "MBCL", None, "learnable", tau=0.07, tau_lr=1e-3, peer="ClipLoss"),
    Algorithm("sogclr", "GCL", "constant", "constant", tau=0.03, gamma=0.6),
    Algorithm("isogclr", "RGCL", "constant", "individual", tau=0.03, gamma=0.6, tau_lr=1e-2),
    # The paper gives no learning rate for v0's τ: we use the model's, like the work that v0 builds on.
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
        slow_tau=True,
    ),
    # Not in the paper's table. SCENT is v3 with a separate γ for each sample; SigLIP starts at 1/τ = 10;
    # `mbcl` is OpenCLIP's loss in our kernel.
    Algorithm(
        "scent",
        "RGCL-g",
        "adaptive",
        "learnable",
        tau=0.07,
        gamma=SCENT_GAMMA,
        tau_lr=2e-4,
        slow_tau=True,
    ),
    Algorithm(
        "siglip", "SigLIP", None, "learnable", tau=0.1, tau_lr=1e-3, peer="SigLipLoss", logit_bias=True
    ),
    Algorithm("mbcl", "MBCL", None, "learnable", tau=0.07, tau_lr=1e-3),
)
ALGORITHMS: dict[str, Algorithm] = {row.name: row for row in _ROWS}


@dataclass(frozen=True)
class LossOptions:
    """Hyperparameters of the algorithm; defaults come from the recipe's row for it."""

    tau: float | None = None
    """The (initial) temperature."""
    tau_lr: float | None = None
    """Learning rate of τ, without warm-up or decay; fastclip-v3 uses a third of it while τ < 0.03."""
    tau_min: float | None = None
    """Lower bound of τ; default: 0.01."""
    tau_betas: tuple[float, float] | None = None
    """Adam's betas for individual temperatures."""
    rho: float | None = None
    """Radius ρ of the robust losses; default: by loss.rho_share."""
    rho_share: float | None = None
    """ρ as a share of log(B−1), the largest possible radius at γ = 1; default: 0.7."""
    gamma: float | Literal["auto"] | None = None
    """Rate γ of the estimators u: γ of a constant schedule, the final γ_min of a cosine one. `auto`: a γ_min
    that suits the number of epochs, approached over all of them. For scent, the minimum γ."""
    gamma_schedule: Schedule | None = None
    """Schedule of γ per epoch: `constant`, or `cosine` from 1 down to loss.gamma."""
    gamma_decay_epochs: int | None = None
    """Length E of the cosine; default: half of the epochs, or all of them with loss.gamma=auto."""
    epsilon: float | None = None
    """ε inside the logarithm; default: 1e-14."""
    negatives: Negatives | None = None
    """`all` other pairs of a batch (default), or `distinct`: only those with a different caption."""
    estimator: Estimator | None = None
    """`paper`, or `released`: the temperature gradient and loss scale of the authors' code."""
    wire_dtype: Literal["float16", "bfloat16"] | None = None
    """Send features between ranks in `float16` or `bfloat16`: half the traffic."""
    tile_mib: int | None = None
    """Memory for similarities, in MiB; if they need more, they are computed twice, in tiles. Default: 256."""

    def given(self) -> dict[str, Any]:
        """The options that are set."""
        return {name: value for name, value in vars(self).items() if value is not None}


OPTION_NAMES = tuple(field.name for field in fields(LossOptions))


@dataclass(frozen=True)
class Settings:
    """An algorithm's row with the user's options applied: all values of the loss, checked."""

    algorithm: Algorithm
    gamma_schedule: InnerSchedule | None
    gamma: float
    """γ of a constant schedule, γ_min of a cosine one, the minimum γ of scent; 1 without estimators."""
    gamma_decay_epochs: int
    tau: float
    tau_lr: float
    tau_betas: tuple[float, float]
    tau_min: float
    rho: float | None
    """ρ; 0 without one, None while the batch size is unknown: see `rho_for`."""
    rho_share: float | None
    """The share of log(B−1) that ρ is; None if ρ was given, or there is none."""
    epsilon: float | None
    """ε; None for the mini-batch loss, where it is 1/(B−1)."""
    negatives: Negatives
    estimator: Estimator
    wire_dtype: str | None
    """Name of the torch dtype in which features are sent; None sends them unchanged."""
    tile_mib: float
    """Memory for similarities, in MiB; may be a fraction here."""

    @property
    def scale(self) -> float:
        """Factor of the loss: ½ for the mini-batch loss (as in open_clip) and in the released code."""
        return 0.5 if self.algorithm.loss == "MBCL" or self.estimator == "released" else 1.0

    @property
    def log_epsilon(self) -> float | None:
        """log ε; None for the mini-batch loss, where it is −log of the number of negatives."""
        if self.epsilon is None:
            return None
        return log(self.epsilon) if self.epsilon > 0 else -inf

    @property
    def adaptive(self) -> bool:
        """Whether each sample has its own γ."""
        return self.gamma_schedule == "adaptive"

    def rho_for(self, batch: int) -> float:
        """ρ for this global batch size."""
        if self.rho is not None:
            return self.rho
        assert self.rho_share is not None
        return self.rho_share * log(batch - 1)

    def gamma_at(self, epoch: int) -> float:
        """γ in this epoch (the paper's section on the inner LR schedule); the minimum γ of scent."""
        if self.gamma_schedule != "cosine":
            return self.gamma
        return cosine(epoch, self.gamma_decay_epochs, start=1.0, end=self.gamma)


def find_algorithm(name: str) -> Algorithm:
    """Return the row with this name."""
    if name not in ALGORITHMS:
        raise OptionError.unknown("algorithm", name, ALGORITHMS)
    return ALGORITHMS[name]


def resolve(
    name: str,
    options: LossOptions | None = None,
    *,
    batch: int | None = None,
    epochs: float | None = None,
    rate: float = 1.0,
) -> Settings:
    """Apply options to the algorithm's row; refuse options without effect.

    Args:
        batch: global batch size, on which ρ depends; None: not known yet.
        epochs: length of the run, on which gamma=auto and the default length of γ's cosine depend.
        rate: factor of tau_lr, as learning rates scale with the batch size.
    """
    row, given = find_algorithm(name), options or LossOptions()
    if epochs is not None and not 0 < epochs < inf:
        raise OptionError("epochs", epochs, "must be finite and above 0", example=20)
    schedule: InnerSchedule | None = given.gamma_schedule or row.inner_schedule
    useless = inapplicable_options(row, schedule)
    for option, value in given.given().items():
        if option in useless:
            rule = f"has no effect with {row.name}: {useless[option]}"
            raise OptionError(option, value, rule, advice="Omit it.")
    if given.gamma_schedule not in (None, *get_args(Schedule)):
        raise OptionError.unknown("gamma_schedule", schedule, get_args(Schedule))
    default_gamma = (
        row.gamma if given.gamma_schedule in (None, row.inner_schedule) else GAMMA[given.gamma_schedule]
    )
    gamma, decay_epochs = given.gamma, GAMMA_DECAY_EPOCHS if epochs is None else max(1, round(epochs / 2))
    if isinstance(gamma, str):
        gamma, decay_epochs = _gamma_by_rule(gamma, schedule, epochs)
    settings = Settings(
        algorithm=row,
        gamma_schedule=schedule,
        gamma=_first(gamma, default_gamma, 1.0),
        gamma_decay_epochs=_first(given.gamma_decay_epochs, decay_epochs),
        tau=_first(given.tau, row.tau),
        tau_lr=_first(given.tau_lr, row.tau_lr, 0.0) * rate,
        tau_betas=_first(given.tau_betas, TAU_BETAS),
        tau_min=_first(given.tau_min, 0.01),
        **_rho(row, given, batch),
        epsilon=_first(given.epsilon, EPSILON) if row.fcco else None,
        negatives=_first(given.negatives, "all"),
        estimator=_first(given.estimator, "paper"),
        wire_dtype=given.wire_dtype,
        tile_mib=_first(given.tile_mib, TILE_MIB),
    )
    _check(settings)
    if settings.estimator == "released" and row.robust and given.rho is None and given.rho_share is None:
        rule = "needs its own rho: its τ settles at another radius"
        raise OptionError("estimator", settings.estimator, rule, advice="The paper's are 6.5 to 16.")
    return settings


def inapplicable_options(row: Algorithm, schedule: InnerSchedule | None) -> dict[str, str]:
    """Options without effect for an algorithm with this schedule of γ, and the reason for each."""
    if row.peer:
        reason = "it is open_clip's own loss, whose only option is loss.tau, the initial τ"
        return {name: reason for name in OPTION_NAMES if name != "tau"}
    useless: dict[str, str] = {}
    if not row.fcco:
        useless |= dict.fromkeys(("gamma", "gamma_schedule"), "it has no estimators u")
        useless["epsilon"] = "its ε is 1/(B−1)"
    if row.inner_schedule == "adaptive":
        useless["gamma_schedule"] = "its γ follows each estimator u"
    if schedule != "cosine":
        useless["gamma_decay_epochs"] = "its γ does not follow a cosine"
    if row.temperature == "constant":
        useless["tau_lr"] = "its τ is constant"
    if row.temperature != "individual":
        useless["tau_betas"] = "only individual temperatures have their own Adam"
    if not row.robust:
        useless |= dict.fromkeys(("rho", "rho_share"), "its loss has no ρ")
    return useless


def written_options(settings: Settings, options: LossOptions) -> LossOptions:
    """All options that apply to this algorithm, for config.yaml; tau_lr before its scaling."""
    omitted = inapplicable_options(settings.algorithm, settings.gamma_schedule).keys() | {"tile_mib"}
    if settings.rho_share is not None:
        omitted |= {"rho"}  # derived from rho_share
    if options.gamma == "auto":
        omitted |= {"gamma_decay_epochs"}  # derived from the epochs
    values = {name: getattr(settings, name, None) for name in OPTION_NAMES if name not in omitted}
    if "tau_lr" in values:
        values["tau_lr"] = settings.algorithm.tau_lr
    return LossOptions(**values | options.given())


def _first(*values):
    """The first value that is not None."""
    return next(value for value in values if value is not None)


_NOT_NEGATIVE = "must be finite and at least 0"


def _gamma_by_rule(gamma: str, schedule: InnerSchedule | None, epochs: float | None) -> tuple[float, int]:
    """γ_min and the length of its cosine for a run of this length, as in DRRho-CLIP."""
    if gamma != "auto":
        raise OptionError("gamma", gamma, "must be auto or a number in (0, 1]", example=GAMMA["cosine"])
    if schedule != "cosine":
        advice = "Pass a number." if schedule == "adaptive" else "Pass a number, or gamma_schedule=cosine."
        raise OptionError("gamma", gamma, "is a rule for the cosine schedule", advice=advice)
    if epochs is None:
        raise OptionError("gamma", gamma, "requires the number of epochs", advice="Pass epochs too.")
    return min(1.0, 4.177 * epochs**-0.7265), ceil(epochs)


def _rho(row: Algorithm, given: LossOptions, batch: int | None) -> dict[str, float | None]:
    """ρ as it was given, or by rule."""
    share = given.rho_share
    if given.rho is not None and share is None:
        return {"rho": given.rho, "rho_share": None}
    if not row.robust:
        return {"rho": 0.0, "rho_share": None}
    if given.rho is not None:
        advice = "Set only one of them, and the other to null if the recipe sets it."
        raise OptionError("rho", given.rho, f"conflicts with loss.rho_share={share}", advice=advice)
    share = RHO_SHARE if share is None else share
    if not 0 <= share < inf:
        raise OptionError("rho_share", share, _NOT_NEGATIVE, example=RHO_SHARE)
    return {"rho": None if batch is None else share * log(batch - 1), "rho_share": share}


def _check(s: Settings) -> None:
    row = s.algorithm
    if not 0 < s.gamma <= 1:
        raise OptionError("gamma", s.gamma, "must be in (0, 1]", example=GAMMA["cosine"])
    if s.gamma_decay_epochs < 1:
        advice = "Half of the epochs is a good value."
        raise OptionError("gamma_decay_epochs", s.gamma_decay_epochs, "must be at least 1", advice=advice)
    if not 0 < s.tau_min <= TAU_MAX:
        raise OptionError("tau_min", s.tau_min, f"must be in (0, {TAU_MAX:g}]", example=0.01)
    if not s.tau_min <= s.tau <= TAU_MAX:
        rule = f"must be in [{s.tau_min:g}, {TAU_MAX:g}] (from τ_min to the maximum)"
        raise OptionError("tau", s.tau, rule, example=max(row.tau, s.tau_min))
    if not (s.tau_lr >= 0 and isfinite(s.tau_lr)):
        raise OptionError("tau_lr", s.tau_lr, _NOT_NEGATIVE, example=row.tau_lr)
    if len(s.tau_betas) != 2 or not all(0 <= beta < 1 for beta in s.tau_betas):
        raise OptionError("tau_betas", s.tau_betas, "must be two numbers in [0, 1)", example=TAU_BETAS)
    if s.rho is not None and not (s.rho >= 0 and isfinite(s.rho)):
        raise OptionError("rho", s.rho, _NOT_NEGATIVE, example=2.5)
    check_tile_mib(s.tile_mib)
    if s.epsilon is not None and not (s.epsilon >= 0 and isfinite(s.epsilon)):
        raise OptionError("epsilon", s.epsilon, _NOT_NEGATIVE, example=EPSILON)
    if s.negatives not in get_args(Negatives):
        raise OptionError.unknown("negatives", s.negatives, get_args(Negatives))
    if s.estimator not in get_args(Estimator):
        raise OptionError.unknown("estimator", s.estimator, get_args(Estimator))
    if s.estimator == "released" and not _has_released(row):
        names = ", ".join(name for name, other in ALGORITHMS.items() if _has_released(other))
        advice = f"Omit it, or choose an algorithm with estimators u and one τ: {names}."
        raise OptionError("estimator", s.estimator, f"is not defined for {row.name}", advice=advice)


def check_tile_mib(tile_mib: float) -> None:
    """Refuse a budget without memory. (Fractions of a MiB are for tests.)"""
    if not tile_mib > 0:
        raise OptionError("tile_mib", tile_mib, "must be at least 1", example=TILE_MIB)


def _has_released(row: Algorithm) -> bool:
    """The authors' code has the paper's algorithms with estimators u and one τ."""
    return row.fcco and row.temperature != "individual" and row.inner_schedule != "adaptive"
