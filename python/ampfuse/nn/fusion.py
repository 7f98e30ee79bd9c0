"""Fuse the norms and activations of a model with what is beside them.

No module is replaced. Each that calls batch norms, adds before it calls another norm, calls an
activation behind a bias or before a product, or splits a projection, gets a ``forward`` on the
instance, written from the graph of its class's; a layer or RMS norm, an activation and a patch
embedding get one that is the same for all. So names, classes, state dicts, hooks and optimizers
stay; a copy is fused like its original, and a model that was pickled loads as it was before.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import linecache
import types
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ampfuse.nn import causal_loss, linear_act, masks, patches, row_norm
from ampfuse.nn.act_patterns import fuse_activations
from ampfuse.nn.attention import fuse_splits
from ampfuse.nn.batch_norm import BatchNormAct2d
from ampfuse.nn.forwards import eager_module, replaceable_forward
from ampfuse.nn.norm_act import is_fused, is_known, mark_fused
from ampfuse.nn.patterns import fuse_norms
from ampfuse.nn.tracing import KINDS, Call, Untraceable, is_constant, is_taken, kind_of, trace


@dataclasses.dataclass
class FusionReport:
    """What :func:`fuse` did; ``print`` shows a line for each place.

    Attributes:
        fused: the norms, activations, splits and patch embeddings that are fused now, by name, and
            with what; an activation that is no module, and a split, by the name of the layer before
            it.
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
            return "nothing to fuse"
        return f"{len(self.fused)} of {count} places fused"

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


PARTS = ("norms", "activations", "attention", "patches", "masks", "loss")


def fuse(model: nn.Module, parts: Collection[str] = PARTS) -> FusionReport:
    """Fuse the norms and activations of `model` with what is beside them, and more, in place.

    A batch norm with the add and the ReLU that follow it; a layer or RMS norm (torch's, timm's, and
    those of Llama and its kin in transformers) with the add before it, or by itself; a GELU or SiLU
    (theirs) with the bias of the linear layer before it or the product behind it, or by itself.
    A packed projection of queries, keys and values (``permute(...).unbind(0)``, as timm has it) is
    taken apart before it is permuted, see :func:`split_qkv`. A convolution of patches that do not
    overlap is a product, see :func:`patch_conv2d`: of at least 8 pixels each way, on a CPU in half
    precision. transformers' causal language models compute their loss by
    :func:`ampfuse.nn.cross_entropy`. Its decoders no longer search for packed sequences if they get
    no ``position_ids``: the search waits for the device or, in a compiled or captured model, rules
    out flash attention.

    Results are those of the model as it was, but for rounding. Call it when the model is complete:
    what a ``forward`` reads of its module, other than parameters, buffers and the mode, stays as it
    is now. Where a number, a string or a flag of the module is another than it was, the original
    ``forward`` runs. A module may still be exchanged or get hooks; these then run. The first call
    with other arguments by name than before traces ``forward`` once more; under ``torch.compile``
    such a call runs the original.

    Under ``torch.compile`` layer and RMS norms and activations are the compiler's, which fuses them
    with more than this does, and as fast; batch norms, splits and patch embeddings stay fused.

    ``torch.fx``, ``torch.jit.script`` and ``nn.DataParallel`` take a model after :func:`unfuse`.

    Arguments:
        parts: which of ``"norms"``, ``"activations"``, ``"attention"``, ``"patches"``,
            ``"masks"`` and ``"loss"`` to fuse; the report lists no others.

    Returns:
        What was fused, and what was left and why.

    Raises:
        ValueError: `parts` is a string, or holds another name.
    """
    if isinstance(parts, str) or any(part not in PARTS for part in parts):
        raise ValueError(f'parts must list some of {PARTS}, such as ["norms"], got {parts!r}.')
    modules = dict(eager_module(model).named_modules())
    report = FusionReport()
    owners: dict[str, list[str]] = {}
    for name, module in modules.items():
        if "patches" in parts and patches.takes_patches(module):
            report.left[name] = ""
        elif _part_of(module) in parts:
            owners.setdefault(_owner(name, modules), []).append(name)
        elif any(part in parts and not _named(module).isdisjoint(_NAMES[part]) for part in _NAMES):
            owners.setdefault(name, [])
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
            fused.setdefault(module, "alone" if _part_of(module) else "as a product")
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


# Functions and methods that an owner of such parts calls.
_NAMES = {"activations": ("gelu", "silu"), "attention": ("permute",)}


def _named(module: nn.Module) -> set[str]:
    """What the ``forward`` of `module` itself names."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return set() if code is None else set(code.co_names)


def _forward_alone(module: nn.Module) -> Callable[..., Any] | None:
    """The fused ``forward`` of a layer or RMS norm, an activation or a patch embedding."""
    if row_norm.form_of(module):
        return row_norm.forward
    if patches.takes_patches(module):
        return patches.forward
    return linear_act.forward if linear_act.curve_of(module) else None


def _unknown(norm: nn.Module) -> str | None:
    """Why `norm` has no fused form; None if it has one."""
    if isinstance(norm, BatchNormAct2d):
        return "fused in itself"
    if is_known(norm) or _forward_alone(norm):
        return None
    return f"{type(norm).__name__} has no fused version"


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
        raise Untraceable(f"this {cls.__name__} has a custom forward")
    return cls, attribute


def _forward_from_graphs(
    owner: nn.Module, cls: type[nn.Module], parts: Collection[str]
) -> tuple[Any, dict[nn.Module, str]]:
    """A ``forward`` that runs the graph of `owner` for the way in which it is called.

    Graphs of calls without optional arguments are made here, those of others by the first such call
    that no compiler looks at.
    """
    _, *parameters = inspect.signature(cls.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [p for p in parameters if p.kind not in variadic]
    defaults = {p.name: p.default for p in named if p.default is not p.empty}
    required = [p.name for p in named if p.default is p.empty]
    settings = _settings(owner)
    variants: dict[Call, Callable[..., Any] | None] = {}
    fused: dict[nn.Module, str] = {}
    failure: Untraceable | None = None
    for training, kind in itertools.product((True, False), KINDS):
        call = Call(training, tuple((name, kind) for name in required))
        try:
            variants[call], found = _variant(owner, cls, call, parts)
        except Untraceable as error:
            variants[call], found = None, {}
            failure = failure or error
        fused = found | fused
    if not any(variants.values()):
        assert failure is not None
        raise failure

    original: Any = cls.forward

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        as_it_was = all(kind_of(getattr(self, name, None)) == kind for name, kind in settings)
        if not as_it_was or len(given) != len(args) + len(kwargs):
            return original(self, *args, **kwargs)
        given = {k: v for k, v in given.items() if k not in defaults or v is not defaults[k]}
        call = Call(self.training, tuple((name, kind_of(given[name])) for name in given))
        if call not in variants and len(variants) < _MOST and not torch.compiler.is_compiling():
            try:
                variants[call], _ = _variant(self, cls, call, parts)
            except Untraceable:
                variants[call] = None
        variant = variants.get(call)
        if variant is None:
            return original(self, *args, **kwargs)
        return variant(self, *(given[name] for name, kind in call.arguments if is_taken(kind)))

    return forward, fused


_MOST = 24  # graphs of one module
_OF_ALL_MODULES = frozenset(dir(nn.Module()))


def _settings(module: nn.Module) -> list[tuple[str, Any]]:
    """The kinds of the constants among the attributes of `module` and its class, which a graph may
    depend on."""
    found = []
    for name in dir(module):
        if name[0] != "_" and name not in _OF_ALL_MODULES:
            value = inspect.getattr_static(module, name, Ellipsis)
            found += [(name, kind_of(value))] if is_constant(value) else []
    return found


def _variant(
    owner: nn.Module, cls: type[nn.Module], call: Call, parts: Collection[str]
) -> tuple[Callable[..., Any], dict[nn.Module, str]]:
    """What runs the graph of `owner` for `call`, and what is fused in it."""
    graph, other = (trace(owner, cls, call, values) for values in (Tensor, list))
    if str(graph) != str(other):
        raise Untraceable(f"{cls.__name__}.forward checks the type of a module's output")
    fused: dict[nn.Module, str] = {}
    for part, rewrite in _REWRITES.items():
        for path, what in rewrite(graph, owner).items() if part in parts else ():
            fused.setdefault(owner.get_submodule(path), what)
    return _compiled(graph, cls), fused


_REWRITES = {"norms": fuse_norms, "activations": fuse_activations, "attention": fuse_splits}
_number = itertools.count()


def _compiled(graph: fx.Graph, cls: type[nn.Module]) -> Callable[..., Any]:
    """`graph` as a method."""
    code = graph.python_code(root_module="self")
    # Tracebacks show lines of it.
    name = f"<fused {cls.__name__}.forward, {next(_number)}>"
    linecache.cache[name] = (len(code.src), None, code.src.splitlines(keepends=True), name)
    scope = dict(code.globals)
    exec(compile(code.src, name, "exec"), scope)
    return scope["forward"]
