"""The meter counts what snapshots before and after a step show, and changes no bit of training."""

import itertools
import math

import pytest
import torch
from torch import nn

import ampfuse
from ampfuse import amp
from bits import STEPS, with_scaler
from cases import (
    KINDS,
    LEVELS,
    MODES,
    QUANTIZED,
    bf16,
    bit_pattern,
    digest,
    f16,
    f32,
    has_mode,
    make,
    slow_in_emulation,
)

# Around a vector, a strip, a tile and a chunk.
SIZES = (0, 1, 7, 8, 15, 17, 33, 1025, 2049, 32767, 32769, 70000)
SMALLEST_NORMAL = {f16: 2.0**-14, bf16: 2.0**-126, f32: 2.0**-126}


def gradients_of(params, seed):
    """Gradients of all magnitudes, some subnormal, some zero."""
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        values = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        values *= 2.0 ** torch.randint(-30, 3, param.shape, generator=generator)
        values[torch.rand(param.shape, generator=generator) < 0.1] = 0
        param.grad = values.to(param.dtype).to(param.device)


def bins_of(gradient):
    """The histogram of the sample, in plain Python."""
    counts = [0] * 64
    flat = gradient.detach().float().flatten().cpu()
    for chunk in flat.split(32768):
        for value in chunk[torch.arange(len(chunk)) % 1024 < 16].tolist():
            exponent = math.frexp(value)[1] - 1 if value else -200
            counts[max(0, min(63, (exponent + 130) // 4))] += 1
    return counts


METERED = [(d, m) for d in (f16, bf16, f32) for m in ("masters", "none")]
METERED += [(f16, f"split {storage} ema") for storage in QUANTIZED]
METERED += [(bf16, "split"), (bf16, "stochastic bf16 ema")]


@slow_in_emulation
@pytest.mark.parametrize(
    ("name", "dtype", "mode"),
    [
        (name, dtype, mode)
        for name, (dtype, mode) in itertools.product(KINDS, METERED)
        if has_mode(name, mode)
    ],
)
def test_counts_are_those_of_snapshots(name, dtype, mode, device):
    options = {"masters": {"master_weights": True}, "none": {}, **MODES}[mode]
    masters = options.get("master_weights", False)
    # The same random bits, in the states alone.
    kept = {key: options[key] for key in ("state_dtype", "seed") if key in options}
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(size, generator=generator) for size in SIZES]
    params = [nn.Parameter(value.to(dtype).to(device)) for value in values]
    # The same step on FP32 weights: what an update was before it was rounded.
    exact = [nn.Parameter(param.detach().float().clone()) for param in params]
    optimizer = make(name, params, lr=3e-3, **options)
    twin_optimizer = make(name, exact, lr=3e-3, **kept)
    optimizer.meter(every=1, changed_bits=True)
    for step in range(3):
        gradients_of(params, step)
        params[3].grad = None if step == 1 else params[3].grad
        for param, twin in zip(params, exact, strict=True):
            twin.grad = None if param.grad is None else param.grad.float()
            if not masters:
                twin.data.copy_(param.detach())
        before = [param.detach().clone() for param in params]
        old = [twin.detach().clone() for twin in exact]
        optimizer.step()
        twin_optimizer.step()
        pairs = zip(exact, old, strict=True)
        updates = [(new.double() - was.double()).norm().item() for new, was in pairs]
        for param, twin in zip(params, exact, strict=True):
            if "rounding" in options:  # at random none is lost: the rounded weights are counted
                twin.data.copy_(param.detach())
        readings = optimizer.meter.readings[-len(params) :]
        for i, (param, reading) in enumerate(zip(params, readings, strict=True)):
            assert reading.step == step + 1
            if param.grad is None:
                assert reading.elements == reading.changed == reading.zero == 0
                assert not optimizer.meter.changed(reading.parameter).any()
                continue
            changed = bit_pattern(param) != bit_pattern(before[i])
            moved = bit_pattern(exact[i]) != bit_pattern(old[i])
            gradient = param.grad.float().abs()
            tiny = gradient < SMALLEST_NORMAL[dtype]
            assert reading.elements == param.numel()
            assert reading.changed == int(changed.sum())
            assert reading.stale == int((moved & ~changed).sum())
            assert reading.zero == int((gradient == 0).sum())
            assert reading.subnormal == int((tiny & (gradient > 0)).sum())
            assert list(reading.exponents) == bins_of(param.grad)
            assert reading.update_norm == pytest.approx(updates[i], rel=1e-5)
            assert reading.weight_norm == pytest.approx(exact[i].double().norm().item(), rel=1e-5)
            assert torch.equal(optimizer.meter.changed(reading.parameter).cpu(), changed)


@pytest.mark.parametrize("device", ["cpu", "emulated"], indirect=True)
@pytest.mark.parametrize("name", KINDS)
def test_a_metered_training_has_the_same_bits(name, device):
    runs = [
        with_scaler(name, master_weights=True, largest=40001, meter=meter)
        for meter in (False, True)
    ]
    readings, changed = runs[1].pop("readings"), runs[1].pop("changed")
    assert len(readings) == STEPS * len(changed)
    assert digest(runs[0]) == digest(runs[1])


class Two(nn.Module):
    """Layers whose gradients the test knows."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.a(x) + self.b(x)


@pytest.mark.parametrize("level", LEVELS)
def test_readings_under_amp_are_those_of_the_unscaled_clipped_step(level):
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scale = {"loss_scale": "dynamic"} if level in ("O1", "O2") else {}
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **scale)
    optimizer.meter(every=1)
    for step in range(4):
        before = [param.detach().clone() for param in model.parameters()]
        for _ in range(2):
            loss = model(torch.randn(4, 8)).float().square().mean()
            loss = loss * float("inf") if step == 2 and scale else loss
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        amp.clip_grad_norm_(optimizer, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        after = [param.detach() for param in model.parameters()]
        for old, new, row in zip(before, after, optimizer.meter.readings[-2:], strict=True):
            skipped = step == 2 and bool(scale)
            assert row.elements == (0 if skipped else 64)
            assert row.changed == int((bit_pattern(old) != bit_pattern(new)).sum())
            assert row.has_master == (level in ("O2", "O5"))
            assert row.dtype == new.dtype


def test_a_meter_reads_every_so_many_steps_off_and_on_again():
    """A meter that is off counts steps."""
    param = nn.Parameter(torch.randn(40).half())
    optimizer = ampfuse.optim.AdamW([param], lr=1e-3, master_weights=True, max_grad_norm=1.0)
    for every, steps in ((2, 3), (None, 2), (2, 4), (100, 1)):
        optimizer.meter(every=every, history=4, changed_bits=every == 100)
        for step in range(steps):
            gradients_of([param], step)
            optimizer.step()
    # Each call meters the next step.
    assert [row.step for row in optimizer.meter.readings] == [3, 6, 8, 10]


def layers(dtype, *, lr=1e-3, masters=True, scales=None, gradients):
    """An optimizer after 7 steps of a layer for each of `gradients`, of weights times `scales`."""
    torch.manual_seed(0)
    params = [
        (f"layer{i}", nn.Parameter((torch.randn(512) + 3).mul(scale).to(dtype)))
        for i, scale in enumerate(scales or [1] * len(gradients))
    ]
    optimizer = ampfuse.optim.SGD(params, lr=lr, master_weights=masters)
    optimizer.meter(every=1)
    for _ in range(7):
        for (_, param), gradient in zip(params, gradients, strict=True):
            if gradient is not None:
                param.grad = torch.randn(512).mul(gradient).to(dtype)
        optimizer.step()
    return optimizer


# An update of about 0.1 is lost on weights in thousands.
LARGE = {"lr": 0.1, "scales": [1e3, 1, 1e3, 0.1], "gradients": [1] * 4}
SMALL = {"gradients": [1, 1e-5, 3e-3, 1e-6, 1e-9]}
LOST = {"layer0": "stale", "layer2": "stale"}
UNDERFLOW = {"layer1": "underflow", "layer3": "underflow", "layer4": "zero gradient"}


@pytest.mark.parametrize(
    ("dtype", "options", "expected"),
    [
        pytest.param(f16, {**LARGE, "masters": False}, LOST, id="lost-f16"),
        pytest.param(bf16, {**LARGE, "masters": False}, LOST, id="lost-bf16"),
        pytest.param(f16, LARGE, {}, id="kept-f16"),
        pytest.param(bf16, LARGE, {}, id="kept-bf16"),
        pytest.param(f16, SMALL, UNDERFLOW, id="underflow"),
        pytest.param(bf16, SMALL, {}, id="wide-enough"),
        pytest.param(f32, {"gradients": [1, None]}, {"layer1": "no gradient"}, id="no-gradient"),
    ],
)
def test_planted_problems_are_found_and_no_others(dtype, options, expected):
    optimizer = layers(dtype, **options)
    assert {finding.where: finding.kind for finding in optimizer.meter.advice} == expected
    if options.get("lr"):
        assert any(row.stale_share > 0.99 for row in optimizer.meter.readings)
    if expected == LOST:
        suggestion, tensors = optimizer.meter.report().splitlines()[-2:]
        assert suggestion.startswith("- stale: updates below half a step")
        assert tensors == "  100% of the updates lost since step 1: layer0, layer2"


def test_the_report_lists_readings_and_problems():
    report = layers(f16, gradients=[1, 1e-6, 1e-9]).meter.report().splitlines()
    assert report[0] == "Step 7"
    assert report[1].split()[:3] == ["parameter", "weights", "type"]
    assert report[2].split()[:5] == ["layer0", "512", "float16", "+", "master"]
    assert report[-4].startswith("- underflow: ")
    assert report[-3].endswith("zero since step 1: layer1")
    assert report[-2].startswith("- zero gradient: ")
    assert report[-1] == "  every element zero since step 1: layer2"
    empty = ampfuse.optim.SGD([nn.Parameter(torch.ones(1))], lr=1)
    assert "no readings yet" in empty.meter.report()


@pytest.mark.parametrize("known", ["nowhere", "by the optimizer", "by amp.initialize"])
def test_a_report_has_each_suggestion_once_and_names_where_they_are_known(known):
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(12)))
    unnamed = torch.optim.SGD if known == "by amp.initialize" else ampfuse.optim.SGD
    named = known == "by the optimizer"
    optimizer = unnamed(model.named_parameters() if named else model.parameters(), lr=0.1)
    if known == "by amp.initialize":
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    optimizer.meter(every=1)
    for name, param in model.named_parameters():
        param.grad = torch.zeros_like(param) if name.startswith("1") else torch.ones_like(param)
    optimizer.step()
    _, report = optimizer.meter.report().split("\n\n")
    names = "1.weight, 10.weight, 11.weight"
    if known == "nowhere":
        places = (f"param_groups[0]['params'][{i}] of shape (2, 2)" for i in (1, 10, 11))
        names = ", ".join(places) + "\nFor names, build the optimizer from "
    assert report.count("either nothing in the loss depends on the weight") == 1
    assert f"\n  every element zero since step 1: {names}" in report
    assert report.count("For names") == (known == "nowhere")


def test_changed_weights_have_the_layout_of_their_parameter():
    weight = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    param = nn.Parameter(weight)
    optimizer = ampfuse.optim.SGD([("conv", param)], lr=1.0)
    optimizer.meter(every=1, changed_bits=True)
    param.grad = torch.zeros_like(param)
    param.grad[1, 2, 3, 4] = param.grad[0, 1, 0, 2] = 1
    optimizer.step()
    assert torch.equal(optimizer.meter.changed("conv"), param.grad != 0)
    with pytest.raises(KeyError, match="'other'; the parameters are conv"):
        optimizer.meter.changed("other")


def test_wrong_use_is_refused():
    optimizer = ampfuse.optim.SGD([nn.Parameter(torch.ones(1))], lr=1)
    for wrong in ({"every": 0}, {"every": 1.5}, {"history": 0}):
        with pytest.raises(ValueError, match="positive integer"):
            optimizer.meter(**wrong)
    with pytest.raises(RuntimeError, match="changed_bits=True"):
        optimizer.meter.changed("x")
    model = nn.Linear(2, 2)
    foreign = torch.optim.RMSprop(model.parameters())
    model, foreign = amp.initialize(model, foreign, opt_level="O2", verbosity=0)
    with pytest.raises(TypeError, match="RMSprop has a custom step"):
        foreign.meter(every=10)

    class Own(ampfuse.optim.SGD):
        def step(self, closure=None):
            pass

    with pytest.raises(TypeError, match="Own has a custom step"):
        Own([nn.Parameter(torch.ones(1))], lr=1).meter(every=10)
