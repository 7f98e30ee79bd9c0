"""Small helpers for torch: types, reading without waiting, wrapped modules, private functions.

The private functions of torch's compiler and tracers that a level needs are here, so that a new
release of torch is checked here first. Other private names are where they are used: those for
subclasses of Tensor (amp/float32_output.py, optim/masters.py), of torch's GradScaler
(amp/grad_scaler.py), of pytree and of modules. Insight and the doctor look further into torch.
CI tests all with torch 2.11, 2.13 and 2.15 (``dependency-groups`` in pyproject.toml).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame as _dynamo
from torch._guards import TracingContext as TracingContext
from torch._subclasses import fake_tensor, functional_tensor
from torch.utils import _python_dispatch

HALF_DTYPES = (torch.float16, torch.bfloat16)
# The types of parameters and gradients that the kernels read and write.
FLOAT_DTYPES = (torch.float32, *HALF_DTYPES)

Function = TypeVar("Function", bound=Callable[..., Any])


def dynamo_disable(function: Function) -> Function:
    """Decorator: compiled code calls `function` uncompiled, with everything that it calls.

    For functions that work in the extension, which Dynamo cannot trace: it would compile the lines
    between the calls one by one, again for each parameter. ``torch.compiler.disable`` does the
    same, but imports Dynamo, which takes a second.
    """
    call: Any = torch._disable_dynamo(function)
    # For the message of fullgraph=True.
    call._torchdynamo_disable = True
    call._torchdynamo_disable_msg = "ampfuse does this in its extension, outside of any graph"
    return call


# ---- reading without waiting ---------------------------------------------------------------------


class Sample:
    """Copies of tensors, made on the host without waiting for the device."""

    def __init__(self, *tensors: Tensor) -> None:
        self._events = []
        self._copies: list[Tensor] = []
        for tensor in tensors:
            if not tensor.is_cuda:
                self._copies.append(tensor.clone())
                continue
            # The device is given, as torch.set_default_device may have set another.
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._copies.append(copy.copy_(tensor, non_blocking=True))
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            self._events.append(torch.cuda.current_stream(device).record_event())

    def has_arrived(self) -> bool:
        return all(event.query() for event in self._events)

    def tensors(self) -> list[Tensor]:
        """The copies. Waits for them."""
        for event in self._events:
            event.synchronize()
        return self._copies

    def values(self) -> list[float]:
        """The values of tensors of one element. Waits for them."""
        return [tensor.item() for tensor in self.tensors()]


def is_captured(number: Tensor) -> bool:
    """Whether a CUDA graph is being captured, during which `number` cannot be read."""
    return number.is_cuda and torch.cuda.is_current_stream_capturing()


# ---- modules, and what wraps them ---------------------------------------------------------------


class WrappedForward:
    """Mixed into the class of a module whose ``forward`` runs around its original class's.

    Such a class has two bases, this (or a subclass) and the original class. A ``forward`` that hung
    on the instance, and hid the class's, is the attribute ``_amp_inner_forward``.
    """


def original_class(wrapping: type) -> type:
    """The class around whose ``forward`` a :class:`WrappedForward` runs."""
    return wrapping.__bases__[1]


def eager_module(model: nn.Module) -> nn.Module:
    """`model`, or the module inside the wrapper that ``torch.compile`` put around it.

    For a proxy, the module that it stands for.
    """
    dynamo = sys.modules.get("torch._dynamo")  # importing it takes a second; a wrapper already has
    if dynamo is not None and isinstance(model, dynamo.OptimizedModule):
        return model._orig_mod
    if is_proxy(model):  # the first of its modules() is the root of what it stands for
        return next(iter(model.modules()), model)
    return model


def is_proxy(model: nn.Module) -> bool:
    """True for an object that passes for a module (its ``__class__`` is a property) without being
    one.

    Assigning its ``__class__`` would reach another object.
    """
    return not issubclass(type(model), nn.Module)


# ---- private functions of torch ------------------------------------------------------------------

# Tensors that stand for others in a trace: of Dynamo and of AOTAutograd.
FakeTensor = fake_tensor.FakeTensor
FunctionalTensor = functional_tensor.FunctionalTensor
FunctionalTensorMode = functional_tensor.FunctionalTensorMode
# Raised by an operator to end the compiler's graph before it.
UnsupportedOperatorException = fake_tensor.UnsupportedOperatorException
# A block without the modes that trace.
disable_current_modes = _python_dispatch._disable_current_modes


def skip_frames(function: Any, *, and_callees: bool) -> None:
    """Keep Dynamo from compiling the frames of `function`; `and_callees`: and what they call."""
    skip, default = _dynamo._FrameAction.SKIP, _dynamo._FrameAction.DEFAULT
    strategy = _dynamo._FrameExecStrategy(skip, skip if and_callees else default)
    _dynamo.set_code_exec_strategy(function.__code__, strategy)


def outside_dynamo(outer: Callable[..., Any], inner: Callable[..., Any]) -> Any:
    """The result of ``outer(inner)``: of compiled code, Dynamo compiles `inner` but not `outer`."""
    compiler = _dynamo.set_eval_frame(None)

    def compiled(*args: Any, **kwargs: Any) -> Any:
        _dynamo.set_eval_frame(compiler)
        try:
            return inner(*args, **kwargs)
        finally:
            _dynamo.set_eval_frame(None)

    try:
        return outer(compiled)
    finally:
        _dynamo.set_eval_frame(compiler)


skip_frames(outside_dynamo, and_callees=False)


def is_functionalizing() -> bool:
    """Whether AOTAutograd traces a graph in this thread."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None


def is_under_torch_func() -> bool:
    """Whether a transform of ``torch.func`` is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_under_forward_ad() -> bool:
    """Whether forward-mode differentiation is active."""
    return torch.autograd.forward_ad._current_level >= 0


@contextlib.contextmanager
def on_metadata() -> Iterator[None]:
    """In the block operations on a wrapper subclass change its own shape and strides.

    Source: ``return_and_correct_aliasing`` in ``torch.utils._python_dispatch``.
    """
    include = torch._C._meta_in_tls_dispatch_include()
    torch._C._set_meta_in_tls_dispatch_include(True)
    try:
        with torch._C._DisableTorchDispatch():
            yield
    finally:
        torch._C._set_meta_in_tls_dispatch_include(include)


def refuse_memory_access(tensor: Tensor, message: str) -> None:
    """Raise an error with `message` where code below the dispatcher takes the tensor's pointer.

    Without it, and in releases of torch that lack it, such code reads address zero.
    """
    refuse = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
    if refuse is not None:
        with torch._C.DisableTorchFunctionSubclass():
            refuse(Tensor.untyped_storage(tensor)._cdata, message)
