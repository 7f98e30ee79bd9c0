"""A model of one weight whose gradient can be chosen, and its training at a level."""

import torch
from torch import nn

import amp_training
from ampfuse import amp


class Scalar(nn.Module):
    """y = w * x, so that a loss of y has the gradient x: every gradient can be chosen."""

    def __init__(self, w=1.0):
        super().__init__()
        self.w = nn.Parameter(torch.full((1,), float(w)))

    def forward(self, x):
        return self.w * x


def sgd(model):
    """The step is the gradient."""
    return torch.optim.SGD(model.parameters(), lr=1.0)


def initialized(level="O2", model=None, kind=torch.optim.SGD, **options):
    """A model, a Scalar unless given, and its optimizer, initialized."""
    model = Scalar() if model is None else model
    optimizer = kind(model.parameters(), lr=1.0)
    return amp.initialize(model, optimizer, opt_level=level, **{"verbosity": 0, **options})


def make_two(level, together=False, **options):
    """Two models with an optimizer each, or with one together."""
    models = [Scalar(), Scalar()]
    optimizers = sgd(nn.ModuleList(models)) if together else [*map(sgd, models)]
    return amp.initialize(models, optimizers, opt_level=level, verbosity=0, **options)


def sum_of(models):
    return sum(model(torch.ones(1)).float().sum() for model in models)


def backward(model, optimizers, gradient=0.5, **options):
    """Make a pass that gives every weight of `model` the gradient `gradient`.

    Up to 0.5 it fits FP16 at the first scale of 65536.
    """
    loss = (model(torch.ones(1)) * 1.0).sum().float() * gradient
    amp_training.backward(loss, optimizers, **options)


def weight(optimizer):
    """The weight that the optimizer steps: the master where there is one."""
    return next(amp.master_params(optimizer)).item()


def stepped(optimizer):
    """The same after a step."""
    optimizer.step()
    return weight(optimizer)


def gradient_of(optimizer):
    return next(amp.master_params(optimizer)).grad.float().item()


def scale(optimizer, loss_id=0):
    return amp.state_dict(optimizer=optimizer)[f"loss_scaler{loss_id}"]["loss_scale"]


def unskipped(optimizer):
    return amp.state_dict(optimizer=optimizer)["loss_scaler0"]["unskipped"]
