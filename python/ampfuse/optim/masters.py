"""FP32 master weights that stand in ``param_groups`` for half-precision model weights."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ampfuse.optim.base import AmpOptimizer

HALF_DTYPES = (torch.float16, torch.bfloat16)

_raw_grad = torch.Tensor.grad


class MasterParameter(torch.nn.Parameter):
    """The FP32 master of one half-precision model weight.

    An optimizer steps on it and never sees the half weight. Its ``.grad`` is what autograd left in
    ``model_param.grad``, unscaled and in FP32. It is computed when somebody reads it, for all
    masters of the optimizer at once; until then the fused step works on the half gradients.
    """

    model_param: Tensor
    # The version of model_param up to which this master is known to have followed it.
    model_version: int
    _owner: weakref.ref[AmpOptimizer] | None

    @classmethod
    def of(cls, model_param: Tensor) -> MasterParameter:
        """The exact FP32 copy of `model_param`, laid out in memory alike."""
        master = cls(model_param.detach().to(torch.float32), requires_grad=True)
        master.model_param = model_param
        master.model_version = model_param._version
        master._owner = None
        return master

    def set_owner(self, optimizer: AmpOptimizer) -> None:
        self._owner = weakref.ref(optimizer)

    def _materialize(self) -> None:
        owner = self._owner() if self._owner is not None else None
        if owner is not None:
            owner.materialize_gradients()

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        self._materialize()
        return _raw_grad.__get__(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._materialize()
        _raw_grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self._materialize()
        _raw_grad.__delete__(self)

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


def _rebuild(data: Tensor, model_param: Tensor) -> MasterParameter:
    master = MasterParameter(data, requires_grad=True)
    master.model_param = model_param
    master.model_version = model_param._version
    master._owner = None
    return master
