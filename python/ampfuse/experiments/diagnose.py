"""Why a run diverged: which module and which tensor left the finite numbers first, and what to do.

The run itself looks at losses alone, once an interval, and by then everything is NaN. So the steps
up to the bad one are trained once more from the last checkpoint, with the same data and random
numbers, and around the bad step every module is watched. (Hugging Face's DebugUnderflowOverflow
watches in the same way, for all of the training.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ampfuse.experiments.config import RunConfig

if TYPE_CHECKING:
    from ampfuse.experiments.training import Diverged, Training


@dataclasses.dataclass(frozen=True)
class Finding:
    """The first tensor with an inf or a NaN: in which step (from 1), of which module, and what it
    is."""

    step: int
    module: str
    tensor: str
    dtype: str
    kind: str

    def __str__(self) -> str:
        what = f"{self.tensor} of {self.module}, {self.dtype}"
        return f"{what}, holds {self.kind} in step {self.step}"


class Watch:
    """Context in which a model's modules report the first non-finite tensor, in ``finding``.

    Forward hooks see buffers and outputs in the order in which modules finish, so the first finding
    is the module where it began. Each look waits for the device.
    """

    def __init__(self, model: nn.Module, step: int) -> None:
        self.model, self.step = model, step
        self.finding: Finding | None = None
        self._names = {id(module): name or "the model" for name, module in model.named_modules()}
        self._handles = contextlib.ExitStack()

    def __enter__(self) -> Watch:
        for module in self.model.modules():
            self._handles.callback(module.register_forward_hook(self._after_forward).remove)
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    look = functools.partial(self._look, module, f"gradient of {name}")
                    self._handles.callback(parameter.register_hook(look).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._handles.close()

    def look_at_state(self) -> None:
        """At parameters and buffers, as a step left them."""
        for module in self.model.modules():
            parameters = module.named_parameters(recurse=False)
            for name, tensor in (*parameters, *module.named_buffers(recurse=False)):
                self._look(module, name, tensor)

    def _after_forward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        for name, buffer in module.named_buffers(recurse=False):
            self._look(module, name, buffer)
        for tensor in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            if isinstance(tensor, Tensor):
                self._look(module, "output", tensor)
                if tensor.requires_grad:
                    look = functools.partial(self._look, module, "gradient of output")
                    tensor.register_hook(look)

    def _look(self, module: nn.Module, what: str, tensor: Tensor) -> None:
        done = self.finding is not None or not tensor.is_floating_point()
        if done or torch.isfinite(tensor.detach()).all():
            return
        self.finding = Finding(
            step=self.step,
            module=f"{self._names[id(module)]} ({type(module).__name__})",
            tensor=what,
            dtype=str(tensor.dtype).removeprefix("torch."),
            kind="nan" if torch.isnan(tensor.detach()).any() else "inf",
        )


def explain(training: Training, error: Diverged) -> dict[str, Any]:
    """The ``diverged`` entry of a result: step, reason, place and a suggestion."""
    arm, alone = training.arm, training.place.world.size == 1
    finding = _replay(training, error.step) if alone else None
    if finding is None:  # not in training, then: what it left, or evaluation
        with Watch(arm.bare_model, error.step) as watch:
            watch.look_at_state()
            if watch.finding is None and alone:
                training.evaluate(arm)
        finding = watch.finding
    norm = batch_norm_dtype(arm.bare_model)
    return {
        "step": error.step,
        "reason": error.reason,
        "first": str(finding) if finding else None,
        "module": finding and finding.module,
        "tensor": finding and finding.tensor,
        "batch_norm_dtype": norm,
        "loss_scale": arm.loss_scale(),
        "suggestion": _suggestion(training.config, finding, norm),
    }


def _replay(training: Training, bad_step: int) -> Finding | None:
    """Train again up to `bad_step`, and watch it and the step before it."""
    arm = training.build(dataclasses.replace(training.config, compile=False, graph=False))
    if training.resume:
        training.resume.restore(arm)
    for step, (inputs, targets) in training.batches(training.first_step):
        training.set_lr(arm, step)
        if step < bad_step - 1:
            arm.step(inputs, targets, training.task.loss)
            continue
        with Watch(arm.bare_model, step) as watch:
            _, _, skipped = arm.step(inputs, targets, training.task.loss)
            if not skipped.item():  # gradients of a skipped step went nowhere
                watch.look_at_state()
            elif watch.finding and watch.finding.tensor.startswith("gradient"):
                watch.finding = None
        if watch.finding is not None or step >= bad_step:
            return watch.finding
    return None


def batch_norm_dtype(model: nn.Module) -> str | None:
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_var is not None:
            return str(module.running_var.dtype).removeprefix("torch.")
    return None


def _suggestion(config: RunConfig, finding: Finding | None, norm: str | None) -> str:
    if config.arm == "O3":
        missing, flags = ["FP32 masters"], []
        if norm == "float16":
            missing.append("FP32 batch norm")
            flags.append("--keep-batchnorm-fp32 True")
        if config.loss_scale in (None, 1.0):
            missing.append("a loss scale")
            flags.append("--loss-scale 128")
        tried = f"O3 with {' '.join(flags)}, or " if flags else ""
        lacks = " and ".join(filter(None, [", ".join(missing[:-1]), missing[-1]]))
        return f"O3 runs without {lacks}: try {tried}O2, which has them all"
    half, scale = config.arm in ("O1", "O2", "amp-fp16"), config.loss_scale
    if half and isinstance(scale, float):
        return f"a static loss scale of {scale:g} skips no step: try --loss-scale dynamic"
    if half and finding and finding.tensor == "output" and finding.kind == "inf":
        return "this activation is beyond FP16's 65504: try O5 or amp-bf16, or a lower --lr"
    return f"the rate may be too high for this batch: try a lower --lr (now {config.lr:g})"
