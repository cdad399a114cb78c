"""What a run tells: metrics.jsonl always, a display for people, TensorBoard and Weights & Biases on request.

Only rank 0 makes a `Telemetry`; the other ranks have `NullTelemetry`. Records hold Python numbers: nothing
here waits for a device. A training record is flat except for "time", which holds all that differs between two
identical runs; an evaluation's values are under "evaluation". Once a run has started, no failure here stops it.
"""

from __future__ import annotations

import logging
import secrets

from fastclip.run.folder import METRICS
from fastclip.run.metrics_file import MetricsFile, read_metrics
from fastclip.training.display import Display, Plan

log = logging.getLogger(__name__)
_NOT_INSTALLED = "{} is not installed: pip install 'fastclip[{}]', or leave it off."


class Telemetry:
    """Tells of a run; a context manager, for the display must be closed whatever happens.

    Args:
        plan: what does not change during the run.
        tensorboard: write events into the folder tensorboard/ of the run.
        wandb_project: Weights & Biases project to send the records to.
        config: the run's resolved config, for Weights & Biases.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        tensorboard: bool = False,
        wandb_project: str | None = None,
        config: dict | None = None,
    ):
        path = plan.run / METRICS
        self._metrics = MetricsFile(path)
        self._sinks: list[_TensorBoard | _WeightsAndBiases] = []
        if tensorboard:
            self._sinks.append(_TensorBoard(plan))
        if wandb_project is not None:
            self._sinks.append(_WeightsAndBiases(plan, wandb_project, config or {}))
        past = read_metrics(path) if plan.start_step and path.exists() else []
        self._display = Display(plan, [record for record in past if "evaluation" in record])

    def tick(self, step: int) -> None:
        """After each step, of which `step` are done now: moves the bars, twice a second at most."""
        self._display.tick(step)

    def log(self, record: dict) -> None:
        """Tell a training record."""
        self._metrics.write(record)
        spent = record.get("time", {})
        values = {f"train/{name}": value for name, value in record.items() if name not in ("step", "time")}
        self._send(record["step"], values | {f"time/{name}": value for name, value in spent.items()})
        self._display.log(record)

    def evaluated(self, record: dict) -> None:
        """Tell the values of an evaluation; "best" says whether it is the best so far."""
        self._metrics.write(record)
        self._send(record["step"], {f"evaluation/{name}": x for name, x in record["evaluation"].items()})
        self._display.evaluated(record)

    def message(self, text: str) -> None:
        """A line for people, above the live display."""
        self._display.message(text)

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def close(self, failed: bool = False) -> None:
        """Show and write what is left; safe to call twice."""
        self._display.close()
        self._metrics.flush()
        while self._sinks:
            sink = self._sinks.pop(0)
            try:
                sink.close(failed)
            except Exception as error:
                log.warning("%s did not close: %s", sink.name, error)

    def _send(self, step: int, values: dict[str, float | None]) -> None:
        numbers = {name: value for name, value in values.items() if value is not None}
        for sink in list(self._sinks):
            try:
                sink.write(step, numbers)
            except Exception as error:  # whatever a service throws is no reason to stop training
                log.warning("%s failed (%s); the run goes on without it.", sink.name, error)
                self._sinks.remove(sink)


class NullTelemetry:
    """What the other workers have in the place of a Telemetry."""

    def tick(self, step: int) -> None: ...
    def log(self, record: dict) -> None: ...
    def evaluated(self, record: dict) -> None: ...
    def message(self, text: str) -> None: ...

    def __enter__(self) -> NullTelemetry:
        return self

    def __exit__(self, *_: object) -> None: ...


class _TensorBoard:
    name = "TensorBoard"

    def __init__(self, plan: Plan):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(_NOT_INSTALLED.format(self.name, "tensorboard")) from error
        purge = plan.start_step + 1 if plan.start_step else None  # a resumed run tells later steps again
        self._writer = SummaryWriter(plan.run / "tensorboard", purge_step=purge)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        self._writer.close()


class _WeightsAndBiases:
    name = "Weights & Biases"

    def __init__(self, plan: Plan, project: str, config: dict):
        try:
            import wandb
        except ImportError as error:
            raise ValueError(_NOT_INSTALLED.format(self.name, "wandb")) from error
        try:
            self._run = wandb.init(
                project=project,
                name=plan.run.name,
                id=_wandb_id(plan),
                resume="allow",
                dir=plan.run,
                config=config,
                settings=wandb.Settings(console="off"),  # it would catch the live display
            )
        except wandb.Error as error:
            advice = "Run `wandb login`, or set WANDB_MODE=offline and send the run later with `wandb sync`."
            raise RuntimeError(f"Weights & Biases did not start: {error} {advice}") from error
        self._run.define_metric("*", step_metric="step")  # its own step may not go back, as a resume does

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log({"step": step, **numbers})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def _wandb_id(plan: Plan) -> str:
    """A new one for a new run; a resumed run goes on with the one that it left in its folder."""
    file = plan.run / "wandb" / "id"
    if not plan.start_step or not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(4))
    return file.read_text()
