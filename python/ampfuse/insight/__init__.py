"""What goes on inside a mixed-precision training, in words and numbers.

``doctor``             where the time goes, and what would pay (:mod:`.diagnosis`)
``advise``             which level to train at (:mod:`.advice`)
``memory_report``      what a training holds, in each mode (:mod:`.memory`)
``optimizer.meter``    what half precision does to each tensor's steps (:mod:`.meter`)
``explain_overflow``   where the first inf or NaN of a step was born, and what helps
"""

from __future__ import annotations

import ampfuse.amp  # noqa: F401  # first, as it exports from here
from ampfuse.insight.advice import Advice, advise
from ampfuse.insight.diagnosis.session import doctor
from ampfuse.insight.explanation import Explanation
from ampfuse.insight.memory import MemoryReport, memory_report
from ampfuse.insight.meter import Meter, TensorReading, exponent_edges
from ampfuse.insight.meter_advice import Finding
from ampfuse.insight.overflow import OverflowWatch, explain_overflow

__all__ = [
    "Advice",
    "Explanation",
    "Finding",
    "MemoryReport",
    "Meter",
    "OverflowWatch",
    "TensorReading",
    "advise",
    "doctor",
    "explain_overflow",
    "exponent_edges",
    "memory_report",
]
