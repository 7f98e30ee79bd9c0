"""``amp.memory_report``: bytes that are counted by hand here, and that nothing changes."""

import pytest
import torch
from torch import nn

import ampfuse
from ampfuse import amp
from ampfuse.insight.memory import KINDS, MODES, bytes_of, size
from ampfuse.optim.masters import gradient_as_it_is

# Elements of `training`: trained, of the batch norm, frozen; then the bytes of its statistics.
TRAINED, NORM, FROZEN, STATISTICS = 4096 + 2 * 64 + 4 * 64 + 4, 128, 2 * 4 + 2, 2 * 4 * 64 + 8


def training(kind=torch.optim.AdamW, dtype=torch.float32, level=None, **options):
    """Tied weights, running statistics, random numbers, a frozen layer."""
    layers = [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 64)]
    model = nn.Sequential(*layers, nn.Linear(64, 4), nn.Linear(4, 2).requires_grad_(False))
    model[3].weight = model[0].weight
    model.to(dtype)
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=1e-3, **options)
    if level:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    return model, optimizer


def backward(model, optimizer):
    loss = model(torch.randn(12, 64, dtype=model[0].weight.dtype)).float().sum()
    if not hasattr(optimizer, "_amp_session"):
        return loss.backward()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()


def held(report, mode="now"):
    return {kind: count for kind, count in report.held[mode].items() if count}


def test_now_is_what_the_tensors_take():
    model, optimizer = training()
    backward(model, optimizer)
    optimizer.step()
    assert held(amp.memory_report(model, optimizer)) == {
        "weights": 4 * (TRAINED + NORM + FROZEN) + STATISTICS,
        "gradients": 4 * (TRAINED + NORM),
        "states": 8 * (TRAINED + NORM) + 4 * 7,  # and a step count for each tensor
    }
    model, optimizer = training(level="O5")
    for is_expected in (False, True):
        backward(model, optimizer)
        report = amp.memory_report(model, optimizer)
        assert held(report) == {
            "weights": 2 * (TRAINED + FROZEN) + 4 * NORM + STATISTICS,
            "gradients": 2 * TRAINED + 4 * NORM,  # a look does not make them FP32
            "masters": 4 * TRAINED,
            "states": 8 * (TRAINED + NORM) + 4 * 7 * is_expected,
        }
        assert report.expected == (set() if is_expected else {("now", "states")})
        optimizer.step()


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad", "Lion", "LAMB", "NovoGrad"])
@pytest.mark.parametrize("case", ["torch", "half of torch", "half", "masters", "O2", "O5"])
def test_before_the_first_step_is_expected_what_it_then_makes(kind, case):
    options = {"momentum": 0.9} if kind == "SGD" else {}
    options |= {"master_weights": True} if case == "masters" else {}
    module = torch.optim if "torch" in case and hasattr(torch.optim, kind) else ampfuse.optim
    dtype = torch.bfloat16 if "half" in case or case == "masters" else torch.float32
    level = case if case.startswith("O") else None
    model, optimizer = training(getattr(module, kind), dtype, level, **options)
    before = amp.memory_report(model, optimizer)
    backward(model, optimizer)
    optimizer.step()
    after = amp.memory_report(model, optimizer)
    assert ("now", "gradients") in before.expected
    assert not after.expected
    for name in KINDS:
        more = after.held["now"][name] - before.held["now"][name]
        assert 0 <= more <= 8 * 7 * (name == "states")  # step counts and NovoGrad's norms


def test_modes_of_a_half_model():
    model = nn.Linear(64, 64, dtype=torch.bfloat16)  # a bias stays FP32 at 8 bits
    optimizer = ampfuse.optim.AdamW(model.parameters(), master_weights=True)
    report, n = amp.memory_report(model, optimizer), 4096 + 64
    quantized = 2 * (4096 + 4 * 32) + 8 * 64
    bytes_ = {
        "now": (4 * n, 8 * n, 0),
        "8bit": (4 * n, quantized, 0),
        "split": (2 * n, 8 * n, 0),
        "split+bf16": (2 * n, 4 * n, 0),
        "split+8bit": (2 * n, quantized, 0),
        "split+8bit+ema": (2 * n, quantized, 4 * n),
        "stochastic": (0, 8 * n, 0),
    }
    assert {mode: tuple(each.values()) for mode, each in report.held.items()} == {
        mode: (2 * n, 2 * n, masters, states, 0, average, 0)
        for mode, (masters, states, average) in bytes_.items()
    }


def test_modes_of_an_fp32_model_are_those_of_o5():
    report = amp.memory_report(*training())
    assert list(report.held) == ["now", *MODES]
    assert report.held["8bit"]["weights"] == report.held["now"]["weights"]
    assert report.held["masters"] == amp.memory_report(*training(level="O5")).held["now"]


class OwnStep(ampfuse.optim.SGD):
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.data.add_(param.grad, alpha=-0.1)


@pytest.mark.parametrize(
    ("kind", "modes", "missing"),
    [
        (torch.optim.SGD, "masters split split+8bit+ema stochastic", False),
        (ampfuse.optim.LAMB, "masters split split+bf16 stochastic", False),
        (torch.optim.RMSprop, "masters", True),
        (OwnStep, "masters", True),
    ],
)
def test_only_modes_that_apply(kind, modes, missing):
    report = amp.memory_report(*training(kind, level="O0"))
    assert list(report.held)[1:] == modes.split()
    assert report.held["now"]["states"] == 0 or not missing
    assert (f"states of {kind.__name__} are missing" in str(report)) == missing


def test_states_of_other_optimizers_are_measured_after_a_step():
    model, optimizer = training(torch.optim.RMSprop)
    backward(model, optimizer)
    optimizer.step()
    report = amp.memory_report(model, optimizer)
    assert report.held["masters"]["states"] == 4 * (TRAINED + NORM) + 4 * 7
    assert "missing" not in str(report)


def test_activations():
    layers = [nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 1, bias=False)]
    model, x = nn.Sequential(*layers), torch.randn(12, 8)
    optimizer = torch.optim.SGD(model.parameters())
    saved = 12 * (8 + 16)  # the input; ReLU's output, which two operations keep
    for batch in (x, (x,), {"input": x}):
        report = amp.memory_report(model, optimizer, batch)
        assert report.held["now"]["activations"] == 4 * saved
        assert report.held["masters"]["activations"] == 2 * saved
        assert report.expected >= {("masters", "activations")}

    class Twice(nn.Sequential):
        def forward(self, x):
            super().forward(x)  # whose graph is gone with its output
            return super().forward(x)

    report = amp.memory_report(Twice(*layers), optimizer, x)
    assert report.held["now"]["activations"] == 4 * saved
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reports = [amp.memory_report(model, optimizer, x)]
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    for report in [*reports, amp.memory_report(model, optimizer, x)]:
        # With the last weight's cast, which the gradient before it needs.
        assert report.held["now"]["activations"] == 2 * (saved + 16)


def test_nothing_changes():
    model, optimizer = training(level="O5")
    backward(model, optimizer)
    x, statistics = torch.randn(12, 64), model[1].running_mean.clone()
    in_training = amp.memory_report(model, optimizer, x).held
    model.eval()[1].train()

    def state():
        tensors = [(id(each), each._version) for each in (*model.parameters(), *model.buffers())]
        gradients = [id(gradient_as_it_is(parameter)) for parameter in model.parameters()]
        modes = [part.training for part in model.modules()]
        return tensors, gradients, modes, torch.get_rng_state().tolist()

    before = state()
    with torch.no_grad():
        report = amp.memory_report(model, optimizer, x)
    assert report.held == in_training
    assert state() == before
    assert torch.equal(model[1].running_mean, statistics)


def test_sizes_and_table():
    assert [bytes_of(text) for text in ("16GB", "1.5 GiB", 7)] == [16 * 10**9, 3 * 2**29, 7]
    assert [size(count) for count in (12, 15.4e9, 2e12)] == ["12 B", "15.4 GB", "2 TB"]
    report = amp.memory_report(*training(), torch.randn(12, 64), budget="60kB")
    lines = {line.split("  ")[0]: line.split() for line in str(report).splitlines()}
    assert lines["bytes a parameter"][3:] == list(report.held)
    share = f"{4 * (TRAINED + NORM) / (TRAINED + NORM + FROZEN):.2f}"
    assert lines["gradients"][1:3] == [f"~{share}", share]
    totals = [sum(held.values()) for held in report.held.values()]
    assert lines["fits 60 kB"][3:] == ["yes" if total <= 60_000 else "no" for total in totals]
    assert min(totals) < 60_000 < max(totals)


X = torch.zeros(12, 64)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"model": 3}, TypeError, "model must be one Module, not int"),
        ({"optimizer": []}, TypeError, r"not list: write amp\.memory_report\(model, opt"),
        ({"model": nn.Linear(2, 2)}, ValueError, "7 of the 7 tensors .* are not parameters"),
        ({"budget": "16XB"}, ValueError, "budget must be a number of bytes .*, got '16XB'"),
        ({"budget": 0}, ValueError, "budget must be .* got 0"),
        ({"batch": X[:, 1:]}, RuntimeError, "shapes cannot be multiplied"),
    ],
)
def test_wrong_arguments(changes, kind, words):
    names = dict(zip(("model", "optimizer"), training(), strict=True))
    with pytest.raises(kind, match=words):
        amp.memory_report(**(names | changes))
