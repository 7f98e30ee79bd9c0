"""Result files and published figures, read as rows of one type.

:func:`measured` reads the result files below a folder, :func:`published` the figures of a write-up,
:func:`select` chooses among rows, :func:`frame` makes a pandas DataFrame of them. Every row says
which of the two it is (``source``); nothing here mixes them.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampfuse.experiments.config import FORMAT, UsageError

if TYPE_CHECKING:
    import pandas

PUBLISHED_FILES = {
    "e1": "vgg16_cifar10_2018.csv",
    "e2": "wrn28_10_cifar10_2019.csv",
    "e3": "cifar10_gtx1070_2019.csv",
    "e4": "imagenet_resnet_2018.csv",
    "e5": "native_amp_t4_2022.csv",
}
# The order of lines and rows: full precision first. E1's names stand beside their arms.
METHODS = ("FP32", "fp32", "tf32", "FP16", "fp16", "amp", "amp-fp16", "amp-bf16")
METHODS += ("O0", "O1", "O2", "O3", "O4", "O5")


class ResultsError(UsageError):
    """There are no results of the kind asked for, or they cannot be shown together."""


@dataclasses.dataclass(frozen=True)
class Stat:
    """`n` repeats of a figure: mean and sample standard deviation (None if nobody knows it)."""

    mean: float
    std: float | None = None
    n: int = 1

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Stat | None:
        """Of `values` without the Nones; None if nothing is left."""
        there = [value for value in values if value is not None]
        if not there:
            return None
        std = statistics.stdev(there) if len(there) > 1 else None
        return cls(statistics.fmean(there), std, len(there))


@dataclasses.dataclass(frozen=True)
class Run:
    """One result file.

    Attributes:
        data: its contents.
        conditions: all that two runs must share to be repeats of each other, except `experiment`,
            `model`, `gpu`, `method`, `batch_size`, `iterations` and `epochs`, which a :class:`Row`
            has as attributes. Plain values by name.
    """

    path: Path
    data: Mapping[str, Any]
    conditions: Mapping[str, Any]

    @property
    def device(self) -> str:
        return self.data["device"]["name"]

    @property
    def diverged(self) -> Mapping[str, Any] | None:
        return self.data["diverged"]

    @property
    def time_s(self) -> float | None:
        """Training time of all iterations, also where the first ones could not be timed."""
        timed, seconds = self.data["timed_iterations"], self.data["train_time_s"]
        if self.diverged or not timed or seconds is None:
            return None
        return seconds * (self.data["iterations"] / timed)

    @property
    def accuracy_pct(self) -> float | None:
        test = self.data["test"]
        if self.diverged or not test or test["accuracy"] is None:
            return None
        return 100 * test["accuracy"]

    def of_part(self, part: str, name: str) -> float | None:
        """``data[part][name]`` of a run that came to its end, e.g. the mean of "images_per_s"."""
        return None if self.diverged or not self.data[part] else self.data[part][name]

    def log(self, kind: str) -> list[dict[str, Any]]:
        """The lines of that `kind` ("interval" or "evaluation") in the run's .jsonl, by step.

        Empty if there is no log. A line that was cut off, the last of a killed run, is left out.
        """
        path = self.path.with_suffix(".jsonl")
        by_step = {}
        for text in path.read_text("utf-8", "replace").splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                line = json.loads(text)
                if line["kind"] == kind:
                    by_step[line["step"]] = line
        return [by_step[step] for step in sorted(by_step)]


@dataclasses.dataclass(frozen=True)
class Row:
    """One configuration: a published line, or all repeats of a measured one.

    A figure is None where nobody noted it. Runs that diverged count for the memory alone; a row of
    nothing else has no length.

    Attributes:
        source: "published" or "measured".
        recipe: "e1" to "e5", or None.
        platform: where it was published to have run ("colab", "pytorch-0.4.1").
        time_s: training time of `iterations`, in seconds.
        memory_mb: in units of 10^6 bytes.
        images_per_s: mean of the runs' means; ``images_per_s_min`` and ``_max``: of all steps.
        n: how many runs; None where a write-up does not say.
        conditions: see :class:`Run`; empty if published.
        note: why it has no figures, in words.
    """

    source: str
    recipe: str | None
    experiment: str
    model: str
    gpu: str
    method: str
    batch_size: int | None = None
    iterations: int | None = None
    epochs: float | None = None
    optimizer: str = ""
    platform: str = ""
    time_s: Stat | None = None
    memory_mb: Stat | None = None
    accuracy_pct: Stat | None = None
    images_per_s: Stat | None = None
    images_per_s_min: float | None = None
    images_per_s_max: float | None = None
    loss_last: Stat | None = None
    loss_mean: Stat | None = None
    n: int | None = None
    note: str = ""
    conditions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    runs: tuple[Run, ...] = dataclasses.field(default=(), repr=False)

    @property
    def arm(self) -> str:
        """The arm; of a published row the method, which is all one knows."""
        return self.conditions.get("arm", self.method)

    @property
    def diverged(self) -> bool:
        """All of it; a row of which some runs diverged has figures of the others."""
        return bool(self.runs) and all(run.diverged for run in self.runs)

    @property
    def device(self) -> str:
        """The device's own name, whatever label the run was given."""
        return self.runs[0].device if self.runs else self.gpu

    def record(self) -> dict[str, Any]:
        """The row as one flat dictionary: what a CSV or a DataFrame holds."""
        flat: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in _STATS:
                flat[f"{field.name}_mean"] = value and value.mean
                flat[f"{field.name}_std"] = value and value.std
            elif field.name not in ("conditions", "runs"):
                flat[field.name] = value
        if self.runs:
            last = max(self.runs, key=lambda run: run.data["finished"])
            flat["device"] = self.device
            flat.update(self.conditions)
            flat["memory_kind"] = last.data["memory_kind"]
            flat["diverged"] = sum(run.diverged is not None for run in self.runs)
            for name in ("cpu", "cuda", "python", "git"):
                flat[name] = last.data["environment"].get(name)
            flat["date"] = last.data["finished"]
        return flat


_STATS = {field.name for field in dataclasses.fields(Row) if str(field.type).startswith("Stat")}


def frame(rows: Iterable[Row]) -> pandas.DataFrame:
    """`rows` as a DataFrame with the columns of :meth:`Row.record`."""
    import pandas

    return pandas.DataFrame([row.record() for row in rows])


def measured(
    folder: str | Path = "results", skipped: Callable[[str], object] = warnings.warn
) -> list[Row]:
    """The rows of all result files below `folder`, repeats taken together.

    Repeats have everything but seed and number in common. Of runs that have those in common too,
    the one that finished last counts: a command given twice is no second sample.

    Args:
        skipped: called with a line of text for every file that cannot be read.

    Raises:
        ResultsError: `folder` is not there.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ResultsError(f"{folder}: no such folder; train something first, or give --results")
    runs = []
    for path in sorted(folder.rglob("*.json")):
        if path.name.endswith(".trace.json") or path.name.startswith("."):
            continue  # a profiler's trace; a file that is being written
        try:
            runs.append(_read_run(path))
        except (OSError, ValueError, KeyError, TypeError) as error:
            skipped(f"{path}: skipped, no result file of format {FORMAT} ({_reason(error)})")
    return sorted(map(_row_of, _repeats(runs)), key=_order)


def published(recipe: str) -> list[Row]:
    """The figures of write-up `recipe` ("e1" to "e5"), as they were published."""
    file = resources.files("ampfuse.experiments") / "published" / PUBLISHED_FILES[recipe]
    with file.open(newline="") as lines:
        return [_published_row(recipe, line) for line in csv.DictReader(lines)]


def select(
    rows: Sequence[Row],
    *,
    experiments: Sequence[str] = (),
    models: Sequence[str] = (),
    gpus: Sequence[str] = (),
    methods: Sequence[str] = (),
    batch_sizes: Sequence[int] = (),
    iterations: int | None = None,
    epochs: float | None = None,
) -> list[Row]:
    """The `rows` that fit; what is left empty does not restrict. Order: as given, then as it was.

    A name in `methods` is a method ("FP16") or, where no row has that method, an arm ("O2").

    Raises:
        ResultsError: a value fits no row, or no row fits all of them. The message says what is
            there.
    """
    if not rows:
        raise ResultsError("there are no results yet; train something first, or give --results")
    wishes = (
        ("--experiment", experiments, lambda row: row.experiment),
        ("--model", models, lambda row: row.model),
        ("--GPU", gpus, lambda row: row.gpu),
        ("--method", methods, None),
        ("--batch", batch_sizes, lambda row: row.batch_size),
    )
    chosen = list(rows)
    for option, wanted, of in wishes:
        if not wanted:
            continue
        of = of or _method_named(chosen, wanted)
        there = list(dict.fromkeys(map(of, chosen)))
        if missing := [value for value in wanted if value not in there]:
            raise ResultsError(
                f"{option} {_listed(missing)}: no such results; there are {_listed(there)}"
            )
        chosen = [row for row in chosen if of(row) in wanted]
    for option, length, name in (
        ("--iteration", iterations, "iterations"),
        ("--epochs", epochs, "epochs"),
    ):
        if length is None:
            continue
        there = sorted({getattr(row, name) for row in chosen} - {None})
        if length not in there:
            raise ResultsError(
                f"{option} {_listed([length])}: no such results; there are {_listed(there)}"
            )
        long_enough = [row for row in chosen if getattr(row, name) == length]
        subjects = {(row.experiment, row.model) for row in long_enough}
        diverged = [  # they never got that far, and are shown beside those that did
            row for row in chosen if row.diverged and (row.experiment, row.model) in subjects
        ]
        chosen = [row for row in chosen if row in long_enough or row in diverged]
    # A sort keeps the order among equals, so the last one here is the first to count.
    if methods:
        name = _method_named(chosen, methods)
        chosen.sort(key=lambda row: methods.index(name(row)))
    if gpus:
        chosen.sort(key=lambda row: gpus.index(row.gpu))
    return chosen


def _method_named(rows: Sequence[Row], wanted: Sequence[str]) -> Callable[[Row], str]:
    """What of a row a name in `wanted` stands for: its method or, failing that, its arm."""
    methods = {row.method for row in rows}
    arms = {name for name in wanted if name not in methods}
    return lambda row: row.arm if row.method not in wanted and row.arm in arms else row.method


def _listed(values: Iterable[object]) -> str:
    shown = (f"{value:g}" if isinstance(value, float) else str(value) for value in values)
    return ", ".join(shown)


# ---- result files --------------------------------------------------------------------------------

_NUMBER = (int, float)
_NEEDED: dict[str, type | tuple[type, ...]] = {
    "experiment": str,
    "model": str,
    "data": dict,
    "gpu": str,
    "device": dict,
    "arm": str,
    "method": str,
    "loop": str,
    "batch_size": int,
    "world_size": int,
    "iterations": int,
    "epochs": _NUMBER,
    "timed_iterations": int,
    "repeat": int,
    "seed": int,
    "switches": dict,
    "optimizer": dict,
    "train_time_s": (int, float, type(None)),
    "memory_bytes": (int, type(None)),
    "memory_kind": (str, type(None)),
    "images_per_s": (dict, type(None)),
    "train_loss": (dict, type(None)),
    "test": (dict, type(None)),
    "diverged": (dict, type(None)),
    "environment": dict,
    "finished": str,
}


def _read_run(path: Path) -> Run:
    with open(path, encoding="utf-8") as file:
        data = json.load(file, parse_constant=_no_constant)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f'"format" is not {FORMAT}')
    for name, kind in _NEEDED.items():
        if not isinstance(data[name], kind):
            raise ValueError(f'"{name}" is {json.dumps(data[name])[:40]}')
    run = Run(path, data, _conditions(data))
    _row_of([run]).record()  # whatever else is missing shows now, while the file can be named
    return run


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"no {error.args[0]!r}"
    return str(error).splitlines()[0]


# Said of the data, but no setting: what `data` and the batch come to.
_NOT_CHOSEN = ("source", "device_bytes")


def _conditions(data: Mapping[str, Any]) -> dict[str, Any]:
    source = data["data"].get("source")
    conditions = {
        "arm": data["arm"],
        "recipe": data.get("recipe"),
        # Of a folder one wants to know what it holds, not where it lies.
        "data": source if source in ("digits", "synthetic") else data["data"].get("kind"),
        **{name: data["data"][name] for name in sorted(data["data"]) if name not in _NOT_CHOSEN},
        "loop": data["loop"],
        "world_size": data["world_size"],
        **data["switches"],
        "optimizer": data["optimizer"].get("name"),
        **{name: data["optimizer"][name] for name in data["optimizer"] if name != "name"},
        **(data.get("policy") or {}),
        "device": data["device"]["name"],
        "torch": data["environment"].get("torch"),
        "ampfuse": data["environment"].get("ampfuse"),
    }
    return {
        name: json.dumps(value) if isinstance(value, (dict, list)) else value
        for name, value in conditions.items()
    }


def _repeats(runs: Sequence[Run]) -> list[list[Run]]:
    """`runs` grouped to repeats of each other, the latest of those that are the same run."""
    lengths: dict[object, set[tuple[int, float]]] = {}
    for run in runs:
        if not run.diverged:
            length = (run.data["iterations"], run.data["epochs"])
            lengths.setdefault(_configuration(run), set()).add(length)
    groups: dict[object, dict[object, Run]] = {}
    for run in sorted(runs, key=lambda run: run.data["finished"]):
        configuration = _configuration(run)
        length: object = (run.data["iterations"], run.data["epochs"])
        if run.diverged:
            # It was to be as long as its siblings, if they agree. It does not say.
            siblings = lengths.get(configuration, set())
            length = next(iter(siblings)) if len(siblings) == 1 else None
        same_run = (run.data["repeat"], run.data["seed"])
        groups.setdefault((configuration, length), {})[same_run] = run
    return [list(group.values()) for group in groups.values()]


def _configuration(run: Run) -> tuple[object, ...]:
    """All that repeats share but the length."""
    names = ("experiment", "model", "gpu", "method", "batch_size")
    return (*(run.data[name] for name in names), tuple(sorted(run.conditions.items(), key=str)))


def _row_of(runs: Sequence[Run]) -> Row:
    """`runs`, which are repeats of each other, as one row."""
    sound = [run for run in runs if not run.diverged]
    data, conditions = (sound or runs)[0].data, runs[0].conditions
    rates = [run.data["images_per_s"] for run in sound]
    lows = [rate["min"] for rate in rates if rate and rate["min"] is not None]
    highs = [rate["max"] for rate in rates if rate and rate["max"] is not None]
    bytes_ = (run.data["memory_bytes"] for run in runs)
    return Row(
        source="measured",
        recipe=conditions["recipe"],
        experiment=data["experiment"],
        model=data["model"],
        gpu=data["gpu"],
        method=data["method"],
        batch_size=data["batch_size"],
        iterations=data["iterations"] if sound else None,
        epochs=data["epochs"] if sound else None,
        optimizer=conditions["optimizer"],
        time_s=Stat.of(run.time_s for run in runs),
        memory_mb=Stat.of(value and value / 1e6 for value in bytes_),
        accuracy_pct=Stat.of(run.accuracy_pct for run in runs),
        images_per_s=Stat.of(run.of_part("images_per_s", "mean") for run in runs),
        images_per_s_min=min(lows, default=None),
        images_per_s_max=max(highs, default=None),
        loss_last=Stat.of(run.of_part("train_loss", "last") for run in runs),
        loss_mean=Stat.of(run.of_part("train_loss", "mean") for run in runs),
        n=len(runs),
        note=_divergence(runs),
        conditions=conditions,
        runs=tuple(sorted(runs, key=lambda run: run.data["repeat"])),
    )


def _divergence(runs: Sequence[Run]) -> str:
    diverged = [run.diverged for run in runs if run.diverged]
    if not diverged:
        return ""
    what = diverged[0]
    some = "" if len(runs) == 1 else f"{len(diverged)} of {len(runs)} "
    place = what.get("first") or ", ".join(
        str(what[name]) for name in ("tensor", "module") if what.get(name)
    )
    because = f"{what.get('reason')}" + (f" ({place})" if place else "")
    return f"{some}diverged in step {what['step']}: {because}"


def _order(row: Row) -> tuple[object, ...]:
    known = METHODS.index(row.method) if row.method in METHODS else len(METHODS)
    head = (row.experiment, row.model, row.gpu, known, row.method)
    is_original = row.conditions["loop"] == "original"
    return (*head, row.batch_size, row.iterations or 0, is_original, str(row.conditions))


# ---- published figures ---------------------------------------------------------------------------


def _published_row(recipe: str, line: Mapping[str, str]) -> Row:
    def stat(name: str, unit: float = 1.0) -> Stat | None:
        return Stat(float(line[name]) * unit) if line[name] else None

    def count(name: str) -> int | None:
        return int(line[name]) if line[name] else None

    def five(name: str, unit: str) -> Stat:  # E1 gives mean and deviation of five repeats
        return Stat(float(line[f"{name}_mean_{unit}"]), float(line[f"{name}_std_{unit}"]), n=5)

    common: dict[str, Any] = {
        "source": "published",
        "recipe": recipe,
        "experiment": "cifar",
        "gpu": line.get("gpu", ""),
        "batch_size": count("batch_size"),
    }
    if recipe == "e1":
        return Row(
            **common,
            model="vgg16",
            method=line["method"],
            iterations=100,
            time_s=five("time", "s"),
            memory_mb=five("memory", "mb"),
            accuracy_pct=five("accuracy", "pct"),
            n=5,
        )
    if recipe in ("e2", "e3"):
        return Row(
            **common,
            model=line.get("model", "wrn28_10"),
            method=line["level"],
            epochs=count("epochs"),
            optimizer=line.get("optimizer", ""),
            platform=line.get("platform", ""),
            time_s=stat("time_s"),
            memory_mb=stat("memory_mb"),
            accuracy_pct=stat("val_accuracy_pct"),
            note=line.get("note", ""),
        )
    if recipe == "e4":
        low, high = stat("images_per_s_min"), stat("images_per_s_max")
        return Row(
            **common | {"experiment": "imagenet"},
            model=line["model"],
            method=line["precision"],
            platform=line["environment"],
            iterations=count("batches"),
            images_per_s=stat("images_per_s_mean"),
            images_per_s_min=low and low.mean,
            images_per_s_max=high and high.mean,
            loss_last=stat("loss_last"),
            loss_mean=stat("loss_mean"),
        )
    model = {"sample_mlp": "mlp", "mnist_cnn": "mnist_cnn"}[line["workload"]]
    return Row(
        **common | {"experiment": {"mlp": "mlp", "mnist_cnn": "mnist"}[model]},
        model=model,
        method=line["method"],
        epochs=count("epochs"),
        time_s=stat("time_s"),
        memory_mb=stat("max_memory_bytes", 1e-6),
    )
