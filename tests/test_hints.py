"""What is said at `initialize`."""

import logging
import warnings

import pytest
import torch
from torch import nn

from ampfuse import amp, hardware
from ampfuse.amp.policy import make_policy
from ampfuse.insight import hints
from ampfuse.insight.hints import Machine

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
T4 = Machine("Tesla T4", (7, 5), has_bf16=False, uses_tf32=False)
A100 = Machine("NVIDIA A100", (8, 0), uses_tf32=False)


@pytest.fixture
def said(monkeypatch, caplog):
    """What is said at a level on a machine."""

    def saying(level, machine, device=GPU):
        hints._say.cache_clear()
        hints._warn_of_emulation.cache_clear()
        caplog.clear()
        monkeypatch.setattr(hints, "machine", lambda device: machine)
        with caplog.at_level(logging.WARNING, "ampfuse.amp"):
            hints.say_what_is_slow(make_policy(level), [device])
            hints.say_what_is_slow(make_policy(level), [device])
        return " ".join(caplog.messages)

    yield saying
    hints._say.cache_clear()
    hints._warn_of_emulation.cache_clear()


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_bfloat16_on_an_old_gpu_is_pointed_out_once(level, said):
    with pytest.warns(UserWarning, match=r"Tesla T4 \(sm_75\).*emulates") as caught:
        assert said(level, T4) == ""
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said(level, A100)
        said("O2", T4)


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_tf32(level, said):
    words = said(level, A100)
    assert words.count("without TF32 on NVIDIA A100") == 1
    assert ("all of them" in words) == (level == "O0")
    assert said(level, A100._replace(uses_tf32=True)) == ""
    assert said("O2", A100) == said("O5", A100) == ""
    assert said("O0", T4) == ""  # which has no TF32


def test_cpus_without_the_instructions(said):
    cpu = Machine("Some CPU", has_fp16=False)
    for level in ("O1", "O2", "O3"):
        words = said(level, cpu, CPU)
        assert words.count("Some CPU has no FP16 arithmetic") == 1
        assert "use O4 or O5 (BF16, which it has)" in words
    assert said("O5", cpu, CPU) == said("O0", cpu, CPU) == ""
    cpu = cpu._replace(has_bf16=False)
    assert "for speed use O0 on this CPU" in said("O2", cpu, CPU)
    assert "Some CPU has no BF16 arithmetic: O5" in said("O5", cpu, CPU)


def test_what_a_cpu_has(monkeypatch):
    for flags, known in (
        ({"avx2"}, (False, False)),
        ({"avx512_bf16"}, (False, True)),
        ({"avx512_fp16", "amx_bf16"}, (True, True)),
        (set(), (True, True)),  # not known
    ):
        monkeypatch.setattr(hardware, "cpu_flags", lambda flags=flags: frozenset(flags))
        assert hints.machine(CPU)[2:4] == known


def test_what_a_gpu_has(monkeypatch):
    class Properties:
        name, major, minor = "Tesla V100", 7, 0

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.version, "hip", None)
    assert hints.machine(GPU) == Machine("Tesla V100", (7, 0), has_bf16=False, uses_tf32=False)
    torch.set_float32_matmul_precision("high")
    try:
        assert hints.machine(GPU).uses_tf32
    finally:
        torch.set_float32_matmul_precision("highest")


def test_verbosity_0_is_silent(monkeypatch, caplog):
    monkeypatch.setattr(hints, "machine", lambda device: Machine("Some CPU", has_fp16=False))
    for verbosity, count in ((0, 0), (1, 1)):
        hints._say.cache_clear()
        with caplog.at_level(logging.WARNING, "ampfuse.amp"):
            amp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=verbosity)
        assert len(caplog.messages) == count
    hints._say.cache_clear()


# --- masters from a checkpoint --------------------------------------------------------------------


def net():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def step(model, optimizer):
    optimizer.zero_grad()
    with amp.scale_loss(model(torch.ones(3, 4)).pow(2).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
