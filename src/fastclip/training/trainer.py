"""The loop: from wherever the run stands to its end, with records, evaluations and checkpoints between."""

from __future__ import annotations

import logging
from pathlib import Path
from platform import python_version

import torch
import torch.distributed as dist

from fastclip import __version__
from fastclip.config.options import TrainConfig, as_dict
from fastclip.config.parse import write_config
from fastclip.config.resolved import differences, loss_settings, optim_row
from fastclip.data.loader import Batch, PairLoader
from fastclip.distributed.interrupts import Interrupts, StoppedCleanly
from fastclip.distributed.world import World
from fastclip.optim import SLOW_TAU, learning_rate, set_learning_rate
from fastclip.run.checkpoint import CheckpointError, Checkpoints, load, read_facts
from fastclip.run.metrics import truncate_metrics
from fastclip.training.build import build_learner, build_pairs, build_towers, total_steps, warmup_steps
from fastclip.training.card import model_card
from fastclip.training.evaluator import Evaluator
from fastclip.training.export import export, write_model_config
from fastclip.training.step import StepResult
from fastclip.training.tally import Clock, Tally
from fastclip.training.telemetry import Plan, Silence, Telemetry

log = logging.getLogger(__name__)
MOST_SKIPPED = 10  # steps in a row that may have a non-finite loss or gradient


class Diverged(RuntimeError):
    """Step after step was not finite."""


class Trainer:
    """A run in its folder: built from a resolved config, or taken up where its newest checkpoint left it."""

    def __init__(self, config: TrainConfig, world: World):
        self.config, self.world = config, world
        self.folder = Path(str(config.out))
        self.checkpoints = Checkpoints(self.folder / "checkpoints", config.checkpoint.keep)
        newest = self._open_folder()
        towers = build_towers(config, world)
        self.pairs = build_pairs(config, towers, world)
        self.num_samples = len(self.pairs.manifest)
        self.total = total_steps(config, self.num_samples)
        self.warmup = warmup_steps(config, self.total)
        self.learner = build_learner(config, towers, self.num_samples, world)
        self.evaluator: Evaluator | None = None
        if config.evaluate.pairs is not None or config.evaluate.tasks is not None:
            self.evaluator = Evaluator(config, towers, self.pairs.tokenizer, world)
        self.step = 0  # steps done
        self.best: dict = {}  # score and step of the best evaluation
        self.tally = Tally(world.device)
        self.elapsed = 0.0  # seconds of training before this process
        self.bad: list = []
        if newest is not None:
            self._load(newest)
        if world.main:
            write_config(config, self.folder / "config.yaml")
            write_model_config(towers, self.folder)
            truncate_metrics(self.folder / "metrics.jsonl", -1 if newest is None else self.step)

    def run(self) -> None:
        """Train to the end, then export. SIGTERM and SIGINT save, and raise StoppedCleanly."""
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
        model = self.export(self.folder / "model")
        if self.best:
            log.info(
                "Best %s: %.4f, at step %d.", self.best["measure"], self.best["score"], self.best["step"]
            )
        log.info("The model is in %s; checkpoints are in %s.", model, self.checkpoints.folder)

    def _train(self) -> None:
        config, clock = self.config, Clock(self.elapsed, self.step)
        loader = self.pairs.loader(config.data, self.world, self.step, self.total)
        loader.bad.restore(self.bad)
        with Interrupts(self.world) as interrupts:
            if self.step == 0:
                self._evaluate(clock)  # what an untrained model reaches; and does it work at all?
            for batch in clock.waiting(loader):
                result = self._one_step(batch)
                self.step = batch.step + 1
                self.telemetry.tick(self.step)
                at_end = self.step == self.total
                if at_end or self.step % config.log.every == 0:
                    self._record(batch, result, loader, clock)
                improved = (at_end or self._evaluation_due()) and self._evaluate(clock)
                decision = interrupts.poll(due=clock.save_due(config.checkpoint.minutes))
                by_steps = config.checkpoint.steps and self.step % config.checkpoint.steps == 0
                if at_end or improved or by_steps or decision.due or decision.stop:
                    self._save(loader, clock, must=at_end or decision.stop)
                if decision.stop and not at_end:
                    raise StoppedCleanly(self.step)
        log.info(loader.bad.summary())

    def _one_step(self, batch: Batch) -> StepResult:
        row, device = optim_row(self.config), self.world.device
        lr = learning_rate(
            batch.step,
            peak=(row.lr or 0.0) * self.config.scale,
            warmup=self.warmup,
            total=self.total,
            min_lr=row.min_lr or 0.0,
        )
        set_learning_rate(self.learner.stepper.optimizer, lr)
        self.learner.loss.set_epoch(batch.epoch)
        images = self.pairs.decoder.finish(batch.images, device)
        tokens = batch.tokens.to(device, non_blocking=True)
        result = self.learner.step(batch.step, images, tokens, batch.index)
        self.tally.add(result.stats["loss"], result.finite)
        return result

    def _record(self, batch: Batch, result: StepResult, loader: PairLoader, clock: Clock) -> None:
        """One line of metrics.jsonl. The only place where the host waits for the device and other workers."""
        numbers = {**result.stats, **self.tally.numbers()}
        values = torch.stack([value.detach().double() for value in numbers.values()])
        if self.world.size > 1:
            dist.all_reduce(values)  # most are equal on every worker; the peers' losses are not
            values /= self.world.size
        found = dict(zip(numbers, values.tolist(), strict=True))
        self._share_bad(loader)
        self.tally.start_again()
        in_a_row = found.pop("longest_skipped")
        optimizer, samples = self.learner.stepper.optimizer, self.step * self.config.batch.size
        record = {"step": self.step, "epoch": samples / self.num_samples, "samples": samples, **found}
        record["lr"] = optimizer.param_groups[0]["lr"]
        if self.learner.loss.gamma is not None:
            record["gamma"] = self.learner.loss.gamma
        settings = loss_settings(self.config)
        if settings.algorithm.temperature != "constant" and not settings.algorithm.peer:
            slow = self.learner.stepper.slow_tau is not None and found["tau"] < SLOW_TAU
            record["tau_lr"] = settings.tau_lr / 3 if slow else settings.tau_lr
        record["skipped"], record["bad"] = int(found["skipped"]), len(loader.bad.samples)
        record["time"] = clock.record(self.step, self.config.batch.size)
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
        every = self.config.evaluate.every * self.num_samples
        batch = self.config.batch.size
        return self.step * batch // every > (self.step - 1) * batch // every

    def _evaluate(self, clock: Clock) -> bool:
        """Measure the model as it is now; true if it is the best so far."""
        if self.evaluator is None:
            return False
        self._agree_on_buffers()
        with clock.paused():
            scores = self.evaluator.measure()
        score = scores[self.evaluator.best]
        best = self.step > 0 and (not self.best or score > self.best["score"])
        if best:
            self.best = {"score": score, "step": self.step, "measure": self.evaluator.best}
        epoch = self.step * self.config.batch.size / self.num_samples
        record = {"step": self.step, "epoch": epoch, "evaluation": scores, "best": best}
        self.telemetry.evaluated(record | {"time": {"elapsed": clock.elapsed()}})
        return best

    def _save(self, loader: PairLoader, clock: Clock, must: bool) -> None:
        self._agree_on_buffers()
        self._share_bad(loader)  # worker 0 writes them down
        facts = {
            "step": self.step,
            "config": as_dict(self.config),
            "fingerprint": self.pairs.manifest.fingerprint,
            "num_samples": self.num_samples,
            **self.learner.facts(),
            "best": self.best,
            "bad": [list(sample) for sample in loader.bad.samples.values()],
            "tally": self.world.gather(self.tally.values.tolist()),
            "elapsed": clock.elapsed(),
            "workers": self.world.size,
            "versions": {"fastclip": __version__, "torch": torch.__version__, "python": python_version()},
        }
        try:
            with clock.paused():
                self.checkpoints.save(self.step, self.learner.tensors(), facts)
                if self.best.get("step") == self.step:
                    self.checkpoints.mark_best(self.step)
        except CheckpointError as error:
            if must:
                raise
            self.telemetry.message(f"{error} Training goes on.")
            saved = self.checkpoints.best  # a best that could not be saved is none
            self.best = {} if saved is None else read_facts(saved)["best"]
        clock.saved()

    def _load(self, path: Path) -> None:
        """Everything back as it was; the data are compared by their fingerprint."""
        facts = read_facts(path)
        here = self.pairs.manifest.fingerprint
        if facts["fingerprint"] != here:
            raise ValueError(
                f"{self.folder} was trained on other data: {facts['num_samples']:,} pairs with fingerprint "
                f"{facts['fingerprint']}, and data.train has {self.num_samples:,} with {here}. "
                "Give the same data, or another --out."
            )
        tensors = self.learner.tensors()
        load(path, tensors)
        self.learner.put_back(tensors, facts)
        self.tally.put_back(facts["tally"], self.world.rank, self.world.size)
        self.step, self.best, self.elapsed = facts["step"], facts["best"], facts["elapsed"]
        self.bad = facts["bad"]
        if self.best.get("step") == self.step:
            self.checkpoints.mark_best(self.step)  # the process may have died just before
        log.info("Resumed %s at step %d of %d.", self.folder, self.step, self.total)

    def _open_folder(self) -> Path | None:
        """The newest checkpoint of the folder, if there is one that this config may go on from."""
        if self.world.main:
            make_writable(self.folder)
        self.world.barrier()
        newest = self.checkpoints.newest()
        if newest is None:
            return None
        if self.config.resume == "never":
            raise ValueError(f"{self.folder} holds a run already: choose another --out, or --resume auto.")
        differ = differences(read_facts(newest)["config"], self.config)
        if differ:
            raise ValueError(
                f"{self.folder} holds another run and cannot be resumed with these settings:\n  "
                + "\n  ".join(differ)
                + "\nGive the same settings, or another --out."
            )
        return newest

    def _agree_on_buffers(self) -> None:
        """BatchNorm's statistics are worker 0's, which DDP would give to the others in the next step."""
        if self.world.size > 1:
            for buffer in self.learner.towers.buffers():
                dist.broadcast(buffer, src=0)

    def export(self, folder: Path) -> Path:
        """The model as open_clip loads it, with its card: what was saved last."""
        self._agree_on_buffers()
        towers, tau, newest = self.learner.towers, self.learner.tau(), self.checkpoints.newest()
        if self.world.main and newest is not None:
            export(towers, folder, tau=tau, card=model_card(self.folder, newest, towers, tau))
        self.world.barrier()
        return folder

    def _telemetry(self) -> Telemetry | Silence:
        if not self.world.main:
            return Silence()
        config, settings = self.config, loss_settings(self.config)
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
            plan, tensorboard=config.log.tensorboard, wandb_project=config.log.wandb, config=as_dict(config)
        )


def make_writable(folder: Path) -> None:
    """Make the run's folder, and find out now whether files can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OSError(
            f"The run's folder {folder} cannot be written: {error.strerror}. Choose another --out."
        ) from None
