"""Logging of a run: metrics.jsonl and a display always, TensorBoard and Weights & Biases on request.

Only rank 0 has a `Telemetry`; the other ranks have `NullTelemetry`. Records hold Python numbers: nothing here
waits for a device. A training record is flat except for "time", which holds everything that differs between
two identical runs; the values of an evaluation are under "evaluation". No failure here stops a run once it
has started.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable
from typing import Protocol

from fastclip.errors import CommandError, OptionError
from fastclip.run.folder import METRICS
from fastclip.run.metrics_file import MetricsFile, read_metrics
from fastclip.training.display import Display, Plan

log = logging.getLogger(__name__)


class Sink(Protocol):
    """A service that receives the records."""

    name: str

    def write(self, step: int, numbers: dict[str, float]) -> None: ...
    def close(self, failed: bool) -> None: ...


class Telemetry:
    """Logs a run; a context manager, because the display must be closed whatever happens.

    Args:
        plan: properties of the run that stay constant.
        tensorboard: write events to the folder tensorboard/ of the run.
        wandb_project: Weights & Biases project that receives the records.
        config: the run's resolved config, for Weights & Biases.
        sinks: further services that receive the records.
        display: makes the display from the plan and earlier evaluations.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        tensorboard: bool = False,
        wandb_project: str | None = None,
        config: dict | None = None,
        sinks: Iterable[Sink] = (),
        display: Callable[[Plan, list[dict]], Display] = Display,
    ):
        path = plan.run / METRICS
        self._metrics = MetricsFile(path)
        self._sinks = list(sinks)
        if tensorboard:
            self._sinks.append(_TensorBoard(plan))
        if wandb_project is not None:
            self._sinks.append(_WeightsAndBiases(plan, wandb_project, config or {}))
        past = read_metrics(path) if plan.start_step and path.exists() else []
        self._display = display(plan, [record for record in past if "evaluation" in record])

    def tick(self, step: int) -> None:
        """Call after every step, with the number of steps done; moves the bars at most twice per second."""
        self._display.tick(step)

    def log(self, record: dict) -> None:
        """Log a training record."""
        self._metrics.write(record)
        times = record.get("time", {})
        values = {f"train/{name}": value for name, value in record.items() if name not in ("step", "time")}
        self._send(record["step"], values | {f"time/{name}": value for name, value in times.items()})
        self._display.log(record)

    def evaluated(self, record: dict) -> None:
        """Log an evaluation; its "best" says whether it is the best so far."""
        self._metrics.write(record)
        self._send(record["step"], {f"evaluation/{name}": x for name, x in record["evaluation"].items()})
        self._display.evaluated(record)

    def message(self, text: str) -> None:
        """Print a line above the live display."""
        self._display.message(text)

    def lost(self) -> str | None:
        """What to say about records that could not be written; None if all were."""
        return self._metrics.lost()

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def close(self, failed: bool = False) -> None:
        """Show and write pending records, and stop; safe to call twice."""
        self._display.close()
        self._metrics.flush()
        while self._sinks:
            sink = self._sinks.pop(0)
            try:
                sink.close(failed)
            except Exception as error:
                log.warning("%s could not be closed: %s", sink.name, error)

    def _send(self, step: int, values: dict[str, float | None]) -> None:
        numbers = {name: value for name, value in values.items() if value is not None}
        for sink in list(self._sinks):
            try:
                sink.write(step, numbers)
            except Exception as error:  # no failure of a service may stop training
                log.warning("%s failed (%s); training continues without it.", sink.name, error)
                self._sinks.remove(sink)


class NullTelemetry:
    """Stands in for Telemetry on all ranks except rank 0."""

    def tick(self, step: int) -> None: ...
    def log(self, record: dict) -> None: ...
    def evaluated(self, record: dict) -> None: ...
    def message(self, text: str) -> None: ...
    def lost(self) -> None: ...

    def __enter__(self) -> NullTelemetry:
        return self

    def __exit__(self, *_: object) -> None: ...


class _TensorBoard:
    name = "TensorBoard"

    def __init__(self, plan: Plan):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _not_installed("log.tensorboard", True, self.name, "tensorboard") from error
        purge = plan.start_step + 1 if plan.start_step else None  # a resumed run writes later steps again
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
            raise _not_installed("log.wandb", project, self.name, "wandb") from error
        try:
            self._run = wandb.init(
                project=project,
                name=plan.run.name,
                id=_wandb_id(plan),
                resume="allow",
                dir=plan.run,
                config=config,
                settings=wandb.Settings(console="off"),  # or it captures the live display
            )
        except wandb.Error as error:
            advice = "Run `wandb login`, or set WANDB_MODE=offline and upload the run with `wandb sync`."
            raise CommandError(f"Weights & Biases could not start: {error} {advice}") from error
        self._run.define_metric("*", step_metric="step")  # its own step cannot decrease, as it does on resume

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log({"step": step, **numbers})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def _not_installed(option: str, value: object, service: str, extra: str) -> OptionError:
    rule, advice = f"requires {service}, which is not installed", f"Run pip install 'fastclip[{extra}]'."
    return OptionError(option, value, rule, advice=advice)


def _wandb_id(plan: Plan) -> str:
    """A new id for a new run; a resumed run uses the one in its folder."""
    file = plan.run / "wandb" / "id"
    if not plan.start_step or not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(4))
    return file.read_text()
