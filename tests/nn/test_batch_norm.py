"""The fused batch norm's operators: against float64, torch's own operations, and its contract."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import profile

from cases import assert_same_bits, bf16, f16, f32, f64, nn_ops, slow_in_emulation
from trainings import NormsAndConvolutions

EPS = {f32: 2.0**-24, f16: 2.0**-11, bf16: 2.0**-8}
CHANNELS = (1, 3, 7, 8, 63, 64, 65)
IMAGES = ((6, 1, 1), (1, 3, 5), (2, 4, 4), (3, 14, 13))  # the last: spans of 512 rows and a rest
NCHW = (2, 3, 4, 4)


def channels_last(*shape, dtype=f32, mean=0.0):
    x = torch.randn(shape, dtype=f64) + mean
    return x.to(dtype).to(memory_format=torch.channels_last)


def composed(x, residual, weight, bias, mean, var, training, momentum, eps, relu):
    """The result of the operator by torch's operations."""
    y = F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)
    y = y if residual is None else y + residual
    return F.relu(y) if relu else y


class Case:
    """Arguments of the operator, and a gradient for its result, `dy`."""

    def __init__(self, shape, dtype, device="cpu", residual=True, relu=True, training=True):
        channels = shape[1]
        self.tensors = {
            "x": channels_last(*shape, dtype=dtype, mean=1.0).to(device),
            "residual": channels_last(*shape, dtype=dtype).to(device) if residual else None,
            "weight": torch.rand(channels).to(device) + 0.5,
            "bias": torch.randn(channels).to(device),
            "dy": channels_last(*shape, dtype=dtype).to(device),
        }
        self.running = [torch.randn(channels).to(device), torch.rand(channels).to(device) + 0.5]
        self.rest = (training, 0.1, 1e-5, relu)

    def run(self, op, dtype=None, held=True):
        """Everything that `op` leaves behind, given the arguments as they are or as `dtype`.

        held: whether its gradient is a tensor that somebody has, too.
        """
        tensors = {
            name: None if t is None else t.detach().to(dtype or t.dtype).requires_grad_()
            for name, t in self.tensors.items()
        }
        dy = tensors.pop("dy").detach()
        running = [t.clone().to(dtype or t.dtype) for t in self.running]
        y = op(*tensors.values(), *running, *self.rest)
        (y if held else y * 1).backward(dy.to(y.dtype))
        grads = {f"d{name}": t.grad for name, t in tensors.items() if t is not None}
        return {"y": y.detach(), "mean": running[0], "var": running[1], **grads}

    def avoid_ties(self):
        """No gradient comes from values near zero: rounding decides whether ReLU passes them."""
        exact = self.run(lambda *a: composed(*a[:-1], False), f64)["y"]
        dy = self.tensors["dy"]
        near = exact.abs() < 16 * EPS[dy.dtype] * exact.abs().max()
        self.tensors["dy"] = dy.masked_fill(near, 0.0)
        return self


def assert_within_eps(found, exact, dtype, factor):
    assert found.keys() == exact.keys()
    for name, value in exact.items():
        error = (found[name].double() - value).abs().max() if value.numel() else 0.0
        scale = value.abs().max().clamp(min=1) if value.numel() else 1.0
        assert error <= factor * EPS[dtype] * scale, name


@slow_in_emulation
@pytest.mark.parametrize("dtype", [f32, f16, bf16])
@pytest.mark.parametrize("channels", CHANNELS)
def test_results_are_those_of_float64(dtype, channels, device):
    for image, residual, relu, training in itertools.product(
        IMAGES, (False, True), (False, True), (False, True)
    ):
        shape = (image[0], channels, *image[1:])
        case = Case(shape, dtype, device, residual, relu, training).avoid_ties()
        results = case.run(nn_ops().batch_norm_act)
        assert results["y"].is_contiguous(memory_format=torch.channels_last)
        assert_within_eps(results, case.run(composed, f64), dtype, 64)
        assert_same_bits(results, case.run(nn_ops().batch_norm_act, held=False))


@pytest.mark.parametrize("dtype", [f16, bf16])
def test_errors_are_not_above_those_of_torchs_operations(dtype):
    case = Case((4, 24, 24, 24), dtype).avoid_ties()
    exact = case.run(composed, f64)
    fused, torchs = case.run(nn_ops().batch_norm_act), case.run(composed)
    for name, value in exact.items():
        ours, theirs = ((r[name].double() - value).square().mean() for r in (fused, torchs))
        assert ours <= 1.05 * theirs + 1e-14, name


def test_a_large_mean_does_not_cancel(device):
    x = channels_last(4, 8, 40, 40, mean=1e3).to(device)
    mean, var = nn_ops().batch_norm_moments(x)
    exact = x.double().var((0, 2, 3), correction=0)
    assert ((var - exact) / exact).abs().max() < 1e-6
    assert (mean - x.double().mean((0, 2, 3))).abs().max() < 1e-4
    y = nn_ops().batch_norm_act(x, None, None, None, None, None, True, 0.1, 1e-5, False)
    exact = composed(x.double(), None, None, None, None, None, True, 0.1, 1e-5, False)
    assert (y - exact).abs().max() < 1e-4


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("where", [0, 700])
def test_inf_and_nan_go_where_torch_lets_them_go(bad, where, device):
    case = Case((2, 3, 20, 20), f32, device)
    case.tensors["x"].permute(0, 2, 3, 1).reshape(-1, 3)[where, 1] = bad
    fused, torchs = case.run(nn_ops().batch_norm_act), case.run(composed)
    for name, value in torchs.items():
        assert torch.equal(fused[name].isfinite(), value.isfinite()), name
        if (name, device.type) != ("mean", "cuda"):  # there torch makes NaN of an infinite mean
            assert torch.equal(fused[name].isnan(), value.isnan()), name
    case = Case((2, 3, 4, 4), f32, device, training=False)
    case.tensors["x"][1, 2, 0, 0] = bad
    fused, torchs = case.run(nn_ops().batch_norm_act), case.run(composed)
    for name, value in torchs.items():
        assert torch.equal(fused[name].isnan(), value.isnan()), name


@pytest.mark.parametrize("name", ["x", "residual", "dy"])
def test_unaligned_and_strided_memory_gives_the_same(name, device):
    case = Case((2, 16, 6, 5), bf16, device)
    value, expected = case.tensors[name], case.run(nn_ops().batch_norm_act)
    memory = torch.empty(value.numel() + 1, dtype=bf16, device=device)[1:]
    shifted = memory.view(2, 6, 5, 16).permute(0, 3, 1, 2)
    wide = torch.empty(2, 6, 5, 20, dtype=bf16, device=device)[..., :16].permute(0, 3, 1, 2)
    sparse = channels_last(2, 16, 12, 6, dtype=bf16).to(device)[:, :, ::2, 1:]
    for same in (shifted, wide, sparse, torch.empty(value.shape, dtype=bf16, device=device)):
        if name == "x" and same.is_contiguous():
            continue  # another layout of x is torch's
        case.tensors[name] = same.copy_(value)
        assert_same_bits(case.run(nn_ops().batch_norm_act), expected)


ELSEWHERE = {
    "nchw": lambda t: {**t, "x": t["x"].contiguous()},
    "float64": lambda t: {n: v.double() for n, v in t.items()},
    "half parameters": lambda t: {n: v.half() for n, v in t.items()},
    "float32 residual of a half input": lambda t: {**t, "x": t["x"].bfloat16()},
    "residual that broadcasts": lambda t: {**t, "residual": t["residual"][:1]},
    "empty batch": lambda t: {n: v[:0] if v.dim() == 4 else v for n, v in t.items()},
}


@pytest.mark.parametrize("change", ELSEWHERE.values(), ids=ELSEWHERE)
@pytest.mark.filterwarnings("ignore:ampfuse's fused batch norm")
def test_what_has_no_kernel_is_torchs(change):
    case = Case(NCHW, f32)
    case.tensors = change(case.tensors)
    case.running = [t.to(case.tensors["weight"].dtype) for t in case.running]
    expected, results = case.run(composed), case.run(nn_ops().batch_norm_act)
    for name, value in expected.items():
        assert results[name].dtype == value.dtype, name
        assert torch.equal(results[name], value), name


def test_there_is_no_second_derivative():
    case = Case(NCHW, f32)
    x, *others, _ = case.tensors.values()
    x.requires_grad_()
    y = nn_ops().batch_norm_act(x, *others, *case.running, *case.rest)
    with pytest.raises(RuntimeError, match=r"no second derivative.*ampfuse.nn.unfuse"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


def norm(x):
    return nn_ops().batch_norm_act(x, None, None, None, None, None, True, 0.1, 1e-5, True)


def passes_of(backward):
    """Names of the passes that a function runs. (A hook would hold the gradients it looks at.)"""
    with profile() as profiled:
        backward()
    return [event.name.split("::")[1] for event in profiled.events() if "::batch_" in event.name]


INTO = ["batch_norm_reduce_into", "batch_norm_dx_into"]


def test_gradients_that_nobody_holds_are_written_over(device):
    x, w = (channels_last(*NCHW).to(device) for _ in range(2))
    loss = (norm(x.requires_grad_()) * w).sum()
    assert passes_of(loss.backward) == ["batch_norm_reduce", INTO[1]]


def test_the_residual_has_the_gradient_that_was_written_over(device):
    x, residual, factors = (channels_last(*NCHW).to(device) for _ in range(3))
    inputs = [tensor.requires_grad_() for tensor in (x, residual)]
    arguments = (*inputs, *[None] * 4, True, 0.1, 1e-5, True)
    loss = (nn_ops().batch_norm_act(*arguments) * factors).sum()
    assert passes_of(loss.backward) == [INTO[0], "batch_norm_dx"]
    y = composed(*(t.double() for t in inputs), *arguments[2:])
    exact = torch.autograd.grad(y, inputs, factors.double())
    for tensor, gradient in zip(inputs, exact, strict=True):
        assert torch.allclose(tensor.grad, gradient, atol=1e-5)


def test_gradients_that_somebody_holds_are_left_alone():
    x, w = (channels_last(*NCHW) for _ in range(2))
    y = norm(x.requires_grad_())
    alias, held = y.view_as(y), []
    for tensor in (y, alias):  # held by the one who asks for it; as memory of another tensor
        dy, _ = torch.autograd.grad((alias * w).sum(), (tensor, x), retain_graph=True)
        assert torch.equal(dy, w)
    y.register_hook(held.append)
    (alias * w).sum().backward(retain_graph=True)
    assert torch.equal(held[0], w)
    dy = w.clone()
    y.backward(dy)
    assert torch.equal(dy, w)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.filterwarnings("ignore:ampfuse's fused batch norm")
def test_batches_are_counted(layout, dtype, device):
    """By the kernels, and by torch where there are none."""
    x = channels_last(4, 65, 20, 20).to(device).contiguous(memory_format=layout)
    running = torch.zeros(65, device=device), torch.ones(65, device=device)
    batches = torch.tensor(2**31 - 3, dtype=dtype, device=device)
    for training in (True, True, False):  # which alone counts
        nn_ops().batch_norm_act(x, *[None] * 3, *running, training, 0.1, 1e-5, True, batches)
    assert batches.item() == 2**31 - 1


# ---- torch ----


def test_operators_keep_torchs_contract():
    x = channels_last(*NCHW, dtype=bf16)
    ops, c = torch.ops.ampfuse, NCHW[1]
    mean, invstd, weight = torch.zeros(c), torch.ones(c), torch.rand(c)
    y, mask = ops.batch_norm_apply(x, None, mean, invstd, None, None, True)
    calls = {
        ops.batch_norm_moments: (x,),
        ops.batch_norm_statistics: (x, mean.clone(), invstd.clone(), torch.tensor(3), 0.1, 1e-5),
        ops.batch_norm_apply: (x, y, mean, invstd, weight, None, True),
        ops.batch_norm_reduce: (y, x, mean, invstd, mask, True),
        ops.batch_norm_dx: (y, mask, x, mean, invstd, weight, mean, mean, 32),
    }
    for op, arguments in calls.items():
        torch.library.opcheck(op, arguments)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_gives_the_same_without_a_break(dynamic):
    model = NormsAndConvolutions(4).to(memory_format=torch.channels_last)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for batch in (2, 3):
        x = channels_last(batch, 4, 6, 6)
        for forward in (model, compiled):
            forward(x).square().sum().backward()
    found, expected = ([*m.buffers(), *(p.grad for p in m.parameters())] for m in (twin, model))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_model_with_it_is_exported():
    model = NormsAndConvolutions(4).eval().to(memory_format=torch.channels_last)
    x = channels_last(2, 4, 6, 6)
    exported = torch.export.export(model, (x,)).module()
    assert torch.allclose(exported(x), model(x), atol=1e-6)


def test_no_graph_is_kept_where_nothing_needs_a_gradient():
    x = channels_last(*NCHW)
    assert norm(x).grad_fn is None
    with torch.no_grad():
        assert norm(x.requires_grad_()).grad_fn is None


def test_an_input_changed_before_backward_is_an_error():
    x = channels_last(*NCHW).requires_grad_()
    between = x * 1
    y = norm(between)
    between.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_frozen_statistics_may_change_before_backward():
    x, mean, var = channels_last(*NCHW).requires_grad_(), torch.randn(3), torch.rand(3) + 0.5
    y = torch.ops.ampfuse.batch_norm_act(x, None, None, None, mean, var, False, 0.1, 0.0, False)
    slope = var.rsqrt()
    mean.zero_(), var.fill_(100.0)
    y.sum().backward()
    assert torch.allclose(x.grad, slope.view(1, 3, 1, 1).expand(NCHW))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda o, x, c: o.batch_norm_moments(x.contiguous()), "channels_last"),
        (lambda o, x, c: o.batch_norm_moments(channels_last(2, 0, 4, 4)), "no columns"),
        (lambda o, x, c: o.batch_norm_apply(x, x.half(), c, c, None, None, True), "residual must"),
        (lambda o, x, c: o.batch_norm_apply(x, None, c[:2], c, None, None, True), "mean has 2"),
        (lambda o, x, c: o.batch_norm_reduce(x.half(), x, c, c, c[:0].byte(), False), "dy must"),
        (lambda o, x, c: o.batch_norm_dx(x, c.byte(), x, c, c, None, c, c, 1), "mask must"),
    ],
)
def test_misuse_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ops.ampfuse, channels_last(*NCHW), torch.ones(3))
