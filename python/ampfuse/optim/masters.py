"""FP32 master weights that take the place of half-precision model weights in ``param_groups``."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampfuse import _core
from ampfuse.optim.param_groups import with_wrapped
from ampfuse.optim.sharding import is_sharded, local, placed_as
from ampfuse.torch_utils import HALF_DTYPES

# The keys of a master in a state: a whole one, and the remainder of a split one.
MASTERS = {"master_param", "master_remainder"}

_raw_grad: Any = torch.Tensor.grad


def exact_float32(param: Tensor) -> Tensor:
    """A new FP32 copy of `param`, in the same memory layout."""
    shard = local(param).detach()
    return placed_as(param, _core.C.empty_laid_out_as(shard).copy_(shard))


def joined_master(param: Tensor, remainder: Tensor) -> Tensor:
    """A new tensor, float32: the split master of `param`."""
    shard = local(param).detach()
    master = _core.C.empty_laid_out_as(shard)
    _core.C.join_master(shard, local(remainder), master)
    return placed_as(param, master)


def split_master(master: Tensor, param: Tensor, remainder: Tensor) -> None:
    """Make `master` (float32) the split master of `param`: writes `param` and `remainder`."""
    shard = local(param).detach()
    laid_out = _core.C.empty_laid_out_as(shard).copy_(local(master))
    _core.C.split_master(laid_out, shard, local(remainder))


def with_whole_master(state: dict[str, Any], param: Tensor) -> None:
    """Make a split master in the state of `param` a whole one."""
    if "master_remainder" in state:
        state["master_param"] = joined_master(param, state.pop("master_remainder"))


def without_gradient(state: Any) -> Any:
    """A state that can be copied: the remainder of a split master may have an FP32 gradient."""
    if not isinstance(state, dict) or "master_remainder" not in state:
        return state
    return {**state, "master_remainder": state["master_remainder"].detach()}


def has_begun(state: Any) -> bool:
    """Whether the state of a parameter holds more than its master, as it does after a step."""
    return not isinstance(state, dict) or not state.keys() <= {*MASTERS, "_model_version"}


def gradient_as_it_is(param: Tensor) -> Tensor | None:
    """``param.grad`` as autograd left it: reading it does not unscale anything."""
    return _raw_grad.__get__(param)


def leaf_of(param: Tensor) -> Tensor:
    """The leaf that autograd accumulates the gradient of `param` into: a master's half weight."""
    return param.model_param if isinstance(param, MasterParameter) else param


class _SameKey(Tensor):
    """The result of ``weight == master``, element by element; ``bool()`` of it is True.

    A dict or set that holds a master then finds it by its weight: ``dict.__getitem__`` and
    ``set.__contains__`` call ``bool(key == other)`` for keys of the same hash.
    """

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def __bool__(self) -> bool:
        return True


class _LazyGradParameter(torch.nn.Parameter):
    """A parameter that tells its optimizer when ``.grad`` is read or set.

    As keys of a dict or in a set a master and its weight are equal. Code that looks up a model's
    parameters in an optimizer then finds the masters in its groups, and their states:
    ``get_optimizer_state_dict`` in torch.distributed.checkpoint.state_dict does. And
    ``Optimizer.add_param_group``, which looks for duplicates in a set, does not accept both.
    """

    __hash__ = torch.nn.Parameter.__hash__

    def __eq__(self, other: Any) -> Any:
        equal = super().__eq__(other)
        if isinstance(other, Tensor) and other is not self and leaf_of(other) is leaf_of(self):
            return equal.as_subclass(_SameKey)
        return equal

    # A weak reference to the optimizer that holds the gradients of its masters.
    _owner: Callable[[], Any] = staticmethod(lambda: None)

    def _get_owner(self) -> Any:
        # Dynamo reads `grad` too, and only accepts a gradient of the weight's type.
        return None if torch.compiler.is_compiling() else self._owner()

    @property
    def grad(self) -> Tensor | None:
        if (owner := self._get_owner()) is not None:
            owner.look_at_gradient(self)
        return _raw_grad.__get__(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        owner = self._get_owner()
        # A gradient that was read from a half weight may be set again; torch would refuse FP32.
        is_float32 = isinstance(value, Tensor) and value.dtype == torch.float32
        if owner is None or not is_float32:
            _raw_grad.__set__(self, value)
        if owner is not None:
            owner.assign_gradient(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


class ModelParameter(_LazyGradParameter):
    """The half-precision weight of a model that has a :class:`MasterParameter`.

    Between ``scale_loss`` and ``step`` its ``.grad`` reads as the master's: FP32 and unscaled, one
    tensor for both. So clipping ``model.parameters()`` clips the masters.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelParameter:
        if id(self) not in memo:
            data = self.detach().clone(memory_format=torch.preserve_format)
            memo[id(self)] = type(self)(data, self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As a plain parameter of the same memory: the model that gets it has no optimizer yet.
        return torch.nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class MasterParameter(_LazyGradParameter):
    """The FP32 master of one half-precision model weight.

    An optimizer updates it and never sees the half weight. Its ``.grad`` is ``model_param.grad``,
    unscaled and in FP32. Reading it computes it, for all masters of the optimizer at once; until
    then the fused step works on the half gradients.
    """

    model_param: Tensor
    # The version of model_param up to which this master is known to have followed it.
    model_version: int

    @classmethod
    def of(cls, model_param: Tensor) -> MasterParameter:
        """The exact FP32 copy of `model_param`, in the same memory layout."""
        return _rebuild(exact_float32(model_param), model_param)

    def __hash__(self) -> int:
        weight = self.model_param  # a weight of another class may define its own hash
        return id(weight if type(weight) in (torch.nn.Parameter, ModelParameter) else self)

    def set_owner(self, optimizer: Any) -> None:
        """Set the owner, once: of an optimizer and one that it wraps, the outer one comes first."""
        if self._owner() is None:
            self._owner = weakref.ref(optimizer)
            unscale_on_access(self.model_param, optimizer)

    def __deepcopy__(self, memo: dict[int, Any]) -> MasterParameter:
        if id(self) not in memo:
            model_param = copy.deepcopy(self.model_param, memo)
            grad = self.grad
            memo[id(self)] = _rebuild(self.detach().clone(), model_param)
            if grad is not None:
                _raw_grad.__set__(memo[id(self)], grad.clone())
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (self.detach().clone(), self.model_param)


def unscale_on_access(model_param: Tensor, optimizer: Any) -> None:
    """Make ``model_param.grad`` read as the gradient of its master in `optimizer`."""
    if type(model_param) is torch.nn.Parameter:
        model_param.__class__ = ModelParameter
    if isinstance(model_param, ModelParameter):
        model_param._owner = weakref.ref(optimizer)


def _rebuild(data: Tensor, model_param: Tensor) -> MasterParameter:
    master = MasterParameter(data, requires_grad=True)
    master.model_param = model_param
    master.model_version = model_param._version
    return master


def takes_master(param: Tensor) -> bool:
    """Whether an FP32 master can replace it in the groups. A DTensor's master is in the state."""
    return param.dtype in HALF_DTYPES and not is_sharded(param)


def install_masters(
    optimizer: torch.optim.Optimizer, masters: dict[Tensor, MasterParameter]
) -> None:
    """Replace half parameters by FP32 masters in `optimizer`'s groups and state, in place.

    Also in the optimizers that it wraps, whether or not they share groups and state with it.

    Arguments:
        masters: the existing masters, by weight; new ones are added.
    """
    optimizers = with_wrapped(optimizer)
    for group in [group for each in optimizers for group in each.param_groups]:
        for i, param in enumerate(group["params"]):
            if not takes_master(param) or not param.requires_grad:
                continue
            if param not in masters:
                masters[param] = MasterParameter.of(param)
                # Not at the first step: code that is compiled before it depends on the class.
                masters[param].set_owner(optimizer)
            group["params"][i] = masters[param]
    for state in [getattr(each, "state", {}) for each in optimizers]:
        weights = [key for key in state if isinstance(key, Tensor) and takes_master(key)]
        for param in filter(masters.__contains__, weights):
            kept, master = state.pop(param), masters[param]
            # A loaded master follows edits of its weight since then, as any master does.
            master.model_version = kept.pop("_model_version", master.model_version)
            # Loaded before, or made by a standalone optimizer.
            with_whole_master(kept, param)
            if (exact := kept.pop("master_param", None)) is not None:
                with torch.no_grad():
                    master.copy_(exact)
            halves = [k for k, v in kept.items() if getattr(v, "dtype", None) in HALF_DTYPES]
            state[master] = kept | {key: kept[key].to(torch.float32) for key in halves}
