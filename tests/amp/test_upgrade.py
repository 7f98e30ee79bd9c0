"""Optimizers that amp.initialize upgraded in place: fused ones, and any other with its own step."""

import copy
import gc
import pickle
from functools import partial
from inspect import signature

import pytest
import torch
from torch import nn

from ampfuse import amp, optim
from ampfuse.optim.upgrade import GenericOptimizer
from cases import LEVELS, assert_same_bits, f32, same_bits, snapshot
from trainings import (
    WITH_MASTERS,
    Delegates,
    KeptInFloat32,
    Training,
    train_as_in_plain_torch,
)


class Subclass(torch.optim.AdamW):
    """A user's, which may mean anything by its methods."""


OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=0.02),
    "AdamW": partial(torch.optim.AdamW, lr=0.02),
    "ours": partial(optim.AdamW, lr=0.02),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "LAMB": partial(optim.LAMB, lr=0.02),
    "NovoGrad": partial(optim.NovoGrad, lr=0.02),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, eps=1e-4),
    "NAdam": partial(torch.optim.NAdam, lr=0.02),
    "Adadelta": partial(torch.optim.Adadelta, lr=1.0),
    "LBFGS": partial(torch.optim.LBFGS, lr=0.1, max_iter=1),
    "hand-written": KeptInFloat32,
    "subclass": partial(Subclass, lr=0.02, eps=1e-4),
}
FUSED = ("SGD", "Adam", "AdamW", "ours", "Adagrad", "LAMB", "NovoGrad")
# O3 has no masters: states of a step in FP16 underflow (eps of 1e-8 is 0) unless it is ours.
IN_PURE_FP16 = (*FUSED, "hand-written", "LBFGS")
QUICK = ("O1", "O2", "O5")
SOME = ("SGD", "AdamW", "Adagrad", "LAMB", "NovoGrad", "RMSprop", "hand-written", "subclass")
# Only half weights of fused optimizers are split.
SPLIT = [
    (name, level, {"master_weights": "split"})
    for name in ("SGD", "AdamW")
    for level in WITH_MASTERS
]


@pytest.mark.parametrize(
    ("name", "level"),
    [
        # The others go the way of one of SOME.
        pytest.param(name, level, marks=() if name in SOME or level in QUICK else pytest.mark.slow)
        for name in OPTIMIZERS
        for level in LEVELS
    ],
)
def test_training_follows_plain_torch(name, level):
    training = train_as_in_plain_torch(OPTIMIZERS[name], level, name in IN_PURE_FP16)
    assert isinstance(training.optimizer, GenericOptimizer) == (name not in FUSED)


class OwnArguments(torch.optim.SGD):
    def step(self, closure=None, *, factor=1.0):
        for group in self.param_groups:
            group["lr"] *= factor
        return super().step(closure)

    def zero_grad(self, set_to_none=True, *, more=()):
        super().zero_grad(set_to_none)


def signatures(optimizer):
    """Names, kinds and defaults of the parameters of the methods that are wrapped."""
    methods = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")
    by_method = {name: signature(getattr(type(optimizer), name)).parameters for name in methods}
    return {
        name: [(p.name, p.kind, p.default) for p in parameters.values()]
        for name, parameters in by_method.items()
    }


@pytest.mark.parametrize("name", [*OPTIMIZERS, "own arguments", "LARC"])
def test_signatures_are_those_of_the_class(name):
    make = {**OPTIMIZERS, "own arguments": partial(OwnArguments, lr=0.1)}.get(name, torch.optim.SGD)
    model = nn.Linear(2, 2)
    optimizer = make(model.parameters())
    expected = signatures(optimizer)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    assert signatures(optim.LARC(optimizer) if name == "LARC" else optimizer) == expected
    if name == "own arguments":
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step(factor=0.5)
        optimizer.zero_grad(more=(1,))
        assert optimizer.param_groups[0]["lr"] == 0.05


def register_step_hooks(optimizer, calls, prefix):
    optimizer.register_step_pre_hook(lambda o, a, k: calls.append(f"{prefix} pre"))
    optimizer.register_step_post_hook(lambda o, a, k: calls.append(f"{prefix} post"))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", SOME)
def test_hooks_fire_as_in_torch(name, level):
    """Once a step, or twice where a subclass calls super().step(); registered early or late."""
    told = []
    for at in (None, level):
        training, calls = Training(OPTIMIZERS[name]), []
        optimizer = training.optimizer
        register_step_hooks(optimizer, calls, "early")
        if at is not None:
            training.initialize(at, loss_scale=1.0)
        register_step_hooks(optimizer, calls, "late")
        training.steps(range(3))
        told.append(calls.copy())
    assert told[0] == told[1]
    calls.clear()
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("saving"))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert calls == ["saving", "loaded"]


def test_upgrade_keeps_a_differentiable_adam_generic():
    """differentiable=True wants a step that autograd records; the flag of Adam is AdamW's rule."""
    for options, generic in (({"differentiable": True}, True), ({}, False)):
        param = torch.ones(3, requires_grad=True)
        optimizer = torch.optim.Adam([param], decoupled_weight_decay=True, **options)
        optim.upgrade(optimizer, master_weights=False)
        assert isinstance(optimizer, GenericOptimizer) == generic
        assert isinstance(optimizer, torch.optim.Adam)


@pytest.mark.covers(2)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", SOME)
def test_a_copy_of_model_and_optimizer_trains_on_with_the_same_bits(name, level, copied):
    training = Training(OPTIMIZERS[name], level)
    training.steps(range(5))
    twin = copied(training)
    assert type(twin.optimizer) is type(training.optimizer)
    known = {id(p) for p in training.optimizer.param_groups[0]["params"]}
    assert known.isdisjoint(map(id, twin.optimizer.param_groups[0]["params"]))
    for seeds in ((), range(5, 8)):
        training.steps(seeds)
        twin.steps(seeds)
        assert_same_bits(snapshot(twin.optimizer), snapshot(training.optimizer))
        assert all(map(same_bits, twin.weights(), training.weights()))


@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("name", SOME)
def test_masters_follow_edits_of_the_model(name, level):
    """Edits of every kind are in test_memory_modes.py."""
    training = Training(OPTIMIZERS[name], level)
    training.steps(range(5))
    masters, weights = training.masters(), training.weights()
    with torch.no_grad():
        training.model[0].weight[2, 1:5] = 0.5
        training.model[-1].bias.clamp_(-0.01, 0.01)
    edited = training.weights()
    for group in training.optimizer.param_groups:
        group["lr"] = 0.0  # so that masters and weights show what edits made of them
    training.step(5)
    assert all(map(same_bits, training.weights(), edited))
    for master, old, new, before in zip(training.masters(), masters, edited, weights, strict=True):
        assert same_bits(master, torch.where(new == before, old, new.float()))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", SOME)
def test_parameters_may_be_added_to_empty_groups(name, level):
    """To an optimizer of empty groups the model's parameters, then those of another layer."""
    training = Training(lambda params: OPTIMIZERS[name]([{"params": []}]), level)
    training.steps(range(2))
    assert training.optimizer.state_dict()["state"] == {}
    base, before = training.model, training.weights()
    training.optimizer.add_param_group({"params": list(base.parameters())})
    training.step(2)
    assert not any(map(torch.equal, training.weights(), before))
    extra = nn.Linear(6, 2).to(next(base.parameters()).dtype)
    training.optimizer.add_param_group({"params": list(extra.parameters())})
    training.model = lambda x: base(x) + extra(x.to(extra.weight.dtype))
    before = copy.deepcopy(extra)
    training.steps(range(5))
    assert not any(map(torch.equal, extra.parameters(), before.parameters()))
    if level in WITH_MASTERS:
        assert all(param.dtype == f32 for param in amp.master_params(training.optimizer))


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_add_param_group_takes_and_refuses_what_torch_does(level):
    training = Training(OPTIMIZERS["SGD"], level)
    groups = training.optimizer.param_groups
    extra = nn.Linear(2, 2).to(next(training.model.parameters()).dtype)
    group = {"params": (p for p in extra.parameters()), "lr": 0.5}
    training.optimizer.add_param_group(group)
    assert groups[1] is group
    assert [p.dtype for p in group["params"]] == [f32, f32]
    for again in (extra.weight, training.model[0].weight):
        with pytest.raises(ValueError, match="more than one"):
            training.optimizer.add_param_group({"params": again})
    with pytest.raises(TypeError, match="ordered"):
        training.optimizer.add_param_group({"params": set(nn.Linear(2, 2).parameters())})
    assert len(groups) == 2
    model = nn.Linear(2, 2)
    named = torch.optim.SGD(model.named_parameters(), lr=0.1)
    amp.initialize(model, named, opt_level=level, verbosity=0)
    named.add_param_group({"params": list(nn.Linear(2, 2).half().named_parameters())})
    assert named.param_groups[1]["param_names"] == ["weight", "bias"]
    assert all(p.dtype == f32 for p in named.param_groups[1]["params"])


def added(optimizer, first, others):
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": others})
    optimizer.add_param_group({"params": [first]})


def assigned(optimizer, first, others):
    optimizer.param_groups[0]["params"] = [first, *others]


def refilled(optimizer, first, others):
    params = optimizer.param_groups[0]["params"]
    params.clear()
    params.extend([*others, first])


def replaced(optimizer, first, others):
    (group,) = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": [first]}, {**group, "params": others}]


@pytest.mark.covers(2)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("made", [added, assigned, refilled, replaced])
@pytest.mark.parametrize(
    ("name", "level", "options"),
    [*((name, level, {}) for name in SOME for level in LEVELS), *SPLIT],
)
def test_groups_of_the_model_s_parameters_keep_masters_and_states(
    name, level, options, made, steps
):
    as_before = Training(OPTIMIZERS[name], level, **options)
    losses = as_before.steps(range(steps + 3))
    training = Training(OPTIMIZERS[name], level, **options)
    training.steps(range(steps))
    first, *others = training.model.parameters()
    made(training.optimizer, first, others)
    assert training.steps(range(steps, steps + 3)) == losses[steps:]
    assert all(map(same_bits, training.weights(), as_before.weights()))
    assert len(training.optimizer.state_dict()["state"]) == 6


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_a_master_and_its_weight_are_one_key(level):
    """For whoever goes from the model's parameters to the optimizer's, as torch's checkpoints."""
    training = Training(OPTIMIZERS["AdamW"], level)
    training.step(0)
    names = {param: name for name, param in training.model.named_parameters()}
    (group,) = training.optimizer.param_groups
    assert [names[param] for param in group["params"]] == list(names.values())
    for weight, master in zip(names, group["params"], strict=True):
        assert training.optimizer.state[weight] is training.optimizer.state[master]
        equal = weight == master
        assert torch.equal(torch.as_tensor(equal), weight.detach().float() == master.detach())
        assert type(equal & True) is torch.Tensor
    other = copy.deepcopy(training.model[0].weight)
    assert other not in names
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(other == training.model[0].weight)


@pytest.mark.covers(2)
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", SOME)
def test_a_parameter_unfrozen_later_trains_as_the_others(name, level, copied):
    """apex never updated it; with a step in FP16 small updates would vanish."""
    training = Training(OPTIMIZERS[name])
    training.model[0].requires_grad_(False)
    training.initialize(level)
    training.steps(range(2))
    if copied:
        training = copy.deepcopy(training)
    first, last = training.model[0], training.model[-1]
    before = first.weight.detach().clone()
    training.step(2)
    assert same_bits(first.weight.detach(), before)
    training.optimizer.zero_grad()
    training.backward(3)  # what is pending is kept
    pending = last.weight.grad.detach().float().clone()
    first.requires_grad_(True)
    training.backward(3)
    total = last.weight.grad.float()
    torch.testing.assert_close(total, 2 * pending, rtol=0.02, atol=1e-3)
    training.optimizer.step()
    training.steps(range(4, 7))
    assert not torch.equal(first.weight.detach(), before)
    if level in WITH_MASTERS:
        assert all(param.dtype == f32 for param in amp.master_params(training.optimizer))


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.RAdam, optim.Lion])
def test_the_message_says_how_to_initialize_again(level, cls):
    """The message's, step by step: the training goes on as if nothing had happened."""
    training = Training(cls, level)
    training.steps(range(3))
    twin, old = copy.deepcopy(training), training.optimizer
    message = r"create a new .* model.parameters\(\).*new.load_state_dict\(old.state_dict\(\)\)"
    with pytest.raises(RuntimeError, match=message):
        training.initialize(level)
    scale = amp.state_dict()
    training.optimizer = cls(training.model.parameters())
    training.initialize(level)
    training.optimizer.load_state_dict(old.state_dict())
    amp.load_state_dict(scale)
    assert training.steps(range(3, 6)) == twin.steps(range(3, 6))
    assert all(map(same_bits, training.weights(), twin.weights()))


# --- memory formats -------------------------------------------------------------------------------


@pytest.mark.covers(2)
@pytest.mark.filterwarnings("ignore:O. casts inside")
@pytest.mark.parametrize("when", range(3))
@pytest.mark.parametrize(
    ("name", "level", "options"),
    [*((name, level, {}) for name in ("AdamW", "SGD", "RMSprop") for level in LEVELS), *SPLIT],
)
def test_a_memory_format_may_change_after_initialize(name, level, options, when):
    """At once, between two passes, and after steps: the bits of the one that stays contiguous."""
    snapshots = []
    for moved in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
        optimizer = OPTIMIZERS[name](model.parameters())
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
        if name != "RMSprop":
            optimizer.ema_decay = 0.5
        for step in range(4):
            for part in range(2):
                if moved and step == when and part == (step == 1):
                    model.to(memory_format=torch.channels_last)
                loss = sum(
                    (p.float() * torch.arange(p.numel()).view(p.shape)).sum()
                    for p in model.parameters()
                )
                with amp.scale_loss(loss * 2.0 ** -(step + part), optimizer) as scaled:
                    scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last) == moved
        snapshots.append(snapshot(optimizer) | {"weight": model[0].weight.detach()})
    assert_same_bits(*snapshots)


# --- optimizers that do not train the model -------------------------------------------------------


def sgd(*modules, more=()):
    return torch.optim.SGD([*(p for m in modules for p in m.parameters()), *more], lr=0.1)


def frozen(module):
    return module.requires_grad_(False)


LOOSE = nn.Parameter(torch.ones(4))
# The arguments of initialize, from a model, another one and a loss, and the number of warnings.
STRANGERS = {
    "its own": lambda m, other, loss: (m, sgd(m), 0),
    "another model": lambda m, other, loss: (m, sgd(other), 1),
    "one of two": lambda m, other, loss: ([m, other], [sgd(m), sgd(copy.deepcopy(other))], 1),
    "a part": lambda m, other, loss: (m, sgd(m[0]), 0),
    "a part and a loss": lambda m, other, loss: (m, sgd(m[0], loss), 0),
    "a part and a loose one": lambda m, other, loss: (m, sgd(m[0], more=[LOOSE]), 0),
    "a part, and a part of a model that amp does not know": lambda m, other, loss: (
        m, [sgd(m[0]), sgd(other)], 0),
    "more than the model": lambda m, other, loss: (m[0], sgd(m), 0),
    "a loss with parameters": lambda m, other, loss: (m, [sgd(m), sgd(loss)], 0),
    "a probe on a frozen model": lambda m, other, loss: (frozen(m), sgd(loss), 0),
    "parameters to be unfrozen": lambda m, other, loss: (m, sgd(frozen(m[0])), 0),
    "LARC": lambda m, other, loss: (m, optim.LARC(sgd(m)), 0),
    "a wrapper": lambda m, other, loss: (m, Delegates(sgd(m)), 0),
    "no model": lambda m, other, loss: ([], sgd(m), 0),
    "no optimizer": lambda m, other, loss: (m, [], 0),
    "GAN": lambda m, other, loss: ([m, other], [sgd(m), sgd(other)], 0),
}  # fmt: skip
# A change of the model after the optimizer was made.
CHANGES = {
    "a copy": copy.deepcopy,
    "to_empty": lambda m: m.to("meta").to_empty(device="cpu"),
    "a weight replaced": lambda m: setattr(m[0], "weight", nn.Parameter(torch.randn(4, 4))),
    "a head replaced": lambda m: m.__setitem__(1, nn.Linear(4, 7)),
    "weight_norm": lambda m: nn.utils.parametrizations.weight_norm(m[0]) and None,
    "assign": lambda m: m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True) and None,
}


def changed(model, change):
    optimizer = sgd(model)
    return change(model) or model, optimizer, 1


STRANGERS |= {name: lambda m, *_, of=of: changed(m, of) for name, of in CHANGES.items()}


# Those where no parameter of the model would be trained, which is an error.
NONE_TRAINED = {"a copy", "to_empty", "assign", "another model"}


@pytest.mark.covers(1)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("case", STRANGERS)
def test_an_optimizer_of_parameters_that_no_model_has(case, level, caplog, request):
    request.addfinalizer(gc.freeze)
    gc.unfreeze()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    other, loss = nn.Linear(4, 4), nn.Linear(4, 2)  # as long as a variable holds them
    models, optimizers, count = STRANGERS[case](model, other, loss)
    if case in NONE_TRAINED:
        with pytest.raises(RuntimeError, match=r"SGD has . parameter\(s\) of no model"):
            amp.initialize(models, optimizers, opt_level=level, verbosity=0)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        return
    amp.initialize(models, optimizers, opt_level=level, verbosity=0)
    assert len(caplog.messages) == count
    for message in caplog.messages:
        assert "of no model passed to amp.initialize, and " in message


def test_two_optimizers_of_one_parameter_are_told(caplog):
    model = nn.Linear(4, 4)
    optimizers = [sgd(model), torch.optim.Adam([model.bias])]
    amp.initialize(model, optimizers, opt_level="O2", verbosity=0)
    (message,) = caplog.messages
    assert message.startswith("SGD and Adam both hold bias, and both will update it.")


@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize(
    ("size", "by_torchrun", "told"),
    [("2", False, "WARNING"), ("2", True, "INFO"), ("1", False, None)],
)
def test_masters_that_depend_on_the_environment_are_told(
    size, by_torchrun, told, level, monkeypatch, caplog
):
    monkeypatch.setenv("WORLD_SIZE", size)
    if by_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    training = Training(OPTIMIZERS["AdamW"])
    exact = training.weights()
    with caplog.at_level("INFO"):
        training.initialize(level)
    levels = [r.levelname for r in caplog.records if "WORLD_SIZE in the env" in r.getMessage()]
    assert levels == ([] if told is None else [told])
    rounded = [weight.float() for weight in training.weights()]
    assert not torch.equal(rounded[0], exact[0])
    expected = exact if told is None else rounded
    assert all(map(same_bits, training.masters(), expected))
