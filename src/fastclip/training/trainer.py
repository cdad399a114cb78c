"""The training loop: from the newest checkpoint to the end, with records, evaluations and checkpoints."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from platform import python_version

import torch

from fastclip import __version__
from fastclip.config.resolved import Resolved
from fastclip.data.loader import PairLoader
from fastclip.distributed.agreement import require_same
from fastclip.distributed.device import report_devices
from fastclip.distributed.interrupts import Interrupts, StoppedCleanly
from fastclip.distributed.stop_at_once import SAVED, describe
from fastclip.distributed.world import World
from fastclip.errors import CommandError, PathError
from fastclip.finite import first_non_finite
from fastclip.model import TwoTowers
from fastclip.run.checkpoint import CheckpointError, Checkpoints, load, tensor_names
from fastclip.run.folder import (
    CHECKPOINTS,
    METRICS,
    MODEL,
    read_metadata,
    remove_leftovers,
    write_config,
    write_schema,
)
from fastclip.run.lock import RunLock
from fastclip.run.metrics_file import truncate_metrics
from fastclip.run.open_folder import FolderGone, OtherRun, is_gone, open_folder, open_start
from fastclip.run.start import recorded_start, start_of
from fastclip.training.between_ranks import agree_on_buffers, agree_on_tau, means_over_ranks, shared_settings
from fastclip.training.build import build_step, build_towers
from fastclip.training.divergence import (
    MOST_SKIPPED,
    Diverged,
    History,
    advice,
    broken_weights,
    diverged,
    report_change,
    weight_norm,
)
from fastclip.training.evaluator import EvaluationStopped, Evaluator, open_evaluator
from fastclip.training.export import NonFiniteModel, export, write_model_config
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


def train(config: Resolved, world: World) -> Trainer:
    """Train to the end, from the newest checkpoint if there is one; return the trainer in its final state.

    A new run starts from scratch, or from the checkpoint in `config.start`.
    """
    require_same(world, shared_settings(config))  # before any other collective: ranks that differ could hang
    report_devices(world)
    with RunLock(Path(config.out), world) as lock:
        newest = open_folder(config)
        if newest is not None:
            config, newest = continued(config, newest)
            describe(SAVED.format(read_metadata(newest)["step"]))
        start = open_start(config) if newest is None else None
        origin = newest or start
        saved = None if origin is None else read_metadata(origin)
        with explained(partial(model_too_large, config, world)):
            towers = build_towers(config, world, newest)
            pairs = open_training_pairs(config, towers, world)
            evaluator = open_evaluator(config, towers, pairs.tokenizer, world, pairs.workers)
            trainer = Trainer(config, world, towers, pairs, evaluator, lock, saved)
        trainer.run(newest, start)
    return trainer


class Trainer:
    """Builds the parts of a run; `run` trains to the end. `saved`: of the checkpoint that it continues."""

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
        self.start = recorded_start(saved, towers) if saved else start_of(towers, config.model, config.seed)
        decoder = pairs.decoder
        self.train_step = build_step(config, towers, self.num_samples, world, decoder, self.total, found)
        self.step = 0  # steps done
        self.best: dict = {}  # score and step of the best evaluation
        self.evaluation_due = True  # whether the model of this step is still to be evaluated
        self.step_stats = StepStats(world.device)
        self.history = History()
        self.elapsed = 0.0  # seconds of training before this process
        self.bad: list = []

    def run(self, newest: Path | None, start: Path | None = None) -> None:
        """Train from the newest checkpoint, from another run's, or from scratch, to the end, then export.

        In the loop, SIGTERM and SIGINT save a checkpoint and raise StoppedCleanly.
        """
        if newest is not None:
            self._load(newest)
        elif start is not None:
            self._load(start)
            self.best = {}  # it is not in this run's folder
        self._check_weights(newest or start)
        changes = self.course.changes if newest is not None else {}
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
        describe(str(StoppedCleanly(self.step, last=True)))
        self._export(self.folder / MODEL)
        if lost := self.world.agree(self.telemetry.lost()):
            raise CommandError(lost)

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
                if decision.stop:
                    raise StoppedCleanly(self.step, last=at_end)
            if interrupts.stop_requested():  # since the last step asked
                raise StoppedCleanly(self.step, last=True)
        log.info(loader.bad.summary())

    def _record(self, result: StepResult, loader: PairLoader, stopwatch: Stopwatch) -> None:
        """Log a record. The only place where the host waits for the device and other ranks."""
        self._require_folder()
        stats = {**result.stats, **self.step_stats.summary()}
        means = means_over_ranks(self.world, stats | {"weight_norm": weight_norm(self.train_step.towers)})
        self._share_bad(loader)
        self.step_stats.start_new_record()
        streak, now = int(means.pop("longest_skipped")), int(means.pop("skipped_now"))
        found = self.history.judge(means["loss"], means["weight_norm"], now)
        self._report(found)
        if found is None:
            self.history.add(self.step, means["loss"], means["weight_norm"])
        samples = self.step * self.config.batch.size
        record: dict = {"step": self.step, "epoch": samples / self.num_samples, "samples": samples, **means}
        record |= self.train_step.rates(means["tau"])
        record["skipped"], record["bad"] = int(means["skipped"]), len(loader.bad.samples)
        if self.history.suspect is not None:
            record["suspect"] = True
        record["time"] = stopwatch.record(self.step, self.config.batch.size)
        self.telemetry.log(record)
        if streak >= MOST_SKIPPED:
            raise diverged(self.step, streak, self.folder, self.config)

    def _report(self, suspect: str | None) -> None:
        """Say so, and mark checkpoints, when the run becomes suspect."""
        before, self.history.suspect = self.history.suspect, suspect
        if (before is None) == (suspect is None):
            return
        try:
            text = report_change(suspect, self.history.good, self.checkpoints)
        except CheckpointError as error:
            text = f"{suspect}. {error} Training continues."
        self.telemetry.message(f"Step {self.step:,}: {text}")

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
        agree_on_buffers(self.world, self.train_step.towers)
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
        self._require_folder()
        agree_on_buffers(self.world, self.train_step.towers)
        agree_on_tau(self.world, self.train_step.stepper)
        self._share_bad(loader)  # rank 0 saves them
        norm, skipped = weight_norm(self.train_step.towers), self.step_stats.summary()["skipped_now"]
        means = means_over_ranks(self.world, {"norm": norm, "skipped": skipped})
        self._report(self.history.judge(None, means["norm"], int(means["skipped"])))
        metadata = {
            "step": self.step,
            "total_steps": self.total,
            "config": self.config.written,
            "fingerprint": self.pairs.manifest.fingerprint,
            "num_samples": self.num_samples,
            **self.train_step.metadata(),
            "best": self.best,
            "evaluation_due": self.evaluation_due,
            "suspect": self.history.suspect,
            "history": self.history.state(),
            "start": self.start and self.start._asdict(),
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
            describe(SAVED.format(self.step))
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
        """Restore the state of a checkpoint; raise if it was trained on data with another fingerprint."""
        metadata = read_metadata(path)
        fingerprint = self.pairs.manifest.fingerprint_like(metadata["fingerprint"])
        if metadata["fingerprint"] != fingerprint:
            raise OtherRun(
                path.parent.parent,
                f"was trained on other data: {metadata['num_samples']:,} pairs with fingerprint "
                f"{metadata['fingerprint']}, while data.train has {self.num_samples:,} with {fingerprint}. "
                "Use the same data, or choose another --out.",
            )
        tensors = self.train_step.tensors_of(tensor_names(path))
        load(path, tensors)
        self.train_step.load_state(tensors, metadata)
        self.step_stats.load_state(metadata["tally"], self.world.rank, self.world.size)
        self.step, self.best, self.elapsed = metadata["step"], metadata["best"], metadata["elapsed"]
        self.evaluation_due = metadata.get("evaluation_due", self.step == 0)  # older ones had done it
        self.bad = metadata["bad"]
        if "history" in metadata:  # not in older ones
            self.history.load_state(metadata["history"], metadata["suspect"])
        source = path.parent.parent
        how = f"Resumed {source}" if source == self.folder else f"Started from {path}"
        log.info("%s at step %d of %d.", how, self.step, self.total)
        if metadata.get("suspect"):
            log.warning("%s is suspect: %s. %s", path, metadata["suspect"], advice(source, self.config))

    def _check_weights(self, origin: Path | None) -> None:
        """Raise if the weights that training begins with are not finite; name their file and a tensor."""
        towers = self.train_step.towers
        weights = {**towers.state_dict(), **dict(self.train_step.loss.named_parameters())}
        if name := first_non_finite(weights):
            raise broken_weights(origin, name, self.config)
        if not self.history.norms:
            norm = means_over_ranks(self.world, {"norm": weight_norm(towers)})["norm"]
            self.history.add(self.step, None, norm)

    def _write_settings(self, resumed: bool) -> None:
        """Write the files of a new run; drop records of steps that will be repeated."""
        failed = None
        if self.world.is_main:
            try:
                remove_leftovers(self.folder)
                write_schema(self.folder)
                write_config(self.config, self.folder)
                write_model_config(self.train_step.towers, self.folder)
                last = self.step if resumed else -1
                truncate_metrics(self.folder / METRICS, last, last - 1 if self.evaluation_due else last)
            except OSError as error:
                failed = f"cannot be written: {error.strerror}. Free some space, or choose another --out."
        if failed := self.world.agree(failed):
            raise PathError(self.folder, failed)

    def _require_folder(self) -> None:
        """Raise on all ranks if the run's folder is gone: a save would make another without its settings."""
        if self.world.agree(self.world.is_main and is_gone(self.folder)):
            raise FolderGone(self.folder)

    def _export(self, folder: Path) -> None:
        """Export the model, which was just saved, with its model card; an error is raised on all ranks."""
        self._require_folder()
        agree_on_buffers(self.world, self.train_step.towers)
        towers, tau = self.train_step.towers, self.train_step.loss.mean_tau()
        newest = self.checkpoints.newest()
        failed: Exception | None = None
        if self.world.is_main and newest is not None:
            try:
                with self.train_step.averaged():
                    export(towers, folder, tau=tau, card=model_card(self.folder, newest, towers, tau))
            except NonFiniteModel as error:
                text = f"After step {self.step:,} the {error} {advice(self.folder, self.config)}"
                failed = Diverged(self.step, 0, text)
            except (OSError, ValueError) as error:
                failed = error
        if failed := self.world.agree(failed):
            raise failed
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
