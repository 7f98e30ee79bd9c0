"""What the doctor found: numbers for programs, a table for a terminal."""

from __future__ import annotations

from dataclasses import dataclass, field

from ampfuse.doctor.trace import Event
from ampfuse.insight.findings import Finding


@dataclass(frozen=True)
class Share:
    """Time of one kind of work in a step. `detail` tells kinds of matrix work apart."""

    kind: str
    label: str
    ms: float
    share: float
    detail: str = ""


@dataclass
class Operation:
    """Calls of one operation with equal inputs, in a step.

    Attributes:
        event: one of the calls.
    """

    name: str
    kind: str
    event: Event
    calls: float = 0.0
    ms: float = 0.0

    @property
    def shapes(self) -> str:
        """Those of the tensors that it was given: ``"100x509, 509x1021"``."""
        dims = (dims for dims in self.event.dims if dims and all(isinstance(n, int) for n in dims))
        return ", ".join("x".join(map(str, sizes)) for sizes in dims)


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
        shares: where the time goes, by kinds of work; they sum up to `step_ms`.
        operations: those that take most, first.
        verdict: the kind of work (``kinds.LABELS``) that takes most, and ...
        sentence: ... that in words.
        half_limit: no half precision can make the step more than so many times as fast; `bound`
            says why.
        advice: what would pay, in the order of gain.
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
    shares: list[Share] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    verdict: str = ""
    sentence: str = ""
    half_limit: float = 1.0
    bound: str = ""
    advice: list[Finding] = field(default_factory=list)

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

    def __str__(self) -> str:
        if self.problem:
            return f"ampfuse doctor: {self.problem}"
        lines = [f"{self.script}: {self.sentence}", "", self.conditions, ""]
        width = max(len(share.label) for share in self.shares)
        for share in self.shares:
            if share.share >= 0.0005:
                bar = "#" * round(30 * share.share)
                lines.append(
                    f"  {share.label:{width}} {share.share:6.1%} {share.ms:9.2f} ms  {bar}"
                )
        lines += ["", "Operations that take most:"]
        for op in self.operations[:5]:
            lines.append(f"  {op.ms:9.2f} ms  {op.calls:g} x {op.name} {op.shapes}".rstrip())
        lines += ["", self.bound]
        lines += ["", "What pays most:"] if self.advice else []
        for place, one in enumerate(self.advice[:5], 1):
            lines += [f"  {place}. {one.found}: {one.kind}", f"     {one.remedy}"]
        return "\n".join(lines)
