"""An optimizer's parameters as rows of the extension's ``ParamTable``."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ampfuse import _core
from ampfuse.devices import check_device, check_materialized
from ampfuse.optim.masters import (
    MASTERS,
    MasterParameter,
    exact_float32,
    install_masters,
    joined_master,
    leaf_of,
    split_master,
    takes_master,
    unscale_on_access,
)
from ampfuse.optim.param_groups import Component, parameters, with_groups
from ampfuse.optim.sharding import Ranks, is_sharded, local, origin, placed_as
from ampfuse.torch_utils import HALF_DTYPES, dynamo_disable

if TYPE_CHECKING:
    from ampfuse._C import ParamTable


class Rows(Component):
    """A table with a row for each parameter of an optimizer's groups, in their order.

    With `master_weights` half parameters have FP32 masters: in ``optimizer.state``, or under amp in
    the groups.

    Attributes:
        table, plan: None until they are used, and after the parameters were replaced.
        found_inf, pass_found_inf: flags of the table, float32, 0-dim, on its device.
        params: the parameter of each row.
        names: names of parameters for messages, by their ids, where they are known.
        has_shards, ranks: whether some parameter is a DTensor, and the processes that share them.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.table: ParamTable | None = None
        self.plan: Any = None  # a StepPlan; asking the table for it takes 0.4 us
        self.found_inf = self.pass_found_inf = torch.empty(0)
        self.params: list[Tensor] = []
        self.names: dict[int, str] = {}
        self.has_shards = False
        self.ranks: Ranks | None = None
        # By weight, all masters that were ever in the groups: groups may be rebuilt from weights.
        self.masters: dict[Tensor, MasterParameter] = {}
        # Frozen half parameters, which have no masters; None: look again.
        self._frozen: list[Tensor] | None = None

    @dynamo_disable
    def current_table(self) -> ParamTable:
        """The table, with a row for each parameter of ``param_groups``; made if it must be."""
        self.make_masters()
        optimizer, table = self.optimizer, self.table
        if table is not None and table.matches(groups=optimizer.param_groups):
            return table
        self.make_masters(anew=True)  # the groups may hold the model's weights
        if table is not None and table.matches(groups=optimizer.param_groups):
            return table
        return self._build()

    def _build(self) -> ParamTable:
        """Make the table match the groups: append rows, or make a new table."""
        optimizer = self.optimizer
        params, names = list(parameters(optimizer)), self.parameter_names()
        for param, name in zip(params, names, strict=True):
            check_materialized(param, name)
            if is_lazy(param):
                raise RuntimeError(f"{name} has no shape yet: call the model once before the step.")
        if self.table is not None:
            known = self.params
            appended = len(known) < len(params) and all(map(operator.is_, known, params))
            if not appended:  # replaced, reordered or taken out
                self.table.masters.refresh()
                self.drop_table()
        if self.table is None:
            if not params:
                raise RuntimeError("the optimizer has no parameters; add a parameter group first")
            check_device(params[0].device, names[0])
            self._start_table(params[0].device)
        table = self.existing_table()
        optimizer._rows_are_added()
        new = list(zip(params, names, self.groups(), strict=True))[len(self.params) :]
        for param, name, group in new:
            self._add_row(table, param, name, optimizer.algorithm_in(group).name)
            self.params.append(param)
        table.remember(groups=optimizer.param_groups)
        self.has_shards = any(map(is_sharded, params))
        self.ranks = Ranks.of(params)
        if self.ranks is not None:
            self.ranks.join(table)
        return table

    def _start_table(self, device: torch.device) -> None:
        """A table without rows, which continues the history."""
        table = _core.C.ParamTable(self.optimizer._algorithm, device)
        self.table, self.plan, self.params = table, table.plan, []
        field = table.inspector.state_field
        self.found_inf, self.pass_found_inf = field("found_inf"), field("pass_found_inf")
        if self.optimizer._step_history is not None:
            field("history").copy_(self.optimizer._step_history)

    def needs_table(self) -> bool:
        """Whether there is a table, or masters, which need one."""
        optimizer = self.optimizer
        if self.table is not None or not optimizer.master_weights:
            return self.table is not None
        states = getattr(optimizer, "state", {})  # some wrappers have none
        return any(
            isinstance(param, MasterParameter)
            or (param.dtype in HALF_DTYPES and "master_param" in states.get(param, {}))
            for param in parameters(optimizer)
        )

    def existing_table(self) -> ParamTable:
        """The table, which must exist, without a look at the groups."""
        assert self.table is not None
        return self.table

    def drop_table(self) -> None:
        """Have the next use make new rows from the groups."""
        if self.table is not None:  # the next table starts without a loss scale
            self.table.gradients.materialize()
            self.optimizer._step_history = self.table.inspector.state_field("history").clone()
        self.table = self.plan = self._frozen = None  # a plan keeps its table alive

    def history(self) -> Tensor | None:
        """The ``StepHistory`` of the optimizer, float64, on its device; None before it is used."""
        if self.table is None:
            return self.optimizer._step_history
        return self.table.inspector.state_field("history")

    def load_history(self, saved: Tensor | None) -> None:
        """Continue from a saved history, or with None from the beginning."""
        if self.table is None:
            self.optimizer._step_history = saved
        elif saved is None:
            self.table.inspector.state_field("history").zero_()
        else:
            self.table.inspector.state_field("history").copy_(saved)

    def parameter_names(self) -> list[str]:
        """The names of the parameters in messages, in the order of the groups."""
        names = []
        for i, group in enumerate(self.optimizer.param_groups):
            given = group.get("param_names") or [None] * len(group["params"])
            for j, param in enumerate(group["params"]):
                name = self.names.get(id(leaf_of(param))) or given[j]
                if not name:
                    shape = "unknown" if is_lazy(param) else tuple(param.shape)
                    name = f"param_groups[{i}]['params'][{j}] of shape {shape}"
                names.append(name)
        return names

    def groups(self) -> list[dict[str, Any]]:
        """The parameter group of each row."""
        return [group for group, _ in with_groups(self.optimizer)]

    # --- masters --------------------------------------------------------------------------------

    @property
    def installs_masters(self) -> bool:
        """Whether masters are in the groups, where users see them. Split ones are not tensors."""
        return self.optimizer._under_amp and self.optimizer.master_weights is True

    def has_master(self, param: Tensor) -> bool:
        """Whether `param` is a master, or the optimizer keeps one in its state."""
        is_kept = bool(self.optimizer.master_weights) and param.dtype in HALF_DTYPES
        return is_kept or isinstance(param, MasterParameter)

    def is_split(self, param: Tensor) -> bool:
        """Whether the master of `param` is the parameter and a remainder of 16 bits."""
        return self.optimizer.master_weights == "split" and param.dtype in HALF_DTYPES

    def make_masters(self, *, anew: bool = False) -> None:
        """Put masters into the groups for trained half parameters that have none yet.

        `anew`: the groups have changed.
        """
        if not self.installs_masters:
            return
        if self._frozen is None or anew:
            self._frozen = [param for param in parameters(self.optimizer) if takes_master(param)]
        if any(param.requires_grad for param in self._frozen):
            install_masters(self.optimizer, self.masters)
            self._frozen = None

    def _add_row(self, table: ParamTable, param: Tensor, name: str, algorithm: str) -> None:
        optimizer = self.optimizer
        options: dict[str, Any] = {"algorithm": algorithm}
        sharded = is_sharded(param)
        if sharded:
            options |= {"whole": param, "origin": origin(param)}
        shard, under_amp = local(param), optimizer._under_amp
        if isinstance(param, MasterParameter):
            param.set_owner(optimizer)
            self.masters[param.model_param] = param
            table.add_row(param, param.model_param, name, param.model_version, **options)
        elif self.is_split(param):
            if under_amp:
                unscale_on_access(param, optimizer)
            table.add_row(local(self.remainder(param)), shard, name, **options)
        elif self.has_master(param) and (sharded or not under_amp):
            if sharded and optimizer._algorithm == "none":
                raise TypeError(
                    f"{name} is a DTensor in {param.dtype}, and {type(optimizer).__name__} is not "
                    "fused: its step cannot use masters of shards. Use an optimizer of "
                    "ampfuse.optim, or shard FP32 parameters with fully_shard's mp_policy."
                )
            state = optimizer.state[param]
            version = state.pop("_model_version", shard._version)
            if "master_param" not in state:
                state["master_param"] = exact_float32(param)
            table.add_row(local(state["master_param"]), shard, name, version, **options)
        else:
            if not under_amp:  # no row uses a master that was loaded
                for key in MASTERS & optimizer.state.get(param, {}).keys():
                    del optimizer.state[param][key]
            table.add_row(shard, None, name, 0, optimizer.rounding == "stochastic", **options)

    def remainder(self, param: Tensor) -> Tensor:
        """The remainder of the split master of `param`; of a new one it is 0."""
        state = self.optimizer.state[param]
        if "master_remainder" not in state:
            remainder = _core.C.empty_laid_out_as(local(param).detach(), torch.int16).zero_()
            state["master_remainder"] = placed_as(param, remainder)
            if "master_param" in state:  # loaded before
                split_master(state.pop("master_param"), param, remainder)
        return state["master_remainder"]

    def master_of(self, row: int) -> Tensor:
        """The tensor that a row's step updates: master (a copy if it is split) or parameter."""
        param = self.params[row]
        if self.is_split(param):
            return local(joined_master(param, self.remainder(param)))
        return self.existing_table().param(row).detach()

    def restore_master(
        self, param: Tensor, state: dict[str, Any], saved: Tensor, key: str = "master_param"
    ) -> None:
        """Make `saved` the master of `param`, a parameter of the groups.

        A split master takes a remainder as it is, whether the weight is loaded before or after. A
        whole one is joined from it and the weight, which must have been loaded.

        Arguments:
            state: of `param`, about to be the optimizer's.
            saved: a tensor that can be kept, on the device of `param`.
            key: of `saved` in a state: a whole master (float32) or a remainder (int16).
        """
        state.pop(key, None)
        weight = leaf_of(param)
        if not self.has_master(param):
            if self.table is None:  # amp.initialize may still cast the weights
                state[key] = saved
            return
        if self.is_split(param):
            state["master_remainder"] = remainder = self.remainder(param)
            if key == "master_remainder":
                local(remainder).copy_(local(saved))
            else:
                split_master(saved, param, remainder)
        else:
            if key == "master_remainder":
                laid_out = _core.C.empty_laid_out_as(local(weight).detach(), torch.int16)
                saved = joined_master(weight, laid_out.copy_(local(saved)))
            if isinstance(param, MasterParameter):
                with torch.no_grad():
                    param.copy_(saved)
                param.model_version = weight._version
            elif self.table is None:
                state |= {"master_param": saved, "_model_version": weight._version}
            else:
                held = self.optimizer.state[param].get("master_param")  # by the table's row
                state["master_param"] = saved if held is None else held.copy_(saved)
        if self.table is not None:
            # Loading the model before or after this gives the weights these masters round to.
            self.table.masters.accept_model_weights()
