"""ampfuse.nn.layer_norm and rms_norm against float64; see test_operators.py, too."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ampfuse.nn import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from cases import assert_rounded

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
NORMS = {"layer": layer_norm, "rms": rms_norm}
ADD_NORMS = {"layer": add_layer_norm, "rms": add_rms_norm}
TORCHS = {"layer": F.layer_norm, "rms": F.rms_norm}
of_every_norm = pytest.mark.parametrize("norm", NORMS)
SPAN = 1024  # columns, of which a row's sums are made
SHAPES = [(1, 2), (3, 7), (2, 3, 16), (4, 17), (33, 127), (5, 128), (5, 129), (600, 40)]
SHAPES += [(5, 136), (5, 384), (5, 392), (5, 1016)]  # a GPU's threads hold 3 or 8 packs of a row


def check(
    shape, dtype, norm="layer", *, add=True, weights=None, mean=0.0, device="cpu", tolerance=1.0
):
    random = torch.Generator().manual_seed(sum(shape))

    def some(*shape, dtype=dtype, mean=0.0):
        return (torch.randn(shape, generator=random) + mean).to(device, dtype)

    inputs = {"x": some(*shape, mean=mean)}
    if add:
        inputs["residual"] = some(*shape)
    if weights is not None:
        inputs["weight"] = some(shape[-1], dtype=weights, mean=1.0)
        if norm == "layer":
            inputs["bias"] = some(shape[-1], dtype=weights)
    gradients = [some(*shape) for _ in range(1 + add)]
    exactly = {name: t.double().requires_grad_() for name, t in inputs.items()}
    inputs = {name: t.requires_grad_() for name, t in inputs.items()}
    options = {"normalized_shape": shape[-1], "eps": 1e-5}
    s = exactly["x"]
    if add:
        results = ADD_NORMS[norm](**inputs, **options)
        # The sum is rounded, and normalized as it is then.
        rounded = (inputs["x"] + inputs["residual"]).detach()
        assert torch.equal(results[1], rounded)
        s = s + exactly["residual"]
        s = s + (rounded.double() - s).detach()
    else:
        results = [NORMS[norm](**inputs, **options)]
    centered = s - s.mean(-1, keepdim=True) if norm == "layer" else s
    rstd = (centered.square().mean(-1, keepdim=True) + options["eps"]).rsqrt()
    y = centered * rstd * exactly.get("weight", 1.0) + exactly.get("bias", 0.0)
    torch.autograd.backward(results, gradients)
    torch.autograd.backward([y, s][: len(results)], [dy.double() for dy in gradients])
    assert results[0].dtype == dtype
    terms = (gradients[0].double().abs().amax() * rstd.amax()).item()
    pairs = {"y": (results[0], y), **{f"d{n}": (inputs[n].grad, exactly[n].grad) for n in inputs}}
    for name, (found, right) in pairs.items():
        size = right.detach().abs().amax().item()
        if name in ("dx", "dresidual"):
            size = max(size, terms)
        assert_rounded(name, found, right, 4e-6 * tolerance, size)


@of_every_norm
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("weights", [None, torch.float32, "own"])
def test_norms_agree_with_float64(norm, dtype, add, weights, hardware):
    weights = dtype if weights == "own" else weights
    for shape in SHAPES:
        check(shape, dtype, norm, add=add, weights=weights, device=hardware)


@of_every_norm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [SPAN - 1, SPAN, SPAN + 1, 3 * SPAN + 5, 17 * SPAN + 3])
def test_long_rows_agree_with_float64(norm, dtype, columns, hardware):
    check((3, columns), dtype, norm, weights=dtype, device=hardware, tolerance=4.0)


@given(
    rows=st.integers(1, 70),
    columns=st.integers(2, 300),
    dtype=st.sampled_from(FLOATS),
    norm=st.sampled_from(list(NORMS)),
    add=st.booleans(),
    mean=st.sampled_from([0.0, 3.0, -20.0]),
)
def test_norms_of_any_shape_agree_with_float64(rows, columns, dtype, norm, add, mean):
    weights = torch.float32 if columns % 2 else dtype
    check((rows, columns), dtype, norm, add=add, weights=weights, mean=mean, tolerance=8.0)


@pytest.mark.parametrize("mean", [1e4, -1e4])
def test_a_mean_that_is_large_against_the_deviation(mean):
    """FP32 rows, where torch's result is 100 times as far away: the mean is not rounded."""
    f32 = torch.float32
    check((9, 768), f32, add=False, weights=f32, mean=mean, tolerance=2.0)


def test_rows_of_one_value_and_of_equal_values():
    for x in (torch.full((3, 1), 2.5), torch.full((4, 40), 1e4), torch.zeros(5, 24)):
        zeros = torch.zeros_like(x)
        y = layer_norm(x.requires_grad_(), x.shape[-1])
        assert torch.equal(y, zeros)
        y.sum().backward()
        assert torch.equal(x.grad, zeros)


@of_every_norm
def test_rows_that_are_not_finite_stay_by_themselves(norm):
    x = torch.randn(6, 33)
    x[1, 5], x[3, 0] = float("inf"), float("nan")
    torch.testing.assert_close(NORMS[norm](x, 33), TORCHS[norm](x, [33]), equal_nan=True)


@of_every_norm
def test_no_rows_at_all_and_types_that_are_torchs(norm):
    for x in (torch.randn(0, 8), torch.randn(4, 8, dtype=torch.float64), torch.randn(8, 4).t()):
        weight = torch.rand(x.shape[-1], dtype=x.dtype)
        inputs = [x.requires_grad_(), weight.requires_grad_()]
        y, total = ADD_NORMS[norm](x, x, x.shape[-1], weight)
        expected = TORCHS[norm](2 * x, [x.shape[-1]], weight)
        torch.testing.assert_close(y, expected)
        gradients = torch.autograd.grad(y.square().sum() + total.sum(), inputs)
        right = torch.autograd.grad(expected.square().sum() + (2 * x).sum(), inputs)
        torch.testing.assert_close(gradients, right)


def test_several_dimensions_and_views_are_normed():
    x = torch.randn(3, 4, 5, 6, dtype=torch.bfloat16)[:, 1:]
    weight, bias = torch.randn(5, 6), torch.randn(5, 6)
    y = layer_norm(x, (5, 6), weight, bias)
    expected = F.layer_norm(x.double(), (5, 6), weight.double(), bias.double())
    torch.testing.assert_close(y.double(), expected, rtol=4e-3, atol=1e-5)


def test_a_norm_without_a_mean_has_no_bias():
    with pytest.raises(ValueError, match="an RMS norm has no bias"):
        torch.ops.ampfuse.norm(torch.ones(2, 8), None, [8], None, torch.ones(8), 1e-5, False)


def test_wrong_shapes_are_told():
    with pytest.raises(ValueError, match=r"normalized_shape \(5,\) does not match .*\(3, 4\)"):
        layer_norm(torch.randn(3, 4), 5)
    with pytest.raises(ValueError, match="normalized_shape"):
        rms_norm(torch.randn(3, 4), ())
    with pytest.raises(RuntimeError, match="size"):
        add_layer_norm(torch.randn(3, 4), torch.randn(3, 5), 4)
