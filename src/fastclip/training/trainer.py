"""The loop: from wherever the run stands to its end, with records, evaluations and checkpoints between."""

from __future__ import annotations

import logging
from pathlib import Path
from platform import python_version

import torch
import torch.distributed as dist

from fastclip import __version__
from fastclip.config.resolved import Resolved, differences, resolve_again
from fastclip.data.loader import PairLoader
from fastclip.distributed.interrupts import Interrupts, StoppedCleanly
from fastclip.distributed.world import World
from fastclip.files import make_writable
from fastclip.model import TwoTowers
from fastclip.run.checkpoint import CheckpointError, Checkpoints, load
from fastclip.run.folder import (
    CHECKPOINTS,
    METRICS,
    MODEL,
    check_schema,
    read_metadata,
    write_config,
    write_schema,
)
from fastclip.run.metrics_file import truncate_metrics
from fastclip.training.build import build_step, build_towers
from fastclip.training.evaluator import Evaluator, open_evaluator
from fastclip.training.export import export, write_model_config
from fastclip.training.model_card import model_card
from fastclip.training.step import StepResult
from fastclip.training.step_stats import StepStats, Stopwatch
from fastclip.training.telemetry import NullTelemetry, Plan, Telemetry
from fastclip.training.training_pairs import Pairs, open_pairs

log = logging.getLogger(__name__)
MOST_SKIPPED = 10  # steps in a row that may have a non-finite loss or gradient


class Diverged(RuntimeError):
    """Step after step was not finite."""


def train(config: Resolved, world: World) -> Trainer:
    """Train from wherever the run's folder stands to the end; the trainer as it is then."""
    newest = open_folder(config, world)
    towers = build_towers(config, world)
    pairs = open_pairs(config, towers, world)
    evaluator = open_evaluator(config, towers, pairs.tokenizer, world)
    trainer = Trainer(config, world, towers, pairs, evaluator)
    trainer.run(newest)
    return trainer


def open_folder(config: Resolved, world: World) -> Path | None:
    """The newest checkpoint of the run's folder, if there is one that this config may go on from."""
    folder = Path(config.out)
    check_schema(folder)
    if world.is_main:
        make_writable(folder)
    world.barrier()
    newest = Checkpoints(folder / CHECKPOINTS).newest()
    if newest is None:
        return None
    if config.resume == "never":
        raise ValueError(f"{folder} holds a run already: choose another --out, or --resume auto.")
    try:
        saved = resolve_again(read_metadata(newest)["config"])
    except ValueError as error:
        raise ValueError(
            f"{newest} holds settings that cannot be read: {error} "
            "Use the version that wrote it, or another --out."
        ) from error
    differ = differences(saved, config)
    if differ:
        raise ValueError(
            f"{folder} holds another run and cannot be resumed with these settings:\n  "
            + "\n  ".join(differ)
            + "\nGive the same settings, or another --out."
        )
    return newest


class Trainer:
    """A run: its parts are built here, `run` brings it to its end."""

    def __init__(
        self, config: Resolved, world: World, towers: TwoTowers, pairs: Pairs, evaluator: Evaluator | None
    ):
        self.config, self.world, self.pairs, self.evaluator = config, world, pairs, evaluator
        self.folder = Path(config.out)
        self.checkpoints = Checkpoints(self.folder / CHECKPOINTS, config.checkpoint.keep)
        self.num_samples = len(pairs.manifest)
        self.total = config.total_steps(self.num_samples)
        self.train_step = build_step(config, towers, self.num_samples, world, pairs.decoder.finish)
        self.step = 0  # steps done
        self.best: dict = {}  # score and step of the best evaluation
        self.step_stats = StepStats(world.device)
        self.elapsed = 0.0  # seconds of training before this process
        self.bad: list = []

    def run(self, newest: Path | None) -> None:
        """From the newest checkpoint, or from nothing, to the end, then export.

        SIGTERM and SIGINT save, and raise StoppedCleanly.
        """
        if newest is not None:
            self._load(newest)
        self._write_settings(resumed=newest is not None)
        stopped = None
        with self._telemetry() as self.telemetry:
            try:
                if self.step < self.total:
                    self._train()
                else:
                    log.info("%s has finished already, at step %d.", self.folder, self.step)
            except StoppedCleanly as request:  # no failure, for who is told of it
                stopped = request
        if stopped is not None:
            raise stopped
        self._export(self.folder / MODEL)

    def _train(self) -> None:
        config, stopwatch = self.config, Stopwatch(self.elapsed, self.step)
        loader = self.pairs.loader(config.data, self.world, self.step, self.total)
        loader.bad.restore(self.bad)
        with Interrupts(self.world) as interrupts:
            if self.step == 0:
                self._evaluate(stopwatch)  # what an untrained model reaches; and does it work at all?
            for batch in stopwatch.waiting(loader):
                result = self.train_step(batch)
                self.step_stats.add(result.stats["loss"], result.finite)
                self.step = batch.step + 1
                self.telemetry.tick(self.step)
                at_end = self.step == self.total
                if at_end or self.step % config.log.every_steps == 0:
                    self._record(result, loader, stopwatch)
                improved = (at_end or self._evaluation_due()) and self._evaluate(stopwatch)
                decision = interrupts.poll(due=stopwatch.save_due(config.checkpoint.every_minutes))
                by_steps = config.checkpoint.every_steps and self.step % config.checkpoint.every_steps == 0
                if at_end or improved or by_steps or decision.due or decision.stop:
                    self._save(loader, stopwatch, must=at_end or decision.stop)
                if decision.stop and not at_end:
                    raise StoppedCleanly(self.step)
        log.info(loader.bad.summary())

    def _record(self, result: StepResult, loader: PairLoader, stopwatch: Stopwatch) -> None:
        """One line of metrics.jsonl. The only place where the host waits for the device and other workers."""
        numbers = {**result.stats, **self.step_stats.numbers()}
        values = torch.stack([value.detach().double() for value in numbers.values()])
        if self.world.size > 1:
            dist.all_reduce(values)  # most are equal on every worker; the peers' losses are not
            values /= self.world.size
        found = dict(zip(numbers, values.tolist(), strict=True))
        self._share_bad(loader)
        self.step_stats.start_again()
        in_a_row = found.pop("longest_skipped")
        samples = self.step * self.config.batch.size
        record = {"step": self.step, "epoch": samples / self.num_samples, "samples": samples, **found}
        record |= self.train_step.rates(found["tau"])
        record["skipped"], record["bad"] = int(found["skipped"]), len(loader.bad.samples)
        record["time"] = stopwatch.record(self.step, self.config.batch.size)
        self.telemetry.log(record)
        if in_a_row >= MOST_SKIPPED:
            raise Diverged(
                f"{int(in_a_row)} steps in a row up to step {self.step} had a non-finite loss or gradient "
                "and were skipped; the weights are as they were before. Try a lower --optim.lr, a longer "
                "--optim.warmup, --optim.clip 1.0, or --precision bfloat16 instead of float16."
            )

    def _share_bad(self, loader: PairLoader) -> None:
        """Tell each other which samples could not be used."""
        for new in self.world.gather(loader.bad.take_new()):
            loader.bad.add(new)
        loader.bad.take_new()  # what the others found is not new to them

    def _evaluation_due(self) -> bool:
        """Whether an evaluation's epoch ended in this step."""
        every = self.config.evaluate.every_epochs * self.num_samples
        batch = self.config.batch.size
        return self.step * batch // every > (self.step - 1) * batch // every

    def _evaluate(self, stopwatch: Stopwatch) -> bool:
        """Measure the model as it is now; true if it is the best so far."""
        if self.evaluator is None:
            return False
        self._agree_on_buffers()
        with stopwatch.paused():
            scores = self.evaluator.measure()
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
        self._share_bad(loader)  # worker 0 writes them down
        metadata = {
            "step": self.step,
            "config": self.config.written,
            "fingerprint": self.pairs.manifest.fingerprint,
            "num_samples": self.num_samples,
            **self.train_step.metadata(),
            "best": self.best,
            "bad": [list(sample) for sample in loader.bad.samples.values()],
            "tally": self.world.gather(self.step_stats.values.tolist()),
            "elapsed": stopwatch.elapsed(),
            "workers": self.world.size,
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
            self.telemetry.message(f"{error} Training goes on.")
            saved = self.checkpoints.best  # a best that could not be saved is none
            self.best = {} if saved is None else read_metadata(saved)["best"]
        stopwatch.saved()

    def _load(self, path: Path) -> None:
        """Everything back as it was; the data are compared by their fingerprint."""
        metadata = read_metadata(path)
        here = self.pairs.manifest.fingerprint
        if metadata["fingerprint"] != here:
            raise ValueError(
                f"{self.folder} was trained on other data: {metadata['num_samples']:,} pairs, fingerprint "
                f"{metadata['fingerprint']}, and data.train has {self.num_samples:,} with {here}. "
                "Give the same data, or another --out."
            )
        tensors = self.train_step.tensors()
        load(path, tensors)
        self.train_step.load_state(tensors, metadata)
        self.step_stats.load_state(metadata["tally"], self.world.rank, self.world.size)
        self.step, self.best, self.elapsed = metadata["step"], metadata["best"], metadata["elapsed"]
        self.bad = metadata["bad"]
        if self.best.get("step") == self.step:
            self.checkpoints.mark_best(self.step)  # the process may have died just before
        log.info("Resumed %s at step %d of %d.", self.folder, self.step, self.total)

    def _write_settings(self, resumed: bool) -> None:
        """What the folder holds from the start; records of steps that will be made again are dropped."""
        if self.world.is_main:
            write_schema(self.folder)
            write_config(self.config, self.folder)
            write_model_config(self.train_step.towers, self.folder)
            truncate_metrics(self.folder / METRICS, self.step if resumed else -1)

    def _agree_on_buffers(self) -> None:
        """BatchNorm's statistics are worker 0's, which DDP would give to the others in the next step."""
        if self.world.size > 1:
            for buffer in self.train_step.towers.buffers():
                dist.broadcast(buffer, src=0)

    def _export(self, folder: Path) -> None:
        """The model as open_clip loads it, with its card: what was saved last."""
        self._agree_on_buffers()
        towers, tau = self.train_step.towers, self.train_step.loss.mean_tau()
        newest = self.checkpoints.newest()
        if self.world.is_main and newest is not None:
            export(towers, folder, tau=tau, card=model_card(self.folder, newest, towers, tau))
        self.world.barrier()
        if self.best:
            log.info(
                "Best %s: %.4f, at step %d.", self.best["measure"], self.best["score"], self.best["step"]
            )
        log.info("The model is in %s; checkpoints are in %s.", folder, self.checkpoints.folder)

    def _telemetry(self) -> Telemetry | NullTelemetry:
        if not self.world.is_main:
            return NullTelemetry()
        config, settings = self.config, self.config.loss
        plan = Plan(
            run=self.folder,
            title=f"{config.algorithm} · {config.model.name} · {self.num_samples:,} pairs",
            total_steps=self.total,
            steps_per_epoch=self.num_samples / config.batch.size,
            global_batch=config.batch.size,
            rho=settings.rho if settings.algorithm.rho is not None else None,
            workers=self.world.size,
            start_step=self.step,
        )
        return Telemetry(
            plan, tensorboard=config.log.tensorboard, wandb_project=config.log.wandb, config=config.written
        )
