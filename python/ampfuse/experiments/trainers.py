"""The trainers by name, for ``ampfuse train NAME`` and ``python -m ampfuse.experiments.NAME``."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Sequence

from ampfuse.experiments.cli import parse, parser_for
from ampfuse.experiments.recipes import RECIPES, Recipe

# What the trainers import, and the packages it comes in. Plots and tables need more, digits too.
_NEEDED = {"torchvision": "torchvision", "timm": "timm", "rich": "rich", "tqdm": "tqdm"}


@dataclasses.dataclass(frozen=True)
class Trainer:
    """One command: its name, what it trains, and what differs from its siblings.

    Attributes:
        model_names: those that ``--model`` takes; a pattern may stand for several.
        image_size: default of ``--image-size``.
        closing_lines: end with the two lines that E5's scripts printed.
    """

    name: str
    title: str
    model_names: str
    default_model: str
    image_size: int
    default_data: str | None
    closing_lines: bool = False

    @property
    def recipes(self) -> list[Recipe]:
        return [recipe for recipe in RECIPES if recipe.experiment == self.name]


_CIFAR_MODELS = "vgg16, wrn28_10, wrn<depth>_<width>, seresnext50_32x4d, densenet161"
_IMAGENET_MODELS = "resnet18, resnet34, resnet50"
_MLP = "A perceptron of three layers, 4096 wide."
TRAINERS = {
    trainer.name: trainer
    for trainer in (
        Trainer("cifar", "Image classification on CIFAR-10.", _CIFAR_MODELS, "vgg16", 32, "data"),
        Trainer("imagenet", "ResNets on ImageNet.", _IMAGENET_MODELS, "resnet18", 224, None),
        Trainer("mnist", "A small CNN on MNIST.", "mnist_cnn", "mnist_cnn", 28, "data", True),
        Trainer("mlp", _MLP, "mlp", "mlp", 64, "synthetic", True),
    )
}


def missing_packages(data: str | None) -> list[str]:
    """What training on `data` needs of the extra ``experiments`` and is not installed."""
    needed = {**_NEEDED, **({"sklearn": "scikit-learn"} if data == "digits" else {})}
    return [package for name, package in needed.items() if importlib.util.find_spec(name) is None]


def main(name: str, argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the trainer called `name` on `argv` (default: ``sys.argv``); return the exit status.

    Wrong use ends in ``SystemExit(2)`` or status 2, with one line that says what.
    """
    trainer = TRAINERS[name]
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = parser_for(trainer, prog or f"python -m ampfuse.experiments.{name}")
    args = parse(parser, argv)
    if missing := missing_packages(args.data or args.data_folder):
        print(
            f"{parser.prog}: {', '.join(missing)} missing: pip install 'ampfuse[experiments]'",
            file=sys.stderr,
        )
        return 1
    from ampfuse.experiments.runner import run_command

    return run_command(trainer, args, argv)
