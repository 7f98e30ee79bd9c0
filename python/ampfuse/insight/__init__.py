"""What goes on inside a mixed-precision training, in words and numbers.

``explain_overflow``   where the first inf or NaN of a step was born, and what helps
"""

from __future__ import annotations

import ampfuse.amp  # noqa: F401  # first, as it exports from here
from ampfuse.insight.explanation import Explanation
from ampfuse.insight.overflow import OverflowWatch, explain_overflow

__all__ = ["Explanation", "OverflowWatch", "explain_overflow"]
