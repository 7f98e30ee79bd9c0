"""The figures, drawn from rows (:mod:`results`). Each function returns a matplotlib ``Figure``.

    from ampfuse.experiments import figures, results
    figures.against_batch(results.measured("results"), "time")

All rows of a figure are of one model. A line is one GPU and method, and whatever else sets rows
apart (a captured graph, say) makes two lines of them and goes into their names. What could not be
compared within a line, runs of different length, is refused.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from ampfuse.command_line import UsageError
from ampfuse.experiments.results import METHODS, Row, listed

_WIDTH = 7.0  # inches: a notebook's column
_SMALL = {"fontsize": 8}


class NothingToDraw(UsageError):
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
_USUAL: dict[str, object] = {"world_size": 1, "loader": "resident"}
_USUAL |= {"channels_last": True, "cudnn_benchmark": True, "graph": False, "deterministic": False}
_MUST_BE_ALIKE = ("data", "kind", "image_size", "augment", "shuffle", *_USUAL)


def lines(rows: Sequence[Row]) -> list[Line]:
    """The lines that `rows`, of one model, make. Raises UsageError if the runs of one have neither
    iterations nor epochs in common."""
    models = _different(row["model"] for row in rows)
    if len(models) > 1:
        raise UsageError(f"rows of {', '.join(models)} in one figure: choose one with --model")
    everywhere = [name for name in _MUST_BE_ALIKE if _varies(rows, name)]
    parts = []
    for together in _grouped(rows, lambda row: (row["source"], row["gpu"], row["method"])):
        # What follows the batch size (a rate, say) sets none apart.
        at_one_batch = _grouped(together, lambda row: row["batch_size"])
        conditions = together[0]["conditions"]
        apart = [name for name in conditions if any(_varies(same, name) for same in at_one_batch)]
        names = [*everywhere, *apart]
        for members in _grouped(together, lambda row, names=names: str(_words(row, names))):
            parts.append((members, _words(members[0], names)))
    sources = _different(row["source"] for row in rows)
    lengths = _different(_length(members) for members, _ in parts)
    found = []
    for members, words in parts:
        first = members[0]
        words += [first["source"]] * (len(sources) > 1) + [_length(members)] * (len(lengths) > 1)
        name = first["method"] + f" ({', '.join(words)})" * bool(words)
        found.append(Line(first["gpu"], name, sorted(members, key=lambda row: row["batch_size"])))
    return found


def _length(rows: Sequence[Row]) -> str:
    """What the runs of a line have in common: "100 iterations", or else "2 epochs"."""
    different = []
    for unit in ("iterations", "epochs"):
        lengths = sorted({row[unit] for row in rows} - {None})
        different.append(f"{listed(lengths)} {unit}")
        if len(lengths) == 1:
            return different[-1]
    first = rows[0]
    raise UsageError(
        f"{first['gpu']} {first['method']} of {first['model']}: runs of different length "
        f"({'; '.join(different)}) do not go into one line: choose with --iteration N or --epochs N"
    )


def _different(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _grouped(rows: Sequence[Row], key: Callable[[Row], object]) -> list[list[Row]]:
    return [[row for row in rows if key(row) == one] for one in _different(map(key, rows))]


def _varies(rows: Sequence[Row], name: str) -> bool:
    return len({str(row["conditions"].get(name)) for row in rows}) > 1


def _words(row: Row, names: Sequence[str]) -> list[str]:
    """What a line's name says of these conditions: "graph", "workers loader", "lr 0.1"."""
    words, of = [], row["conditions"]
    for name in names:
        value = of.get(name)
        if value is None or value == _USUAL.get(name):
            continue
        if isinstance(value, bool):
            words.append(name if value else f"no {name}")
        else:
            words.append(_WORDS.get(name, f"{name} {{}}").format(listed([value])))
    return _different(words)


_WORDS = {"loader": "{} loader", "world_size": "{} processes"}
_WORDS |= dict.fromkeys(("data", "arm", "device"), "{}")


# ---- how they look -------------------------------------------------------------------------------

_DASHES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 3)), (0, (8, 2, 2, 2)))
_MARKERS = "os^Dv<>ph"


def styles_of(drawn: Sequence[Line]) -> list[dict[str, Any]]:
    """Colour is the GPU's and dash the method's; with one GPU both are the method's."""
    gpus, names = _different(line.gpu for line in drawn), _different(line.name for line in drawn)
    styles = []
    for line in drawn:
        dash = names.index(line.name)
        number = color = gpus.index(line.gpu) if len(gpus) > 1 else dash
        if len(gpus) == 1 and line.name in METHODS:  # one colour in every figure
            color = METHODS.index(line.name)
        style = {"color": f"C{color % 10}", "marker": _MARKERS[number % len(_MARKERS)]}
        styles.append({**style, "linestyle": _DASHES[dash % len(_DASHES)], "markersize": 5})
    return styles


def finish(figure: Figure, drawn: Sequence[Line], title: str) -> Figure:
    """`figure` with a title and a legend below the axes, where it hides nothing; a single GPU is
    named once, above the legend."""
    figure.suptitle(textwrap.fill(title, 84), fontsize=10)
    gpus = _different(line.gpu for line in drawn)
    alone = gpus[0] if len(gpus) == 1 else ""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    labels = [textwrap.fill(label.removeprefix(f"{alone} "), 44) for label in labels]
    longest = max(len(part) for label in labels for part in label.split("\n"))
    # Of several GPUs, each has a column, if there is room for its labels.
    columns = min(max(1, int(100 / (longest + 9))), len(labels), 4 if alone else len(gpus))
    look = {"loc": "outside lower center", "frameon": False, "handlelength": 3.6, **_SMALL}
    look |= {"title": textwrap.fill(alone, 80), "title_fontsize": 8, "ncols": columns}
    figure.legend(handles, labels, **look)
    figure.set_figheight(figure.get_figheight() + 0.2 * (-(-len(labels) // columns) + 1))
    return figure


def title_of(rows: Sequence[Row]) -> str:
    """What was trained on what, and whose figures these are."""
    own = [row for row in rows if row["source"] == "measured"]
    if not own:
        return f"{rows[0]['model']}, published figures"
    of = own[0]["conditions"]
    data = f"synthetic {of['kind']}" if of["data"] == "synthetic" else of["data"]
    alike = not _varies(own, "data") and not _varies(own, "kind")
    return f"{rows[0]['model']} on {data}" if alike else rows[0]["model"]


# ---- against batch size --------------------------------------------------------------------------


_KINDS = {"time": ("time_s", "training time", "s"), "memory": ("memory_mb", "device memory", "MB")}


def against_batch(rows: Sequence[Row], kind: str, *, std: bool = False) -> Figure:
    """Training "time", or "memory" in MB of 10^6 bytes, against batch size: a line per GPU and
    method; of one batch size, points over methods.

    `std` shows the sample standard deviation of the repeats as error bars.
    """
    figure_of, what, unit = _KINDS[kind]
    mean, rows = f"{figure_of}_mean", [row for row in rows if row["batch_size"]]
    batches = sorted({row["batch_size"] for row in rows if row[mean]})
    if not batches:
        raise NothingToDraw("the results lack what this figure shows")
    drawn = lines([row for row in rows if row[mean] or row["diverged"]])
    lengths = _different(_length(line.rows) for line in drawn)
    if kind == "time" and len(lengths) == 1:
        what += f" of {lengths[0]}"
    if kind == "memory" and {row["memory_kind"] for row in rows} == {"process RSS"}:
        what = "memory of the process"
    names = _different(line.name for line in drawn)
    figure = Figure(figsize=(_WIDTH, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    for line, style in zip(drawn, styles_of(drawn), strict=True):
        places = [row["batch_size"] if batches[1:] else names.index(line.name) for row in line.rows]
        points = [(x, row) for x, row in zip(places, line.rows, strict=True) if row[mean]]
        for x, row in zip(places, line.rows, strict=True):
            if not row[mean]:
                said = f"  {row['method']} diverged"
                axes.text(x, 0, said, rotation=90, va="bottom", fontsize=6.5)
        errors = [row[f"{figure_of}_std"] or 0.0 for _, row in points] if std else None
        look = {"label": line.label, "capsize": 2, **style}
        axes.errorbar([x for x, _ in points], [row[mean] for _, row in points], yerr=errors, **look)
    if len(batches) > 1:
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, batches, rotation=90 if len(batches) > 8 else 0)
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xticks(range(len(names)), names, rotation=90 if len(names) > 6 else 0, **_SMALL)
        axes.margins(x=0.1)
    axes.set(xlabel="batch size" if len(batches) > 1 else "", ylabel=f"{what}, {unit}")
    axes.set_ylim(0, 1.05 * axes.dataLim.y1)  # room for the marker and cap at the top
    at = f", batch size {batches[0]}" if len(batches) == 1 else ""
    title = f"{title_of(rows)}: {what}{at}" + ", mean ± standard deviation" * std
    return finish(figure, drawn, title)
