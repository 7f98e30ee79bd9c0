"""The command line: ``ampfuse demo`` and ``ampfuse env``, also as ``python -m ampfuse``."""

from __future__ import annotations

import argparse
import json
import sys

import ampfuse


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: ``sys.argv``) and return the exit status."""
    # Imported here and kept light: --help must not wait for torch, and `env` must run without it.
    from ampfuse.demo import cli as demo

    parser = argparse.ArgumentParser(
        prog="ampfuse", description="Mixed-precision training for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"ampfuse {ampfuse.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)

    demo_parser = commands.add_parser(
        "demo",
        help="train a small network at every level and compare them",
        description=demo.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demo.add_arguments(demo_parser)

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
        return demo.run(demo_parser, args)
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
