"""What learns: the towers, the loss and the optimizer, and how they go into a checkpoint and out of it."""

from __future__ import annotations

from math import exp

from torch import Tensor

from fastclip.model import TwoTowers
from fastclip.objective.loss import GlobalContrastiveLoss
from fastclip.optim import Stepper, load_optimizer_tensors, optimizer_tensors
from fastclip.training.step import Loss, TrainStep


class Learner:
    """Everything that a step changes."""

    def __init__(self, towers: TwoTowers, loss: Loss, stepper: Stepper, step: TrainStep):
        self.towers, self.loss, self.stepper, self.step = towers, loss, stepper, step
        self._names = {parameter: f"model.{name}" for name, parameter in towers.named_parameters()}
        if isinstance(loss, GlobalContrastiveLoss) and loss.log_scale is not None:
            self._names[loss.log_scale] = "loss.log_scale"

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name: model.…, loss.… (the samples' state included), optimizer.…; no copies."""
        found = {f"model.{name}": tensor for name, tensor in self.towers.state_dict().items()}
        if isinstance(self.loss, GlobalContrastiveLoss):  # a peer's parameters are the model's
            found |= {f"loss.{name}": tensor for name, tensor in self.loss.state_dict().items()}
        moments, _ = optimizer_tensors(self.stepper.optimizer, self._names)
        return found | {f"optimizer.{name}": tensor for name, tensor in moments.items()}

    def facts(self) -> dict[str, object]:
        """What is not a tensor: the optimizer's count of steps, the gradient scaler's numbers."""
        _, facts = optimizer_tensors(self.stepper.optimizer, self._names)
        scaler = self.stepper.scaler
        return {"optimizer": facts, "scaler": None if scaler is None else scaler.state_dict()}

    def put_back(self, tensors: dict[str, Tensor], facts: dict) -> None:
        """Take up what `tensors` and `facts` gave. All workers must call it."""

        def named(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

        self.towers.load_state_dict(named("model."))
        if isinstance(self.loss, GlobalContrastiveLoss):
            self.loss.load_state_dict(named("loss."))
        load_optimizer_tensors(self.stepper.optimizer, self._names, named("optimizer."), facts["optimizer"])
        if self.stepper.scaler is not None:
            self.stepper.scaler.load_state_dict(facts["scaler"])

    def tau(self) -> float | None:
        """The temperature as one number, the mean of individual ones; None where the model holds it."""
        if not isinstance(self.loss, GlobalContrastiveLoss):
            return None
        if self.loss.log_scale is not None:
            return max(self.loss.settings.tau_min, min(1.0, exp(-float(self.loss.log_scale.detach()))))
        state = self.loss.sample_state
        assert state is not None
        total = self.loss.exchange.sum(state.columns["tau"][: state.held].double().sum()).wait()
        return float(total) / (2 * self.loss.num_samples)
