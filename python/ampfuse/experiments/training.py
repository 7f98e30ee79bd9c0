"""The training loop: one run, from its first step to its result.

:meth:`Training.run` is the part to read. The host does not wait for the device between the ends of
intervals (``--print-freq`` steps): losses, scales and skips are gathered there, and times are its
events.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ampfuse.experiments import checkpoint, provenance, schedule
from ampfuse.experiments.arms import Arm, build_arm, evaluating
from ampfuse.experiments.checkpoint import Checkpoint
from ampfuse.experiments.config import RunConfig, UsageError
from ampfuse.experiments.distributed import World
from ampfuse.experiments.record import Record, RunResult, mean_of_finite
from ampfuse.experiments.run_log import RunLog
from ampfuse.experiments.signals import StopWish
from ampfuse.experiments.spread import spread_of
from ampfuse.experiments.tasks import TASKS
from ampfuse.graphs import EAGER_CALLS, GraphedCall
from ampfuse.measuring import ProcessMemory, StepClock, StepLog
from ampfuse.optim.shards import local

if TYPE_CHECKING:
    from ampfuse.experiments.data import Data

_REHEARSAL_STEPS = 2


class Interrupted(Exception):
    """The run was asked to stop; `checkpoint` is where it can be taken up, if that was saved."""

    def __init__(self, signal_number: int, step: int, checkpoint: Path | None) -> None:
        self.signal_number, self.step, self.checkpoint = signal_number, step, checkpoint


class Diverged(Exception):
    """The run left the finite numbers in step `step` (from 1)."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(reason)
        self.step, self.reason = step, reason


@dataclasses.dataclass
class Place:
    """Where runs happen and leave their files, the same for all runs of a command."""

    device: torch.device
    world: World
    folder: Path | None
    wish: StopWish
    profile_steps: int = 0
    save_epochs: bool = False
    command: Sequence[str] = ()


class Training:
    """One run of `config`, from scratch or from a checkpoint."""

    def __init__(
        self,
        config: RunConfig,
        data: Data,
        place: Place,
        name: str,
        resume: Checkpoint | None = None,
        log: RunLog | None = None,
    ) -> None:
        self.config, self.data, self.place, self.name = config, data, place, name
        self.task, self.log = TASKS[config.experiment], log or RunLog()
        self.steps_per_epoch = data.batches_per_epoch
        of_epochs = (config.epochs or math.inf) * self.steps_per_epoch
        self.total_steps = int(min(config.iterations or math.inf, of_epochs))
        self.resume = resume
        self.first_step = resume.step if resume else 0
        self.record = Record(**resume.record) if resume else Record()
        self.memory = ProcessMemory(place.device)
        self.clock = StepClock(place.device)
        self.steps = StepLog(config.print_freq, place.device)
        self.spread = spread_of(config, place.world)
        # Only the main process writes.
        self.files = place.folder if place.world.is_main else None
        torch.backends.cudnn.benchmark = config.cudnn_benchmark
        torch.backends.cudnn.deterministic = config.deterministic
        torch.use_deterministic_algorithms(config.deterministic, warn_only=True)

    def run(self) -> RunResult:
        """Train to the end. Raises Interrupted after saving, Diverged, or PeerLost."""
        config, world, wish = self.config, self.place.world, self.place.wish
        self.memory.release()
        self.kernels = self.rehearse()
        self.memory.start()
        arm = self.arm = self.build()
        if self.resume:
            self.restore(arm)

        def train_step(inputs: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
            return arm.step(inputs, targets, self.task.loss)

        if config.graph:
            train_step = GraphedCall(train_step)
        self.log.start(self.total_steps, self.first_step)
        # A graph is captured, or code is compiled, in the first steps: these are off the clock.
        untimed = EAGER_CALLS + 1 if config.graph else 2 if config.compile else 0
        timed_from = self.first_step + untimed
        epochs_begun = self._epoch(self.first_step)
        if self._ends_epoch(self.first_step) and len(self.record.epoch_log) < epochs_begun:
            self._end_epoch(self.first_step)  # it was stopped before the evaluation
        with self._profiler() as profiler:
            self.clock.resume()
            for step, (inputs, targets) in self.batches(self.first_step):
                self.set_lr(arm, step)
                with world.watching_peers():
                    loss, scale, skipped = train_step(inputs, targets)
                    if config.loop == "original":
                        loss.item()  # the published scripts added it up on the host
                self.clock.mark()
                self.steps.add(loss, scale, skipped)
                self.log.step()
                if profiler:
                    profiler.step()
                if step == timed_from:
                    self.clock.resume()
                stop, at_end = world.any(wish.received is not None), self._ends_epoch(step)
                if stop or at_end or step % config.print_freq == 0:
                    self._end_interval(step, is_timed=step > timed_from)
                if stop:
                    raise Interrupted(wish.received or 15, step, self.save(step))
                if at_end:
                    self._end_epoch(step)
                    self.clock.resume()
        return self.result()

    def build(self, config: RunConfig | None = None) -> Arm:
        """Model and optimizer of a run that starts, in their arm: the same weights in every arm."""
        config, device, world = config or self.config, self.place.device, self.place.world
        torch.manual_seed(config.seed + config.repeat)
        model = self.task.build_model(config, self.data)
        if config.sync_bn:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        layout = torch.channels_last if config.channels_last else torch.contiguous_format
        model.to(device, memory_format=layout)
        with world.watching_peers():
            self.spread.before(model)
            arm = build_arm(config, model, device)
            self.spread.after(arm)
        if world.size > 1:  # all start from the same weights; each draws its own random numbers
            torch.manual_seed(config.seed + config.repeat + 1000 * world.rank)
        if config.compile:
            arm.replace_model(torch.compile)
        return arm

    def rehearse(self) -> dict[str, Any]:
        """Train another model for a few steps, off the clock, and see which kernels serve it.

        Libraries choose and compile kernels at their first call, which no time should include.
        """
        arm = self.build()
        batch = self.task.example(self.config, self.data, self.place.device)
        with self.place.world.watching_peers():
            step = functools.partial(arm.step, *batch, self.task.loss)
            for _ in range(_REHEARSAL_STEPS):
                step()
            return provenance.kernels_used(step, self.place.device)

    def batches(self, done: int) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """The batches after `done` steps to the end of the run, each with its step (from 1)."""
        step = done
        while step < self.total_steps:
            epoch, start = divmod(step, self.steps_per_epoch)
            left = self.total_steps - step
            for batch in itertools.islice(self.data.train_batches(epoch, start), left):
                step += 1
                yield step, batch

    def set_lr(self, arm: Arm, step: int) -> None:
        schedule.set_lr(arm.optimizer, self._lr(step))

    def _lr(self, step: int) -> float:
        of = self.config
        return of.lr * schedule.factor(of.schedule, step - 1, self.total_steps, of.warmup)

    def _epoch(self, step: int) -> int:
        """The epoch of step number `step`; both count from 1."""
        return math.ceil(step / self.steps_per_epoch)

    def _ends_epoch(self, step: int) -> bool:
        return step % self.steps_per_epoch == 0 or step == self.total_steps

    def _end_interval(self, step: int, *, is_timed: bool) -> None:
        """Wait for the device, read what the steps since the last interval left, and log it."""
        record, world = self.record, self.place.world
        step_ms = self.clock.flush() if is_timed else []
        losses, scales, skipped = self.steps.flush()
        losses = [total / world.size for total in world.sum(losses)]
        first = step - len(losses) + 1
        record.step_ms += step_ms
        record.losses += losses
        record.skipped_steps += sum(skipped)
        record.memory_bytes = max(record.memory_bytes, self.memory.peak())
        images = self.config.batch_size * world.size
        values = {
            "step": step,
            "epoch": self._epoch(step),
            "time_s": record.time_s,
            "train_loss": mean_of_finite(losses),
            "lr": self._lr(step),
            "images_per_s": images * len(step_ms) / sum(step_ms) * 1e3 if step_ms else None,
            "step_ms": sum(step_ms) / len(step_ms) if step_ms else None,
            "loss_scale": scales[-1],
            "skipped_steps": record.skipped_steps,
            "overflow_steps": [first + i for i, was_skipped in enumerate(skipped) if was_skipped],
            "memory_bytes": record.memory_bytes,
        }
        self.log.write("interval", values)
        self._check_interval(step, scales, skipped)

    def _check_interval(self, step: int, scales: list[float], skipped: list[bool]) -> None:
        """Raise Diverged if the interval ends in losses that are no numbers, or in skips only.

        Under a dynamic scale one bad batch is skipped and forgotten, so one bad loss says nothing.
        """
        losses = self.record.losses
        enough = 3 if any(skipped) else 1
        if not any(map(math.isfinite, losses[-enough:])):
            first = step
            while first > 1 and not math.isfinite(losses[first - 2]):
                first -= 1
            raise Diverged(first, f"the training loss became {losses[-1]}")
        if len(skipped) >= 10 and all(skipped) and scales[-1] <= 1.0:
            reason = f"every step overflows, at a loss scale of {scales[-1]:g} too"
            raise Diverged(step - len(skipped) + 1, reason)

    def _end_epoch(self, step: int) -> None:
        record, world, test = self.record, self.place.world, None
        if self.config.evaluate:
            with world.watching_peers():
                test = record.test = self.evaluate(self.arm)
            record.memory_bytes = max(record.memory_bytes, self.memory.peak())
            values = {"step": step, "epoch": self._epoch(step), "time_s": record.time_s}
            found = {"test_loss": test["loss"], "test_accuracy": test["accuracy"]}
            self.log.write("evaluation", values | found)
        record.end_epoch(self._epoch(step), test)
        name = _first_nonfinite_state(self.arm.bare_model)
        if world.any(name is not None):
            raise Diverged(step, f"{name or 'a tensor'} holds inf or NaN")
        if test and not math.isfinite(test["loss"]):
            raise Diverged(step, f"the test loss became {test['loss']}")
        if self.place.save_epochs:
            self.save(step)

    def evaluate(self, arm: Arm) -> dict[str, Any]:
        """Loss and accuracy over the whole test set, all processes' shares together."""
        device, started = self.place.device, time.perf_counter()
        loss = torch.zeros((), dtype=torch.float64, device=device)
        right = torch.zeros((), dtype=torch.int64, device=device)
        images, counts = 0, True
        with evaluating(arm), self.spread.evaluated(arm) as model:
            for inputs, targets in self.data.test_batches():
                outputs = model(inputs)
                loss += self.task.loss(outputs, targets).double() * len(targets)
                correct = self.task.correct(outputs, targets)
                counts = counts and correct is not None
                right += 0 if correct is None else correct
                images += len(targets)
        total = self.place.world.sum([loss.item(), float(right.item()), float(images)])
        return {
            "loss": total[0] / total[2],
            "accuracy": total[1] / total[2] if counts else None,
            "time_s": time.perf_counter() - started,
        }

    def result(self) -> RunResult:
        """Of a run that ended, at its end or in divergence."""
        place, done = self.place, len(self.record.losses)
        return RunResult.of(
            self.config,
            **self.record.summary(self.config.batch_size * place.world.size),
            **provenance.facts(place.device),
            data=self.data.describe(),
            gpu=place.folder.name if place.folder else "",
            world_size=place.world.size,
            command=list(place.command),
            diverged=None,
            loss_scale=self.arm.loss_scale(),
            policy=self.arm.policy,
            memory_kind=self.memory.kind,
            kernels=self.kernels,
            iterations=done,
            epochs=done / self.steps_per_epoch,
        )

    @property
    def checkpoint_path(self) -> Path | None:
        """The same for all processes; the main one writes it."""
        return self.place.folder / f"{self.name}.pt" if self.place.folder else None

    def save(self, step: int) -> Path | None:
        """The run's checkpoint after `step` steps, in place of its last one."""
        world, arm, path = self.place.world, self.arm, self.checkpoint_path
        with world.watching_peers():
            model, optimizer = self.spread.states(arm)
        rng = {name: world.stack(state) for name, state in checkpoint.rng_states(arm).items()}
        if path and self.files:
            saved = Checkpoint(
                config=self.config,
                name=self.name,
                step=step,
                model=model,
                optimizer=optimizer,
                scaler=arm.scaler_state(),
                rng=rng,
                record=dataclasses.asdict(self.record),
                world_size=world.size,
            )
            saved.save(path)
        return path

    def restore(self, arm: Arm) -> None:
        """Put `arm` and the random numbers where they were at the checkpoint to resume."""
        assert self.resume is not None
        states = self.resume.model, arm.bare_model.state_dict()
        for name in {**states[0], **states[1]}:
            then, now = (list(s[name].shape) if name in s else "missing" for s in states)
            if then != now:
                what = f"{self.config.model}: {name} is {then} in it, and {now} here"
                raise UsageError(f"--resume: the checkpoint is of another {what}")
        with self.place.world.watching_peers():
            self.spread.load(arm, self.resume.model, self.resume.optimizer)
        self.resume.restore(arm, self.place.world.rank)

    def _profiler(self) -> contextlib.AbstractContextManager[torch.profiler.profile | None]:
        if not self.place.profile_steps or self.files is None:
            return contextlib.nullcontext()
        trace = str(self.files / f"{self.name}.trace.json")
        return torch.profiler.profile(
            on_trace_ready=lambda profile: profile.export_chrome_trace(trace)
        )


def _first_nonfinite_state(model: nn.Module) -> str | None:
    """The first parameter or buffer that holds inf or NaN here. Waits for the device."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not torch.isfinite(local(tensor)).all():
            return name
    return None
