"""The figures, drawn from rows (:mod:`results`). Each function returns a matplotlib ``Figure``.

    from ampfuse.experiments import plots, results
    plots.time_against_batch(results.measured("results"))

All rows of a figure are of one model. A line, or the bars of one kind, is one GPU and method, and
whatever else two rows differ in (a captured graph, say) makes two lines of them and goes into their
names. What could not be compared within a line, runs of different length, is refused.
"""

from ampfuse.experiments.plots.figures import (
    accuracy_against_time,
    loss_scale,
    memory_against_batch,
    speedup,
    time_against_batch,
)
from ampfuse.experiments.plots.lines import NothingToDraw

__all__ = ["NothingToDraw", "accuracy_against_time", "loss_scale", "memory_against_batch"]
__all__ += ["speedup", "time_against_batch"]
