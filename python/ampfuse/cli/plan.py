"""Plan whether a training fits into memory, at a level and in each memory mode:

    ampfuse plan --timm vit_base_patch16_224 --batch 64 --budget 16GB
    ampfuse plan --hf meta-llama/Llama-3.1-8B --tokens 4096 --budget 80GB
    ampfuse plan --hf llama --set hidden_size=2048 num_hidden_layers=16 --tokens 2048

--hf takes a folder, a name on the hub (only its config.json is read) or a type of model with its
default sizes. Nothing is computed, no weights are loaded. For models of your own: ampfuse.plan.
"""

from __future__ import annotations

import argparse
import ast
from typing import Any

from ampfuse.command_line import UsageError, at_least, check_installed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--timm", metavar="NAME", help="a model of timm")
    model.add_argument("--hf", metavar="NAME", help="a language model of transformers")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="of the model's configuration"
    )
    parser.add_argument("--batch", type=at_least(1), default=1, help="samples in a batch (1)")
    parser.add_argument("--image", type=at_least(1), default=224, help="side in pixels (224)")
    parser.add_argument("--tokens", type=at_least(1), default=1024, help="of a text (1024)")
    parser.add_argument("--level", default="O5", help="O0 to O5 (O5)")
    parser.add_argument("--optimizer", default="AdamW", help="of ampfuse.optim or torch.optim")
    parser.add_argument("--budget", help='such as "80GB" or "15GiB"; of the GPU here')
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="(cuda)")
    parser.add_argument("--fuse", action="store_true", help="as amp.initialize(fuse=True)")
    parser.add_argument("--compile", action="store_true", help="the model is compiled")
    parser.add_argument(
        "--accumulate", action="store_true", help="several backward passes make a step"
    )


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Print the plan; returns the exit status: 0, or 1 if nothing fits."""
    import ampfuse
    from ampfuse.insight.reporting import one_line

    settings = dict(map(_setting, args.set))
    model, batch = (_of_timm if args.timm else _of_transformers)(args, settings)
    try:
        plan = ampfuse.plan(
            model,
            batch,
            args.optimizer,
            opt_level=args.level,
            budget=args.budget,
            device=args.device,
            fuse=args.fuse,
            compiled=args.compile,
            accumulate=args.accumulate,
        )
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(one_line(error)) from error
    print(plan)
    return 0 if plan.budget is None or any(map(plan.fits, plan.held)) else 1


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set: expected KEY=VALUE, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def _of_timm(args: argparse.Namespace, settings: dict[str, Any]) -> tuple[Any, Any]:
    check_installed("integrations", "timm")
    import timm
    import torch

    if not timm.is_model(args.timm):
        raise UsageError(f"--timm: {args.timm!r} is not a model of timm {timm.__version__}")
    size = (args.batch, 3, args.image, args.image)
    images = torch.empty(size, device="meta", memory_format=torch.channels_last)
    model = timm.create_model
    return lambda: model(args.timm, **settings).to(memory_format=torch.channels_last), images


def _of_transformers(args: argparse.Namespace, settings: dict[str, Any]) -> tuple[Any, Any]:
    check_installed("integrations", "transformers")
    import torch
    import transformers as hf

    from ampfuse.insight.reporting import one_line

    try:
        if args.hf in hf.CONFIG_MAPPING:
            config = hf.AutoConfig.for_model(args.hf, **settings)
        else:
            config = hf.AutoConfig.from_pretrained(args.hf, **settings)
    except Exception as error:  # whatever a configuration checks
        raise UsageError(f"--hf: no configuration of {args.hf!r}: {one_line(error)}") from error
    if type(config) not in hf.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UsageError(f"--hf: {args.hf!r} is not a causal language model; use ampfuse.plan")
    config.use_cache = False
    text = torch.empty(args.batch, args.tokens, dtype=torch.int64, device="meta")
    batch = {"input_ids": text, "labels": text}
    return lambda: hf.AutoModelForCausalLM.from_config(config), batch
