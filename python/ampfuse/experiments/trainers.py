"""The trainers by name, for ``ampfuse train NAME`` and ``python -m ampfuse.experiments.NAME``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ampfuse.experiments.cli import Trainer, missing_packages, parse, parser_for

TRAINERS = {
    trainer.name: trainer
    for trainer in (
        Trainer(
            name="cifar",
            title="Image classification on CIFAR-10.",
            models=("vgg16", "wrn28_10", "wrn<depth>_<width>", "seresnext50_32x4d", "densenet161"),
            default_model="vgg16",
            image_size=32,
            default_data="data",
        ),
        Trainer(
            name="imagenet",
            title="ResNets on ImageNet.",
            models=("resnet18", "resnet34", "resnet50"),
            default_model="resnet18",
            image_size=224,
            default_data=None,
        ),
        Trainer(
            name="mnist",
            title="A small CNN on MNIST.",
            models=("mnist_cnn",),
            default_model="mnist_cnn",
            image_size=28,
            default_data="data",
            closing_lines=True,
        ),
        Trainer(
            name="mlp",
            title="A perceptron of three layers, 4096 wide.",
            models=("mlp",),
            default_model="mlp",
            image_size=64,
            default_data="synthetic",
            closing_lines=True,
        ),
    )
}


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
    from ampfuse.experiments.tasks import TASKS

    return run_command(trainer, TASKS[name], args, argv)
