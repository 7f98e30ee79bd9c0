"""A small training at a level, with any optimizer."""

import copy

import pytest
import torch
from torch import nn

from ampfuse import amp
from ampfuse.optim.base import AmpOptimizer
from ampfuse.optim.upgrade import GenericOptimizer
from cases import f32, same_bits

WITH_MASTERS = ("O2", "O5")
# How far losses are from those in plain torch.
PRECISION = {"O0": 1e-6, "O1": 2e-3, "O2": 2e-3, "O3": 5e-3, "O4": 1e-2, "O5": 1e-2}


def backward(loss, optimizers, **options):
    with amp.scale_loss(loss, optimizers, **options) as scaled:
        scaled.backward()


class Training:
    """A regression, whose batches have seeds, and its optimizer; without a level in plain torch."""

    clip = None  # before each step, given the training

    def __init__(self, make, level=None, seed=0, **options):
        torch.manual_seed(seed)
        self.model = nn.Sequential(*self.layers())
        self.optimizer = make(self.model.parameters())
        self.level = None
        if level is not None:
            self.initialize(level, **options)

    def layers(self):
        return nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def initialize(self, level, **options):
        self.level = level
        amp.initialize(self.model, self.optimizer, opt_level=level, verbosity=0, **options)
        return self

    def backward(self, seed, factor=1.0, **options):
        torch.manual_seed(seed)  # some optimizers throw dice, too
        x = torch.randn(16, 6)
        loss = (self.model(x).float() - x[:, :2].sin()).square().mean() * factor
        if self.level is None:
            loss.backward()
        else:
            backward(loss, self.optimizer, **options)
        return loss.detach()

    def step(self, seed, factor=1.0):
        self.optimizer.zero_grad()
        loss = self.backward(seed, factor)
        if self.clip is not None:
            self.clip(self)
        # LBFGS wants a closure; without reevaluation it is a quasi-Newton step per gradient.
        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(lambda: loss)
        else:
            self.optimizer.step()
        return loss.item()

    def steps(self, seeds):
        return [self.step(seed) for seed in seeds]

    def state(self):
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return copy.deepcopy({**states, "amp": amp.state_dict()})

    def load(self, saved, parts=("model", "optimizer")):
        saved = copy.deepcopy(saved)  # torch's optimizers keep the tensors that they load
        for part in parts:
            getattr(self, part).load_state_dict(saved[part])

    def weights(self):
        return [p.detach().clone() for p in self.model.parameters()]

    def masters(self):
        return [p.detach().clone() for p in amp.master_params(self.optimizer)]


TIMES = ("before initialize", "after initialize", "after the first step")
ORDERS = ("model", "optimizer"), ("optimizer", "model")


def resume(training, level, saved, times, order=ORDERS[0]):
    """Initialize `training`, and load its model and its optimizer at these two times."""
    for time in TIMES:
        if time == "after initialize":
            training.initialize(level)
        if time == "after the first step" and times == (time, time):
            training.step(50)
        parts = dict(zip(ORDERS[0], times, strict=True))
        training.load(saved, [part for part in order if parts[part] == time])
    amp.load_state_dict(saved["amp"])
    return training


def follows_plain_torch(make, level, in_pure_fp16=True, clips=(None, None)):
    """A training at `level`, after steps whose losses were those in plain torch."""
    plain, amped = Training(make), Training(make)
    amped.initialize(level, keep_batchnorm_fp32=True if level == "O3" else None)
    assert isinstance(amped.optimizer, AmpOptimizer)
    assert isinstance(amped.optimizer, type(plain.optimizer))
    for training, clip in zip((amped, plain), clips, strict=True):
        training.clip = clip
    losses, expected = amped.steps(range(25)), plain.steps(range(25))
    if level == "O0" and isinstance(amped.optimizer, GenericOptimizer):
        assert losses == expected
    if level != "O3" or in_pure_fp16:
        assert losses == pytest.approx(expected, rel=0, abs=PRECISION[level])
        assert losses[-1] < 0.6 * losses[0]
    if level in WITH_MASTERS:
        masters, weights = (
            sorted(tensors, key=lambda t: (t.dim(), t.numel()))
            for tensors in (amped.masters(), amped.weights())
        )
        for master, weight in zip(masters, weights, strict=True):
            assert master.dtype == f32
            assert same_bits(master.to(weight.dtype), weight)
    return amped
