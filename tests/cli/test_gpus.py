"""GPUs that torch only seems to have: which are used, and what is said of those without kernels."""

import re
import types

import pytest
import torch
from torch import nn

from ampfuse import _core, amp, devices, optim
from ampfuse.cli import env

OF_TORCH = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]  # for CUDA 12.8 and 13

# By what torch and the extension say of a GPU (see `pretend`): why it is not used, what to do.
WITHOUT_KERNELS = {
    "ROCm": ({"hip": "7.2.0"}, ".* not for ROCm 7.2.0: train on the CPU, or under torch.amp alone"),
    "P100": (
        {"capability": (6, 0)},
        "torch .* has no kernels for this GPU .sm_60.: use .*choose T4 x2; or install torch "
        "2.11 to 2.14 for CUDA 12.6.*, and compile ampfuse with CUDA 12",
    ),
    "M40": ({"capability": (5, 2)}, "torch .*has no kernels .* .sm_52.: use .*, choose T4 x2"),
    "too new for torch": (
        {"capability": (12, 1), "of_torch": ["sm_60", "sm_90"]},
        "torch .* has no kernels for this GPU .sm_121.: install the newest torch",
    ),
    "too old for ampfuse": (
        {"capability": (6, 0), "of_torch": ["sm_60", "sm_90"]},
        "it is sm_60, .*sm_75.*compile ampfuse with an nvcc that supports this one",
    ),
    "an old driver": ({"driver": 12040}, ".* CUDA 12.4.*Update the driver .*580"),
    "built without": ({"archs": []}, ".* was built for CPUs; .*AMPFUSE_CUDA=ON"),
}


def pretend(
    monkeypatch,
    *,
    available=True,
    hip=None,
    cuda="13.0",
    error=None,
    other=None,
    capability=(9, 0),
    of_torch=OF_TORCH,
    archs=("sm_75", "sm_80", "sm_90", "compute_90"),
    driver=13000,
):
    """Have torch report this of itself, with one GPU if `available`."""

    def init():
        if error:
            raise RuntimeError(error)

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", None if hip or other else cuda)
    card = types.SimpleNamespace(name="A card", total_memory=2**34, major=capability[0])
    for name, value in (
        ("is_available", available),
        ("device_count", 1),
        ("get_device_properties", card),
        ("get_device_capability", capability),
        ("get_arch_list", of_torch),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "init", init)
    accelerator = torch.device(other) if other else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: accelerator)
    monkeypatch.setattr(_core.C, "cuda_archs", lambda: list(archs))
    monkeypatch.setattr(_core.C, "cuda_versions", lambda: (13000, driver))


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
def test_the_best_covering_architecture_is_chosen(archs, capability, covering):
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


# --- the environment report ----------------------------------------------------------------------

# By what torch and the extension say of a GPU, or of none that can be used: the report's line.
GPU, NONE = True, False
CARDS = {
    **{name: (GPU, said, f"NOT USED: {line}") for name, (said, line) in WITHOUT_KERNELS.items()},
    "T4": (GPU, {"capability": (7, 5)}, "runs ampfuse's sm_75; BF16 is emulated: use O1 or O2$"),
    "A100": (GPU, {"capability": (8, 0)}, "runs ampfuse's sm_80; use O4 or O5$"),
    "L4": (GPU, {"capability": (8, 9)}, "runs ampfuse's sm_80; use O4 or O5$"),
    "RTX PRO 6000": (GPU, {"capability": (12, 0)}, "runs ampfuse's compute_90; use O4 or O5$"),
    "no MPS": (NONE, {"other": "mps"}, ".* not for MPS: train on the CPU, or under torch.amp"),
    "no XPU": (NONE, {"other": "xpu"}, ".* not for XPU: train on the CPU, or under torch.amp"),
    "no ROCm": (NONE, {"hip": "7.2.0"}, ".* not for ROCm 7.2.0: train on the CPU, or .* torch.amp"),
    "a CPU build": (NONE, {"cuda": None}, "torch is built for CPUs; .* install a CUDA build"),
    "torch's message": (NONE, {"error": "The driver is too old"}, "The driver is too old$"),
    "hidden": (NONE, {}, "CUDA_VISIBLE_DEVICES"),
}


@pytest.mark.parametrize("case", CARDS)
def test_report_says_whether_a_gpu_is_used_or_why_not_and_what_to_do(case, monkeypatch):
    available, said, line = CARDS[case]
    pretend(monkeypatch, available=available, **said)
    start = "A card, 16.0 GiB: " if available else "none that torch can use: "
    assert re.search(f"^{start}{line}", env._gpus()["GPU 0" if available else "GPUs"])
