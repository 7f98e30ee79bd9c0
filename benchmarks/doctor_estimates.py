"""Whether the gains that ``ampfuse doctor`` promises come true.

    python benchmarks/doctor_estimates.py [--only TEXT ...] [--csv FILE]

Each case is a training that lacks something. The doctor watches it and says what that would gain;
then the training is run without and with it, in turns, and the gain is measured. Each run has a
process of its own: what ran before decides how memory is allocated, and so how long it takes.
"""

from __future__ import annotations

import itertools
import multiprocessing
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness.results import RESULTS, conditions, parser_of, put
from torch import Tensor, nn

_ROUNDS, _STEPS, _WARMUP = 5, 10, 5

Step = Callable[[], None]


@dataclass(frozen=True)
class Row:
    """One case. Times are the least of several runs, each a mean of steps; `error` is the promised
    gain over the measured one, less 1."""

    case: str
    advice: str
    basis: str
    step_ms: float
    advised_ms: float
    promised: float
    measured: float
    error: float
    threads: int
    hardware: str
    torch: str
    ampfuse: str
    date: str


class _Files(torch.utils.data.Dataset[Tensor]):
    """Each item takes a wait, as for a file, and some work."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.001)
        return torch.randn(256, generator=torch.Generator().manual_seed(index))


def _endless(workers: int) -> Iterator[Tensor]:
    while True:
        yield from torch.utils.data.DataLoader(_Files(), batch_size=32, num_workers=workers)


def _train(
    model: nn.Module, batches: Iterator[Tensor], level: str | None = None, optimizer: Any = None
) -> Step:
    """A step of a training that makes the output small."""
    from ampfuse import amp

    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    if level:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def step() -> None:
        optimizer.zero_grad()
        loss = F.mse_loss(out := model(next(batches)), torch.zeros_like(out))
        with amp.scale_loss(loss, optimizer) if level else nullcontext(loss) as scaled:
            scaled.backward()
        optimizer.step()

    return step


def _perceptron(width: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)))


def _data(advised: str) -> Step:
    found = re.search(r"num_workers=(\d+)", advised)
    return _train(_perceptron(256), _endless(int(found[1]) if found else 0))


def _half(advised: str) -> Step:
    batches = itertools.repeat(torch.randn(512, 2048))
    return _train(_perceptron(2048), batches, "O5" if advised else None)


def _half_images(advised: str) -> Step:
    blocks = [
        (nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
        for a, b in itertools.pairwise((3, 32, 64, 128))
    ]
    layout: Any = torch.channels_last if "channels_last" in advised else torch.contiguous_format
    model = nn.Sequential(*itertools.chain(*blocks)).to(memory_format=layout)
    images = torch.randn(32, 3, 64, 64).contiguous(memory_format=layout)
    return _train(model, itertools.repeat(images), "O5" if advised else None)


def _optimizer(advised: str) -> Step:
    import ampfuse

    model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 16))
    kind = ampfuse.optim.AdamW if advised else torch.optim.AdamW
    optimizer = kind(model.parameters(), foreach=False)
    return _train(model, itertools.repeat(torch.randn(16, 4096)), optimizer=optimizer)


# case -> how its advice begins, and the training; with the words of that advice, it is followed
CASES: dict[str, tuple[str, Callable[[str], Step]]] = {
    "data": ("load data in the background", _data),
    "perceptron": ("BF16 (O5)", _half),
    "conv net": ("BF16 (O5)", _half_images),  # or with channels_last
    "optimizer": ("fused optimizer", _optimizer),
}


def examine(case: str) -> list[Any]:
    """The doctor's advice on `case` as it is."""
    from ampfuse import doctor

    torch.manual_seed(0)
    step = CASES[case][1]("")
    with doctor.examine(warmup=_WARMUP, steps=2 * _STEPS, stop=True, script=case) as report:
        while True:
            step()
    print(report)
    return report.advice


def step_ms(case: str, advised: str) -> float:
    """Milliseconds of a step of `case`, with the advice of these words, if any."""
    step = CASES[case][1](advised)
    for _ in range(40 if case == "data" else _WARMUP):  # workers are ahead at first
        step()
    begin = time.perf_counter()
    for _ in range(_STEPS):
        step()
    return (time.perf_counter() - begin) / _STEPS * 1e3


def measure(case: str) -> Row | None:
    """The row of `case`; None if the doctor does not give that advice here."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as processes:
        advice = processes.submit(examine, case).result()
        given = next((one for one in advice if one.kind.startswith(CASES[case][0])), None)
        if given is None or (gain := given.gain) is None:
            return None
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(_ROUNDS):
            for how, taken in zip(("", given.remedy), times, strict=True):
                taken.append(processes.submit(step_ms, case, how).result())
    now, advised = map(min, times)  # whatever else the machine does adds to them
    return Row(
        case=case,
        advice=given.kind,
        basis=given.found.partition(" ")[2],
        step_ms=round(now, 3),
        advised_ms=round(advised, 3),
        promised=round(gain, 3),
        measured=round(now / advised, 3),
        error=round(gain * advised / now - 1, 3),
        threads=torch.get_num_threads(),
        **conditions(torch.device("cpu")),
    )


def main() -> None:
    """Measures each case; rows replace those of the same case."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name holds this")
    parser.add_argument("--csv", type=Path, default=RESULTS / "doctor_estimates.csv")
    options = parser.parse_args()
    for case in CASES:
        if not any(text in case for text in options.only):
            continue
        row = measure(case)
        if row is None:
            print(f"--- {case}: the doctor does not advise {CASES[case][0]} here\n")
            continue
        print(f"--- {case}: {row.promised:.2f}x promised, {row.measured:.2f}x ({row.error:+.0%})\n")
        put(options.csv, [row], lambda row: row.case, list(CASES))


if __name__ == "__main__":
    main()
