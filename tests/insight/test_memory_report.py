"""``amp.memory_report``: bytes that are counted by hand here, and that nothing changes."""

import pytest
import torch
from torch import nn

import ampfuse
from ampfuse import amp
from ampfuse.insight.memory import KINDS, bytes_of, size
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


def held(report):
    return {kind: count for kind, count in report.held.items() if count}


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
        assert report.expected == (set() if is_expected else {"states"})
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
    assert "gradients" in before.expected
    assert not after.expected
    for name in KINDS:
        more = after.held[name] - before.held[name]
        assert 0 <= more <= (8 * 7 if name == "states" else 0)  # step counts and NovoGrad's norms


@pytest.mark.parametrize(
    ("options", "masters", "states", "average"),
    [
        ({"master_weights": True}, 4, 8, 0),
        ({"master_weights": True, "state_dtype": "bf16"}, 4, 4, 0),
        ({"master_weights": "split", "ema_decay": 0.9}, 2, 8, 4),
        ({"master_weights": True, "ema_decay": 0.0}, 4, 8, 4),
        ({"master_weights": False, "rounding": "stochastic"}, 0, 8, 0),
    ],
)
def test_options_of_the_optimizer_count(options, masters, states, average):
    model, n = nn.Linear(64, 64, dtype=torch.bfloat16), 4096 + 64
    optimizer = ampfuse.optim.AdamW(model.parameters(), **options)
    expected = {"weights": 2, "gradients": 2, "masters": masters, "states": states}
    expected["average"] = average
    report = held(amp.memory_report(model, optimizer))
    assert report == {kind: n * each for kind, each in expected.items() if each}


def test_eight_bit_states_have_scales_and_small_ones_stay_fp32():
    model = nn.Linear(64, 64, dtype=torch.bfloat16)
    optimizer = ampfuse.optim.AdamW(model.parameters(), state_dtype="8bit", master_weights=False)
    assert amp.memory_report(model, optimizer).held["states"] == 2 * (4096 + 4 * 32) + 8 * 64


@pytest.mark.parametrize("kind", [torch.optim.AdamW, ampfuse.optim.AdamW])
def test_a_report_counts_the_types_of_states_of_each_group(kind):
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    groups = [{"params": model[0].parameters(), "state_dtype": "8bit"}]
    optimizer = kind([*groups, {"params": model[1].parameters()}])
    if kind is torch.optim.AdamW:  # as torch would have them
        assert amp.memory_report(model, optimizer).held["states"] == 2 * 8 * 4096
        amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    expected = 2 * (4096 + 4 * 32) + 8 * 4096
    assert amp.memory_report(model, optimizer).held["states"] == expected


class OwnStep(ampfuse.optim.SGD):
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.data.add_(param.grad, alpha=-0.1)


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, OwnStep])
def test_states_that_are_not_known_before_a_step_are_missing(kind):
    report = amp.memory_report(*training(kind, level="O0"))
    assert report.held["states"] == 0
    assert f"states of {kind.__name__} are missing" in str(report)


def test_states_of_other_optimizers_are_measured_after_a_step():
    model, optimizer = training(torch.optim.RMSprop)
    backward(model, optimizer)
    optimizer.step()
    report = amp.memory_report(model, optimizer)
    assert report.held["states"] == 4 * (TRAINED + NORM) + 4 * 7
    assert "missing" not in str(report)


def test_activations_are_counted_once():
    layers = [nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 1, bias=False)]
    model, x = nn.Sequential(*layers), torch.randn(12, 8)
    optimizer = torch.optim.SGD(model.parameters())
    saved = 12 * (8 + 16)  # the input; ReLU's output, which two operations keep
    for batch in (x, (x,), {"input": x}):
        report = amp.memory_report(model, optimizer, batch)
        assert report.held["activations"] == 4 * saved

    class Twice(nn.Sequential):
        def forward(self, x):
            super().forward(x)  # whose graph is gone with its output
            return super().forward(x)

    report = amp.memory_report(Twice(*layers), optimizer, x)
    assert report.held["activations"] == 4 * saved
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reports = [amp.memory_report(model, optimizer, x)]
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    for report in [*reports, amp.memory_report(model, optimizer, x)]:
        # With the last weight's cast, which the gradient before it needs.
        assert report.held["activations"] == 2 * (saved + 16)


def test_reporting_changes_nothing():
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


def test_a_model_that_cannot_be_copied_has_a_report_without_activations():
    model, optimizer = training()
    model.lines = (line for line in ())
    assert amp.memory_report(model, optimizer).held["weights"]
    with pytest.raises(RuntimeError, match=r"cannot be copied\. Leave out batch"):
        amp.memory_report(model, optimizer, torch.randn(12, 64))


def test_sizes_are_read_and_shown_in_a_table():
    assert [bytes_of(text) for text in ("16GB", "1.5 GiB", 7)] == [16 * 10**9, 3 * 2**29, 7]
    assert [size(count) for count in (12, 15.4e9, 2e12)] == ["12 B", "15.4 GB", "2 TB"]
    report = amp.memory_report(*training(), torch.randn(12, 64), budget="60kB")
    lines = {line.split("  ")[0]: line.split() for line in str(report).splitlines()}
    gradients = 4 * (TRAINED + NORM)
    share = f"~{gradients / (TRAINED + NORM + FROZEN):.2f}"
    assert lines["gradients"] == ["gradients", f"~{size(gradients)}".split()[0], "kB", share]
    assert lines["total"][1:3] == size(report.total).split()
    assert lines["fits 60 kB"][-1] == ("yes" if report.total <= 60_000 else "no")
    assert "fits" not in str(amp.memory_report(*training()))


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
def test_a_report_refuses_wrong_arguments(changes, kind, words):
    names = dict(zip(("model", "optimizer"), training(), strict=True))
    with pytest.raises(kind, match=words):
        amp.memory_report(**(names | changes))
