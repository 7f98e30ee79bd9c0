"""Rows of CSV: measurements and their conditions."""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

RESULTS = Path(__file__).parents[1] / "results"
Record = Mapping[str, Any]  # a row by column


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant of one case. Times are of one call.

    Attributes:
        does: see ``cases.Case``.
        threads: of the CPU; 1 if a GPU is measured.
        bytes_per_param: that the variant's passes read and write; NaN if unknown.
        gb_per_s: these bytes of all parameters in the median time, in 1e9 bytes per second.
        share_of_copy: `gb_per_s` over that of the case's row "copy".
        memory_mib: peak of the tensors that a call allocates; 0 if it was not measured.
        isa: instruction set of torch's CPU kernels, or the one asked for.
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


_NOTHING: Mapping[str, Any] = MappingProxyType({})
_CASE = "case", "threads"


def rows_of(
    device: torch.device,
    times: Mapping[str, Sequence[float]],
    *,
    params: int = 0,
    bytes_per_param: Mapping[str, float] = _NOTHING,
    memory_mib: Mapping[str, float] = _NOTHING,
    peers: Mapping[str, str] = _NOTHING,
    **what: Any,
) -> list[Row]:
    """The rows of one case, of milliseconds by variant. `bytes_per_param`, `memory_mib` and `peers`
    are by variant, too; `what` are columns that all rows share."""
    on_cpu = device.type == "cpu"
    isa = os.environ.get("AMPFUSE_CPU_ISA") or torch.backends.cpu.get_cpu_capability().lower()
    what |= {"threads": torch.get_num_threads() if on_cpu else 1, "isa": isa if on_cpu else ""}
    what |= {"device": device.type, "params": params, **conditions(device)}

    def gb_per_s(name: str) -> float:
        moved = params * bytes_per_param.get(name, math.nan)
        return moved / statistics.median(times[name]) / 1e6 if name in times else math.nan

    rows = []
    for name, values in times.items():
        p20, p80 = np.quantile(values, (0.2, 0.8))
        row = Row(
            variant=name,
            median_ms=round(statistics.median(values), 4),
            p20_ms=round(float(p20), 4),
            p80_ms=round(float(p80), 4),
            min_ms=round(min(values), 4),
            n=len(values),
            bytes_per_param=bytes_per_param.get(name, math.nan),
            gb_per_s=float(f"{gb_per_s(name):.4g}"),
            share_of_copy=float(f"{gb_per_s(name) / gb_per_s('copy'):.4g}"),
            memory_mib=round(memory_mib.get(name, 0.0), 1),
            peer=peers.get(name, ""),
            **what,
        )
        rows.append(row)
    return rows


def conditions(device: torch.device) -> dict[str, str]:
    """Hardware, versions and date of a row."""
    import ampfuse
    from ampfuse.hardware import cpu_model

    cpu = f"{' '.join(cpu_model().split())}, {os.cpu_count()} cores"
    return {
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "torch": torch.__version__,
        "ampfuse": ampfuse.__version__,
        "date": datetime.date.today().isoformat(),
    }


def write(path: Path, records: Sequence[Record]) -> None:
    """Writes rows as CSV; a cell that a row lacks is empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, max(records, key=len), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)


def records_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV, if it is there."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def read(path: Path) -> list[Row]:
    """Reads measurements; a cell that the file lacks has its default."""
    convert = {f.name: {"int": int, "float": float, "str": str}[str(f.type)] for f in fields(Row)}

    def row_of(record: Record) -> Row:
        given = {name: text for name, text in record.items() if name in convert}
        filled = {name: text for name, text in given.items() if text or convert[name] is str}
        return Row(**{name: convert[name](text) for name, text in filled.items()})

    return [row_of(record) for record in records_of(path)]


def put(
    path: Path, records: Sequence[Record], columns: Sequence[str], order: Sequence[Any]
) -> None:
    """Replaces the rows with the same cells in `columns`. The order of rows is that of these cells
    in `order`, then those of others."""

    def key(record: Record) -> tuple[str, ...]:
        return tuple(str(record[column]) for column in columns)

    new = {*map(key, records)}
    rank = {one: i for i, one in enumerate(order)}
    both = [*(row for row in records_of(path) if key(row) not in new), *records]
    write(path, sorted(both, key=lambda record: rank.get(key(record), len(rank))))


class Results:
    """Prints the rows of each case, and writes them into the CSV, whose other cases stay."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rows: list[Row] = []
        path = options.csv  # whose cases keep their places
        self._order = [tuple(row[column] for column in _CASE) for row in records_of(path)]

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
        if self.rows:  # now: an interrupted run leaves what it has
            put(self.options.csv, [*map(asdict, self.rows)], _CASE, self._order)

    def finish(self) -> None:
        """Say what was written. Raises SystemExit if no case was wanted."""
        if not self.rows:
            texts = " or ".join(map(repr, self.options.only))
            raise SystemExit(f"no case's name holds {texts}")
        print(f"{len(self.rows)} rows in {self.options.csv}")
