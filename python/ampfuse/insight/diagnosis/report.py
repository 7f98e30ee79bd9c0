"""What the doctor found: numbers for programs, a table for a terminal, one HTML page for people."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ampfuse.files import atomic

SHOWN_ADVICE = 3


@dataclass(frozen=True)
class Share:
    """Time of one kind of work in a step. `detail` tells kinds of matrix work apart."""

    kind: str
    label: str
    ms: float
    share: float
    detail: str = ""


@dataclass(frozen=True)
class OperationRow:
    """Calls of one operation on the same shapes, in a step."""

    name: str
    kind: str
    detail: str
    shapes: str
    calls: float
    ms: float


@dataclass(frozen=True)
class WaitRow:
    """A line of the script that waits for a GPU (on a CPU: that would)."""

    call: str
    line: str
    calls: float
    ms: float


@dataclass(frozen=True)
class Advice:
    """A change, and how much faster the whole step gets by it.

    `gain` is the time of a step now over that with the change. `basis` says where it is from:
    "measured" on the script's shapes here, or "at most", if what it removes costs nothing more.
    """

    title: str
    how: str
    gain: float
    basis: str


@dataclass
class Report:
    """The doctor's findings. Times are of one step without the profiler, in milliseconds.

    Attributes:
        script: what was run.
        problem: why there are no findings, in one line; None if there are.
        hardware, versions: what the numbers hold for.
        steps: how many were timed, and profiled after that.
        step_ms: mean of the timed steps; `fastest_ms` and `slowest_ms` are their range.
        profiled_ms: mean of the profiled ones, which the profiler slows.
        queued: the share of the timed steps in which one of the threads or workers was ready to run
            and had no core, 0 to 1. Above 0.1 `sentence` says so.
        shares: where the time goes, by kinds of work; they sum up to `step_ms`.
        operations: those that take most, first.
        waits: lines of the script that wait for the device.
        notes: further findings: shapes, layouts, types.
        verdict: the kind of work (``kinds.LABELS``) that decides, and ...
        sentence: ... what that means, in words.
        half_limit: no half precision can make the step more than so many times as fast; `bound`
            says why.
        advice: what would pay, in the order of gain.
        strip: one step, as (begin, end, kind) in milliseconds.
    """

    script: str = ""
    problem: str | None = "nothing was measured yet"
    hardware: str = ""
    versions: str = ""
    steps: int = 0
    step_ms: float = 0.0
    fastest_ms: float = 0.0
    slowest_ms: float = 0.0
    profiled_ms: float = 0.0
    queued: float = 0.0
    shares: list[Share] = field(default_factory=list)
    operations: list[OperationRow] = field(default_factory=list)
    waits: list[WaitRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    verdict: str = ""
    sentence: str = ""
    half_limit: float = 1.0
    bound: str = ""
    advice: list[Advice] = field(default_factory=list)
    strip: list[tuple[float, float, str]] = field(default_factory=list)

    def share_of(self, *kinds: str) -> float:
        """The share of the step, 0 to 1, of all work of `kinds`."""
        return sum(share.share for share in self.shares if share.kind in kinds)

    @property
    def conditions(self) -> str:
        """How long a step takes, how that was measured, and on what."""
        return (
            f"{self.step_ms:.1f} ms a step (mean of {self.steps}, {self.fastest_ms:.1f} to "
            f"{self.slowest_ms:.1f}); {self.profiled_ms:.1f} under the profiler, whose shares are "
            f"scaled to the former. {self.hardware}; {self.versions}"
        )

    def save_html(self, path: str | Path) -> None:
        """Write the report to `path` as one HTML file that needs nothing else.

        Raises:
            RuntimeError: there are no findings. The message says why.
            OSError: `path` cannot be written.
        """
        from ampfuse.insight.diagnosis.page import as_html

        if self.problem:
            raise RuntimeError(f"no report to save: {self.problem}")
        with atomic(Path(path)) as file:
            file.write(as_html(self).encode())

    def __str__(self) -> str:
        if self.problem:
            return f"ampfuse doctor: {self.problem}"
        lines = [f"{self.script}: {self.sentence}", "", self.conditions, ""]
        width = max(len(share.label) for share in self.shares)
        for share in self.shares:
            if share.share < 0.0005:
                continue
            bar = "#" * round(30 * share.share)
            lines.append(f"  {share.label:{width}} {share.share:6.1%} {share.ms:9.2f} ms  {bar}")
        lines += ["", self.bound]
        pays = self.advice[:SHOWN_ADVICE]
        lines += ["", "What pays most:"] if pays else []
        for place, one in enumerate(pays, 1):
            lines.append(f"  {place}. {one.gain:.2f}x {one.basis}: {one.title}")
            lines.append(f"     {one.how}")
        lines += ["", "Also:"] if self.waits or self.notes else []
        for wait in self.waits:
            lines.append(f"  {wait.line}  {wait.call}: waits {wait.calls:g} times a step")
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)
