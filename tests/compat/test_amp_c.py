"""``amp_C`` and ``fused_adam_cuda``: argument orders, flags, errors, and apex's formulas."""

import functools
import itertools

import pytest
import torch

import reference
from ampfuse.compat.apex import amp_C, fused_adam_cuda
from ampfuse.compat.apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
from cases import bf16, f16, f32, f64

# --- calls on lists of tensors --------------------------------------------------------------------

SIZES = (300, 5, 40000, 1)
LR, BETA1, BETA2, EPS, WD = 0.1, 0.9, 0.99, 1e-2, 0.1
T = 3  # the step


def rand(dtype=f32, device="cpu"):
    return [torch.rand(size).add(0.1).to(device, dtype) for size in SIZES]


def flag_of(value, device):
    return torch.full((1,), value, dtype=torch.int32, device=device)


def number(value, device, dtype=f32):
    return torch.tensor([value], dtype=dtype, device=device)


def call(name, noop, lists, options, chunk=65536):
    return getattr(amp_C, f"multi_tensor_{name}")(chunk, noop, lists, *options)


def arguments(name, device):
    """The lists, float32, and the other arguments of a call."""
    one, step = number(1.0, device), number(T, device, torch.int32)
    moments = (BETA1, BETA2, EPS)
    norms = torch.ones(len(SIZES), device=device)
    depth, options = {
        "scale": (2, (1.0,)),
        "axpby": (3, (1.0, 1.0, -1)),
        "l2norm": (1, ()),
        "l2norm_mp": (1, ()),
        "unscale_l2norm": (1, (one,)),
        "l2norm_scale": (2, (1.0,)),
        "sgd": (3, (WD, 0.9, 0.0, LR, False, False, False, 1.0)),
        "adam": (4, (LR, *moments, T, 1, 1, WD)),
        "adam_capturable": (4, (one, *moments, step, 1, 1, WD, one / 2)),
        "adam_capturable_master": (5, (one, *moments, step, 1, 1, WD, one / 2)),
        "adagrad": (3, (LR, EPS, 1, WD)),
        "novograd": (3, (norms, LR, *moments, T, 1, WD, 1, 1, 2)),
        "lamb": (4, (LR, *moments, T, 1, WD, 1, 1, one, 1.0, False)),
        "lamb_mp": (5, (one, *moments, step, 1, WD, 1, 1, one, one, False, one * 0, one)),
        "lamb_stage1_cuda": (5, (norms, T, *moments, one, 1.0)),
        "lamb_stage2_cuda": (2, (norms, norms, LR, WD, False)),
    }[name]
    return [rand(f32, device) for _ in range(depth)], options


OPERATIONS = [
    name.removeprefix("multi_tensor_") for name in amp_C.__all__ if name.startswith("multi_tensor_")
]

# --- scale, axpby and norms; what every operation checks ------------------------------------------


@pytest.fixture
def flag():
    return torch.zeros(1, dtype=torch.int32)


def some(*dtypes):
    return [torch.randn(size).to(dtype) for dtype in dtypes for size in (5, 333, 0, 1)]


@pytest.mark.parametrize(("bad", "chunk"), [(float("inf"), 333), (float("nan"), 65536)])
def test_scale_sets_the_flag_for_bad_inputs_alone(bad, chunk, flag):
    """A bad input sets the flag and nothing clears it. A result that overflows does not set it."""
    x, y = some(f16, bf16, f32), some(f32, f16, bf16)
    apply = MultiTensorApply(chunk)
    assert apply(amp_C.multi_tensor_scale, flag, [x, y], 0.25) is None
    for a, b in zip(x, y, strict=True):
        assert torch.equal(b, (a.float() * 0.25).to(b.dtype))
    rounded = torch.empty(1, dtype=f16)
    apply(amp_C.multi_tensor_scale, flag, [[torch.tensor([1e5])], [rounded]], 1.0)
    assert torch.isinf(rounded).all()
    assert flag.item() == 0
    x[1][7] = bad
    for inputs in (x, some(f16, bf16, f32)):
        apply(amp_C.multi_tensor_scale, flag, [inputs, y], 1.0)
        assert flag.item() == 1


@pytest.mark.parametrize(("check", "seen"), [(-1, (1, 1)), (0, (1, 0)), (1, (0, 1))])
def test_axpby_checks_what_it_is_told(check, seen):
    for bad, expected in enumerate(seen):
        flag = torch.zeros(1, dtype=torch.int32)
        x, y, out = lists = [some(f16, bf16, f32), some(f32, f32, f32), some(f32, f32, f32)]
        call("axpby", flag, lists, (2.0, -3.0, check))
        for a, b, c in zip(x, y, out, strict=True):
            torch.testing.assert_close(c, 2 * a.float() - 3 * b)
        assert flag.item() == 0
        lists[bad][0][0] = float("inf")
        call("axpby", flag, lists, (1.0, 1.0, check))
        assert flag.item() == expected


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integers_are_as_torch_has_them(dtype, flag):
    """Counters among the averages of a state dict; floats are computed as without them."""
    x, y = torch.tensor([7, 0, 100]).to(dtype), torch.tensor([9, 1, 101]).to(dtype)
    floats = torch.randn(5), torch.randn(5)
    expected = x.clone().copy_(0.75 * x + 0.25 * y), 0.75 * floats[0] + 0.25 * floats[1]
    old, new = [x.clone(), floats[0].clone()], [y, floats[1]]
    call("axpby", flag, [old, new, old], (0.75, 0.25, -1))
    assert torch.equal(old[0], expected[0])
    torch.testing.assert_close(old[1], expected[1])
    scaled = [torch.empty(3), torch.empty(5)]
    call("scale", flag, [[x, floats[0]], scaled], (0.5,))
    assert torch.equal(scaled[0], x * 0.5)
    assert torch.equal(scaled[1], floats[0] * 0.5)
    call("scale", flag, [[x], [x]], (1.0,))  # no floats at all
    assert flag.item() == 0


@pytest.mark.parametrize("name", ["l2norm", "l2norm_mp", "unscale_l2norm", "l2norm_scale"])
def test_norms_are_of_float64_and_set_the_flag(name, flag):
    """Those of tensors times a number leave the tensors; those beside a scale are unscaled."""
    x = [*some(f16, bf16, f32), torch.tensor([3, 4])]
    scaled, before = [torch.empty_like(t, dtype=f32) for t in x], [t.clone() for t in x]
    lists = [x, scaled] if name == "l2norm_scale" else [x]
    more = {"unscale_l2norm": (torch.tensor([0.125]),), "l2norm_scale": (2.0,)}.get(name, ())
    norm, norms = call(name, flag, lists, (*more, True))
    exact = torch.stack([torch.linalg.vector_norm(t.double()) for t in x])
    exact /= 8 if name == "unscale_l2norm" else 1
    torch.testing.assert_close(norms.double(), exact, rtol=1e-6, atol=0)
    expected = torch.linalg.vector_norm(exact).reshape(1)
    torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)
    assert norm.dtype == norms.dtype == f32
    for per_tensor in ((False,), (None,), ()):
        norm, norms = call(name, flag, lists, (*more, *per_tensor))
        assert (norm.shape, norms.shape) == ((1,), (0,))
    assert all(map(torch.equal, x, before))
    if name == "l2norm_scale":
        assert all(map(torch.equal, scaled, [a.to(f32) * 2 for a in x]))
    assert flag.item() == 0
    x[0][0] = float("nan")
    call(name, flag, lists, more)
    assert flag.item() == 1


@pytest.mark.parametrize(
    ("name", "value", "inverse", "norm"),
    [
        ("l2norm", 1e30, [], 2e30),
        ("l2norm", 3e38, [], 3.4028235e38),  # the largest FP32 value: the elements are finite
        ("unscale_l2norm", 3e38, [torch.tensor([2.0**-16])], 6e38 / 2**16),
    ],
)
def test_squares_and_norms_that_overflow_do_not_set_the_flag(name, value, inverse, norm, flag):
    measured, _ = call(name, flag, [[torch.full((4,), value)]], inverse)
    torch.testing.assert_close(measured, torch.tensor([norm]))
    assert flag.item() == 0


def test_memory_order(flag):
    x = torch.randn(2, 3, 4, 4)
    last = x.contiguous(memory_format=torch.channels_last)
    out = torch.empty_like(last)
    call("scale", flag, [[last], [out]], (2.0,))
    assert torch.equal(out, x * 2)
    flat = torch.empty(96)
    call("scale", flag, [[x], [flat]], (2.0,))
    assert torch.equal(flat, x.view(-1) * 2)
    one = x[:, :1].contiguous()  # the stride of one channel says nothing
    other = torch.empty(2, 1, 4, 4).as_strided(one.shape, (16, 1, 4, 1))
    call("scale", flag, [[one], [other]], (2.0,))
    assert torch.equal(other, one * 2)
    with pytest.raises(RuntimeError, match="strides"):  # apex paired the wrong elements
        call("scale", flag, [[last], [torch.empty_like(x)]], (1.0,))


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([[torch.ones(2)], [torch.ones(3)]], "dst\\[0\\] has shape"),
        ([[torch.ones(2, dtype=f64)], [torch.ones(2)]], "Double"),
        ([[torch.ones(2, device="meta")], [torch.ones(2)]], "not for meta"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(lists, message, flag):
    with pytest.raises(RuntimeError, match=message):
        call("scale", flag, lists, (1.0,))


@pytest.mark.parametrize("name", OPERATIONS)
def test_lists_that_do_not_fit(name, flag):
    refuses = functools.partial(pytest.raises, RuntimeError)
    lists, options = arguments(name, "cpu")
    before = [[t.clone() for t in tensors] for tensors in lists]
    known = "l2norm" if name == "l2norm_mp" else name
    for wrong in ([], lists * 2):
        message = rf"^multi_tensor_{known} takes \d list\(s\).*got {len(wrong)}"
        with refuses(match=message):
            call(name, flag, wrong, options)
    with refuses(match="first list is empty"):
        call(name, flag, [[] for _ in lists], options)
    for shorter in lists[1:2]:
        with refuses(match="list 0 has 4 tensors, list 1 has 3"):
            call(name, flag, [lists[0], shorter[:3], *lists[2:]], options)
    channels = torch.rand(1, 2, 3, 3, 3)
    for gaps in (channels[:, :1, ::2], channels.transpose(2, 4)):
        with refuses(match="tensor 0 of list 0 is neither contiguous"):
            call(name, flag, [[gaps, *tensors[1:]] for tensors in lists], options)
    assert all(map(torch.equal, itertools.chain(*lists), itertools.chain(*before)))
    last = channels.contiguous(memory_format=torch.channels_last_3d)
    for dense in (channels, last, channels[0, :1]):
        call(name, flag, [[dense.clone(), *tensors[1:]] for tensors in lists], options)
    assert flag.item() == 0


def test_what_is_not_here_is_named():
    with pytest.raises(AttributeError, match="it has multi_tensor_adagrad"):
        amp_C.nonsense  # noqa: B018
    assert multi_tensor_applier.available
    assert multi_tensor_applier.chunk_size == 65536


def test_update_scale_hysteresis():
    """Against the rule, written as branches."""
    expected = [1024.0, 0, 2]
    tensors = torch.tensor([1024.0]), *torch.tensor([[0], [2]], dtype=torch.int32)
    for overflows in (0, 0, 1, 0, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0):
        found_inf = torch.tensor([float(overflows)])
        result = amp_C.update_scale_hysteresis(*tensors, found_inf, 2.0, 0.5, 3, 2)
        scale, growth, hysteresis = expected
        if overflows:
            growth, hysteresis = 0, hysteresis - 1
            scale *= 0.5 if hysteresis <= 0 else 1.0
        else:
            growth, hysteresis = growth + 1, 2
            if growth == 3:
                scale, growth = scale * 2.0, 0
        expected = [scale, growth, hysteresis]
        assert result is tensors[0]
        assert [t.item() for t in tensors] == expected
    largest = torch.tensor([2.0**127])
    amp_C.update_scale_hysteresis(largest, *tensors[1:], torch.zeros(1), 2.0, 0.5, 1, 2)
    assert largest.item() == 2.0**127


# --- optimizers -----------------------------------------------------------------------------------

# Operations that are an optimizer's step.
NAMES = [n for n in OPERATIONS if n.startswith(("ada", "la", "no", "sg"))]
OPTIONS = {"lr": LR, "betas": (BETA1, BETA2), "eps": EPS, "weight_decay": WD}
MOMENTS = ("exp_avg", "exp_avg_sq")
TOLERANCE = {f32: 2e-6, f16: 1e-3, bf16: 8e-3}


def randn(dtype=f32, device="cpu"):
    return [torch.randn(size).to(device, dtype) for size in SIZES]


def moments(dtype, kind=f32, device="cpu"):
    """Parameters, and the two states of Adam."""
    return [randn(dtype, device), randn(kind, device), rand(kind, device)]


def exact(lists):
    return [[t.detach().cpu().to(f64) for t in tensors] for tensors in lists]


def copies(lists):
    return [[t.clone() for t in tensors] for tensors in lists]


def assert_lists(found, expected):
    for tensors, values in zip(found, expected, strict=True):
        for t, v in zip(tensors, values, strict=True):
            tolerance = TOLERANCE[t.dtype]
            torch.testing.assert_close(t.cpu().to(f64), v, rtol=tolerance, atol=tolerance)


def assert_unchanged(found, before):
    for tensors, values in zip(found, before, strict=True):
        for t, v in zip(tensors, values, strict=True):
            torch.testing.assert_close(t, v, rtol=0, atol=0, equal_nan=True)


def after(rule, lists, names, t=T, **options):
    """(parameters, *states) after the step."""
    grads, params, *states = exact(lists)
    held = [dict(zip(names, row, strict=True)) for row in zip(*states, strict=True)]
    rule(params, grads, held, t, **OPTIONS | options)
    return [params, *([each[name] for each in held] for name in names)]


def lamb_update(lists, k, decays, mode, bc, averaging):
    """(updates, exp_avg, exp_avg_sq)."""
    result = []
    for g, p, m, v, wd in zip(*lists, decays, strict=True):
        options = {"weight_decay": wd, "adam_w_mode": mode, "bias_correction": bc}
        state = {"exp_avg": m, "exp_avg_sq": v, "step": T - 1}
        rule = reference.apex_rule(
            reference.Lamb, OPTIONS | options | {"grad_averaging": averaging}
        )
        u = rule.update(p, g / k, state)
        result.append((u, state["exp_avg"], state["exp_avg_sq"]))
    return [list(column) for column in zip(*result, strict=True)]


def lamb_apply(params, updates, has_ratio):
    """The ratio is 1 where a norm is zero."""
    result = []
    for p, u in zip(params, updates, strict=True):
        norms = p.norm(), u.norm()
        ratio = norms[0] / norms[1] if has_ratio and all(norms) else 1
        result.append(p - LR * ratio * u)
    return result


@pytest.mark.covers(2)
@pytest.mark.parametrize("models", [None, f16, bf16])
@pytest.mark.parametrize(("late", "first"), list(itertools.product((False, True), (False, True))))
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("dtype", [f32, f16, bf16])
def test_sgd_follows_apexs_formula(dtype, momentum, nesterov, late, first, models, device):
    kind = f32 if models else dtype
    lists = [randn(dtype, device), randn(kind, device), randn(kind, device)]
    dampening = 0.0 if nesterov else 0.3
    decay = {"momentum": momentum, "nesterov": nesterov, "wd_after_momentum": late}
    scaled = [[g.to(f64) * 0.3 for g in lists[0]], *lists[1:]]
    expected = after(
        reference.apex_sgd,
        scaled,
        ["momentum_buffer"],
        1 if first else 2,
        dampening=dampening,
        **decay,
    )
    if models:
        lists.append(randn(models, device))
    noop = flag_of(0, device)
    options = (WD, momentum, dampening, LR, nesterov, first, late, 0.3)
    assert amp_C.multi_tensor_sgd(333, noop, lists, *options) is None
    assert_lists(lists[1:3], expected)
    if models:
        assert all(torch.equal(h, p.to(models)) for p, h in zip(lists[1], lists[3], strict=True))
    assert noop.item() == 0


@pytest.mark.parametrize(("decay", "late"), [(0.0, False), (WD, False), (WD, True)])
@pytest.mark.parametrize("dtype", [f16, bf16])
def test_sgd_rounds_nothing_but_the_step_of_half_weights(dtype, decay, late, device):
    """All before it is FP32. (An element in a hundred may round otherwise by another order.)"""
    lists = [[torch.randn(5001).to(device, dtype)] for _ in range(3)]
    g, p, m = (tensors[0].float() for tensors in lists)
    options = (decay, 0.9, 0.0, 0.3, False, False, late, 0.3)
    amp_C.multi_tensor_sgd(333, flag_of(0, device), lists, *options)
    g = 0.9 * m + (0.3 * g if late else 0.3 * g + decay * p)
    step = -0.3 * (g + decay * p if late else g)
    twice = p.to(dtype) + step.to(dtype)
    assert (lists[1][0] == twice).float().mean() > 0.99
    assert ((p + step).to(dtype) == twice).float().mean() < 0.99
    assert (lists[2][0] == g.to(dtype)).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [f32, f16])
def test_sgd_without_decay_does_not_read_the_weights(dtype, device):
    lists = [[torch.ones(3).to(device, dtype)] for _ in range(3)]
    lists[1][0][1] = float("inf")
    amp_C.multi_tensor_sgd(333, flag_of(0, device), lists, 0, 0.5, 0, 0.5, True, False, False, 1.0)
    assert lists[1][0].tolist() == [1 - 0.5 * 1.75, float("inf"), 1 - 0.5 * 1.75]
    assert lists[2][0].tolist() == [1.5] * 3


@pytest.mark.covers(2)
@pytest.mark.parametrize(("mode", "bc"), list(itertools.product((0, 1), (0, 1))))
@pytest.mark.parametrize("dtype", [f32, f16, bf16])
@pytest.mark.parametrize(
    ("name", "set_flag"),
    [("adam", 0), ("adam", 1), ("adam_capturable", 0), ("adam_capturable_master", 0)],
)
def test_adam_follows_apexs_formula(name, set_flag, dtype, mode, bc, device):
    """The first ignores the flag; the others unscale the gradients."""
    master, capturable = name.endswith("master"), name != "adam"
    lists = [randn(dtype, device), *moments(dtype, device=device)]
    start, grads = exact(lists), copies(lists)[0]
    if master:
        lists.append(randn(f32, device))
        start[1] = exact(lists)[4]
    more = (mode, bc, WD)
    if capturable:
        start[0] = [g / 8 for g in start[0]]
        grads = [(g.float() / 8).to(dtype) for g in grads]
        step = number(T, device, torch.int32)
        options = (number(LR, device), BETA1, BETA2, EPS, step, *more, number(0.125, device))
    else:
        options = (LR, BETA1, BETA2, EPS, T, *more)
    expected = after(reference.apex_adam, start, MOMENTS, adam_w_mode=mode, bias_correction=bc)
    noop = flag_of(set_flag, device)
    call(name, noop, lists, options)
    assert_lists([lists[4] if master else lists[1], *lists[2:4]], expected)
    assert_unchanged([lists[0]], [grads])
    if master:
        assert_unchanged([lists[1]], [[p.to(dtype) for p in lists[4]]])
    assert options[4] == T
    assert noop.item() == set_flag


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("dtype", [f32, f16, bf16])
def test_adagrad_follows_apexs_formula(dtype, mode, device):
    lists = [randn(dtype, device), randn(dtype, device), rand(dtype, device)]
    expected = after(reference.apex_adagrad, lists, ["sum"], adagrad_w_mode=mode)
    amp_C.multi_tensor_adagrad(333, flag_of(1, device), lists, LR, EPS, mode, WD)
    assert_lists(lists[1:], expected)


@pytest.mark.covers(2)
@pytest.mark.parametrize(
    ("mode", "bc", "averaging", "kind"), list(itertools.product((0, 1), (0, 1), (0, 1), (0, 2)))
)
@pytest.mark.parametrize("dtype", [f32, f16])
def test_novograd_follows_apexs_formula(dtype, mode, bc, averaging, kind, device):
    lists = [randn(dtype, device), randn(dtype, device), randn(dtype, device)]
    norms = torch.rand(len(SIZES), device=device) + 1
    flags = {"bias_correction": bc, "grad_averaging": averaging, "norm_type": kind}
    flags |= {"reg_inside_moment": not mode, "init_zero": True}
    expected = after(reference.apex_novograd, [*lists, norms], ["exp_avg", "exp_avg_norm"], **flags)
    noop = flag_of(0, device)
    options = (norms, LR, BETA1, BETA2, EPS, T, bc, WD, averaging, mode, kind)
    amp_C.multi_tensor_novograd(333, noop, lists, *options)
    assert_lists([*lists[1:], list(norms)], expected)
    assert noop.item() == 0
    lists[0][1][2] = float("inf")
    amp_C.multi_tensor_novograd(333, noop, lists, *options)
    assert noop.item() == 1


@pytest.mark.covers(2)
@pytest.mark.parametrize(
    ("mode", "bc", "averaging", "wd", "nvlamb", "largest"),
    [
        (1, 1, 1, WD, False, 10.0),
        (0, 1, 1, WD, False, 10.0),
        (1, 0, 1, WD, False, 10.0),
        (1, 1, 0, WD, False, 10.0),
        (1, 1, 1, 0.0, None, 10.0),  # or left out; it is False
        (1, 1, 1, 0.0, True, 10.0),
        (0, 0, 0, 0.0, False, float("inf")),
        (1, 1, 1, WD, True, 1e6),
    ],
)
@pytest.mark.parametrize(
    ("name", "low", "high"),
    [(name, kind, kind) for name in ("lamb", "lamb_mp") for kind in (f32, f16)]
    + [("lamb_mp", low, f32) for low in (f16, bf16)],
)
def test_lamb_follows_apexs_formula(
    name, low, high, mode, bc, averaging, wd, nvlamb, largest, device
):
    """The norms are of the updates as they are rounded into the gradients."""
    lists = [randn(low, device), *moments(high, high, device)]
    lists[1][0].zero_()
    start = exact(lists)
    if low != high:
        lists.append(randn(low, device))
    norm = float(torch.cat(start[0]).norm())
    mp = name == "lamb_mp"
    k = max(norm / largest, 1) * (8 if mp else 1)
    expected = lamb_update(start, k, [wd] * len(SIZES), mode, bc, averaging)
    noop = flag_of(not mp, device)  # LAMB without masters does not read it
    flags, clip = (bc, wd, averaging, mode), number(norm, device)
    options = (LR, BETA1, BETA2, EPS, T, *flags, clip, largest)
    if nvlamb is not None:
        options += (nvlamb,)
    if mp:
        step, one = number(T, device, torch.int32), number(1.0, device)  # found_inf says nothing
        options = (number(LR, device), BETA1, BETA2, EPS, step, *flags, clip)
        options += (number(largest, device), nvlamb, one, one / 8)
    call(name, noop, lists, options)
    assert_lists([lists[0], *lists[2:4]], expected)
    assert_lists([lists[1]], [lamb_apply(start[1], exact(lists)[0], nvlamb or wd != 0)])
    if low != high:
        assert_unchanged([lists[4]], [[p.to(low) for p in lists[1]]])
    assert noop.item() == (not mp)


@pytest.mark.parametrize(("norm", "gradients"), [(5.0, 0.0), (0.0, 1.0)])
def test_lamb_clips_to_a_norm_of_zero(norm, gradients, device):
    """Gradients become zero, but for those whose norm is no more than that."""
    lists = [randn(device=device), randn(device=device), randn(device=device), rand(device=device)]
    start = exact(lists)
    start[0] = [g * gradients for g in start[0]]
    expected = lamb_update(start, 1, [WD] * len(SIZES), 1, 1, 1)
    options = (LR, BETA1, BETA2, EPS, T, 1, WD, 1, 1, number(norm, device), 0.0, False)
    amp_C.multi_tensor_lamb(333, flag_of(0, device), lists, *options)
    assert_lists([lists[0], *lists[2:]], expected)


@pytest.mark.parametrize("kinds", list(itertools.product((f32, f16), repeat=3)))
def test_lamb_in_stages_follows_apexs_formula(kinds, device):
    low, high, out = kinds
    lists = [randn(low, device), randn(high, device), randn(high, device), rand(high, device)]
    start, kept = exact(lists), copies(lists[:2])
    norm = float(torch.cat(start[0]).norm())
    updates = randn(out, device)
    decays = [0.1, 0.0, 0.1, 0.3]
    numbers = (number(norm, device), 10.0)
    before = torch.tensor(decays, device=device)
    step = torch.tensor(T - 1, device=device)
    options = (before, step, BETA1, BETA2, EPS, *numbers)
    noop = flag_of(1, device)
    amp_C.multi_tensor_lamb_stage1_cuda(333, noop, [*lists, updates], *options)
    expected = lamb_update(start, norm / 10, decays, 1, 1, 1)
    assert_lists([updates, *lists[2:]], expected)
    assert_unchanged([*lists[:2], [step]], [*kept, [torch.tensor(T - 1, device=device)]])
    lists[1][0].zero_()
    updates[2].zero_()
    for wd, *nvlamb in ((0.1, False), (0.0,), (0.0, None), (0.0, True)):
        params = [p.clone() for p in lists[1]]
        norms = [
            amp_C.multi_tensor_l2norm(333, flag_of(0, device), [tensors], True)[1]
            for tensors in (params, updates)
        ]
        amp_C.multi_tensor_lamb_stage2_cuda(333, noop, [params, updates], *norms, LR, wd, *nvlamb)
        expected = lamb_apply(*exact([lists[1], updates]), any(nvlamb) or wd != 0)
        assert_lists([params], [expected])


@pytest.mark.parametrize(
    ("name", "value", "stops"),
    [(name, 1, True) for name in ("sgd", "adam_capturable", "adam_capturable_master", "lamb_mp")]
    + [("sgd", 2, True), ("lamb_mp", 2, True)]
    + [("adam_capturable", 2, False), ("adam_capturable_master", 2, False)],
)
def test_a_set_flag_stops_it(name, value, stops, device):
    lists, options = arguments(name, device)
    before, noop = copies(lists), flag_of(value, device)
    call(name, noop, lists, options)
    if stops:
        assert_unchanged(lists, before)
    else:
        assert not any(map(torch.equal, lists[0], before[0]))
    assert noop.item() == value
    if name == "sgd":
        lists = [[t.half() for t in tensors] for tensors in before]
        before = copies(lists)
        call(name, noop, lists, (*options[:6], True, options[7]))  # late decay
        assert_unchanged(lists, before)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", NAMES)
def test_who_sets_the_flag(name, bad, device):
    """Operations that take norms set the flag and go on; LAMB with masters changes nothing."""
    for where in (0, 1):
        lists, options = arguments(name, device)
        if name == "novograd" and where == 1:
            continue  # it has no norms of parameters
        lists[where][2][77] = bad
        before, noop = copies(lists), flag_of(0, device)
        call(name, noop, lists, options)
        assert noop.item() == (name in ("novograd", "lamb", "lamb_mp"))
        if name == "lamb_mp":
            kept = (1, 4) if where == 0 else range(5)
            assert_unchanged([lists[i] for i in kept], [before[i] for i in kept])
        call(name, noop, *arguments(name, device))
        assert noop.item() == (name in ("novograd", "lamb", "lamb_mp"))


def of_rows(options, rows):
    """Copies of `options`, and where there is one for each row, of those of `rows`."""

    def copied(option):
        if not isinstance(option, torch.Tensor):
            return option
        return option[rows] if len(option) == len(SIZES) else option.clone()

    return list(map(copied, options))


@pytest.mark.parametrize("name", NAMES)
def test_chunks_and_neighbours_do_not_matter(name, device):
    lists, options = arguments(name, device)
    results = []
    for chunk in (65536, 333):
        updated = copies(lists)
        call(name, flag_of(0, device), updated, of_rows(options, [0, 1, 2, 3]), chunk)
        results.append(updated)
    assert_unchanged(results[0], results[1])
    lists = [[*tensors, torch.zeros(0, device=device)] for tensors in lists]
    call(name, flag_of(0, device), lists, of_rows(options, [0, 1, 2, 3, 0]))
    assert_unchanged([tensors[:-1] for tensors in lists], results[0])


@pytest.mark.parametrize("name", NAMES)
def test_each_row_has_a_type_of_its_own(name, device):
    """apex took that of the first row for all."""
    lists, options = arguments(name, device)
    lists = lists[:4] if name == "lamb_mp" else lists
    # Lists that may hold half types have a float16 tensor second and a bfloat16 one fourth.
    dtypes = (f32, f16, f32, bf16)
    halves = 2 if name.startswith("adam") else len(lists)
    lists[:halves] = [[t.to(d) for t, d in zip(ts, dtypes, strict=True)] for ts in lists[:halves]]
    rows = [[[t.clone()] for t in row] for row in zip(*lists, strict=True)]
    call(name, flag_of(0, device), lists, of_rows(options, [0, 1, 2, 3]))
    for i, row in enumerate(rows):
        call(name, flag_of(0, device), row, of_rows(options, [i]))
        for tensors, (alone,) in zip(lists, row, strict=True):
            assert tensors[i].dtype == alone.dtype
            torch.testing.assert_close(tensors[i], alone, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_fit(name):
    lists, options = arguments(name, "cpu")
    refuses = functools.partial(pytest.raises, RuntimeError)
    before, noop = copies(lists), flag_of(0, "cpu")
    with refuses(match="they have to match"):
        call(name, noop, [lists[0][::-1], *lists[1:]], options)
    with refuses(match="float64; it must be torch.float32"):
        call(name, noop, [[t.double() for t in tensors] for tensors in lists], options)
    wrong = {"sgd": 2, "lamb_mp": 1, "lamb_stage1_cuda": 3, "lamb_stage2_cuda": None}
    last = wrong.get(name, len(lists) - 1)
    if last is not None:
        mixed = [*lists[:last], [t.half() for t in lists[last]], *lists[last + 1 :]]
        with refuses(match=f"of list {last} is torch.float16"):
            call(name, noop, mixed, options)
    if name == "sgd":
        with refuses(match=r"list 3 is torch.float32; it must be torch.float16"):
            call(name, noop, [*lists, rand()], options)
    assert_unchanged(lists, before)


@pytest.mark.parametrize(
    ("name", "place", "message"),
    [
        ("novograd", 0, "norm_averages has 3 elements"),
        ("lamb_stage1_cuda", 0, "per_tensor_decay has 3 elements for 4"),
        ("lamb_stage2_cuda", 0, "per_tensor_param_norm has 3 elements for 4"),
        ("lamb_stage2_cuda", 1, "per_tensor_update_norm has 3 elements for 4"),
        ("novograd", -1, "norm_type must be 0"),
    ],
)
def test_numbers_that_do_not_fit(name, place, message):
    lists, options = arguments(name, "cpu")
    options = list(options)
    options[place] = 1 if place == -1 else options[place][:3]
    with pytest.raises(RuntimeError, match=message):
        call(name, flag_of(0, "cpu"), lists, options)


# --- fused_adam_cuda ------------------------------------------------------------------------------


@pytest.mark.covers(2)
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("bias_correction", [0, 1])
@pytest.mark.parametrize(("dtype", "of_grad"), [(f32, f16), (f32, f32), (f64, f64)])
@pytest.mark.parametrize("name", ["adam", "reversible_adam", "adam_mt", "reversible_adam_mt"])
def test_fused_adam_cuda_steps_copies_and_undoes(name, dtype, of_grad, bias_correction, mode):
    torch.manual_seed(0)
    p, m = torch.randn(6, dtype=dtype), torch.randn(6, dtype=dtype) * 0.1
    v, g, copy = torch.rand(6, dtype=dtype), torch.randn(6).to(of_grad), torch.empty(6).to(of_grad)
    given = (0.1, 0.9, 0.99, 0.01, 4.0, 3, mode, bias_correction, 0.05)
    flag = torch.zeros(1, dtype=torch.int32)
    before = [t.clone() for t in (p, m, v)]
    expected = reference.adam_of_2019(p, m, v, g, *given)
    step = getattr(fused_adam_cuda, name)
    if name.endswith("_mt"):
        multi_tensor_applier(step, flag, [[p], [m], [v], [g], [copy]], *given)
    else:
        step(p, copy, m, v, g, *given)
    for found, exact in zip((p, m, v), expected, strict=True):
        torch.testing.assert_close(found, exact)
    assert torch.equal(copy, p.to(of_grad))
    for value, then in ((0, (p.clone(), m.clone(), v.clone())), (1, before)):
        flag.fill_(value)
        fused_adam_cuda.maybe_adam_undo(flag, p, m, v, g, *given)
        for found, exact in zip((p, m, v), then, strict=True):
            torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)
    empty = torch.tensor([], dtype=f32)  # no copy is asked for
    fused_adam_cuda.adam(p, empty, m, v, g, *given)


def test_fused_adam_cuda_steps_numbers_without_a_copy():
    p, m, v, g = torch.tensor(1.0), torch.tensor(0.0), torch.tensor(0.0), torch.tensor(2.0)
    flag = torch.zeros(1, dtype=torch.int32)
    numbers = 0.1, 0.9, 0.999, 1e-8, 1.0, 1, 1, 1, 0.0
    fused_adam_cuda.adam_mt(0, flag, [[p], [m], [v], [g]], *numbers)
    torch.testing.assert_close(p, torch.tensor(0.9))


def test_reversible_adam_leaves_what_overflows():
    p, m, v = torch.ones(3), torch.zeros(3), torch.zeros(3)
    g, copy = torch.tensor([1.0, float("inf"), float("nan")]), torch.empty(3, dtype=f16)
    fused_adam_cuda.reversible_adam(p, copy, m, v, g, 0.1, 0.9, 0.999, 1e-8, 1.0, 1, 1, 1, 0.0)
    assert torch.equal(p[1:], torch.ones(2))
    assert p[0] < 1
    assert copy[0].isinf()
    assert torch.equal(copy[1:], p[1:].half())
    assert not m[1:].any()
    flag = torch.zeros(1, dtype=torch.int32)
    for values, stride, clear, seen in ((copy, 3, 0, 1), (p, 1, 0, 1), (p, 1, 1, 0)):
        fused_adam_cuda.strided_check_finite(flag, values, stride, clear)
        assert flag.item() == seen
