"""A training step as one CUDA graph: a single launch in place of hundreds.

PyTorch's whole-network capture, https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
What changes between steps (batch, learning rate, loss scale) is read from device memory that stays
in its place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Step = Callable[[Tensor, Tensor], tuple[Tensor, ...]]

# Lazy state (moments, workspaces, cuDNN's choices) has to exist before the capture. These first
# steps train like any other, but are launched one kernel at a time.
EAGER_STEPS = 3


class GraphedStep:
    """`step(inputs, targets)` captured at its fourth call and replayed from then on.

    All batches have to be of one shape. Results are the captured step's own tensors: the next call
    overwrites them.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        self._calls += 1
        if self._calls <= EAGER_STEPS:
            return self._aside(lambda: self._step(inputs, targets))
        if self._graph is None:
            self._inputs, self._targets = inputs.clone(), targets.clone()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._results = self._step(self._inputs, self._targets)
        else:
            self._inputs.copy_(inputs)
            self._targets.copy_(targets)
        self._graph.replay()  # capturing alone computes nothing
        return self._results

    def _aside(self, call: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """On the stream of the capture: autograd remembers which stream it ran on."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            results = call()
        torch.cuda.current_stream().wait_stream(self._stream)
        return results
