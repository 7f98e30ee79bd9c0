"""The figures, drawn from rows (:mod:`results`). Each function returns a matplotlib ``Figure``.

    from ampfuse.experiments import figures, results
    figures.time_against_batch(results.measured("results"))

All rows of a figure are of one model. A line, or the bars of one kind, is one GPU and method, and
whatever else sets rows apart (a captured graph, say) makes two lines of them and goes into their
names. What could not be compared within a line, runs of different length, is refused.
"""

from __future__ import annotations

import itertools
import operator
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from ampfuse.experiments.results import ResultsError, Row, Stat, listed

_WIDTH = 7.0  # inches: a notebook's column
_SMALL = {"fontsize": 8}  # legends, numbers on bars


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
    models = list(dict.fromkeys(row.model for row in rows))
    if len(models) > 1:
        raise ResultsError(f"rows of {', '.join(models)} in one figure: choose one with --model")
    everywhere = [name for name in _MUST_BE_ALIKE if varies(rows, name)]
    found = []
    for together in _grouped(rows, lambda row: (row.source, row.gpu, row.method)):
        # What follows the batch size (a rate, say) sets none apart.
        at_one_batch = _grouped(together, lambda row: row.batch_size)
        apart = [n for n in together[0].conditions if any(varies(same, n) for same in at_one_batch)]
        for members in _grouped(together, lambda row: _words(row, [*everywhere, *apart])):  # noqa: B023
            lengths, name = _lengths(members, of), members[0].method
            words = [*_words(members[0], [*everywhere, *apart])]
            words += [members[0].source] if len({row.source for row in rows}) > 1 else []
            words += [f"{listed(lengths)} {of}"] if len(_lengths(rows, of)) > 1 else []
            name += f" ({', '.join(words)})" if words else ""
            if len(lengths) > 1:
                raise ResultsError(
                    f"{members[0].gpu} {name} of {models[0]}: runs of different length do not go "
                    f"into one line: choose with --iteration N or --epochs N"
                )
            members.sort(key=lambda row: row.batch_size or 0)
            found.append(Line(members[0].gpu, name, members))
    return found


def _grouped(rows: Sequence[Row], key: Callable[[Row], object]) -> list[list[Row]]:
    groups: dict[object, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def varies(rows: Sequence[Row], name: str) -> bool:
    return len({str(row.conditions.get(name)) for row in rows}) > 1


def _words(row: Row, names: Sequence[str]) -> tuple[str, ...]:
    """What a line's name says of these conditions: "graph", "original loop", "lr 0.1"."""
    words: list[str] = []
    for name in names:
        value = row.conditions.get(name)
        said = row.conditions.get("loop") == "original" and name in _OF_THE_LOOP
        if said or value is None or value == _USUAL.get(name):
            continue
        word = {"loop": f"{value} loop", "world_size": f"{value} processes"}.get(name)
        if isinstance(value, bool):
            word = name if value else f"no {name}"
        elif name in ("data", "arm", "device"):
            word = str(value)
        words.append(word or f"{name} {listed([value])}")
    return tuple(dict.fromkeys(words))


def _lengths(rows: Sequence[Row], of: str) -> list[Any]:
    """The different lengths that somebody noted."""
    return sorted({getattr(row, of) for row in rows} - {None})


def _with(rows: Sequence[Row], has: Callable[[Row], object]) -> list[Row]:
    if there := [row for row in rows if has(row)]:
        return there
    raise NothingToDraw("the results lack what this figure shows")


# ---- how they look -------------------------------------------------------------------------------

# A method has one colour in every figure, E1's names that of their arms; colour-blind readers can
# tell them apart.
_COLORS = {"fp32": "#000000", "tf32": "#7F7F7F", "amp-fp16": "#E69F00", "amp-bf16": "#8A6D3B"}
_COLORS |= {"O0": "#56B4E9", "O1": "#009E73", "O2": "#D55E00", "O3": "#CC79A7", "O4": "#6A3D9A"}
_COLORS |= {"O5": "#0072B2", "FP32": "#000000", "FP16": "#D55E00", "fp16": "#D55E00"}
_COLORS |= {"amp": "#009E73"}
_OTHER_COLORS = ("#B15928", "#1B5E20", "#AD1457", "#455A64", "#827717")
_GPU_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 3)), (0, (8, 2, 2, 2)))
_MARKERS = "os^Dv<>ph"


def colors_of(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name; no two the same as long as there are enough."""
    others = itertools.cycle(_OTHER_COLORS)
    return {name: _COLORS.get(name) or next(others) for name in dict.fromkeys(names)}


def styles_of(drawn: Sequence[Line]) -> list[dict[str, Any]]:
    """Colour is the GPU's and dash the method's; with one GPU both are the method's."""
    gpus, names = _gpus(drawn), list(dict.fromkeys(line.name for line in drawn))
    colors, styles = colors_of(names), []
    for line in drawn:
        gpu, name = gpus.index(line.gpu), names.index(line.name)
        color = _GPU_COLORS[gpu % len(_GPU_COLORS)] if len(gpus) > 1 else colors[line.name]
        marker = _MARKERS[(gpu if len(gpus) > 1 else name) % len(_MARKERS)]
        dash = _DASHES[name % len(_DASHES)]
        styles.append({"color": color, "linestyle": dash, "marker": marker, "markersize": 5})
    return styles


def make_panels(titles: Sequence[str | None], columns: int = 2) -> tuple[Figure, list[Axes]]:
    """A figure of so many axes, with their `titles` if there are several."""
    count = len(titles)
    columns = min(count, columns)
    height = 3.8 if count == 1 else 0.5 + 2.5 * -(-count // columns)
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    cells = list(figure.subplots(-(-count // columns), columns, squeeze=False).flat)
    for axes in cells[count:]:
        axes.remove()
    for axes, title in zip(cells, titles, strict=False):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
        if count > 1:
            axes.set_title(textwrap.fill(title or "", 80 // columns), fontsize=9)
    return figure, cells[:count]


def finish(figure: Figure, *all_axes: Axes, gpus: Sequence[str], title: str) -> Figure:
    """`figure` with a title and a legend below the axes, where it hides nothing; a single GPU is
    named once, above the legend."""
    figure.suptitle(textwrap.fill(title, 84), fontsize=10)
    alone = gpus[0] if len(gpus) == 1 else ""
    by_label: dict[str, Any] = {}
    for axes in all_axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            by_label.setdefault(textwrap.fill(label.removeprefix(f"{alone} "), 44), handle)
    longest = max(len(part) for label in by_label for part in label.split("\n"))
    # Of several GPUs, each has a column, if there is room for its labels.
    columns = min(max(1, int(100 / (longest + 9))), len(by_label), max(len(gpus), 4 * bool(alone)))
    look = {"loc": "outside lower center", "frameon": False, "handlelength": 3.6, **_SMALL}
    look |= {"title": textwrap.fill(alone, 80), "title_fontsize": 8, "ncols": max(1, columns)}
    figure.legend(by_label.values(), by_label.keys(), **look)
    figure.set_figheight(figure.get_figheight() + 0.2 * (-(-len(by_label) // max(1, columns)) + 1))
    return figure


def draw_bars(axes: Axes, cells: Mapping[tuple[Any, str], Stat | None], std: bool = False) -> None:
    """Bars in groups: `cells` has a value for (group, name), None for one that diverged."""
    groups = list(dict.fromkeys(group for group, _ in cells))
    colors = colors_of(name for _, name in cells)
    width = 0.84 / len(colors)
    letters = {"fontsize": 6.5, "rotation": 90 if len(groups) * len(colors) > 12 else 0}
    for place, (name, color) in enumerate(colors.items()):
        offset = (place - (len(colors) - 1) / 2) * width
        there = {x + offset: cells[g, name] for x, g in enumerate(groups) if (g, name) in cells}
        for x in (x for x, stat in there.items() if stat is None):
            text = f"  {name.split(' (')[0]} diverged"
            axes.text(x, 0, text, ha="center", va="bottom", fontsize=6.5, rotation=90)
        sound = {x: stat for x, stat in there.items() if stat}
        errors = [stat.std or 0.0 for stat in sound.values()] if std else None
        if heights := [stat.mean for stat in sound.values()]:
            look = {"label": name, "color": color, "capsize": 2}
            bars = axes.bar(list(sound), heights, width * 0.92, yerr=errors, **look)
            axes.bar_label(bars, fmt=_brief, padding=2.5, **letters)
    room = int(75 / len(groups))  # letters
    axes.set_xticks(range(len(groups)), [textwrap.fill(str(group), room) for group in groups])
    axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.2)  # room for the numbers


def _brief(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


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
    return list(dict.fromkeys(line.gpu for line in drawn))


# ---- the five figures ----------------------------------------------------------------------------


def time_against_batch(rows: Sequence[Row], *, std: bool = False, of: str = "iterations") -> Figure:
    """Training time against batch size, a line per GPU and method; bars if there is one batch size.

    `std` shows the sample standard deviation of the repeats as error bars. `of` is what the runs of
    a line must have the same number of, "iterations" or "epochs": else this raises ResultsError.
    """
    lengths = _lengths(rows, of)
    length = f" of {listed(lengths)} {of}" if len(lengths) == 1 else ""
    return _against_batch(rows, "time_s", f"training time{length}", "s", std, of)


def memory_against_batch(
    rows: Sequence[Row], *, std: bool = False, of: str = "iterations"
) -> Figure:
    """Memory against batch size, in MB of 10^6 bytes; else as :func:`time_against_batch`."""
    kinds = {run["memory_kind"] for row in rows for run in row.runs}
    what = "memory of the process" if kinds == {"process RSS"} else "device memory"
    return _against_batch(rows, "memory_mb", what, "MB", std, of)


def _against_batch(
    rows: Sequence[Row], field: str, what: str, unit: str, std: bool, of: str
) -> Figure:
    stat = operator.attrgetter(field)
    there = _with(rows, lambda row: stat(row) and row.batch_size)
    batches = sorted({row.batch_size for row in there})
    figure, (axes,) = make_panels([None])
    axes.set_xlabel("batch size")
    if len(batches) > 1:
        drawn = lines(there, of)
        for line, style in zip(drawn, styles_of(drawn), strict=True):
            sizes, values = [row.batch_size for row in line.rows], [stat(row) for row in line.rows]
            errors = [value.std or 0.0 for value in values] if std else None
            look = {"label": line.label, "capsize": 2, **style}
            axes.errorbar(sizes, [value.mean for value in values], yerr=errors, **look)
        axes.set_xscale("log", base=2)
        upright = {"rotation": 90 if len(batches) > 8 else 0}
        axes.set_xticks(batches, [str(batch) for batch in batches], **upright)
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        drawn = lines([row for row in rows if stat(row) or row.diverged], of)
        groups = [line.gpu if len(_gpus(drawn)) > 1 else batches[0] for line in drawn]
        keys = [(group, line.name) for group, line in zip(groups, drawn, strict=True)]
        draw_bars(axes, dict(zip(keys, [stat(line.rows[0]) for line in drawn], strict=True)), std)
    axes.set_ylabel(f"{what}, {unit}")
    axes.set_ylim(bottom=0)
    title = f"{title_of(rows)}: {what}{_at(batches)}" + ", mean ± standard deviation" * std
    return finish(figure, axes, gpus=_gpus(drawn), title=title)


def _at(batches: Sequence[int]) -> str:
    return f", batch size {batches[0]}" if len(batches) == 1 else ""


def speedup(rows: Sequence[Row], *, of: str = "iterations") -> Figure:
    """How many times as fast as FP32 each method is: bars per batch size, a panel per GPU.

    Compared are mean times per iteration. All bars of a GPU and batch size have one yardstick, the
    tuned FP32 run on the same data; O0 where FP32 was not run. The axis names it.
    """
    rows = _with(rows, lambda row: row.batch_size and (row.time_s or row.diverged))
    cells: dict[str, dict[tuple[Any, str], Stat | None]] = {}
    bases = {}
    for line in lines(rows, of):
        for row in line.rows:
            base = _baseline(row, rows)
            if base and base is not row:
                bases[base.method] = None
                step_s, key = _step_s(row), (row.batch_size, line.name)
                ratio = Stat(_step_s(base) / step_s) if step_s else None
                cells.setdefault(line.gpu, {})[key] = ratio
    if not cells:
        raise NothingToDraw("no method beside FP32 on the same GPU at the same batch size")
    figure, panels = make_panels(list(cells), columns=1)
    for axes, of_gpu in zip(panels, cells.values(), strict=True):
        axes.axhline(1.0, color="black", linewidth=0.8, zorder=0.9)  # behind the bars
        draw_bars(axes, dict(sorted(of_gpu.items(), key=lambda cell: cell[0][0])))
        axes.set_ylabel(f"speed, times {' or '.join(bases)}")
    panels[-1].set_xlabel("batch size")
    title = f"{title_of(rows)}: speed-up of the training step"
    return finish(figure, *panels, gpus=list(cells), title=title)


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


def accuracy_against_time(rows: Sequence[Row], *, of: str = "iterations") -> Figure:
    """Test accuracy against training time; means over repeats. A panel per batch size."""

    def draw(axes: Axes, line: Line, row: Row, style: dict[str, Any]) -> None:
        axes.plot(*zip(*_accuracy_course(row), strict=True), label=line.label, **style)
        axes.set(xlabel="training time, s", ylabel="test accuracy, %")

    figure = _by_batch(_with(rows, _accuracy_course), of, "test accuracy", draw)
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

    scaled = _with(rows, lambda row: any(line["loss_scale"] != 1.0 for line in _scales(row)))
    return _by_batch(scaled, of, "loss scale (crosses: overflows, steps skipped)", draw)


_scale_at = operator.itemgetter("step", "loss_scale")


def _scales(row: Row) -> list[dict[str, Any]]:
    log = row.runs[0]["intervals"] if row.runs else []
    return [line for line in log if line["loss_scale"] is not None]


def _by_batch(rows: Sequence[Row], of: str, what: str, draw: Callable[..., None]) -> Figure:
    """A panel per batch size, where `draw` draws the row of each line."""
    drawn = lines(rows, of)
    batches = sorted({row.batch_size for row in rows if row.batch_size})
    figure, all_axes = make_panels([f"batch size {batch}" for batch in batches])
    for axes, batch in zip(all_axes, batches, strict=True):
        for line, style in zip(drawn, styles_of(drawn), strict=True):
            for row in (row for row in line.rows if row.batch_size == batch):
                draw(axes, line, row, style)
    title = f"{title_of(rows)}: {what}{_at(batches)}"
    return finish(figure, *all_axes, gpus=_gpus(drawn), title=title)
