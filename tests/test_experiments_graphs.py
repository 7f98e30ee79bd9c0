"""The captured training step: its bookkeeping with a stand-in for CUDA, and on a GPU itself."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("timm")
pytest.importorskip("rich")
pytest.importorskip("tqdm")

from ampfuse.experiments.config import ARMS, RunConfig
from ampfuse.experiments.distributed import World
from ampfuse.experiments.signals import StopWish
from ampfuse.experiments.tasks import TASKS
from ampfuse.experiments.training import Place, Training
from ampfuse.graphs import EAGER_CALLS, GraphedCall
from ampfuse.measuring import ProcessMemory

CONFIG = RunConfig(
    experiment="mnist",
    model="mnist_cnn",
    data="synthetic",
    arm="O2",
    method="O2",
    recipe=None,
    batch_size=32,
    optimizer="adam",
    lr=1e-3,
    image_size=28,
    iterations=20,
    dropout=0.0,
    schedule="linear",
    evaluate=False,
    print_freq=6,
    synthetic_size=256,
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


def train(config: RunConfig, device: torch.device) -> Training:
    place = Place(device, World(), None, StopWish())
    data = TASKS[config.experiment].open_data(config, device, World())
    training = Training(config, data, place, "run")
    training.ended = training.run()
    return training


@pytest.mark.gpu
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_captured_steps_train_like_eager_ones(arm, optimizer):
    if arm == "tf32" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no TF32")
    device = torch.device("cuda", 0)
    config = dataclasses.replace(CONFIG, arm=arm, optimizer=optimizer, deterministic=True)
    config = dataclasses.replace(config, cudnn_benchmark=False)
    eager = train(config, device)
    graphed = train(dataclasses.replace(config, graph=True), device)
    assert graphed.record.losses == pytest.approx(eager.record.losses, rel=1e-3)
    assert graphed.record.skipped_steps == eager.record.skipped_steps
    measured = graphed.ended
    assert measured.timed_iterations == config.iterations - EAGER_CALLS - 1
    assert measured.kernels["convolution"] == "cudnn"
    assert measured.memory_kind == "max_memory_allocated"
    assert 0 < measured.memory_bytes < 2**33


def test_memory_of_a_run_is_its_own():
    """The peak of an earlier run is forgotten."""
    memory = ProcessMemory(torch.device("cpu"))
    memory.release()
    memory.start()
    before = memory.peak()
    block = torch.ones(64 << 20)  # 256 MiB
    with_block = memory.peak()
    del block
    memory.release()
    memory.start()
    assert with_block - before > 250 << 20
    assert memory.peak() - before < 50 << 20
