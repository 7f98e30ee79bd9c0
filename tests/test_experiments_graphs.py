"""The captured training step: its bookkeeping with a stand-in for CUDA, and on a GPU itself."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("timm")
pytest.importorskip("tqdm")

from ampfuse.experiments import mnist
from ampfuse.experiments.data import open_data
from ampfuse.experiments.run import Place, Run
from ampfuse.experiments.settings import ARMS, Settings
from ampfuse.graphs import EAGER_CALLS, GraphedCall

SETTINGS = Settings(
    experiment="mnist",
    model="mnist_cnn",
    batch_size=32,
    lr=1e-3,
    image_size=28,
    iterations=20,
    dropout=0.0,
    schedule="linear",
    evaluate=False,
    print_freq=6,
    synthetic_size=256,
    cudnn_benchmark=False,
    deterministic=True,
)


class FakeGraph:
    """Keeps what the body of ``torch.cuda.graph`` computed from, and computes it again in place."""

    def __init__(self, recorder: list) -> None:
        self.recorder, self.replays = recorder, 0

    def replay(self) -> None:
        self.replays += 1
        call, results = self.recorder[-1]
        for result, value in zip(results, call(), strict=True):
            result.copy_(value)


@pytest.fixture
def fake_cuda(monkeypatch):
    recorder: list = []

    class Stream:
        def wait_stream(self, other: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(recorder))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: contextlib.nullcontext())
    return recorder


def test_every_batch_is_trained_on_once(fake_cuda):
    """Three eager calls, one capture that computes nothing by itself, then replays."""
    seen, capturing = [], [False]

    def step(inputs, targets):
        if capturing[0]:  # kernels of a capture are recorded, not run
            results = (torch.zeros(()),)

            def compute():
                seen.append((inputs.clone(), targets.clone()))
                return (inputs.sum() + targets.sum(),)

            fake_cuda.append((compute, results))
            return results
        seen.append((inputs.clone(), targets.clone()))
        return (inputs.sum() + targets.sum(),)

    graphed = GraphedCall(step)
    batches = [(torch.randn(4, 2), torch.randn(4)) for _ in range(8)]
    for i, (inputs, targets) in enumerate(batches):
        capturing[0] = i == EAGER_CALLS
        (result,) = graphed(inputs, targets)
        assert torch.equal(result, inputs.sum() + targets.sum())
    assert len(seen) == 8
    for (inputs, targets), (a, b) in zip(batches, seen, strict=True):
        assert torch.equal(inputs, a)
        assert torch.equal(targets, b)
    assert graphed._graph.replays == 8 - EAGER_CALLS


@pytest.mark.gpu
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_captured_steps_train_like_eager_ones(arm, optimizer):
    if arm == "tf32" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no TF32")
    device, runs = torch.device("cuda", 0), []
    for graph in (False, True):
        settings = dataclasses.replace(SETTINGS, arm=arm, optimizer=optimizer, graph=graph)
        runs.append(Run(settings, open_data(settings, device), Place(device, quiet=True)))
        mnist.train(runs[-1])
    eager, graphed = runs
    assert graphed.record.losses == pytest.approx(eager.record.losses, rel=1e-3)
    assert graphed.record.skipped_steps == eager.record.skipped_steps
    assert len(graphed.record.step_ms) == SETTINGS.iterations - EAGER_CALLS - 1
    result = graphed.result()
    assert result["memory_kind"] == "max_memory_allocated"
    assert 0 < result["memory_mb"] < 8192
