"""csrc/torch/half_ops.cpp: what torch is slow at in half on the CPU, computed in FP32."""

import itertools
import threading
import time
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import ampfuse
from ampfuse import hardware
from ampfuse._core import EXTENSION as _C
from cases import Convolution, assert_torchs_own
from programs import python

HALF, LAST = torch.float16, torch.channels_last
# One rounding is off by at most half the spacing: relative 2^-11 (BF16: 2^-9; its kernels get
# twice that), or half a subnormal step.
ROUNDING = {torch.float16: (2.0**-11, 2.0**-25), torch.bfloat16: (2.0**-8, 2.0**-133)}


@pytest.fixture(autouse=True)
def ours():
    with ampfuse.cpu_half_ops():
        yield


def eighths(shape):
    """Exact in any dtype."""
    return torch.randint(-8, 9, shape).div(8)


def case(**changes):
    usual = {"x": (2, 4, 7, 6), "w": (6, 4, 3, 3), "padding": 1, "bias": True}
    usual |= {"dtype": HALF, "channels_last": False, "draw": eighths}
    return Convolution(**usual | changes)


def assert_within_rounding(actual, expected, dtype):
    """`actual` is `expected` (float64) within one rounding to `dtype` and FP32 arithmetic."""
    relative, absolute = ROUNDING[dtype]
    assert actual.dtype == dtype
    torch.testing.assert_close(
        actual.double(), expected, rtol=relative * 1.01, atol=absolute + 1e-5
    )


CONVOLUTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "stride": {"stride": 2},
    "dilation": {"dilation": 2, "padding": 2},
    "groups": {"w": (6, 2, 3, 3), "groups": 2},
    "depthwise": {"w": (4, 1, 3, 3), "groups": 4},
    "one channel": {"x": (16, 1, 8, 8), "w": (32, 1, 3, 3)},
    "1x1": {"w": (6, 4, 1, 1), "padding": 0},
    "1d": {"x": (2, 4, 9), "w": (6, 4, 3)},
    "3d": {"x": (2, 4, 5, 4, 3), "w": (6, 4, 3, 3, 3)},
    "transposed": {"w": (4, 6, 3, 3), "transposed": True, "stride": 2, "output_padding": 1},
    "transposed groups": {"w": (4, 3, 3, 3), "transposed": True, "groups": 2},
    "transposed dilation": {"w": (4, 6, 2, 2), "transposed": True, "dilation": 2, "padding": 0},
    "transposed 1d": {"x": (2, 4, 9), "w": (4, 6, 3), "transposed": True, "stride": 2},
    "transposed 3d": {"x": (1, 4, 3, 4, 3), "w": (4, 6, 2, 2, 2), "transposed": True, "padding": 0},
    "channels last": {"channels_last": True},
    "pixels": {"w": (6, 4, 1, 1), "padding": 0, "channels_last": True},
    "channels last 3d": {"x": (2, 4, 5, 4, 3), "w": (6, 4, 3, 3, 3), "channels_last": True},
    "empty batch": {"x": (0, 4, 7, 6)},
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients_are_those_of_float64_rounded(name, deterministic):
    drawn = case(**CONVOLUTIONS[name])
    torch.use_deterministic_algorithms(deterministic)
    try:
        actual = drawn.backward()
    finally:
        torch.use_deterministic_algorithms(False)
    count = 2 if drawn.bias is None else 3
    for a, e in zip(actual[:count], drawn.backward(torch.float64), strict=False):
        assert_within_rounding(a, e, HALF)
    if name == "channels last":
        assert actual[0].is_contiguous(memory_format=LAST)
        assert not actual[0].is_contiguous()


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)))
def test_only_the_gradients_that_are_asked_for_are_computed(wanted):
    drawn = case()
    each = [drawn.backward(dtype, wanted) for dtype in (None, torch.float32, torch.float64)]
    for asked, a, f, e in zip(wanted, *each, strict=True):
        assert (a is None) == (f is None)  # torch may give more than it was asked for
        if asked:
            assert_within_rounding(a, e, HALF)


def test_sums_are_not_rounded_on_the_way():
    """A weight gradient of 4096 equal terms: FP16 additions would stick at 2048."""
    ones = case(x=(4, 1, 32, 32), w=(1, 1, 1, 1), padding=0, draw=torch.ones)
    _, weight, bias = ones.backward()
    assert weight.item() == bias.item() == 4096


def test_overflow_becomes_inf():
    """The loss scaler relies on it: what half cannot hold is inf, not a large finite number."""
    drawn = case()
    drawn.dy.fill_(60000.0)
    assert drawn.backward()[2].isinf().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["plain", "groups", "transposed", "channels last", "pixels"])
def test_other_dtypes_are_torchs_own(name, dtype):
    if dtype == torch.bfloat16 and not hardware.cpu_has_bf16():
        pytest.skip("BF16 is computed in FP32 on this CPU")
    assert_torchs_own(case(**CONVOLUTIONS[name], dtype=dtype).results)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("wide", ["w", "bias"])
def test_mixed_dtypes_are_torchs_own(wide, dtype, kernel):
    drawn = case(w=(6, 4, kernel, kernel), dtype=dtype, channels_last=True)
    setattr(drawn, wide, getattr(drawn, wide).float())
    assert_torchs_own(lambda: [drawn.forward()])
    if wide == "w":  # backward reads no bias
        assert_torchs_own(drawn.backward)  # torch 2.11 refuses them


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize(("dtype", "precision"), [(HALF, 4e-3), (torch.bfloat16, 0.02)])
def test_first_and_second_derivatives_agree_with_float64(dtype, precision, kernel):
    """Through the module API: first and second derivatives against float64."""
    inputs = [eighths(shape) for shape in ((2, 6, 8, 8), (5, 6, kernel, kernel))]

    def gradients(dtype):
        a, b = (t.to(dtype, memory_format=LAST).requires_grad_() for t in inputs)
        y = F.conv2d(a, b, padding=kernel // 2)
        first = torch.autograd.grad(y.square().sum() / 16, (a, b), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first) / 256, (a, b))
        return [g.detach() for g in (*first, *second)]

    for half, exact in zip(gradients(dtype), gradients(torch.float64), strict=True):
        assert half.dtype == dtype
        # Several roundings in a row now, so compare with the largest element.
        assert (half.double() - exact).abs().max() < precision * exact.abs().max()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("inside", [False, True], ids=("backward outside", "backward inside"))
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Conv2d(3, 4, 3, padding=1),
        lambda: torch.nn.Conv2d(3, 4, 1),
        lambda: torch.nn.ConvTranspose2d(3, 4, 2),
        lambda: torch.nn.Conv2d(3, 3, 3, groups=3, dilation=2),
    ],
    ids=["3x3", "1x1", "transposed", "groups"],
)
def test_parameters_under_autocast_get_gradients_rounded_once(make, inside, dtype):
    """FP32 parameters get FP32 gradients, made from half ones that were rounded once."""
    layer, x = make().to(memory_format=LAST), torch.randn(2, 3, 8, 8)
    with torch.autocast("cpu", dtype):
        y = layer(x.to(memory_format=LAST))
        assert y.dtype == dtype
        if inside:
            y.sum().backward()
    if not inside:
        y.sum().backward()
    rounded = make().double()
    rounded.load_state_dict({k: v.to(dtype) for k, v in layer.state_dict().items()})
    rounded(x.to(dtype).double()).sum().backward()
    for ours, exact in zip(layer.parameters(), rounded.parameters(), strict=True):
        assert ours.grad.dtype == torch.float32
        assert torch.equal(ours.grad, ours.grad.to(dtype).float())
        assert_within_rounding(ours.grad.to(dtype), exact.grad, dtype)


# Every product and the shapes of its inputs; forward and backward, in both half types.
PRODUCTS = {
    "conv2d": (F.conv2d, (2, 4, 7, 6), (6, 4, 3, 3), (6,)),
    "conv2d groups": (partial(F.conv2d, groups=2), (2, 4, 7, 6), (6, 2, 3, 3)),
    "conv_transpose2d": (F.conv_transpose2d, (2, 4, 7, 6), (4, 6, 3, 3)),
    "mm": (torch.mm, (5, 70), (70, 9)),
    "linear": (F.linear, (5, 70), (9, 70), (9,)),
    "linear 3d": (F.linear, (2, 5, 70), (9, 70), (9,)),
    "mv": (torch.mv, (5, 70), (70,)),
    "bmm": (torch.bmm, (3, 5, 70), (3, 70, 9)),
    "baddbmm": (torch.baddbmm, (3, 5, 9), (3, 5, 70), (3, 70, 9)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_right_on_a_cpu_without_half_instructions(name):
    call, *shapes = PRODUCTS[name]
    inputs = [eighths(shape) for shape in shapes]
    _C.set_half_ops(True, every=True)

    def gradients(dtype):
        wide = [t.to(dtype).requires_grad_() for t in inputs]
        y = call(*wide)
        return y, *torch.autograd.grad(y, wide, torch.ones_like(y))

    for dtype, rtol in ((torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)):
        for half, exact in zip(gradients(dtype), gradients(torch.float64), strict=True):
            assert half.dtype == dtype
            torch.testing.assert_close(half.double(), exact, rtol=1.01 * rtol, atol=1e-6)
    ours = call(*inputs)
    _C.set_half_ops(False)
    assert torch.equal(ours, call(*inputs))


def test_the_dispatch_table_is_as_before():
    """After a block nothing is replaced. (test_what_it_changes.py: what is replaced in one.)"""
    names = [f"aten::{name}" for name in ("_convolution", "convolution_backward", "mm")]

    def table():
        return [
            torch._C._dispatch_dump(name) + torch._C._dispatch_dump_table(name) for name in names
        ]

    _C.set_half_ops(False)
    before = table()
    for every in (False, True):
        _C.set_half_ops(True, every)
        replaced = table()
        _C.set_half_ops(True, every)
        assert table() == replaced
        assert replaced[:2] != before[:2]
        assert replaced[2] != before[2] or not every
        _C.set_half_ops(False)
        assert table() == before


def convolution(dtype=HALF):
    model, x = torch.nn.Conv2d(2, 3, 3), torch.randn(2, 2, 5, 5)
    return (tensors.to(dtype, memory_format=LAST) for tensors in (model, x))


def casts(call):
    """The number of casts in `call`: kernels that compute in FP32 have some."""
    with torch.profiler.profile() as profiled:
        call()
    return sum(e.count for e in profiled.key_averages() if e.key == "aten::_to_copy")


@pytest.mark.covers(2)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("first", [True, False], ids=["compiled with", "compiled without"])
def test_compiled_code_has_the_kernels_of_the_moment(first, backend, dtype):
    model, x = convolution(dtype)

    def gradient(run):
        model.zero_grad()
        run(x).sum().backward()
        return model.weight.grad

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    counted = {}
    for on in (first, not first):
        with ampfuse.cpu_half_ops(on):
            assert torch.equal(gradient(compiled), gradient(model))
            counted[on] = casts(lambda: gradient(compiled))
    assert counted[True] > counted[False] or dtype != HALF  # BF16: test_small_convolutions.py


def test_traced_code_is_the_same():
    model, x = convolution()
    with_ours = make_fx(model)(x).code
    with ampfuse.cpu_half_ops(False):
        assert make_fx(model)(x).code == with_ours


def test_threads_compute_right_while_kernels_are_exchanged():
    model, x = convolution()

    def gradient():
        return torch.autograd.grad(model(x).sum(), model.weight)[0]

    ours = gradient()
    with ampfuse.cpu_half_ops(False):
        torchs = gradient()
    ended, right = threading.Event(), ([], [])  # of each thread, whether its gradients were right

    def compute(seen):
        while not ended.is_set():
            computed = gradient()
            seen.append(torch.equal(computed, ours) or torch.equal(computed, torchs))

    threads = [threading.Thread(target=compute, args=(seen,)) for seen in right]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while min(map(len, right)) < 20 and time.monotonic() < deadline:
        with ampfuse.cpu_half_ops(False):
            pass
    ended.set()
    for thread in threads:
        thread.join()
    assert min(map(len, right)) >= 20
    assert all(map(all, right))


REPLACE = """
import warnings, torch
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", lambda a, b: a, "CPU")
print(len(seen))
"""


def test_silence_is_for_our_registrations():
    """torch still warns of the next library that replaces a kernel; a process may end with ours."""
    install = "from ampfuse._core import EXTENSION as _C\n_C.set_half_ops(True, every=True)\n"
    ours, torchs = (python("-W", "error", "-c", code) for code in (install + REPLACE, REPLACE))
    assert not ours.stderr
    assert ours.returncode == 0
    assert ours.stdout == torchs.stdout != ""
