"""ampfuse.nn.layer_norm and rms_norm against float64, and what torch expects of an operator."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ampfuse.nn import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from conftest import compilers
from operators import (
    assert_compiles,
    assert_rounded,
    assert_same_bits_with_any_threads,
    assert_same_second_derivative,
)

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
NORMS = {"layer": layer_norm, "rms": rms_norm}
ADD_NORMS = {"layer": add_layer_norm, "rms": add_rms_norm}
TORCHS = {"layer": F.layer_norm, "rms": F.rms_norm}
SPAN = 1024  # columns, of which a row's sums are made


class Case:
    """Rows, weights, and gradients for what a norm returns."""

    def __init__(
        self,
        shape,
        dtype,
        *,
        norm="layer",
        residual=True,
        weights=None,
        mean=0.0,
        eps=1e-5,
        device="cpu",
    ):
        random = torch.Generator().manual_seed(sum(shape))
        self.norm, self.eps, self.columns = norm, eps, shape[-1]

        def some(*shape, dtype=dtype, mean=0.0):
            return (torch.randn(shape, generator=random) + mean).to(device, dtype)

        self.tensors = {"x": some(*shape, mean=mean)}
        if residual:
            self.tensors["residual"] = some(*shape)
        if weights is not None:
            self.tensors["weight"] = some(shape[-1], dtype=weights, mean=1.0)
            if norm == "layer":
                self.tensors["bias"] = some(shape[-1], dtype=weights)
        self.dy, self.ds = some(*shape), some(*shape)

    def check(self, tolerance=1.0):
        inputs = {name: t.detach().clone().requires_grad_() for name, t in self.tensors.items()}
        exactly = {name: t.detach().double().requires_grad_() for name, t in self.tensors.items()}
        x, dtype = inputs["x"], inputs["x"].dtype
        rest = {name: t for name, t in inputs.items() if name != "x"}
        if "residual" in rest:
            outputs = ADD_NORMS[self.norm](x, normalized_shape=self.columns, eps=self.eps, **rest)
        else:
            outputs = (NORMS[self.norm](x, self.columns, eps=self.eps, **rest),)
        # The sum is rounded, and normalized as it is then.
        s = exactly["x"]
        if "residual" in rest:
            s = s + exactly["residual"]
            rounded = x.detach() + rest["residual"].detach()
            assert torch.equal(outputs[1].detach(), rounded)
            s = s + (rounded.double() - s).detach()
        centered = s - s.mean(-1, keepdim=True) if self.norm == "layer" else s
        y = centered / (centered.square().mean(-1, keepdim=True) + self.eps).sqrt()
        terms = (
            self.dy.double().abs().amax().item()
            * (y / centered).detach().nan_to_num().amax().item()
        )
        if "weight" in rest:
            y = y * exactly["weight"] + exactly.get("bias", 0.0)
        expected = (y, s)[: len(outputs)]
        gradients = (self.dy, self.ds)[: len(outputs)]
        torch.autograd.backward(outputs, gradients)
        torch.autograd.backward(expected, [gradient.double() for gradient in gradients])
        pairs = {
            "y": (outputs[0], y),
            **{f"d{n}": (inputs[n].grad, exactly[n].grad) for n in inputs},
        }
        for name, (one, right) in pairs.items():
            own = inputs[name[1:]].dtype if name in ("dweight", "dbias") else dtype
            assert one.dtype == own, name
            size = right.detach().abs().amax().item()
            if name in ("dx", "dresidual"):
                size = max(size, terms)
            assert_rounded(name, one, right, 4e-6 * tolerance, size)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("weights", [None, torch.float32, "own"])
def test_agrees_with_float64(norm, dtype, residual, weights, hardware):
    options = {"norm": norm, "residual": residual, "device": hardware}
    options["weights"] = dtype if weights == "own" else weights
    for shape in ((1, 2), (3, 7), (2, 3, 16), (4, 17), (33, 127), (5, 128), (5, 129), (600, 40)):
        Case(shape, dtype, **options).check()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [SPAN - 1, SPAN, SPAN + 1, 3 * SPAN + 5, 17 * SPAN + 3])
def test_long_rows(norm, dtype, columns, hardware):
    Case((3, columns), dtype, norm=norm, weights=dtype, device=hardware).check(tolerance=4.0)


@given(
    rows=st.integers(1, 70),
    columns=st.integers(2, 300),
    dtype=st.sampled_from(FLOATS),
    norm=st.sampled_from(list(NORMS)),
    residual=st.booleans(),
    mean=st.sampled_from([0.0, 3.0, -20.0]),
)
def test_any_shape(rows, columns, dtype, norm, residual, mean):
    weights = torch.float32 if columns % 2 else dtype
    case = Case((rows, columns), dtype, norm=norm, residual=residual, weights=weights, mean=mean)
    case.check(tolerance=8.0)


@pytest.mark.parametrize("mean", [1e4, -1e4])
def test_a_mean_that_is_large_against_the_deviation(mean):
    """FP32 rows, where torch's result is 100 times as far away: the mean is not rounded."""
    case = Case((9, 768), torch.float32, residual=False, weights=torch.float32, mean=mean)
    case.check(tolerance=2.0)


def test_rows_of_one_value_and_of_equal_values():
    for rows in (torch.full((3, 1), 2.5), torch.full((4, 40), 1e4), torch.zeros(5, 24)):
        x = rows.clone().requires_grad_()
        y = layer_norm(x, rows.shape[-1])
        assert torch.equal(y, torch.zeros_like(rows))
        y.sum().backward()
        assert torch.equal(x.grad, torch.zeros_like(rows))


@pytest.mark.parametrize("norm", NORMS)
def test_rows_that_are_not_finite_stay_by_themselves(norm):
    x = torch.randn(6, 33)
    x[1, 5], x[3, 0] = float("inf"), float("nan")
    y = NORMS[norm](x, 33)
    expected = TORCHS[norm](x, [33])
    torch.testing.assert_close(y, expected, equal_nan=True)


@pytest.mark.parametrize("norm", NORMS)
def test_no_rows_at_all_and_types_that_are_torchs(norm):
    for x in (torch.randn(0, 8), torch.randn(4, 8, dtype=torch.float64), torch.randn(8, 4).t()):
        x = x.requires_grad_()
        weight = torch.rand(x.shape[-1], dtype=x.dtype, requires_grad=True)
        y, total = ADD_NORMS[norm](x, x, x.shape[-1], weight)
        expected = TORCHS[norm](2 * x, [x.shape[-1]], weight)
        torch.testing.assert_close(y, expected)
        for found, right in zip(
            torch.autograd.grad(y.square().sum() + total.sum(), (x, weight)),
            torch.autograd.grad(expected.square().sum() + (2 * x).sum(), (x, weight)),
            strict=True,
        ):
            torch.testing.assert_close(found, right)


def test_several_dimensions_and_views():
    x = torch.randn(3, 4, 5, 6, dtype=torch.bfloat16)[:, 1:]
    weight, bias = torch.randn(5, 6), torch.randn(5, 6)
    y = layer_norm(x, (5, 6), weight, bias)
    expected = F.layer_norm(x.double(), (5, 6), weight.double(), bias.double())
    torch.testing.assert_close(y.double(), expected, rtol=4e-3, atol=1e-5)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("wanted", ["x", "residual", "weight"])
def test_a_gradient_is_written_over_that_nobody_else_holds(norm, wanted):
    """With the same results, and never over one that somebody holds."""
    tensors = {"x": torch.randn(40, 24), "residual": torch.randn(40, 24), "weight": torch.rand(24)}
    if wanted == "weight":
        tensors["weight"].requires_grad_()
    else:
        for tensor in tensors.values():
            tensor.requires_grad_()
    factors = torch.randn(40, 24)
    inputs = [t for t in tensors.values() if t.requires_grad]
    kept = []
    results = []
    for hold in (False, True):
        y, total = ADD_NORMS[norm](tensors["x"], tensors["residual"], 24, tensors["weight"])
        if hold:
            y.register_hook(kept.append)
        loss = (y * factors).sum() if wanted == "x" else (y * factors).sum() + total.sin().sum()
        results.append(torch.autograd.grad(loss, inputs))
    assert torch.equal(kept[0], factors)
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("norm", NORMS)
def test_only_what_is_wanted_has_a_gradient(norm):
    x, residual = torch.randn(4, 9), torch.randn(4, 9)
    weight = torch.rand(9)
    for wanted in (x, residual, weight):
        wanted.requires_grad_()
        y, _ = ADD_NORMS[norm](x, residual, 9, weight)
        (y * torch.arange(9.0)).sum().backward()
        assert wanted.grad is not None
        if wanted is not weight:  # the sum alone
            wanted.grad = None
            ADD_NORMS[norm](x, residual, 9, weight)[1].sum().backward()
            assert torch.equal(wanted.grad, torch.ones(4, 9))
        wanted.requires_grad_(False)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_derivative(norm, dtype):
    def penalty(x, residual, weight):
        y, total = ADD_NORMS[norm](x, residual, 8, weight, eps=1e-5)
        loss = (y.double().sin() + total.double().square()).sum()
        return torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()

    tensors = [torch.randn(3, 8), torch.randn(3, 8), torch.rand(8) + 0.5]
    assert_same_second_derivative(penalty, [t.to(dtype) for t in tensors])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_any_number_of_threads_gives_the_same_bits(norm, dtype):
    x = torch.randn(700, 1500).to(dtype).requires_grad_()
    weight = torch.linspace(-1, 1, 1500).requires_grad_()

    def run():
        y, total = ADD_NORMS[norm](x, x.detach(), 1500, weight)
        return y, *torch.autograd.grad((y * total).sum(), (x, weight))

    assert_same_bits_with_any_threads(run)


@compilers
def test_compiles_in_one_graph(backend):
    x = torch.randn(8, 300).bfloat16().requires_grad_()
    weight = torch.rand(300).requires_grad_()

    def step(x, weight):
        y, total = add_layer_norm(x, x * 2, 300, weight)
        return (y.float().sin() + total.float()).sum()

    assert_compiles(step, (x, weight), backend, tolerance=1e-2)


@pytest.mark.parametrize("centered", [True, False])
def test_is_an_operator_as_torch_wants_it(centered):
    x, residual = (torch.randn(4, 30, requires_grad=True) for _ in range(2))
    weight = torch.rand(30, requires_grad=True)
    bias = torch.rand(30, requires_grad=True) if centered else None
    arguments = (x, residual, [30], weight, bias, 1e-5, centered)
    torch.library.opcheck(torch.ops.ampfuse.norm, arguments)


def test_wrong_shapes_are_told():
    with pytest.raises(ValueError, match=r"normalized_shape \(5,\) is not how x ends, .*\(3, 4\)"):
        layer_norm(torch.randn(3, 4), 5)
    with pytest.raises(ValueError, match="normalized_shape"):
        rms_norm(torch.randn(3, 4), ())
    with pytest.raises(RuntimeError, match="size"):
        add_layer_norm(torch.randn(3, 4), torch.randn(3, 5), 4)
