"""The command line: ``ampfuse demo``, ``train``, ``doctor``, ``advise`` and others."""

from __future__ import annotations

import argparse
import importlib
import json
import sys

import ampfuse


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: ``sys.argv``) and return the exit status."""
    # Imported here and kept light: --help must not wait for torch, and `env` must run without it.
    from ampfuse import advise, doctor, memory
    from ampfuse.command_line import OneLineParser, status_of
    from ampfuse.experiments import SCRIPTS, make_plot, make_table

    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["train"] and argv[1:2] and argv[1] in SCRIPTS:
        script = importlib.import_module(f"ampfuse.experiments.{argv[1]}")
        return script.main(argv[2:], prog=f"ampfuse train {argv[1]}")

    parser = OneLineParser(prog="ampfuse", description="Mixed-precision training for PyTorch.")
    parser.add_argument("--version", action="version", version=f"ampfuse {ampfuse.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)

    actions = {
        "doctor": doctor,
        "advise": advise,
        "memory": memory,
        "make_plot": make_plot,
        "make_table": make_table,
    }
    if argv[:1] == ["demo"]:
        actions["demo"] = importlib.import_module("ampfuse.experiments.demo")
    else:
        commands.add_parser("demo", help="train a small network at every level and compare them")
    helps = {
        "demo": "train a small network at every level and compare them",
        "doctor": "say where the time of a training script goes, and what would pay",
        "advise": "find the level to train a model at, by trying them",
        "memory": "say what a training holds in memory, in each mode, and what fits",
        "make_plot": "draw the results of the experiments",
        "make_table": "print the results of an experiment next to the published ones",
    }
    parsers = {}
    for name, module in actions.items():
        parsers[name] = commands.add_parser(
            name,
            help=helps[name],
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(parsers[name])

    # Listed here; its options are the trainers' own, which read them themselves.
    train_parser = commands.add_parser(
        "train",
        help="run an experiment: cifar, imagenet, mnist or mlp",
        description="Train at one or several levels and compare them: ampfuse train cifar --help",
    )
    train_parser.add_argument("trainer", choices=SCRIPTS)

    env_parser = commands.add_parser(
        "env",
        help="print what a bug report needs",
        description="Versions, what was built, and whether it fits this machine.",
    )
    env_parser.add_argument("--json", action="store_true", help="as JSON")

    args = parser.parse_args(argv)
    try:
        if args.command == "env":
            return _env(as_json=args.json)
        return status_of(actions[args.command], parsers[args.command], args)
    except KeyboardInterrupt:
        print("\nInterrupted; nothing was written.", file=sys.stderr)
        return 130  # what a shell reports for a process that Ctrl-C ended


def _env(*, as_json: bool) -> int:
    from ampfuse import env

    facts = env.report()
    print(json.dumps(facts, indent=2, default=str) if as_json else env.as_text(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
