"""For tests of apex's optimizers: parameters, their gradients, and steps."""

import torch
from torch import nn

SHAPES = ((3, 4), (5,), (1,))


def start(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(t, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(t)
    return [(torch.randn(shape, generator=generator) * scale).to(dtype) for shape in SHAPES]


def give_gradients(ps, t, scale=1.0):
    """To `ps`, or the first of them only."""
    for p, g in zip(ps, gradients(t, ps[0].dtype, scale), strict=False):
        p.grad = g


def take_steps(optimizer, ps, first=1, last=4):
    for t in range(first, last + 1):
        give_gradients(ps, t)
        optimizer.step()
