"""How the benchmarks measure: rounds over all variants, a cold cache, medians, rows of CSV.

A benchmark names its variants (ours, the peers, the machine's limit) and hands them to
:func:`measure`, which runs them in turn, round after round, so that whatever else the machine does
meets all of them alike. What comes out are rows with the conditions they were measured under;
``table.py`` and ``plot.py`` read them.
"""

from __future__ import annotations

import csv
import datetime
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

import ampfuse
from ampfuse import _core, env

RESULTS = Path(__file__).with_name("results")


@dataclass(frozen=True)
class Row:
    """One variant of one case, as it stands in the CSV. Times are of one call, in milliseconds."""

    case: str
    variant: str
    threads: int
    median_ms: float
    p20_ms: float
    p80_ms: float
    min_ms: float
    n: int
    hardware: str
    isa: str
    torch: str
    ampfuse: str
    date: str


class Clock:
    """Times a call on a device, from a cold cache."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cold = torch.zeros(_last_level_cache_bytes(device) // 4, device=device)

    def milliseconds(self, call: Callable[[], object]) -> float:
        self._cold.sum()  # what the caches hold now is this, and it is clean
        if self.device.type != "cuda":
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize(self.device)
        return begin.elapsed_time(end)


def measure(
    clock: Clock, variants: dict[str, Callable[[], object]], repeats: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Milliseconds of each call of each variant, `repeats` of each after `warm_up`.

    A variant may have a method `prepare`, which is called before each call and not timed. It may
    return a float: its own measure in milliseconds, in place of how long it took.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    gc.collect()
    gc.disable()
    try:
        for round_ in range(warm_up + repeats):
            for name, call in variants.items():
                getattr(call, "prepare", lambda: None)()
                told: list[object] = []
                taken = clock.milliseconds(lambda call=call, told=told: told.append(call()))
                if round_ >= warm_up:
                    times[name].append(told[0] if isinstance(told[0], float) else taken)
    finally:
        gc.enable()
    return times


def rows_of(case: str, device: torch.device, times: dict[str, list[float]]) -> list[Row]:
    """The rows of one case."""
    rows = []
    for name, values in times.items():
        quintiles = statistics.quantiles(values, n=5, method="inclusive")
        rows.append(
            Row(
                case=case,
                variant=name,
                threads=torch.get_num_threads(),
                median_ms=round(statistics.median(values), 4),
                p20_ms=round(quintiles[0], 4),
                p80_ms=round(quintiles[3], 4),
                min_ms=round(min(values), 4),
                n=len(values),
                hardware=hardware(device),
                isa=_core.C.cpu_isa() if device.type == "cpu" else "",
                torch=torch.__version__,
                ampfuse=ampfuse.__version__,
                date=datetime.date.today().isoformat(),
            )
        )
    return rows


def write(path: Path, rows: Iterable[Row]) -> None:
    """Writes rows as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def read(path: Path) -> list[Row]:
    """Reads rows that :func:`write` wrote."""
    convert = {"int": int, "float": float, "str": str}
    with open(path, newline="") as file:
        return [
            Row(**{f.name: convert[str(f.type)](record[f.name]) for f in fields(Row)})
            for record in csv.DictReader(file)
        ]


def hardware(device: torch.device) -> str:
    """What the device calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{' '.join(env.cpu_model().split())}, {os.cpu_count()} cores"


def _last_level_cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = [64 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20}[text[-1]])
    return min(max(sizes), 512 << 20)
