"""Looks at a training from outside: where its time goes, and which level to train at.

``examine``  says where the time goes, and what would pay: ``with examine() as report:``
``advise``   trains copies at each level and recommends one

``watch`` times and profiles some steps for ``examine``, ``profile`` sums the time by kinds of work,
and ``report`` says what would pay. ``levels`` has ``advise``.
"""

from __future__ import annotations

from ampfuse.doctor.levels import Advice, advise
from ampfuse.doctor.report import Report, examine

__all__ = ["Advice", "Report", "advise", "examine"]
