"""How the benchmarks measure: rounds over all variants, a cold cache, medians, rows of CSV.

A benchmark names its variants (ours, the peers, the machine's bounds) and hands them to
:func:`measure`, which runs them in turn, round after round, so that whatever else the machine does
meets all of them alike. What comes out are rows with the conditions they were measured under;
``table.py`` and ``plot.py`` read them.
"""

from __future__ import annotations

import csv
import datetime
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

import ampfuse
from ampfuse import _core
from ampfuse.hardware import cpu_model
from ampfuse.measuring import instant, milliseconds, wait_for

RESULTS = Path(__file__).with_name("results")

_LONGEST_QUEUEING_MS = 200.0

Variants = Mapping[str, Callable[[], object]]
Times = dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant of one case, as it stands in the CSV. Times are of one call, in milliseconds.

    Attributes:
        does: see ``workloads.Case``.
        threads: of the CPU; 1 where a GPU is measured.
        params: how many parameters the case steps.
        bytes_per_param: what the variant's passes read and write; NaN where that is not known.
        gb_per_s: these bytes of all parameters in the median time, in 1e9 bytes per second.
        share_of_copy: `gb_per_s` over that of the case's row "copy".
        memory_mib: peak of the tensors that a call allocates; 0 where it was not measured.
        isa: what ampfuse's CPU kernels ran on.
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


class Clock:
    """Times a call on a device, from a cold cache.

    Before each call an array as large as the last-level cache (on a GPU four times that) is read,
    so the data caches hold nothing of the call's tensors, and nothing that has to be written back
    while it runs. What stays warm: instructions, branch predictions, address translations.

    A GPU's time is taken on the GPU, between events, with the host ahead of it, as in training: how
    long the host takes to queue the call counts only where the call waits for the GPU
    (``host_time.py`` measures the host).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cold = torch.zeros(_last_level_cache_bytes(device) // 4, device=device)
        self._cycles_per_ms = 0.0  # of a GPU that the host queues work for
        if device.type == "cuda":
            cycles = 50_000_000
            for _ in range(2):  # the first wakes the clocks
                taken = self._milliseconds(lambda: torch.cuda._sleep(cycles), 0)
            self._cycles_per_ms = cycles / taken

    def milliseconds(self, call: Callable[[], object], queueing_ms: float = 0.0) -> float:
        """Of one call.

        Arguments:
            queueing_ms: how long the host takes to queue it; a GPU idles that long first.
        """
        self._cold.sum()
        return self._milliseconds(call, int(queueing_ms * self._cycles_per_ms))

    def _milliseconds(self, call: Callable[[], object], sleep_cycles: int) -> float:
        wait_for(self.device)
        if sleep_cycles:
            torch.cuda._sleep(sleep_cycles)
        begin = instant(self.device)
        call()
        end = instant(self.device)
        wait_for(self.device)
        return milliseconds(begin, end)


def measure(clock: Clock, variants: Variants, repeats: int, warm_up: int = 2) -> Times:
    """Milliseconds of each call of each variant, `repeats` of each after `warm_up`.

    A variant may have a method `prepare`, which is called before each call and not timed. It may
    return a float: its own measure in milliseconds, in place of how long it took.
    """
    times: Times = {name: [] for name in variants}
    queueing = dict.fromkeys(variants, 0.0)
    gc.collect()
    gc.disable()
    try:
        for round_ in range(warm_up + repeats):
            for name, call in variants.items():
                getattr(call, "prepare", lambda: None)()
                told: list[Any] = []  # what the call returned, and how long the host was in it

                def run(call: Callable[[], object] = call, told: list[Any] = told) -> None:
                    start = time.perf_counter()
                    told.append(call())
                    told.append((time.perf_counter() - start) * 1e3)

                taken = clock.milliseconds(run, queueing[name])
                if round_ == warm_up - 1:
                    queueing[name] = min(1.5 * told[1], _LONGEST_QUEUEING_MS)
                if round_ >= warm_up:
                    times[name].append(told[0] if isinstance(told[0], float) else taken)
    finally:
        gc.enable()
    return times


def rows_of(
    device: torch.device,
    times: Mapping[str, Sequence[float]],
    *,
    params: int = 0,
    bytes_per_param: Mapping[str, float] | None = None,
    peers: Mapping[str, str] | None = None,
    **what: Any,
) -> list[Row]:
    """The rows of one case.

    Arguments:
        times: milliseconds by variant.
        params: how many parameters a call steps.
        bytes_per_param, peers: by variant; see :class:`Row`.
        what: further columns, the same in each row.
    """
    medians = {name: statistics.median(values) for name, values in times.items()}
    moved = {name: (bytes_per_param or {}).get(name, math.nan) for name in times}
    speed = {name: params * moved[name] / medians[name] / 1e6 for name in times}
    copy = speed.get("copy", math.nan)
    rows = []
    for name, values in times.items():
        quintiles = statistics.quantiles(values, n=5, method="inclusive")
        rows.append(
            Row(
                variant=name,
                device=device.type,
                threads=torch.get_num_threads() if device.type == "cpu" else 1,
                params=params,
                median_ms=round(medians[name], 4),
                p20_ms=round(quintiles[0], 4),
                p80_ms=round(quintiles[3], 4),
                min_ms=round(min(values), 4),
                n=len(values),
                bytes_per_param=moved[name],
                gb_per_s=float(f"{speed[name]:.4g}"),
                share_of_copy=float(f"{speed[name] / copy:.4g}"),
                hardware=hardware(device),
                isa=_core.C.cpu_isa() if device.type == "cpu" else "",
                torch=torch.__version__,
                ampfuse=ampfuse.__version__,
                peer=(peers or {}).get(name, ""),
                date=datetime.date.today().isoformat(),
                **what,
            )
        )
    return rows


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


def print_rows(rows: Iterable[Row]) -> None:
    """One line a row."""
    for row in rows:
        share = "" if math.isnan(row.share_of_copy) else f"{row.share_of_copy:7.0%} of copy"
        print(
            f"{row.case:28s} {row.threads} threads  {row.variant:26s}"
            f"{row.median_ms:10.3f} ms  ({row.p20_ms:.3f} to {row.p80_ms:.3f}){share}",
            flush=True,
        )


def hardware(device: torch.device) -> str:
    """What the device calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{' '.join(cpu_model().split())}, {os.cpu_count()} cores"


def _last_level_cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return 4 * torch.cuda.get_device_properties(device).L2_cache_size
    sizes = [64 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20}[text[-1]])
    return min(max(sizes), 512 << 20)
