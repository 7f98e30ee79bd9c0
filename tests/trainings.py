"""Small trainings, at a level or in plain torch, and the models and weights that they train."""

import copy
import functools

import pytest
import torch
from torch import nn

from ampfuse import amp
from ampfuse.compat import apex
from ampfuse.nn import BatchNormAct2d
from ampfuse.optim.base import AmpOptimizer
from ampfuse.optim.upgrade import GenericOptimizer
from cases import f32, same_bits

WITH_MASTERS = ("O2", "O5")
# How far losses, which begin at 0.6, may be from those in plain torch. Those of test_upgrade.py are
# 2e-7 from them in FP32, 8e-4 with FP16 and 5e-3 with BF16.
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


def losses_beside_plain_torch(make, level, clips=(None, None)):
    """Return a training at `level`, its losses, and those of the same training in plain torch.

    `clips` are those of both, see `Training.clip`.
    """
    clip, plain_clip = clips
    amped = Training(make)
    kind = type(amped.optimizer)
    amped.initialize(level, keep_batchnorm_fp32=True if level == "O3" else None)
    amped.clip = clip
    assert isinstance(amped.optimizer, AmpOptimizer)
    assert isinstance(amped.optimizer, kind)
    return amped, amped.steps(range(25)), plain_losses(make, plain_clip)


@functools.cache  # for all levels
def plain_losses(make, clip):
    plain = Training(make)
    plain.clip = clip
    return plain.steps(range(25))


def assert_follows(losses, expected, level):
    """Assert that the losses are near those in plain torch, and fall."""
    assert losses == pytest.approx(expected, rel=0, abs=PRECISION[level])
    assert losses[-1] < 0.6 * losses[0]


def train_as_in_plain_torch(make, level, in_pure_fp16=False):
    """Assert that the losses at `level` are near those in plain torch, and the same at O0 where the
    step is torch's own. Return the training. At O3 few optimizers train: say which."""
    training, losses, expected = losses_beside_plain_torch(make, level)
    if level == "O0" and isinstance(training.optimizer, GenericOptimizer):
        assert losses == expected
    if level != "O3" or in_pure_fp16:
        assert_follows(losses, expected, level)
    if level in WITH_MASTERS:
        assert_masters_round_to_weights(training)
    return training


def assert_masters_round_to_weights(training):
    masters, weights = (
        sorted(tensors, key=lambda t: (t.dim(), t.numel()))
        for tensors in (training.masters(), training.weights())
    )
    for master, weight in zip(masters, weights, strict=True):
        assert master.dtype == f32
        assert same_bits(master.to(weight.dtype), weight)


# --- one weight -----------------------------------------------------------------------------------


class Scalar(nn.Module):
    """y = w * x, so that a loss of y has the gradient x: every gradient can be chosen."""

    def __init__(self, w=1.0):
        super().__init__()
        self.w = nn.Parameter(torch.full((1,), float(w)))

    def forward(self, x):
        return self.w * x


def sgd(model):
    """Return an optimizer whose step is the gradient."""
    return torch.optim.SGD(model.parameters(), lr=1.0)


def initialized(level="O2", model=None, kind=torch.optim.SGD, **options):
    """Initialize a model, a Scalar unless given, and its optimizer; return both."""
    model = Scalar() if model is None else model
    optimizer = kind(model.parameters(), lr=1.0)
    return amp.initialize(model, optimizer, opt_level=level, **{"verbosity": 0, **options})


def give_gradient(model, optimizers, gradient=0.5, **options):
    """Make a pass that gives every weight of `model` the gradient `gradient`.

    Up to 0.5 it fits FP16 at the first scale of 65536.
    """
    loss = (model(torch.ones(1)) * 1.0).sum().float() * gradient
    backward(loss, optimizers, **options)


def weight(optimizer):
    """Return the weight that the optimizer steps: the master where there is one."""
    return next(amp.master_params(optimizer)).item()


def stepped(optimizer):
    """Make a step; return the weight."""
    optimizer.step()
    return weight(optimizer)


def gradient_of(optimizer):
    return next(amp.master_params(optimizer)).grad.float().item()


def scale(optimizer, loss_id=0):
    return amp.state_dict(optimizer=optimizer)[f"loss_scaler{loss_id}"]["loss_scale"]


def unskipped(optimizer):
    return amp.state_dict(optimizer=optimizer)["loss_scaler0"]["unskipped"]


# --- under apex's names ---------------------------------------------------------------------------


def started_by_apex(make, level, **options):
    """Return a model and its optimizer, under amp at `level`, or without it and of that type."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    if not isinstance(level, str):
        return model.to(level), make(model.parameters(), **options)
    optimizer = make(model.parameters(), **options)
    return apex.amp.initialize(model, optimizer, opt_level=level, verbosity=0)


def train_by_apex(model, optimizer, steps, overflow=None):
    """Train; return the losses. That of the step `overflow` is infinite."""
    x, losses = torch.rand(16, 4, generator=torch.Generator().manual_seed(1)), []
    under_amp = hasattr(optimizer, "_amp_session")
    for step in range(steps):
        loss = (model(x if under_amp else x.to(model.weight)).float() - x[:, :2]).pow(2).mean()
        loss = loss * float("inf") if step == overflow else loss
        if under_amp:
            with apex.amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# --- optimizers of others -------------------------------------------------------------------------


class KeptInFloat32(torch.optim.Optimizer):
    """FP32 state whatever the parameter is, as optimizers for half models keep."""

    def __init__(self, params, lr=0.5):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    zeros = torch.zeros_like(p, dtype=torch.float32)
                    average = self.state[p].setdefault("average", zeros).lerp_(p.grad.float(), 0.1)
                    p.sub_((group["lr"] * average).to(p.dtype))


class Delegates(torch.optim.Optimizer):
    """A wrapper that passes everything on to the optimizer inside."""

    def __init__(self, inner):
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def step(self, closure=None):
        return self.inner.step(closure)

    def zero_grad(self):
        self.inner.zero_grad()

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict)


# --- fused layers, and other libraries ------------------------------------------------------------


class NormsAndConvolutions(nn.Module):
    """Two convolutions, each after a batch norm; a residual is added in the second."""

    def __init__(self, channels=16):
        super().__init__()
        self.norm1 = BatchNormAct2d(channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = BatchNormAct2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 1, bias=False)

    def forward(self, x):
        return self.conv2(self.norm2(self.conv1(self.norm1(x)), x))


def step_and_evaluation(model, inputs, make_output=lambda model, inputs: model(*inputs)):
    """Return outputs, gradients and running statistics of a training step, then eval's outputs."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    model.zero_grad()
    out = make_output(model.train(), inputs)
    factors = torch.linspace(0, 1, out.numel(), dtype=out.dtype, device=out.device)
    (out.sin() * factors.view(out.shape)).sum().backward()
    tensors = [out.detach(), *(x.grad for x in inputs), *(p.grad for p in model.parameters())]
    with torch.no_grad():
        evaluated = make_output(model.eval(), inputs)
    model.train()
    return [*tensors, *(b.clone() for b in model.buffers()), evaluated]


def assert_near(found, expected, tolerance):
    """Assert that the error of each tensor is below `tolerance`, as a part of its norm, or of a
    thousandth of the largest: a bias before a batch norm has a gradient of rounding errors."""
    largest = max(b.double().norm() for b in expected if b is not None)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            a, b = a.double(), b.double()
            norm = b.norm().clamp(min=1e-3 * largest)
            assert (a - b).norm() <= tolerance * norm, (a - b).norm() / norm


def quiet_trainer(plugin, **options):
    """A trainer of Lightning's on the CPU that shows and stores nothing."""
    import lightning

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    quiet["enable_model_summary"] = False
    return lightning.Trainer(plugins=plugin, accelerator="cpu", **quiet, **options)
