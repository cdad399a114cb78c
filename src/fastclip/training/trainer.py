"""The training loop: from the newest checkpoint to the end, with records, evaluations and checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from platform import python_version, python_version_tuple

import open_clip
import torch
import torch.distributed as dist

from fastclip import __version__
from fastclip.config.resolved import Difference, Resolved, differences, named_options, resolve_again
from fastclip.data.loader import PairLoader
from fastclip.distributed.agreement import require_same
from fastclip.distributed.device import report_devices
from fastclip.distributed.interrupts import Interrupts, StoppedCleanly
from fastclip.distributed.world import World
from fastclip.errors import PathError
from fastclip.model import TwoTowers
from fastclip.run.checkpoint import CheckpointError, Checkpoints, check, load
from fastclip.run.folder import (
    CHECKPOINTS,
    METRICS,
    MODEL,
    check_schema,
    read_metadata,
    remove_leftovers,
    write_config,
    write_schema,
)
from fastclip.run.lock import RunLock
from fastclip.run.metrics_file import truncate_metrics
from fastclip.training.build import build_step, build_towers
from fastclip.training.evaluator import EvaluationStopped, Evaluator, open_evaluator
from fastclip.training.export import export, write_model_config
from fastclip.training.micro_batch import conditions, found_before
from fastclip.training.model_card import model_card
from fastclip.training.out_of_memory import (
    evaluation_too_large,
    explained,
    model_too_large,
    step_too_large,
)
from fastclip.training.prolonging import Course, continued, keep_records
from fastclip.training.step import StepResult
from fastclip.training.step_stats import StepStats, Stopwatch
from fastclip.training.telemetry import NullTelemetry, Plan, Telemetry
from fastclip.training.training_pairs import TrainingPairs, open_training_pairs

log = logging.getLogger(__name__)
MOST_SKIPPED = 10  # consecutive steps with a non-finite loss or gradient that end the run


class Diverged(RuntimeError):
    """Too many consecutive steps had a non-finite loss or gradient.

    Args:
        step: the last of them.
        skipped: their number.
    """

    def __init__(self, step: int, skipped: int):
        super().__init__(
            f"{skipped} consecutive steps up to step {step} had a non-finite loss or gradient and were "
            "skipped; the weights have not changed since. Try a lower --optim.lr, a longer --optim.warmup, "
            "--optim.clip 1.0, or --precision bfloat16 instead of float16."
        )
        self.step, self.skipped = step, skipped


class OtherRun(PathError):
    """The folder holds a run with other settings or data, which this config cannot resume.

    Args:
        differences: the settings that differ.
    """

    def __init__(self, path: Path, problem: str, differences: Sequence[Difference] = ()):
        super().__init__(path, problem)
        self.differences = differences


def train(config: Resolved, world: World) -> Trainer:
    """Train to the end, from the newest checkpoint if there is one; return the trainer in its final state."""
    require_same(world, _settings(config))  # before any other collective: ranks that differ could hang
    report_devices(world)
    with RunLock(Path(config.out), world) as lock:
        newest = open_folder(config)
        if newest is not None:
            config, newest = continued(config, newest)
        saved = None if newest is None else read_metadata(newest)
        with explained(partial(model_too_large, config, world)):
            towers = build_towers(config, world)
            pairs = open_training_pairs(config, towers, world)
            evaluator = open_evaluator(config, towers, pairs.tokenizer, world, pairs.workers)
            trainer = Trainer(config, world, towers, pairs, evaluator, lock, saved)
        trainer.run(newest)
    return trainer


def _settings(config: Resolved) -> dict[str, object]:
    """What must be the same on every rank, except the data; `out` is last, as it follows the algorithm."""
    options = named_options(config)
    versions = {
        "fastclip version": __version__,
        "torch version": str(torch.__version__),
        "open_clip version": open_clip.__version__,
        "python version": ".".join(python_version_tuple()[:2]),
    }
    return versions | {name: value for name, value in options.items() if name != "out"} | {"out": config.out}


def open_folder(config: Resolved) -> Path | None:
    """Return the newest checkpoint of the run's folder; raise if this config cannot resume from it.

    A damaged one is an error; with `--resume previous`, the newest undamaged one is returned.
    """
    folder = Path(config.out)
    check_schema(folder)
    checkpoints = Checkpoints(folder / CHECKPOINTS)
    newest = checkpoints.newest_undamaged() if config.resume == "previous" else checkpoints.newest()
    if newest is None:
        return None
    if config.resume == "never":
        raise PathError(folder, "already contains a run: choose another --out, or pass --resume auto.")
    if config.resume == "auto":
        check(newest)
    written = read_metadata(newest)["config"]
    try:
        saved = resolve_again(written)
    except ValueError as error:
        raise PathError(
            newest,
            f"has settings that cannot be read: {error} "
            "Use the version of fastclip that wrote it, or choose another --out.",
        ) from error
    differ = differences(saved, config)
    if differ:
        listed = "\n  ".join(map(str, differ))
        advice = "Use the same settings, or choose another --out."
        raise OtherRun(folder, f"contains a run with other settings:\n  {listed}\n{advice}", differ)
    return newest


class Trainer:
    """Builds the parts of a run; `run` trains to the end. `saved`: the metadata of its newest checkpoint."""

    def __init__(
        self,
        config: Resolved,
        world: World,
        towers: TwoTowers,
        pairs: TrainingPairs,
        evaluator: Evaluator | None,
        lock: RunLock,
        saved: dict | None,
    ):
        self.config, self.world, self.pairs, self.evaluator = config, world, pairs, evaluator
        self.lock = lock
        self.folder = Path(config.out)
        self.num_samples = len(pairs.manifest)
        self.course = Course.of(config, self.num_samples, saved)
        self.total, keep = self.course.total, config.checkpoint.keep
        self.checkpoints = Checkpoints(self.folder / CHECKPOINTS, keep, self.course.decay_from)
        self.micro_conditions = conditions(config, world)
        found = found_before(saved, self.micro_conditions)
        decoder = pairs.decoder
        self.train_step = build_step(config, towers, self.num_samples, world, decoder, self.total, found)
        self.step = 0  # steps done
        self.best: dict = {}  # score and step of the best evaluation
        self.evaluation_due = True  # whether the model of this step is still to be evaluated
        self.step_stats = StepStats(world.device)
        self.elapsed = 0.0  # seconds of training before this process
        self.bad: list = []

    def run(self, newest: Path | None) -> None:
        """Train from the newest checkpoint, or from scratch, to the end, then export.

        SIGTERM and SIGINT save a checkpoint and raise StoppedCleanly.
        """
        if newest is not None:
            self._load(newest)
        changes = self.course.changes
        if changes and self.world.is_main:
            keep_records(self.folder / METRICS, self.course.decayed_from)
        self.checkpoints.start_at(self.step, self.best.get("step"), "decayed" if changes else "damaged")
        if changes:
            self.checkpoints.amend(self.step, changes)
        self._write_settings(resumed=newest is not None)
        stopped = None
        with self._telemetry() as self.telemetry:
            try:
                if self.step < self.total or self.evaluation_due:
                    self._train()
                else:
                    log.info("%s is already finished, at step %d.", self.folder, self.step)
            except StoppedCleanly as request:  # telemetry must not record it as a failure
                stopped = request
        if stopped is not None:
            raise stopped
        self._export(self.folder / MODEL)

    def _train(self) -> None:
        config, stopwatch = self.config, Stopwatch(self.elapsed, self.step)
        loader = self.pairs.loader(config.data, self.world, self.step, self.total)
        loader.bad.restore(self.bad)
        with Interrupts(self.world) as interrupts:
            if self.evaluation_due:  # the untrained model as a baseline: errors surface immediately
                self._evaluate(loader, stopwatch, interrupts)
                self._amend_evaluated()
            for batch in stopwatch.waiting(loader):
                self.lock.check()
                with explained(partial(step_too_large, config, self.train_step, self.world)):
                    result = self.train_step(batch)
                self.step_stats.add(result.stats["loss"], result.finite)
                self.step = batch.step + 1
                del batch  # its memory, for the next one
                self.telemetry.tick(self.step)
                at_end = self.step == self.total
                if at_end or self.step % config.log.every_steps == 0:
                    self._record(result, loader, stopwatch)
                self.evaluation_due = at_end or self._ends_interval()
                improved = self.evaluation_due and self._evaluate(loader, stopwatch, interrupts)
                decision = interrupts.poll(due=stopwatch.save_due(config.checkpoint.every_minutes))
                by_steps = config.checkpoint.every_steps and self.step % config.checkpoint.every_steps == 0
                by_steps = by_steps or self.step == self.course.decay_from  # to be prolonged from
                if at_end or improved or by_steps or decision.due or decision.stop:
                    self._save(loader, stopwatch, must=at_end or decision.stop)
                if decision.stop and not at_end:
                    raise StoppedCleanly(self.step)
        log.info(loader.bad.summary())

    def _record(self, result: StepResult, loader: PairLoader, stopwatch: Stopwatch) -> None:
        """Log a record. The only place where the host waits for the device and other ranks."""
        stats = {**result.stats, **self.step_stats.summary()}
        values = torch.stack([value.detach().double() for value in stats.values()])
        if self.world.size > 1:
            dist.all_reduce(values)  # most are equal on all ranks; losses of open_clip's algorithms are not
            values /= self.world.size
        means = dict(zip(stats, values.tolist(), strict=True))
        self._share_bad(loader)
        self.step_stats.start_new_record()
        streak = int(means.pop("longest_skipped"))
        samples = self.step * self.config.batch.size
        record = {"step": self.step, "epoch": samples / self.num_samples, "samples": samples, **means}
        record |= self.train_step.rates(means["tau"])
        record["skipped"], record["bad"] = int(means["skipped"]), len(loader.bad.samples)
        record["time"] = stopwatch.record(self.step, self.config.batch.size)
        self.telemetry.log(record)
        if streak >= MOST_SKIPPED:
            raise Diverged(self.step, streak)

    def _share_bad(self, loader: PairLoader) -> None:
        """Exchange the samples that could not be used."""
        for new in self.world.gather(loader.bad.take_new()):
            loader.bad.add(new)
        loader.bad.take_new()  # those of other ranks are not new to them

    def _ends_interval(self) -> bool:
        """Whether an evaluation interval ended in this step."""
        every = self.config.evaluate.every_epochs * self.num_samples
        batch = self.config.batch.size
        return self.step * batch // every > (self.step - 1) * batch // every

    def _evaluate(self, loader: PairLoader, stopwatch: Stopwatch, interrupts: Interrupts) -> bool:
        """Evaluate the model; return whether it is the best so far.

        A stop between tasks saves the step as one that is still to be evaluated.
        """
        if self.evaluator is None:
            self.evaluation_due = False
            return False
        self._agree_on_buffers()
        try:
            too_large = partial(evaluation_too_large, self.config, self.world)
            with stopwatch.paused(), explained(too_large), self.train_step.averaged():
                scores = self.evaluator.measure(interrupts.stop_requested)
        except EvaluationStopped:
            self._save(loader, stopwatch, must=True)
            raise StoppedCleanly(self.step) from None
        self.evaluation_due = False
        score = scores[self.evaluator.best]
        best = self.step > 0 and (not self.best or score > self.best["score"])
        if best:
            self.best = {"score": score, "step": self.step, "measure": self.evaluator.best}
        epoch = self.step * self.config.batch.size / self.num_samples
        record = {"step": self.step, "epoch": epoch, "evaluation": scores, "best": best}
        self.telemetry.evaluated(record | {"time": {"elapsed": stopwatch.elapsed()}})
        return best

    def _save(self, loader: PairLoader, stopwatch: Stopwatch, must: bool) -> None:
        self._agree_on_buffers()
        self._agree_on_tau()
        self._share_bad(loader)  # rank 0 saves them
        metadata = {
            "step": self.step,
            "total_steps": self.total,
            "config": self.config.written,
            "fingerprint": self.pairs.manifest.fingerprint,
            "num_samples": self.num_samples,
            **self.train_step.metadata(),
            "best": self.best,
            "evaluation_due": self.evaluation_due,
            "bad": [list(sample) for sample in loader.bad.samples.values()],
            "tally": self.world.gather(self.step_stats.values.tolist()),
            "elapsed": stopwatch.elapsed(),
            "workers": self.world.size,
            "micro": self.micro_conditions and {"size": self.train_step.micro, **self.micro_conditions},
            "versions": {"fastclip": __version__, "torch": torch.__version__, "python": python_version()},
        }
        try:
            with stopwatch.paused():
                self.checkpoints.save(self.step, self.train_step.tensors(), metadata)
                if self.best.get("step") == self.step:
                    self.checkpoints.mark_best(self.step)
        except CheckpointError as error:
            if must:
                raise
            self.telemetry.message(f"{error} Training continues.")
            saved = self.checkpoints.best  # a best that could not be saved does not count
            self.best = {} if saved is None else read_metadata(saved)["best"]
        stopwatch.saved()

    def _amend_evaluated(self) -> None:
        """If the step was saved before its evaluation, add what that has found to its checkpoint."""
        changes = {"best": self.best, "evaluation_due": False}
        try:
            if self.checkpoints.amend(self.step, changes) and self.best.get("step") == self.step:
                self.checkpoints.mark_best(self.step)
        except CheckpointError as error:  # the next run would evaluate it again
            self.telemetry.message(f"{error} Training continues.")

    def _load(self, path: Path) -> None:
        """Restore the state of a checkpoint; raise if the training data has another fingerprint."""
        metadata = read_metadata(path)
        fingerprint = self.pairs.manifest.fingerprint_like(metadata["fingerprint"])
        if metadata["fingerprint"] != fingerprint:
            raise OtherRun(
                self.folder,
                f"was trained on other data: {metadata['num_samples']:,} pairs with fingerprint "
                f"{metadata['fingerprint']}, while data.train has {self.num_samples:,} with {fingerprint}. "
                "Use the same data, or choose another --out.",
            )
        tensors = self.train_step.tensors()
        load(path, tensors)
        self.train_step.load_state(tensors, metadata)
        self.step_stats.load_state(metadata["tally"], self.world.rank, self.world.size)
        self.step, self.best, self.elapsed = metadata["step"], metadata["best"], metadata["elapsed"]
        self.evaluation_due = metadata.get("evaluation_due", self.step == 0)  # older ones had done it
        self.bad = metadata["bad"]
        log.info("Resumed %s at step %d of %d.", self.folder, self.step, self.total)

    def _write_settings(self, resumed: bool) -> None:
        """Write the files of a new run; drop records of steps that will be repeated."""
        if self.world.is_main:
            remove_leftovers(self.folder)
            write_schema(self.folder)
            write_config(self.config, self.folder)
            write_model_config(self.train_step.towers, self.folder)
            last = self.step if resumed else -1
            truncate_metrics(self.folder / METRICS, last, last - 1 if self.evaluation_due else last)

    def _agree_on_buffers(self) -> None:
        """Copy rank 0's BatchNorm statistics to all ranks, as DDP would in the next step."""
        if self.world.size > 1:
            for buffer in self.train_step.towers.buffers():
                dist.broadcast(buffer, src=0)

    def _agree_on_tau(self) -> None:
        """Copy rank 0's τ and its moments to all ranks: they are outside DDP, and only rank 0's are saved."""
        if self.world.size > 1:
            stepper = self.train_step.stepper
            for tau in stepper.tau:
                for tensor in (tau.detach(), *stepper.optimizer.state[tau].values()):
                    dist.broadcast(tensor, src=0)

    def _export(self, folder: Path) -> None:
        """Export the model, which was just saved, with its model card."""
        self._agree_on_buffers()
        towers, tau = self.train_step.towers, self.train_step.loss.mean_tau()
        newest = self.checkpoints.newest()
        if self.world.is_main and newest is not None:
            with self.train_step.averaged():
                export(towers, folder, tau=tau, card=model_card(self.folder, newest, towers, tau))
        self.world.barrier()
        if self.best:
            log.info(
                "Best %s: %.4f, at step %d.", self.best["measure"], self.best["score"], self.best["step"]
            )
        log.info("Model: %s. Checkpoints: %s.", folder, self.checkpoints.folder)

    def _telemetry(self) -> Telemetry | NullTelemetry:
        if not self.world.is_main:
            return NullTelemetry()
        config, settings = self.config, self.config.loss
        plan = Plan(
            run=self.folder,
            title=f"{config.algorithm} · {config.model.name} · {self.num_samples:,} pairs",
            total_steps=self.total,
            epochs=config.epochs,
            steps_per_epoch=self.num_samples / config.batch.size,
            global_batch=config.batch.size,
            rho=settings.rho if settings.algorithm.robust else None,
            ranks=self.world.size,
            start_step=self.step,
        )
        return Telemetry(
            plan, tensorboard=config.log.tensorboard, wandb_project=config.log.wandb, config=config.written
        )
