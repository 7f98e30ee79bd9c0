"""The experiments' step as a CUDA graph, on a GPU; test_graphs.py has the graphs themselves."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

pytest.importorskip("torchvision")
pytest.importorskip("timm")
pytest.importorskip("tqdm")

from ampfuse.experiments import mnist
from ampfuse.experiments.data import open_data
from ampfuse.experiments.run import Place, Run
from ampfuse.experiments.settings import ARMS, Settings
from ampfuse.graphs import EAGER_CALLS

SETTINGS = Settings(
    experiment="mnist",
    model="mnist_cnn",
    batch_size=32,
    lr=1e-3,
    image_size=28,
    iterations=20,
    schedule="linear",
    evaluate=False,
    print_freq=6,
    synthetic_size=256,
    cudnn_benchmark=False,
    deterministic=True,
)


@pytest.mark.gpu
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_captured_steps_train_like_eager_ones(arm, optimizer, monkeypatch):
    monkeypatch.setattr(nn.functional, "dropout", lambda input, *_: input)
    if arm == "tf32" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no TF32")
    device, runs = torch.device("cuda", 0), []
    for graph in (False, True):
        settings = dataclasses.replace(SETTINGS, arm=arm, optimizer=optimizer, graph=graph)
        runs.append(Run(settings, open_data(settings, device), Place(device)))
        mnist.train(runs[-1])
    eager, graphed = runs
    assert graphed.record.losses == pytest.approx(eager.record.losses, rel=1e-3)
    assert graphed.record.skipped_steps == eager.record.skipped_steps
    assert len(graphed.record.step_ms) == SETTINGS.iterations - EAGER_CALLS - 1
    result = graphed.result()
    assert result["memory_kind"] == "max_memory_allocated"
    assert 0 < result["memory_mb"] < 8192
