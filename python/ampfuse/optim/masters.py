"""FP32 master weights that stand in ``param_groups`` for half-precision model weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampfuse import _core
from ampfuse.dtypes import HALF_DTYPES
from ampfuse.optim.param_groups import with_wrapped
from ampfuse.optim.sharding import is_sharded, local, placed_as

# What a state has its master under: whole, or beside a weight.
MASTERS = {"master_param", "master_remainder"}

_raw_grad: Any = torch.Tensor.grad


def exact_float32(param: Tensor) -> Tensor:
    """A new FP32 copy of `param`, laid out in memory alike."""
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


def pop_master(state: dict[str, Any], param: Tensor) -> Tensor | None:
    """Take the master of `param` out of its state, in whatever form it is there: float32."""
    master = state.pop("master_param", None)
    remainder = state.pop("master_remainder", None)
    return master if remainder is None else joined_master(param, remainder)


def has_begun(state: Any) -> bool:
    """Whether the state of a parameter is more than its master, which it has before a step."""
    return not isinstance(state, dict) or not state.keys() <= {*MASTERS, "_model_version"}


def gradient_as_it_is(param: Tensor) -> Tensor | None:
    """``param.grad`` where autograd left it, without bringing anything up to date."""
    return _raw_grad.__get__(param)


def leaf_of(param: Tensor) -> Tensor:
    """What autograd gives the gradient of `param` to: of a master the half weight."""
    return param.model_param if isinstance(param, MasterParameter) else param


class _SameKey(Tensor):
    """What ``==`` of a weight and its master gives, element by element: true as a whole."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def __bool__(self) -> bool:
        return True


class _LazyGradParameter(torch.nn.Parameter):
    """A parameter of whose ``.grad`` an optimizer knows who looks at it and who sets it.

    As the key of a dict or in a set a master and its weight are one. So what goes from the model's
    parameters to an optimizer's by such keys, as torch.distributed.checkpoint, finds the masters in
    its groups and their states; and no optimizer takes both.
    """

    __hash__ = torch.nn.Parameter.__hash__

    def __eq__(self, other: Any) -> Any:
        equal = super().__eq__(other)
        if isinstance(other, Tensor) and other is not self and leaf_of(other) is leaf_of(self):
            return equal.as_subclass(_SameKey)
        return equal

    # The optimizer that knows where the gradients of its masters are, as long as it lives.
    _owner: Callable[[], Any] = staticmethod(lambda: None)

    def _knower(self) -> Any:
        # Dynamo looks too, and accepts no gradient of another type than the weight's.
        return None if torch.compiler.is_compiling() else self._owner()

    @property
    def grad(self) -> Tensor | None:
        if (owner := self._knower()) is not None:
            owner.look_at_gradient(self)
        return _raw_grad.__get__(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        owner = self._knower()
        # What was read of a half weight may be set again, which torch would refuse.
        is_float32 = isinstance(value, Tensor) and value.dtype == torch.float32
        if owner is None or not is_float32:
            _raw_grad.__set__(self, value)
        if owner is not None:
            owner.assign_gradient(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


class ModelParameter(_LazyGradParameter):
    """The half-precision weight of a model beside its :class:`MasterParameter`.

    Between ``scale_loss`` and ``step`` its ``.grad``, if somebody reads it, is the master's: FP32
    and unscaled, one tensor under both names. So clipping ``model.parameters()`` is clipping the
    masters.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelParameter:
        if id(self) not in memo:
            data = self.detach().clone(memory_format=torch.preserve_format)
            memo[id(self)] = type(self)(data, self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As a plain parameter, of the same memory: the model it goes to has no optimizer yet.
        return torch.nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class MasterParameter(_LazyGradParameter):
    """The FP32 master of one half-precision model weight.

    An optimizer steps on it and never sees the half weight. Its ``.grad`` is what autograd left in
    ``model_param.grad``, unscaled and in FP32. It is computed when somebody reads it, for all
    masters of the optimizer at once; until then the fused step works on the half gradients.
    """

    model_param: Tensor
    # The version of model_param up to which this master is known to have followed it.
    model_version: int

    @classmethod
    def of(cls, model_param: Tensor) -> MasterParameter:
        """The exact FP32 copy of `model_param`, laid out in memory alike."""
        return _rebuild(exact_float32(model_param), model_param)

    def __hash__(self) -> int:
        weight = self.model_param  # one of another class has keys of its own
        return id(weight if type(weight) in (torch.nn.Parameter, ModelParameter) else self)

    def set_owner(self, optimizer: Any) -> None:
        """The first to ask has it: one that wraps `optimizer` knows the gradients of amp."""
        if self._owner() is None:
            self._owner = weakref.ref(optimizer)
            unscale_on_access(self.model_param, optimizer)

    def __deepcopy__(self, memo: dict[int, Any]) -> MasterParameter:
        import copy

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
    """Have whoever reads ``model_param.grad`` see what `optimizer`'s master has."""
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
    """Whether an FP32 master can stand for it in the groups. That of a DTensor is in the state."""
    return param.dtype in HALF_DTYPES and not is_sharded(param)


def install_masters(
    optimizer: torch.optim.Optimizer, masters: dict[Tensor, MasterParameter]
) -> None:
    """Replace half parameters in `optimizer`'s groups by FP32 masters, in place, state and all.

    So also in the optimizers that it wraps, whether or not they share groups and state with it.

    Arguments:
        masters: by weight, those that there are; new ones are added.
    """
    optimizers = with_wrapped(optimizer)
    for group in [group for each in optimizers for group in each.param_groups]:
        for i, param in enumerate(group["params"]):
            if not takes_master(param) or not param.requires_grad:
                continue
            if param not in masters:
                masters[param] = MasterParameter.of(param)
                # Now, not at the first step: what was compiled meanwhile knows the weight's class.
                masters[param].set_owner(optimizer)
            group["params"][i] = masters[param]
    for state in [getattr(each, "state", {}) for each in optimizers]:
        weights = [key for key in state if isinstance(key, Tensor) and takes_master(key)]
        for param in filter(masters.__contains__, weights):
            kept, master = state.pop(param), masters[param]
            # Edits of the weight since its master was loaded are followed, as with any master.
            master.model_version = kept.pop("_model_version", master.model_version)
            # Loaded before, or a standalone optimizer's own.
            if (exact := pop_master(kept, param)) is not None:
                with torch.no_grad():
                    master.copy_(exact)
            halves = [k for k, v in kept.items() if getattr(v, "dtype", None) in HALF_DTYPES]
            state[master] = kept | {key: kept[key].to(torch.float32) for key in halves}
