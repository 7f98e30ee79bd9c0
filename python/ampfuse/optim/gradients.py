"""Gives masters their gradients between backward pass and step: scaled, unscaled or delayed.

The extension's ``GradientLedger`` keeps the gradients; csrc/torch/gradient_ledger.h lists their
states.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampfuse import _core
from ampfuse.optim.masters import MasterParameter, leaf_of, unscale_on_access
from ampfuse.optim.options import OptionDefaults
from ampfuse.optim.param_groups import parameters
from ampfuse.optim.rows import Rows
from ampfuse.optim.sharding import local, placed_as
from ampfuse.torch_utils import HALF_DTYPES, dynamo_disable

if TYPE_CHECKING:
    from ampfuse._C import ParamTable


class ScaledGradients(OptionDefaults, Optimizer):
    """Mixin of optimizers that accept gradients multiplied by a loss scale."""

    # An amp.scale_loss block of this optimizer is open.
    in_backward = False

    _under_amp: bool = False
    # ampfuse.GradScaler runs the step; torch's does not see masters.
    _scaler_is_ours = False
    # The history of earlier steps, until there is a table.
    _step_history: Tensor | None = None
    # A swap_ema block is open.
    _swapped = False

    _rows = cached_property(Rows)

    # --- the table and masters ------------------------------------------------------------------

    def param_table(self) -> ParamTable:
        """The table, with a row for each parameter of ``param_groups``."""
        return self._rows.current_table()

    def rows_of(self, params: Container[int]) -> list[int]:
        """The rows of a model's parameters, given by their ids."""
        self._rows.current_table()
        return [row for row, param in enumerate(self._rows.params) if id(leaf_of(param)) in params]

    @property
    def has_shards(self) -> bool:
        """Whether some parameter is a DTensor."""
        return self._rows.has_shards

    def _rows_are_added(self) -> None:
        """Some rows of the table have neither states nor hyper-parameters yet."""

    def go_under_amp(
        self, *, master_weights: bool | Literal["split"], names: dict[int, str]
    ) -> None:
        """Last part of :func:`ampfuse.optim.upgrade`, after the change of class."""
        rows = self._rows
        rows.drop_table()
        self._under_amp, self.skip_by_default = True, False
        self.master_weights = master_weights
        rows.names = dict(names)
        rows.make_masters()
        for param in filter(rows.is_split, parameters(self)):
            unscale_on_access(param, self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, like torch's; under amp its half-precision parameters get FP32 masters."""
        super().add_param_group(param_group)
        self._rows.make_masters(anew=True)

    def restore_master(self, param: Tensor, state: dict[str, Any], master: Tensor) -> None:
        """Make `master` the master of `param`; see :meth:`Rows.restore_master`."""
        self._rows.restore_master(param, state, master)

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Copy every edit of the model's half weights to the masters, also those through ``.data``.

        The next step follows edits that autograd can see (``load_state_dict``, ``clamp_`` under
        ``no_grad``, assigning ``.data``) without this call. An in-place change of ``p.data`` leaves
        no trace, and needs this call before the step. Other elements keep their bits.
        """
        self.param_table().masters.refresh(all=True)

    @torch.no_grad()
    def sync_masters_from_model(self) -> None:
        """Copy edits of the model to the masters, before these are saved or copied.

        Raises RuntimeError in a swap_ema block, where the model has its averages.
        """
        self._check_not_swapped("reading or saving masters")
        if self._rows.needs_table():
            self.param_table().masters.refresh()

    def _check_not_swapped(self, what: str) -> None:
        if self._swapped:
            raise RuntimeError(
                f"{what} is not possible in a swap_ema block, where the model has its averages; "
                "do it after the block"
            )

    # --- gradients ------------------------------------------------------------------------------

    @dynamo_disable
    def end_backward(self, scale: Tensor, check: bool, delay: bool = False) -> bool:
        """Inspect and unscale the gradients of a pass, which carry `scale` (float32, 0-dim).

        The pass began with ``param_table().gradients.begin_backward()``.

        Arguments:
            check: look for inf and NaN.
            delay: leave the result of the inspection to the next pass.

        Returns:
            Whether it left a gradient, or the delayed pass before it did.
        """
        gradients = self._rows.existing_table().gradients
        left = gradients.end_backward(scale, check, delay)
        if self._under_amp and self._rows.has_shards:
            # A DTensor cannot unscale its gradient when it is read.
            gradients.materialize()
        return left

    @property
    def has_scaled_gradients(self) -> bool:
        """Whether the last pass left its inspection to the next one."""
        table = self._rows.table
        return table is not None and table.gradients.is_delayed

    # Dynamo traces neither of these two.

    def look_at_gradient(self, param: Tensor) -> None:
        """``param.grad`` is read: of a master or of its weight it is FP32 and unscaled."""
        if self._rows.table is not None:
            self._rows.table.gradients.before_read(param)

    def assign_gradient(self, param: Tensor, value: Tensor | None) -> None:
        """``param.grad`` is set: `value` is the gradient of the step, for master and weight."""
        if self._rows.table is not None or value is not None:
            (self._rows.table or self._rows.current_table()).gradients.assign(param, value)

    def unscale_gradients(self, scale: Tensor) -> Tensor:
        """Divide all gradients by `scale` (float32, 0-dim) now, exactly.

        FP32 gradients are divided in place. Half gradients of a parameter outside amp become FP32
        ones, because rounding them back to half would flush small values to zero.

        Returns:
            The flag, float32 and 0-dim: 1 if a gradient was not finite.
        """
        rows = self._rows
        table = rows.current_table()
        found_inf = rows.found_inf
        if self._under_amp and table.masters.exist():  # half gradients are unscaled when read
            table.gradients.end_backward(scale, True)
        else:
            table.plan.collect(None, False)  # raises, by name, for what no step takes
            _unscale(rows.params, scale.double().reciprocal().float(), found_inf)
            if rows.ranks is not None:
                rows.ranks.share(found_inf)
        return found_inf

    @property
    def found_inf_flag(self) -> Tensor:
        """float32, 0-dim, on the device: 1 if a gradient since the last step was not finite."""
        return self._flags().found_inf

    @property
    def pass_found_inf_flag(self) -> Tensor:
        """float32, 0-dim, on the device: 1 if a gradient of the last backward pass was not finite.

        Passes with ``delay_unscale`` before it count as part of it: they were not inspected then.
        """
        return self._flags().pass_found_inf

    def _flags(self) -> Rows:
        if self._rows.table is None:
            self._rows.current_table()
        return self._rows

    @dynamo_disable
    @torch.no_grad()
    def inspect_gradients(self) -> Tensor:
        """Look at the gradients now, as the step would, which then need not look again.

        Returns:
            `found_inf_flag`. In a backward pass, what was known before it.
        """
        table = self._rows.current_table()
        if not self.in_backward:
            table.plan.collect(None, False)
            table.plan.measure()
        return self.found_inf_flag

    @dynamo_disable
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, like torch's, and those that amp keeps of earlier passes."""
        if self._rows.needs_table():
            self.param_table().gradients.zero_grad(set_to_none)
        else:
            super().zero_grad(set_to_none)

    def _check_before_step(self) -> None:
        """Raise RuntimeError inside a scale_loss context, and where torch's GradScaler steps."""
        if self.in_backward:
            raise RuntimeError(
                "step() was called inside the scale_loss context, where gradients are still "
                "scaled. Call optimizer.step() after the with block."
            )
        is_torchs = "found_inf" in self.__dict__ and not self._scaler_is_ours
        if is_torchs and any(isinstance(param, MasterParameter) for param in parameters(self)):
            raise RuntimeError(
                "torch.amp.GradScaler does not see the half-precision gradients of an optimizer "
                "that went through amp.initialize. Write `with amp.scale_loss(loss, optimizer) as "
                "scaled_loss: scaled_loss.backward()` and optimizer.step(), without a scaler."
            )


@torch.no_grad()
def _unscale(params: Iterable[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """Unscale outside amp; `found_inf` becomes 1 if a gradient is not finite."""
    held = [(param, local(param.grad)) for param in params if param.grad is not None]
    old, new = [], []
    for _, gradient in held:
        is_dense = torch.ops.aten.is_non_overlapping_and_dense(gradient)
        old.append(gradient if is_dense else gradient.clone())  # which has no gaps in memory
        is_half = gradient.dtype in HALF_DTYPES
        new.append(torch.empty_like(old[-1], dtype=torch.float32) if is_half else old[-1])
    if old:
        _core.C.unscale(old, new, inv_scale, found_inf)
    for (param, gradient), unscaled in zip(held, new, strict=True):
        if unscaled is gradient:
            continue
        if param.dtype in HALF_DTYPES:
            param.grad_dtype = None  # any type; the next backward gives a half gradient again
        param.grad = placed_as(param, unscaled)
