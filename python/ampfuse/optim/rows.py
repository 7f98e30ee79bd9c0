"""An optimizer's parameters as rows of the extension's ``ParamTable``."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ampfuse import _core
from ampfuse.optim.inner import parameters
from ampfuse.optim.masters import (
    HALF_DTYPES,
    MasterParameter,
    exact_float32,
    install_masters,
    joined_master,
    materialize_on_sight,
    split_master,
    takes_master,
)
from ampfuse.optim.options import WithOptions
from ampfuse.optim.shards import Ranks, is_sharded, local, origin, placed_as
from ampfuse.uncompiled import uncompiled

if TYPE_CHECKING:
    from ampfuse._C import ParamTable


class Rows(WithOptions, torch.optim.Optimizer):
    """Mixin: an optimizer with a table, and in it a row for each parameter of its groups.

    Half parameters have FP32 masters if `master_weights` says so: in ``self.state``, or under amp
    in the groups.
    """

    _algorithm = "none"

    _under_amp: bool = False
    _names: dict[int, str] | None = None
    _table: ParamTable | None = None
    _row_params: list[Tensor]
    # Half parameters that were frozen when masters were made, and have none; None = look again.
    _frozen: list[Tensor] | None = None
    # Whether some parameter is a DTensor, and who steps shards of the same.
    _has_shards = False
    _ranks: Ranks | None = None
    # Whether its constructor takes options, whose names are then ours in groups too.
    _takes_options = False
    # The options that rows are made by, and all of them as a step last found them.
    _made_with: dict[str, Any]
    _checked: tuple[Any, ...] | None = None
    # Whether the rows have the states of the optimizer.
    _states_bound = False
    # State tensors, by row and name, that a captured graph works on.
    _pinned_states: dict[tuple[int, str], Tensor]
    # Where a table that is made anew goes on in a schedule; the table counts from there.
    _schedule_step: Tensor | int = 0

    @uncompiled
    def param_table(self) -> ParamTable:
        """The table, with a row for each parameter of ``param_groups`` in order."""
        if self._installs_masters:
            self._master_the_unfrozen()
        table = self._table
        if table is not None and self.has_params(self._row_params) and table.has_its_shards():
            return table
        params = list(parameters(self))
        names = self.parameter_names()
        for param, name in zip(params, names, strict=True):
            if param.is_meta:
                raise RuntimeError(
                    f"{name} is on the meta device, where it has no values to step. Materialize it "
                    "(model.to_empty(device=...), then load or initialize it) and build the "
                    "optimizer from the parameters that the model has then."
                )
        if table is not None:
            known = self._row_params
            appended = len(known) < len(params) and all(map(operator.is_, known, params))
            if not appended:  # replaced, reordered or taken out
                table.refresh_masters()
                self._forget_rows()
                table = None
        if table is None:
            if not params:
                raise RuntimeError("the optimizer has no parameters; add a parameter group first")
            self._table = table = _core.C.ParamTable(self._algorithm, params[0].device)
            table.state_field("schedule_step").add_(self._schedule_step)
            self._row_params, self._pinned_states = [], {}
            self._made_with = {n: getattr(self, n) for n in ("master_weights", "rounding")}
            self._checked = None
        for i in range(len(self._row_params), len(params)):
            self._add_row(table, params[i], names[i])
            self._row_params.append(params[i])
        self._states_bound = False
        self._has_shards = any(map(is_sharded, params))
        self._ranks = Ranks.of(params)
        if self._ranks is not None:
            self._ranks.join(table)
        return table

    def _known_table(self) -> ParamTable:
        """The table as it is, where there is one."""
        assert self._table is not None
        return self._table

    def has_params(self, known: list[Tensor]) -> bool:
        """Whether the groups hold the very parameters of `known`, in that order."""
        return _core.C.holds([group["params"] for group in self.param_groups], known)

    def parameter_names(self) -> list[str]:
        """What messages call the parameters, in the order of the groups."""
        names = []
        for i, group in enumerate(self.param_groups):
            given = group.get("param_names") or [None] * len(group["params"])
            for j, param in enumerate(group["params"]):
                leaf = param.model_param if isinstance(param, MasterParameter) else param
                known = (self._names or {}).get(id(leaf)) or given[j]
                shape = tuple(param.shape)
                names.append(known or f"param_groups[{i}]['params'][{j}] of shape {shape}")
        return names

    @property
    def _installs_masters(self) -> bool:
        """Masters stand in the groups, for whoever looks there. A split one is no tensor."""
        return self._under_amp and self.master_weights is True

    def _is_split(self, param: Tensor) -> bool:
        return self.master_weights == "split" and param.dtype in HALF_DTYPES

    def go_under_amp(
        self, *, master_weights: bool | Literal["split"], names: dict[int, str]
    ) -> None:
        """What :func:`ampfuse.optim.upgrade` does once the class is right."""
        self._under_amp = True
        self._names = dict(names)
        self.master_weights = master_weights
        self._forget_rows()
        if self._installs_masters:
            install_masters(self)
        for param in filter(self._is_split, parameters(self)):
            materialize_on_sight(param, self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; under amp half-precision parameters of the group get FP32 masters."""
        super().add_param_group(param_group)
        if not self._installs_masters:
            return
        *groups, added = self.param_groups
        known = [p for g in groups for p in g["params"] if isinstance(p, MasterParameter)]
        if not {id(p.model_param) for p in known}.isdisjoint(map(id, added["params"])):
            self.param_groups.pop()
            raise ValueError("some parameters appear in more than one parameter group")
        install_masters(self)
        self._frozen = None

    def _master_the_unfrozen(self) -> None:
        if self._frozen is None:
            self._frozen = [param for param in parameters(self) if takes_master(param)]
        if any(param.requires_grad for param in self._frozen):
            self.materialize_gradients()
            install_masters(self)
            self._frozen = None

    def materialize_gradients(self) -> None:
        """Put FP32 unscaled gradients into the masters, if they are not there yet."""
        raise NotImplementedError

    def _add_row(self, table: ParamTable, param: Tensor, name: str) -> None:
        whole: dict[str, Any] = {}
        if is_sharded(param):
            whole = {"whole": param, "origin": origin(param)}
        shard = local(param)
        if isinstance(param, MasterParameter):
            param.set_owner(self)
            table.add_row(param, param.model_param, name, param.model_version)
        elif self._is_split(param):
            if self._under_amp:
                materialize_on_sight(param, self)
            table.add_row(local(self._remainder(param)), shard, name, **whole)
        elif self.master_weights and param.dtype in HALF_DTYPES and (whole or not self._under_amp):
            if whole and self._algorithm == "none":
                raise TypeError(
                    f"{name} is a DTensor in {param.dtype}, and {type(self).__name__} is not "
                    "fused: its own step knows no masters beside shards. Use an optimizer of "
                    "ampfuse.optim, or shard FP32 parameters with fully_shard's mp_policy."
                )
            state = self.state[param]
            version = state.pop("_model_version", shard._version)
            if "master_param" not in state:
                state["master_param"] = exact_float32(param)
            table.add_row(local(state["master_param"]), shard, name, version, **whole)
        else:
            table.add_row(shard, None, name, 0, self.rounding == "stochastic", **whole)

    def _remainder(self, param: Tensor) -> Tensor:
        """What `param` leaves of its split master, which is `param` where there is none yet."""
        state = self.state[param]
        if "master_remainder" not in state:
            remainder = _core.C.empty_laid_out_as(local(param).detach(), torch.int16).zero_()
            state["master_remainder"] = placed_as(param, remainder)
            if "master_param" in state:  # loaded before
                split_master(state.pop("master_param"), param, remainder)
        return state["master_remainder"]

    def master_of(self, row: int) -> Tensor:
        """What a row's step works on: the master, a copy of it if it is split, or the parameter."""
        param = self._row_params[row]
        if self._is_split(param):
            return local(joined_master(param, self._remainder(param)))
        return self._known_table().param(row).detach()

    def _has_amp_masters(self) -> bool:
        """Gradients of half weights wait for the masters that amp gave them."""
        return self._under_amp and self._known_table().has_models()

    def _forget_rows(self) -> None:
        if self._table is not None:
            self._schedule_step = self._table.state_field("schedule_step").clone()
        self._table = None
        self._frozen = None
        self._states_bound = False
