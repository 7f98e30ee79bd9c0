"""Outputs of half-precision models: float32, without an FP32 copy where a loss needs none.

A loss in half precision would be wrong without an error: a scaled gradient of 65536 does not fit
FP16, and a mean over many elements keeps three digits. So outputs are cast to float32. For logits
over many classes that copy and its gradient take more memory and time than the loss itself, and
cross-entropy needs neither: its kernel reads half logits and writes a half gradient.

The cast is an ordinary autograd function. Its result is float32 to autograd, hooks, views and
everything else above kernels; below, :class:`Float32Output` holds the half data, and makes FP32
memory for the first kernel that needs it. Gradients come back through the same type.
output_rules.py has the operations that need no FP32 memory.
"""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from ampfuse import _core
from ampfuse import pytree as trees
from ampfuse.nn.functional import cross_entropy
from ampfuse.torch_utils import (
    HALF_DTYPES,
    FakeTensor,
    FunctionalTensor,
    FunctionalTensorMode,
    TracingContext,
    UnsupportedOperatorException,
    disable_current_modes,
    is_functionalizing,
    is_under_forward_ad,
    is_under_torch_func,
    on_metadata,
    refuse_memory_access,
    skip_frames,
)

aten = torch.ops.aten


class Memory:
    """Storage shared by a tensor and its views: half data until first FP32 access, then FP32 data.

    Attributes:
        half: the half data; None once `float32` exists, and while `make` has not been called.
        float32: laid out in memory as `half`.
        make: computes `float32` where there is no half data.
        source: how a fused loss computes from data that `make` would compute; see output_rules.py.
        is_input: whether it is an input of a graph that is traced.
    """

    def __init__(
        self, half: Tensor | None, make: Callable[[], Tensor] | None = None, source: Any = None
    ) -> None:
        self.half, self.make, self.source = half, make, source
        self.float32: Tensor | None = None
        self.is_input = False
        self.version = _version(half)

    @property
    def present(self) -> Tensor | None:
        """The tensor that holds the values now; None while `make` would compute them."""
        return self.half if self.float32 is None else self.float32

    def data(self) -> Tensor:
        """The half data, or the FP32 data that replaced it or that `make` computes."""
        half = self.checked_half()
        return self.widen() if half is None else half

    def checked_half(self) -> Tensor | None:
        """The half data, or None. Raises RuntimeError if the model has written to it."""
        if self.half is not None and _version(self.half) != self.version:
            raise RuntimeError(
                "The model modified one of its outputs in place after returning it and before it "
                "was read. Return a clone() of it, or pass cast_model_outputs=torch.float32 to "
                "amp.initialize."
            )
        return self.half

    def is_functional(self) -> bool:
        """Whether it belongs to a graph that AOTAutograd traces."""
        data = self.present
        if data is None and self.source is not None:
            data = self.source.rows
        return isinstance(data, FunctionalTensor)

    def widen(self) -> Tensor:
        """The FP32 data, which replaces the half data."""
        if self.float32 is None:
            half = self.checked_half()
            self.float32 = self.make() if half is None else _widened(half)  # type: ignore[misc]
            self.half = self.make = self.source = None
        return self.float32


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill their memory, without gaps and each once."""
    return bool(aten.is_non_overlapping_and_dense.default(tensor))


def _widened(half: Tensor) -> Tensor:
    """``half.float()`` with the same strides, also where these have gaps or overlap."""
    if is_dense(half):
        return half.float()
    spans = [(n - 1) * step for n, step in zip(half.size(), half.stride(), strict=True)]
    return half.as_strided((1 + sum(spans),), (1,)).float().as_strided(half.size(), half.stride())


def _version(half: Tensor | None) -> int:
    return 0 if half is None or half.is_inference() else half._version


_NO_MEMORY = (
    "This model output holds half-precision data, so it has no FP32 memory to point to. Pass "
    "output.as_subclass(torch.Tensor), or cast_model_outputs=torch.float32 to amp.initialize."
)


class Float32Output(Tensor):
    """A float32 tensor that holds half data until a kernel needs FP32 memory.

    A C++ extension that takes pointers below torch's dispatcher gets an error. ``numpy()``,
    ``data_ptr()`` and the like give FP32 memory, and ``as_subclass(torch.Tensor)`` a plain tensor
    that shares it.
    """

    memory: Memory

    @classmethod
    def of(cls, half: Tensor) -> Float32Output:
        """``half.float()``, computed at the first FP32 access. `half` requires no gradient."""
        return cls.over(Memory(half), half, 0)

    @classmethod
    def over(cls, memory: Memory, like: Tensor, offset: Any) -> Float32Output:
        """A view of `memory`, laid out as `like`, that begins `offset` elements from its start."""
        with torch.inference_mode(False):  # as views of ordinary tensors are there too
            self: Any = Tensor._make_wrapper_subclass(
                cls, like.size(), like.stride(), offset, dtype=torch.float32, device=like.device
            )
        refuse_memory_access(self, _NO_MEMORY)
        self.memory = memory
        return self

    def half_data(self) -> Tensor | None:
        """The half data of this view; None once there is FP32 memory."""
        half = self.memory.checked_half()
        return None if half is None else self._view_of(half)

    def float32_data(self, keep: bool) -> Tensor:
        """The FP32 data of this view; with `keep` it becomes the tensor's memory."""
        if self.memory.float32 is None and not keep:
            half = self.half_data()
            if half is not None:
                return half.float()
        return self._view_of(self.memory.widen())

    def _view_of(self, base: Tensor) -> Tensor:
        size, stride, offset = self.size(), self.stride(), self.storage_offset()
        if offset == 0 and size == base.size() and stride == base.stride():
            return base
        # A mode that traces takes no tensors with memory.
        untraced = disable_current_modes if type(base) is Tensor else contextlib.nullcontext
        with untraced():
            return base.as_strided(size, stride, base.storage_offset() + offset)

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.cross_entropy and not is_under_forward_ad():
                return cross_entropy(*args, **kwargs)
            # A graph returns no views of its inputs.
            if func in _VIEWS and _is_traced(args[0]) and args[0].memory.is_input:
                args = (torch.ops.ampfuse.float32(args[0]), *args[1:])
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if (rule := _rules().get(func)) is not None:
            result = rule(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if _is_view(func) and isinstance(args[0], cls):
            return _view(func, args[0], *args[1:], **kwargs)
        writes = func._schema.is_mutable
        if writes and torch.Tag.inplace_view in func.tags and isinstance(args[0], cls):
            return _change_in_place(func, args, kwargs)
        return _in_float32(func, writes or torch.is_grad_enabled(), args, kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """The half or FP32 data, for AOTAutograd.

        Graph outputs that require grad are flattened as FP32: the dtype of their gradient is
        unknown at trace time.
        """
        if self.requires_grad and not self.memory.is_input and self.memory.is_functional():
            with FunctionalTensorMode():
                self.memory.widen()
            return ["data_in_memory"], None
        return ["data_in_memory"], self.memory.half is not None

    @property
    def data_in_memory(self) -> Tensor:
        """The half data, or the FP32 data that replaced it."""
        is_traced = self.memory.is_functional()
        with FunctionalTensorMode() if is_traced else contextlib.nullcontext():
            return self._view_of(self.memory.data())

    @classmethod
    def __tensor_unflatten__(cls, data: Any, is_half: Any, size: Any, stride: Any) -> Any:
        if is_half is None:
            return data["data_in_memory"]
        memory = Memory(data["data_in_memory"])
        if not is_half:
            memory.half, memory.float32 = None, data["data_in_memory"]
        memory.is_input = True
        return cls.over(memory, data["data_in_memory"], 0)

    @property
    def __cuda_array_interface__(self) -> Any:
        return Tensor.__cuda_array_interface__.__get__(_InMemory.apply(self, True))

    @property
    def data(self) -> Tensor:
        """The result of ``detach()``; setting it sets the memory."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, new: Tensor) -> None:
        if not isinstance(new, Float32Output):
            memory = Memory(None)
            memory.float32 = new.detach()
            new = Float32Output.over(memory, new, 0)
        with torch._C.DisableTorchFunctionSubclass():
            Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self.memory = new.memory


def half_data(tensor: Tensor) -> Tensor | None:
    """The half data of a model output; None for other tensors, and once it has FP32 memory."""
    return tensor.half_data() if isinstance(tensor, Float32Output) else None


_core.C.set_half_data(half_data, Float32Output.of)

# torch and the extension call these. After the end of a compiled graph, and in one that the backend
# runs as it is, Dynamo would compile them and what they call.
for _name in ("__torch_function__", "__torch_dispatch__", "of"):
    skip_frames(vars(Float32Output)[_name].__func__, and_callees=True)
skip_frames(half_data, and_callees=True)


class _InMemory(torch.autograd.Function):
    """A plain tensor that shares the FP32 memory of the output."""

    @staticmethod
    def forward(ctx: Any, output: Float32Output, keep: bool) -> Tensor:
        return output.float32_data(keep).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _is_traced(item: Any) -> bool:
    """Whether it is an output in a graph that is traced: its data belong to a tracer."""
    if not isinstance(item, Float32Output):
        return False
    data = item.memory.present
    if isinstance(data, FunctionalTensor):
        return is_functionalizing()
    return data is not None and type(data) is not Tensor


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
    """The method `name` of the tensor in FP32 memory, also with ``__torch_function__`` off."""
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


# --- operations on it, below autograd ---------------------------------------------------------


@functools.cache
def _is_view(func: Any) -> bool:
    """Whether a float32 result of `func` shares the memory of its first argument."""
    if func is aten._unsafe_view.default:  # no other tensor has its memory
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
    memory = of.memory
    if memory.present is None and func in (aten.detach.default, aten.alias.default):
        return Float32Output.over(memory, of, of.storage_offset())
    base = memory.data()
    start = base.storage_offset()

    def wrapped(view: Tensor) -> Tensor:
        return Float32Output.over(memory, view, view.storage_offset() - start)

    return pytree.tree_map_only(Tensor, wrapped, func(of._view_of(base), *args, **kwargs))


def _change_in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """``unsqueeze_`` and the like change the tensor's shape and strides, not its memory."""
    if func.overloadpacket in (aten.resize_, aten.resize_as_, aten.set_):
        raise RuntimeError(
            f"{func} is not supported on a model's output: call it on "
            "output.as_subclass(torch.Tensor).clone()."
        )
    with on_metadata():
        func(*args, **kwargs)
    return args[0]


def _in_float32(func: Any, keep: bool, args: Any, kwargs: Any) -> Any:
    """The result of `func` on FP32 data; tensors that it writes into are returned as passed."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for argument, value in zip(func._schema.arguments, args, strict=False):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and _is_traced(value) and value.memory.is_input:
            raise UnsupportedOperatorException(func)  # the compiler's graph ends here

    def plain(item: Any) -> Any:
        if not isinstance(item, Float32Output):
            return item
        pairs.append((item.float32_data(keep), item))
        return pairs[-1][0]

    def as_passed(result: Any) -> Any:
        return next((item for data, item in pairs if data is result), result)

    out = func(*pytree.tree_map(plain, args), **pytree.tree_map(plain, kwargs))
    return pytree.tree_map(as_passed, out) if func._schema.is_mutable else out


@functools.cache
def _rules() -> dict[Any, Callable[..., Any]]:
    """By operator, what computes it from half data; at first use, as torch makes operators then."""
    from ampfuse.amp import output_rules  # which needs the class

    return output_rules.rules()


# --- the outputs of a model -------------------------------------------------------------------


# With fewer elements the host's time matters more than memory.
LEAST = 1 << 15


def widen(outputs: Any, model: torch.nn.Module) -> Any:
    """The `outputs` of `model` with their half tensors cast to float32.

    The cast is immediate (``float()``) where no gradient is wanted, where a tracer removes it,
    under ``torch.func`` and forward-mode differentiation, and for small tensors.
    """
    compiles = torch.compiler.is_compiling()
    at_once = (
        not torch.is_grad_enabled()
        or torch.compiler.is_exporting()
        or torch.jit.is_tracing()
        or getattr(model, "_is_replica", False)
        or (not compiles and is_under_torch_func())
        or is_under_forward_ad()
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
    """Warn, once for each type, of half tensors that the cast does not find."""
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
