"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch

from .results import RESULTS


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a script's docstring as it stands."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=raw)


def options_of(description: str | None, name: str, **flags: str) -> argparse.Namespace:
    """The command line. `flags` are those of this script alone, with their help."""
    parser = parser_of(description)
    parser.set_defaults(host=False)
    add = parser.add_argument
    add("--device", default="cpu", type=torch.device)
    texts = "cases whose name holds one of these"
    add("--only", nargs="+", default=[""], metavar="TEXT", help=texts)
    for flag, meaning in flags.items():
        add(f"--{flag.replace('_', '-')}", action="store_true", help=meaning)
    add("--quick", action="store_true", help="small sizes, 3 repeats, no results")
    add("--repeats", type=int)
    add("--threads", type=int, nargs="+", help="CPU only (1 and all)")
    add("--csv", type=Path, help=f"benchmarks/results/{name}[_host]_<device>.csv")
    options = parser.parse_args()
    kind, of_host = options.device.type, options.host
    if kind == "cuda" or of_host:
        options.threads = [1]
    options.threads = options.threads or sorted({1, os.cpu_count() or 1})
    options.repeats = options.repeats or (3 if options.quick else 9 if kind == "cpu" else 21)
    folder = Path(tempfile.gettempdir()) if options.quick else RESULTS
    options.csv = options.csv or folder / f"{name}{'_host' * of_host}_{kind}.csv"
    return options
