"""Outputs of models that compute in half precision: float32, without the FP32 copy where a loss
needs none.

A loss in half precision would be wrong without an error: a scaled gradient of 65536 does not fit
FP16, and a mean over many elements keeps three digits. So outputs are cast to float32. For logits
over many classes that copy and its gradient take more memory and time than the loss itself, and
cross-entropy needs neither: its kernel reads half logits and writes a half gradient.

The cast is an ordinary autograd function. Its result is float32 to autograd, hooks, views and
everything else above kernels; below, :class:`Float32Output` holds the half data, and makes FP32
memory for the first kernel that needs it. Gradients come back through the same type.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._dynamo import eval_frame as dynamo
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, UnsupportedOperatorException
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ampfuse import _core
from ampfuse import pytree as trees
from ampfuse.nn.functional import cross_entropy
from ampfuse.torch_utils import HALF_DTYPES

aten = torch.ops.aten


class _Memory:
    """What a tensor and all its views share: half data, and from some time on FP32 data instead.

    Attributes:
        half: the half data; None once `float32` is there.
        float32: laid out in memory as `half`.
        make: computes `float32` where there is no half data.
        source: what a fused loss knows of data that `make` would compute.
    """

    def __init__(
        self, half: Tensor | None, make: Callable[[], Tensor] | None = None, source: Any = None
    ) -> None:
        self.half, self.make, self.source = half, make, source
        self.float32: Tensor | None = None
        self.is_input = False  # of a graph that is traced
        self.version = _version(half)

    @property
    def data(self) -> Tensor | None:
        """What holds the values at present; None while `make` would compute them."""
        return self.half if self.float32 is None else self.float32

    def checked_half(self) -> Tensor | None:
        if _version(self.half) != self.version:
            raise RuntimeError(
                "The model modified one of its outputs in place after returning it and before it "
                "was read. Return a clone() of it, or pass cast_model_outputs=torch.float32 to "
                "amp.initialize."
            )
        return self.half

    def is_functional(self) -> bool:
        """Whether it belongs to a graph that AOTAutograd traces."""
        data = self.data
        if data is None and self.source is not None:
            data = (self.source[0] if isinstance(self.source, tuple) else self.source).rows
        return isinstance(data, FunctionalTensor)

    def widen(self) -> Tensor:
        """The FP32 data, which takes the place of the half data."""
        if self.float32 is None:
            half = self.checked_half()
            self.float32 = self.make() if half is None else _widened(half)  # type: ignore[misc]
            self.half = self.make = self.source = None
        return self.float32


def _widened(half: Tensor) -> Tensor:
    if _is_dense(half):
        return half.float()
    spans = [(n - 1) * step for n, step in zip(half.size(), half.stride(), strict=True)]
    return half.as_strided((1 + sum(spans),), (1,)).float().as_strided(half.size(), half.stride())


def _version(half: Tensor | None) -> int:
    return 0 if half is None or half.is_inference() else half._version


_refuse_access = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
_NO_MEMORY = (
    "This model output holds half-precision data, so it has no FP32 memory to point to. Pass "
    "output.as_subclass(torch.Tensor), or cast_model_outputs=torch.float32 to amp.initialize."
)


class Float32Output(Tensor):
    """A float32 tensor that holds half data until a kernel needs FP32 memory.

    What looks at memory below torch's dispatcher (a C++ extension that takes pointers) gets an
    error; ``numpy()``, ``data_ptr()`` and the like give FP32 memory, and
    ``as_subclass(torch.Tensor)`` a plain tensor that shares it.
    """

    _memory: _Memory

    @classmethod
    def of(cls, half: Tensor) -> Float32Output:
        """``half.float()``, later. `half` requires no gradient."""
        return cls._over(_Memory(half), half, 0)

    @classmethod
    def _over(cls, memory: _Memory, like: Tensor, offset: Any) -> Float32Output:
        with torch.inference_mode(False):  # as views of ordinary tensors are there too
            self: Any = Tensor._make_wrapper_subclass(
                cls, like.size(), like.stride(), offset, dtype=torch.float32, device=like.device
            )
        if _refuse_access is not None:  # which would read address zero
            with torch._C.DisableTorchFunctionSubclass():
                _refuse_access(Tensor.untyped_storage(self)._cdata, _NO_MEMORY)
        self._memory = memory
        return self

    def memory(self) -> Tensor | None:
        """The tensor that holds its data at present, half or float32."""
        return self._memory.data

    def half_data(self) -> Tensor | None:
        """The half data of this view; None once there is FP32 memory."""
        half = self._memory.checked_half()
        return None if half is None else self._view_of(half)

    def float32_data(self, keep: bool) -> Tensor:
        """The FP32 data of this view, which `keep` makes the tensor's memory."""
        if self._memory.float32 is None and not keep:
            half = self.half_data()
            if half is not None:
                return half.float()
        return self._view_of(self._memory.widen())

    def _view_of(self, base: Tensor) -> Tensor:
        size, stride, offset = self.size(), self.stride(), self.storage_offset()
        if offset == 0 and size == base.size() and stride == base.stride():
            return base
        # A mode that traces takes no tensors with memory.
        untraced = _disable_current_modes if type(base) is Tensor else contextlib.nullcontext
        with untraced():
            return base.as_strided(size, stride, base.storage_offset() + offset)

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.cross_entropy and torch.autograd.forward_ad._current_level < 0:
                return cross_entropy(*args, **kwargs)
            # A graph returns no views of its inputs.
            if func in _VIEWS and _is_traced(args[0]) and args[0]._memory.is_input:
                args = (torch.ops.ampfuse.float32(args[0]), *args[1:])
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if (rule := _rules().get(func)) is not None:
            found = rule(func, *args, **kwargs)
            if found is not NotImplemented:
                return found
        if _is_view(func) and isinstance(args[0], cls):
            return _view(func, args[0], *args[1:], **kwargs)
        writes = func._schema.is_mutable
        if writes and torch.Tag.inplace_view in func.tags:
            return _change_in_place(func, args, kwargs)
        return _in_float32(func, writes or torch.is_grad_enabled(), args, kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Of a graph's result with a history, FP32 data: of what type its gradient will be is not
        known when the graph is made."""
        if self.requires_grad and not self._memory.is_input and self._memory.is_functional():
            with FunctionalTensorMode():
                self._memory.widen()
            return ["data_in_memory"], None
        return ["data_in_memory"], self._memory.half is not None

    @property
    def data_in_memory(self) -> Tensor:
        """The half data, or the FP32 data that took its place."""
        is_traced = self._memory.is_functional()
        with FunctionalTensorMode() if is_traced else contextlib.nullcontext():
            half = self.half_data()
            return self.float32_data(keep=True) if half is None else half

    @classmethod
    def __tensor_unflatten__(cls, data: Any, is_half: Any, size: Any, stride: Any) -> Any:
        if is_half is None:
            return data["data_in_memory"]
        memory = _Memory(data["data_in_memory"])
        if not is_half:
            memory.half, memory.float32 = None, data["data_in_memory"]
        memory.is_input = True
        return cls._over(memory, data["data_in_memory"], 0)

    @property
    def __cuda_array_interface__(self) -> Any:
        return Tensor.__cuda_array_interface__.__get__(_InMemory.apply(self, True))

    @property
    def data(self) -> Tensor:
        """What ``detach()`` gives; setting it sets the memory."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, new: Tensor) -> None:
        if not isinstance(new, Float32Output):
            memory = _Memory(None)
            memory.float32 = new.detach()
            new = Float32Output._over(memory, new, 0)
        with torch._C.DisableTorchFunctionSubclass():
            Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self._memory = new._memory


# Where compiled code ends, Dynamo would compile what it calls.
_SKIP = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.SKIP)
for _name in ("__torch_function__", "__torch_dispatch__"):
    dynamo.set_code_exec_strategy(vars(Float32Output)[_name].__func__.__code__, _SKIP)


def _half_data(tensor: Tensor) -> Tensor | None:
    return tensor.half_data() if isinstance(tensor, Float32Output) else None


_core.C.set_half_data(_half_data, Float32Output.of)


class _InMemory(torch.autograd.Function):
    """The tensor with FP32 memory, as a plain one that shares it."""

    @staticmethod
    def forward(ctx: Any, output: Float32Output, keep: bool) -> Tensor:
        return output.float32_data(keep).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _is_traced(item: Any) -> bool:
    """Whether it stands for an output in a graph: its data are a tracer's."""
    if not isinstance(item, Float32Output):
        return False
    data = item.memory()
    if isinstance(data, FunctionalTensor):
        return torch._C._get_dispatch_mode(_FUNCTIONAL) is not None
    return data is not None and type(data) is not Tensor


_FUNCTIONAL = torch._C._TorchDispatchModeKey.FUNCTIONAL


_VIEWS = {
    function
    for name in """
        __getitem__ chunk diagonal expand expand_as flatten movedim moveaxis narrow permute reshape
        reshape_as select split squeeze swapaxes t tensor_split transpose unbind unflatten unfold
        unsqueeze view view_as __iter__
    """.split()
    for owner in (Tensor, torch)
    if (function := getattr(owner, name, None)) is not None
} | {getattr(Tensor, name).__get__ for name in ("T", "mT")}


def _of_memory(name: str, keep: bool = True) -> Callable[..., Any]:
    """A method that looks at memory, also where torch calls it with ``__torch_function__`` off."""
    method = getattr(Tensor, name)

    @functools.wraps(method)
    def of_memory(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            is_traced = keep and TracingContext.try_get() is not None
            return method(self if is_traced else _InMemory.apply(self, keep), *args, **kwargs)

    return of_memory


for _name in """
    numpy data_ptr untyped_storage storage _typed_storage __array__ __dlpack__ as_subclass
    __reduce_ex__ __deepcopy__ share_memory_ is_shared
""".split():
    setattr(Float32Output, _name, _of_memory(_name))
for _name in "tolist __format__ __repr__ __float__ __int__ __bool__ __index__".split():
    setattr(Float32Output, _name, _of_memory(_name, keep=False))


# --- what is done to it, below autograd -------------------------------------------------------


@functools.cache
def _is_view(func: Any) -> bool:
    """Whether a float32 result of `func` shares the memory of its first argument."""
    if func is aten._unsafe_view.default:  # of memory that nobody else knows
        return True
    results = [result.alias_info for result in func._schema.returns]
    return any(i is not None and not i.is_write for i in results)


def _view(func: Any, of: Float32Output, *args: Any, **kwargs: Any) -> Any:
    if func.name() in (
        "aten::view.dtype",
        "aten::view_as_complex",
        "aten::_nested_view_from_jagged",
    ):
        return func(of.float32_data(keep=True), *args, **kwargs)
    memory = of._memory
    if memory.half is None and memory.float32 is None:
        if func in (aten.detach.default, aten.alias.default):
            return Float32Output._over(memory, of, of.storage_offset())
        memory.widen()
    base = memory.widen() if memory.half is None else memory.checked_half()
    assert base is not None
    start = base.storage_offset()

    def again(view: Tensor) -> Tensor:
        return Float32Output._over(memory, view, view.storage_offset() - start)

    return pytree.tree_map_only(Tensor, again, func(of._view_of(base), *args, **kwargs))


def _change_in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """``unsqueeze_`` and the like change the tensor's shape and strides, not its memory."""
    if func in (aten.resize_.default, aten.resize_as_.default) or func.name() == "aten::set_":
        raise RuntimeError(
            f"{func} is not supported on a model's output: call it on "
            "output.as_subclass(torch.Tensor).clone()."
        )
    include = torch._C._meta_in_tls_dispatch_include()
    torch._C._set_meta_in_tls_dispatch_include(True)
    try:
        with torch._C._DisableTorchDispatch():
            func(*args, **kwargs)
    finally:
        torch._C._set_meta_in_tls_dispatch_include(include)
    return args[0]


def _in_float32(func: Any, keep: bool, args: Any, kwargs: Any) -> Any:
    """`func` of the FP32 data; what it writes into is returned as the tensor that was given."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for argument, value in zip(func._schema.arguments, args, strict=False):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and _is_traced(value) and value._memory.is_input:
            raise UnsupportedOperatorException(func)  # the compiler's graph ends here

    def plain(item: Any) -> Any:
        if not isinstance(item, Float32Output):
            return item
        pairs.append((item.float32_data(keep), item))
        return pairs[-1][0]

    def given(result: Any) -> Any:
        return next((item for data, item in pairs if data is result), result)

    out = func(*pytree.tree_map(plain, args), **pytree.tree_map(plain, kwargs))
    return pytree.tree_map(given, out) if func._schema.is_mutable else out


def _exactly(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What picks, compares or moves values gives the same of half data, and does not round."""
    floats = [t for t in trees.tensors(args) if t.is_floating_point()]
    dtypes = {None if (data := _half_data(t)) is None else data.dtype for t in floats}
    if None in dtypes or len(dtypes) > 1:
        return NotImplemented

    def half(item: Any) -> Any:
        return item.half_data() if isinstance(item, Float32Output) else item

    def widened(result: Any) -> Any:
        if not isinstance(result, Tensor) or result.dtype not in HALF_DTYPES:
            return result
        return Float32Output.of(result) if result.dim() else result.float()

    return pytree.tree_map(widened, func(*pytree.tree_map(half, args), **kwargs))


def _clone(func: Any, tensor: Float32Output, *, memory_format: Any = None) -> Any:
    half = _half_data(tensor)
    if half is None:
        return NotImplemented
    if memory_format not in (None, torch.preserve_format) or not _is_dense(half):
        half = half.clone(memory_format=memory_format or torch.preserve_format)
    return Float32Output.of(half.detach())  # nobody writes into half data


def _new_zeros(func: Any, like: Float32Output, size: Any, *, dtype: Any = None, **_: Any) -> Any:
    """Where a gradient of picked values goes."""
    half = _half_data(like)
    if half is None or dtype not in (None, torch.float32) or torch.is_grad_enabled():
        return NotImplemented
    zeros = half.new_zeros(size)
    return Float32Output._over(_Memory(zeros, source=_ZEROS), zeros, 0)


def _index_put(func: Any, zeros: Any, *args: Any) -> Any:
    """The gradient of ``y[indices]``; of what was picked twice it is added up in half precision."""
    if getattr(zeros, "_memory", _NOTHING).source is not _ZEROS:
        return NotImplemented
    return _exactly(func, zeros, *args)


def _to_copy(func: Any, tensor: Float32Output, *, dtype: Any = None, **kwargs: Any) -> Any:
    half = _half_data(tensor)
    if half is None:
        return NotImplemented
    if dtype not in (None, torch.float32):
        return func(half, dtype=dtype, **kwargs)
    return Float32Output.of(func(half, **kwargs))


def _is_dense(tensor: Tensor) -> bool:
    return bool(aten.is_non_overlapping_and_dense.default(tensor))


# --- the loss as log_softmax and nll_loss -----------------------------------------------------


class _LogSoftmax:
    """What is known of ``log_softmax`` of half logits: `rows` [rows, classes], and in time `lse`
    [rows, 2], which a loss computes on its way."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.lse: Tensor | None = None


def _log_softmax(func: Any, logits: Float32Output, dim: int, half_to_float: bool) -> Any:
    half = _half_data(logits)
    if half is None or half.dim() == 0 or dim % half.dim() != half.dim() - 1:
        return NotImplemented
    if not half.is_contiguous() or half.device.type not in ("cpu", "cuda"):
        return NotImplemented
    source = _LogSoftmax(half.view(-1, half.shape[-1]))
    memory = _Memory(None, lambda: func(half.float(), dim, False), source)
    return Float32Output._over(memory, half, 0)


def _nll_loss(
    func: Any, log_softmax: Any, target: Tensor, weight: Tensor | None, reduction: int, ignore: int
) -> Any:
    source = getattr(log_softmax, "_memory", _NOTHING).source
    if not isinstance(source, _LogSoftmax) or target.dim() != 1 or log_softmax.dim() != 2:
        return NotImplemented
    if target.dtype != torch.int64:  # torch takes uint8 too
        return NotImplemented
    weight = None if weight is None else weight.contiguous()
    losses, source.lse = torch.ops.ampfuse.cross_entropy_loss(
        source.rows, target.contiguous(), weight, ignore, 0.0
    )
    if reduction == 0:
        return losses, losses.new_zeros(())
    counts = target != ignore
    if weight is None:
        total = counts.sum().float()
    else:
        total = (weight[target.masked_fill(~counts, 0)] * counts).sum()
    return losses.sum() / total if reduction == 1 else losses.sum(), total


def _nll_loss_backward(
    func: Any,
    gradient: Tensor,
    log_softmax: Any,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore: int,
    total: Tensor,
) -> Any:
    source = getattr(log_softmax, "_memory", _NOTHING).source
    if not isinstance(source, _LogSoftmax) or source.lse is None:
        return NotImplemented
    each = (gradient / total if reduction == 1 else gradient).expand(target.shape).contiguous()

    def make() -> Tensor:
        like = torch.empty_like(source.rows, dtype=torch.float32)
        return func(gradient, like, target, weight, reduction, ignore, total)

    known = source, each, target.contiguous(), None if weight is None else weight.contiguous()
    memory = _Memory(None, make, (*known, ignore))
    return Float32Output._over(memory, source.rows, 0)


def _log_softmax_backward(func: Any, gradient: Any, output: Any, dim: int, dtype: Any) -> Any:
    softmax = getattr(output, "_memory", _NOTHING).source
    known = getattr(gradient, "_memory", _NOTHING).source
    if softmax is None or not isinstance(known, tuple) or known[0] is not softmax:
        return NotImplemented
    _, each, target, weight, ignore = known
    return Float32Output.of(
        torch.ops.ampfuse.cross_entropy_gradient(
            each, softmax.rows, target, weight, softmax.lse, ignore, 0.0
        )
    )


_NOTHING, _ZEROS = _Memory(None), object()


# What picks, compares or moves values.
_EXACT = """
    amax.default amin.default argmax.default argmin.default max.default max.dim min.default min.dim
    aminmax.default topk.default sort.default isnan.default isinf.default index.Tensor
    index_select.default gather.default masked_select.default cat.default flip.default
    slice_backward.default select_backward.default
""".split()


@functools.cache
def _rules() -> dict[Any, Callable[..., Any]]:
    """Made at the first use: torch makes operators when they are named."""
    return {
        aten.clone.default: _clone,
        aten.index_put.default: _index_put,
        aten.new_zeros.default: _new_zeros,
        aten._to_copy.default: _to_copy,
        aten._log_softmax.default: _log_softmax,
        aten._log_softmax_backward_data.default: _log_softmax_backward,
        aten.nll_loss_forward.default: _nll_loss,
        aten.nll_loss_backward.default: _nll_loss_backward,
        **{operator.attrgetter(name)(aten): _exactly for name in _EXACT},
    }


# --- what forward() of a model returns --------------------------------------------------------


# Elements from which on memory matters more than the host's time.
LEAST = 1 << 15


def widen(outputs: Any, model: torch.nn.Module) -> Any:
    """`outputs` of `model` with the half tensors in it float32.

    With FP32 memory at once where no gradient is wanted, where a tracer sees to it, under
    ``torch.func`` and forward-mode differentiation, and where there is little of it.
    """
    compiles = torch.compiler.is_compiling()
    at_once = (
        not torch.is_grad_enabled()
        or torch.compiler.is_exporting()
        or torch.jit.is_tracing()
        or getattr(model, "_is_replica", False)
        or (not compiles and torch._C._functorch.peek_interpreter_stack() is not None)
        or torch.autograd.forward_ad._current_level >= 0
    )

    def leaf(item: Any) -> Any:
        if not isinstance(item, Tensor):
            _warn_of_unknown(item)
            return item
        if item.dtype not in HALF_DTYPES:
            return item
        is_known = type(item) in (Tensor, FakeTensor)  # not a tracer's
        if not is_known or item.layout is not torch.strided:
            return item.float()
        if at_once or not item.requires_grad or not (compiles or item.numel() >= LEAST):
            return item.float()
        return torch.ops.ampfuse.float32(item)

    return trees.replace(outputs, leaf)


def _warn_of_unknown(item: Any) -> None:
    """Once of each type: half tensors that the cast does not find."""
    kind = type(item)
    if kind.__module__ == "builtins" or kind in _warned or torch.compiler.is_compiling():
        if kind is not types.GeneratorType or kind in _warned:
            return
    elif trees.walks(item) or not any(map(_is_half, getattr(item, "__dict__", {}).values())):
        return
    _warned.add(kind)
    warnings.warn(
        f"The model returns a {kind.__name__}, whose tensors amp cannot cast to float32: a loss of "
        "half tensors may overflow. Return a tensor, a list, tuple, dict or dataclass of tensors, "
        "register the class with torch.utils._pytree.register_pytree_node, or call float() on "
        "the tensors.",
        stacklevel=2,
    )


_warned: set[type] = set()


def _is_half(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in HALF_DTYPES and item.requires_grad
