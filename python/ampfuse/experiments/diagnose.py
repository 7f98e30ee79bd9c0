"""Why a run diverged: what was the first to leave the finite numbers, and what to do.

The run itself looks at losses alone, once an interval, and by then everything is NaN. So the steps
up to the bad one are trained once more from the last checkpoint, with the same data and random
numbers, and the bad step is watched (see :func:`ampfuse.amp.explain_overflow`).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torch import nn

from ampfuse import amp
from ampfuse.experiments.config import RunConfig
from ampfuse.insight import Explanation

if TYPE_CHECKING:
    from ampfuse.experiments.training import Diverged, Training


def explain(training: Training, error: Diverged) -> dict[str, Any]:
    """The ``diverged`` entry of a result: step, reason, place and a suggestion."""
    arm, alone = training.arm, training.place.world.size == 1
    step, found = _replay(training, error.step) if alone else (error.step, None)
    if found is None:  # not in training, then: what it left, or evaluation
        whole = training.spread.evaluated(arm)
        with whole as model, amp.explain_overflow(model) as watch:
            if alone:
                training.evaluate(arm)
        found = watch.explanation
    norm = batch_norm_dtype(arm.bare_model)
    return {
        "step": error.step,
        "reason": error.reason,
        "first": found and _in_words(found, step),
        "module": found and found.place,
        "tensor": found and found.tensor,
        "batch_norm_dtype": norm,
        "loss_scale": arm.loss_scale(),
        "suggestion": _suggestion(training.config, found, norm),
    }


def _in_words(found: Explanation, step: int) -> str:
    kind = str(found.dtype).removeprefix("torch.")
    what = f"{found.tensor} of {found.place}, {kind}, holds {found.kind} in step {step}"
    return f"{what} ({found.phase} pass, {found.operation})" if found.aten else what


def _replay(training: Training, bad_step: int) -> tuple[int, Explanation | None]:
    """Train again up to `bad_step`, and watch it and the step before it."""
    arm = training.build(dataclasses.replace(training.config, compile=False, graph=False))
    if training.resume:
        training.restore(arm)
    for step, (inputs, targets) in training.batches(training.first_step):
        training.set_lr(arm, step)
        if step < bad_step - 1:
            arm.step(inputs, targets, training.task.loss)
            continue
        with amp.explain_overflow(arm.bare_model) as watch:
            _, _, skipped = arm.step(inputs, targets, training.task.loss)
        found = watch.explanation
        if found and found.phase == "backward" and skipped.item():
            found = None  # gradients of a skipped step went nowhere
        if found is not None or step >= bad_step:
            return step, found
    return bad_step, None


def batch_norm_dtype(model: nn.Module) -> str | None:
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_var is not None:
            return str(module.running_var.dtype).removeprefix("torch.")
    return None


def _suggestion(config: RunConfig, found: Explanation | None, norm: str | None) -> str:
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
    if half and found and (found.phase, str(found.dtype)) == ("forward", "torch.float16"):
        return "this activation is beyond FP16's 65504: try O5 or amp-bf16, or a lower --lr"
    return f"the rate may be too high for this batch: try a lower --lr (now {config.lr:g})"
