"""For tests of apex's optimizers: parameters, their gradients, steps and trainings."""

import torch
from torch import nn

from ampfuse.compat.apex import amp

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


def copies_of(ps):
    return [nn.Parameter(p.detach().clone()) for p in ps]


def assert_close(ps, others, rtol=1e-5, atol=1e-6):
    for p, q in zip(ps, others, strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol)


def assert_equal(ps, others):
    assert_close(ps, others, rtol=0, atol=0)


def started(make, level, **options):
    """A model and its optimizer, under amp at `level`, or without it and of that type."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    if not isinstance(level, str):
        return model.to(level), make(model.parameters(), **options)
    optimizer = make(model.parameters(), **options)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0)


def train(model, optimizer, steps, overflow=None):
    """The losses; that of the step `overflow` is infinite."""
    x, losses = torch.rand(16, 4, generator=torch.Generator().manual_seed(1)), []
    under_amp = hasattr(optimizer, "_amp_session")
    for step in range(steps):
        loss = (model(x if under_amp else x.to(model.weight)).float() - x[:, :2]).pow(2).mean()
        loss = loss * float("inf") if step == overflow else loss
        if under_amp:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
