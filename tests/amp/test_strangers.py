"""Optimizers that train nothing are told of; so is a wrong order."""

import copy
import warnings

import pytest
import torch
from torch import nn

from ampfuse import amp, optim


def messages_of(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in caught]


class Lookahead(torch.optim.Optimizer):
    """Steps by another optimizer."""

    def __init__(self, base):
        self.base = base
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups

    def step(self, closure=None):
        return self.base.step(closure)


# --- optimizers that train nothing ----------------------------------------------------------------

TRAINS_NOTHING = "SGD holds no parameter of the model"


def sgd(*modules):
    return torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1)


def frozen(module):
    return module.requires_grad_(False)


# Of a model, another one and a loss: what is given to initialize, and how many warnings come.
STRANGERS = {
    "a copy": lambda m, *_: (m, sgd(copy.deepcopy(m)), 1),
    "one of two": lambda m, other, loss: ([m, other], [sgd(m), sgd(copy.deepcopy(other))], 1),
    "its own": lambda m, other, loss: (m, sgd(m), 0),
    "a part": lambda m, other, loss: (m, sgd(m[0]), 0),
    "more than the model": lambda m, other, loss: (m[0], sgd(m), 0),
    "a loss with parameters": lambda m, other, loss: (m, [sgd(m), sgd(loss)], 0),
    "a probe on a frozen model": lambda m, other, loss: (frozen(m), sgd(loss), 0),
    "parameters to be unfrozen": lambda m, other, loss: (m, sgd(frozen(m[0])), 0),
    "LARC": lambda m, other, loss: (m, optim.LARC(sgd(m)), 0),
    "a wrapper": lambda m, other, loss: (m, Lookahead(sgd(m)), 0),
    "no model": lambda m, other, loss: ([], sgd(m), 0),
    "GAN": lambda m, other, loss: ([m, other], [sgd(m), sgd(other)], 0),
}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("case", STRANGERS)
def test_an_optimizer_without_a_parameter_of_the_model(case, level):
    models, optimizers, count = STRANGERS[case](
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), nn.Linear(4, 4), nn.Linear(4, 2)
    )
    found = messages_of(lambda: amp.initialize(models, optimizers, opt_level=level, verbosity=0))
    assert [message.startswith(TRAINS_NOTHING) for message in found] == [True] * count


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("enabled", [True, "False"])
def test_swapped_arguments_of_scale_loss(enabled):
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    amp.initialize(model, optimizer, enabled, verbosity=0)
    loss = model(torch.ones(2)).float().sum()
    message = r"swapped: .* amp.scale_loss\(loss, optimizer\)"
    with pytest.raises(TypeError, match=message), amp.scale_loss(optimizer, loss):
        pass


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.RAdam, optim.Lion])
def test_the_way_to_initialize_again(level, cls):
    """The message's, step by step: the training goes on as if nothing had happened."""

    def train(model, optimizer, seeds):
        for seed in seeds:
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
            with amp.scale_loss((model(x).float() - x).square().mean(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    def started():
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = cls(model.parameters(), lr=0.01)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        return train(model, optimizer, range(3)), optimizer

    expected = train(*started(), range(3, 6))
    model, old = started()
    message = r"make a new .* model.parameters\(\).*new.load_state_dict\(old.state_dict\(\)\)"
    with pytest.raises(RuntimeError, match=message):
        amp.initialize(model, old, opt_level=level, verbosity=0)
    scale = amp.state_dict()
    new = cls(model.parameters(), lr=0.01)
    amp.initialize(model, new, opt_level=level, verbosity=0)
    new.load_state_dict(old.state_dict())
    amp.load_state_dict(scale)
    train(model, new, range(3, 6))
    assert torch.equal(model.weight, expected.weight)
