"""Requirements of every operator that works on rows: torch's contract, and the gradients that are
wanted.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import profile

from ampfuse.nn import add_layer_norm, add_rms_norm, cross_entropy, patch_conv2d, split_qkv
from cases import bf16, compilers, f16, f32, nn_ops

ops = torch.ops.ampfuse


def loss(x):
    rows, classes = x.shape
    target = torch.arange(rows) * 7919 % classes
    weight = (torch.arange(classes) % 4 + 1).to(x.dtype)
    third = 2 * 7919 % classes
    return [cross_entropy(x, target, weight, ignore_index=third, label_smoothing=0.1)]


# The last ones take rows, the others rows, more of the same shape, and a value for each column.
OPERATORS = {
    "gelu": lambda x, up, bias: [ops.activation(x, up, bias, "gelu")],
    "gelu_tanh": lambda x, up, bias: [ops.activation(x, up, bias, "gelu_tanh")],
    "silu": lambda x, up, bias: [ops.activation(x, up, bias, "silu")],
    "layer norm": lambda x, other, weight: add_layer_norm(x, other, x.shape[-1], weight),
    "rms norm": lambda x, other, weight: add_rms_norm(x, other, x.shape[-1], weight, eps=1e-5),
    "cross entropy": loss,
}
NAMES = list(OPERATORS)


def inputs_of(name, rows, columns, dtype=f32, of_columns=None):
    inputs = [torch.randn(rows, columns).to(dtype) for _ in range(2)]
    inputs.append((torch.rand(columns) + 0.5).to(of_columns or dtype))
    return inputs[:1] if name == "cross entropy" else inputs


def sum_of_squares(results):
    return sum(result.double().square().sum() for result in results)


@pytest.mark.parametrize("name", NAMES)
def test_each_input_has_its_gradient_of_each_result(name):
    inputs = inputs_of(name, 4, 24)
    exactly = [t.double().requires_grad_() for t in inputs]
    for wanted, exact in zip(inputs, exactly, strict=True):
        wanted.requires_grad_()
        results = zip(OPERATORS[name](*inputs), OPERATORS[name](*exactly), strict=True)
        for pair in results:
            found, expected = (
                torch.autograd.grad(sum_of_squares([r]), t, retain_graph=True, allow_unused=True)[0]
                for r, t in zip(pair, (wanted, exact), strict=True)
            )
            assert (found is None) == (expected is None)
            if found is not None:
                torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        wanted.requires_grad_(False)


@pytest.mark.parametrize("dtype", [f32, f16, bf16])
@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_are_those_of_torch(name, dtype):
    """By torch's operations, next to that in float64."""

    def of_a_penalty(inputs):
        squares = sum_of_squares(OPERATORS[name](*inputs))
        (gradient,) = torch.autograd.grad(squares, inputs[0], create_graph=True)
        return torch.autograd.grad(gradient.double().square().sum() + squares, inputs)

    inputs = [t.requires_grad_() for t in inputs_of(name, 6, 9, dtype)]
    exactly = [t.detach().double().requires_grad_() for t in inputs]
    eps = 8 * torch.finfo(dtype).eps
    for found, right in zip(of_a_penalty(inputs), of_a_penalty(exactly), strict=True):
        atol = eps / 2 * right.abs().amax().item()
        torch.testing.assert_close(found.double(), right, rtol=eps, atol=atol)


@pytest.mark.parametrize("name", NAMES[:-1])
def test_a_gradient_that_others_hold_stays_as_it_is(name):
    """A gradient that is not held is overwritten, with the same results."""
    inputs, factors = inputs_of(name, 40, 24), torch.randn(40, 24)
    for first, all_results in itertools.product((0, 2), (False, True)):
        for i, tensor in enumerate(inputs):
            tensor.requires_grad_(i >= first)
        gradients, held = [], []
        for hold in (False, True):
            y, *others = OPERATORS[name](*inputs)
            if hold:
                y.register_hook(held.append)
            total = (y * factors).sum()
            if all_results:
                total = total + sum(other.sin().sum() for other in others)
            gradients.append(torch.autograd.grad(total, inputs[first:]))
        assert torch.equal(held[0], factors)
        assert all(map(torch.equal, *gradients))
    given = factors.clone()
    OPERATORS[name](*inputs)[0].backward(given)
    assert torch.equal(given, factors)


@pytest.mark.parametrize("dtype", [f32, f16, bf16])
@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_threads_gives_the_same_bits(name, dtype):
    inputs = [t.requires_grad_() for t in inputs_of(name, 700, 1500, dtype, of_columns=f32)]
    by_threads = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results = OPERATORS[name](*inputs)
        factors = [result.detach() for result in results]
        by_threads.append([*results, *torch.autograd.grad(results, inputs, factors)])
    assert all(map(torch.equal, *by_threads))


def assert_compiles_in_one_graph(step, inputs, backend, tolerance):
    inputs = [t.requires_grad_() for t in inputs]
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    found, expected = (torch.autograd.grad(run(*inputs), inputs) for run in (compiled, step))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NAMES)
@compilers
def test_each_layer_compiles_in_one_graph(name, backend):
    call = OPERATORS[name]

    def step(*inputs):
        return sum(result.float().square().sum() for result in call(*inputs))

    by_others = backend == "inductor" and name != "cross entropy"  # what is done to results
    inputs = inputs_of(name, 8, 300, bf16, of_columns=f32)
    assert_compiles_in_one_graph(step, inputs, backend, tolerance=1e-2 if by_others else 0.0)


def test_they_are_operators_as_torch_wants_them():
    x, other, weight, bias = (torch.rand(n, 30, requires_grad=True) for n in (4, 4, 1, 1))
    weight, bias = (t.detach()[0].requires_grad_() for t in (weight, bias))
    for op, *arguments in (
        (ops.activation, x, None, bias, "gelu"),
        (ops.activation, x, other, bias, "gelu"),
        (ops.norm, x, other, [30], weight, bias, 1e-5, True),
        (ops.norm, x, other, [30], weight, None, 1e-5, False),
        (ops.cross_entropy, x, torch.tensor([0, 29, 7, 3]), None, -100, 0.1),
    ):
        torch.library.opcheck(op, tuple(arguments))


# ---- of torch's operations -----------------------------------------------------------------------


def test_a_split_gives_views_whose_gradient_is_copied_once():
    packed = torch.randn(2, 5, 3 * 4 * 6, requires_grad=True)
    parts = split_qkv(packed, heads=4)
    for part, right in zip(parts, packed.view(2, 5, 3, 4, 6).permute(2, 0, 3, 1, 4), strict=True):
        assert torch.equal(part, right)
        assert part.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
    gradients = [torch.randn(2, 5, 4, 6).transpose(1, 2) for _ in parts]  # as attention gives them
    with profile(profile_memory=True) as profiled:
        (whole,) = torch.autograd.grad(parts, packed, gradients)
    rows = torch.stack([gradient.transpose(1, 2) for gradient in gradients], 2)
    assert torch.equal(whole, rows.flatten(2))
    assert (
        sum(max(e.self_cpu_memory_usage, 0) for e in profiled.key_averages()) == 4 * whole.numel()
    )
    exact = packed.detach()[:, :2].double().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: [p.sin() for p in split_qkv(x, 4)], exact)
    for wrong in (packed[..., :-1], packed[0, 0]):
        with pytest.raises(ValueError, match=r"must have shape \(..., tokens, 12 \* width\), got"):
            split_qkv(wrong, heads=4)


@pytest.mark.covers(2)
@pytest.mark.parametrize("of_weight", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("dtype", "error"), [(f32, 1e-5), (f16, 2e-3), (bf16, 2e-2)])
def test_a_convolution_of_patches_agrees_with_float64(dtype, error, form, of_weight):
    inputs = [torch.randn(2, 3, 9, 13), torch.randn(5, 3, 4, 6) / 9, torch.randn(5)]
    x, weight, bias = (t.to(dtype) for t in inputs)
    x, weight = x.contiguous(memory_format=form), weight.contiguous(memory_format=of_weight)
    ours = [t.requires_grad_() for t in (x, weight, bias)]
    exactly = [t.detach().double().requires_grad_() for t in ours]
    for some in (slice(3), slice(2)):  # with a bias and without
        y, right = patch_conv2d(*ours[some]), F.conv2d(*exactly[some], stride=(4, 6))
        assert y.dtype == dtype
        assert y.stride() == F.conv2d(*ours[some], stride=(4, 6)).stride()
        factors = torch.randn(y.shape)
        gradients = torch.autograd.grad(y, ours[some], factors.to(dtype))
        expected = torch.autograd.grad(right, exactly[some], factors.to(dtype).double())
        for a, b in zip((y, *gradients), (right, *expected), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=error, atol=error * b.abs().max().item())
    if dtype == f32:  # it is computed in float64
        assert torch.autograd.gradgradcheck(patch_conv2d, [t[:1] for t in exactly[:2]])
    for wrong in (x[:, :2], x[0], x[:, :, :3]):
        with pytest.raises(ValueError, match="does not fit x"):
            patch_conv2d(wrong, weight)


@compilers
def test_splits_and_patches_compile_in_one_graph(backend):
    def step(packed, image, weight):
        q, k, v = split_qkv(packed, 2)
        total = F.scaled_dot_product_attention(q, k, v).square().sum()
        return total + patch_conv2d(image, weight).square().sum()

    inputs = map(torch.randn, ((2, 5, 24), (2, 3, 9, 9), (4, 3, 4, 4)))
    assert_compiles_in_one_graph(step, inputs, backend, tolerance=1e-5)


def test_no_rows_have_no_results_and_gradients_of_zero(device):
    none, weight = torch.ones(0, 8), torch.ones(8)
    _, _, mean, rstd = nn_ops().norm_forward(none, None, weight, None, 8, 1e-5, True)
    backward = nn_ops().norm_backward(none, None, none, mean, rstd, weight, 8, [True] * 3)
    assert [found.tolist() for found in backward] == [[], [0.0] * 8, [0.0] * 8]
    assert nn_ops().activation_forward(none, None, None, "gelu").shape == (0, 8)


X, NONE, SUMS = torch.ones(4, 8), torch.empty(0), torch.ones(8)
TARGET, OPTIONS = torch.zeros(4, dtype=torch.int64), (-100, 0.0)
TWO_TYPES = r"weight is .*BFloat16 and bias .*Float"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda o: o.norm_forward(X[:, :0], *[None] * 3, 0, 1e-5, True), "columns"),
        (lambda o: o.norm_forward(X[:, :0].to("meta"), *[None] * 3, 0, 1e-5, True), "columns"),
        (lambda o: o.norm_forward(X.view(2, 16)[:1, :5], *[None] * 3, 4, 1e-5, True), "4 columns"),
        (
            lambda o: o.norm_forward(X.bfloat16(), None, SUMS.bfloat16(), SUMS, 8, 0, True),
            TWO_TYPES,
        ),
        (lambda o: o.norm_backward(X, None, X, NONE, NONE, None, 8, [True] * 3), "rstd .* needs 4"),
        (lambda o: o.cross_entropy_gradient(NONE, X, TARGET, None, SUMS, *OPTIONS), "needs 4"),
        (lambda o: o.cross_entropy_gradient(X[0, :4], X, TARGET, None, NONE, *OPTIONS), "needs 8"),
    ],
)
def test_wrong_arguments_are_errors(call, says):
    with pytest.raises(TypeError if says == TWO_TYPES else ValueError, match=says):
        call(nn_ops())
