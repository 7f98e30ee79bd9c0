"""The figures, drawn from rows (:mod:`results`). Each function returns a matplotlib ``Figure``.

    from ampfuse.experiments import plots, results
    plots.time_against_batch(results.measured("results"))

All rows of a figure are of one model. A line, or the bars of one kind, is one GPU and method, and
whatever else two rows differ in (a captured graph, say) makes two lines of them and goes into their
names. What could not be compared within a line, runs of different length, is refused.

Colour and marker are the GPU's, dash and filling the method's; with one GPU all four are the
method's. So lines can be told apart in black and white too, and bars by their hatches.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

# Figure, not pyplot: no display is opened and no global state is touched.
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from ampfuse.experiments.results import ResultsError, Row, Stat

_WIDTH = 7.0  # inches: a notebook's column
_SMALL = 8  # points: legends, numbers on bars
_RESIDENT = "process RSS"  # the kind of memory that runs on a CPU report


class NothingToDraw(ResultsError):
    """The rows lack what this figure shows."""


# ---- lines ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Line:
    """Rows that belong together: one GPU, one method, one set of conditions."""

    gpu: str
    name: str  # of the method, and what sets it apart
    rows: tuple[Row, ...]

    @property
    def label(self) -> str:
        return f"{self.gpu} {self.name}".strip()


# Without these alike, two methods cannot be compared: where they differ at all, names say so.
_MUST_BE_ALIKE = (
    *("data", "kind", "image_size", "loader", "augment", "shuffle", "loop", "world_size"),
    *("channels_last", "cudnn_benchmark", "graph", "compile", "deterministic", "optimizer"),
)
# These differ between methods, and between machines, as a matter of course.
_OWN = ("arm", "loss_scale", "keep_batchnorm_fp32", "device")
# What "original loop" says already.
_OF_THE_LOOP = ("loader", "workers", "channels_last", "cudnn_benchmark")
# What goes without saying.
_USUAL: Mapping[str, object] = {
    "loop": "tuned",
    "world_size": 1,
    "loader": "resident",
    "channels_last": True,
    "cudnn_benchmark": True,
    "graph": False,
    "compile": False,
    "deterministic": False,
}


def lines(rows: Sequence[Row], *, of: str = "iterations") -> list[Line]:
    """The lines that `rows` make.

    Args:
        of: what the runs of a line must have the same number of, "iterations" or "epochs".

    Raises:
        ResultsError: they have not, or `rows` are of more than one model.
    """
    if not rows:
        raise NothingToDraw("no rows to draw")
    models = list(dict.fromkeys(row.model for row in rows))
    if len(models) > 1:
        raise ResultsError(f"rows of {', '.join(models)} in one figure: choose one with --model")
    everywhere = [name for name in _MUST_BE_ALIKE if _varies(rows, name)]
    sources = {row.source for row in rows}
    found = []
    for (source, gpu, method), together in _grouped(
        rows, lambda row: (row.source, row.gpu, row.method)
    ):
        at_one_batch = [same for _, same in _grouped(together, lambda row: row.batch_size)]
        names = dict.fromkeys(
            name
            for name in (*_OWN, *together[0].conditions)
            if (name in _OWN and _varies(together, name))
            or any(_varies(same, name) for same in at_one_batch)
        )
        names = [*everywhere, *(name for name in names if name not in everywhere)]
        for values, members in _grouped(
            together, lambda row, names=names: tuple(row.conditions.get(name) for name in names)
        ):
            differing = dict(zip(names, values, strict=True))
            if differing.get("loop") == "original":
                differing = {k: v for k, v in differing.items() if k not in _OF_THE_LOOP}
            words = [_word(name, value) for name, value in differing.items()]
            words += [source] if len(sources) > 1 else []
            found.append((gpu, method, [word for word in words if word], members))
    for gpu, method, words, members in found:
        _refuse_mixed(f"{gpu} {_named(method, words)}", members, of)
    if len(_lengths(rows, of)) > 1:
        for _, _, words, members in found:
            words += [f"{_number(length)} {of}" for length in _lengths(members, of)]
    gpus, methods = _gpus(rows), list(dict.fromkeys(row.method for row in rows))
    found.sort(key=lambda line: (gpus.index(line[0]), methods.index(line[1]), len(line[2])))
    return [
        Line(gpu, _named(method, words), tuple(sorted(members, key=_batch_size)))
        for gpu, method, words, members in found
    ]


def _batch_size(row: Row) -> int:
    return row.batch_size or 0


def _grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> list[tuple[Any, list[Row]]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.items())


def _varies(rows: Sequence[Row], name: str) -> bool:
    return len({row.conditions.get(name) for row in rows}) > 1


def _word(name: str, value: object) -> str:
    """What a line's name says of one condition: "graph", "original loop", "lr 0.1"."""
    if value is None or (name in _USUAL and value == _USUAL[name]):
        return ""
    if name in ("data", "arm", "optimizer", "device"):
        return str(value)
    if isinstance(value, bool):
        return name if value else f"no {name}"
    if name == "loop":
        return f"{value} loop"
    if name == "world_size":
        return f"{value} processes"
    return f"{name} {_number(value)}"


def _named(method: str, words: Sequence[str]) -> str:
    return f"{method} ({', '.join(words)})" if words else method


def _refuse_mixed(label: str, rows: Sequence[Row], of: str) -> None:
    counts = _lengths(rows, of)
    if len(counts) < 2:
        return
    options = {"iterations": "--iteration N", "epochs": "--epochs N"}
    epochs = _lengths(rows, "epochs")
    choose = options[of]
    if of == "iterations" and len(epochs) == 1:
        choose += f" or --epochs {_number(epochs[0])}"
    raise ResultsError(
        f"{label} of {rows[0].model} has runs of {', '.join(map(_number, counts))} {of}, which do "
        f"not go into one line: choose with {choose}"
    )


def _lengths(rows: Sequence[Row], of: str) -> list[Any]:
    """The different lengths; rows that diverged, or of which nobody knows it, have none."""
    return sorted({getattr(row, of) for row in rows} - {None})


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- time and memory -----------------------------------------------------------------------------


def time_against_batch(rows: Sequence[Row], *, std: bool = False, of: str = "iterations") -> Figure:
    """Training time against batch size, a line per GPU and method; bars if there is one batch size.

    Args:
        rows: of one model; every line must have runs of one length.
        std: show the sample standard deviation of the repeats as error bars.
        of: what counts as length, "iterations" or "epochs".

    Raises:
        ResultsError: there is nothing to draw, or a line would mix lengths.
    """
    lengths = _lengths(rows, of)
    length = f" of {_number(lengths[0])} {of}" if len(lengths) == 1 else ""
    return _against_batch(rows, "time_s", f"training time{length}", "s", std=std, of=of)


def memory_against_batch(
    rows: Sequence[Row], *, std: bool = False, of: str = "iterations"
) -> Figure:
    """Device memory against batch size, in MB of 10^6 bytes; else as :func:`time_against_batch`."""
    kinds = {run.data["memory_kind"] for row in rows for run in row.runs}
    what = "device memory"
    if _RESIDENT in kinds:
        what = "memory of the process" if len(kinds) == 1 else "memory of the device or CPU process"
    return _against_batch(rows, "memory_mb", what, "MB", std=std, of=of)


def _against_batch(
    rows: Sequence[Row], field: str, what: str, unit: str, *, std: bool, of: str
) -> Figure:
    def stat(row: Row) -> Stat | None:
        return getattr(row, field)

    there = _with(rows, lambda row: stat(row) and row.batch_size)
    batches = sorted({row.batch_size for row in there if row.batch_size})
    figure = Figure(figsize=(_WIDTH, 4.0), layout="constrained")
    axes = figure.subplots()
    at_batch = ""
    if len(batches) > 1:
        drawn = lines(there, of=of)
        for place, (line, style) in enumerate(zip(drawn, _line_styles(drawn), strict=True)):
            values = [stat(row) for row in line.rows]
            drawing = axes.errorbar(
                [row.batch_size for row in line.rows],
                [value.mean for value in values],
                yerr=[value.std or 0.0 for value in values] if std else None,
                label=line.label,
                capsize=2,
                elinewidth=0.9,
                **style,
            )
            if std:  # error bars side by side: moved on the paper, not in the data
                inches = 0.035 * (place - (len(drawn) - 1) / 2)
                move = ScaledTranslation(inches, 0, figure.dpi_scale_trans)
                for artist in drawing.get_children():
                    artist.set_transform(axes.transData + move)
        axes.margins(x=0.06)
        _batch_axis(axes, batches)
    else:
        drawn = lines(
            [row for row in rows if row.batch_size in batches and (stat(row) or row.diverged)],
            of=of,
        )
        several = len(_gpus(drawn)) > 1
        cells = {
            (line.gpu if several else batches[0], line.name): next(
                filter(None, map(stat, line.rows)), None
            )
            for line in drawn
        }
        if several:
            at_batch = f", batch size {batches[0]}"
        else:
            axes.set_xlabel("batch size")
        _bars(axes, cells, std=std)
    _legend(figure, axes, gpus=_gpus(drawn))
    axes.set_ylabel(f"{what}, {unit}")
    axes.set_ylim(bottom=0)
    deviation = ", mean ± standard deviation" if std else ""
    _head(figure, f"{_title(rows)}: {what}{at_batch}{deviation}")
    _unclutter(axes, grid="y" if len(batches) == 1 else "both")
    return figure


def _batch_axis(axes: Axes, batches: Sequence[int]) -> None:
    places = [math.log(batch / batches[0], batches[-1] / batches[0]) for batch in batches]
    upright = min(after - before for before, after in itertools.pairwise(places)) < 0.08
    labels, last = [], -1.0
    for batch, place in zip(batches, places, strict=True):
        has_room = not upright or place - last > 0.035
        labels.append(str(batch) if has_room else "")
        last = place if has_room else last
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, labels, rotation=90 if upright else 0)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("batch size")


# ---- speed-up ------------------------------------------------------------------------------------


def speedup(rows: Sequence[Row], *, of: str = "iterations") -> Figure:
    """How many times as fast as FP32 each method is: bars per batch size, a panel per GPU.

    Compared are mean times per iteration. All bars of a GPU and batch size have one yardstick, the
    tuned FP32 run on the same data, without graph or compilation if there is such a one; O0 where
    FP32 was not run. The axis names it. Where a row diverged, that stands in the bar's place.

    Raises:
        ResultsError: no method has an FP32 to be compared with.
    """
    rows = _with(rows, lambda row: row.batch_size and (row.time_s or row.diverged))
    drawn = lines(rows, of=of)
    cells: dict[str, dict[tuple[int, str], Stat | None]] = {}
    bases = []
    for line in drawn:
        for row in line.rows:
            base = _baseline(row, rows)
            if base is None or base is row:
                continue
            bases += [line.name for line in drawn if base in line.rows]
            of_gpu, key = cells.setdefault(line.gpu, {}), (row.batch_size, line.name)
            if step_s := _step_s(row):
                of_gpu[key] = Stat(_step_s(base) / step_s)
            else:
                of_gpu.setdefault(key, None)
    if not cells:
        raise NothingToDraw("no method beside FP32 on the same GPU at the same batch size")
    figure = Figure(figsize=(_WIDTH, 1.4 + 2.2 * len(cells)), layout="constrained")
    panels = figure.subplots(len(cells), 1, squeeze=False)[:, 0]
    shown = {name for of_gpu in cells.values() for _, name in of_gpu}
    names = [line.name for line in drawn if line.name in shown]
    for axes, (gpu, of_gpu) in zip(panels, cells.items(), strict=True):
        axes.axhline(1.0, color="black", linewidth=0.8, zorder=0.9)  # behind the bars
        _bars(axes, dict(sorted(of_gpu.items())), names=names)
        if len(cells) > 1:
            axes.set_title(textwrap.fill(gpu, 80), fontsize=9)
        axes.set_ylabel(textwrap.fill(f"speed, times {' or '.join(dict.fromkeys(bases))}", 32))
        _unclutter(axes, grid="y")
    panels[-1].set_xlabel("batch size")
    _legend(figure, *panels, gpus=list(cells))
    _head(figure, f"{_title(rows)}: speed-up of the training step")
    return figure


def _step_s(row: Row) -> float | None:
    """Time per iteration, in seconds; per epoch where nobody noted the iterations."""
    length = row.iterations or row.epochs
    return row.time_s.mean / length if row.time_s and length else None


# What two runs must have in common for their speeds to be compared at all.
_SAME_WORK = ("data", "kind", "image_size", "augment", "world_size", "device")


def _baseline(row: Row, rows: Sequence[Row]) -> Row | None:
    """The FP32 row that `row` is to be compared with; it may be `row` itself."""
    comparable = [
        other
        for other in rows
        if other.time_s
        and (other.source, other.gpu, other.batch_size) == (row.source, row.gpu, row.batch_size)
        and all(other.conditions.get(name) == row.conditions.get(name) for name in _SAME_WORK)
    ]

    def oddities(other: Row) -> int:
        return sum(other.conditions.get(name, usual) != usual for name, usual in _USUAL.items())

    for arm in ("FP32", "fp32", "O0"):  # published rows have E1's name for it
        if found := [other for other in comparable if other.arm == arm]:
            return min(found, key=oddities)
    return None


# ---- accuracy ------------------------------------------------------------------------------------


def accuracy_against_time(rows: Sequence[Row], *, of: str = "iterations") -> Figure:
    """Test accuracy against training time, from the runs' logs; means over repeats.

    A panel per batch size and a line per GPU and method. Runs that were evaluated once, at their
    end, have one point each: these are joined over the batch sizes, in one panel.

    Raises:
        ResultsError: no run was evaluated, or a line would mix lengths.
    """
    courses = {id(row): _accuracy_course(row) for row in rows}
    rows = _with(rows, lambda row: courses[id(row)] and row.batch_size)
    drawn = lines(rows, of=of)
    batches = sorted({row.batch_size for row in rows if row.batch_size})
    once = len(batches) > 1 and all(len(courses[id(row)]) == 1 for row in rows)
    panels: list[int | None] = [None] if once else list(batches)
    figure, all_axes = _panels(len(panels))
    styles = _line_styles(drawn)
    for axes, batch in zip(all_axes, panels, strict=True):
        for line, style in zip(drawn, styles, strict=True):
            points = [
                point
                for row in line.rows
                if batch in (None, row.batch_size)
                for point in courses[id(row)]
            ]
            if points:
                seconds, percent = zip(*points, strict=True)
                axes.plot(seconds, percent, label=line.label, **style)
        if batch is not None and len(panels) > 1:
            axes.set_title(f"batch size {batch}", fontsize=9)
        axes.set(xlabel="training time, s", ylabel="test accuracy, %")
        axes.set_xlim(left=0)
        _unclutter(axes)
    _legend(figure, *all_axes, gpus=_gpus(drawn))
    at_end = f" at the end, batch sizes {batches[0]} to {batches[-1]}" if once else ""
    alone = f", batch size {batches[0]}" if len(batches) == 1 else ""
    _head(figure, f"{_title(rows)}: test accuracy{at_end}{alone}")
    return figure


def _accuracy_course(row: Row) -> list[tuple[float, float]]:
    """Mean (training time in s, accuracy in %) of each evaluation."""
    by_step: dict[int, list[tuple[float, float]]] = {}
    for run in row.runs:
        for line in () if run.diverged else run.log("evaluation"):
            if line["test_accuracy"] is not None:
                point = (line["time_s"], 100 * line["test_accuracy"])
                by_step.setdefault(line["step"], []).append(point)
    return [
        (statistics.fmean(p[0] for p in points), statistics.fmean(p[1] for p in points))
        for points in by_step.values()
    ]


# ---- loss scale ----------------------------------------------------------------------------------


def loss_scale(rows: Sequence[Row], *, of: str = "iterations") -> Figure:
    """Loss scale over steps, a cross at every overflow (a skipped step); a panel per batch size.

    Shown is the first repeat of each row that scales its loss. Lines that lie on each other are
    of different widths, so that all of them show.

    Raises:
        ResultsError: no run scaled its loss, or none has a log.
    """
    logs = {id(row): _scale_log(row) for row in rows}
    rows = _with(rows, lambda row: row.batch_size and _is_scaled(logs[id(row)]))
    drawn = lines(rows, of=of)
    batches = sorted({row.batch_size for row in rows if row.batch_size})
    figure, all_axes = _panels(len(batches))
    for axes, batch in zip(all_axes, batches, strict=True):
        for line, style, more in zip(drawn, _line_styles(drawn), _falling(len(drawn)), strict=True):
            width = 1.2 + 3.6 * more
            for row in (row for row in line.rows if row.batch_size == batch):
                steps, scales, overflows = _scale_course(logs[id(row)])
                axes.plot(
                    steps,
                    scales,
                    drawstyle="steps-pre",
                    linewidth=width,
                    color=style["color"],
                    dashes=style["dashes"],
                    label=line.label,
                )
                if overflows:
                    axes.plot(*zip(*overflows, strict=True), **_CROSS)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_minor_locator(NullLocator())
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, high / 16), high * 2)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.set(xlabel="step", ylabel="loss scale, factor")
        if len(batches) > 1:
            axes.set_title(f"batch size {batch}", fontsize=9)
        _unclutter(axes)
    all_axes[0].plot([], [], **_CROSS, label="overflow, step skipped")
    _legend(figure, *all_axes, gpus=_gpus(drawn))
    alone = f", batch size {batches[0]}" if len(batches) == 1 else ""
    _head(figure, f"{_title(rows)}: loss scale{alone}")
    return figure


_CROSS = {
    **{"marker": "x", "markersize": 7, "markeredgewidth": 1.6},
    **{"color": "black", "linestyle": "none", "zorder": 5},
}


def _scale_log(row: Row) -> list[dict[str, Any]]:
    """The log lines of the first repeat that tell a loss scale."""
    log = row.runs[0].log("interval") if row.runs else []
    return [line for line in log if line["loss_scale"] is not None]


def _is_scaled(log: Sequence[Mapping[str, Any]]) -> bool:
    return any(line["loss_scale"] != 1.0 or line["overflow_steps"] for line in log)


def _scale_course(
    log: Sequence[Mapping[str, Any]],
) -> tuple[list[int], list[float], list[tuple[int, float]]]:
    """Steps and scales, and the steps of overflows, each at the scale that stands there."""
    steps = [0, *(line["step"] for line in log)]
    scales = [log[0]["loss_scale"], *(line["loss_scale"] for line in log)]
    overflows = [(step, line["loss_scale"]) for line in log for step in line["overflow_steps"]]
    return steps, scales, overflows


# ---- drawing -------------------------------------------------------------------------------------

# Okabe and Ito's, told apart by colour-blind readers too.
_GPU_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_GPU_MARKERS = "os^DvPX<>*hpd8"


class _Look(NamedTuple):
    """What shows a method: ink and face (of bars), hatch, dash, marker and its filling."""

    ink: str
    face: str
    hatch: str
    dashes: tuple[float, ...]
    marker: str
    fill: str


_LOOKS = (
    _Look("#000000", "#FFFFFF", "", (), "o", "full"),
    _Look("#7F7F7F", "#D9D9D9", "----", (9, 3), "X", "right"),
    _Look("#E69F00", "#F5DFA0", "\\\\\\\\", (6, 1.5, 1, 1.5), "D", "bottom"),
    _Look("#8A6D3B", "#D2B9A0", "xxxx", (3, 1.3), "v", "top"),
    _Look("#56B4E9", "#C9E7F8", "||||", (1, 3), "p", "right"),
    _Look("#009E73", "#A8D8B9", "....", (1, 1.3), "^", "left"),
    _Look("#D55E00", "#F3B488", "////", (5, 2), "s", "white"),
    _Look("#CC79A7", "#E3C0D6", "oo", (9, 2, 3, 2), "P", "bottom"),
    _Look("#6A3D9A", "#CDB9E3", "++++", (6, 1.5, 1, 1.5, 1, 1.5), "<", "top"),
    _Look("#0072B2", "#9BC4E2", "//..", (5, 2, 1, 2, 1, 2, 1, 2), ">", "right"),
    # For whatever else there is: second loops, captured graphs, ...
    _Look("#B15928", "#E6CBB5", "**", (12, 2, 1, 2), "*", "full"),
    _Look("#1B5E20", "#B9CDB9", "OO", (2, 2, 6, 2), "h", "white"),
    _Look("#AD1457", "#EBC3D2", "\\\\..", (4, 4), "d", "left"),
    _Look("#455A64", "#C5CED2", "--..", (1, 5), "8", "full"),
)
# A method looks the same in every figure, and E1's names as their arms.
_LOOK_OF = {
    **{"fp32": 0, "tf32": 1, "amp-fp16": 2, "amp-bf16": 3},
    **{"O0": 4, "O1": 5, "O2": 6, "O3": 7, "O4": 8, "O5": 9},
    **{"FP32": 0, "FP16": 6, "fp16": 6, "amp": 5},
}


def _looks(names: Iterable[str]) -> dict[str, _Look]:
    """A look for each name; no two the same as long as there are enough."""
    names = list(dict.fromkeys(names))
    chosen: dict[str, int] = {}
    for name in names:
        if (wanted := _LOOK_OF.get(name)) is not None and wanted not in chosen.values():
            chosen[name] = wanted
    rest = (name for name in names if name not in chosen)
    free = [place for place in range(len(_LOOKS)) if place not in chosen.values()]
    free.sort(key=lambda place: place in _LOOK_OF.values())
    chosen |= zip(rest, itertools.cycle(free or range(len(_LOOKS))), strict=False)
    return {name: _LOOKS[chosen[name]] for name in names}


def _line_styles(drawn: Sequence[Line]) -> list[dict[str, Any]]:
    """matplotlib's arguments for each line; the module's docstring says what shows what."""
    gpus = _gpus(drawn)
    looks = _looks(line.name for line in drawn)
    styles = []
    for line, more in zip(drawn, _falling(len(drawn)), strict=True):
        look = looks[line.name]
        gpu = gpus.index(line.gpu)
        several = len(gpus) > 1
        filled = {"markerfacecolor": "white"} if look.fill == "white" else {"fillstyle": look.fill}
        styles.append(
            {
                "color": _GPU_COLORS[gpu % len(_GPU_COLORS)] if several else look.ink,
                "marker": _GPU_MARKERS[gpu % len(_GPU_MARKERS)] if several else look.marker,
                "dashes": look.dashes,
                "markerfacecoloralt": "white",
                "markersize": 5 + 2 * more,
                "linewidth": 1.2 + 0.8 * more,
                **filled,
            }
        )
    return styles


def _falling(count: int) -> list[float]:
    """To 0, from 1: what is drawn first is larger, so that lines on top of each other all show."""
    return [(count - 1 - i) / max(1, count - 1) for i in range(count)]


def _bars(
    axes: Axes,
    cells: Mapping[tuple[Any, str], Stat | None],
    *,
    names: Sequence[str] | None = None,
    std: bool = False,
) -> None:
    """Bars in groups: `cells` has a value for (group, name), None for one that diverged."""
    groups = list(dict.fromkeys(group for group, _ in cells))
    looks = _looks(names or [name for _, name in cells])
    width = 0.84 / len(looks)
    inches = (_WIDTH - 0.9) * width / len(groups)
    upright = {"fontsize": 6.5, "rotation": 90}
    longest = max((len(_brief(stat.mean)) for stat in cells.values() if stat), default=0)
    is_wide = inches > 0.075 * longest + 0.05
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # over the lines of the grid
    for place, (name, look) in enumerate(looks.items()):
        offset = (place - (len(looks) - 1) / 2) * width
        stats = [
            (x + offset, cells[group, name])
            for x, group in enumerate(groups)
            if (group, name) in cells
        ]
        for x in (x for x, stat in stats if stat is None):
            method = name.split(" (")[0]
            axes.text(x, 0, f"  {method} diverged", ha="center", va="bottom", **upright)
        bars_of = [(x, stat) for x, stat in stats if stat is not None]
        if not bars_of:
            continue
        bars = axes.bar(
            [x for x, _ in bars_of],
            [stat.mean for _, stat in bars_of],
            width * 0.92,
            yerr=[stat.std or 0.0 for _, stat in bars_of] if std else None,
            capsize=2,
            error_kw={"elinewidth": 0.9},
            label=name,
            color=look.face,
            hatch=look.hatch,
            edgecolor="black",
            linewidth=0.7,
        )
        if inches > 0.11:
            letters = {"fontsize": _SMALL} if is_wide else upright
            axes.bar_label(bars, fmt=_brief, padding=2.5, bbox=paper, **letters)
    room = int(75 / len(groups))  # letters
    axes.set_xticks(range(len(groups)), [textwrap.fill(str(group), room) for group in groups])
    axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.margins(y=0.12 if is_wide else 0.25)  # room for the numbers


def _brief(value: float) -> str:
    """Three digits, or more where they stand before the point: 0.951, 12.3, 3437."""
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:.{digits}f}"


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    """A figure of `count` axes, two in a line."""
    columns = min(count, 2)
    lines_ = -(-count // columns)
    height = 3.8 if count == 1 else 0.5 + 2.5 * lines_
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    cells = figure.subplots(lines_, columns, squeeze=False).flat
    for axes in cells[count:]:
        axes.remove()
    return figure, list(cells[:count])


def _legend(figure: Figure, *all_axes: Axes, gpus: Sequence[str]) -> None:
    """Below the axes, where it hides nothing. One GPU is its heading, several are in its labels."""
    by_label: dict[str, Any] = {}
    for axes in all_axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            if len(gpus) == 1:
                label = label.removeprefix(f"{gpus[0]} ")
            by_label.setdefault(textwrap.fill(label, 44), handle)
    longest = max(len(part) for label in by_label for part in label.split("\n"))
    room = max(1, int((_WIDTH - 0.2) / (0.068 * longest + 0.65)))  # inches that a label takes
    columns = min(room, len(by_label), 4)
    if len(gpus) > 1 and columns > len(gpus):
        columns = len(gpus)  # a column of the legend is a GPU's
    tallest = max(label.count("\n") + 1 for label in by_label)
    lines_ = -(-len(by_label) // columns) * tallest + (len(gpus) == 1)
    figure.set_figheight(figure.get_figheight() + 0.17 * lines_)
    figure.legend(
        by_label.values(),
        by_label.keys(),
        title=textwrap.fill(gpus[0], 80) if len(gpus) == 1 else None,
        title_fontsize=_SMALL,
        loc="outside lower center",
        ncols=columns,
        fontsize=_SMALL,
        frameon=False,
        handlelength=3.6,
    )


def _gpus(rows: Iterable[Row | Line]) -> list[str]:
    return list(dict.fromkeys(row.gpu for row in rows))


def _head(figure: Figure, text: str) -> None:
    figure.suptitle(textwrap.fill(text, 84), fontsize=10)


def _title(rows: Sequence[Row]) -> str:
    """What was trained on what, and whose figures these are."""
    own = [row for row in rows if row.source == "measured"]
    model = rows[0].model
    if not own:
        return f"{model}, published figures"
    if _varies(own, "data") or _varies(own, "kind"):
        return model
    data, kind = own[0].conditions["data"], own[0].conditions.get("kind")
    return f"{model} on {f'synthetic {kind}' if data == 'synthetic' and kind else data}"


def _with(rows: Sequence[Row], has: Callable[[Row], object]) -> list[Row]:
    there = [row for row in rows if has(row)]
    if not there:
        raise NothingToDraw("the results lack what this figure shows")
    return there


def _unclutter(axes: Axes, grid: str = "both") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
