"""Run a script that imports apex on ampfuse: ``python -m ampfuse.compat.apex train.py ARGS...``."""

from __future__ import annotations

import argparse
import sys

from ampfuse.command_line import add_script, check_script, enter_script, run_script
from ampfuse.compat.apex.install import ON_PATH, install, installed_apex


def main(argv: list[str] | None = None) -> None:
    """Run the script that `argv` (default: ``sys.argv[1:]``) names, as ``python`` would."""
    parser = argparse.ArgumentParser(
        prog="python -m ampfuse.compat.apex",
        description="Run an unmodified script that imports apex on ampfuse.",
    )
    add_script(parser)
    options = parser.parse_args(argv)
    check_script(parser, options)

    enter_script(options)  # before looking for another apex: one may lie next to the script
    other = installed_apex()
    install()
    # For processes that the script spawns. Another apex may lie in sys.path[0], its own folder.
    sys.path.insert(1 if other is None else 0, str(ON_PATH))
    run_script(options)


if __name__ == "__main__":
    main()
