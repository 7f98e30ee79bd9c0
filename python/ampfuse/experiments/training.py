"""One run: the training loop of all experiments, its measurements, and its checkpoints.

The host waits for the device once per interval (``--print-freq`` steps), to read losses, loss
scales, skipped steps and times.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ampfuse.command_line import UsageError
from ampfuse.devices import device_name
from ampfuse.experiments import distributed, models
from ampfuse.experiments.data import Data
from ampfuse.experiments.distributed import World
from ampfuse.experiments.results import mean_of_finite, write
from ampfuse.experiments.settings import Settings
from ampfuse.experiments.variants import Variant, build_variant, squared_error
from ampfuse.graphs import EAGER_CALLS
from ampfuse.measuring import ProcessMemory, StepClock, tensor_memory

FORMAT = 3  # of checkpoints
_WARM_UP_STEPS = 2
# Settings in which a resumed run may differ from its checkpoint.
_MAY_CHANGE = ("epochs", "iterations", "repeats", "print_freq", "evaluate", "workers")


class Diverged(Exception):
    """The loss is no longer finite."""


@dataclass
class Job:
    """The device and the files of all runs of a command."""

    device: torch.device
    world: World = field(default_factory=World)
    folder: Path | None = None
    label: str = ""  # name of the device in results
    checkpoints: bool = False  # save one at the end of each epoch
    profile: bool = False
    measure_tensors: bool = False  # report the tensors' memory instead of the process's


@dataclass
class Record:
    """The measurements so far, as plain data, so that checkpoints can contain them."""

    step_ms: list[float] = field(default_factory=list)
    time_s: float = 0.0  # their sum
    losses: list[float] = field(default_factory=list)  # of every step
    skipped_steps: int = 0
    memory_bytes: int = 0
    intervals: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)


class Run:
    """Trains one run of `settings` on `data`, from scratch or from a checkpoint."""

    def __init__(
        self,
        settings: Settings,
        data: Data,
        job: Job,
        name: str = "run",
        resume: dict[str, Any] | None = None,
    ) -> None:
        self.settings, self.data, self.job, self.resume = settings, data, job, resume
        self.device, self.world = job.device, job.world
        self.stem = job.folder and job.folder / name  # of the run's files
        self.seed = settings.seed + settings.repeat
        steps_of_epochs = (settings.epochs or math.inf) * data.batches_per_epoch
        self.total = int(min(settings.iterations or math.inf, steps_of_epochs))
        self.steps_done = resume["step"] if resume else 0
        if self.steps_done > self.total:
            asked = f"{self.total} are asked for"
            raise UsageError(
                f"--resume: the checkpoint has done {self.steps_done} steps, but {asked}"
            )
        self.record = resume["record"] if resume else Record()
        if resume and resume.get("device") != device_name(self.device):  # keeps losses
            self.record = replace(self.record, step_ms=[], time_s=0.0, memory_bytes=0)
        # The first steps capture the graph and are not timed.
        self._timed_from = self.steps_done + (EAGER_CALLS + 1 if settings.graph else 0)
        self.memory, self._clock = ProcessMemory(self.device), StepClock(self.device)
        self.memory_kind = "tensors" if job.measure_tensors else self.memory.kind
        self._tensors: int | None = None  # peak bytes of the tensors of a warm-up, if measured
        self._steps: list[Tensor] = []  # loss, loss scale and skip of each step of the interval
        self.variant: Variant | None = None  # set by `train`, as what follows; first, it warms up
        self._lr: float  # of the latest step
        self._bar: Any  # tqdm's

    def build(self) -> Variant:
        """A new network with an optimizer, in the precision of the run's variant."""
        settings = self.settings
        sizes = {name: getattr(self.data, name) for name in ("classes", "channels", "image_size")}
        model = models.build(settings.model, dropout=settings.dropout, **sizes)
        layout = torch.channels_last if settings.channels_last else torch.contiguous_format
        model.to(self.device, memory_format=layout)
        if settings.sync_bn:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if settings.fsdp:
            distributed.shard(model, separate_norms=settings.precision in distributed.HALF_LEVELS)
        loss_of = squared_error if settings.model == "mlp" else nn.functional.cross_entropy
        variant = build_variant(settings, model, loss_of, self.device)
        if self.world.size > 1 and not settings.fsdp:
            ids = [self.device.index] if self.device.type == "cuda" else None
            variant.model = nn.parallel.DistributedDataParallel(variant.model, device_ids=ids)
        return variant

    # ---- the training ----------------------------------------------------------------------------

    def train(self) -> None:
        """Train to the end of the run; test and save after each epoch. Raises Diverged."""
        from tqdm import tqdm

        self._start()
        settings, total = self.settings, self.total
        title = f"{settings.model} {settings.variant} {settings.repeat + 1}/{settings.repeats}"
        hidden = True if self.world.rank else None  # None: hidden unless in a terminal
        bar = tqdm(desc=title, total=total, initial=self.steps_done, leave=False, disable=hidden)
        with bar as self._bar, self._profile():
            self._clock.resume()
            while self.steps_done < total:
                epoch, start = divmod(self.steps_done, self.data.batches_per_epoch)
                batches = self.data.train_batches(epoch, start)
                for inputs, targets in islice(batches, total - self.steps_done):
                    # Nothing here waits for the device.
                    factor = lr_factor(settings.schedule, self.steps_done, total, settings.warmup)
                    self._lr = settings.lr * factor
                    self.variant.set_lr(self._lr)
                    self._record_step(*self.variant.step(inputs, targets))
                self._end_epoch()

    def _start(self) -> None:
        """Set the variant to train, in the state of the checkpoint. Another one warms up: libraries
        choose and compile kernels in its steps, which are not timed."""
        measured = self.job.measure_tensors
        self.memory.release()
        torch.manual_seed(self.seed)
        with tensor_memory(self.device) if measured else contextlib.nullcontext(None) as peak:
            self.variant = self.build()
            for batch in islice(self.data.train_batches(0), _WARM_UP_STEPS):
                self.variant.eager_step(*batch)
        self.variant = None
        self._tensors = None if peak is None else int(peak.mib * 2**20)
        self.memory.start()
        torch.manual_seed(self.seed)  # every variant starts from the same weights
        self.variant = self.build()
        if self.world.size > 1:  # from here on, each process draws its own random numbers
            torch.manual_seed(self.seed + 1000 * self.world.rank)
        if self.resume:
            self._restore(self.variant, self.resume)

    def _profile(self) -> contextlib.AbstractContextManager[Any]:
        if not (self.job.profile and self.stem and self.world.rank == 0):
            return contextlib.nullcontext()
        self.stem.parent.mkdir(parents=True, exist_ok=True)
        trace = f"{self.stem}.trace.json"
        return torch.profiler.profile(on_trace_ready=lambda p: p.export_chrome_trace(trace))

    def _record_step(self, loss: Tensor, loss_scale: Tensor, skipped: Tensor) -> None:
        """A step has ended. The tensors are overwritten by the next step if it is a graph."""
        self._clock.mark()
        self._steps.append(torch.stack((loss, loss_scale, skipped)))
        self.steps_done += 1
        self._bar.update()
        if self.steps_done == self._timed_from:
            self._clock.resume()
        ends = self.steps_done % self.data.batches_per_epoch == 0 or self.steps_done == self.total
        if ends or self.steps_done % self.settings.print_freq == 0:
            self._end_interval()

    def _end_epoch(self) -> None:
        """Test and save, if that was asked for."""
        record = self.record
        if self.settings.evaluate:
            with distributed.gathered(self.variant.bare_model):
                sums = self.variant.test(self.data.test_batches())
            loss, right, images = self.world.sum(sums)
            accuracy = right / images if self.data.classes else None
            record.memory_bytes = max(record.memory_bytes, self._tensors or self.memory.peak())
            evaluation = {
                "step": self.steps_done,
                "time_s": record.time_s,
                "loss": loss / images,
                "accuracy": accuracy,
            }
            record.evaluations.append(evaluation)
            if not math.isfinite(loss):
                raise Diverged(f"the test loss became {loss}")
        if self.job.checkpoints:
            self.save()
        self._clock.resume()

    def _end_interval(self) -> None:
        """Wait for the device, and read the measurements of the interval's steps."""
        record = self.record
        if self.steps_done > self._timed_from:
            step_ms = self._clock.flush()
            record.step_ms += step_ms
            record.time_s += sum(step_ms) / 1e3
        losses, scales, skipped = torch.stack(self._steps).T.tolist()
        self._steps.clear()
        losses = [total / self.world.size for total in self.world.sum(losses)]
        first = self.steps_done - len(losses) + 1
        record.losses += losses
        record.skipped_steps += int(sum(skipped))
        record.memory_bytes = max(record.memory_bytes, self._tensors or self.memory.peak())
        interval = {
            "step": self.steps_done,
            "time_s": record.time_s,
            "loss": mean_of_finite(losses),
            "lr": self._lr,
            "loss_scale": scales[-1],
            "overflow_steps": [first + i for i, x in enumerate(skipped) if x],
        }
        record.intervals.append(interval)
        self._bar.set_postfix(loss=interval["loss"])
        self._raise_if_diverged()
        self._clock.resume()

    def _raise_if_diverged(self) -> None:
        """Raise Diverged if the interval ends in non-finite losses, or the last ten steps were
        skipped at a static scale or one of at most 1. Under a dynamic scale, one non-finite loss is
        normal: that step is skipped."""
        losses, intervals = self.record.losses, self.record.intervals[-10:]
        if not any(map(math.isfinite, losses[-3 if intervals[-1]["overflow_steps"] else -1 :])):
            raise Diverged(f"the training loss became {losses[-1]}")
        if not isinstance(self.settings.loss_scale, float):  # a larger one may still be halved
            intervals = [each for each in intervals if each["loss_scale"] <= 1.0]
        overflows = {step for each in intervals for step in each["overflow_steps"]}
        if overflows.issuperset(range(self.steps_done - 9, self.steps_done + 1)):
            scale = intervals[-1]["loss_scale"]
            raise Diverged(f"every step overflows, even at a loss scale of {scale:.10g}")

    # ---- its checkpoint --------------------------------------------------------------------------

    def save(self) -> None:
        """Replace the run's checkpoint. All processes must call this."""
        model, optimizer = distributed.states_of(self.variant.bare_model, self.variant.optimizer)
        rng = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.device)
        values = {
            "format": FORMAT,
            "settings": asdict(self.settings),
            "step": self.steps_done,
            "device": device_name(self.device),
            "model": model,
            "optimizer": optimizer,
            "scaler": self.variant.scaler.state_dict(),
            "rng": self.world.gather(rng),
            "record": asdict(self.record),
        }
        if self.stem and self.world.rank == 0:
            torch.save(values, file := io.BytesIO())
            write(Path(f"{self.stem}.pt"), file.getvalue())

    def _restore(self, variant: Variant, saved: dict[str, Any]) -> None:
        """Restore `variant` and the random number generators from a checkpoint."""
        states = saved["model"], saved["optimizer"]
        distributed.load_states(variant.bare_model, variant.optimizer, *states)
        variant.scaler.load_state_dict(saved["scaler"])
        for group in variant.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # a captured step reads it from its device
                group["lr"] = group["lr"].to(variant.device)
        rng = saved["rng"][self.world.rank]
        torch.set_rng_state(rng["cpu"])
        if "cuda" in rng and variant.device.type == "cuda":
            torch.cuda.set_rng_state(rng["cuda"], variant.device)


def lr_factor(schedule: str, step: int, total: int, warmup: float = 0.0) -> float:
    """The factor of the peak rate in step `step` (from 0) of `total`. It rises linearly over the
    first `warmup` (a share of the run). Then it is "constant", falls to 0 ("linear", "cosine"), or
    drops to a tenth at each third of the run ("steps", as torch's ImageNet example)."""
    climb = math.ceil(warmup * total)
    if step < climb:
        return (step + 1) / climb
    share = (step - climb) / max(1, total - climb)
    shapes = {"constant": 1.0, "linear": 1 - share, "steps": 0.1 ** int(3 * share)}
    return {**shapes, "cosine": (1 + math.cos(math.pi * share)) / 2}[schedule]


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read `path`. Nothing in it is executed: it may come from anywhere."""
    try:
        values = torch.load(io.BytesIO(path.read_bytes()), map_location="cpu", weights_only=True)
        if values["format"] != FORMAT:
            raise ValueError("of another format")
        return {**values, "name": path.stem, "record": Record(**values["record"])}
    except OSError as error:
        raise UsageError(f"--resume '{path}': {error.strerror}") from error
    # torch raises nearly anything for a damaged file, and advises to execute its contents.
    except Exception as error:
        what = f"{path} is damaged or not a checkpoint of this version"
        raise UsageError(f"--resume: {what}") from error


def position(runs: Sequence[Settings], resume: dict[str, Any], world: World) -> int:
    """The index of the run that the checkpoint continues (it may be longer now); those before it
    are done."""
    if (processes := len(resume["rng"])) != world.size:
        raise UsageError(f"--resume: the checkpoint is of {processes} processes, not {world.size}")
    saved, differing = resume["settings"], []
    for run in map(asdict, runs):
        names = [name for name in {**run, **saved} if name not in _MAY_CHANGE]
        differing.append([name for name in names if run.get(name) != saved.get(name)])
    if nearest := min(differing, key=len):
        values = ", ".join(f"{name} {saved.get(name)}" for name in nearest)
        raise UsageError(f"--resume: the checkpoint is of other settings: {values}")
    return differing.index([])
