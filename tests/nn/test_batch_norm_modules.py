"""``ampfuse.nn``'s batch norms against torch's, alone and in two processes."""

import copy
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampfuse.nn import BatchNormAct2d
from ampfuse.nn.functional import batch_norm_act
from two_processes import SYNC_CASES, in_two_processes, start, sync_inputs

f64, f32, f16, bf16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
# Of a float32 statistic, and of results that are rounded once.
TOLERANCE = {f64: 1e-10, f32: 1e-5, f16: 2e-3, bf16: 2e-2}

# Arguments of the batch norm, and what is done to it.
OPTIONS = {
    "as it comes": ({}, lambda norm: norm),
    "cumulative": ({"momentum": None}, lambda norm: norm),
    "slow": ({"momentum": 0.01, "eps": 0.1}, lambda norm: norm),
    "not affine": ({"affine": False}, lambda norm: norm),
    "not tracking": ({"track_running_stats": False}, lambda norm: norm),
    "not tracking in eval": ({"track_running_stats": False}, nn.Module.eval),
    "eval": ({}, nn.Module.eval),
    "frozen": ({}, lambda norm: norm.eval().requires_grad_(False)),
    "tracks no more": ({}, lambda norm: setattr(norm, "track_running_stats", False) or norm),
}


def images(dtype=f32, memory_format=torch.channels_last, seed=0, shape=(3, 4, 5, 5), device="cpu"):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 2.0
    return x.to(device, dtype).contiguous(memory_format=memory_format).requires_grad_()


def step(call, norm, inputs):
    """Output, gradients and statistics of two calls of `norm`."""
    found = []
    for _ in range(2):
        out = call(norm, *inputs)
        factors = torch.linspace(-1, 1, out.numel(), device=out.device)
        (out * factors.view(out.shape)).sum().backward()
        found += [out.detach(), *(b.clone() for b in norm.buffers())]
    return found + [t.grad for t in (*inputs, *norm.parameters())]


def assert_close(found, expected, dtype):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            tolerance = TOLERANCE[dtype]
            torch.testing.assert_close(a, b, rtol=tolerance, atol=4 * tolerance)


def plainly(relu):
    def call(norm, x, residual=None):
        out = norm(x)
        out = out if residual is None else out + residual
        return out.relu() if relu else out

    return call


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("residuals", [0, 1])
@pytest.mark.parametrize("option", OPTIONS)
def test_it_is_torchs(option, residuals, relu, hardware):
    arguments, prepare = OPTIONS[option]
    activation = "relu" if relu else None
    ours = prepare(start(BatchNormAct2d(4, **arguments, activation=activation))).to(hardware)
    theirs = prepare(start(nn.BatchNorm2d(4, **arguments))).to(hardware)
    for dtype in TOLERANCE if option == "as it comes" else (f32,):
        inputs, reference = (
            [images(dtype, seed=seed, device=hardware) for seed in range(1 + residuals)]
            for _ in range(2)
        )
        pair = [copy.deepcopy(norm) for norm in (ours, theirs)]
        if dtype == f64:
            pair = [norm.double() for norm in pair]
        found = step(lambda norm, *xs: norm(*xs), pair[0], inputs)
        assert_close(found, step(plainly(relu), pair[1], reference), dtype)
        assert found[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "make",
    [
        lambda: [images(memory_format=torch.contiguous_format)] * 2,
        lambda: [images(), images(memory_format=torch.contiguous_format)],
        lambda: [images(bf16), images(f32)],
        lambda: [images()[:, :, ::2, 1:]] * 2,
        lambda: [images(), images(shape=(1, 4, 1, 5))],
    ],
    ids=["NCHW", "mixed formats", "mixed types", "gaps", "broadcast"],
)
def test_what_has_no_fast_kernel(make):
    x, residual = make()
    found = start(BatchNormAct2d(4))(x, residual)
    expected = plainly(True)(start(nn.BatchNorm2d(4)), x, residual)
    assert_close([found], [expected], bf16 if x.dtype == bf16 else f32)


@pytest.mark.parametrize("arguments", [{}, {"affine": False}, {"track_running_stats": False}])
def test_state_dicts_fit_both_ways(arguments):
    ours, theirs = BatchNormAct2d(4, **arguments), nn.BatchNorm2d(4, **arguments)
    for source, target in ((start(ours), theirs), (start(theirs), ours)):
        assert list(source.state_dict()) == list(target.state_dict())
        target.load_state_dict(source.state_dict())
    assert vars(theirs).keys() | {"activation"} == vars(ours).keys()


def test_errors_are_torchs():
    one = torch.ones(1, 4, 1, 1)
    for call in (
        lambda cls: cls(4)(one),
        lambda cls: cls(4)(torch.ones(4, 4)),
        lambda cls: cls(3)(torch.ones(2, 4, 2, 2)),
    ):
        with pytest.raises((ValueError, RuntimeError)) as theirs:
            call(nn.BatchNorm2d)
        with pytest.raises(theirs.type, match=re.escape(str(theirs.value)[:40])):
            call(BatchNormAct2d)
    with pytest.raises(ValueError, match="gelu"):
        BatchNormAct2d(4, activation="gelu")
    BatchNormAct2d(4).eval()(one)


def test_the_function():
    x, residual = images(), images(seed=1)
    weight, bias = torch.rand(2, 4)
    mean, variance = torch.zeros(2, 4), torch.ones(2, 4)
    found = batch_norm_act(
        *(x, mean[0], variance[0], weight, bias, True, 0.3, 1e-3), residual, "relu"
    )
    normed = F.batch_norm(x, mean[1], variance[1], weight, bias, True, 0.3, 1e-3)
    torch.testing.assert_close(found, (normed + residual).relu())
    torch.testing.assert_close(mean[0], mean[1])
    torch.testing.assert_close(variance[0], variance[1])
    with pytest.raises(ValueError, match="tanh"):
        batch_norm_act(x, None, None, training=True, activation="tanh")
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        batch_norm_act(torch.ones(1, 4, 1, 1), None, None, training=True)


def test_repr_copy_and_pickle():
    norm = start(BatchNormAct2d(4, eps=0.1, activation=None))
    inside = repr(nn.BatchNorm2d(4, eps=0.1)).partition("(")[2][:-1]
    assert repr(norm) == f"BatchNormAct2d({inside}, activation=None)"
    for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert torch.equal(other(images()), copy.deepcopy(norm)(images()))
        assert other.activation is None


# --- in two processes ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    found = in_two_processes(tmp_path_factory.mktemp("ranks"), "sync_batch_norms")
    return [each["sync_batch_norms"] for each in found]


def whole_batch(kind, dtype):
    """What the two processes compute together, by torch, in one."""
    case = SYNC_CASES[kind]
    x, z, factors = sync_inputs(dtype, case)
    norm = start(nn.BatchNorm2d(4, momentum=case.get("momentum", 0.1)))
    out = norm(x) if z is None else norm(x) + z
    out = out.relu() if case["relu"] else out
    (out * factors).sum().backward()
    gradients = [x.grad] if z is None else [x.grad, z.grad]
    return [out.detach(), *gradients], [p.grad for p in norm.parameters()], list(norm.buffers())


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_two_processes_are_one_batch(results, dtype):
    for kind in SYNC_CASES:
        first, second = (found[f"{kind} {dtype}"] for found in results)
        by_row, sums, equal = whole_batch(kind, dtype)
        joined = [torch.cat(pair) for pair in zip(first["rows"], second["rows"], strict=True)]
        assert_close(joined, by_row, dtype)
        added = [a + b for a, b in zip(first["sums"], second["sums"], strict=True)]
        assert_close(added, sums, dtype)
        for found in (first, second):
            assert_close(found["equal"], equal, dtype)
