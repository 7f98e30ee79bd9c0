"""Follow inf and NaN through a training step: which operation made one, and whether it matters.

Every operation that torch dispatches is looked at, forward and backward (autograd carries a
dispatch mode to its own threads). A non-finite result of finite inputs is an *origin*; one of
non-finite inputs inherits theirs. An origin matters if it reaches a loss, the gradient of a
parameter or running statistics: a mask of -inf that a softmax turns into zeros does not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ampfuse import pytree
from ampfuse.amp.float32_output import Float32Output
from ampfuse.insight.explanation import Explanation
from ampfuse.insight.operations import (
    CallSite,
    Operation,
    address,
    callers,
    has_values,
    is_readable,
    kind_of,
    public_name,
    scaler_frame,
)
from ampfuse.optim.masters import gradient_as_it_is
from ampfuse.optim.sharding import local
from ampfuse.torch_utils import eager_module

_UNSEEN = "an operation that torch does not show"


class Tracker(TorchDispatchMode):
    """Context in which the origins of inf and NaN in `model`'s training step are recorded.

    The model and its wrappers stay as they are; compiled code runs as it was written.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = _unwrapped(model)
        self._names = {id(module): name for name, module in self.model.named_modules()}
        self._running: list[nn.Module] = []  # the modules whose forward runs, innermost last
        self._loss_scale = LossScaleFinder()
        # The origins, and by number: of a -inf that was asked for, as in masks; in outputs of the
        # model; in a loss, a gradient of a parameter, or statistics.
        self._origins: list[Explanation] = []
        self._intended: set[int] = set()
        self._in_outputs: set[int] = set()
        self._that_matter: set[int] = set()
        # By address: the number of the origin of values; the owner and name of parameters and
        # buffers; the module that made an output.
        self._origin_at: dict[int, int] = {}
        self._state: dict[int, tuple[nn.Module, str]] = {}
        self._made_by: dict[int, nn.Module] = {}
        self._parameters: list[tuple[nn.Module, str, Tensor, int]] = []  # with their versions
        self._forward_sites: dict[int, CallSite] = {}  # by sequence number of the autograd node
        self._hooked: set[int] = set()  # parameters, by id
        self._saw_backward = False
        self._has_ended = False
        self._at_exit = contextlib.ExitStack()

    def explanation(self) -> Explanation | None:
        """The first origin that mattered; None if all that matters was finite."""
        reached = self._that_matter or (set() if self._saw_backward else self._in_outputs)
        if not (reached := reached or self._in_parameters()):
            return None
        found = self._origins[min(reached - self._intended or reached)]
        if found.phase == "backward":  # the scale of that pass is known already
            return found
        return dataclasses.replace(found, **self._loss_scale.found)

    # --- the watched step -------------------------------------------------------------------------

    def __enter__(self) -> Tracker:
        if "torch._dynamo" in sys.modules:
            self._at_exit.enter_context(torch.compiler.set_stance("force_eager"))
        for module in self.model.modules():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                continue
            for hook in (
                module.register_forward_pre_hook(self.enter_module, with_kwargs=True),
                module.register_forward_hook(self._leave_module, always_call=True),
            ):
                self.on_exit(hook.remove)
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            for name, tensor in own:
                if is_lazy(tensor):
                    continue
                self._state[address(tensor)] = module, name
                if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                    self._parameters.append((module, name, tensor, local(tensor)._version))
            self._hook_parameters(module)
            self._look_at_statistics(module, "weights")
        super().__enter__()
        return self

    def __exit__(self, kind: Any = None, error: Any = None, trace: Any = None) -> None:
        self._at_exit.close()
        self._running.clear()
        modes = _get_current_dispatch_mode_stack()
        if modes and modes[-1] is self:
            super().__exit__(kind, error, trace)
        self._has_ended = True  # another mode may be above: then this one stays and does nothing

    def on_exit(self, callback: Callable[[], Any]) -> None:
        """Have `callback` called when the watched step ends."""
        self._at_exit.callback(callback)

    # --- modules ----------------------------------------------------------------------------------

    def enter_module(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The forward of `module` is called. The data comes in with the outermost one."""
        self._hook_parameters(module)  # FSDP2's and lazy ones may be there only now
        if self._is_outside():
            for name, tensor in _named_tensors(module, args, kwargs):
                if kind_of(tensor) and address(tensor) not in self._origin_at:
                    rows = tensor.detach().reshape(tensor.shape[0] if tensor.dim() else 1, -1)
                    row = int(rows.isfinite().all(1).logical_not().nonzero()[0])
                    what = f"{name}, first in batch element {row}"
                    site = CallSite(module, "forward")
                    self._record("data", site, tensor, what, intended=True)
        self._running.append(module)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._running and self._running.pop() is not module:
            pass  # the forward of these raised an exception
        for tensor in filter(is_readable, pytree.tensors(output)):
            self._made_by.setdefault(address(tensor), module)  # the innermost one made it
            if self._is_outside() and kind_of(tensor):
                self._in_outputs.add(self._origin_in(tensor, CallSite(module)))
        self._look_at_statistics(module, "forward")

    def _is_outside(self) -> bool:
        """Whether neither a module's forward nor a backward pass runs."""
        return not self._running and torch._C._current_graph_task_id() == -1

    def _look_at_statistics(self, module: nn.Module, phase: str) -> None:
        """Look at running statistics of batch norms, which no operation has among its results."""
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            return
        for name, buffer in module.named_buffers(recurse=False):
            if kind_of(buffer):
                origin = self._origin_at.get(address(buffer))
                if origin is None:
                    origin = self._record(phase, CallSite(module, "batch_norm"), buffer, name)
                self._that_matter.add(origin)

    # --- parameters and their gradients -----------------------------------------------------------

    def _hook_parameters(self, module: nn.Module) -> None:
        """Have the gradients of the module's own parameters looked at."""
        for name, parameter in module.named_parameters(recurse=False):
            hooked = id(parameter) in self._hooked or is_lazy(parameter)
            if parameter.requires_grad and not hooked:
                self._hooked.add(id(parameter))
                look = functools.partial(self._look_at_gradient, module, name)
                self.on_exit(parameter.register_hook(look).remove)

    def _look_at_gradient(self, module: nn.Module, name: str, gradient: Tensor) -> None:
        """A hook of the parameter `name` of `module`."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not self._saw_backward and distributed:
            # The second call comes after the callbacks that reduce gradients.
            queue: Any = Variable._execution_engine.queue_callback
            queue(functools.partial(queue, self._look_at_reduced_gradients))
        self._saw_backward = True
        if kind_of(gradient):
            what = f"gradient of {name}"
            origin = self._origin_in(gradient, CallSite(module, _UNSEEN), "backward", what)
            self._that_matter.add(origin)

    def _look_at_reduced_gradients(self) -> None:
        """Blame other processes for gradients that are not finite only after the reduction."""
        if self._that_matter:
            return
        for module, name, parameter, _ in self._parameters:
            gradient = gradient_as_it_is(parameter)
            if gradient is not None and kind_of(gradient):
                site, what = CallSite(module, "all_reduce"), f"the gradient of {name}"
                self._that_matter.add(self._record("another process", site, gradient, what))
                return

    def _in_parameters(self) -> set[int]:
        """An origin in a parameter: it had it before the step, or got it by the update."""
        for module, name, parameter, version in self._parameters:
            if kind_of(parameter):
                phase = "weights" if local(parameter)._version == version else "step"
                return {self._record(phase, CallSite(module, phase), parameter, name)}
        return set()

    # --- operations -------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, Float32Output) for kind in types):
            return NotImplemented  # the operations on its memory are dispatched too
        kwargs = kwargs or {}
        in_backward = not self._running and torch._C._current_graph_task_id() != -1
        is_watched = in_backward or self._running or torch.is_grad_enabled()
        if self._has_ended or not is_watched:
            return func(*args, **kwargs)
        if in_backward:
            self._loss_scale.see_backward(torch._C._current_graph_task_id())
        site = self._backward_site() if in_backward else self._forward_site(func)
        name = func._schema.name
        if func.is_view or "empty" in name or "resize" in name:  # it computes no values
            return func(*args, **kwargs)
        phase = "backward" if in_backward else "forward"
        operation = Operation(func, args, kwargs, phase, site)
        if operation.writes:
            operation = operation.before_writing(self._copied)
        out = func(*args, **kwargs)
        for index, result in enumerate(pytree.tensors(out)):
            # Values that the program writes into weights are found when a module uses them.
            if is_readable(result) and (self._running or address(result) not in self._state):
                self._look_at_result(operation, index, result)
        if self._is_outside():
            self._loss_scale.see_forward(name, args)
        return out

    def _look_at_result(self, operation: Operation, index: int, result: Tensor) -> None:
        if (kind := kind_of(result)) is not None:
            origin = self._inherited(operation, kind)
            if origin is None:
                known: dict[str, Any] = {
                    "aten": str(operation.func),
                    "largest_input": operation.largest_input(),
                    "largest_result": operation.largest_result(index),
                    "intended": any(map(math.isinf, operation.numbers())),
                }
                if operation.phase == "backward":
                    known |= self._loss_scale.found
                phase, site = operation.phase, operation.site
                origin = self._record(phase, site, result, "output", **known)
            self._origin_at[address(result)] = origin
            is_loss = result.dim() == 0 and any(each.requires_grad for each in operation.inputs())
            if is_loss and operation.phase == "forward" and torch.is_grad_enabled():
                self._that_matter.add(origin)
        elif not operation.writes:  # if it writes, `result` may be a part of its memory
            self._origin_at.pop(address(result), None)
        self._made_by.pop(address(result), None)

    def _copied(self, tensor: Tensor, copy: Tensor) -> None:
        if address(tensor) in self._origin_at:
            self._origin_at[address(copy)] = self._origin_at[address(tensor)]

    def _forward_site(self, func: Any) -> CallSite:
        place, function = callers(sys._getframe(1))
        module = self._running[-1] if self._running else None
        site = CallSite(module, function or public_name(func), place)
        # An autograd node takes its number, the one before the next, before its operation runs.
        self._forward_sites.setdefault(torch.autograd._get_sequence_nr() - 1, site)
        return site

    def _backward_site(self) -> CallSite:
        node: Any = torch._C._current_autograd_node()
        name = "AccumulateGrad" if node is None else node.name()
        if name.endswith("AccumulateGrad"):
            return CallSite(operation="accumulating gradients")
        site = self._forward_sites.get(node._sequence_nr(), CallSite())
        if isinstance(node, torch._C._FunctionBase) or not site.operation:
            site = site._replace(operation=re.sub(r"Backward\d*$", "", name))
        return site

    # --- origins ----------------------------------------------------------------------------------

    def _inherited(self, operation: Operation, kind: str) -> int | None:
        """The origin that a result of `kind` has from the inputs; None: it is an origin itself."""
        bad = filter(kind_of, operation.inputs())
        origins = {self._origin_in(tensor, operation.site) for tensor in bad}
        real = origins - self._intended
        # A NaN made from a mask's -inf originates in this operation.
        return min(real or origins) if real or (origins and kind != "nan") else None

    def _origin_in(
        self, tensor: Tensor, site: CallSite, phase: str = "data", what: str = ""
    ) -> int:
        """The origin in a non-finite `tensor`; a new one if none was seen in its memory."""
        if (memory := address(tensor)) in self._origin_at:
            return self._origin_at[memory]
        may_be_intended = True
        if memory in self._state:
            owner, what = self._state[memory]
            phase, site = "weights", CallSite(owner, site.operation)
            may_be_intended = what not in owner._parameters  # a mask is a buffer
        elif memory in self._made_by:
            phase, site = "forward", CallSite(self._made_by[memory], _UNSEEN)
        what = what or ("output" if phase == "forward" else f"an operand of {site.operation}")
        return self._record(phase, site, tensor, what, intended=may_be_intended)

    def _record(
        self,
        phase: str,
        site: CallSite,
        tensor: Tensor,
        what: str,
        *,
        intended: bool = False,
        **known: Any,
    ) -> int:
        """Record an origin in `tensor`; return its number. A -inf may be `intended`."""
        name = kind = None
        if site.module is not None:
            name = self._names.get(id(site.module), "a copy of a module")
            kind = type(site.module).__name__
        where = name, kind, site.operation, what, kind_of(tensor) or ""
        known |= {"shape": tuple(tensor.shape), "dtype": tensor.dtype, "device": str(tensor.device)}
        number = self._origin_at[address(tensor)] = len(self._origins)
        self._origins.append(Explanation(phase, *where, line=site.line, **known))
        if intended and self._origins[number].kind == "-inf":
            self._intended.add(number)
        return number


class LossScaleFinder:
    """Finds the loss scale of a step among its operations.

    That is the number by which a loss scaler (of torch, FSDP or ampfuse) multiplies a loss. Without
    a scaler it is a number above 1 by which the program multiplies the whole loss, in the last
    operation before the backward pass. `found` has it as fields of an :class:`Explanation`.
    """

    def __init__(self) -> None:
        self.found: dict[str, Any] = {"scale": 1.0, "dynamic": False}
        self._has_scaler = False
        self._node = self._graph_task = -1  # the numbers of the latest autograd node and pass

    def see_forward(self, name: str, args: Any) -> None:
        """Called after each operation outside of the model and of backward passes."""
        self._node = torch.autograd._get_sequence_nr() - 1
        frame = scaler_frame(sys._getframe(1)) if name in ("aten::mul", "aten::mul_") else None
        if frame is None:
            return
        loss, factor = args if _is_number(args[1]) else reversed(args)
        if _is_number(factor) and not _is_number(loss) and loss.requires_grad:
            # ampfuse's scalers may be static; a GradScaler always adapts.
            dynamic = getattr(frame.f_locals.get("scaler"), "dynamic", True)
            self.found = {"scale": float(factor), "dynamic": dynamic}
            self._has_scaler = True

    def see_backward(self, graph_task: int) -> None:
        """Called before each operation of the backward pass with that number."""
        if graph_task == self._graph_task or self._has_scaler:
            return
        self._graph_task = graph_task
        node: Any = torch._C._current_autograd_node()
        if node is None or node.name() != "MulBackward0" or node._sequence_nr() != self._node:
            return
        for factor in (node._saved_self, node._saved_other):
            if factor is not None and _is_number(factor) and 1 < float(factor) < math.inf:
                self.found = {"scale": float(factor), "dynamic": False}


def _is_number(value: Any) -> bool:
    """Whether `value` is a real number, or a 0-dim tensor of one without gradient."""
    if isinstance(value, Tensor):
        is_real = value.dim() == 0 and not value.is_complex()
        return is_real and not value.requires_grad and has_values(value)
    return not isinstance(value, complex)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model in its wrappers: torch.compile's, DistributedDataParallel's, apex's."""
    while True:
        model = eager_module(model)
        if not type(model).__name__.endswith("DataParallel") or not hasattr(model, "module"):
            return model
        model = model.module  # type: ignore[assignment]


def _named_tensors(module: nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors that `module` was called with, by the names of its arguments."""
    try:
        arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        arguments = {"input": args, **kwargs}
    for name, value in arguments.items():
        for tensor in pytree.tensors(value):
            yield f"argument {name!r}", tensor
