"""What goes on inside a mixed-precision training, in words and numbers.

====================  ===========================================================
``optimizer.meter``   what half precision does to each tensor's steps
``explain_overflow``  where the first inf or NaN of a step originated, and what helps
``memory_report``     what a training holds, in each mode
``plan``              whether a training fits, before anything is allocated
====================  ===========================================================

Where the time goes, and which level to train at: :mod:`ampfuse.doctor`.
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
