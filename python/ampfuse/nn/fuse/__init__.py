"""Fuse the norms, activations and more of a model with what is next to them.

No module is replaced. A module that calls batch norms, adds before it calls another norm, calls an
activation after a bias or before a product, or splits a projection, gets a ``forward`` on the
instance, written from the graph of its class's; layer and RMS norms, activations and patch
embeddings get one that fuses them alone. So names, classes, state dicts, hooks and optimizers stay.
A copy is fused like its original; a pickled model loads unfused, also where ampfuse is not
installed.

``trace.py`` makes the graphs and ``forwards.py`` the functions that run them. The other files each
have one kind of fusion: what is recognized, what is called in its place, and how a graph changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ampfuse.nn.fuse import activations, norms, reshapes, transformers
from ampfuse.nn.fuse.forwards import (
    Rewrite,
    fuse_alone,
    fuse_graphs,
    is_fused,
    names_in,
    override_of,
    runs_plainly,
)
from ampfuse.nn.fuse.trace import Untraceable
from ampfuse.nn.modules import BatchNormAct2d
from ampfuse.torch_utils import eager_module


class Part(NamedTuple):
    """How one part is fused: by itself, and in the graph of a module that calls it.

    Attributes:
        recognizes: whether a module belongs to the part.
        compute: the fused result of such a module alone for its input; None if it has to run.
        rewrite: how a graph changes.
        names: functions and methods that a module with something to rewrite may call.
    """

    recognizes: Callable[[Any], Any] = lambda module: False
    compute: Callable[[Any, Any], Any] | None = None
    rewrite: Rewrite | None = None
    names: tuple[str, ...] = ()


_PARTS = {
    "norms": Part(norms.norm_spec, norms.alone, norms.rewrite),
    "activations": Part(
        activations.activation_of, activations.alone, activations.rewrite, ("gelu", "silu")
    ),
    "attention": Part(rewrite=reshapes.split_projections, names=("permute",)),
    "patches": Part(reshapes.takes_patches, reshapes.patches_alone),
}
PARTS = (*_PARTS, "masks", "loss")


@dataclasses.dataclass
class FusionReport:
    """The result of :func:`fuse`; ``print`` shows a line for each place.

    Attributes:
        fused: for each norm, activation, split and patch embedding that is fused, what it is fused
            with, by name; an activation that is not a module, and a split, have the name of the
            layer before them.
        left: for each that is not fused, the reason.
        has_loss: whether the model now computes its loss from half logits.
        skips_packing: whether decoders no longer search for packed sequences in calls without
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


def fuse(model: nn.Module, parts: Collection[str] = PARTS) -> FusionReport:
    """Fuse the norms and activations of `model` with what is next to them, and more, in place.

    A batch norm is fused with the add and the ReLU that follow it. A layer or RMS norm (torch's,
    timm's, and those of the Llama family in transformers) is fused with the add before it, or
    alone; a GELU or SiLU (theirs) with the bias of the linear layer before it or the product after
    it, or alone. A packed projection of queries, keys and values (``permute(...).unbind(0)``, as in
    timm) is taken apart before it is permuted, see :func:`split_qkv`. A convolution of patches that
    do not overlap becomes a product, see :func:`patch_conv2d`: of at least 8 pixels each way, on a
    CPU in half precision. transformers' causal language models compute their loss by
    :func:`ampfuse.nn.cross_entropy`. Their decoders no longer search for packed sequences if they
    get no ``position_ids``: the search waits for the device or, in a compiled or captured model,
    rules out flash attention.

    Results are those of the original model, except for rounding. Call it when the model is
    complete: what a ``forward`` reads from its module, other than parameters, buffers and the mode,
    is fixed now. If a number, a string or a flag of the module changes, the original ``forward``
    runs. Modules in it may still be exchanged or get hooks; these then run, in the original
    ``forward``. The first call with other optional arguments than before traces ``forward`` once
    more; under ``torch.compile`` such a call runs the original.

    Under ``torch.compile`` layer and RMS norms and activations are left to the compiler, which
    fuses them with more than this does, and as fast; batch norms, splits and patch embeddings stay
    fused. ``torch.fx``, ``torch.jit.script`` and ``nn.DataParallel`` need :func:`unfuse` first.

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
    model = eager_module(model)
    modules = dict(model.named_modules())
    report = FusionReport()
    chosen = [part for name, part in _PARTS.items() if name in parts]
    owners: dict[str, list[str]] = {}
    for name, module in modules.items():
        part, _ = _part_of(module)
        if part == "patches" and part in parts:
            report.left[name] = ""
        elif part in parts:
            owners.setdefault(_owner(name, modules), []).append(name)
        elif not names_in(module).isdisjoint(name for part in chosen for name in part.names):
            owners.setdefault(name, [])
    if "loss" in parts:
        report.has_loss = transformers.replace_loss(model)
    if "masks" in parts:
        report.skips_packing = transformers.skip_packing(model)
    fused: dict[nn.Module, str] = {}
    rewrites = [part.rewrite for part in chosen if part.rewrite]
    for owner, names in owners.items():
        reasons = {name: _unknown(modules[name]) for name in names}
        untraceable = None
        if not names or not all(reasons.values()):
            try:
                fused |= fuse_graphs(modules[owner], rewrites)
            except Untraceable as error:
                untraceable = str(error)
        for name, unknown in reasons.items():
            uncalled = f"{owner or 'the model'} does not call it"
            if not runs_plainly(modules[name]):
                uncalled = "it has hooks, or a forward of its own"
            report.left[name] = unknown or untraceable or uncalled
    for name in report.left:
        part, compute = _part_of(modules[name])
        if compute is None:
            continue
        # One with an add, too, for the calls that run its owner's original ``forward``.
        try:
            fuse_alone(modules[name], compute)
            fused.setdefault(modules[name], "as a product" if part == "patches" else "alone")
        except Untraceable as error:
            report.left[name] = str(error)
    for name in [name for name, module in modules.items() if module in fused]:
        report.fused[name] = fused[modules[name]]
        report.left.pop(name, None)
    return report


def unfuse(model: nn.Module) -> None:
    """Take back what :func:`fuse` did to `model`, in place."""
    model = eager_module(model)
    transformers.restore_loss(model)
    for module in model.modules():
        attribute = override_of(module)
        if is_fused(module.__dict__.get(attribute)):
            del module.__dict__[attribute]


def _owner(name: str, modules: dict[str, nn.Module]) -> str:
    """The name of the module whose ``forward`` should call the norm `name`."""
    while name:
        name = name.rpartition(".")[0]
        if type(modules[name]).forward is not nn.Module.forward:  # as a ModuleList's is
            break
    return name


def _part_of(module: nn.Module) -> tuple[str | None, Callable[[Any, Any], Any] | None]:
    """The part that `module` itself belongs to, and what computes it alone, if anything does."""
    for name, part in _PARTS.items():
        if part.recognizes(module):
            return name, part.compute
    return ("norms" if isinstance(module, _BatchNorm) else None), None


def _unknown(norm: nn.Module) -> str | None:
    """Why `norm` has no fused form; None if it has one."""
    if isinstance(norm, BatchNormAct2d):
        return "fused in itself"
    if norms.is_batch_norm2d(norm) or _part_of(norm)[1]:
        return None
    return f"{type(norm).__name__} has no fused version"
