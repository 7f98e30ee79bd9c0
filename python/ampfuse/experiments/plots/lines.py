"""Which rows make a line (or the bars of one kind), what it is called, and what is refused."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from ampfuse.experiments.results import ResultsError, Row, listed


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
    """The lines that `rows`, of one model, make. The runs of one have the same number `of`
    "iterations" or "epochs"; else this raises ResultsError."""
    if not rows:
        raise NothingToDraw("no rows to draw")
    models = list(dict.fromkeys(row.model for row in rows))
    if len(models) > 1:
        raise ResultsError(f"rows of {', '.join(models)} in one figure: choose one with --model")
    everywhere = [name for name in _MUST_BE_ALIKE if varies(rows, name)]
    gpus, methods = gpus_of(rows), list(dict.fromkeys(row.method for row in rows))
    several_sources = len({row.source for row in rows}) > 1
    several_lengths = len(lengths_of(rows, of)) > 1
    found = []
    for together in _grouped(rows, lambda row: (row.source, row.gpu, row.method)):
        names = _naming(together, everywhere)
        for members in _grouped(together, lambda row, names=names: _values(row, names)):
            row, lengths = members[0], lengths_of(members, of)
            words = _words(dict(zip(names, _values(row, names), strict=True)))
            words += [row.source] if several_sources else []
            if len(lengths) > 1:
                epochs = lengths_of(members, "epochs")
                also = f" or --epochs {listed(epochs)}" if len(epochs) == 1 else ""
                choose = "--epochs N" if of == "epochs" else f"--iteration N{also}"
                raise ResultsError(
                    f"{row.gpu} {_with_words(row.method, words)} of {row.model} has runs of "
                    f"{listed(lengths)} {of}, which do not go into one line: choose with {choose}"
                )
            words += [f"{listed([length])} {of}" for length in lengths if several_lengths]
            members.sort(key=lambda row: row.batch_size or 0)
            place = (gpus.index(row.gpu), methods.index(row.method), len(words))
            found.append((place, Line(row.gpu, _with_words(row.method, words), tuple(members))))
    return [line for _, line in sorted(found, key=operator.itemgetter(0))]


def _naming(together: Sequence[Row], everywhere: Sequence[str]) -> list[str]:
    """The conditions that set rows of one GPU and method apart, or all rows.

    What follows the batch size (a rate, say) sets none apart: it may differ between two of them.
    """
    at_one_batch = _grouped(together, lambda row: row.batch_size)
    apart = [
        name
        for name in dict.fromkeys((*_OWN, *together[0].conditions))
        if (name in _OWN and varies(together, name))
        or any(varies(same, name) for same in at_one_batch)
    ]
    return list(dict.fromkeys((*everywhere, *apart)))


def _grouped(rows: Sequence[Row], key: Callable[[Row], Hashable]) -> list[list[Row]]:
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def _values(row: Row, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(row.conditions.get(name) for name in names)


def varies(rows: Sequence[Row], name: str) -> bool:
    return len({row.conditions.get(name) for row in rows}) > 1


def _words(differing: Mapping[str, Any]) -> list[str]:
    said = _OF_THE_LOOP if differing.get("loop") == "original" else ()
    words = (_word(name, value) for name, value in differing.items() if name not in said)
    return [word for word in words if word]


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
    return f"{name} {listed([value])}"


def _with_words(method: str, words: Sequence[str]) -> str:
    return f"{method} ({', '.join(words)})" if words else method


def lengths_of(rows: Sequence[Row], of: str) -> list[Any]:
    """The different lengths; rows that diverged, or of which nobody knows it, have none."""
    return sorted({getattr(row, of) for row in rows} - {None})


def gpus_of(rows: Sequence[Row | Line]) -> list[str]:
    return list(dict.fromkeys(row.gpu for row in rows))


def rows_with(rows: Sequence[Row], has: Callable[[Row], object]) -> list[Row]:
    there = [row for row in rows if has(row)]
    if not there:
        raise NothingToDraw("the results lack what this figure shows")
    return there
