"""Looks at a training from outside: where its time goes, and which level to train at.

``examine``  says where the time goes, and what would pay: ``with examine() as report:``
``advise``   trains copies at each level and recommends one

Of ``examine``: ``watch`` times and profiles some steps, ``trace`` reads the profile, ``timeline``
sums its time by the ``kinds`` of work, ``rules`` say what would pay, and ``report`` has it all. Of
``advise``: ``trainings`` are the copies, ``levels`` compares them.
"""

from __future__ import annotations

from ampfuse.doctor.levels import Advice, advise
from ampfuse.doctor.report import Report, examine

__all__ = ["Advice", "Report", "advise", "examine"]
