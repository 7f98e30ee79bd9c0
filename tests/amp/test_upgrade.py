"""Optimizers that amp.initialize upgraded in place: fused ones, and any other with its own step."""

import copy
import pickle

import pytest
import torch
from torch import nn

from ampfuse import amp, optim
from ampfuse.optim.generic import GenericOptimizer
from cases import LEVELS, assert_same_bits, f32, same_bits, snapshot

WITH_MASTERS = ("O2", "O5")


class SignDescent(torch.optim.Optimizer):
    """Hand-written, with a state of its own: what people write for a paper."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                average = state.setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 0.5)
                p.add_(average.sign(), alpha=-group["lr"] / state["count"] ** 0.5)


class LoudAdamW(torch.optim.AdamW):
    """A user's subclass, which may mean anything by step."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02),
    "ours": lambda p: optim.AdamW(p, lr=0.02),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "LAMB": lambda p: optim.LAMB(p, lr=0.02),
    "NovoGrad": lambda p: optim.NovoGrad(p, lr=0.02),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.02),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "hand-written": lambda p: SignDescent(p),
    "subclass": lambda p: LoudAdamW(p, lr=0.02),
}
FUSED = ("SGD", "Adam", "AdamW", "ours", "Adagrad", "LAMB", "NovoGrad")
# O3 has no masters: states of a step in FP16 underflow (eps of 1e-8 is 0) unless it is ours.
IN_PURE_FP16 = (*FUSED, "hand-written")
SOME = ("SGD", "AdamW", "Adagrad", "LAMB", "NovoGrad", "RMSprop", "hand-written", "subclass")


class Training:
    """A small regression and its optimizer, at a level."""

    def __init__(self, name, level):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.x = torch.randn(64, 8)
        self.y = self.x.sin().sum(1, keepdim=True)
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        if level is not None:
            self.model, self.optimizer = amp.initialize(
                self.model, self.optimizer, opt_level=level, verbosity=0
            )
        self.level = level

    def loss(self):
        return (self.model(self.x).float() - self.y).square().mean()

    def backward(self):
        self.optimizer.zero_grad()
        loss = self.loss()
        if self.level is None:
            loss.backward()
        else:
            with amp.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
        return float(loss.detach())

    def steps(self, count):
        losses = []
        for _ in range(count):
            losses.append(self.backward())
            self.optimizer.step()
        return losses

    def masters(self):
        return [param.detach().clone() for param in amp.master_params(self.optimizer)]

    def weights(self):
        return [param.detach().clone() for param in self.model.parameters()]

    def still(self):
        """A step that changes nothing, so that masters and weights show what edits made of them."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.steps(1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_follows_fp32(name, level):
    amped, plain = Training(name, level), Training(name, None)
    cls = type(plain.optimizer)
    assert isinstance(amped.optimizer, cls)
    assert isinstance(amped.optimizer, GenericOptimizer) == (name not in FUSED)
    losses, expected = amped.steps(25), plain.steps(25)
    if level == "O3" and name not in IN_PURE_FP16:
        return
    assert losses[-1] < 0.6 * losses[0]
    assert losses[-1] == pytest.approx(expected[-1], rel=0.25)
    if name == "subclass":
        overflow = amped.optimizer.last_step.overflow()
        assert amped.optimizer.steps == 25 - (overflow["skipped_steps"] if overflow else 0)
    if level in WITH_MASTERS:
        for master, weight in zip(amped.masters(), amped.weights(), strict=True):
            assert master.dtype == f32
            assert same_bits(master.to(weight.dtype), weight)


@pytest.mark.parametrize("level", LEVELS)
def test_lbfgs_with_the_loss_at_hand(level):
    """LBFGS wants a closure; without reevaluation it is a quasi-Newton step per gradient."""
    training = Training("SGD", None)
    optimizer = torch.optim.LBFGS(training.model.parameters(), lr=0.1, max_iter=1)
    training.model, training.optimizer = amp.initialize(
        training.model, optimizer, opt_level=level, verbosity=0
    )
    training.level = level
    losses = []
    for _ in range(20):
        losses.append(training.backward())
        training.optimizer.step(lambda: torch.tensor(losses[-1]))
    assert losses[-1] < 0.8 * losses[0]


def register_step_hooks(optimizer, calls, prefix):
    optimizer.register_step_pre_hook(lambda o, a, k: calls.append(f"{prefix} pre"))
    optimizer.register_step_post_hook(lambda o, a, k: calls.append(f"{prefix} post"))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", SOME)
def test_hooks_fire_as_in_torch(name, level):
    """Once a step, or twice where a subclass calls super().step(); registered early or late."""
    plain, expected = Training(name, None), []
    register_step_hooks(plain.optimizer, expected, "early")
    register_step_hooks(plain.optimizer, expected, "late")
    plain.steps(3)

    training, calls = Training(name, None), []
    hooked = training.optimizer
    register_step_hooks(hooked, calls, "early")
    training.model, training.optimizer = amp.initialize(
        training.model, hooked, opt_level=level, loss_scale=1.0, verbosity=0
    )
    assert training.optimizer is hooked
    training.level = level
    register_step_hooks(hooked, calls, "late")
    training.steps(3)
    assert calls == expected
    calls.clear()
    hooked.register_state_dict_pre_hook(lambda o: calls.append("saving"))
    hooked.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
    hooked.load_state_dict(copy.deepcopy(hooked.state_dict()))
    assert calls == ["saving", "loaded"]


def test_differentiable_and_decoupled_adam():
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
    training = Training(name, level)
    training.steps(5)
    twin = copied(training)
    assert type(twin.optimizer) is type(training.optimizer)
    known = {id(p) for p in training.optimizer.param_groups[0]["params"]}
    assert known.isdisjoint(map(id, twin.optimizer.param_groups[0]["params"]))
    for count in (0, 3):
        training.steps(count)
        twin.steps(count)
        assert_same_bits(snapshot(twin.optimizer), snapshot(training.optimizer))
        for weight, other in zip(training.weights(), twin.weights(), strict=True):
            assert same_bits(weight, other)


@pytest.mark.covers(2)
@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("edit", ["load_state_dict", "clamp_", "slice"])
def test_masters_follow_edits_of_the_model(name, level, edit):
    training = Training(name, level)
    training.steps(5)
    masters, weights = training.masters(), training.weights()
    with torch.no_grad():
        if edit == "load_state_dict":
            state = copy.deepcopy(training.model.state_dict())
            state["0.weight"][3] = 0.25
            training.model.load_state_dict(state)
        elif edit == "clamp_":
            for param in training.model.parameters():
                param.clamp_(-0.1, 0.1)
        else:
            training.model[0].weight[2, 1:5] = 0.5
    edited = training.weights()
    touched = [a != b for a, b in zip(edited, weights, strict=True)]
    assert any(t.any() for t in touched)
    training.still()
    for i, (master, weight) in enumerate(zip(training.masters(), training.weights(), strict=True)):
        assert same_bits(weight, edited[i])
        assert torch.equal(master[touched[i]], edited[i][touched[i]].to(f32))
        assert same_bits(master[~touched[i]], masters[i][~touched[i]])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", SOME)
def test_add_param_group(name, level):
    training = Training(name, level)
    training.steps(3)
    extra = nn.Linear(8, 1)
    extra.to(next(training.model.parameters()).dtype)
    training.optimizer.add_param_group({"params": list(extra.parameters())})
    base = training.model
    training.model = lambda x: base(x) + extra(x.to(extra.weight.dtype))
    before = [param.detach().clone() for param in extra.parameters()]
    training.steps(5)
    for param, start in zip(extra.parameters(), before, strict=True):
        assert not torch.equal(param.detach(), start)
    if level in WITH_MASTERS:
        assert all(param.dtype == f32 for param in amp.master_params(training.optimizer))


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_add_param_group_takes_and_refuses_what_torch_does(level):
    training = Training("SGD", level)
    extra = nn.Linear(2, 2).to(next(training.model.parameters()).dtype)
    group = {"params": (p for p in extra.parameters()), "lr": 0.5}
    training.optimizer.add_param_group(group)
    assert training.optimizer.param_groups[1] is group
    assert [p.dtype for p in group["params"]] == [f32, f32]
    known = len(training.optimizer.param_groups)
    for again in (extra.weight, training.model[0].weight):
        with pytest.raises(ValueError, match="more than one"):
            training.optimizer.add_param_group({"params": again})
    with pytest.raises(TypeError, match="ordered"):
        training.optimizer.add_param_group({"params": set(nn.Linear(2, 2).parameters())})
    assert len(training.optimizer.param_groups) == known
    named = torch.optim.SGD(nn.Linear(2, 2).named_parameters(), lr=0.1)
    _, named = amp.initialize(nn.Linear(2, 2), named, opt_level=level, verbosity=0)
    named.add_param_group({"params": list(nn.Linear(2, 2).half().named_parameters())})
    assert named.param_groups[1]["param_names"] == ["weight", "bias"]
    assert all(p.dtype == f32 for p in named.param_groups[1]["params"])


@pytest.mark.covers(2)
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", SOME)
def test_a_parameter_unfrozen_later_trains_as_the_others(name, level, copied):
    """apex never updated it; with a step in FP16 small updates would vanish."""
    training = Training(name, level)
    first = training.model[0]
    first.requires_grad_(False)
    training.optimizer = OPTIMIZERS[name](training.model.parameters())
    amp.initialize(training.model, training.optimizer, opt_level=level, verbosity=0)
    training.steps(2)
    if copied:
        again = copy.deepcopy((training.model, training.optimizer))
        training.model, training.optimizer = again
        first = training.model[0]
    before = first.weight.detach().clone()
    training.steps(1)
    assert same_bits(first.weight.detach(), before)
    training.backward()  # what is pending is kept
    pending = training.model[2].weight.grad.detach().float().clone()
    first.requires_grad_(True)
    with amp.scale_loss(training.loss(), training.optimizer) as scaled:
        scaled.backward()
    total = training.model[2].weight.grad.float()
    torch.testing.assert_close(total, 2 * pending, rtol=0.02, atol=1e-3)
    training.optimizer.step()
    training.steps(3)
    assert not torch.equal(first.weight.detach(), before)
    if level in WITH_MASTERS:
        assert all(param.dtype == f32 for param in amp.master_params(training.optimizer))
