"""Reports about a mixed-precision training.

====================  ===========================================================
``optimizer.meter``   lost updates and gradient underflow of each tensor
``explain_overflow``  the origin of a step's first inf or NaN, and a fix
``memory_report``     the memory that a training holds now, by kind
``plan``              the memory that it would need at each level and in each mode
====================  ===========================================================

For where the time goes, and which level to train at, see :mod:`ampfuse.doctor`.

In this folder ``meter.py``, ``memory.py`` (the report) and ``memory_plan.py`` (the plan; it counts
with ``live_memory.py``) each have one report. The explanation of an overflow takes four files:
``overflow.py`` watches steps, ``tracker.py`` follows inf and NaN through one, ``operations.py`` has
what it asks of a single operation, and ``explanation.py`` the result and its suggestions.
``reporting.py`` is shared.
"""

from __future__ import annotations

from ampfuse.insight.explanation import Explanation
from ampfuse.insight.memory import MemoryReport, memory_report
from ampfuse.insight.memory_plan import Plan, plan
from ampfuse.insight.meter import Meter, TensorReading
from ampfuse.insight.overflow import OverflowWatch, explain_overflow
from ampfuse.insight.reporting import Finding

__all__ = [
    "Explanation",
    "Finding",
    "MemoryReport",
    "Meter",
    "OverflowWatch",
    "Plan",
    "TensorReading",
    "explain_overflow",
    "memory_report",
    "plan",
]
