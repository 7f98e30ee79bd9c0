"""The settings of a run, and the runs that a command line asks for.

A script has recipes. A recipe has the published settings, and smaller ones for a CPU. Flags
override both.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ampfuse.command_line import OneLineParser, UsageError, at_least, positive

VARIANTS = {
    "fp32": "FP32, TF32 off",
    "tf32": "FP32 weights, TF32 products",
    "amp-fp16": "torch.amp, FP16 with GradScaler",
    "amp-bf16": "torch.amp, BF16",
    "O0": "ampfuse, FP32",
    "O1": "ampfuse, FP16 autocast",
    "O2": "ampfuse, FP16 + masters",
    "O3": "ampfuse, FP16 alone",
    "O4": "ampfuse, BF16 autocast",
    "O5": "ampfuse, BF16 + masters",
}
LEVELS = tuple(name for name in VARIANTS if name.startswith("O"))
FP16 = ("amp-fp16", "O1", "O2", "O3")
HALF_LEVELS = ("O2", "O3", "O5")  # with half weights
# Precision and loss scale of E1's --mode, and of E4's --fp16.
_MODES = {"FP32": ("fp32", None), "FP16": ("O2", 128.0), "amp": ("O1", None), "fp16": ("O2", 1.0)}
WITHOUT_FOLDER = ("digits", "synthetic")  # values of --data


def switch(text: str) -> bool:
    if text not in ("True", "False"):
        raise argparse.ArgumentTypeError(f"must be True or False, got {text!r}")
    return text == "True"


def scale(text: str) -> float | str:
    return text if text == "dynamic" else positive(text)


_COUNT: dict[str, Any] = {"type": at_least(1), "metavar": "N"}
_ON: dict[str, Any] = {"action": "store_const", "const": True}  # None if not given
_SWITCH: dict[str, Any] = {"nargs": "?", "const": True, "type": switch, "metavar": "True|False"}


def option(default: Any, help: str = "", *names: str, **kind: Any) -> Any:
    """A field with a flag of its name, also called `names`; `kind` are options of argparse."""
    return dataclasses.field(default=default, metadata={"names": names, "help": help, **kind})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """One run: one variant, one batch size, one repeat."""

    experiment: str
    recipe: str | None = None  # None if these settings were not published together
    model: str
    data: str = "synthetic"
    precision: str = "fp32"  # one of VARIANTS
    variant: str = "fp32"  # name in tables: the precision, or a published name, one of _MODES
    repeat: int = 0
    loss_scale: float | str | None = None  # a number, "dynamic", or None: the variant's default
    growth_interval: int = 2000
    augment: bool = False
    shuffle: bool = True
    mean: tuple[float, ...] | None = None  # of pixels scaled to [0, 1]; None: the set's
    std: tuple[float, ...] | None = None  # the same
    synthetic_size: int | None = None
    dropout: float = 0.0
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip: float | None = None  # a norm
    schedule: str = "constant"  # one of training.lr_factor
    warmup: float = 0.0  # a share of the run
    image_size: int = option(32, "pixels each way", **_COUNT)
    keep_batchnorm_fp32: bool | None = option(None, "FP32 batch norms (O2, O3, O5)", **_SWITCH)
    fuse: bool | None = option(None, "batch norms (default: O1, O2, O4, O5 in NHWC)", **_SWITCH)
    batch_size: int = option(128, "per process; one or several", "-b", nargs="+", **_COUNT)
    epochs: int | None = option(None, "passes over the training data", **_COUNT)
    iterations: int | None = option(None, "training steps", "--iteration", **_COUNT)
    repeats: int = option(1, "runs of each variant, with different seeds", **_COUNT)
    seed: int = option(0, "seed of the first repeat (default: 0)", type=int, metavar="N")
    optimizer: str = option("sgd", choices=("sgd", "adam", "adamw"))
    lr: float = option(0.01, type=positive, metavar="X")
    loader: str | None = option(
        None, "on the device, or by workers (default for files)", choices=("resident", "workers")
    )
    workers: int = option(2, "loader processes", "-j", type=at_least(0), metavar="N")
    channels_last: bool = option(True, "NHWC memory format (default: True)", **_SWITCH)
    graph: bool = option(False, "run a step as one CUDA graph", **_ON)
    deterministic: bool = option(False, "same bits in every run", **_ON)
    sync_bn: bool = option(False, "batch norm statistics across GPUs", **_ON)
    fsdp: bool = option(False, "shard the model (FSDP2) instead of copying it (DDP)", **_ON)
    evaluate: bool = option(True, "test after each epoch", **_SWITCH)
    print_freq: int = option(50, "steps between readings of the loss (CPU: 5)", "-p", **_COUNT)


FIELDS = {field.name: field for field in dataclasses.fields(Settings)}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The published settings of one experiment, or a function of (precision, flags). `cpu` makes a
    run of seconds to minutes without a GPU."""

    name: str
    title: str
    models: tuple[str, ...]
    settings: Mapping[str, Any] | Callable[[str, Mapping[str, Any]], Mapping[str, Any]]
    cpu: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Script:
    """One command. `data` is the default of ``--data``, `distributed` allows several processes; the
    first model of the first recipe is the default."""

    name: str
    title: str
    recipes: tuple[Recipe, ...]
    data: str | None = "data"
    distributed: bool = False


# ---- the command line ----------------------------------------------------------------------------


def parse(script: Script, argv: Sequence[str], prog: str) -> argparse.Namespace:
    """Parse `argv`; flags may have "_" for "-", as in the published scripts."""
    text = f"{script.title}\n\nRecipes (published settings; flags override them), and variants:\n"
    text += "".join(f"  {recipe.name:<9} {recipe.title}\n" for recipe in script.recipes)
    text += "".join(f"  {name:<9} {what}\n" for name, what in VARIANTS.items())
    form = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(prog=prog, description=text, formatter_class=form, allow_abbrev=False)
    _add_what(parser.add_argument_group("what to train"), script)
    how = parser.add_argument_group("how to train, the same for every variant")
    length = how.add_mutually_exclusive_group()
    for name, field in FIELDS.items():
        if field.metadata and (script.distributed or name not in ("sync_bn", "fsdp")):
            kind = dict(field.metadata)
            group = length if name in ("epochs", "iterations") else how
            group.add_argument(f"--{name.replace('_', '-')}", *kind.pop("names"), **kind)
    words = [re.sub("^--[^=]*", lambda flag: flag[0].replace("_", "-"), word) for word in argv]
    args = parser.parse_intermixed_args(words)
    if args.opt_level and (args.variant or args.mode not in (None, "amp")):
        parser.error(f"--opt-level {args.opt_level} sets the variant; give no other flag that does")
    return args


def _add_what(group: argparse._ArgumentGroup, script: Script) -> None:
    """Flags that choose the runs, their device and their files."""
    add = group.add_argument
    add_variant = group.add_mutually_exclusive_group().add_argument
    add_scale = group.add_mutually_exclusive_group().add_argument

    recipes = [recipe.name for recipe in script.recipes]
    add("--recipe", choices=recipes, help="published settings (default: those of the model)")
    add("--model", "-a", metavar="NAME", help="one of a recipe, or wrn<depth>_<width>")
    sources = f"a folder, scikit-learn's digits, or noise (default: {script.data or 'none'})"
    add("--data", metavar="PATH|digits|synthetic", help=sources)
    add("data", nargs="?", default=argparse.SUPPRESS, metavar="DATA", help="the same as --data")
    names = (*VARIANTS, "all")
    variants = "one or several, or all (default: FP32 and O2, or O5 on a CPU)"
    add_variant("--variant", nargs="+", choices=names, metavar="NAME", help=variants)
    group.set_defaults(mode=None)
    if script.name == "cifar":
        modes = "E1's: FP32, FP16 (O2 with a static scale of 128), amp (O1, or --opt-level)"
        add_variant("--mode", choices=("FP32", "FP16", "amp"), help=modes)
    if script.name == "imagenet":
        mode = {"action": "store_const", "const": "fp16", "dest": "mode"}
        add_variant("--fp16", **mode, help="E4's name for O2 with a static scale")
    add("--opt-level", choices=LEVELS, metavar="O0..O5", help="the same as --variant O0..O5")
    add_scale("--loss-scale", type=scale, metavar="N|dynamic", help="for variants that scale")
    add_scale("--static-loss-scale", type=positive, metavar="N", help="same as --loss-scale N")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--GPU", metavar="NAME", help="name of the device in results (default: its own)")
    add("--output", "-o", type=Path, default=Path("results"), metavar="DIR", help="for results")
    add("--resume", type=Path, metavar="FILE", help="continue from a checkpoint (.pt)")
    add("--checkpoints", **_ON, help="save one at the end of each epoch")
    add("--prof", type=at_least(0), default=0, metavar="N", help="profile N steps; write a trace")


# ---- the runs ------------------------------------------------------------------------------------


def runs_of(args: argparse.Namespace, script: Script, device: torch.device) -> list[Settings]:
    """The runs that `args` ask for, in order."""
    if args.graph and device.type != "cuda":
        raise UsageError("--graph: a CUDA graph needs a GPU; leave it out on a CPU")
    if not (data := args.data or script.data):
        raise UsageError("--data is required: a folder, digits or synthetic")
    # The given recipe, or that of the model, or the script's first.
    recipes = [recipe for recipe in script.recipes if args.recipe in (None, recipe.name)]
    recipe = next((recipe for recipe in recipes if args.model in recipe.models), recipes[0])
    model = args.model or recipe.models[0]
    flags = {n: v for n, v in vars(args).items() if n in FIELDS and v is not None}
    name = recipe.name if model in recipe.models else None
    flags |= {"data": data, "experiment": script.name, "model": model, "recipe": name}
    if args.prof:
        flags["iterations"] = args.prof
    variants, runs = _variants(args, device), []
    for size in dict.fromkeys(flags.pop("batch_size", [None])):
        if size:
            flags["batch_size"] = size
        each_variant = [_resolved(recipe, flags | variant, device) for variant in variants]
        # Variants take turns, so that other load of the machine affects all of them alike.
        for repeat in range(each_variant[0].repeats):
            runs += [dataclasses.replace(settings, repeat=repeat) for settings in each_variant]
    return runs


def _variants(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Name, precision and loss scale of each, from our flags or the published scripts'."""
    loss_scale = args.loss_scale or args.static_loss_scale
    if args.mode:
        precision, published_scale = _MODES[args.mode]
        variant = {"variant": args.mode, "precision": args.opt_level or precision}
        return [{**variant, "loss_scale": loss_scale or published_scale}]
    names = args.variant or ([args.opt_level] if args.opt_level else ["fp32"])
    # E4's published FP32 command has --static-loss-scale but not --fp16: it trains FP32 alone.
    if not (args.variant or args.opt_level or args.static_loss_scale):
        names.append("O2" if device.type == "cuda" else "O5")
    if "all" in names:
        names = [name for name in VARIANTS if name != "tf32" or has_tf32_and_bf16(device)]
    if "tf32" in names and not has_tf32_and_bf16(device):
        raise UsageError("--variant tf32: TF32 needs a GPU of sm_80 (Ampere) or later")
    names = dict.fromkeys(names)
    return [{"variant": name, "precision": name, "loss_scale": loss_scale} for name in names]


def has_tf32_and_bf16(device: torch.device) -> bool:
    """Whether it is a GPU of sm_80 (Ampere) or later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _resolved(recipe: Recipe, flags: Mapping[str, Any], device: torch.device) -> Settings:
    """The settings of the recipe, changed for a CPU and then by `flags`."""
    published = recipe.settings
    if callable(published):
        published = published(flags["precision"], flags)
    cpu = {"print_freq": 5, **recipe.cpu} if device.type == "cpu" else {}
    settings: dict[str, Any] = {}
    for layer in (published, cpu, flags):
        if layer.keys() & {"epochs", "iterations"}:  # replaces any other length
            settings |= {"epochs": None, "iterations": None}
        settings |= layer
    return Settings(**settings)
