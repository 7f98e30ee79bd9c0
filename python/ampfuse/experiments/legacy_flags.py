"""The command lines of the published scripts, in today's flags.

Spellings are changed word by word before the line is parsed (:func:`spelled_today`); flags that
named precision in other words are parsed as they stand and then translated (:func:`translate`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ampfuse.command_line import positive
from ampfuse.experiments.config import LEVELS, UsageError

# Besides those with "_" for "-".
_SPELLINGS = {
    "--data-path": "--data",
    "--data-dir": "--data",
    "--arch": "--model",
    "--arms": "--arm",
    "--amp-level": "--opt-level",
    "--iteration": "--iterations",
    "--opt": "--optimizer",
    "--learning-rate": "--lr",
    "--wd": "--weight-decay",
    "--clip-grad": "--clip",
    "--sched": "--schedule",
    "--gpu-name": "--GPU",
    "--output-dir": "--output",
}
# Switches that took a value, which may stand apart.
_SWITCHES = ("--channels-last", "--cudnn-benchmark", "--keep-batchnorm-fp32")
_SWITCHED = {"True": True, "true": True, "1": True, "False": False, "false": False, "0": False}
_E1_STATIC_SCALE = 128.0  # of its FP16 mode
_MODES = {"FP32": "fp32", "FP16": "O2", "amp": "O1"}


def spelled_today(argv: Sequence[str]) -> list[str]:
    """`argv` in today's names, and ``--no-channels-last`` for ``--channels_last False``."""
    words, todays = list(argv), []
    while words:
        flag, equals, value = words.pop(0).partition("=")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        flag = _SPELLINGS.get(flag, flag)
        if flag in _SWITCHES:
            if not equals and words and words[0] in (*_SWITCHED, "None"):
                value = words.pop(0)
            if value == "None" and flag == "--keep-batchnorm-fp32":
                continue  # an old script's default, passed on
            if value in (*_SWITCHED, "None", ""):
                is_on = not value or _SWITCHED.get(value, False)
                todays.append(flag if is_on else flag.replace("--", "--no-", 1))
                continue
        todays.append(flag + equals + value)
    return todays


def add_arguments(parser: argparse.ArgumentParser) -> None:
    old = parser.add_argument_group("flags of the published scripts")
    old.add_argument("data_folder", nargs="?", metavar="DATA", help="the same as --data")
    old.add_argument("--opt-level", metavar="O0..O5", help="the same as --arm O1")
    modes = "E1's names: FP32; FP16 (O2 with a static scale of 128); amp (O1, or --opt-level)"
    old.add_argument("--mode", choices=tuple(_MODES), help=modes)
    old.add_argument("--fp16", action="store_true", help="E4's name for O2 with a static scale")
    old.add_argument("--static-loss-scale", type=positive, metavar="N", help="as --loss-scale N")
    old.add_argument("--dynamic-loss-scale", action="store_true", help="as --loss-scale dynamic")
    old.add_argument("--local-rank", type=int, help="ignored: torchrun tells it")
    parser.set_defaults(method=None)


def translate(args: argparse.Namespace) -> None:
    """Write what the old flags in `args` mean to `data`, `arm`, `method` and `loss_scale`."""
    if args.data and args.data_folder:
        raise UsageError(f"--data {args.data} and {args.data_folder}: give one data folder")
    args.data = args.data or args.data_folder
    scales = {
        "--loss-scale": args.loss_scale,
        "--static-loss-scale": args.static_loss_scale,
        "--dynamic-loss-scale": "dynamic" if args.dynamic_loss_scale else None,
    }
    given = {flag: scale for flag, scale in scales.items() if scale is not None}
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)}: give one of them")
    (args.loss_scale,) = given.values() or (None,)
    if args.loss_scale == "None":
        args.loss_scale = None
    ways = {"--arm": args.arm, "--mode": args.mode, "--fp16": args.fp16}
    ways["--opt-level"] = args.opt_level and not args.mode
    if len(named := [flag for flag, value in ways.items() if value]) > 1:
        raise UsageError(f"{' and '.join(named)}: these name an arm each; give one of them")
    if args.opt_level and args.opt_level not in LEVELS:
        raise UsageError(f"--opt-level {args.opt_level}: the levels are {', '.join(LEVELS)}")
    if args.opt_level and args.mode == "FP16":
        raise UsageError("--opt-level goes with --mode amp, not with --mode FP16")
    if args.mode:
        args.method = args.mode
        args.arm = [args.opt_level if args.mode == "amp" and args.opt_level else _MODES[args.mode]]
    elif args.fp16:
        args.arm, args.method = ["O2"], "fp16"
    elif args.opt_level:
        args.arm = [args.opt_level]
    elif args.static_loss_scale and not args.arm:
        args.arm = ["fp32"]  # E4's FP32 line: a scale, but no --fp16
    if args.loss_scale is None and args.method in ("FP16", "fp16"):
        args.loss_scale = _E1_STATIC_SCALE if args.mode else 1.0
