"""Several losses, models and optimizers before one step: an overflow is its own pass's alone.

A loss overflows, in some model and iteration, against plain FP32 training that leaves out exactly
the steps of the optimizers that were listed for that loss. The combinations are those of apex's own
tests of multiple models, losses and optimizers; in quick runs all pairs meet.
"""

import functools
import itertools
import math
from typing import NamedTuple

import pytest
import torch
from torch import nn

from ampfuse import amp
from ampfuse.compat.apex.optimizers import FusedSGD
from cases import LEVELS

ITERATIONS = 3
SCALE = 128.0
QUICK = ("O1", "O2", "O5")  # FP32 weights, and masters of either type

# The models of each loss; the models of each optimizer.
SET_UPS = {
    "2 models, 1 optimizer": ([(0,), (1,)], [(0, 1)]),
    "3 models, 1 optimizer": ([(0, 2), (1, 2)], [(0, 1, 2)]),
    "2 models, 2 optimizers": ([(0,), (1,)], [(0,), (1,)]),
    "3 models, 2 optimizers": ([(0, 2), (1, 2)], [(0, 2), (1,)]),
}


class Overflow(NamedTuple):
    """Where a gradient is inf; in the half weight or in the other."""

    iteration: int
    loss: int
    model: int
    half: bool


OVERFLOWS = [Overflow(*of) for of in itertools.product((0, 1), (0, 1), (0, 1, 2), (True, False))]


class PlainSGD(torch.optim.SGD):
    """A subclass, which keeps its own step."""


OPTIMIZERS = {"torch": torch.optim.SGD, "FusedSGD": FusedSGD, "subclass": PlainSGD}


ZEROING = {
    "optimizer": lambda models, optimizers: [o.zero_grad() for o in optimizers],
    "optimizer, to zero": lambda models, optimizers: [o.zero_grad(False) for o in optimizers],
    "model": lambda models, optimizers: [m.zero_grad() for m in models],
    "model, to zero": lambda models, optimizers: [m.zero_grad(False) for m in models],
}


class Net(nn.Module):
    """A weight that O2 makes half, and one that it keeps in FP32."""

    def __init__(self, seed):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]) + seed / 4)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        return (self.weight * x).float() * self.norm.weight


def losses_of(models, used, iteration):
    """Yield the losses one after another: the second follows the first one's backward pass."""
    for i, members in enumerate(used):
        x = torch.tensor([0.5 + i / 4, 0.25 + iteration / 4])
        yield sum(models[m](x).float().sum() for m in members)


def parameters_of(models, members):
    return [p for m in members for p in (models[m].weight, models[m].norm.weight)]


def start(set_up, make):
    """Models, optimizers, and for each loss those that it gives gradients to."""
    used, owned = SET_UPS[set_up]
    models = [Net(seed) for seed in range(1 + max(map(max, used)))]
    optimizers = [make(parameters_of(models, of), lr=0.25, momentum=0.5) for of in owned]
    reached = [
        [optimizer for optimizer, of in zip(optimizers, owned, strict=True) if set(of) & set(loss)]
        for loss in used
    ]
    return models, optimizers, reached


def weights_of(models):
    return [p.detach().float() for p in parameters_of(models, range(len(models)))]


@functools.cache  # for all levels
def expected_run(set_up, bad):
    """Weights in the end, in FP32 and without scaling; `bad` is (iteration, loss) or None."""
    models, optimizers, reached = start(set_up, torch.optim.SGD)
    for iteration in range(ITERATIONS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for loss in losses_of(models, SET_UPS[set_up][0], iteration):
            loss.backward()
        skip = reached[bad[1]] if bad and bad[0] == iteration else []
        for optimizer in optimizers:
            if optimizer not in skip:
                optimizer.step()
    return weights_of(models)


def amp_run(set_up, bad, level, kind, zero, shared):
    """The same under amp, and the loss scales; `bad` is an Overflow or None."""
    models, optimizers, reached = start(set_up, OPTIMIZERS[kind])
    scalers = 1 if shared else len(reached)
    options = {"loss_scale": "dynamic", "num_losses": scalers, "init_scale": SCALE, "verbosity": 0}
    amp.initialize(models, optimizers, opt_level=level, **options)
    for iteration in range(ITERATIONS):
        ZEROING[zero](models, optimizers)
        for i, loss in enumerate(losses_of(models, SET_UPS[set_up][0], iteration)):
            with amp.scale_loss(loss, reached[i], loss_id=0 if shared else i) as scaled:
                scaled.backward()
                if bad and bad[:2] == (iteration, i):
                    model = models[bad.model]
                    weight = model.weight if bad.half else model.norm.weight
                    weight.grad[0] = math.inf
        for optimizer in optimizers:
            optimizer.step()
    state = amp.state_dict(optimizer=optimizers[0])
    return weights_of(models), [state[f"loss_scaler{i}"]["loss_scale"] for i in range(scalers)]


def cases():
    """Ways to zero gradients take turns: each meets every level and set-up, and every overflow at
    one level or another."""
    for set_up, (used, _) in SET_UPS.items():
        overflows = [overflow for overflow in OVERFLOWS if overflow.model in used[overflow.loss]]
        for shift, level in enumerate(LEVELS):
            ways = itertools.islice(itertools.cycle(ZEROING), shift, None)
            marks = () if level in QUICK else pytest.mark.slow
            for bad, zero in zip([None, *overflows], ways, strict=False):
                yield pytest.param(set_up, level, zero, bad, marks=marks)


@pytest.mark.covers(2)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("set_up", "level", "zero", "bad"), list(cases()), ids=str)
def test_an_overflow_belongs_to_the_pass_that_made_it(set_up, level, zero, bad, kind):
    tolerance = {"O0": 1e-6, "O1": 1e-2, "O4": 3e-2, "O3": 1e-2, "O5": 3e-2}.get(level, 3e-3)
    expected = expected_run(set_up, bad and bad[:2])
    for shared in (True, False):
        actual, scales = amp_run(set_up, bad, level, kind, zero, shared)
        hit = [bad is not None and (shared or bad.loss == i) for i in range(len(scales))]
        assert scales == [SCALE / 2 if one else SCALE for one in hit]
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
