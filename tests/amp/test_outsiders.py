"""Optimizers that amp was not given, or that train nothing, are told of; so is a wrong order."""

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn

from ampfuse import amp, optim

STEPS_ON = "SGD steps on gradients that are still multiplied by the loss scale"


def messages_of(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in caught]


class Net(nn.Module):
    def __init__(self, sparse=True):
        super().__init__()
        self.items = nn.Embedding(30, 4, sparse=sparse)
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.items(x))


class Training:
    """Three steps with `inside` under amp and `outside` not, each named after what it trains."""

    def __init__(self, level, inside, outside=(), between=None, **options):
        torch.manual_seed(0)
        self.model, self.loss = Net("items" in outside), nn.Linear(4, 4)
        parts = {"items": self.model.items, "head": self.model.head, "loss": self.loss}
        self.inside = [torch.optim.AdamW(parts[part].parameters()) for part in inside]
        self.outside = [torch.optim.SGD(parts[part].parameters(), lr=0.1) for part in outside]
        self.between = between
        amp.initialize(self.model, self.inside, opt_level=level, verbosity=0, **options)

    def __call__(self):
        for _ in range(3):
            loss = self.loss(self.model(torch.arange(30)).float()).square().mean()
            with amp.scale_loss(loss, self.inside) as scaled:
                scaled.backward()
            if self.between is not None:
                self.between(self)
            for optimizer in self.inside + self.outside:
                optimizer.step()
                optimizer.zero_grad()


def clip(training):
    nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)


WARNED = {
    "sparse": (Training, ("O1", ["head", "loss"], ["items"]), "items.weight"),
    "half weights": (Training, ("O2", ["head", "loss"], ["items"]), "items.weight"),
    "dense": (Training, ("O1", ["items", "loss"], ["head"]), "head.weight"),
    "clipped": (Training, ("O1", ["items", "loss"], ["head"], clip), "head.weight"),
    "not of the model": (Training, ("O1", ["items", "head"], ["loss"]), r"of shape (4, 4)"),
}


@pytest.mark.parametrize("case", WARNED)
def test_a_step_outside_of_amp_is_warned_of_once(case):
    make, args, name = WARNED[case]
    (message,) = messages_of(make(*args))
    assert STEPS_ON in message
    assert f"its parameter {name}." in message


def test_a_static_scale_is_one_too():
    (message,) = messages_of(Training("O5", ["head", "loss"], ["items"], loss_scale=8.0))
    assert STEPS_ON in message


def own_pass(training):
    """What the scaled loss left is dropped before the outer optimizer's own backward pass."""
    for optimizer in training.outside:
        optimizer.zero_grad()
    training.model(torch.arange(30)).float().square().mean().backward()


def join(training):
    """What no optimizer holds at first is given to one of amp's."""
    if len(training.inside[0].param_groups) == 1:
        training.inside[0].add_param_group({"params": list(training.model.items.parameters())})


class Lookahead(torch.optim.Optimizer):
    """Steps by another optimizer, which amp is not given."""

    def __init__(self, base):
        self.base = base
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups

    def step(self, closure=None):
        return self.base.step(closure)


class Wrapped(Training):
    def __init__(self, level):
        self.model, self.loss = Net(sparse=False), nn.Linear(4, 4)
        parts = itertools.chain(self.model.parameters(), self.loss.parameters())
        self.inside = [Lookahead(torch.optim.SGD(parts, lr=0.1))]
        self.outside, self.between = [], None
        amp.initialize(self.model, self.inside, opt_level=level, verbosity=0)


QUIET = {
    "nobody steps": (Training, ("O1", ["head"])),
    "no scale": (Training, ("O4", ["head", "loss"], ["items"])),
    "a pass of its own": (Training, ("O1", ["items", "loss"], ["head"], own_pass)),
    "added later": (Training, ("O1", ["head"], [], join)),
    "wrapped O1": (Wrapped, ("O1",)),
    "wrapped O2": (Wrapped, ("O2",)),
}


@pytest.mark.parametrize("case", QUIET)
def test_nothing_is_said_where_nothing_is_wrong(case):
    make, args = QUIET[case]
    assert messages_of(make(*args)) == []


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_gan_is_quiet(level):
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, critic)]
    amp.initialize([generator, critic], optimizers, opt_level=level, num_losses=2, verbosity=0)

    def train():
        for i in (0, 1, 0, 1):
            fake = generator(torch.randn(8, 4))
            loss = -critic(fake).mean() if i == 0 else critic(fake.detach()).mean()
            optimizers[i].zero_grad()
            with amp.scale_loss(loss, optimizers[i], loss_id=i) as scaled:
                scaled.backward()
            optimizers[i].step()

    assert messages_of(train) == []


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
