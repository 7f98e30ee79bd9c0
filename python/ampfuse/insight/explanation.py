"""The explanation of a step's first inf or NaN, with a suggestion."""

from __future__ import annotations

import dataclasses
import math

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
            inf or NaN if the width is not the cause, None if that is unknown.
        line: the line of the program that called the operation forward.
        scale: the loss scale: that of the scaler, else the factor above 1 of the whole loss.
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
        largest = self.scale * self.limit / beyond
        return 2.0 ** math.floor(math.log2(largest)) if 0 < largest < math.inf else None

    @property
    def is_harmless(self) -> bool:
        """True while a dynamic loss scale is still adapting: nothing has to be done."""
        return self.dynamic and self.helps_to_lower

    @property
    def helps_to_lower(self) -> bool:
        """This result fits with a loss scale that is lower, and at least 1."""
        return self.fitting_scale is not None and 1 <= self.fitting_scale < self.scale

    @property
    def suggestion(self) -> str:
        """The fix, in a sentence or two."""
        if self.phase in _SUGGESTIONS:
            return _SUGGESTIONS[self.phase]
        if self.largest_result is not None and not self.is_beyond:
            return _of_domain(self)
        if self.limit > torch.finfo(torch.float16).max:
            return (
                f"No dtype used in training has a wider range than {dtype_name(self.dtype)}, so "
                "the training diverges: lower the learning rate, clip gradients, check the loss "
                "and the data."
            )
        if self.helps_to_lower and self.fitting_scale is not None:
            return _of_scale(self, self.fitting_scale)
        if self.operation == "to":
            return _of_cast(self)
        if self.phase == "backward":
            return (
                "The gradient is beyond float16 without any loss scale: compute the operation in "
                f"FP32 (x.float()) so that its backward is, {_WIDER}."
            )
        return _of_operation(self)

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

# Where no operation of the step made it.
_SUGGESTIONS = {
    "data": "Check the data and its preprocessing. No dtype and no loss scale helps.",
    "weights": "An earlier step or the checkpoint put it there: go back to an intact checkpoint. A "
    "dynamic loss scale (or skip_nonfinite=True) skips steps that would do this; a lower learning "
    "rate or clipping keeps finite ones small. Or it did not fit when amp.initialize cast it to "
    "float16: use O5 or O4, whose BF16 has FP32's range.",
    "step": "The update left the type's range: lower the learning rate, clip gradients, and keep "
    "FP32 masters (O2 or O5 instead of O3; master_weights=True).",
    "another process": "Read the explanations of the other processes. If none has one, the sum of "
    "their gradients overflowed: reduce in FP32, or lower the loss scale.",
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
# Those that need a number above 0, which float16 may have rounded to 0.
_AT_ZERO = frozenset("div reciprocal log sqrt rsqrt pow norm linalg_vector_norm".split())
_WIDER = "or use BF16, whose range is FP32's (O4 or O5 instead of O1 or O2)"


def _of_domain(e: Explanation) -> str:
    """The operation has no finite result in any dtype."""
    if e.operation in _DOMAIN:
        cause = _DOMAIN[e.operation]
        is_at_zero = e.operation in _AT_ZERO
    elif e.kind == "nan":
        cause = f"{e.operation} has no finite result here, such as 0 / 0, inf - inf or 0 * inf"
        is_at_zero = True
    else:
        cause = f"the result of {e.operation} is beyond FP32's range too"
        is_at_zero = False
    suggestion = f"{cause[0].upper()}{cause[1:]}. No loss scale helps."
    if is_at_zero and e.dtype == torch.float16:
        suggestion += (
            " In float16 numbers below 3e-8 are 0, constants such as 1e-8 too: if that is the "
            "cause, compute them in FP32."
        )
    return suggestion


def _of_scale(e: Explanation, fitting: float) -> str:
    """A lower loss scale helps."""
    if e.dynamic:
        skips = max(1, round(math.log2(e.scale / fitting)))
        return (
            f"None needed: the dynamic loss scale of {e.scale:.10g} is still adapting. This "
            f"gradient fits from {fitting:.10g} on, after {skips} skipped "
            f"{'step' if skips == 1 else 'steps'}."
        )
    return (
        f"The static loss scale of {e.scale:.10g} is too high: this gradient fits with "
        f'{fitting:.10g} or less. Use loss_scale="dynamic", which finds it.'
    )


def _of_cast(e: Explanation) -> str:
    name = dtype_name(e.dtype)
    if e.kind == "-inf":
        return (
            f"A cast to {name} turned a finite number into -inf. If this is a mask, fill it with "
            f"torch.finfo(torch.{name}).min instead of -1e9, and do not hide a whole row; if not, "
            f"keep the values in FP32, {_WIDER}."
        )
    return f"These values do not fit into {name}: normalize them, keep them in FP32, {_WIDER}."


def _of_operation(e: Explanation) -> str:
    """An operation of the forward pass has results beyond float16."""
    without_autocast = f'torch.autocast("{e.device.partition(":")[0]}", enabled=False)'
    if e.aten.startswith(("aten.bmm", "aten.baddbmm")) and e.largest_result is not None:
        return (
            "These products fit if an operand is divided by "
            f"{math.ceil(e.largest_result / e.limit)} or more. Attention scores: scale the query "
            "before the product, q / d**0.5 @ k.mT, not the scores after it; or call "
            f"F.scaled_dot_product_attention; {_WIDER}."
        )
    if e.operation in _REDUCTIONS:
        return (
            f"Reduce in FP32: {e.operation}(x.float()), or dtype=torch.float32 where it takes "
            f"one; {_WIDER}."
        )
    if e.operation in _PRODUCTS:
        return (
            "The products are too large for float16: normalize the layer's input or scale its "
            f"weights down, run it under {without_autocast} on x.float(), {_WIDER}."
        )
    keep = (
        f"Keep {e.operation if e.aten else 'it'} in FP32: with {without_autocast}, on x.float(); "
        f"for a function of yours, @amp.float_function at O1; {_WIDER}."
    )
    if e.operation == "exp":
        return (
            "In a softmax, subtract the largest argument first, or call torch.softmax. "
            f"Otherwise: {keep}"
        )
    return keep
