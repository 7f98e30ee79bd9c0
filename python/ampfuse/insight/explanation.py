"""The explanation of a step's first inf or NaN, with a suggestion."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable

import torch

from ampfuse.insight.reporting import dtype_name


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The origin of an inf or a NaN that reached the loss or a gradient.

    Attributes:
        phase: "forward" or "backward", where an operation gave it; "data" or "weights", where the
            step began with it; "step", where the optimizer's update made it; "another process",
            where it came with the gradients of the others.
        module, module_type: the innermost module at work, by its qualified name ("" is the model
            itself), and its class; None outside of the model.
        operation: as users call it: ``softmax``, ``cross_entropy``, ``to`` for a cast. In the
            backward pass the one whose gradient this is.
        tensor: what held it: "output", a parameter, an argument of the model.
        kind: "inf", "-inf" or "nan".
        shape, dtype, device: of that tensor.
        aten: the operation as torch dispatched it, such as ``aten._softmax.default``.
        largest_input: largest magnitude among the operation's inputs.
        largest_result: what the result would have reached in a wider type (FP32; for FP32 FP64);
            inf or NaN if the width is not the cause, None if that is unknown. For a weight that
            ``amp.initialize`` made inf by its cast: what it was before.
        line: the line of the program that called the operation forward.
        scale: the number that the loss was multiplied by.
        dynamic: whether that number adapts itself.
    """

    phase: str
    module: str | None
    module_type: str | None
    operation: str
    tensor: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    aten: str = ""
    largest_input: float | None = None
    largest_result: float | None = None
    line: str | None = None
    scale: float = 1.0
    dynamic: bool = False

    @property
    def place(self) -> str:
        """The module as text: ``"encoder.0 (Linear)"``."""
        if self.module is None:
            return "code outside of the model"
        return f"{self.module or 'the model'} ({self.module_type})"

    @property
    def limit(self) -> float:
        """The largest finite number of the type."""
        return torch.finfo(self.dtype).max

    @property
    def fitting_scale(self) -> float | None:
        """The largest power of two as a loss scale with which this result would have fitted."""
        beyond = self.largest_result
        if self.phase != "backward" or beyond is None or not math.isfinite(beyond) or beyond == 0:
            return None
        return 2.0 ** math.floor(math.log2(self.scale * self.limit / beyond))

    @property
    def is_harmless(self) -> bool:
        """True while a dynamic loss scale is still adapting: nothing has to be done."""
        fitting = self.fitting_scale
        return self.dynamic and fitting is not None and 1 <= fitting < self.scale

    @property
    def suggestion(self) -> str:
        """The fix, in a sentence or two."""
        skips = max(1, round(math.log2(self.scale / (self.fitting_scale or self.scale))))
        return next(suggestion for when, suggestion in _SUGGESTIONS if when(self)).format(
            e=self,
            dtype=dtype_name(self.dtype),
            device=re.sub(r":\d+$", "", self.device),
            domain=_of_domain(self),
            by=math.ceil((self.largest_result or 0.0) / self.limit) if self.is_beyond else 0,
            skips=f"{skips} skipped step{'s' * (skips > 1)}",
            wider="or use BF16, whose range is FP32's (O4 or O5 instead of O1 or O2)",
        )

    @property
    def is_beyond(self) -> bool:
        """The result is finite, and the type too narrow for it."""
        return self.largest_result is not None and math.isfinite(self.largest_result)

    def __str__(self) -> str:
        lines = [_TITLES[self.phase].format(self=self)]
        if self.line:
            lines.append(f"  line     {self.line}")
        size = f"{dtype_name(self.dtype)} of shape {list(self.shape)} on {self.device}"
        if self.is_beyond:
            reached = self.largest_result or 0.0
            times = f"{reached / self.limit:.3g} times {self.limit:.5g}"
            size += f"; it would reach {reached:.4g}, {times}"
        lines.append(f"  {'result' if self.aten else 'tensor'}   {size}")
        if self.largest_input is not None:
            lines.append(f"  inputs   at most {self.largest_input:.4g} ({self.aten})")
        if self.phase == "backward" and self.scale != 1:
            lines.append(f"  scale    {self.scale:.10g}, {'dynamic' if self.dynamic else 'static'}")
        return "\n".join([*lines, f"  fix      {self.suggestion}"])


_TITLES = {
    "forward": "{self.kind} originated in the forward pass, in {self.operation} of {self.place}.",
    "backward": "{self.kind} originated in the backward pass of {self.operation} of {self.place}.",
    "data": "{self.kind} came in with the data: {self.tensor}, first used by {self.place}.",
    "weights": "{self.kind} was in {self.tensor} of {self.place} before the step.",
    "step": "{self.kind} was made by the optimizer's update of {self.tensor} of {self.place}.",
    "another process": "{self.kind} came from another process, with the reduced gradients: it is "
    "in {self.tensor} of {self.place}, and this process made none.",
}

_REDUCTIONS = frozenset(
    "sum mean norm linalg_vector_norm vector_norm var std var_mean std_mean prod cumsum cumprod "
    "logsumexp mse_loss l1_loss".split()
)
_PRODUCTS = frozenset(
    "linear matmul mm bmm baddbmm addbmm mv dot einsum conv scaled_dot_product_attention".split()
)
# The fix where an operation has no finite result in any dtype.
_NORM = "at 0 a norm has no gradient: add a small number under the root"
_DOMAIN = {
    "div": "the divisor holds 0: add a small number to it, or clamp it",
    "reciprocal": "the argument holds 0: add a small number to it, or clamp it",
    "exp": "the result is beyond FP32's range too: subtract the largest argument first, as "
    "torch.softmax and torch.logsumexp do",
    "log": "the argument holds 0 or less: use clamp(min=...), log1p or log_softmax",
    "sqrt": "at 0 the gradient of a square root is inf: add a small number under the root",
    "rsqrt": "the argument holds 0: add a small number to it",
    "pow": "a base of 0 or less has no such power or gradient: add a small number to it",
    "norm": _NORM,
    "linalg_vector_norm": _NORM,
    "softmax": "a whole row is -inf, as when a mask hides every element: leave one in each row",
}


def _of_domain(e: Explanation) -> str:
    if e.kind == "nan":
        other = f"{e.operation} has no finite result here, such as 0 / 0, inf - inf or 0 * inf"
    else:
        other = f"the result of {e.operation} is beyond FP32's range too"
    said = _DOMAIN.get(e.operation, other)
    underflow = (
        " In float16 numbers below 3e-8 are 0, constants such as 1e-8 too: if that is the cause, "
        "compute them in FP32."
    )
    is_zero = e.dtype == torch.float16 and "0" in said.split(":")[0]
    return f"{said[0].upper()}{said[1:]}. No loss scale helps.{underflow * is_zero}"


def _scale_helps(e: Explanation) -> bool:
    return e.scale > 1 and e.fitting_scale is not None and e.fitting_scale >= 1


_KEEP = (
    'Keep {what} in FP32: with torch.autocast("{{device}}", enabled=False), on x.float(); for a '
    "function of yours, @amp.float_function at O1; {{wider}}."
)
# When it helps, and what: the first that holds.
# fmt: off
_SUGGESTIONS: tuple[tuple[Callable[[Explanation], bool], str], ...] = (
    (lambda e: e.phase == "data",
     "Check the data and its preprocessing. No dtype and no loss scale helps."),
    (lambda e: e.phase == "weights",
     "An earlier step or the checkpoint put it there: go back to an intact checkpoint. A dynamic "
     "loss scale (or skip_nonfinite=True) skips steps that would do this; a lower learning rate "
     "or clipping keeps finite ones small. Or it did not fit when amp.initialize cast it to "
     "float16: use O5 or O4, whose BF16 has FP32's range."),
    (lambda e: e.phase == "step",
     "The update left the type's range: lower the learning rate, clip gradients, and keep FP32 "
     "masters (O2 or O5 instead of O3; master_weights=True)."),
    (lambda e: e.phase == "another process",
     "Read the explanations of the other processes. If none has one, the sum of their gradients "
     "overflowed: reduce in FP32, or lower the loss scale."),
    (lambda e: e.largest_result is not None and not e.is_beyond, "{domain}"),
    (lambda e: e.dtype != torch.float16,
     "No dtype used in training has a wider range than {dtype}, so the training diverges: lower "
     "the learning rate, clip gradients, check the loss and the data."),
    (lambda e: _scale_helps(e) and e.dynamic,
     "None needed: the dynamic loss scale of {e.scale:.10g} is still adapting. This gradient fits "
     "from {e.fitting_scale:.10g} on, after {skips}."),
    (_scale_helps,
     "The static loss scale of {e.scale:.10g} is too high: this gradient fits with "
     '{e.fitting_scale:.10g} or less. Use loss_scale="dynamic", which finds it.'),
    (lambda e: e.operation == "to" and e.kind == "-inf",
     "A cast to float16 turned a finite number into -inf. If this is a mask, fill it with "
     "torch.finfo(torch.float16).min instead of -1e9, and do not hide a whole row; if not, keep "
     "the values in FP32, {wider}."),
    (lambda e: e.operation == "to",
     "These values do not fit into float16: normalize them, keep them in FP32, {wider}."),
    (lambda e: e.phase == "backward",
     "The gradient is beyond float16 without any loss scale: compute the operation in FP32 "
     "(x.float()) so that its backward is, {wider}."),
    (lambda e: e.aten.startswith(("aten.bmm", "aten.baddbmm")) and e.is_beyond,
     "These products fit if an operand is divided by {by} or more. Attention scores: scale the "
     "query before the product, q / d**0.5 @ k.mT, not the scores after it; or call "
     "F.scaled_dot_product_attention; {wider}."),
    (lambda e: e.operation in _REDUCTIONS,
     "Reduce in FP32: {e.operation}(x.float()), or dtype=torch.float32 where it takes one; "
     "{wider}."),
    (lambda e: e.operation in _PRODUCTS,
     "The products are too large for float16: normalize the layer's input or scale its weights "
     'down, run it under torch.autocast("{device}", enabled=False) on x.float(), {wider}.'),
    (lambda e: e.operation == "exp",
     "In a softmax, subtract the largest argument first, or call torch.softmax. Otherwise: "
     + _KEEP.format(what="exp")),
    (lambda e: bool(e.aten), _KEEP.format(what="{e.operation}")),
    (lambda e: True, _KEEP.format(what="it")),
)
# fmt: on
