"""Devices without kernels: each is refused in a sentence that says what to do instead."""

import pytest
import torch
from torch import nn

from ampfuse import amp, devices, optim
from pretended_gpus import OF_TORCH, WITHOUT_KERNELS, pretend

BUILT = ["sm_75", "sm_80", "compute_90"]


@pytest.mark.parametrize(
    ("archs", "capability", "covering"),
    [
        (BUILT, (7, 5), "sm_75"),
        (BUILT, (8, 0), "sm_80"),
        (BUILT, (8, 9), "sm_80"),  # same major version, later minor
        (BUILT, (9, 0), "compute_90"),
        (BUILT, (12, 0), "compute_90"),
        (BUILT, (7, 0), None),  # V100
        (["sm_86", "sm_80"], (8, 6), "sm_86"),
        (["sm_86"], (8, 0), None),
        (["sm_90a"], (9, 0), "sm_90a"),
        (["sm_90a", "compute_90a"], (10, 0), None),
        (["sm_100f"], (10, 3), "sm_100f"),
        (["compute_100f"], (12, 0), None),
        ([], (8, 0), None),
        (["nonsense"], (8, 0), None),
    ],
)
def test_covering_arch(archs, capability, covering):
    assert devices.covering_arch(archs, capability) == covering
    assert devices.covering_arch(archs[::-1], capability) == covering


class OnGpu(nn.Parameter):
    """A parameter that says it is on another device than it is."""

    where = torch.device("cuda", 0)

    @property
    def device(self):
        return self.where


class OnMps(OnGpu):
    where = torch.device("mps", 0)


class OnXpu(OnGpu):
    where = torch.device("xpu", 0)


def model_on(device):
    model = nn.Linear(2, 1)
    model.weight, model.bias = device(torch.ones(1, 2)), device(torch.ones(1))
    return model


REFUSED = {
    **{name: (OnGpu, said, line) for name, (said, line) in WITHOUT_KERNELS.items()},
    "MPS": (OnMps, {"other": "mps"}, ".* not for MPS: train on the CPU, or under torch.amp alone"),
    "XPU": (OnXpu, {"other": "xpu"}, ".* not for XPU: train on the CPU, or under torch.amp alone"),
}


@pytest.fixture(params=REFUSED)
def refused(request, monkeypatch):
    """A kind of parameter that no kernel reads, and what is said of it."""
    device, said, line = REFUSED[request.param]
    pretend(monkeypatch, **said)
    sentence = rf"is on {device.where}, where ampfuse cannot work: {line}[^.]*\.$"
    return device, sentence


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.RMSprop, optim.AdamW])
def test_initialize_refuses_and_changes_nothing(refused, make):
    device, sentence = refused
    model = model_on(device)
    optimizer = make(model.parameters())
    with pytest.raises(RuntimeError, match=rf"^Parameter 'weight' {sentence}"):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert model.weight.dtype == torch.float32
    assert type(optimizer) is make


def test_initialize_refuses_to_fuse(refused):
    device, sentence = refused
    with pytest.raises(RuntimeError, match=rf"^Parameter 'weight' {sentence}"):
        amp.initialize(model_on(device), opt_level="O5", fuse=True, verbosity=0)


def test_first_step_refuses(refused):
    device, sentence = refused
    model = model_on(device)
    optimizer = optim.AdamW(model.parameters())
    model.weight.grad = torch.ones(1, 2)
    with pytest.raises(RuntimeError, match=rf"of shape \(1, 2\) {sentence}"):
        optimizer.step()


# The GPUs of Colab and Kaggle, with their torch and with one that does not list its kernels.
@pytest.mark.parametrize("of_torch", [OF_TORCH, []])
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (12, 0)])
def test_others_have_no_problem(capability, of_torch, monkeypatch):
    pretend(monkeypatch, capability=capability, of_torch=of_torch)
    assert devices.device_problem(torch.device("cuda")) is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nothing_is_asked_of_a_gpu_for_a_device_that_is_none(device):
    assert devices.device_problem(torch.device(device)) is None
