"""Split masters, states in 8 bits and BF16, stochastic weights, moving averages.

The references are whole FP32 masters, the same step on FP32 states, the map of quantized values in
NumPy, and float64. That instruction sets, threads and backends agree, that launches do not grow,
and that the meter and captured steps know the modes is shown where the same is shown of the others:
bits.py, test_same_bits.py, test_launches.py, test_meter.py, test_graphs.py.
"""

import copy
import gc
import itertools
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import ampfuse
import cases
from ampfuse import amp, optim
from ampfuse._schema import STORAGES
from cases import (
    KINDS,
    MODES,
    QUANTIZED,
    assert_same,
    bf16,
    bit_pattern,
    copy_weights,
    f16,
    f32,
    has_mode,
    make,
    most_allocated,
    params_of,
    same_bits,
    through_a_file,
    train,
    weights,
)

halves = pytest.mark.parametrize("dtype", [bf16, f16], ids=cases.short)
QUANTIZABLE = ("sgd-all", "adam-all", "adamw", "adamw-amsgrad", "adagrad-all", "lion-decay")
SHAPES = ((4200,), (37, 130), (40, 8, 4, 4), (33,))
inf, nan = torch.inf, torch.nan


def parameters(*dtypes, shapes=SHAPES, offset=0.0):
    """A parameter of each shape, in all types in turn; with four dimensions, channels last."""
    made = cases.parameters(shapes, *dtypes)
    for param in made:
        param.data += offset
        if param.dim() == 4:
            param.data = param.to(memory_format=torch.channels_last)
    return made


def masters(optimizer):
    states = optimizer.torch_state_dict()["state"]
    return [states[i]["master_param"] for i in sorted(states) if "master_param" in states[i]]


def state_of(optimizer):
    return copy.deepcopy((weights(params_of(optimizer)), optimizer.state_dict()["state"]))


def weight_of(master, dtype):
    """The weight of a finite split master: the nearest, in BF16 away from zero in a tie."""
    if dtype == f16:
        return master.clamp(-65504, 65504).to(f16)
    rounded = (master.contiguous().view(torch.int32) + 0x8000) & ~0xFFFF
    return rounded.view(f32).to(bf16).reshape(master.shape)


# --- split masters --------------------------------------------------------------------------------


@halves
def test_a_state_is_read_between_forward_and_backward(dtype):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)).to(dtype)
    optimizer = ampfuse.optim.AdamW(model.parameters(), master_weights="split")
    for _ in range(2):
        loss = model(torch.ones(4, 8, dtype=dtype)).float().sum()
        optimizer.torch_state_dict()
        loss.backward()
        optimizer.step()


@pytest.mark.covers(1)
@pytest.mark.parametrize("steps", [150, pytest.param(1000, marks=pytest.mark.slow)])
@halves
@pytest.mark.parametrize(
    ("name", "larc"),
    [(name, False) for name in (*KINDS, "sgd-momentum", "sgd-nesterov", "adamw-amsgrad")]
    + [("sgd-all", True), ("adamw", True)],
)
def test_split_masters_stay_with_whole_ones_for_hundreds_of_steps(name, larc, dtype, steps):
    """Overflows, clipping, two passes a step, and a resume. FP16 stays where it is exact."""
    shapes, offset = ((300,), (3, 2, 5, 4), (7, 5), (1,)), 6.0 if dtype == f16 else 0.0

    def start(mode, params):
        options = {"master_weights": mode, "lr": 1e-3, "max_grad_norm": 20.0}
        optimizer = make(name, copy.deepcopy(params), **options)
        return optim.LARC(optimizer, 1e-3) if larc else optimizer

    params = parameters(dtype, shapes=shapes, offset=offset)
    optimizers = {mode: start(mode, params) for mode in ("split", True)}
    kind = torch.amp.GradScaler if dtype == f16 and not larc else ampfuse.GradScaler
    scalers = [kind("cpu", init_scale=2.0**8, growth_interval=50) for _ in optimizers]
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        grads = [torch.randn((2, *shape), generator=generator) for shape in shapes]
        grads[0][1, 3] = inf if step % 97 == 5 else 1.0
        for optimizer, scaler in zip(optimizers.values(), scalers, strict=True):
            scale = scaler.scale(torch.ones(()))
            for param, (first, second) in zip(params_of(optimizer), grads, strict=True):
                param.grad = (first * scale).to(dtype)
                param.grad += (second * scale).to(dtype)
            scaler.step(optimizer)
            scaler.update()
        if step % 50 == 49:
            pairs = [zip(masters(o), params_of(o), strict=True) for o in optimizers.values()]
            for (master, split), (exact, whole) in zip(*pairs, strict=True):
                assert same_bits(master, exact)
                assert same_bits(split, weight_of(exact, dtype))
                assert same_bits(whole, exact.to(dtype))
        if step == steps // 2 + 5:
            saved = through_a_file(optimizers["split"].state_dict())
            optimizers["split"] = start("split", params_of(optimizers["split"]))
            optimizers["split"].load_state_dict(saved)


def test_fp16_masters_end_at_65504(device):
    param = nn.Parameter(torch.tensor([65504.0, -65504, 65472, 1, 1, 1]).to(device, f16))
    optimizer = optim.SGD([param], lr=1.0, master_weights="split", skip_nonfinite=False)
    for _ in range(2):
        param.grad = torch.tensor([-8.0, 8, -3, inf, nan, -65504]).to(param)
        optimizer.step()
    expected = torch.tensor([65504, -65504, 65478, -inf, nan, 65504]).to(device)
    assert torch.equal(masters(optimizer)[0].nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(param.detach().nan_to_num(7), expected.to(f16).nan_to_num(7))


EDITS = {
    "clamp_": lambda p, new: p.clamp_(-0.5, 0.5),
    "copy_": lambda p, new: p.copy_(new),
    "assigned .data": lambda p, new: setattr(p, "data", new.clone()),
    "there and back": lambda p, new: p.mul_(2).mul_(0.5),
    "a slice": lambda p, new: p[5:900].fill_(2.0),
    "in .data": lambda p, new: p.data[5:900].fill_(2.0),
    "a mask": lambda p, new: p.mul_((new > 0).to(p.dtype)),
    "a model": lambda p, new: nn.ParameterList([p]).load_state_dict({"0": new}),
}


@pytest.mark.covers(2)
@pytest.mark.parametrize("look", ["copied", "saved", "stepped"])
@pytest.mark.parametrize("mode", [True, "split"])
@pytest.mark.parametrize("edit", EDITS)
@halves
def test_edits_are_followed(edit, dtype, mode, look):
    param = nn.Parameter(torch.randn(5000).to(dtype))
    optimizer = optim.AdamW([param], lr=1e-2, weight_decay=0, master_weights=mode)
    train(optimizer, range(5))
    before, old = masters(optimizer)[0].clone(), param.detach().clone()
    with torch.no_grad():
        EDITS[edit](param, torch.where(torch.rand(5000) < 0.5, torch.randn(5000).to(dtype), old))
    if edit == "in .data" and mode is True:  # leaves no trace for autograd or for us
        optimizer.refresh_masters()
    edited = param.detach().clone()
    if look == "stepped":
        optimizer.param_groups[0]["lr"] = 0.0
        train(optimizer, [9])
    master = masters(copy.deepcopy(optimizer) if look == "copied" else optimizer)[0]
    touched = bit_pattern(edited) != bit_pattern(old)
    assert touched.sum() > 500 or edit == "there and back"
    assert same_bits(master[~touched], before[~touched])
    if mode is True:
        assert torch.equal(master[touched], edited[touched].float())
        assert torch.equal(master.to(dtype), edited)
    else:
        assert (master[edited == 0].abs() < (1e-38 if dtype == bf16 else 2.0**-24)).all()
        above = torch.nextafter(edited.abs(), torch.full_like(edited, inf)).double()
        half_a_unit = (above - edited.abs().double()) / 2
        assert ((master.double() - edited.double()).abs() <= half_a_unit).all()
        assert torch.equal(weight_of(master, dtype), edited)
    assert torch.equal(param.detach(), edited)


# --- under amp ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, "split", False])
def test_a_standalone_optimizer_goes_under_amp(mode):
    model = nn.Linear(50, 50, dtype=bf16)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, master_weights="split")
    train(optimizer, range(3))
    before = masters(optimizer), weights(model.parameters())
    options = {"master_weights": mode, "verbosity": 0, "allow_incoming_model_not_fp32": True}
    amp.initialize(model, optimizer, opt_level="O5", **options)
    expected = before[0] if mode else [], before[1]
    assert_same((masters(optimizer), weights(model.parameters())), expected)
    if mode is True:
        assert_same(weights(amp.master_params(optimizer)), before[0])


@pytest.mark.parametrize("around", [lambda optimizer: optimizer, optim.LARC])
def test_a_step_of_its_own_takes_no_split_masters(around):
    model = nn.Linear(3, 3)
    optimizer = around(inner := torch.optim.RMSprop(model.parameters()))
    before = dict(inner.__dict__)
    for refused in (
        lambda: amp.initialize(model, optimizer, opt_level="O5", master_weights="split"),
        lambda: optim.upgrade(optimizer, master_weights="split"),
    ):
        with pytest.raises(TypeError, match=r"master_weights='split'.*RMSprop.*Use an optim"):
            refused()
        assert (model.weight.dtype, type(inner)) == (f32, torch.optim.RMSprop)
        assert inner.__dict__ == before


# --- states ---------------------------------------------------------------------------------------


class Map:
    """Quantized values of a state, as quantized.h tells; in NumPy, a block to a row."""

    def __init__(self, state):
        self.unsigned = "sq" in state or state == "sum"
        self.levels, self.root = (np.float32(255), 2) if self.unsigned else (np.float32(127), 1)
        self.largest, self.largest_root = (1.5, 1.125) if self.unsigned else (1.0, 1.0)
        self.offset = np.uint32(0x3F800000 - (0x3F800000 >> self.root))

    def encode(self, x, steps=True):
        """(quantized values, scales); `steps`: as a step rounds, not a conversion."""
        largest = np.abs(x).max(axis=1)
        least = np.float32(self.largest * 2.0**-126)
        scale = np.where(largest == 0, largest, np.maximum(largest, least))
        scale = scale / np.float32(self.largest)
        inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
        if self.unsigned:
            fraction = np.minimum(x * inverse[:, None], np.float32(self.largest))
        else:
            offset = 3.25 * 2.0**-14 if steps else 0
            exact = np.abs(x).astype(np.float64) * inverse[:, None] - offset  # rounded once
            fraction = np.clip(exact, 0, 1).astype(np.float32)
        root = ((fraction.view(np.uint32) >> self.root) + self.offset).view(np.float32)
        value = np.rint(root.astype(np.float64) * np.float32(self.levels / self.largest_root))
        if self.unsigned:
            return np.maximum(value, 1).astype(np.uint8), scale
        return np.copysign(value, x).astype(np.int8).view(np.uint8), scale

    def decode(self, values, scale):
        count = values if self.unsigned else values.view(np.int8)
        root = count.astype(np.float64) * np.float32(self.largest_root / self.levels)
        if not self.unsigned:  # the root of zero, which is added, decides ties
            root = np.nextafter(root, np.inf)
        root = np.abs(root.astype(np.float32))
        fraction = np.where(count != 0, (root.view(np.uint32) - self.offset) << self.root, 0)
        fraction = fraction.astype(np.uint32).view(np.float32)
        return np.copysign(fraction * scale[:, None], count.astype(np.float32))

    def rounded(self, values):
        """A tensor as a conversion leaves it."""
        decoded = torch.from_numpy(self.decode(*self.encode(blocks_of(values), steps=False)))
        order = in_memory(values)
        return (
            torch.empty_like(order)
            .copy_(decoded.flatten()[: values.numel()].view(order.shape))
            .as_strided(values.shape, values.stride())
        )


def in_memory(tensor):
    return tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor


def blocks_of(values):
    """Blocks of 128 as they lie in memory, filled up with zeros."""
    flat = in_memory(values).contiguous().flatten().cpu().numpy()
    return np.pad(flat, (0, -len(flat) % 128)).reshape(-1, 128)


@pytest.mark.parametrize("storage", QUANTIZED)
@pytest.mark.parametrize("name", [*QUANTIZABLE, "sgd-momentum", "adagrad-started"])
def test_quantized_values_are_those_of_the_map(name, storage, device):
    """Beside a step on FP32 states, which start as what the quantized ones before it mean."""
    sizes = (4095, 4096, 4097, 32767, 32769, *((131071, 131073) if name == "adamw" else ()))
    starts = parameters(f32, shapes=[*((size,) for size in sizes), (16, 20, 4, 4)])
    starts.append(nn.Parameter(torch.randn(5003)[3:]))  # aligned to nothing
    params, twins = ([nn.Parameter(p.clone().to(device)) for p in starts] for _ in range(2))
    params[-1].data = torch.cat([params[-1].detach()[:3], params[-1].detach()])[3:]
    optimizer, exact = make(name, params, state_dtype=storage, seed=5), make(name, twins)
    suffix = STORAGES[storage].suffix
    for step in range(3):
        for param, twin in zip(params, twins, strict=True):
            size = 10.0 ** torch.randint(-12, 3, param.shape)
            param.grad = (torch.randn(param.shape) * size).to(device)
            param.grad[:2] = 0
            twin.grad = param.grad.clone()
            twin.data.copy_(param.detach())
        optimizer.step()
        exact.step()
        means = optimizer.torch_state_dict()["state"]
        for i, (param, twin) in enumerate(zip(params, twins, strict=True)):
            assert same_bits(param, twin)
            state = optimizer.state[param]
            for key in sorted(exact.state[twin].keys() - {"step"}):
                value = exact.state[twin][key]
                if param.numel() < 4096:
                    assert same_bits(state[key], value)
                    continue
                blocks, n = blocks_of(value), param.numel()
                quantized, scales = Map(key).encode(blocks)
                stored = blocks_of(state[key + suffix])
                assert np.array_equal(stored.flat[:n], quantized.flat[:n]), (step, i, key)
                assert np.array_equal(state[f"{key}_scale"].cpu().numpy(), scales), (step, i, key)
                decoded = Map(key).decode(quantized, scales).flat[:n]
                assert np.array_equal(blocks_of(means[i][key]).flat[:n], decoded), (step, i, key)
                if Map(key).unsigned:
                    assert (means[i][key][value > 0] > 0).all()
                value.copy_(means[i][key])


def test_a_first_moment_without_gradients_reaches_zero():
    """However small a part of its block's largest it is, and so its weight stops."""
    param = nn.Parameter(torch.zeros(1 << 12))
    optimizer = optim.AdamW([param], lr=1e-3, weight_decay=0.0, state_dtype="8bit")
    first = torch.logspace(-5, 0, 1 << 12)[torch.randperm(1 << 12)]
    alive = torch.arange(1 << 12) % 128 == 0
    for step in range(150):
        param.grad = first if step == 0 else torch.where(alive, 1.0, 0.0)
        before = param.detach().clone()
        optimizer.step()
    exact = optimizer.torch_state_dict()["state"][0]["exp_avg"]
    assert (exact[~alive] == 0).all()
    assert torch.equal(param.detach()[~alive], before[~alive])
    assert (param.detach() < before)[alive].all()


@pytest.mark.parametrize("storage", QUANTIZED)
@pytest.mark.parametrize("name", QUANTIZABLE)
def test_a_gradient_whose_square_is_infinite(name, storage, device):
    """No NaN: its weights are those of FP32 states, where those are finite, or stand still."""

    def trained(mode, outlier):
        param = nn.Parameter(torch.ones(4224, device=device))
        optimizer = make(name, [param], state_dtype=mode)
        for step in range(4):
            param.grad = torch.ones_like(param)
            if step == 0:
                param.grad[130] = outlier
            optimizer.step()
        return param.detach()

    exact, found, without = (
        trained(*run) for run in (("fp32", 1e30), (storage, 1e30), (storage, 1))
    )
    assert found.isfinite().all()
    rest = torch.arange(4224).sub(192).abs() > 64  # not of the outlier's block
    assert same_bits(found[rest], without[rest])
    if name.startswith("ada"):  # nothing but the decay moves where the second moment is infinite
        assert found[130] == exact[130]


WHOLE = {"whole": {"master_weights": True, "skip_nonfinite": True}}


# --- stochastic rounding --------------------------------------------------------------------------


def rounded_at_random(what, seed, device, rows=400):
    """(what FP32 gives, what is made of it at random in each row) of 2,000 elements."""
    torch.manual_seed(1)
    dtype, momentum = (bf16, 0.0) if what == "weights" else (f32, 0.9)
    start, grad = (torch.randn(2000).to(device, dtype) for _ in range(2))
    mode = {"rounding": "stochastic"} if what == "weights" else {"state_dtype": "bf16"}
    for count, kind, options in ((1, f32, {}), (rows, dtype, {"seed": seed, **mode})):
        params = [nn.Parameter(start.to(kind, copy=True)) for _ in range(count)]
        for param in params:
            param.grad = grad.to(param)
        optimizer = optim.SGD(params, lr=1e-3, momentum=momentum, **options)
        optimizer.step()
        drawn = [optimizer.state[p]["momentum_buffer"] if momentum else p.detach() for p in params]
        yield torch.stack(drawn)


@pytest.mark.parametrize("what", ["weights", "states"])
def test_stochastic_rounding_has_no_bias(what, device):
    (exact,), drawn = rounded_at_random(what, 9, device)
    below = (exact.view(torch.int32) & ~0xFFFF).view(f32).to(bf16)  # towards zero
    above = torch.nextafter(below, below.sign() * inf)
    assert ((drawn == below) | (drawn == above)).all()
    exact, below, unit = exact.double(), below.double(), (above.double() - below.double()).abs()
    share = (exact - below).abs() / unit
    assert (drawn.double() == exact)[:, share == 0].all()
    z = (drawn.double().mean(0) - exact) / (unit * (share * (1 - share) / len(drawn)).sqrt())
    z = z[(share > 0.02) & (share < 0.98)]
    assert z.abs().max() < 5
    assert 0.9 < z.square().mean() < 1.1
    assert abs(z.mean()) < 4 / len(z) ** 0.5
    again, other = (list(rounded_at_random(what, seed, device))[1] for seed in (9, 2**32 - 1))
    assert same_bits(again, drawn)
    assert not same_bits(other, drawn)


def test_rows_steps_lists_and_elements_have_random_bits_of_their_own():
    params, n = [nn.Parameter(torch.ones(20000, dtype=bf16)) for _ in range(2)], 20000
    options = {"rounding": "stochastic", "state_dtype": "bf16"}
    optimizer, ups = optim.SGD(params, lr=1.0, momentum=0.5, **options), []
    for step in range(3):
        for param in params:
            if step > 0:
                optimizer.state[param]["momentum_buffer"].fill_(1.0)
            param.data.fill_(2.5)
            param.grad = torch.full_like(param, 0.50390625)
        optimizer.step()  # to 1.00390625 and 1.49609375, which are ties
        for param in params if step > 0 else ():
            ups += [param > 1.496, optimizer.state[param]["momentum_buffer"] > 1.0039]
    agree = [a == b for a, b in itertools.combinations(ups, 2)]
    for draws in (*ups, *agree, *(a[1:] == a[:-1] for a in ups)):
        assert abs(draws.float().mean().item() - 0.5) < 5 * 0.5 / n**0.5


# --- averages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, "split", False])
@pytest.mark.parametrize("name", KINDS)
def test_averages_are_those_of_float64(name, mode, device):
    """They average masters, and half weights without one before these are rounded."""
    params = [nn.Parameter(p.detach().to(device)) for p in parameters(bf16, f32, f16)]
    optimizer = make(name, params, master_weights=mode, ema_decay=0.9, skip_nonfinite=True)
    exact = [param.detach().double() for param in params]
    for step in range(30):
        for param in params:
            param.grad = torch.randn_like(param)
        params[0].grad = None if step == 11 else params[0].grad
        before = copy.deepcopy(optimizer.state_dict()["state"])
        params[2].grad[5] = nan if step == 7 else 1.0
        optimizer.step()
        if step == 7:
            assert_same(optimizer.state_dict()["state"], before)
            continue
        states = optimizer.torch_state_dict()["state"]
        for i, (param, average) in enumerate(zip(params, exact, strict=True)):
            if param.grad is not None:
                stepped = states[i].get("master_param", param.detach()).double()
                average += (1 - 0.9) * (stepped - average)
    for i, average in enumerate(exact):
        error = (states[i]["ema"].double() - average).abs() / (average.abs() + 1)
        assert error.max() <= (2.0**-20 if mode or params[i].dtype == f32 else 2.0**-8)


@pytest.mark.parametrize("mode", [True, "split", False])
def test_averages_are_swapped_in_and_out(mode, monkeypatch):
    params = parameters(bf16, f16, f32)
    optimizer = optim.AdamW(params, lr=1e-1, master_weights=mode, ema_decay=0.9)
    train(optimizer, range(4))
    twin, before = copy.deepcopy(optimizer), state_of(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    averages = [optimizer.state[param]["ema"].to(param.dtype) for param in params]
    with optimizer.swap_ema():
        assert_same(weights(params), averages)
        for refused in (
            optimizer.step,
            optimizer.state_dict,
            lambda: optimizer.load_state_dict(saved),
            lambda: list(amp.master_params(optimizer)),
            lambda: copy.deepcopy(optimizer),
            lambda: optimizer.swap_ema().__enter__(),
        ):
            with pytest.raises(RuntimeError, match="swap_ema"):
                refused()
    assert_same(state_of(optimizer), before)
    with pytest.raises(KeyError), optimizer.swap_ema():
        raise KeyError
    assert_same(state_of(optimizer), before)
    served = [averages[0]]
    with monkeypatch.context() as patch:
        patch.setattr("ampfuse.optim.fused.local", lambda _: served.pop())
        with pytest.raises(IndexError):
            optimizer.swap_ema().__enter__()
    assert_same(state_of(optimizer), before)
    for each in (optimizer, twin):
        train(each, range(4, 6))
    assert_same(state_of(optimizer), state_of(twin))
    without = optim.AdamW(params)
    with pytest.raises(RuntimeError, match="ema_decay="), without.swap_ema():
        pass
    without.load_state_dict(optimizer.state_dict())
    train(without, [6])  # these are not updated, so they are not saved again
    assert not any("ema" in state for state in without.state_dict()["state"].values())


# --- checkpoints and copies -----------------------------------------------------------------------


# Those whose states are not zeros and a count at first; the others in two modes.
STARTED = ("sgd-all", "adagrad-all", "novograd-decay")


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if is_quick else pytest.mark.slow)
        for name, mode in itertools.product((*KINDS, "adamw-amsgrad"), (*MODES, *WHOLE))
        if has_mode(name, mode)
        for is_quick in [name in STARTED or mode in ("whole", "stochastic bf16 ema")]
    ],
)
def test_resumed_and_copied_optimizers_go_on_with_the_same_bits(name, mode):
    """Resumed by a fresh optimizer or a `used` one, which loads before or after its model."""
    params, options = parameters(bf16, f32, f16, bf16), (MODES | WHOLE)[mode]
    optimizer = make(name, params, max_grad_norm=50.0, **options)
    for steps in (0, 3):
        train(optimizer, range(steps))
        others = [copy.deepcopy((params, optimizer))[1], copy.deepcopy(optimizer)]
        others += [pickle.loads(pickle.dumps((params, optimizer)))[1]]
        others += [pickle.loads(pickle.dumps(optimizer))]
        for used, first in itertools.product((False, True) if steps else (False,), (0, 1)):
            again = [nn.Parameter(torch.randn_like(param)) for param in params]
            others.append(make(name, again, max_grad_norm=50.0, **options))
            if used:
                train(others[-1], [7, 8])
            for part in (first, 1 - first):
                if part:
                    others[-1].load_state_dict(through_a_file(optimizer.state_dict()))
                else:
                    copy_weights(params, again)
        before = state_of(optimizer)
        for other in others:
            assert {key: getattr(other, key) for key in options} == options
            assert other.max_grad_norm == 50.0
            train(other, range(3, 6))
        assert_same(state_of(optimizer), before)
        train(optimizer, range(3, 6))
        for other in others:
            assert_same(state_of(other), state_of(optimizer))


@pytest.mark.parametrize("mode", [True, "split"])
@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW, optim.Adagrad])
def test_states_of_before_the_first_step_load(kind, mode):
    """Accelerate loads each optimizer's state when it prepares it, when it has only masters."""
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O5", master_weights=mode, verbosity=0)
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(copy.deepcopy(before))
    assert_same(optimizer.state_dict(), before)
    for twin in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert_same(twin.state_dict(), before)


@pytest.mark.covers(1)
@pytest.mark.parametrize("where", ["file", "memory"])
@pytest.mark.parametrize("own", ["new", "stepped"])
def test_checkpoints_hold_no_second_copy(own, where, tmp_path):
    """Neither a dict, nor loading, nor the weights do; each of 4 tensors has 2**20 elements."""
    one, params = 2**20, parameters(bf16, shapes=[(1024, 1024)] * 4)
    options = {"master_weights": "split", "state_dtype": "8bit"}
    optimizer = optim.AdamW(params, **options)
    train(optimizer, range(2))
    taken, saved = most_allocated(optimizer.state_dict)
    assert taken < one / 100
    masters_before = masters(optimizer)
    again = optim.AdamW(copy.deepcopy(params), **options)
    if own == "stepped":
        train(again, range(2))
        copy_weights(params, params_of(again))
    if where == "file":
        torch.save(saved, tmp_path / "file")
        saved = torch.load(tmp_path / "file", mmap=True)
    taken, _ = most_allocated(lambda: again.load_state_dict(saved))
    states = 4 * (2 * one + 2 * 4 * one // 128)
    # The remainders are written where they are, if they are there.
    assert taken < (states if own == "stepped" else states + 4 * 2 * one) * 1.01
    assert_same(masters(again), masters_before)
    train(again, [2])
    train(optimizer, [2])
    assert_same(again.state_dict(), optimizer.state_dict())


@pytest.mark.covers(2)
@pytest.mark.parametrize("masters_into", [True, "split", False])
@pytest.mark.parametrize("masters_of", [True, "split", False])
@pytest.mark.parametrize("into", STORAGES)
@pytest.mark.parametrize("of", STORAGES)
def test_every_mode_loads_every_other(of, into, masters_of, masters_into):
    params = parameters(bf16, f32, f16, bf16)
    others, names = copy.deepcopy(params), ("exp_avg", "exp_avg_sq")
    optimizer, other = (
        optim.AdamW(those, lr=1e-2, state_dtype=kept, master_weights=mode)
        for those, kept, mode in ((params, of, masters_of), (others, into, masters_into))
    )
    train(optimizer, range(3))
    train(other, [5])
    saved = through_a_file(optimizer.state_dict())
    copy_weights(params, others)
    other.load_state_dict(saved)
    other.param_table()
    other.ensure_bound()
    states, exact = (each.torch_state_dict()["state"] for each in (other, optimizer))
    for i, param in enumerate(params):
        assert states[i]["step"] == exact[i]["step"] == 3
        for name in names:
            expected = exact[i][name]
            if into == "bf16":
                expected = expected.to(bf16).float()
            if into in QUANTIZED and into != of and param.numel() >= 4096:
                expected = Map(name).rounded(expected)
            assert torch.equal(states[i][name], expected)
        master = exact[i].get("master_param", param.detach().float())
        if masters_into == "split" and param.dtype == f16:
            near_zero = (master * 2**39).round() / 2**39
            master = torch.where(master.abs() < 2**-16, near_zero, master)
        assert ("master_param" in states[i]) == bool(masters_into and param.dtype != f32)
        assert torch.equal(states[i].get("master_param", master), master)
    train(other, [3])
    train(optimizer, [3])
    for a, b in zip(others, params, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


HELD = [
    ({"master_weights": True}, 16),
    ({"master_weights": "split"}, 14),
    ({"master_weights": "split", "state_dtype": "bf16"}, 10),
    *(({"master_weights": "split", "state_dtype": name}, 8 + 2 * 4 / 128) for name in QUANTIZED),
    ({"master_weights": True, "state_dtype": "8bit"}, 10 + 2 * 4 / 128),
    ({"rounding": "stochastic"}, 12),
]


@pytest.mark.parametrize(("options", "held"), HELD)
def test_a_parameter_holds_so_many_bytes(options, held):
    """The bytes include weight and gradient, and are counted by torch's allocator."""
    count = 1 << 16
    gc.collect()  # or it could release what an earlier profile saw
    with torch.profiler.profile(profile_memory=True) as profile:
        param = nn.Parameter(torch.ones(count, dtype=bf16))
        param.grad = torch.ones_like(param)
        optimizer = optim.AdamW([param], **options)
        for _ in range(2):
            optimizer.step()
    allocated = sum(event.self_cpu_memory_usage for event in profile.events())
    assert allocated / count == pytest.approx(held, abs=0.05)


def test_a_groups_choice_stays_its_own():
    params = parameters(bf16)
    split = [{"params": params[:2]}, {"params": params[2:]}]
    optimizer = optim.AdamW([split[0], {**split[1], "state_dtype": "fp32"}], state_dtype="8bit")
    plain = optim.AdamW(split)
    for each in (optimizer, plain, optimizer):
        train(each, range(2))
        quantized = ["exp_avg_8bit" in each.state[param] for param in params]
        assert quantized == [each is optimizer] * 2 + [False] * 2
        assert ("state_dtype" in each.param_groups[1]) == (each is optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (plain if each is optimizer else optimizer).load_state_dict(each.state_dict())


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["optimizer", "group"])
def test_a_mode_that_changes_after_the_first_step(where):
    optimizer = optim.AdamW(parameters(bf16), master_weights="split", state_dtype="8bit")
    twin = copy.deepcopy(optimizer)
    train(optimizer, range(2))
    train(twin, range(3))

    def step_in(mode):
        if where == "group":
            optimizer.param_groups[0]["state_dtype"] = mode
        else:
            optimizer.state_dtype = mode
        train(optimizer, [2])

    for mode, message in (("fp32", "'8bit' to 'fp32' after"), ("4bit", "'4bit'")):
        with pytest.raises(ValueError, match=f"state_dtype.*{message}"):
            step_in(mode)
    step_in("8bit")
    assert_same(state_of(optimizer), state_of(twin))  # the others changed nothing
