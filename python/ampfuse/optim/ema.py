"""Moving averages of the weights, which the fused step keeps in the pass that makes the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ampfuse.optim.shards import local
from ampfuse.optim.states import States


class Averages(States):
    """Mixin: weights and their averages change places."""

    @contextlib.contextmanager
    def swap_ema(self) -> Iterator[None]:
        """In the block the model has the averages of its weights, rounded to their type.

        Afterwards it has the weights again, with the same bits; masters never change. It takes a
        copy of the weights for the time of the block.

        Raises:
            RuntimeError: without ``ema_decay``, or within another such block. In the block a step
                raises one too, and so does what saves, loads, copies or looks at masters.
        """
        if self.ema_decay is None or self._swapped:
            what = "a swap_ema block is open already" if self._swapped else "there are no averages"
            raise RuntimeError(f"{what}; build the optimizer with ema_decay= and nest no blocks")
        table = self.param_table()
        self.keep_bound()
        table.refresh_masters()  # so that afterwards all there is counts as known
        saved = []
        with torch.no_grad():
            for row, param in enumerate(self._row_params):
                weight = table.param(row) if (model := table.model(row)) is None else model
                if (average := self.state.get(param, {}).get("ema")) is not None:
                    saved.append((weight, weight.detach().clone()))
                    weight.copy_(local(average))
        self._swapped = True
        try:
            yield
        finally:
            self._swapped = False
            with torch.no_grad():
                for weight, before in saved:
                    weight.copy_(before)
            table.accept_model_weights()
