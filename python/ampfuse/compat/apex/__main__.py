"""Run a script that imports apex on ampfuse: ``python -m ampfuse.compat.apex train.py ARGS...``."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from ampfuse.compat.apex.installing import ON_PATH, install, installed_apex


def main(argv: list[str] | None = None) -> None:
    """Run the script that `argv` (default: ``sys.argv[1:]``) names, as ``python`` would."""
    parser = argparse.ArgumentParser(
        prog="python -m ampfuse.compat.apex",
        description="Run an unmodified script that imports apex on ampfuse.",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module name")
    parser.add_argument("script", metavar="SCRIPT", help="the script, as given to python")
    parser.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(argv)
    if not options.module and not os.path.exists(options.script):
        parser.error(f"no such file: {options.script}")

    # Set as python sets them, before looking for another apex: one may lie next to the script.
    folder = os.path.dirname(os.path.abspath(options.script))
    sys.path[0] = os.getcwd() if options.module else folder
    sys.argv = [options.script, *options.args]
    other = installed_apex()
    install()
    # For processes that the script spawns. Another apex may lie in sys.path[0], its own folder.
    sys.path.insert(1 if other is None else 0, str(ON_PATH))
    if options.module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(options.script, run_name="__main__")


if __name__ == "__main__":
    main()
