"""What is said at `initialize`, and FP32 masters from an FP32 checkpoint."""

import copy
import logging
import warnings

import pytest
import torch
from torch import nn

from ampfuse import amp, hardware, optim
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


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
@pytest.mark.parametrize("steps", [0, 2])
def test_masters_have_all_digits_of_the_checkpoint(level, kind, steps):
    """A model that arrives in half trains on with the bits of one that arrived in FP32."""
    checkpoint = net().state_dict()
    trained = []
    for arrives_in_half in (False, True):
        model = net()
        model.load_state_dict(checkpoint)
        if arrives_in_half:
            model.half()
        options = {"opt_level": level, "verbosity": 0, "init_scale": 8.0, "master_weights": True}
        optimizer = kind(model.parameters(), lr=1e-3)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The model arrived")
            model, optimizer = amp.initialize(model, optimizer, **options)
        if arrives_in_half:
            for _ in range(steps):
                step(model, optimizer)
            amp.load_master_weights(optimizer, checkpoint)
        names = dict(model.named_parameters())
        for name, master in zip(names, amp.master_params(optimizer), strict=True):
            assert torch.equal(master, checkpoint[name])
            assert torch.equal(names[name], checkpoint[name].to(names[name].dtype))
        assert torch.equal(model[1].running_var.float(), checkpoint["1.running_var"])
        if steps == 0:
            step(model, optimizer)
        trained.append([p.detach().clone() for p in amp.master_params(optimizer)])
    assert all(map(torch.equal, *trained))


@pytest.mark.parametrize("steps", [0, 2])
def test_of_an_optimizer_alone(steps):
    checkpoint = net().state_dict()
    model = net().bfloat16()
    model[1].float()
    optimizer = optim.SGD(model.parameters(), lr=0.5, weight_decay=1.0, master_weights=True)
    for _ in range(steps):
        model(torch.ones(3, 4).bfloat16()).float().pow(2).sum().backward()
        optimizer.step()
    amp.load_master_weights(optimizer, checkpoint, model=model)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, checkpoint[name].to(weight.dtype))
        weight.grad = torch.zeros_like(weight)
    optimizer.step()  # halves the masters
    for name in ("0.weight", "2.bias"):
        weight = model.get_parameter(name)
        assert torch.equal(optimizer.state[weight]["master_param"], checkpoint[name] / 2)
        assert torch.equal(weight, (checkpoint[name] / 2).bfloat16())


def test_a_state_that_does_not_fit_changes_nothing():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    checkpoint = {f"module.{name}": value + 1 for name, value in net().state_dict().items()}
    before = copy.deepcopy([*model.parameters(), *amp.master_params(optimizer)])
    wrong = r"of the Sequential\. It has keys missing: 0\.weight, .* 5 more; unexpected: module\.0"
    with pytest.raises(RuntimeError, match=wrong):
        amp.load_master_weights(optimizer, checkpoint)
    checkpoint = net().state_dict() | {"2.bias": torch.zeros(3), "3.weight": torch.zeros(1)}
    wrong = r"unexpected: 3\.weight; of another shape: 2\.bias \(\(3,\), not \(2,\)\). Nothing was"
    with pytest.raises(RuntimeError, match=wrong):
        amp.load_master_weights(optimizer, checkpoint)
    after = [*model.parameters(), *amp.master_params(optimizer)]
    assert all(map(torch.equal, before, after))


def test_which_model_and_which_optimizer():
    models = [net(), net()]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
    amp.initialize(models, optimizer, opt_level="O2", verbosity=0)
    checkpoint = net().state_dict()
    with pytest.raises(ValueError, match="with 2 models: pass the one"):
        amp.load_master_weights(optimizer, checkpoint)
    with torch.no_grad():
        models[0][0].weight.zero_()  # an edit, which stays
    amp.load_master_weights(optimizer, checkpoint, model=models[1])
    masters = list(amp.master_params(optimizer))
    assert not masters[0].any()
    assert torch.equal(masters[6], checkpoint["0.weight"])
    alone = torch.optim.SGD(net().parameters(), lr=0.1)
    with pytest.raises(TypeError, match="SGD keeps no FP32 masters"):
        amp.load_master_weights(alone, checkpoint)
