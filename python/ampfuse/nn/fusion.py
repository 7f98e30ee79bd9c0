"""Fuse the norms and activations of a model with what is beside them.

No module is replaced. Each that calls batch norms, adds before it calls another norm, or calls an
activation behind a bias or before a product, gets a ``forward`` on the instance, written from the
graph of its class's; a layer or RMS norm and an activation get one that is the same for all. So
names, classes, state dicts, hooks and optimizers stay; a copy is fused like its original, and a
model that was pickled loads as it was before.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import linecache
import types
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ampfuse.nn import causal_loss, linear_act, masks, row_norm
from ampfuse.nn.act_patterns import calls_activations, fuse_activations
from ampfuse.nn.batch_norm import BatchNormAct2d
from ampfuse.nn.forwards import eager_module, replaceable_forward
from ampfuse.nn.norm_act import is_fused, is_known, mark_fused
from ampfuse.nn.patterns import fuse_norms
from ampfuse.nn.tracing import KINDS, Untraceable, required_arguments, trace


@dataclasses.dataclass
class FusionReport:
    """What :func:`fuse` did; ``print`` shows a line for each place.

    Attributes:
        fused: the norms and activations that are fused now, by name, and with what; an activation
            that is no module by the name of the layer before it.
        left: those that are not, and why.
        has_loss: whether the model computes its loss from half logits now.
        skips_packing: whether it no longer searches for packed sequences where it gets no
            ``position_ids``.
    """

    fused: dict[str, str] = dataclasses.field(default_factory=dict)
    left: dict[str, str] = dataclasses.field(default_factory=dict)
    has_loss: bool = False
    skips_packing: bool = False

    @property
    def summary(self) -> str:
        """The first line."""
        count = len(self.fused) + len(self.left)
        if not count:
            return "no norms or activations"
        return f"{len(self.fused)} of {count} norms and activations fused"

    def __str__(self) -> str:
        lines = [self.summary]
        for title in ("fused", "left"):
            places = getattr(self, title)
            lines += [f"{title:5}  {name or '(model)'}: {what}" for name, what in places.items()]
        if self.has_loss:
            lines.append("fused  the loss of half logits")
        if self.skips_packing:
            lines.append("fused  no attention mask where no position_ids are given")
        return "\n".join(lines)


PARTS = ("norms", "activations", "loss", "masks")


def fuse(model: nn.Module, parts: Collection[str] = PARTS) -> FusionReport:
    """Fuse the norms and activations of `model`, in place.

    A batch norm with the add and the ReLU that follow it; a layer or RMS norm (torch's, timm's, and
    those of Llama and its kin in transformers) with the add before it, or by itself; a GELU or SiLU
    (theirs) with the bias of the linear layer before it or the product behind it, or by itself.
    transformers' causal language models compute their loss by :func:`ampfuse.nn.cross_entropy`,
    and its decoders no longer search for packed sequences where they get no ``position_ids``: that
    waits for the device, or, compiled and captured, keeps the flash kernels from running.

    Results are those of the model as it was, but for rounding. Call it when the model is complete:
    what a ``forward`` reads of its module, other than parameters, buffers and the mode, stays as it
    is now. A module may still be exchanged or get hooks; these then run. A call with
    optional arguments runs the original ``forward``.

    ``torch.fx``, ``torch.jit.script`` and ``nn.DataParallel`` take a model after :func:`unfuse`.

    Arguments:
        parts: of ``"norms"``, ``"activations"``, ``"loss"`` and ``"masks"`` those that are fused;
            the report knows no others.

    Returns:
        What was fused, and what was left and why.

    Raises:
        ValueError: `parts` is a string, or holds another name.
    """
    if isinstance(parts, str) or any(part not in PARTS for part in parts):
        raise ValueError(f'parts is {parts!r}; it has to list some of {PARTS}, as ["norms"] does.')
    modules = dict(eager_module(model).named_modules())
    owners: dict[str, list[str]] = {}
    for name, module in modules.items():
        if _part_of(module) in parts:
            owners.setdefault(_owner(name, modules), []).append(name)
        elif "activations" in parts and calls_activations(module):
            owners.setdefault(name, [])
    report = FusionReport()
    if "loss" in parts:
        report.has_loss = causal_loss.replace_loss(eager_module(model))
    if "masks" in parts:
        report.skips_packing = masks.skip_packing(eager_module(model))
    fused: dict[nn.Module, str] = {}
    for owner, names in owners.items():
        reason = f"{owner or 'the model'} does not call it"
        try:
            fused.update(_fuse_in(modules[owner], [modules[name] for name in names], parts))
        except Untraceable as error:
            reason = str(error)
        report.left.update({name: _unknown(modules[name]) or reason for name in names})
    for name in report.left:
        module, forward = modules[name], _forward_alone(modules[name])
        if forward is None:
            continue
        # One with an add, too, for the calls that run its owner's original ``forward``.
        try:
            _, attribute = _place_for_forward(module)
        except Untraceable as error:
            report.left[name] = str(error)
        else:
            module.__dict__[attribute] = types.MethodType(forward, module)
            fused.setdefault(module, "alone")
    for name in [name for name, module in modules.items() if module in fused]:
        report.fused[name] = fused[modules[name]]
        report.left.pop(name, None)
    return report


def unfuse(model: nn.Module) -> None:
    """Take back what :func:`fuse` did to `model`, in place."""
    causal_loss.restore_loss(eager_module(model))
    for module in eager_module(model).modules():
        _, attribute = replaceable_forward(module)
        if is_fused(module.__dict__.get(attribute)):
            del module.__dict__[attribute]


def _owner(name: str, modules: dict[str, nn.Module]) -> str:
    """The name of the module whose ``forward`` should call the norm `name`."""
    while name:
        name = name.rpartition(".")[0]
        if type(modules[name]).forward is not nn.Module.forward:  # as a ModuleList's is
            break
    return name


def _part_of(module: nn.Module) -> str | None:
    if isinstance(module, _BatchNorm) or row_norm.form_of(module):
        return "norms"
    return "activations" if linear_act.curve_of(module) else None


def _forward_alone(module: nn.Module) -> Callable[..., Any] | None:
    """The fused ``forward`` of a layer or RMS norm or an activation; None of another module."""
    if row_norm.form_of(module):
        return row_norm.forward
    return linear_act.forward if linear_act.curve_of(module) else None


def _unknown(norm: nn.Module) -> str | None:
    """Why `norm` has no fused form; None if it has one."""
    if isinstance(norm, BatchNormAct2d):
        return "fused in itself"
    if is_known(norm) or _forward_alone(norm):
        return None
    return f"a {type(norm).__name__} has no fused form"


def _fuse_in(
    owner: nn.Module, modules: list[nn.Module], parts: Collection[str]
) -> dict[nn.Module, str]:
    """Fuse `modules`, as far as they have a fused form and `owner` calls them.

    Returns:
        Those that are fused now, and with what.

    Raises:
        Untraceable: the forward of `owner` has to stay; the message says why.
    """
    cls, attribute = _place_for_forward(owner)
    if modules and all(map(_unknown, modules)):
        return {}
    forward, fused = _forward_from_graphs(owner, cls, parts)
    if fused:
        # torch.compile counts recompilations per code object.
        forward.__code__ = forward.__code__.replace()
        forward.__name__ = "forward"  # a bound method pickles as the name of its function
        owner.__dict__[attribute] = types.MethodType(mark_fused(forward), owner)
    return fused


def _place_for_forward(module: nn.Module) -> tuple[Any, str]:
    """As :func:`replaceable_forward`.

    Raises:
        Untraceable: the module has something there.
    """
    cls, attribute = replaceable_forward(module)
    present = module.__dict__.get(attribute)
    if is_fused(present):
        raise Untraceable("already fused")
    # A bound method that was pickled is the one of the class now.
    if present is not None and getattr(present, "__func__", None) is not cls.forward:
        raise Untraceable(f"this {cls.__name__} has a forward of its own")
    return cls, attribute


def _forward_from_graphs(
    owner: nn.Module, cls: type[nn.Module], parts: Collection[str]
) -> tuple[Any, dict[nn.Module, str]]:
    """A ``forward`` that runs the graph of `owner` for its mode and the kind of its arguments."""
    variants: dict[tuple[bool, type], Callable[..., Any]] = {}
    sources: dict[tuple[bool, type], str | None] = {}
    fused: dict[nn.Module, str] = {}
    failure: Untraceable | None = None
    for training, kind in itertools.product((True, False), KINDS):
        try:
            graph = _graph(owner, cls, training, kind)
        except Untraceable as error:
            failure = failure or error
            sources[training, kind] = None
            continue
        for part, rewrite in (("norms", fuse_norms), ("activations", fuse_activations)):
            for path, what in rewrite(graph, owner).items() if part in parts else ():
                fused.setdefault(owner.get_submodule(path), what)
        sources[training, kind], variants[training, kind] = _compiled(graph, cls)
    if not variants:
        assert failure is not None
        raise failure

    original: Any = cls.forward
    count = len(required_arguments(cls))
    by_kind = any(sources[mode, kind] != sources[mode, Tensor] for mode, kind in sources)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        variant = None
        if len(args) == count and not kwargs:
            kind = _kind(args) if by_kind else Tensor
            variant = variants.get((self.training, kind))
        return (variant or original)(self, *args, **kwargs)

    return forward, fused


def _graph(owner: nn.Module, cls: type[nn.Module], training: bool, kind: type) -> fx.Graph:
    """The graph of a forward that asks for the types of its arguments at most, all of one kind."""
    graph, other = (
        trace(owner, cls, training=training, arguments=kind, values=values)
        for values in (Tensor, list)
    )
    if str(graph) != str(other):
        raise Untraceable(f"{cls.__name__}.forward asks for the type of what a module returns")
    return graph


def _kind(args: tuple[Any, ...]) -> type:
    """What all of `args` are, of the kinds that there are graphs for, or else ``object``."""
    for kind in KINDS:
        if all(isinstance(arg, kind) for arg in args):
            return kind
    return object


_number = itertools.count()


def _compiled(graph: fx.Graph, cls: type[nn.Module]) -> tuple[str, Callable[..., Any]]:
    """The source of `graph` as a method, and the function."""
    code = graph.python_code(root_module="self")
    # Tracebacks show lines of it.
    name = f"<fused {cls.__name__}.forward, {next(_number)}>"
    linecache.cache[name] = (len(code.src), None, code.src.splitlines(keepends=True), name)
    scope = dict(code.globals)
    exec(compile(code.src, name, "exec"), scope)
    return code.src, scope["forward"]
