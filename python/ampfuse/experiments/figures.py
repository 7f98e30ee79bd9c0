"""The figures, drawn from rows (:mod:`results`). Each function returns a matplotlib ``Figure``.

    from ampfuse.experiments import figures, results
    figures.time_against_batch(results.measured("results"))

All rows of a figure are of one model. A line is one GPU and method, and whatever else sets rows
apart (a captured graph, say) makes two lines of them and goes into their names. What could not be
compared within a line, runs of different length, is refused.
"""

from __future__ import annotations

import operator
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from ampfuse.experiments.results import ResultsError, Row, Stat, listed

_WIDTH = 7.0  # inches: a notebook's column
_SMALL = {"fontsize": 8}
_LACKING = "the results lack what this figure shows"


class NothingToDraw(ResultsError):
    """The rows lack what this figure shows."""


# ---- lines ---------------------------------------------------------------------------------------


class Line(NamedTuple):
    """Rows that belong together: one GPU, one method, one set of conditions."""

    gpu: str
    name: str  # of the method, and what sets it apart
    rows: list[Row]

    @property
    def label(self) -> str:
        return f"{self.gpu} {self.name}".strip()


# Without these alike, two methods cannot be compared: where one is unlike this, its name says so.
_USUAL: dict[str, object] = {"loop": "tuned", "world_size": 1, "loader": "resident"}
_USUAL |= {"channels_last": True, "cudnn_benchmark": True, "graph": False, "deterministic": False}
_MUST_BE_ALIKE = ("data", "kind", "image_size", "augment", "shuffle", *_USUAL)
# What "original loop" says already.
_OF_THE_LOOP = ("loader", "workers", "channels_last", "cudnn_benchmark")


def lines(rows: Sequence[Row], of: str = "iterations") -> list[Line]:
    """The lines that `rows`, of one model, make. The runs of one have the same number `of`
    "iterations" or "epochs"; else this raises ResultsError."""
    models = _different(row.model for row in rows)
    if len(models) > 1:
        raise ResultsError(f"rows of {', '.join(models)} in one figure: choose one with --model")
    everywhere = [name for name in _MUST_BE_ALIKE if varies(rows, name)]
    sources, all_lengths = _different(row.source for row in rows), _lengths(rows, of)
    found = []
    for together in _grouped(rows, lambda row: (row.source, row.gpu, row.method)):
        # What follows the batch size (a rate, say) sets none apart.
        at_one_batch = _grouped(together, lambda row: row.batch_size)
        apart = [n for n in together[0].conditions if any(varies(same, n) for same in at_one_batch)]
        names = [*everywhere, *apart]
        for members in _grouped(together, lambda row, names=names: str(_words(row, names))):
            first, lengths = members[0], _lengths(members, of)
            words = _words(first, names) + [first.source] * (len(sources) > 1)
            words += [f"{listed(lengths)} {of}"] * (len(all_lengths) > 1)
            name = first.method + f" ({', '.join(words)})" * bool(words)
            if len(lengths) > 1:
                raise ResultsError(
                    f"{first.gpu} {name} of {models[0]}: runs of different length do not go into "
                    "one line: choose with --iteration N or --epochs N"
                )
            found.append(Line(first.gpu, name, sorted(members, key=lambda r: r.batch_size or 0)))
    return found


def _different(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _grouped(rows: Sequence[Row], key: Callable[[Row], object]) -> list[list[Row]]:
    return [[row for row in rows if key(row) == one] for one in _different(map(key, rows))]


def varies(rows: Sequence[Row], name: str) -> bool:
    return len({str(row.conditions.get(name)) for row in rows}) > 1


def _words(row: Row, names: Sequence[str]) -> list[str]:
    """What a line's name says of these conditions: "graph", "original loop", "lr 0.1"."""
    words = []
    for name in names:
        value = row.conditions.get(name)
        said = row.conditions.get("loop") == "original" and name in _OF_THE_LOOP
        if said or value is None or value == _USUAL.get(name):
            continue
        if isinstance(value, bool):
            words.append(name if value else f"no {name}")
        else:
            words.append(_WORDS.get(name, f"{name} {{}}").format(listed([value])))
    return _different(words)


_WORDS = {"loop": "{} loop", "world_size": "{} processes", "data": "{}", "arm": "{}"}
_WORDS |= {"device": "{}"}


def _lengths(rows: Sequence[Row], of: str) -> list[Any]:
    """The different lengths that somebody noted."""
    return sorted({getattr(row, of) for row in rows} - {None})


# ---- how they look -------------------------------------------------------------------------------

# A method has one colour in every figure, E1's names that of their arms; colour-blind readers can
# tell them apart.
_COLORS = {"fp32": "#000000", "tf32": "#7F7F7F", "amp-fp16": "#E69F00", "amp-bf16": "#8A6D3B"}
_COLORS |= {"O0": "#56B4E9", "O1": "#009E73", "O2": "#D55E00", "O3": "#CC79A7", "O4": "#6A3D9A"}
_COLORS |= {"O5": "#0072B2", "FP32": "#000000", "FP16": "#D55E00", "amp": "#009E73"}
_OTHERS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 3)), (0, (8, 2, 2, 2)))
_MARKERS = "os^Dv<>ph"


def styles_of(drawn: Sequence[Line]) -> list[dict[str, Any]]:
    """Colour is the GPU's and dash the method's; with one GPU both are the method's."""
    gpus, names = _gpus(drawn), _different(line.name for line in drawn)
    styles = []
    for line in drawn:
        dash = names.index(line.name)
        number = gpus.index(line.gpu) if len(gpus) > 1 else dash
        color = _COLORS.get(line.name) if len(gpus) == 1 else None
        style = {"color": color or _OTHERS[number % len(_OTHERS)], "markersize": 5}
        style |= {"marker": _MARKERS[number % len(_MARKERS)]}
        styles.append(style | {"linestyle": _DASHES[dash % len(_DASHES)]})
    return styles


def make_panels(titles: Sequence[str | None]) -> tuple[Figure, list[Axes]]:
    """A figure of so many axes, with their `titles` if there are several."""
    count = len(titles)
    rows, columns = -(-count // 2), min(count, 2)
    figure = Figure(figsize=(_WIDTH, 3.8 if count == 1 else 0.5 + 2.5 * rows), layout="constrained")
    cells = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in cells[count:]:
        axes.remove()
    for axes, title in zip(cells, titles, strict=False):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_title(title if count > 1 else "", fontsize=9)
    return figure, cells[:count]


def finish(figure: Figure, drawn: Sequence[Line], title: str) -> Figure:
    """`figure` with a title and a legend below the axes, where it hides nothing; a single GPU is
    named once, above the legend."""
    figure.suptitle(textwrap.fill(title, 84), fontsize=10)
    gpus = _gpus(drawn)
    alone = gpus[0] if len(gpus) == 1 else ""
    by_label: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            by_label.setdefault(textwrap.fill(label.removeprefix(f"{alone} "), 44), handle)
    longest = max(len(part) for label in by_label for part in label.split("\n"))
    # Of several GPUs, each has a column, if there is room for its labels.
    columns = min(max(1, int(100 / (longest + 9))), len(by_label), 4 if alone else len(gpus))
    look = {"loc": "outside lower center", "frameon": False, "handlelength": 3.6, **_SMALL}
    look |= {"title": textwrap.fill(alone, 80), "title_fontsize": 8, "ncols": columns}
    figure.legend(by_label.values(), by_label.keys(), **look)
    figure.set_figheight(figure.get_figheight() + 0.2 * (-(-len(by_label) // columns) + 1))
    return figure


def title_of(rows: Sequence[Row]) -> str:
    """What was trained on what, and whose figures these are."""
    own = [row for row in rows if row.source == "measured"]
    if not own:
        return f"{rows[0].model}, published figures"
    if varies(own, "data") or varies(own, "kind"):
        return rows[0].model
    data, kind = own[0].conditions["data"], own[0].conditions.get("kind")
    return f"{rows[0].model} on {f'synthetic {kind}' if data == 'synthetic' and kind else data}"


def _gpus(drawn: Sequence[Line]) -> list[str]:
    return _different(line.gpu for line in drawn)


# ---- against batch size --------------------------------------------------------------------------


def time_against_batch(rows: Sequence[Row], *, std: bool = False, of: str = "iterations") -> Figure:
    """Training time against batch size, a line per GPU and method; points if there is one size.

    `std` shows the sample standard deviation of the repeats as error bars. `of` is what the runs of
    a line must have the same number of, "iterations" or "epochs": else this raises ResultsError.
    """
    lengths = _lengths(rows, of)
    length = f" of {listed(lengths)} {of}" if len(lengths) == 1 else ""
    return _against_batch(rows, lambda row: row.time_s, f"training time{length}", "s", std, of)


def memory_against_batch(
    rows: Sequence[Row], *, std: bool = False, of: str = "iterations"
) -> Figure:
    """Memory against batch size, in MB of 10^6 bytes; else as :func:`time_against_batch`."""
    kinds = {run["memory_kind"] for row in rows for run in row.runs}
    what = "memory of the process" if kinds == {"process RSS"} else "device memory"
    return _against_batch(rows, lambda row: row.memory_mb, what, "MB", std, of)


def speedup(rows: Sequence[Row], *, of: str = "iterations") -> Figure:
    """How many times as fast as FP32 each method is, against batch size.

    Compared are mean times per iteration. All of a GPU and batch size have one yardstick, the
    tuned FP32 run on the same data; O0 where FP32 was not run. The axis names it.
    """
    bases = {id(row): _baseline(row, rows) for row in rows if row.batch_size}
    compared = [row for row in rows if bases.get(id(row)) not in (None, row)]
    names = _different(bases[id(row)].method for row in compared)

    def ratio(row: Row) -> Stat | None:
        step_s = _step_s(row)
        return Stat(_step_s(bases[id(row)]) / step_s) if step_s and row in compared else None

    figure = _against_batch(rows, ratio, "speed-up", f"times {' or '.join(names)}", False, of)
    figure.axes[0].axhline(1.0, color="black", linewidth=0.8, zorder=0.9)
    return figure


def _against_batch(
    rows: Sequence[Row],
    stat: Callable[[Row], Stat | None],
    what: str,
    unit: str,
    std: bool,
    of: str,
) -> Figure:
    """`stat` of the rows: lines over batch sizes; of one batch size, points over methods."""
    batches = sorted({row.batch_size for row in rows if row.batch_size and stat(row)})
    if not batches:
        raise NothingToDraw(_LACKING)
    drawn = lines([row for row in rows if row.batch_size], of)
    shown = [[row for row in line.rows if stat(row) or row.diverged] for line in drawn]
    drawn = [line._replace(rows=own) for line, own in zip(drawn, shown, strict=True) if own]
    names = _different(line.name for line in drawn)
    figure, (axes,) = make_panels([None])
    for line, style in zip(drawn, styles_of(drawn), strict=True):
        points: list[tuple[Any, Stat]] = []
        for row in line.rows:
            x = row.batch_size if len(batches) > 1 else names.index(line.name)
            if value := stat(row):
                points.append((x, value))
            else:
                axes.text(x, 0, f"  {row.method} diverged", rotation=90, va="bottom", fontsize=6.5)
        means = [value.mean for _, value in points]
        errors = [value.std or 0.0 for _, value in points] if std else None
        look = {"label": line.label, "capsize": 2, **style}
        axes.errorbar([x for x, _ in points], means, yerr=errors, **look)
    if len(batches) > 1:
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, batches, rotation=90 if len(batches) > 8 else 0)
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xticks(range(len(names)), names, rotation=90 if len(names) > 6 else 0, **_SMALL)
        axes.margins(x=0.1)
    axes.set(xlabel="batch size" if len(batches) > 1 else "", ylabel=f"{what}, {unit}")
    axes.set_ylim(bottom=0)
    title = f"{title_of(rows)}: {what}{_at(batches)}" + ", mean ± standard deviation" * std
    return finish(figure, drawn, title)


def _at(batches: Sequence[int]) -> str:
    return f", batch size {batches[0]}" if len(batches) == 1 else ""


def _step_s(row: Row) -> float:
    """Time per iteration, in seconds; per epoch where nobody noted the iterations."""
    length = row.iterations or row.epochs
    return row.time_s.mean / length if row.time_s and length else 0.0


# What two runs must have in common for their speeds to be compared at all.
_SAME_WORK = ("data", "kind", "image_size", "augment", "world_size", "device")


def _baseline(row: Row, rows: Sequence[Row]) -> Row | None:
    """The FP32 row that `row` is to be compared with; it may be `row` itself."""
    here = (row.source, row.gpu, row.batch_size)
    same = [r for r in rows if r.time_s and (r.source, r.gpu, r.batch_size) == here]
    same = [r for r in same if not any(varies([r, row], name) for name in _SAME_WORK)]
    for arm in ("FP32", "fp32", "O0"):  # published rows have E1's name for it
        if found := [other for other in same if other.arm == arm]:
            return min(found, key=_oddities)
    return None


def _oddities(row: Row) -> int:
    return sum(row.conditions.get(name, usual) != usual for name, usual in _USUAL.items())


# ---- within a run --------------------------------------------------------------------------------


def accuracy_against_time(rows: Sequence[Row], *, of: str = "iterations") -> Figure:
    """Test accuracy against training time; means over repeats. A panel per batch size."""

    def draw(axes: Axes, line: Line, row: Row, style: dict[str, Any]) -> None:
        axes.plot(*zip(*_accuracy_course(row), strict=True), label=line.label, **style)
        axes.set(xlabel="training time, s", ylabel="test accuracy, %")

    figure = _by_batch(rows, _accuracy_course, of, "test accuracy", draw)
    for axes in figure.axes:
        axes.set_xlim(left=0)
    return figure


def _accuracy_course(row: Row) -> list[tuple[float, ...]]:
    """Mean (training time in s, accuracy in %) of each evaluation."""
    by_step: dict[int, list[tuple[float, float]]] = {}
    for run in row.runs:
        for line in () if run["diverged"] else run["evaluations"]:
            if line["accuracy"] is not None:
                point = (line["time_s"], 100 * line["accuracy"])
                by_step.setdefault(line["step"], []).append(point)
    return [tuple(map(statistics.fmean, zip(*points, strict=True))) for points in by_step.values()]


def loss_scale(rows: Sequence[Row], *, of: str = "iterations") -> Figure:
    """Loss scale over steps, a cross at every overflow (a skipped step); a panel per batch size.
    Shown is the first repeat of each row that scales its loss."""

    def draw(axes: Axes, line: Line, row: Row, style: dict[str, Any]) -> None:
        log, color = _scales(row), style["color"]
        steps, scales = zip((0, log[0]["loss_scale"]), *map(_scale_at, log), strict=True)
        look = {"drawstyle": "steps-pre", "linestyle": style["linestyle"], "color": color}
        axes.plot(steps, scales, label=line.label, **look)
        # An overflow stands at the scale of its interval.
        if crosses := [(n, entry["loss_scale"]) for entry in log for n in entry["overflow_steps"]]:
            axes.plot(*zip(*crosses, strict=True), "x", color=color)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_minor_locator(NullLocator())
        axes.margins(y=0.2)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.set(xlabel="step", ylabel="loss scale, factor")

    what = "loss scale (crosses: overflows, steps skipped)"
    return _by_batch(
        rows, lambda row: {line["loss_scale"] for line in _scales(row)} - {1.0}, of, what, draw
    )


_scale_at = operator.itemgetter("step", "loss_scale")


def _scales(row: Row) -> list[dict[str, Any]]:
    log = row.runs[0]["intervals"] if row.runs else []
    return [line for line in log if line["loss_scale"] is not None]


def _by_batch(
    rows: Sequence[Row],
    has: Callable[[Row], object],
    of: str,
    what: str,
    draw: Callable[..., None],
) -> Figure:
    """A panel per batch size, where `draw` draws the row of each line; of rows that have it."""
    drawn = lines([row for row in rows if row.batch_size and has(row)], of)
    batches = sorted({row.batch_size for line in drawn for row in line.rows})
    if not batches:
        raise NothingToDraw(_LACKING)
    figure, all_axes = make_panels([f"batch size {batch}" for batch in batches])
    for axes, batch in zip(all_axes, batches, strict=True):
        for line, style in zip(drawn, styles_of(drawn), strict=True):
            for row in (row for row in line.rows if row.batch_size == batch):
                draw(axes, line, row, style)
    return finish(figure, drawn, f"{title_of(rows)}: {what}{_at(batches)}")
