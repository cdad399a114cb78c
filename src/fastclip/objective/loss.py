"""GlobalContrastiveLoss: any algorithm of the paper as a module, with its τ and its estimators.

Shapes: b local batch, B = K·b global batch over K ranks, d features; a last dimension of 2 holds the two
sides. The computation itself is in `one_step.py`.
"""

from __future__ import annotations

import logging
from math import isnan, log, nan
from typing import Any

import torch
from torch import Tensor, nn

from fastclip.errors import InputError, OptionError
from fastclip.objective import kernel, saved_state, temperature
from fastclip.objective.algorithms import (
    OPTION_NAMES,
    RHO_SHARE,
    LossOptions,
    Settings,
    check_tile_mib,
    resolve,
)
from fastclip.objective.exchange import Exchange, Pending
from fastclip.objective.groups import Groups, groups_of
from fastclip.objective.input_checks import InputChecks
from fastclip.objective.loss_step import LossOutput, LossStep
from fastclip.objective.one_step import After, Before, one_step
from fastclip.objective.sample_state import (
    Columns,
    Fetch,
    SampleState,
    Written,
    keep_precise,
)
from fastclip.text import did_you_mean

logger = logging.getLogger(__name__)


class GlobalContrastiveLoss(nn.Module):
    """A contrastive loss over the whole data set, estimated from small batches.

        loss = GlobalContrastiveLoss("fastclip-v3", num_samples=len(dataset))
        out = loss(image_features, text_features, index)  # unit length; each pair's number in the data set
        out.value.backward()

    With several ranks, build it after `init_process_group`, pass each rank its own part of the batch, and
    average the model's gradients (DDP does). Give `loss.parameter_groups()` to the optimizer, and call
    `loss.set_epoch(e)` at the start of each epoch. For validation call `loss.evaluate(image_features,
    text_features)`, which uses no estimators; nor does the loss itself after `loss.eval()`, and it then
    ignores `index`.

    To save it, call `loss.state_dict()` on every rank; rank 0 gets the whole state, which any number of ranks
    can load. `sharded_state_dict()` is the form for torch.distributed.checkpoint.

    Args:
        algorithm: a name from `fastclip.ALGORITHMS`, except the peers `openclip` and `siglip`; or Settings.
        num_samples: the number of pairs in the data set; ids are in [0, num_samples).
        wire_dtype: dtype in which features are sent (float16 halves the traffic); None: unchanged.
        tile_mib: memory for similarities, in MiB; if they need more, they are computed twice, in tiles.
        process_group: the ranks; None means all.
        device: where the state is; None means torch's default device. `loss.to(…)` moves it too.
        epochs: length of the training, which gamma="auto" requires; half of it is the default length of a
            cosine of γ.
        options: hyperparameters of the algorithm; defaults are the paper's, except for ρ:
            gamma: γ of a constant schedule, the final γ_min of a cosine one; in (0, 1]. "auto": a γ_min that
                suits `epochs`, approached over all of them. For scent, the minimum γ.
            gamma_schedule: "constant" or "cosine" (per epoch, from 1 down to gamma).
            gamma_decay_epochs: length E of the cosine; half of your epochs is a good value.
            tau: the (initial) temperature.
            tau_lr: learning rate of τ: of the group in `parameter_groups()`, or of individual temperatures.
            tau_betas: Adam's betas for individual temperatures.
            tau_min: lower bound of τ.
            rho: radius ρ of the robust losses (isogclr, fastclip-v2, fastclip-v3, scent).
            rho_share: ρ as a share of log(B−1), B the global batch of the first training step; default: 0.7.
            epsilon: ε inside the logarithm; the paper uses 1e-6 for its largest data set.
            negatives: "all", or "distinct": samples of one `group` are not negatives of each other.
            estimator: "paper", or "released" for the τ gradient and loss scale of the authors' code.

    `stats`: `loss`, the value; `radius`, mean(q − ℓ), which ρ steers (at most log(B−1) while γ = 1); `tau`;
    `log_u_q05`, `log_u_q50`, `log_u_q95`, quantiles in the batch; `unvisited`, the share of the data set not
    seen yet; `max_weight`, the batch's largest g/(ε + u), at most 1/γ; `left_out`, with distinct negatives
    the number that a sample loses, on average; `gamma`, scent's mean γ.
    """

    state_dict_timeout = 50.0
    """Seconds that `state_dict()` waits for the other ranks to call it."""

    def __init__(
        self,
        algorithm: str | Settings,
        num_samples: int,
        *,
        wire_dtype: torch.dtype | str | None = None,
        tile_mib: float | None = None,
        process_group: torch.distributed.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        epochs: float | None = None,
        **options: Any,
    ):
        super().__init__()
        self.settings = _settings(algorithm, options, epochs)
        self.algorithm = self.settings.algorithm
        if self.algorithm.peer:
            advice = f"Use open_clip's {self.algorithm.peer}, or mbcl for OpenCLIP's loss."
            raise OptionError(
                "algorithm", self.algorithm.name, "is a loss of open_clip itself", advice=advice
            )
        if not isinstance(num_samples, int) or num_samples < 2:
            raise InputError("num_samples", f"is {num_samples!r}; it must be an integer of at least 2.")
        tile_mib = self.settings.tile_mib if tile_mib is None else tile_mib
        check_tile_mib(tile_mib)
        wire_dtype = self.settings.wire_dtype if wire_dtype is None else wire_dtype
        wire_dtype = getattr(torch, wire_dtype) if isinstance(wire_dtype, str) else wire_dtype
        if wire_dtype is not None and not wire_dtype.is_floating_point:
            raise OptionError("wire_dtype", wire_dtype, "must be a float dtype", example=torch.float16)
        self.num_samples, self.wire_dtype, self.tile_mib = num_samples, wire_dtype, tile_mib
        self.exchange = Exchange(process_group)
        device = torch.get_default_device() if device is None else torch.device(device)
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        individual = self.algorithm.temperature == "individual"
        self.sample_state: SampleState | None = None
        if self.algorithm.fcco:
            own_tau = self.settings.tau if individual else None
            self.sample_state = SampleState(num_samples, self.exchange, own_tau, device, dtype)
        self.log_scale: nn.Parameter | None = None  # log(1/τ) of a global temperature
        if not individual:
            log_scale = torch.tensor(-log(self.settings.tau), device=device, dtype=dtype)
            self.log_scale = nn.Parameter(log_scale, requires_grad=self.algorithm.temperature == "learnable")
        self.set_epoch(0)
        if self.algorithm.fcco and self.settings.gamma == 1 and self.exchange.rank == 0:
            logger.info("γ = 1: the estimators have no memory of earlier batches.")
        self.rho: float | None = None  # ρ, from the first training step on, when the batch is known; saved
        self._begun = 0  # steps; only the last one may be undone
        self._checks = InputChecks(self.settings, num_samples if self.algorithm.fcco else None, self.exchange)

    @property
    def device(self) -> torch.device:
        """Where the state and τ are; features must be there too."""
        return (self.sample_state or self.log_scale).device  # type: ignore[union-attr]

    def set_epoch(self, epoch: int) -> None:
        """Move γ along its schedule."""
        if epoch < 0:
            raise InputError("epoch", f"is {epoch}; it must be at least 0.")
        self.epoch, self.gamma = epoch, self.settings.gamma_at(epoch)

    def parameter_groups(self) -> list[dict]:
        """Groups for the optimizer: the learnable τ, with its own rate and no weight decay."""
        if self.log_scale is None or not self.log_scale.requires_grad:
            return []
        return [{"params": [self.log_scale], "lr": self.settings.tau_lr, "weight_decay": 0.0}]

    def begin(self, index: Tensor | None = None, group: Tensor | None = None) -> LossStep:
        """Start a step before the encoders run, so that fetching the estimators overlaps with them.

            step = loss.begin(index)
            image_features = encode_image(images)
            step.images(image_features)
            out = step.forward(image_features, encode_text(texts))

        `loss(image_features, text_features, index)` is the same without the overlap.
        """
        step = LossStep(self, index, group, self.training)
        if self.sample_state is not None and step.training:
            checked = self._checks.index(index)
            self._checks.group(group, step.training, len(checked))
            self._checks.batch(checked.shape[0], self.device, step.training)
            step.start_fetch(checked)
        return step

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        index: Tensor | None = None,
        group: Tensor | None = None,
    ) -> LossOutput:
        """The loss of a batch. `index` is optional for `mbcl`, which has no estimators, and in eval mode.

        `group` is for `negatives="distinct"`: 64-bit integers, equal for samples that are not negatives of
        each other, e.g. a hash of the caption (`fastclip.caption_group`).
        """
        return LossStep(self, index, group, self.training).forward(image_features, text_features)

    def evaluate(
        self, image_features: Tensor, text_features: Tensor, group: Tensor | None = None
    ) -> LossOutput:
        """The loss of held-out pairs: the objective with u = g, the batch's own estimate, as for γ = 1.

        No estimator is read or written. Individual temperatures are replaced by their mean. All ranks must
        call it. In eval mode, `loss(image_features, text_features)` is the same. Without `group`, all other
        pairs are negatives.
        """
        return LossStep(self, None, group, training=False).forward(image_features, text_features)

    def sharded_state_dict(self) -> dict[str, Tensor]:
        """τ and each rank's own estimators, not copied: DTensors on several ranks, plain tensors on one.

        torch.distributed.checkpoint saves them, and loads them into those of another number of ranks; then
        pass them to `load_state_dict`. No rank holds more than its part.
        """
        state = {name: parameter.detach() for name, parameter in self.named_parameters()} | self._saved_rho()
        return state if self.sample_state is None else state | saved_state.sharded(self.sample_state)

    def _saved_rho(self) -> dict[str, Tensor]:
        """ρ, if the first training step determines it; NaN before."""
        if self.settings.rho is not None:
            return {}
        return {"rho": torch.tensor(nan if self.rho is None else self.rho, dtype=torch.float64)}

    def mean_tau(self) -> float:
        """The temperature as one number, the mean of individual ones; all ranks must call it."""
        if self.log_scale is not None:
            return temperature.clamped_tau(self.log_scale, self.settings.tau_min)
        return float(self._sum_of_tau()) / (2 * self.num_samples)

    def _sum_of_tau(self) -> Tensor:
        """Of all individual temperatures, in float64."""
        state = self.sample_state
        assert state is not None
        return self.exchange.sum(state.columns["tau"][: state.held].double().sum()).wait()

    def _step(
        self,
        features: kernel.Features,
        fetch: Fetch | None,
        group_B: Tensor | None,
        needs: tuple[bool, bool],
        training: bool,
    ) -> tuple[After, Written | None]:
        """Algorithm 1 on the gathered features, with the new estimators written back."""
        B, dtype = len(features.image_Bd), features.image_bd.dtype
        log_u_B2, tau_B2 = (None, None) if fetch is None else fetch.wait()
        tau_B2 = self._one_tau(dtype).expand(B, 2) if tau_B2 is None else tau_B2.to(dtype)
        groups = None if group_B is None else groups_of(group_B, dtype)
        if training and self.rho is None:
            self._bind_rho(B, groups)
        rho = self.settings.rho_for(B) if self.rho is None else self.rho
        before = Before(self.gamma, rho, tau_B2, log_u_B2, groups)
        tile_bytes = int(self.tile_mib * (1 << 20))
        after = one_step(self.settings, features, before, self._share, needs, tile_bytes)
        if fetch is None:
            return after, None
        written = self._write_back(fetch, after)
        after.stats["unvisited"] = 1 - self.sample_state.visited / self.num_samples  # type: ignore[union-attr]
        return after, written

    def _gather_features(self, early: Pending | None, image: Tensor, text: Tensor) -> kernel.Features:
        """Local and global features in float32 or float64; local ones are rounded like the others."""
        pending = early or self._send(image), self._send(text)
        dtype = torch.float64 if image.dtype == torch.float64 else torch.float32
        image_Bd, text_Bd = (features.wait().to(dtype) for features in pending)
        b = len(image)
        if len(image_Bd) != len(text_Bd):
            raise RuntimeError(
                f"images got {len(image_Bd)} pairs, but forward got {len(text_Bd)}: pass the same features."
            )
        local = slice(self.exchange.rank * b, (self.exchange.rank + 1) * b)
        image_bd = image_Bd[local]
        if early is not None:  # features other than those sent must not go unnoticed: NaN
            same = (image_bd == image.detach().to(self.wire_dtype or image.dtype).to(dtype)).all()
            image_bd = torch.where(same, image_bd, torch.nan)
        return kernel.Features(image_bd, text_Bd[local], image_Bd, text_Bd, local.start)

    def _send(self, features: Tensor) -> Pending:
        return self.exchange.gather(features.detach().to(self.wire_dtype or features.dtype))

    def _one_tau(self, dtype: torch.dtype) -> Tensor:
        """The temperature of all samples: the global one, or in evaluation the mean of individual ones."""
        if self.log_scale is None:
            return (self._sum_of_tau() / (2 * self.num_samples)).to(dtype)
        return (-temperature.clamped_log_scale(self.log_scale, self.settings.tau_min).to(dtype)).exp()

    def _share(self, rows_bc: Tensor, totals_2: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the global batch and each rank's totals, in one collective."""
        (b, c), K = rows_bc.shape, self.exchange.world_size
        packed = self.exchange.gather(torch.cat([rows_bc.flatten(), totals_2])[None]).wait()
        return packed[:, : b * c].reshape(K * b, c), packed[:, b * c :]

    def _write_back(self, fetch: Fetch, after: After) -> Written:
        def new(old: Columns) -> Columns:
            if self.log_scale is not None:
                return {"log_u": after.log_u_B2}
            tau = temperature.individual_step(self.settings, old, after.tau_grad_B2)
            return {"log_u": after.log_u_B2, **tau}

        assert self.sample_state is not None
        return self.sample_state.write(fetch, new, after.writable)

    def _bind_rho(self, B: int, groups: Groups | None) -> None:
        """On the first step. With γ = 1 no radius exceeds the log of the negatives, so τ would only fall."""
        s, largest = self.settings, log(B - 1) if groups is None else float(groups.log_negatives_B.mean())
        self.rho = s.rho_for(B)
        # the released code's gradient of τ settles at another radius, which has no such bound
        if not self.algorithm.robust or s.estimator == "released" or self.rho <= largest:
            return
        if self.exchange.rank == 0:
            logger.warning(
                "ρ = %.4g is out of reach: while γ = 1, the radius of a batch of B=%s pairs is at most the "
                "log of the number of negatives, %.2f, so τ falls, down to tau_min=%g. Use a smaller "
                "rho, e.g. %.2g, or a larger batch.",
                *(self.rho, f"{B:,}", largest, s.tau_min, RHO_SHARE * largest),
            )

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        """Every rank must call it; rank 0 gets the whole state, the others no rows."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: rho for name, rho in self._saved_rho().items()})
        if self.sample_state is not None:
            columns = saved_state.whole(self.sample_state, self.state_dict_timeout)
            destination.update({prefix + name: column for name, column in columns.items()})

    def _load_from_state_dict(
        self, state_dict, prefix, metadata, strict, missing, unexpected, errors
    ) -> None:
        """Every rank must call it, with a whole state or its own part of a sharded one."""
        if self.settings.rho is None and not isnan(rho := float(state_dict.pop(prefix + "rho", nan))):
            self.rho = rho
        if self.sample_state is not None:
            saved = {name: state_dict.pop(prefix + name, None) for name in self.sample_state.columns}
            missing.extend(prefix + name for name, column in saved.items() if column is None)
            if any(column is not None for column in saved.values()):
                problem = saved_state.load(self.sample_state, saved)
                if problem is not None:
                    errors.append(problem)
                self._begun += 1  # earlier steps can no longer be undone
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)

    def _apply(self, fn, recurse: bool = True) -> GlobalContrastiveLoss:
        """`.to(…)` and the like move the state too; it and log_scale stay in float32 or float64."""
        if self.sample_state is not None:
            self.sample_state.move(fn)
            self._begun += 1
        return super()._apply(lambda tensor: keep_precise(fn, tensor), recurse)

    def extra_repr(self) -> str:
        s = self.settings
        shown: dict[str, object] = {
            "tau": s.tau,
            "rho": (s.rho if self.rho is None else self.rho) if self.algorithm.robust else None,
            "rho_share": s.rho_share,
            "epsilon": s.epsilon,
        }
        if self.algorithm.fcco:
            shown |= {"gamma": s.gamma, "gamma_schedule": s.gamma_schedule}
        options = ", ".join(f"{name}={value}" for name, value in shown.items() if value is not None)
        return f"{self.algorithm.name!r}, num_samples={self.num_samples}, {options}"


def _settings(algorithm: str | Settings, options: dict[str, Any], epochs: float | None) -> Settings:
    if isinstance(algorithm, Settings):
        if options or epochs is not None:
            name = next(iter(options), "epochs")
            raise TypeError(f"{name} is already part of the Settings: change it there.")
        return algorithm
    for name in options:
        if name not in OPTION_NAMES:
            hint = did_you_mean(name, OPTION_NAMES) or f" Its options: {', '.join(OPTION_NAMES)}."
            raise TypeError(f"GlobalContrastiveLoss has no option {name!r}.{hint}")
    return resolve(algorithm, LossOptions(**options), epochs=epochs)
