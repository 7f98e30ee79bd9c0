"""Show where a training script spends its time, and what would help.

    ampfuse doctor train.py --lr 0.1              a script, as `python train.py --lr 0.1` runs it
    ampfuse doctor -m package.train

The script runs unmodified until it has made enough optimizer steps: some to warm up, some that are
timed, as many under torch's profiler. Then it is stopped; `finally` and `atexit` still run.
"""

# The module's docstring is the text of `ampfuse doctor --help`; nothing heavy is imported up here.
from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback

from ampfuse import command_line
from ampfuse.command_line import add_script, at_least, check_script, enter_script, run_script


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--warmup", type=at_least(1), default=5, metavar="N", help="warm-up steps (default: 5)")
    profiled = "steps to time, and as many to profile (default: 10)"
    add("--steps", type=at_least(1), default=10, metavar="N", help=profiled)
    add("--go-on", action="store_true", help="let the script run to its end")
    add_script(parser)


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Run the script and print the report.

    Returns:
        The script's own exit status if it failed; 1 if it ended well but gave too little to see.
    """
    check_script(parser, args)

    from ampfuse.doctor import examine

    process, status, stop = os.getpid(), 0, not args.go_on
    with examine(warmup=args.warmup, steps=args.steps, stop=stop, script=args.script) as report:
        status = _run_script(args)
    if os.getpid() != process:  # the script forked, and this is the child's end
        return status
    sys.stdout.flush()
    if status and report.problem:
        after = f"after {report.seen} optimizer steps (exit status {status})"
        report.problem = f"the script failed {after}"
    if os.environ.get("RANK", "0") == "0":  # of several processes, the first one reports
        if report.problem:
            print(report, file=sys.stderr)
        else:
            print(f"\n{report}")
    return status or int(bool(report.problem))


def _run_script(args: argparse.Namespace) -> int:
    """Run it as python does; its exit status."""
    enter_script(args)
    try:
        run_script(args)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)  # as python does
        return 1
    except Exception as error:
        own = (__file__, command_line.__file__, runpy.__file__, "<frozen runpy>")
        while (trace := error.__traceback__) and trace.tb_frame.f_code.co_filename in own:
            error = error.with_traceback(trace.tb_next)
        traceback.print_exception(error)
        return 1
    return 0
