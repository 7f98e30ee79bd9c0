"""A stand-in for torch's CUDA graphs, on the CPU."""

from __future__ import annotations

import contextlib
from unittest.mock import Mock

import torch

from ampfuse import graphs


class StandIn:
    """CUDA graphs on the CPU.

    Capturing runs the step and takes back what it wrote, as if nothing had been computed. A replay
    runs it with the parameter groups of the time of the capture, and what they read on the device,
    which is all that a graph knows of them, and sees that everything is where it was then.
    """

    def __init__(self) -> None:
        self.replays = 0

    def take_over(self, monkeypatch) -> None:
        def capture(call, *tensors):
            self.call = call
            original(call, *tensors)

        original = graphs.GraphedCall.capture
        monkeypatch.setattr(graphs.GraphedCall, "capture", capture)
        monkeypatch.setattr(graphs, "_check_device", lambda device: None)
        for name, instead in {
            "Stream": Mock(),
            "current_stream": Mock(),
            "stream": contextlib.nullcontext,
            "device": contextlib.nullcontext,
            "CUDAGraph": lambda: Graph(self),
            "graph": lambda graph, **_: graph.captured(self.call),
        }.items():
            monkeypatch.setattr(torch.cuda, name, instead)


class Graph:
    def __init__(self, stand_in: StandIn) -> None:
        self.stand_in = stand_in

    @contextlib.contextmanager
    def captured(self, call):
        self.call, self.step = call, call._call.__self__
        optimizer = self.step._optimizer
        self.groups = [dict(group) for group in optimizer.param_groups]
        self.on_device = optimizer._on_device
        memory = self.memory()
        self.addresses = [tensor.data_ptr() for tensor in memory]
        saved = [tensor.detach().clone() for tensor in memory]
        yield
        for tensor, value in zip(memory, saved, strict=True):
            tensor.data.copy_(value)

    def memory(self):
        """What the captured step reads or writes."""
        step, optimizer = self.step, self.step._optimizer
        captured = step._captured
        states = [sorted(optimizer.state[p].items()) for p in captured.params]
        states = [value for items in states for name, value in items if name != "step"]
        return [
            *captured.params,
            *captured.leaves,
            *step._buffers.values(),
            *step._scaling_tensors(),
            *(value for value in states if isinstance(value, torch.Tensor)),
            optimizer._rows.table.steps(),
            optimizer._rows.table.norm_averages(),
            captured.step_state(),
        ]

    def replay(self) -> None:
        self.stand_in.replays += 1
        assert [tensor.data_ptr() for tensor in self.memory()] == self.addresses
        optimizer = self.step._optimizer
        groups = [dict(group) for group in optimizer.param_groups]
        stepped = getattr(optimizer, "_opt_called", False)
        self._set(self.groups, self.on_device)
        # A graph does not see edits of weights, and the host does not see the graph's.
        optimizer._rows.table.masters.accept_model_weights()
        try:
            with torch.autograd._unsafe_preserve_version_counter(tuple(self.memory())):
                results = self.call._call(*self.call._tensors)
        finally:
            self._set(groups, None)
            optimizer._opt_called = stepped  # the host called no step
        for static, result in zip(self.call._results, results, strict=True):
            static.data.copy_(result)

    def _set(self, groups, on_device):
        optimizer = self.step._optimizer
        optimizer._on_device = on_device
        optimizer._hypers.forget()
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
