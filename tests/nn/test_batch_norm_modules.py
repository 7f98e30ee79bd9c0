"""``ampfuse.nn.BatchNormAct2d`` against torch's batch norm."""

import copy
import pickle
import re
from functools import partial

import pytest
import torch
from torch import nn

from ampfuse.nn import BatchNormAct2d
from cases import bf16, f16, f32, f64

# For results that are rounded once; float32's also for statistics.
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


def start(norm):
    """Parameters and statistics that are not 0 and 1."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in [*norm.parameters(), *norm.buffers()]:
            if tensor.dim():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return norm


def images(dtype=f32, seed=0, device="cpu"):
    x = torch.randn(3, 4, 5, 5, generator=torch.Generator().manual_seed(seed)) + 2.0
    return x.to(device, dtype, memory_format=torch.channels_last).requires_grad_()


def step(call, norm, inputs):
    """Output, gradients and statistics of two calls of `norm`."""
    tensors = []
    for _ in range(2):
        out = call(norm, *inputs)
        factors = torch.linspace(-1, 1, out.numel(), device=out.device)
        (out * factors.view(out.shape)).sum().backward()
        tensors += [out.detach(), *(b.clone() for b in norm.buffers())]
    return tensors + [t.grad for t in (*inputs, *norm.parameters())]


def assert_close(found, expected, dtype):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


def plainly(norm, x, residual=None, *, relu):
    out = norm(x) if residual is None else norm(x) + residual
    return out.relu() if relu else out


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("residuals", [0, 1])
@pytest.mark.parametrize("option", OPTIONS)
def test_the_module_computes_what_torchs_does(option, residuals, relu, hardware):
    arguments, prepare = OPTIONS[option]
    ours = BatchNormAct2d(4, **arguments, activation="relu" if relu else None)
    calls = {
        ours: lambda norm, *inputs: norm(*inputs),
        nn.BatchNorm2d(4, **arguments): partial(plainly, relu=relu),
    }
    for dtype in TOLERANCE if option == "as it comes" else (f32,):
        results = []
        for norm, call in calls.items():
            norm = prepare(start(copy.deepcopy(norm))).to(hardware)
            norm = norm.double() if dtype == f64 else norm
            inputs = [images(dtype, seed, hardware) for seed in range(1 + residuals)]
            results.append(step(call, norm, inputs))
        assert_close(*results, dtype)
        assert results[0][0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("arguments", [{}, {"affine": False}, {"track_running_stats": False}])
def test_state_dicts_fit_both_ways(arguments):
    ours, theirs = BatchNormAct2d(4, **arguments), nn.BatchNorm2d(4, **arguments)
    for source, target in ((start(ours), theirs), (start(theirs), ours)):
        assert list(source.state_dict()) == list(target.state_dict())
        target.load_state_dict(source.state_dict())
    assert vars(theirs).keys() | {"activation"} == vars(ours).keys()


def test_errors_are_those_of_torch():
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


def test_repr_copy_and_pickle_keep_the_options():
    norm = start(BatchNormAct2d(4, eps=0.1, activation=None))
    inside = repr(nn.BatchNorm2d(4, eps=0.1)).partition("(")[2][:-1]
    assert repr(norm) == f"BatchNormAct2d({inside}, activation=None)"
    for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert torch.equal(other(images()), copy.deepcopy(norm)(images()))
        assert other.activation is None
