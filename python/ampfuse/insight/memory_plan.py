"""``ampfuse.plan``: whether a training fits, in each mode, before anything is allocated.

Weights, gradients, masters and states follow from the model and from the schema of the optimizers.
For activations one forward and backward pass of a copy runs on torch's fake tensors, which have
shapes and no memory; a dispatch mode adds up the storages that operations make while they live.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import ampfuse
from ampfuse import pytree
from ampfuse.amp.casts import Casts, install, is_installed
from ampfuse.amp.policy import LEVELS, Policy, make_policy
from ampfuse.amp.weights import cast_model
from ampfuse.half_ops import cpu_half_ops
from ampfuse.insight.live_memory import LiveMemory, compiled_graphs
from ampfuse.insight.memory import KINDS, bytes_of, held_bytes, options_of, size, states_of
from ampfuse.insight.reporting import (
    LossFunction,
    aligned,
    loss_of,
    one_line,
    output_of,
    same_random_numbers,
)
from ampfuse.nn import fuse, linear_cross_entropy, recompute_norms
from ampfuse.optim.fused import algorithm_of
from ampfuse.optim.muon import step_bytes
from ampfuse.torch_utils import HALF_DTYPES, eager_module

_AUTOCAST_LEVEL = {"O2": "O1", "O3": "O1", "O5": "O4"}


@dataclasses.dataclass(frozen=True)
class Change:
    """One way to need less memory: options of the optimizer, or a change of the model or loss."""

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    model: str | None = None  # what `PlannedTraining` knows it by
    levels: tuple[str, ...] = ("O2", "O5")  # of options, those that take them


# Each is added to those before it: first what loses nothing, then what costs precision or time.
CHANGES = (
    Change('master_weights="split"', {"master_weights": "split"}),
    Change('state_dtype="8bit"', {"state_dtype": "8bit"}),
    Change("LinearCrossEntropy", model="linear_cross_entropy"),
    Change("fuse=True", model="fuse"),
    Change("recompute_norms", model="recompute_norms"),
    Change("activation checkpointing", model="checkpointing"),
    Change('no masters, rounding="stochastic"', {"master_weights": False}, levels=("O5",)),
)


def plan(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    optimizer: str | Callable[[Any], Optimizer] = "AdamW",
    *,
    opt_level: str = "O5",
    loss_function: LossFunction | None = None,
    budget: str | float | None = None,
    device: str = "cuda",
    fuse: bool = False,
    compiled: bool = False,
    accumulate: bool = False,
) -> Plan:
    """Plan the memory of a training of `model`, by kind and at its peak: at `opt_level`, in FP32,
    under autocast, and with changes that reduce it, one after another.

    Nothing is computed and nothing is allocated: the model may be larger than the machine. `model`
    does not change.

    Arguments:
        model: a module, on any device or on ``meta``, before ``amp.initialize``; or a function that
            builds one, which is called under ``torch.device("meta")``.
        batch: what `model` takes: a tensor, a tuple of arguments or a dict of keywords; of tensors
            only shape and dtype count, so they may be on ``meta``.
        optimizer: the name of a class of ``ampfuse.optim`` or ``torch.optim``, or a function of the
            parameters that makes one, whose ``master_weights``, ``state_dtype`` and ``ema_decay``
            count.
        opt_level: "O0" to "O5".
        loss_function: ``loss_function(model, batch)`` returns the loss. By default it is ``loss``
            of what the model returns, as transformers' models have it if `batch` has labels, or
            the sum of its outputs.
        budget: memory to compare with: "80GB", "15 GiB", or a number of bytes; None: what the GPU
            here has, if there is one.
        device: "cuda" or "cpu", which may be elsewhere.
        fuse: as in ``amp.initialize``.
        compiled: the model is compiled as by ``model.compile()``. Its graphs and what they keep for
            the backward pass are torch.compile's; within a graph, results that only go into further
            elementwise operations or reductions take no memory. ``torch.compiler.reset()`` is
            called, so what was compiled before in this process is compiled again when it is used.
        accumulate: several backward passes make a step, so gradients live throughout.

    Raises:
        TypeError, ValueError: an argument is not as above.
        RuntimeError: the model cannot run on fake tensors, because its operations depend on values
            (``.item()``, ``nonzero``). The cause is the message's.

    Source: ``torch._subclasses.fake_tensor``; the idea of a memory tracker as a dispatch mode is
    that of ``torch.distributed._tools.mem_tracker``.
    """
    if opt_level not in LEVELS:
        raise ValueError(f"opt_level must be one of {', '.join(LEVELS)}, got {opt_level!r}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f'device must be "cpu" or "cuda", got {device!r}')
    if budget is None and device == "cuda" and torch.cuda.is_available():
        budget = torch.cuda.get_device_properties("cuda").total_memory
    limit = None if budget is None else bytes_of(budget)
    model = _built(model)
    training = PlannedTraining(
        model, batch, loss_function, device, _maker_of(optimizer), fuse, compiled, accumulate
    )
    levels = dict.fromkeys(("O0", _AUTOCAST_LEVEL.get(opt_level, opt_level), opt_level))
    held = {level: training.held(level, {}, ()) for level in levels}
    asked = list(held).index(opt_level)
    held |= _rows_of_changes(training, opt_level, held[opt_level]["peak"])
    elements = sum(parameter.numel() for parameter in model.parameters())
    heading = f"{training.optimizer_name}, {elements:,} parameters, on {device}"
    if compiled:
        heading += ", compiled"
    return Plan(heading, elements, limit, held, asked, list(training.notes))


def _rows_of_changes(
    training: PlannedTraining, level: str, least: int
) -> dict[str, dict[str, int]]:
    """What is held with each change that lowers the peak, from `least` on, and those before it."""
    rows: dict[str, dict[str, int]] = {}
    options: dict[str, Any] = {}
    changes: tuple[str, ...] = ()
    for change in CHANGES:
        if change.options and not (training.is_fused and level in change.levels):
            continue
        if change.model and not training.can(change.model):
            continue
        new_options = {**options, **change.options}
        new_changes = (*changes, change.model) if change.model else changes
        try:
            row = training.held(level, new_options, new_changes)
        except Exception as error:  # of the model's code, with the change
            training.notes[f"{change.name} could not be planned: {one_line(error)}"] = None
            continue
        if row["peak"] < least:
            least, options, changes = row["peak"], new_options, new_changes
            rows[f"+ {change.name}"] = row
    return rows


@dataclasses.dataclass(frozen=True)
class Plan:
    """The result of :func:`plan`; ``print`` shows it as a table.

    `held` has bytes by mode and kind, and under "peak" the most at one time. A mode is a level, or
    begins with "+": a change that is added to all before it. `asked` is the place of the level that
    was asked for, `budget` is in bytes or None, and `parameters` counts elements.
    """

    heading: str
    parameters: int
    budget: int | None
    held: Mapping[str, Mapping[str, int]]
    asked: int
    notes: Sequence[str]

    def fits(self, mode: str) -> bool:
        """Compare the peak of `mode` with the budget. Raises ValueError without a budget."""
        if self.budget is None:
            raise ValueError("there is no budget: pass budget= to ampfuse.plan")
        return self.held[mode]["peak"] <= self.budget

    @property
    def suggestion(self) -> str:
        """The smallest change that makes it fit, as a sentence; "" without a budget."""
        if self.budget is None:
            return ""
        level, *changes = list(self.held)[self.asked :]
        if self.fits(level):
            return f"{level} fits as it is."
        for count, change in enumerate(changes, 1):
            if self.fits(change):
                return f"{level} fits with {', '.join(each[2:] for each in changes[:count])}."
        least = min(row["peak"] for row in self.held.values())
        return (
            f"Nothing here fits: at least {size(least)} are needed. Take a smaller batch, or shard "
            f"the model (FSDP2) over {-(-least // self.budget)} or more devices."
        )

    def table(self) -> str:
        """A row for each mode: what it holds by kind, its peak, and whether it fits."""
        kinds = [kind for kind in (*KINDS, "peak") if any(row[kind] for row in self.held.values())]
        lines = [["", *kinds, *([f"fits {size(self.budget)}"] if self.budget else [])]]
        for mode, row in self.held.items():
            cells = [size(row[kind]) if row[kind] else "-" for kind in kinds]
            fits = ["yes" if self.fits(mode) else "no"] if self.budget else []
            lines.append([mode, *cells, *fits])
        rest = [line for line in (self.suggestion, *self.notes) if line]
        return "\n".join([self.heading, *aligned(lines, left=(0,)), *rest])

    __str__ = table


# --- the model, the optimizer and one pass ----------------------------------------------------


def _built(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module) and callable(model):
        with torch.device("meta"):
            model = model()
    if not isinstance(model, nn.Module):
        raise TypeError(
            "model must be a module, or a function that builds one: write "
            f"ampfuse.plan(model, batch). Got {type(model).__name__}."
        )
    model = eager_module(model)
    if is_installed(model):
        raise ValueError("the model has been through amp.initialize: plan with it as it was before")
    return model


def _maker_of(optimizer: Any) -> Callable[[nn.Module], Optimizer]:
    """A function that makes the optimizer of a model."""
    kind = optimizer
    if isinstance(optimizer, str):
        kind = getattr(ampfuse.optim, optimizer, getattr(torch.optim, optimizer, None))
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            raise ValueError(f"{optimizer!r} is not an optimizer of ampfuse.optim or torch.optim")

    def make(model: nn.Module) -> Optimizer:
        params: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not params:
            raise ValueError("the model has no parameter that requires a gradient")
        if kind is ampfuse.optim.Muon:
            params = ampfuse.optim.muon_groups(model)
        made = kind(params) if callable(kind) else kind
        if isinstance(made, Optimizer) and made is not optimizer:
            return made
        raise TypeError(
            "optimizer must be a name or a function that makes one of parameters, such as lambda "
            f"params: ampfuse.optim.SGD(params, lr=0.1, momentum=0.9); got {type(made).__name__}"
        )

    return make


@dataclasses.dataclass
class PlannedTraining:
    """The training that is planned."""

    model: nn.Module
    batch: Any
    loss_function: LossFunction | None
    device: str
    make: Callable[[nn.Module], Optimizer]
    fuse: bool = False
    compiled: bool = False
    accumulate: bool = False

    def __post_init__(self) -> None:
        self.optimizer_name, self.is_fused = "", False  # until held() makes an optimizer
        self.notes: dict[str, None] = {}
        self._passes: dict[Any, tuple[int, int]] = {}

    def can(self, change: str) -> bool:
        """Return whether a change of the model applies to this one."""
        if change == "linear_cross_entropy":
            return self.loss_function is None and _has_language_head(self.model, self.batch)
        if change == "fuse":
            return not self.fuse
        return change != "checkpointing" or len(_blocks(self.model)) > 1

    def held(
        self, level: str, options: Mapping[str, Any], changes: tuple[str, ...]
    ) -> dict[str, int]:
        """Bytes by kind at a level, with options of the optimizer and changes of the model."""
        policy = make_policy(level)
        with FakeTensorMode():
            model = self._model(policy)
            optimizer = self.make(model)
            algorithm = algorithm_of(optimizer)
            wanted = options_of(optimizer)  # with masters as the level has them
            if not policy.master_weights or not wanted["master_weights"]:
                wanted["master_weights"] = bool(policy.master_weights)
            wanted |= options
            if algorithm and wanted["state_dtype"] not in algorithm.storages:
                wanted["state_dtype"] = getattr(optimizer, "state_dtype", None)
            held = held_bytes(model, states_of(optimizer), wanted)
            scratch = step_bytes(optimizer) if algorithm and algorithm.has_scratch else 0
        if self.accumulate and wanted["master_weights"]:
            trained = [p for p in model.parameters() if p.requires_grad]
            held["accumulators"] = sum(4 * p.numel() for p in trained if p.dtype in HALF_DTYPES)
        self.is_fused, self.optimizer_name = algorithm is not None, type(optimizer).__name__
        if not self.is_fused:
            self.notes[f"The states of {self.optimizer_name} are not counted."] = None
        for kind in {type(module) for module in model.modules()} & {nn.RNN, nn.LSTM, nn.GRU}:
            self.notes[f"What {kind.__name__} keeps for its backward is not counted."] = None
        if (level, changes) not in self._passes:
            self._passes[level, changes] = self._pass(policy, changes)
        held["activations"], most = self._passes[level, changes]
        throughout = sum(held.values()) - held["gradients"] - held["activations"]
        held["peak"] = throughout + max(most, held["gradients"] + scratch)
        return held

    def _model(self, policy: Policy, *, is_fused: bool = False) -> nn.Module:
        """A fake copy as ``amp.initialize`` makes it."""
        model = _fake(self.model, in_float32=policy.weights_type is None)
        if is_fused:
            fuse(model)
        if policy.weights_type is not None:
            keep = bool(policy.keep_batchnorm_fp32)
            cast_model(model, policy.weights_type, keep_batchnorm_fp32=keep)
        return model

    def _pass(self, policy: Policy, changes: tuple[str, ...]) -> tuple[int, int]:
        """Bytes that a forward pass keeps for its backward, and the most at one time in both."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(same_random_numbers())
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(cpu_half_ops())  # a GPU's rules of autocast
            if self.device == "cuda":
                stack.enter_context(_as_on_gpu())
            if "recompute_norms" in changes:
                stack.enter_context(recompute_norms())
            model = called = self._model(policy, is_fused=self.fuse or "fuse" in changes)
            if "checkpointing" in changes:
                _checkpoint(model)
            install(model, Casts.of(policy))
            model.train()
            loss_function = self.loss_function or _default_loss
            if "linear_cross_entropy" in changes:
                loss_function, called = _language_loss, model.base_model  # type: ignore[assignment]
            batch = pytree.replace(self.batch, _fake_tensor)
            live = LiveMemory([*model.parameters(), *model.buffers(), *pytree.tensors(batch)])
            if self.compiled:
                stack.enter_context(compiled_graphs(called, live, self.device))
            return self._measured(
                model, functools.partial(loss_of, loss_function, model, batch), live
            )

    def _measured(
        self, model: nn.Module, forward: Callable[[], Tensor], live: LiveMemory
    ) -> tuple[int, int]:
        """What `live` counts in passes of `model`, whose `forward` returns the loss."""
        kept = 0
        try:
            if self.compiled:  # and counted when it is called again
                forward().backward()
                model.zero_grad()
            with live:
                for _ in range(2 if self.accumulate else 1):
                    before = live.now
                    loss = forward()
                    kept = live.now - before
                    loss.backward()
                    del loss
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise RuntimeError(
                f"The model cannot be planned: {error.func} depends on values, and fake "
                "tensors have none. Leave it out of the model and of loss_function."
            ) from error
        return kept, live.peak


def _fake_tensor(item: Any, in_float32: bool = False) -> Any:
    """A fake one of the same shape and layout on the CPU; another item as it is.

    `in_float32`: half ones become float32.
    """
    if not isinstance(item, Tensor) or isinstance(item, FakeTensor):
        return item
    dtype = torch.float32 if in_float32 and item.dtype in HALF_DTYPES else item.dtype
    fake = torch.empty_strided(item.shape, item.stride(), dtype=dtype, device="cpu")
    return nn.Parameter(fake, item.requires_grad) if isinstance(item, nn.Parameter) else fake


def _fake(model: nn.Module, in_float32: bool) -> nn.Module:
    """A copy with fake tensors, also in plain attributes."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        own = vars(module)
        for tensor in pytree.tensors([own["_parameters"], own["_buffers"], list(own.values())]):
            if id(tensor) not in memo:
                memo[id(tensor)] = _fake_tensor(tensor, in_float32)
    return copy.deepcopy(model, memo)


@contextlib.contextmanager
def _as_on_gpu() -> Iterator[None]:
    """Dropout and attention keep what they keep on a GPU: a mask of bytes, and no probabilities.

    (Fake tensors on a device that is not there have no backward pass.)
    """
    dropout, attention = F.dropout, F.scaled_dot_product_attention

    def with_mask(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if training and 0 < p < 1 and not inplace:
            return torch.native_dropout(input, p, True)[0]
        return dropout(input, p, training, inplace)

    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

    def without_probabilities(*args: Any, **kwargs: Any) -> Tensor:
        named = dict(zip(names, args, strict=False)) | kwargs
        return attention(**named | {"dropout_p": 0.0})

    with (
        mock.patch.object(F, "dropout", with_mask),
        mock.patch.object(F, "scaled_dot_product_attention", without_probabilities),
    ):
        yield


# --- losses, and changes of a model -----------------------------------------------------------


def _default_loss(model: nn.Module, batch: Any) -> Tensor:
    output = output_of(model, batch)
    if isinstance(loss := getattr(output, "loss", None), Tensor):
        return loss
    outputs = [each for each in pytree.tensors(output) if each.requires_grad]
    return torch.stack([each.float().sum() for each in outputs]).sum()


def _has_language_head(model: nn.Module, batch: Any) -> bool:
    """Return whether `model` is a causal language model of transformers and has labels."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    has_labels = isinstance(batch, Mapping) and "labels" in batch
    return has_labels and isinstance(head, nn.Linear) and hasattr(model, "base_model")


def _language_loss(model: Any, batch: Any) -> Tensor:
    """The loss of a language model from its hidden states, with no logits in memory."""
    rest = {name: value for name, value in batch.items() if name != "labels"}
    head = model.get_output_embeddings()
    hidden = model.base_model(**rest).last_hidden_state[:, :-1]
    target = batch["labels"][:, 1:]
    return linear_cross_entropy(hidden.flatten(0, 1), head.weight, target.flatten(), head.bias)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks with most parameters: those of the ModuleList or Sequential."""
    lists = [list(m) for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    repeated = [blocks for blocks in lists if len(blocks) > 1 and len({*map(type, blocks)}) == 1]
    elements = [sum(p.numel() for block in each for p in block.parameters()) for each in repeated]
    return repeated[elements.index(max(elements))] if repeated else []


def _checkpoint(model: nn.Module) -> None:
    for block in _blocks(model):
        forward = functools.partial(checkpoint, block.forward)
        # Fake tensors draw no random numbers.
        block.forward = functools.partial(forward, use_reentrant=False, preserve_rng_state=False)
