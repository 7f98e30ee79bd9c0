"""Train at one or several levels and compare them: published mixed-precision benchmarks, run again.

  ampfuse train cifar ...       VGG16, Wide-ResNet, SE-ResNeXt50, DenseNet161 (E1-E3)
  ampfuse train imagenet ...    ResNet-18 and 50 (E4), also under torchrun
  ampfuse train mnist ...       a small CNN (E5)
  ampfuse train mlp ...         a three-layer MLP (E5)

``python -m ampfuse.experiments.cifar`` is the same as ``ampfuse train cifar``, and so on.
"""

# The module's docstring is the text of `ampfuse train --help`. Nothing heavy is imported up here.
from __future__ import annotations

import argparse
import importlib

SCRIPTS = ("cifar", "imagenet", "mnist", "mlp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", choices=SCRIPTS, help="the experiment")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the script")


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Have the script read its options and train; returns the exit status."""
    script = importlib.import_module(f"ampfuse.experiments.{args.script}")
    return script.main(args.options, prog=f"{parser.prog} {args.script}")
