"""Follow inf and NaN through a training step: which operation made one, and whether it matters.

Every operation that torch dispatches is looked at, forward and backward (autograd carries a
dispatch mode to its own threads). A non-finite result of finite inputs is an *origin*; one of
non-finite inputs inherits theirs. An origin matters if it reaches a loss or the gradient of a
parameter: a mask of -inf that a softmax turns into zeros does not. Each look synchronizes with the
device.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves

from ampfuse import pytree
from ampfuse.amp.float32_output import Float32Output
from ampfuse.insight.explanation import Explanation
from ampfuse.optim.masters import gradient_as_it_is
from ampfuse.torch_utils import HALF_DTYPES, eager_module

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_OURS = os.path.dirname(os.path.dirname(__file__))
# Code that is not the user's, and the files of functions that are written in Python.
_PARTS = ("amp/", "compat/", "insight/", "nn/", "optim/", "torch_utils.py")
_INTERNAL = (_TORCH, contextlib.__file__, *(os.path.join(_OURS, part) for part in _PARTS))
_FUNCTIONAL = (os.path.join(_TORCH, "nn", "functional.py"), os.path.join(_TORCH, "functional.py"))
_PUBLIC_NAMES = {
    "to_copy": "to",
    "copy": "to",
    "addmm": "linear",
    "mm": "matmul",
    "bmm": "matmul",
    "convolution": "conv",
    "native_layer_norm": "layer_norm",
}
# Here losses are multiplied by a loss scale.
_SCALERS = (
    os.path.join(_TORCH, "amp", "grad_scaler.py"),
    os.path.join(_TORCH, "distributed", "fsdp", "sharded_grad_scaler.py"),
    os.path.join(_OURS, "amp", "scale_loss.py"),
)
_UNSEEN = "an operation that torch does not show"
# They write without reading what was there.
_OVERWRITES = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_"})


class _CallSite(NamedTuple):
    """The module and the line that called an operation."""

    module: str | None = None
    module_type: str | None = None
    operation: str = ""
    frame: tuple[str, int] | None = None


class Origins:
    """The origins of inf and NaN that were found, by number, and in which memory they are."""

    def __init__(self) -> None:
        self._found: list[Explanation] = []
        self._intended: set[int] = set()  # of a -inf that was asked for, as in masks
        self._in_memory: dict[int, int] = {}  # by address
        self.in_outputs: set[int] = set()  # of the model
        self.that_matter: set[int] = set()  # in a loss, a gradient of a parameter, or statistics

    def record(self, origin: Explanation, tensor: Tensor, *, intended: bool = False) -> int:
        """Record an origin in the memory of `tensor`; return its number."""
        number = len(self._found)
        self._found.append(origin)
        self.put(tensor, number)
        if intended and origin.kind == "-inf":
            self._intended.add(number)
        return number

    def put(self, tensor: Tensor, number: int) -> None:
        """Note that the memory of `tensor` has values of that origin."""
        self._in_memory[_address(tensor)] = number

    def of(self, tensor: Tensor) -> int | None:
        """The origin in the memory of `tensor`, if one was noted."""
        return self._in_memory.get(_address(tensor))

    def clear(self, tensor: Tensor) -> None:
        """The memory of `tensor` holds finite values now."""
        self._in_memory.pop(_address(tensor), None)

    def inherit(self, numbers: set[int], kind: str) -> int | None:
        """The origin of a result of `kind`, from those of its operands; None: the result is one."""
        real = numbers - self._intended
        # A NaN that comes of a mask has its origin here.
        return min(real or numbers) if real or (numbers and kind != "nan") else None

    def first(self, numbers: set[int]) -> Explanation | None:
        """The first of these that was not asked for, if there is one."""
        return self._found[min(numbers - self._intended or numbers)] if numbers else None


class Tracker(TorchDispatchMode):
    """Context in which the origins of inf and NaN in `model`'s training step are recorded.

    The model and its wrappers stay as they are; compiled code runs as it was written.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = _bare(model)
        self.scale: float = 1.0  # that the loss was multiplied by
        self.scale_is_scalers = False  # and not the program's own factor
        self._names = {id(module): name for name, module in self.model.named_modules()}
        self._stack: list[nn.Module] = []
        self._origins = Origins()
        # Parameters and buffers, and outputs of modules, by address of the memory.
        self._state: dict[int, tuple[nn.Module, str]] = {}
        self._made_by: dict[int, nn.Module] = {}
        self._parameters: list[tuple[nn.Module, str, Tensor, int]] = []  # and their versions
        self._forward_of: dict[int, _CallSite] = {}  # by the sequence number of an autograd node
        self._last_factor: tuple[int, float] | None = None  # of the latest operation, by that
        self._graph_task = -1
        self._saw_backward = False
        self._has_ended = False
        self._at_exit = contextlib.ExitStack()

    # --- the life of a watched step ---------------------------------------------------------------

    def __enter__(self) -> Tracker:
        if "torch._dynamo" in sys.modules:
            self._at_exit.enter_context(torch.compiler.set_stance("force_eager"))
        for module in self.model.modules():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                continue
            enter = module.register_forward_pre_hook(self.enter_module, with_kwargs=True)
            leave = module.register_forward_hook(self._leave_module, always_call=True)
            self.on_exit(enter.remove)
            self.on_exit(leave.remove)
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            for name, tensor in own:
                self._state[_address(tensor)] = module, name
                if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                    self._parameters.append((module, name, tensor, tensor._version))
                    hook = functools.partial(self._at_parameter, module, name)
                    self.on_exit(tensor.register_hook(hook).remove)
            self._look_at_statistics(module, "weights")
        super().__enter__()
        return self

    def __exit__(self, kind: Any = None, error: Any = None, trace: Any = None) -> None:
        self._at_exit.close()
        self._stack.clear()
        modes = _get_current_dispatch_mode_stack()
        if modes and modes[-1] is self:
            super().__exit__(kind, error, trace)
        self._has_ended = True  # should a mode of the user's be above, this one does nothing

    def on_exit(self, callback: Callable[[], Any]) -> None:
        """Have `callback` called when the watched step ends."""
        self._at_exit.callback(callback)

    def explanation(self) -> Explanation | None:
        """The first origin that mattered; None if all that matters was finite."""
        origins = self._origins
        reached = origins.that_matter or (set() if self._saw_backward else origins.in_outputs)
        return origins.first(reached or self._in_parameters())

    def _in_parameters(self) -> set[int]:
        for module, name, parameter, version in self._parameters:
            if (kind := _kind(parameter)) is not None:
                phase = "weights" if parameter._version == version else "step"
                return {self._record(phase, self._place_of(module, phase), parameter, kind, name)}
        return set()

    # --- modules ----------------------------------------------------------------------------------

    def enter_module(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_outermost():
            for name, tensor in _named(module, args, kwargs):
                kind = _kind(tensor)
                if kind is not None and self._origins.of(tensor) is None:
                    what = f"{name}, first in batch element {_first_bad(tensor)}"
                    place = self._place_of(module, "forward")
                    self._record("data", place, tensor, kind, what, intended=True)
        self._stack.append(module)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._stack and self._stack.pop() is not module:
            pass  # an exception left it
        for tensor in filter(_is_readable, pytree.tensors(output)):
            self._made_by.setdefault(_address(tensor), module)  # the innermost one made it
            if self._is_outermost() and (kind := _kind(tensor)) is not None:
                origin = self._origin_of(tensor, self._place_of(module), kind)
                self._origins.in_outputs.add(origin)
        self._look_at_statistics(module, "forward")

    def _is_outermost(self) -> bool:
        return not self._stack and torch._C._current_graph_task_id() == -1

    def _look_at_statistics(self, module: nn.Module, phase: str) -> None:
        """Look at running statistics of batch norms, which no operation has among its results."""
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for name, buffer in module.named_buffers(recurse=False):
                if (kind := _kind(buffer)) is not None:
                    origin = self._origins.of(buffer)
                    if origin is None:
                        place = self._place_of(module, "batch_norm")
                        origin = self._record(phase, place, buffer, kind, name)
                    self._origins.that_matter.add(origin)

    def _place_of(self, module: nn.Module | None, operation: str = "") -> _CallSite:
        if module is None:
            return _CallSite(operation=operation)
        name = self._names.get(id(module), "a copy of a module")
        return _CallSite(name, type(module).__name__, operation)

    # --- gradients --------------------------------------------------------------------------------

    def _at_parameter(self, module: nn.Module, name: str, gradient: Tensor) -> None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not self._saw_backward and distributed:
            # After the callbacks that reduce gradients, which are queued when this one runs.
            queue: Any = Variable._execution_engine.queue_callback
            queue(functools.partial(queue, self._after_backward))
        self._saw_backward = True
        if (kind := _kind(gradient)) is not None:
            place, what = self._place_of(module, _UNSEEN), f"gradient of {name}"
            origin = self._origin_of(gradient, place, kind, "backward", what)
            self._origins.that_matter.add(origin)

    def _after_backward(self) -> None:
        """Blame other processes for gradients that are not finite only after the reduction."""
        if self._origins.that_matter:
            return
        for module, name, parameter, _ in self._parameters:
            gradient = gradient_as_it_is(parameter)
            if gradient is not None and (kind := _kind(gradient)) is not None:
                place, what = self._place_of(module, "all_reduce"), f"the gradient of {name}"
                origin = self._record("another process", place, gradient, kind, what)
                self._origins.that_matter.add(origin)
                return

    # --- operations -------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, Float32Output) for kind in types):
            return NotImplemented  # what it does with its memory comes here
        kwargs = kwargs or {}
        backward = not self._stack and torch._C._current_graph_task_id() != -1
        if self._has_ended or not (backward or self._stack or torch.is_grad_enabled()):
            return func(*args, **kwargs)
        if backward and self._graph_task != torch._C._current_graph_task_id():
            self._begin_backward()
        place = self._backward_place() if backward else self._forward_place(func)
        name = func._schema.name
        if func.is_view or "empty" in name or "resize" in name:
            return func(*args, **kwargs)
        writes = any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
        before = self._as_before(func, args, kwargs) if writes else (args, kwargs)
        out = func(*args, **kwargs)
        for index, tensor in enumerate(pytree.tensors(out)):
            if not _is_readable(tensor) or (not self._stack and _address(tensor) in self._state):
                continue  # what a program writes into weights is found where they are used
            if (kind := _kind(tensor)) is not None:
                origin = self._inherit(before, place, kind)
                if origin is None:
                    phase = "backward" if backward else "forward"
                    origin = self._record_result(phase, place, tensor, kind, func, before, index)
                self._origins.put(tensor, origin)
                is_loss = tensor.dim() == 0 and any(t.requires_grad for t in pytree.tensors(before))
                if is_loss and not backward and torch.is_grad_enabled():
                    self._origins.that_matter.add(origin)
            elif not writes:
                self._origins.clear(tensor)
            self._made_by.pop(_address(tensor), None)
        if not backward and not self._stack and _is_differentiable(func, args, out):
            self._last_factor = None
            if name == "aten::mul":
                self._note_scale(*args[:2])
        return out

    def _as_before(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments, with copies of the tensors that the operation is about to write to."""
        overwrites = func._schema.name.rpartition("::")[2] in _OVERWRITES
        names = [argument.name for argument in func._schema.arguments]
        named = dict(zip(names, args, strict=False)) | kwargs

        def copied(item: Any, is_unread: bool) -> Any:
            if not isinstance(item, Tensor):
                return item
            copy = item.detach().clone()
            if is_unread:
                return copy.zero_()
            if (origin := self._origins.of(item)) is not None:
                self._origins.put(copy, origin)
            return copy

        for argument in func._schema.arguments:
            if argument.name in named and argument.alias_info and argument.alias_info.is_write:
                copy = functools.partial(copied, is_unread=overwrites or argument.is_out)
                named[argument.name] = pytree.replace(named[argument.name], copy)
        return tuple(named.pop(name) for name in names[: len(args)]), named

    def _note_scale(self, loss: Tensor, by: Any) -> None:
        """Note the scale of a scaler; of another number, that it may be one."""
        if isinstance(by, Tensor):
            is_number = by.dim() == 0 and not by.requires_grad and _is_readable(by)
        else:
            is_number = not isinstance(by, complex)
        if not is_number:
            return
        if _is_in_scaler(sys._getframe(1)):
            self.scale = float(by)
            self.scale_is_scalers = True
        else:
            self._last_factor = torch.autograd._get_sequence_nr() - 1, float(by)

    def _begin_backward(self) -> None:
        """Called before a backward pass's first operation: if the program multiplied the whole loss
        by a number above 1, that is its loss scale."""
        self._graph_task = torch._C._current_graph_task_id()
        node: Any = torch._C._current_autograd_node()
        if self._last_factor is not None and not self.scale_is_scalers and node is not None:
            number, factor = self._last_factor
            if number == node._sequence_nr() and 1 < factor < math.inf:
                self.scale = factor

    def _forward_place(self, func: Any) -> _CallSite:
        frame, function = callers(sys._getframe(1))
        if function is None:
            name = func._schema.name.rpartition("::")[2].strip("_")
            function = _PUBLIC_NAMES.get(name, name)
        module = self._stack[-1] if self._stack else None
        place = self._place_of(module, function)._replace(frame=frame)
        # An autograd node takes its number, the one before the next, before its operation runs.
        self._forward_of.setdefault(torch.autograd._get_sequence_nr() - 1, place)
        return place

    def _backward_place(self) -> _CallSite:
        node: Any = torch._C._current_autograd_node()
        name = "AccumulateGrad" if node is None else node.name()
        if name.endswith("AccumulateGrad"):
            return _CallSite(operation="accumulating gradients")
        place = self._forward_of.get(node._sequence_nr(), _CallSite())
        if isinstance(node, torch._C._FunctionBase) or not place.operation:
            place = place._replace(operation=re.sub(r"Backward\d*$", "", name))
        return place

    # --- origins ----------------------------------------------------------------------------------

    def _inherit(self, before: Any, place: _CallSite, kind: str) -> int | None:
        """The origin that a result of `kind` has from its operation's arguments; None: its own."""
        tensors = [(tensor, _kind(tensor)) for tensor in pytree.tensors(before)]
        origins = {self._origin_of(tensor, place, bad) for tensor, bad in tensors if bad}
        return self._origins.inherit(origins, kind)

    def _origin_of(
        self, tensor: Tensor, place: _CallSite, kind: str, phase: str = "data", what: str = ""
    ) -> int:
        """The origin in a non-finite `tensor`; a new one if none was seen in its memory."""
        address = _address(tensor)
        if (known := self._origins.of(tensor)) is not None:
            return known
        may_be_intended = True
        if address in self._state:
            owner, what = self._state[address]
            phase, place = "weights", self._place_of(owner, place.operation)
            may_be_intended = what not in owner._parameters  # a mask is a buffer
        elif address in self._made_by:
            phase, place = "forward", self._place_of(self._made_by[address], _UNSEEN)
        what = what or ("output" if phase == "forward" else f"an operand of {place.operation}")
        return self._record(phase, place, tensor, kind, what, intended=may_be_intended)

    def _record_result(
        self,
        phase: str,
        place: _CallSite,
        tensor: Tensor,
        kind: str,
        func: Any,
        before: Any,
        at: int,
    ) -> int:
        """The origin in result number `at` of `func`."""
        numbers = [item for item in tree_leaves(before) if isinstance(item, float)]
        sizes = [*map(_magnitude, filter(_is_readable, pytree.tensors(before))), *map(abs, numbers)]
        known: dict[str, Any] = {
            "aten": str(func),
            "largest_input": max(filter(math.isfinite, sizes), default=None),
            "largest_result": _wider_magnitude(func, before, at),
        }
        intended = any(map(math.isinf, numbers))
        return self._record(phase, place, tensor, kind, "output", intended=intended, **known)

    def _record(
        self,
        phase: str,
        place: _CallSite,
        tensor: Tensor,
        kind: str,
        what: str,
        *,
        intended: bool = False,
        **known: Any,
    ) -> int:
        """Record an origin in `tensor`; return its number."""
        if place.frame is not None:
            text = linecache.getline(*place.frame).strip()
            known["line"] = f"{place.frame[0]}:{place.frame[1]}: {text}"
        known |= {"shape": tuple(tensor.shape), "dtype": tensor.dtype, "device": str(tensor.device)}
        origin = Explanation(phase, *place[:3], what, kind, **known)
        return self._origins.record(origin, tensor, intended=intended)


def _bare(model: nn.Module) -> nn.Module:
    """The model in its wrappers: torch.compile's, DistributedDataParallel's, apex's."""
    while True:
        model = eager_module(model)
        if not type(model).__name__.endswith("DataParallel") or not hasattr(model, "module"):
            return model
        model = model.module  # type: ignore[assignment]


def callers(frame: Any) -> tuple[tuple[str, int] | None, str | None]:
    """The user's line that runs `frame`, and the function of torch's, written in Python, in it."""
    function = None
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_INTERNAL):
            return (file, frame.f_lineno), function
        if function is None and file in _FUNCTIONAL:
            function = frame.f_code.co_name.strip("_")
        frame = frame.f_back
    return None, function


def _is_differentiable(func: Any, args: Any, out: Any) -> bool:
    """Return whether gradients go through `func`: not through ``item`` and ``ones_like``."""
    if func._schema.name.endswith("_like") or not list(pytree.tensors(out)):
        return False
    return any(tensor.requires_grad for tensor in pytree.tensors(args))


def _is_in_scaler(frame: Any) -> bool:
    """Return whether `frame` is run by a loss scaler, and not by code of the user's."""
    while frame is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        if frame.f_code.co_filename in _SCALERS:
            return True
        frame = frame.f_back
    return False


def _named(module: nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors that `module` was called with, by the names of its arguments."""
    try:
        arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        arguments = {"input": args, **kwargs}
    for name, value in arguments.items():
        for tensor in pytree.tensors(value):
            yield f"argument {name!r}", tensor


def _first_bad(tensor: Tensor) -> int:
    bad = ~torch.isfinite(tensor.detach().reshape(tensor.shape[0] if tensor.dim() else 1, -1))
    return int(bad.any(1).nonzero()[0])


def _is_readable(tensor: Tensor) -> bool:
    """Return whether the numbers in `tensor` can be read."""
    ordinary = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
    return ordinary and tensor.is_floating_point() and tensor.numel() > 0 and not tensor.is_meta


def _address(tensor: Tensor) -> int:
    data = tensor.data_in_memory if isinstance(tensor, Float32Output) else tensor
    return data.untyped_storage().data_ptr()


def _range(tensor: Tensor) -> tuple[float, float]:
    """The smallest and the largest number; the look is not part of the step."""
    with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunctionSubclass():
        tensor = tensor.detach()
        if tensor.itemsize < 2:
            tensor = tensor.float()
        low, high = torch.stack(torch.aminmax(tensor)).tolist()
    return low, high


def _kind(tensor: Tensor) -> str | None:
    """What `tensor` holds: "nan", else "inf", else "-inf"; None if all of it is finite."""
    if not _is_readable(tensor):
        return None
    low, high = _range(tensor)
    if math.isnan(low):
        return "nan"
    return "inf" if high == math.inf else "-inf" if low == -math.inf else None


def _magnitude(tensor: Tensor) -> float:
    return max(map(abs, _range(tensor)))


_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}
_WIDER_HALVES = dict.fromkeys(HALF_DTYPES, torch.float32)  # ampfuse has no float64


def _wider_magnitude(func: Any, arguments: Any, index: int) -> float | None:
    """The largest magnitude in result `index` of `func`, computed once more in a wider type."""
    args, kwargs = arguments
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    if func.namespace not in ("aten", "ampfuse") or is_random or "out" in kwargs:
        return None
    wider = _WIDER if func.namespace == "aten" else _WIDER_HALVES

    def widened(item: Any) -> Any:
        if isinstance(item, Tensor) and item.dtype in wider:
            return item.detach().to(wider[item.dtype])
        return wider.get(item, item) if isinstance(item, torch.dtype) else item

    try:
        with torch.no_grad():
            out = func(*pytree.replace(args, widened), **pytree.replace(kwargs, widened))
        return _magnitude(list(pytree.tensors(out))[index])
    except (RuntimeError, TypeError, NotImplementedError, IndexError):  # no such kernel
        return None
