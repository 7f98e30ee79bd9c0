"""Examines a training from outside: where its time goes, and which level to train at.

``examine``  reports where the time goes and what would help: ``with examine() as report:``
``advise``   trains copies at each level and recommends one

``watch`` times and profiles some steps for ``examine``, ``profile`` sums the time by kinds of work,
and ``report`` has the rules of advice. ``levels`` has ``advise``.
"""

from __future__ import annotations

from ampfuse.doctor.levels import Advice, advise
from ampfuse.doctor.report import Report, examine

__all__ = ["Advice", "Report", "advise", "examine"]
