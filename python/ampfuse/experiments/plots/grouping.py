"""Which rows make a line (or the bars of one kind), what it is called, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ampfuse.experiments.results import ResultsError, Row


class NothingToDraw(ResultsError):
    """The rows lack what this figure shows."""


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
USUAL: Mapping[str, object] = {
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
    everywhere = [name for name in _MUST_BE_ALIKE if varies(rows, name)]
    sources = {row.source for row in rows}
    found = []
    for (source, gpu, method), together in _grouped(
        rows, lambda row: (row.source, row.gpu, row.method)
    ):
        at_one_batch = [same for _, same in _grouped(together, lambda row: row.batch_size)]
        names = dict.fromkeys(
            name
            for name in (*_OWN, *together[0].conditions)
            if (name in _OWN and varies(together, name))
            or any(varies(same, name) for same in at_one_batch)
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
    if len(lengths_of(rows, of)) > 1:
        for _, _, words, members in found:
            words += [f"{number(length)} {of}" for length in lengths_of(members, of)]
    gpus, methods = gpus_of(rows), list(dict.fromkeys(row.method for row in rows))
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


def varies(rows: Sequence[Row], name: str) -> bool:
    return len({row.conditions.get(name) for row in rows}) > 1


def _word(name: str, value: object) -> str:
    """What a line's name says of one condition: "graph", "original loop", "lr 0.1"."""
    if value is None or (name in USUAL and value == USUAL[name]):
        return ""
    if name in ("data", "arm", "optimizer", "device"):
        return str(value)
    if isinstance(value, bool):
        return name if value else f"no {name}"
    if name == "loop":
        return f"{value} loop"
    if name == "world_size":
        return f"{value} processes"
    return f"{name} {number(value)}"


def _named(method: str, words: Sequence[str]) -> str:
    return f"{method} ({', '.join(words)})" if words else method


def _refuse_mixed(label: str, rows: Sequence[Row], of: str) -> None:
    counts = lengths_of(rows, of)
    if len(counts) < 2:
        return
    options = {"iterations": "--iteration N", "epochs": "--epochs N"}
    epochs = lengths_of(rows, "epochs")
    choose = options[of]
    if of == "iterations" and len(epochs) == 1:
        choose += f" or --epochs {number(epochs[0])}"
    raise ResultsError(
        f"{label} of {rows[0].model} has runs of {', '.join(map(number, counts))} {of}, which do "
        f"not go into one line: choose with {choose}"
    )


def lengths_of(rows: Sequence[Row], of: str) -> list[Any]:
    """The different lengths; rows that diverged, or of which nobody knows it, have none."""
    return sorted({getattr(row, of) for row in rows} - {None})


def number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def gpus_of(rows: Iterable[Row | Line]) -> list[str]:
    return list(dict.fromkeys(row.gpu for row in rows))
