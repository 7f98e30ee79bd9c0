"""ampfuse.nn.bias_act and gated_act against float64, and what torch expects of an operator."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ampfuse.nn import bias_act, gated_act
from conftest import compilers
from operators import (
    assert_compiles,
    assert_rounded,
    assert_same_bits_with_any_threads,
    assert_same_second_derivative,
)

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
CURVES = {
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}
TILE, SPAN = 32, 512  # rows, of which a bias's sums are made


def op(x, up=None, bias=None, curve="gelu"):
    return torch.ops.ampfuse.activation(x, up, bias, curve)


def check(shape, dtype, curve, *, up=False, bias=None, scale=2.0, device="cpu"):
    random = torch.Generator().manual_seed(sum(shape))

    def some(*shape, dtype=dtype, scale=1.0):
        return (torch.randn(shape, generator=random) * scale).to(device, dtype)

    tensors = {"x": some(*shape, scale=scale)}
    if up:
        tensors["up"] = some(*shape)
    if bias is not None:
        tensors["bias"] = some(shape[-1], dtype=bias)
    dy = some(*shape)
    inputs = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    exactly = {name: t.double().requires_grad_() for name, t in tensors.items()}
    y = op(curve=curve, **inputs)
    right = CURVES[curve](exactly["x"] + exactly.get("bias", 0.0)) * exactly.get("up", 1.0)
    y.backward(dy)
    right.backward(dy.double())
    pairs = {"y": (y, right), **{f"d{n}": (inputs[n].grad, exactly[n].grad) for n in inputs}}
    for name, (found, expected) in pairs.items():
        own = inputs["bias"].dtype if name == "dbias" else dtype
        assert found.dtype == own, name
        size = expected.detach().abs().amax().item()
        if name == "dbias":
            size = max(size, shape[0] ** 0.5)
        assert_rounded(name, found, expected, 2e-6, size / 2)


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("up", [False, True])
@pytest.mark.parametrize("bias", [None, torch.float32, "own"])
def test_agrees_with_float64(curve, dtype, up, bias, hardware):
    bias = dtype if bias == "own" else bias
    for shape in (
        (1, 1),
        (3, 7),
        (2, 3, 16),
        (4, 17),
        (TILE + 1, 65),
        (SPAN - 1, 8),
        (SPAN + 1, 9),
    ):
        check(shape, dtype, curve, up=up, bias=bias, device=hardware)


@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 300),
    dtype=st.sampled_from(FLOATS),
    curve=st.sampled_from(list(CURVES)),
    up=st.booleans(),
    bias=st.booleans(),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
)
def test_any_shape(rows, columns, dtype, curve, up, bias, scale):
    bias = torch.float32 if bias else None
    check((rows, columns), dtype, curve, up=up, bias=bias, scale=scale)


@pytest.mark.parametrize("curve", CURVES)
def test_the_left_tail_keeps_its_digits(curve):
    """FP32, where 1 + erf(x / sqrt(2)) and 1 + tanh(u) have none left."""
    x = -torch.linspace(0.0, 12.0, 2001)
    y, right = op(x, curve=curve).double(), x.double()
    if curve == "gelu":
        right = right * torch.special.erfc(-right / 2**0.5) / 2
    elif curve == "gelu_tanh":
        right = right * torch.sigmoid((8 / torch.pi) ** 0.5 * (right + 0.044715 * right**3))
    else:
        right = F.silu(right)
    torch.testing.assert_close(y, right, rtol=1e-4, atol=2e-37)
    torch.testing.assert_close(y[:800], right[:800], rtol=4e-6, atol=2e-37)


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_values_and_those_that_are_not_finite(curve, dtype):
    large = torch.finfo(dtype).max
    x = torch.tensor([large, -large, 1e4, -1e4, float("inf"), float("nan"), 0.0, -0.0]).to(dtype)
    x.requires_grad_()
    y = op(x, curve=curve)
    assert torch.equal(y[:4].detach(), torch.tensor([large, 0.0, 1e4, 0.0]).to(dtype))
    assert y[4] == float("inf")
    assert y[5].isnan()
    assert torch.equal(y[6:].detach(), torch.zeros(2, dtype=dtype))
    y.sum().backward()
    assert torch.equal(x.grad[:4], torch.tensor([1.0, 0.0, 1.0, 0.0]).to(dtype))
    assert x.grad[5].isnan()
    torch.testing.assert_close(x.grad[6:].float(), torch.full((2,), 0.5), rtol=5e-7, atol=0)


@pytest.mark.parametrize("curve", CURVES)
def test_names_and_what_they_compute(curve):
    x, up, bias = torch.randn(5, 24), torch.randn(5, 24), torch.randn(24)
    torch.testing.assert_close(bias_act(x, bias, curve), CURVES[curve](x + bias))
    torch.testing.assert_close(gated_act(x, up, curve), CURVES[curve](x) * up)
    torch.testing.assert_close(bias_act(x), F.gelu(x))
    torch.testing.assert_close(gated_act(x, up), F.silu(x) * up)


def test_a_gradient_that_others_hold_stays_as_it_is():
    x = torch.randn(40, 24).bfloat16().requires_grad_()
    dy = torch.randn(40, 24).bfloat16()
    before = dy.clone()
    bias_act(x).backward(dy)
    assert torch.equal(dy, before)
    first = x.grad.clone()
    y = bias_act(x)
    kept = []
    y.register_hook(kept.append)
    x.grad = None
    (y * 1).backward(dy)
    assert torch.equal(kept[0], dy)
    assert torch.equal(x.grad, first)


@pytest.mark.parametrize("curve", CURVES)
def test_images_as_they_lie(curve):
    x = torch.randn(2, 24, 5, 7).to(memory_format=torch.channels_last).requires_grad_()
    up = torch.randn(2, 24, 5, 7)
    for other in (None, up):
        y = op(x, other, curve=curve)
        assert y.is_contiguous(memory_format=torch.channels_last)
        expected = CURVES[curve](x) * (1.0 if other is None else other)
        torch.testing.assert_close(y, expected)
        (found,) = torch.autograd.grad(y.sum(), x)
        assert found.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), x)[0])


@pytest.mark.parametrize("curve", CURVES)
def test_what_is_torchs(curve):
    """No elements, float64, a scalar, types and shapes that differ."""
    for x in (torch.randn(0, 8), torch.randn(4, 8, dtype=torch.float64), torch.randn(())):
        torch.testing.assert_close(op(x, curve=curve), CURVES[curve](x))
    x, up = torch.randn(4, 8).bfloat16(), torch.randn(4, 1)
    expected = CURVES[curve](x.float()) * up
    torch.testing.assert_close(op(x, up, curve=curve), expected.bfloat16())
    bias = torch.randn(4, 1)
    expected = CURVES[curve](x.float() + bias)
    torch.testing.assert_close(op(x, bias=bias, curve=curve), expected.bfloat16())


@pytest.mark.parametrize("curve", CURVES)
def test_only_what_is_wanted_has_a_gradient(curve):
    tensors = {"x": torch.randn(4, 9), "up": torch.randn(4, 9), "bias": torch.randn(9)}
    exactly = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    z = exactly["x"] + exactly["bias"]
    (CURVES[curve](z) * exactly["up"]).square().sum().backward()
    for name, wanted in tensors.items():
        wanted.requires_grad_()
        op(curve=curve, **tensors).square().sum().backward()
        torch.testing.assert_close(wanted.grad, exactly[name].grad)
        wanted.requires_grad_(False)


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_derivative(curve, dtype):
    def penalty(x, up, bias):
        y = op(x, up, bias, curve)
        (gradient,) = torch.autograd.grad(y.double().sin().sum(), x, create_graph=True)
        return gradient.double().square().sum()

    tensors = [torch.randn(3, 8), torch.randn(3, 8), torch.rand(8)]
    assert_same_second_derivative(penalty, [t.to(dtype) for t in tensors])


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_any_number_of_threads_gives_the_same_bits(curve, dtype):
    x = torch.randn(1200, 700).to(dtype).requires_grad_()
    bias = torch.linspace(-1, 1, 700).requires_grad_()

    def run():
        y = op(x, x.detach(), bias, curve)
        return y, *torch.autograd.grad(y, (x, bias), x.detach())

    assert_same_bits_with_any_threads(run)


@compilers
def test_compiles_in_one_graph(backend):
    x = torch.randn(8, 300).bfloat16().requires_grad_()
    bias = torch.rand(300).requires_grad_()

    def step(x, bias):
        return gated_act(bias_act(x, bias), x * 2).float().sin().sum()

    assert_compiles(step, (x, bias), backend, tolerance=1e-2)


@pytest.mark.parametrize("with_up", [False, True])
def test_is_an_operator_as_torch_wants_it(with_up):
    x, bias = torch.randn(4, 30, requires_grad=True), torch.rand(30, requires_grad=True)
    up = torch.randn(4, 30, requires_grad=True) if with_up else None
    torch.library.opcheck(torch.ops.ampfuse.activation, (x, up, bias, "gelu"))


def test_an_unknown_name_is_told():
    with pytest.raises(ValueError, match='"relu"; it has to be "gelu", "gelu_tanh" or "silu"'):
        bias_act(torch.randn(3, 4), activation="relu")
