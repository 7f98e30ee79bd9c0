"""Rows of CSV: what was measured, under which conditions, and the command line that asked for it.

``report.py`` makes tables and pictures of them.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant of one case, as it stands in the CSV. Times are of one call, in milliseconds.

    Attributes:
        does: see ``cases.Case``.
        threads: of the CPU; 1 where a GPU is measured.
        params: how many parameters the case steps.
        bytes_per_param: what the variant's passes read and write; NaN where that is not known.
        gb_per_s: these bytes of all parameters in the median time, in 1e9 bytes per second.
        share_of_copy: `gb_per_s` over that of the case's row "copy".
        memory_mib: peak of the tensors that a call allocates; 0 where it was not measured.
        isa: what the CPU kernels ran on.
        peer: package and version, if the variant is neither ours nor torch's.
    """

    case: str
    variant: str
    device: str = "cpu"
    threads: int
    optimizer: str = ""
    dtype: str = ""
    does: str = ""
    params: int = 0
    median_ms: float
    p20_ms: float
    p80_ms: float
    min_ms: float
    n: int
    bytes_per_param: float = math.nan
    gb_per_s: float = math.nan
    share_of_copy: float = math.nan
    memory_mib: float = 0.0
    hardware: str
    isa: str
    torch: str
    ampfuse: str
    peer: str = ""
    date: str


def rows_of(
    device: torch.device,
    times: Mapping[str, Sequence[float]],
    *,
    params: int = 0,
    bytes_per_param: Mapping[str, float] | None = None,
    memory_mib: Mapping[str, float] | None = None,
    peers: Mapping[str, str] | None = None,
    **what: Any,
) -> list[Row]:
    """The rows of one case.

    Arguments:
        times: milliseconds by variant.
        params: how many parameters a call steps.
        bytes_per_param, memory_mib, peers: by variant; see :class:`Row`.
        what: further columns, the same in each row.
    """
    medians = {name: statistics.median(values) for name, values in times.items()}
    moved = {name: (bytes_per_param or {}).get(name, math.nan) for name in times}
    speed = {name: params * moved[name] / medians[name] / 1e6 for name in times}
    copy = speed.get("copy", math.nan)
    on_cpu = device.type == "cpu"
    isa = os.environ.get("AMPFUSE_CPU_ISA") or torch.backends.cpu.get_cpu_capability().lower()
    what |= {"threads": torch.get_num_threads() if on_cpu else 1, "isa": isa if on_cpu else ""}
    what |= {"device": device.type, "params": params, **conditions(device)}
    rows = []
    for name, values in times.items():
        quintiles = statistics.quantiles(values, n=5, method="inclusive")
        rows.append(
            Row(
                variant=name,
                median_ms=round(medians[name], 4),
                p20_ms=round(quintiles[0], 4),
                p80_ms=round(quintiles[3], 4),
                min_ms=round(min(values), 4),
                n=len(values),
                bytes_per_param=moved[name],
                gb_per_s=float(f"{speed[name]:.4g}"),
                share_of_copy=float(f"{speed[name] / copy:.4g}"),
                memory_mib=round((memory_mib or {}).get(name, 0.0), 1),
                peer=(peers or {}).get(name, ""),
                **what,
            )
        )
    return rows


def conditions(device: torch.device) -> dict[str, str]:
    """The columns that say where, with what and when a row was measured."""
    import ampfuse

    return {
        "hardware": hardware(device),
        "torch": torch.__version__,
        "ampfuse": ampfuse.__version__,
        "date": datetime.date.today().isoformat(),
    }


def hardware(device: torch.device) -> str:
    """What the device calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    from ampfuse.hardware import cpu_model

    return f"{' '.join(cpu_model().split())}, {os.cpu_count()} cores"


def write(path: Path, rows: Sequence[Any]) -> None:
    """Writes rows (dataclasses of one kind) as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(rows[0])], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def read(path: Path, kind: type[Any] = Row) -> list[Any]:
    """Reads rows that :func:`write` wrote; a column that the file lacks has its default."""
    convert: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
    with open(path, newline="") as file:
        return [
            kind(
                **{
                    f.name: convert[str(f.type)](record[f.name])
                    for f in fields(kind)
                    if f.name in record
                }
            )
            for record in csv.DictReader(file)
        ]


def put(path: Path, rows: Sequence[Any], key: Callable[[Any], Any], order: Sequence[Any]) -> None:
    """Writes `rows` in the place of those with the same key; the file's others stay.

    Arguments:
        order: the keys in the order in which rows are to stand; keys that are not in it come last.
    """
    new = {key(row) for row in rows}
    others = read(path, type(rows[0])) if path.exists() else []
    rank = {one: i for i, one in enumerate(order)}
    both = [*(row for row in others if key(row) not in new), *rows]
    write(path, sorted(both, key=lambda row: rank.get(key(row), len(rank))))


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a script's docstring as it stands."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=raw)


def options_of(
    description: str | None, name: str, **flags: str | dict[str, Any]
) -> argparse.Namespace:
    """The command line: `device`, `threads`, `repeats`, `quick`, `csv` and which cases.

    Arguments:
        flags: of this script alone, with their help or their arguments to ``add_argument``.
    """
    parser = parser_of(description)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="cases whose name holds one of these",
    )
    for flag, given in flags.items():
        more = {"action": "store_true", "help": given} if isinstance(given, str) else given
        parser.add_argument(f"--{flag.replace('_', '-')}", **more)
    parser.add_argument("--quick", action="store_true", help="small sizes, 3 repeats, no results")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--threads", type=int, nargs="+", help="CPU only (1 and all)")
    parser.add_argument("--csv", type=Path, help=f"benchmarks/results/{name}_<device>.csv")
    options = parser.parse_args()
    options.device = torch.device(options.device)
    kind = options.device.type
    if kind == "cuda":
        options.threads = [1]
    options.threads = options.threads or sorted({1, os.cpu_count() or 1})
    options.repeats = options.repeats or (3 if options.quick else 9 if kind == "cpu" else 21)
    folder = Path(tempfile.gettempdir()) if options.quick else RESULTS
    options.csv = options.csv or folder / f"{name}_{kind}.csv"
    return options


class Results:
    """The rows of the cases that `options` want: printed, and in the CSV, as each is measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rows: list[Row] = []

    def want(self, name: str) -> bool:
        """Whether `--only` names the case `name`."""
        return any(text in name for text in self.options.only)

    def add(self, rows: list[Row]) -> None:
        for row in rows:
            share = "" if math.isnan(row.share_of_copy) else f"{row.share_of_copy:7.0%} of copy"
            print(
                f"{row.case:28s} {row.threads} threads  {row.variant:26s}"
                f"{row.median_ms:10.3f} ms  ({row.p20_ms:.3f} to {row.p80_ms:.3f}){share}",
                flush=True,
            )
        self.rows += rows
        write(self.options.csv, self.rows)  # now: an interrupted run leaves what it has

    def finish(self) -> None:
        """Say what was written. Raises SystemExit if no case was wanted."""
        if not self.rows:
            texts = " or ".join(map(repr, self.options.only))
            raise SystemExit(f"no case's name holds {texts}")
        print(f"{len(self.rows)} rows in {self.options.csv}")
