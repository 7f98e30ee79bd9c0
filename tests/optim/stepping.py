"""Parameters, gradients and steps, and what a refusal leaves as it was."""

import contextlib
import copy
import itertools

import pytest
import torch
from torch import nn

from cases import assert_same, assert_same_bits, f32, snapshot


def parameters(shapes, *dtypes, device="cpu"):
    """A parameter of each shape, in all types in turn."""
    pairs = zip(shapes, itertools.cycle(dtypes or (f32,)), strict=False)
    return [nn.Parameter(torch.randn(shape).to(device, dtype)) for shape, dtype in pairs]


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def weights(params):
    return [param.detach().clone() for param in params]


@torch.no_grad()
def copy_weights(params, into):
    for param, other in zip(params, into, strict=True):
        other.copy_(param)


def give_gradients(params, step=None, scale=1.0):
    """Random ones times `scale`, those of a step where it is given; returns them without it."""
    generator = None if step is None else torch.Generator().manual_seed(step)
    gradients = []
    for param in params:
        gradients.append(torch.randn(param.shape, generator=generator).to(param))
        param.grad = gradients[-1] * scale
    return gradients


def train(optimizer, steps=(0,)):
    """Gradients depend on the step alone."""
    for step in steps:
        give_gradients(params_of(optimizer), step)
        optimizer.step()


@contextlib.contextmanager
def refused(optimizer, message, error=ValueError):
    """The block raises, and changes nothing."""

    def state():
        return copy.deepcopy((optimizer.state_dict(), snapshot(optimizer)))

    saved, before = state()
    with pytest.raises(error, match=message):
        yield
    found, after = state()
    assert_same(found["state"], saved["state"])
    assert_same_bits(after, before)
    assert repr(found["param_groups"]) == repr(saved["param_groups"])  # NaN is NaN here
