"""ampfuse.nn.bias_act and gated_act against float64; see test_operators.py, too."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ampfuse.nn import bias_act, gated_act
from cases import assert_rounded

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
CURVES = {"gelu": F.gelu, "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"), "silu": F.silu}
of_every_curve = pytest.mark.parametrize("curve", CURVES)
TILE, SPAN = 32, 512  # rows, of which a bias's sums are made
# Beside the rounding to the type. (The curves of half types are fitted to 1.5e-5.)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-5, torch.bfloat16: 2e-5}
SHAPES = [(1, 1), (3, 7), (2, 3, 16), (4, 17), (TILE + 1, 65), (SPAN - 1, 8), (SPAN + 1, 9)]


def op(x, up=None, bias=None, curve="gelu"):
    return torch.ops.ampfuse.activation(x, up, bias, curve)


def check(shape, dtype, curve, *, up=False, bias=None, scale=2.0, device="cpu"):
    random = torch.Generator().manual_seed(sum(shape))

    def some(*shape, dtype=dtype, scale=1.0):
        return (torch.randn(shape, generator=random) * scale).to(device, dtype)

    inputs = {"x": some(*shape, scale=scale)}
    if up:
        inputs["up"] = some(*shape)
    if bias is not None:
        inputs["bias"] = some(shape[-1], dtype=bias)
    dy = some(*shape)
    exactly = {name: t.double().requires_grad_() for name, t in inputs.items()}
    y = op(curve=curve, **{name: t.requires_grad_() for name, t in inputs.items()})
    right = CURVES[curve](exactly["x"] + exactly.get("bias", 0.0)) * exactly.get("up", 1.0)
    y.backward(dy)
    right.backward(dy.double())
    assert y.dtype == dtype
    pairs = {"y": (y, right), **{f"d{n}": (inputs[n].grad, exactly[n].grad) for n in inputs}}
    for name, (found, expected) in pairs.items():
        size = expected.detach().abs().amax().item()
        if name == "dbias":
            size = max(size, shape[0] ** 0.5)
        assert_rounded(name, found, expected, TOLERANCE[dtype], size / 2)


@of_every_curve
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("up", [False, True])
@pytest.mark.parametrize("bias", [None, torch.float32, "own"])
def test_activations_agree_with_float64(curve, dtype, up, bias, hardware):
    bias = dtype if bias == "own" else bias
    for shape in SHAPES:
        check(shape, dtype, curve, up=up, bias=bias, device=hardware)


@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 300),
    dtype=st.sampled_from(FLOATS),
    curve=st.sampled_from(list(CURVES)),
    up=st.booleans(),
    bias=st.sampled_from([None, torch.float32]),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
)
def test_activations_of_any_shape_agree_with_float64(rows, columns, dtype, curve, up, bias, scale):
    check((rows, columns), dtype, curve, up=up, bias=bias, scale=scale)


@of_every_curve
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


@of_every_curve
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


@of_every_curve
def test_names_and_what_they_compute(curve):
    x, up, bias = torch.randn(5, 24), torch.randn(5, 24), torch.randn(24)
    torch.testing.assert_close(bias_act(x, bias, curve), CURVES[curve](x + bias))
    torch.testing.assert_close(gated_act(x, up, curve), CURVES[curve](x) * up)
    torch.testing.assert_close(bias_act(x), F.gelu(x))
    torch.testing.assert_close(gated_act(x, up), F.silu(x) * up)
    with pytest.raises(ValueError, match='"relu"; it must be "gelu", "gelu_tanh" or "silu"'):
        bias_act(x, activation="relu")


@of_every_curve
def test_images_keep_their_memory_format(curve):
    x = torch.randn(2, 24, 5, 7).to(memory_format=torch.channels_last).requires_grad_()
    up = torch.randn(2, 24, 5, 7)
    for other in (None, up):
        y = op(x, other, curve=curve)
        assert y.is_contiguous(memory_format=torch.channels_last)
        expected = CURVES[curve](x) * (1.0 if other is None else other)
        torch.testing.assert_close(y, expected)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert gradient.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), x)[0])


@of_every_curve
def test_the_rest_is_left_to_torch(curve):
    """No elements, float64, a scalar, types and shapes that differ."""
    for x in (torch.randn(0, 8), torch.randn(4, 8, dtype=torch.float64), torch.randn(())):
        torch.testing.assert_close(op(x, curve=curve), CURVES[curve](x))
    x, other = torch.randn(4, 8).bfloat16(), torch.randn(4, 1)
    of_x = CURVES[curve](x.float())
    torch.testing.assert_close(op(x, up=other, curve=curve), (of_x * other).bfloat16())
    of_sum = CURVES[curve](x.float() + other)
    torch.testing.assert_close(op(x, bias=other, curve=curve), of_sum.bfloat16())
