"""The training loop: one run, from its first step to its result.

:meth:`Training.run` is the part to read. The host does not wait for the device between the ends of
intervals (``--print-freq`` steps): losses, scales and skips are gathered there, and times are its
events.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ampfuse.experiments import schedule
from ampfuse.experiments.arms import Arm, build_arm, evaluating
from ampfuse.experiments.checkpoint import Checkpoint
from ampfuse.experiments.config import FORMAT, RunConfig
from ampfuse.experiments.distributed import World
from ampfuse.experiments.measure import RunMemory, StepClock, kernels_used
from ampfuse.experiments.record import LogFile, Record, StepLog, mean_of_finite, now
from ampfuse.experiments.signals import StopWish
from ampfuse.experiments.tasks import Task
from ampfuse.graphs import EAGER_CALLS, GraphedCall

if TYPE_CHECKING:
    from ampfuse.experiments.data import Data

_REHEARSAL_STEPS = 2


class Interrupted(Exception):
    """The run was asked to stop; `checkpoint` is where it can be taken up, if that was saved."""

    def __init__(self, signal_number: int, step: int, checkpoint: Path | None) -> None:
        super().__init__(f"stopped after step {step}")
        self.signal_number, self.step, self.checkpoint = signal_number, step, checkpoint


class Diverged(Exception):
    """The run left the finite numbers in step `step` (from 1)."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(reason)
        self.step, self.reason = step, reason


@dataclasses.dataclass
class Observer:
    """Who watches a run: a progress bar, TensorBoard. All its methods may stay as they are."""

    def step(self, count: int) -> None: ...

    def interval(self, values: dict[str, Any]) -> None: ...

    def evaluation(self, values: dict[str, Any]) -> None: ...


@dataclasses.dataclass
class Place:
    """Where runs happen and leave their files, the same for all runs of a command.

    Attributes:
        folder: of the result files; None to write none.
        profile_steps: trace so many steps with torch's profiler and end the run after them.
        save_epochs: write a checkpoint at the end of each epoch.
    """

    device: torch.device
    world: World
    folder: Path | None
    wish: StopWish
    profile_steps: int = 0
    save_epochs: bool = False


class Training:
    """One run of `config`, from scratch or from a checkpoint."""

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        data: Data,
        place: Place,
        name: str,
        resume: Checkpoint | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.config, self.task, self.data, self.place = config, task, data, place
        self.name, self.observer = name, observer or Observer()
        self.steps_per_epoch = data.batches_per_epoch
        self.total_steps = min(
            config.iterations or math.inf, (config.epochs or math.inf) * self.steps_per_epoch
        )
        self.resume = resume
        self.first_step = resume.step if resume else 0
        self.record = Record(**resume.record) if resume else Record()
        # Only the main process writes.
        self.files = place.folder if place.world.is_main else None
        self._set_backends()

    def _set_backends(self) -> None:
        torch.backends.cudnn.benchmark = self.config.cudnn_benchmark
        torch.backends.cudnn.deterministic = self.config.deterministic
        torch.use_deterministic_algorithms(self.config.deterministic, warn_only=True)

    # --- model, optimizer, step ----------------------------------------------------------------

    def build(self, config: RunConfig | None = None) -> Arm:
        """Model and optimizer of a run that starts, in their arm: the same weights in every arm."""
        config, device = config or self.config, self.place.device
        torch.manual_seed(config.seed + config.repeat)
        model = self.task.build_model(config, self.data)
        if config.sync_bn:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        layout = torch.channels_last if config.channels_last else torch.contiguous_format
        arm = build_arm(config, model.to(device, memory_format=layout), device)
        if self.place.world.size > 1:
            # Every process starts from rank 0's weights; each draws its own random numbers.
            ids = [device.index] if device.type == "cuda" else None
            arm.replace_model(lambda m: nn.parallel.DistributedDataParallel(m, device_ids=ids))
            torch.manual_seed(config.seed + config.repeat + 1000 * self.place.world.rank)
        if config.compile:
            arm.replace_model(torch.compile)
        return arm

    def step_function(self, arm: Arm) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
        def step(inputs: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
            return arm.step(inputs, targets, self.task.loss)

        return GraphedCall(step) if self.config.graph else step

    def _untimed_steps(self) -> int:
        """Training steps off the clock: a graph is captured, or code is compiled, in them."""
        return EAGER_CALLS + 1 if self.config.graph else 2 if self.config.compile else 0

    def rehearse(self) -> dict[str, Any]:
        """Train another model for a few steps, off the clock, and see which kernels serve it.

        Libraries choose and compile kernels at their first call, which no time should include.
        """
        arm = self.build()
        batch = self.task.example(self.config, self.data, self.place.device)
        with self.place.world.watching_peers():
            for _ in range(_REHEARSAL_STEPS):
                arm.step(*batch, self.task.loss)
            return kernels_used(lambda: arm.step(*batch, self.task.loss), self.place.device)

    # --- the run ---------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the end.

        Returns:
            what :meth:`measured` says.

        Raises:
            Interrupted: a signal came; a checkpoint was saved.
            Diverged: the loss or a weight is no number any more.
            PeerLost: another process of the training ended.
        """
        config, place, record = self.config, self.place, self.record
        memory = self.memory = RunMemory(place.device)
        memory.release()
        self.kernels = self.rehearse()
        memory.start()
        arm = self.arm = self.build()
        if self.resume:
            self.resume.restore(arm)
        train_step = self.step_function(arm)
        clock, steps = StepClock(place.device), StepLog(config.print_freq, place.device)
        log = LogFile(self.files / f"{self.name}.jsonl", self.first_step) if self.files else None
        untimed_until = self.first_step + self._untimed_steps()
        profiler = self._profiler()

        step = self.first_step
        if step and self._ends_epoch(step) and len(record.epoch_log) < self._epoch(step):
            self._end_epoch(step, memory, log)  # it was stopped before that
        clock.resume()
        while step < self.total_steps:
            epoch, start = divmod(step, self.steps_per_epoch)
            for inputs, targets in self.data.train_batches(epoch, start):
                self.set_lr(arm, step)
                with place.world.watching_peers():
                    loss, scale, skipped = train_step(inputs, targets)
                    if config.loop == "original":
                        loss.item()  # the published scripts added it up on the host
                clock.mark()
                steps.add(loss, scale, skipped)
                step += 1
                self.observer.step(1)
                if profiler:
                    profiler.step()
                at_end = self._ends_epoch(step)
                if step == untimed_until:
                    clock.flush()
                    clock.resume()
                stop = place.world.any(place.wish.received is not None)
                if stop or at_end or step % config.print_freq == 0:
                    self._end_interval(step, clock, steps, memory, log, untimed_until)
                if stop:
                    raise Interrupted(place.wish.received or 15, step, self.save(step))
                if at_end:
                    break
            self._end_epoch(step, memory, log)
            clock.resume()
        if profiler:
            profiler.stop()
        return self.measured()

    def measured(self) -> dict[str, Any]:
        """The measurements of a run that ended, at its end or in divergence."""
        done = len(self.record.losses)
        return {
            **self.record.summary(self.config.batch_size * self.place.world.size),
            "loss_scale": self.arm.loss_scale(),
            "policy": self.arm.policy,
            "memory_kind": self.memory.kind,
            "kernels": self.kernels,
            "iterations": done,
            "epochs": done / self.steps_per_epoch,
            "started": self.record.started,
        }

    def _epoch(self, step: int) -> int:
        """The epoch (from 1) that step number `step` (from 1) belongs to."""
        return math.ceil(step / self.steps_per_epoch)

    def _ends_epoch(self, step: int) -> bool:
        return step % self.steps_per_epoch == 0 or step == self.total_steps

    def set_lr(self, arm: Arm, step: int) -> None:
        """The rate for the step after `step` steps."""
        schedule.set_lr(arm.optimizer, self._lr(step))

    def _lr(self, step: int) -> float:
        config = self.config
        factor = schedule.factor(config.schedule, step, int(self.total_steps), config.warmup)
        return config.lr * factor

    def _end_interval(
        self,
        step: int,
        clock: StepClock,
        steps: StepLog,
        memory: RunMemory,
        log: LogFile | None,
        untimed_until: int,
    ) -> None:
        """Wait for the device, read what the steps since the last interval left, and log it."""
        step_ms = clock.flush()
        losses, scales, skipped = steps.flush()
        world = self.place.world
        losses = [total / world.size for total in world.sum(losses)]
        if step <= untimed_until:
            step_ms = []
        overflows = self.record.add_interval(step, step_ms, losses, skipped, memory.peak())
        images = self.config.batch_size * world.size
        values = {
            "step": step,
            "epoch": self._epoch(step),
            "time_s": self.record.time_s,
            "train_loss": mean_of_finite(losses),
            "lr": self._lr(step - 1),
            "images_per_s": images * len(step_ms) / sum(step_ms) * 1e3 if step_ms else None,
            "step_ms": sum(step_ms) / len(step_ms) if step_ms else None,
            "loss_scale": scales[-1],
            "skipped_steps": self.record.skipped_steps,
            "overflow_steps": overflows,
            "memory_bytes": self.record.memory_bytes,
        }
        if log:
            log.write("interval", values)
        self.observer.interval(values)
        self._check_interval(step, losses, scales, skipped)

    def _check_interval(
        self, step: int, losses: list[float], scales: list[float], skipped: list[bool]
    ) -> None:
        """Raise Diverged if the interval ends in losses that are no numbers, or in skips only.

        Under a dynamic scale one bad batch is skipped and forgotten, so one bad loss says nothing.
        """
        enough = 3 if any(skipped) else 1
        if not any(map(math.isfinite, self.record.losses[-enough:])):
            first = step
            while first > 1 and not math.isfinite(self.record.losses[first - 2]):
                first -= 1
            raise Diverged(first, f"the training loss became {losses[-1]}")
        if len(skipped) >= 10 and all(skipped) and scales[-1] <= 1.0:
            reason = f"every step overflows, at a loss scale of {scales[-1]:g} too"
            raise Diverged(step - len(skipped) + 1, reason)

    def _end_epoch(self, step: int, memory: RunMemory, log: LogFile | None) -> None:
        epoch = self._epoch(step)
        if self.config.evaluate:
            with self.place.world.watching_peers():
                test = self.evaluate(self.arm)
            self.record.test = test
            self.record.memory_bytes = max(self.record.memory_bytes, memory.peak())
            values = {
                "step": step,
                "epoch": epoch,
                "time_s": self.record.time_s,
                "test_loss": test["loss"],
                "test_accuracy": test["accuracy"],
            }
            if log:
                log.write("evaluation", values)
            self.observer.evaluation(values)
        self.record.end_epoch(epoch, self.record.test if self.config.evaluate else None)
        name = _first_nonfinite_state(self.arm.bare_model)
        if self.place.world.any(name is not None):
            raise Diverged(step, f"{name or 'a tensor'} holds inf or NaN")
        if self.config.evaluate and not math.isfinite(self.record.test["loss"]):
            raise Diverged(step, f"the test loss became {self.record.test['loss']}")
        if self.place.save_epochs:
            self.save(step)

    def evaluate(self, arm: Arm) -> dict[str, Any]:
        """Loss and accuracy over the whole test set, all processes' shares together."""
        device, started = self.place.device, time.perf_counter()
        loss = torch.zeros((), dtype=torch.float64, device=device)
        right = torch.zeros((), dtype=torch.int64, device=device)
        images, counts = 0, True
        with evaluating(arm, distributed=self.place.world.size > 1) as model:
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

    # --- files ---------------------------------------------------------------------------------

    @property
    def checkpoint_path(self) -> Path | None:
        return self.files / f"{self.name}.pt" if self.files else None

    def save(self, step: int) -> Path | None:
        """Write the checkpoint of the run after `step` steps, in place of its last one."""
        path = self.checkpoint_path
        if path is not None:
            state = self.record.state()
            Checkpoint.take(self.config, self.name, step, self.arm, state).save(path)
        return path

    def _profiler(self) -> torch.profiler.profile | None:
        if not self.place.profile_steps or self.files is None:
            return None
        trace = self.files / f"{self.name}.trace.json"
        profiler = torch.profiler.profile(
            on_trace_ready=lambda profile: profile.export_chrome_trace(str(trace))
        )
        profiler.start()
        return profiler


def result_of(
    config: RunConfig, measured: dict[str, Any], data: dict[str, Any], place: dict[str, Any]
) -> dict[str, Any]:
    """The contents of a result file; `place` is what is the same for all runs of a command."""
    return {
        "format": FORMAT,
        "experiment": config.experiment,
        "recipe": config.recipe,
        "model": config.model,
        "data": data,
        **place,
        "arm": config.arm,
        "method": config.method,
        "loop": config.loop,
        "batch_size": config.batch_size,
        "repeat": config.repeat,
        "repeats": config.repeats,
        "seed": config.seed + config.repeat,
        "switches": {
            name: getattr(config, name)
            for name in ("channels_last", "cudnn_benchmark", "graph", "compile", "deterministic")
        },
        "optimizer": {
            "name": config.optimizer,
            **{
                name: getattr(config, name)
                for name in ("lr", "momentum", "weight_decay", "clip", "schedule", "warmup")
            },
        },
        "diverged": None,
        **measured,
        "finished": now(),
    }


def _first_nonfinite_state(model: nn.Module) -> str | None:
    """The first parameter or buffer that holds inf or NaN. Waits for the device."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            return name
    return None
