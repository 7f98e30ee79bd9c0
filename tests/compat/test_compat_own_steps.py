"""Subclasses of apex's optimizers with steps of their own: the names that they call and read."""

import copy
import functools
import inspect
import itertools
import math
import pickle
import types

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import ampfuse
from ampfuse.compat.apex import amp, amp_C, optimizers
from ampfuse.compat.apex.multi_tensor_apply import multi_tensor_applier
from ampfuse.compat.apex.parallel.LARC import LARC
from ampfuse.optim.fused import FusedOptimizer, is_fused
from cases import (
    LEVELS,
    assert_same,
    assert_same_bits,
    f16,
    f32,
    give_gradients,
    parameters,
    snapshot,
    train,
    weights,
)
from trainings import started_by_apex, train_by_apex

start = functools.partial(parameters, ((3, 4), (5,), (1,)))

# The options of each constructor that an attribute tells of, and its operations of amp_C.
INTERFACE = {
    "FusedSGD": ("wd_after_momentum materialize_master_grads set_grad_none", "sgd"),
    "FusedAdam": (
        "adam_w_mode capturable master_weights set_grad_none",
        "adam adam_capturable adam_capturable_master",
    ),
    "FusedAdagrad": ("adagrad_w_mode set_grad_none", "adagrad"),
    "FusedNovoGrad": ("reg_inside_moment set_grad_none", "novograd"),
    "FusedLAMB": ("adam_w_mode use_nvlamb set_grad_none", "lamb l2norm"),
    "FusedMixedPrecisionLamb": ("adam_w_mode use_nvlamb reduced_precision_dtype", "lamb l2norm"),
}


def attribute(option, value):
    """How apex's classes tell of an option: its name there, and what it is."""
    if option == "reg_inside_moment":
        return "moment_mode", 1 - value
    return option, int(value) if option in ("adam_w_mode", "adagrad_w_mode") else value


@pytest.mark.parametrize("name", INTERFACE)
def test_attributes_say_what_the_constructor_was_told(name):
    kind = getattr(optimizers, name)
    options, operations = (names.split() for names in INTERFACE[name])
    default = {key: p.default for key, p in inspect.signature(kind).parameters.items()}
    values = [(None, f16) if key == "reduced_precision_dtype" else (False, True) for key in options]
    for chosen in ({}, *(dict(zip(options, v, strict=True)) for v in itertools.product(*values))):
        if chosen.get("master_weights") and not chosen["capturable"]:
            continue
        optimizer = kind(start(), lr=0.1, **chosen)
        for option in options:
            key, expected = attribute(option, (default | chosen)[option])
            value = getattr(optimizer, key)
            assert (key, value, type(value)) == (key, expected, type(expected))
        flag = optimizer._dummy_overflow_buf
        assert (flag.dtype, flag.tolist()) == (torch.int32, [0])
        assert flag is optimizer._dummy_overflow_buf
    suffix = "_mp" if name == "FusedMixedPrecisionLamb" else ""
    for operation in (f"multi_tensor_{each}" for each in operations):
        assert getattr(optimizer, operation) is getattr(amp_C, operation + suffix)


class OwnStep:
    """A step by hand: lists of tensors, of each group, for an operation of ``amp_C``."""

    states = ("exp_avg", "exp_avg_sq")

    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            ps = [p for p in group["params"] if p.grad is not None]
            first = all(not self.state[p] for p in ps)
            for p in ps:
                for key in self.states:
                    self.state[p].setdefault(key, torch.zeros_like(p.data, dtype=torch.float))
            kept = [[self.state[p][key] for p in ps] for key in self.states]
            lists = [[p.grad.data.float() for p in ps], [p.data.float() for p in ps], *kept]
            operation, options = self.call(group, lists[0], first)
            multi_tensor_applier(operation, self._dummy_overflow_buf, lists, *options)
            for p, stepped in zip(ps, lists[1], strict=True):
                p.data.copy_(stepped)
        return loss


class OwnSGD(OwnStep, optimizers.FusedSGD):
    states = ("momentum_buffer",)

    def call(self, group, grads, first):
        values = [group[key] for key in ("weight_decay", "momentum", "dampening", "lr", "nesterov")]
        scale, self.most_recent_scale = 1.0 / self.most_recent_scale, 1.0
        return self.multi_tensor_sgd, (*values, first, self.wd_after_momentum, scale)


def moments(group):
    return group["lr"], *group["betas"], group["eps"], group["step"]


class OwnAdam(OwnStep, optimizers.FusedAdam):
    def call(self, group, grads, first):
        more = (self.adam_w_mode, int(group["bias_correction"]), group["weight_decay"])
        return self.multi_tensor_adam, (*moments(group), *more)


class OwnLAMB(OwnStep, optimizers.FusedLAMB):
    def call(self, group, grads, first):
        flag = self._dummy_overflow_buf
        norm, _ = multi_tensor_applier(self.multi_tensor_l2norm, flag, [grads], False)
        more = (int(group["bias_correction"]), group["weight_decay"], int(group["grad_averaging"]))
        options = (*moments(group), *more, self.adam_w_mode, norm)
        return self.multi_tensor_lamb, (*options, self.defaults["max_grad_norm"], self.use_nvlamb)


DECAY = {"weight_decay": 0.1}
OPTIONS = {
    "FusedSGD": DECAY | {"lr": 0.1, "momentum": 0.9},
    "FusedAdam": DECAY | {"lr": 0.02},
    **{name: DECAY | {"lr": 0.05} for name in ("FusedLAMB", "FusedAdagrad", "FusedNovoGrad")},
}
OWN = {
    name: (own, OPTIONS[name])
    for name, own in (("FusedSGD", OwnSGD), ("FusedAdam", OwnAdam), ("FusedLAMB", OwnLAMB))
}
# attribute, what it is set to, what that is in the constructor
ASSIGNED = [
    ("FusedSGD", "wd_after_momentum", True, {"wd_after_momentum": True}),
    ("FusedAdam", "adam_w_mode", 0, {"adam_w_mode": False}),
    ("FusedAdagrad", "adagrad_w_mode", 1, {"adagrad_w_mode": True}),
    ("FusedNovoGrad", "moment_mode", 0, {"reg_inside_moment": True}),
    ("FusedLAMB", "adam_w_mode", 0, {"adam_w_mode": False}),
    ("FusedLAMB", "use_nvlamb", True, {"use_nvlamb": True, "weight_decay": 0.0}),
]


def pair(name):
    """The subclass and the class that it inherits from, and the parameters of each."""
    kind = getattr(optimizers, name.removeprefix("apex's "))
    own, options = OWN.get(name, (kind, {"lr": 0.01}))
    ps = start()
    twins = copy.deepcopy(ps)
    return own(ps, **options), ps, kind(twins, **options), twins


@pytest.mark.parametrize(("name", "attribute", "value", "argument"), ASSIGNED)
@pytest.mark.parametrize("copied", [lambda x: x, copy.deepcopy])
def test_what_is_assigned_later_acts(name, attribute, value, argument, copied):
    """After a step too, in groups added later, and in copies."""
    decay = {"weight_decay": 0.0 if attribute == "use_nvlamb" else 0.1}
    ps, make = start(), functools.partial(getattr(optimizers, name), **(OPTIONS[name] | decay))
    optimizer = make(ps[:1])
    train(optimizer, range(1, 2))

    def resumed(**argument):
        twins = copy.deepcopy(ps)
        other = make(twins[:1], **argument)
        groups = {"param_groups": other.state_dict()["param_groups"]}
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()) | groups)
        return other, twins

    (reference, twins), (unchanged, untouched) = resumed(**argument), resumed()
    setattr(optimizer, attribute, value)
    optimizer = copied(optimizer)
    assert getattr(optimizer, attribute) == value
    assert type(getattr(optimizer, attribute)) is type(value)
    for each, those in ((optimizer, ps), (reference, twins), (unchanged, untouched)):
        (those[0],) = each.param_groups[0]["params"]
        each.add_param_group({"params": those[1:]})
        train(each, range(2, 5))
    assert_same(ps, twins)
    assert not any(torch.equal(p, q) for p, q in zip(ps[:2], untouched[:2], strict=True))


@pytest.mark.parametrize("dtype", [f16, f32])
@pytest.mark.parametrize("driven", [False, True])
def test_sgd_divides_by_the_scale_that_it_was_told(dtype, driven):
    """Once, and also with a GradScaler's scale; the closure's gradients count."""
    ps = start(dtype)
    twins = copy.deepcopy(ps)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    optimizer = optimizers.FusedSGD(ps, **options)
    assert (optimizer.most_recent_scale, optimizer.scale_set_by_backward) == (1.0, False)
    reference = optimizers.FusedSGD(twins, **options)
    scaler = ampfuse.GradScaler("cpu", init_scale=16.0)

    def closure():
        give_gradients(ps, 2, 64.0)
        optimizer.most_recent_scale, optimizer.scale_set_by_backward = 64.0, True

    give_gradients(ps, 1, 128.0 * (16.0 if driven else 1.0))
    optimizer.most_recent_scale = 128.0
    before = [p.grad.clone() for p in ps]
    if driven:
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
    else:
        optimizer.step()
    assert optimizer.most_recent_scale == 1.0
    assert_same([p.grad for p in ps], before)
    optimizer.step(closure)
    assert (optimizer.most_recent_scale, optimizer.scale_set_by_backward) == (1.0, False)
    train(optimizer, range(3, 5))
    train(reference, range(1, 5))
    assert_same(ps, twins)


# --- under amp and a GradScaler -------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", OWN)
def test_under_amp_it_trains_and_skips_as_the_class_does(name, level):
    """Its own step knew of no overflow, and its masters did not reach the model."""
    own, options = OWN[name]
    overflow = 4 if level in ("O1", "O2") else None  # elsewhere the scale is static
    (model, optimizer), (reference, other) = (
        started_by_apex(kind, level, **options) for kind in (own, getattr(optimizers, name))
    )
    train_by_apex(model, optimizer, 10, overflow)
    train_by_apex(reference, other, 10, overflow)
    tolerance = {"O3": 2e-3, "O5": 2e-2}.get(level, 1e-5)
    assert isinstance(optimizer, own)
    pairs = weights(model.parameters()), weights(reference.parameters())
    assert_close(*pairs, rtol=tolerance, atol=tolerance)
    assert optimizer.param_groups[0]["step"] == (9 if overflow else 10)


@pytest.mark.parametrize("level", [f32, f16, "O0", "O2", "O3"])
@pytest.mark.parametrize("name", OWN)
def test_copies_and_checkpoints_go_on_with_the_same_bits(name, level):
    """torch's classes look for a step in the state of each parameter, and there is none."""
    own, options = OWN[name]
    model, optimizer = started_by_apex(own, level, **options)
    train_by_apex(model, optimizer, 3)
    again, resumed = started_by_apex(own, level, **options)
    things = ((again, model), (resumed, optimizer), (amp, amp))
    for thing, state in things[: 3 if isinstance(level, str) else 2]:
        thing.load_state_dict(copy.deepcopy(state.state_dict()))
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    train_by_apex(model, optimizer, 3)
    assert not torch.equal(model.weight, again.weight)
    for other in ((again, resumed), *copies):
        train_by_apex(*other, 3)
        assert_same(weights(other[0].parameters()), weights(model.parameters()))


SCALERS = {"torch's": torch.amp.GradScaler, "ampfuse's": ampfuse.GradScaler}
SCALED = [
    *((name, by, clips) for name in OWN for by in SCALERS for clips in (False, True)),
    *(
        (name, by, False)
        for name in ("apex's FusedAdam", "apex's FusedMixedPrecisionLamb")
        for by in ("torch's", "step(grad_scaler)")
    ),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("name", "by", "clips"), SCALED)
def test_a_grad_scaler_unscales_and_skips(name, by, clips):
    """Clipping is of unscaled gradients, and an overflow changes nothing, counts included."""
    optimizer, ps, reference, twins = pair(name)
    scaler = SCALERS.get(by, torch.amp.GradScaler)("cpu", init_scale=1024.0)
    for t in (1, 2, 3):
        scaler.scale(torch.zeros(()))
        give_gradients(ps, t, scaler.get_scale())
        give_gradients(twins, t)
        if t == 2:
            ps[1].grad[0] = math.inf if name in OWN else math.nan
        before = snapshot(optimizer)
        if clips and by == "ampfuse's":
            scaler.clip_grad_norm_(optimizer, 0.5)
        elif clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(ps, 0.5)
        if by == "step(grad_scaler)":
            optimizer.step(grad_scaler=scaler)
        else:
            scaler.step(optimizer)
        scaler.update()
        if t == 2:
            assert_same_bits(snapshot(optimizer), before)
            continue
        if clips:
            nn.utils.clip_grad_norm_(twins, 0.5)
        reference.step()
    assert scaler.get_scale() == 512.0
    assert_close(ps, twins, rtol=1e-6, atol=1e-7)
    assert optimizer.param_groups[0]["step"] == 2
    assert all(state.get("step", 2) == 2 for state in optimizer.state.values())


def test_a_grad_scaler_that_is_disabled_does_nothing():
    optimizer, ps, reference, twins = pair("apex's FusedAdam")
    for those in (ps, twins):
        give_gradients(those, 1)
    optimizer.step(grad_scaler=torch.amp.GradScaler("cpu", enabled=False))
    reference.step()
    assert_same(ps, twins)


def test_larc_around_it():
    optimizer, ps, reference, twins = pair("FusedSGD")
    plain = copy.deepcopy(ps)
    for each in (optimizer, reference):
        train(LARC(each), range(1, 5))
    assert_close(ps, twins, rtol=1e-5, atol=1e-6)
    train(OwnSGD(plain, **OWN["FusedSGD"][1]), range(1, 5))
    assert not torch.equal(plain[0], ps[0])


def counting(base):
    """A subclass that counts steps and calls the step of `base`."""

    class Counting(base):
        calls = 0

        @torch.no_grad()
        def step(self, closure=None):
            self.calls += 1
            return super().step(closure)

    return Counting


class CountedInside(optimizers.FusedAdam):
    calls = 0

    def step(self, closure=None):
        def inside():
            return super(CountedInside, self).step(closure)

        self.calls += 1
        return inside()


@pytest.mark.parametrize(
    ("kind", "fused"),
    [(counting(optimizers.FusedAdam), True), (CountedInside, True), (counting(OwnAdam), False)],
)
def test_a_step_that_calls_ours_stays_fused(kind, fused):
    model, optimizer = started_by_apex(kind, "O2", lr=0.02)
    reference, other = started_by_apex(optimizers.FusedAdam, "O2", lr=0.02)
    train_by_apex(model, optimizer, 10, 4)
    train_by_apex(reference, other, 10, 4)
    assert optimizer.calls == (10 if fused else 9)
    assert (type(optimizer) is kind) == fused
    assert isinstance(optimizer, FusedOptimizer)
    assert torch.equal(model.weight, reference.weight)


class NamesStep(optimizers.FusedSGD):
    """It calls something else called step, but none of ours."""

    clock = types.SimpleNamespace(step=lambda: None)

    @torch.no_grad()
    def step(self, closure=None):
        self.clock.step()
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad, alpha=0.1)


class CallsByName(optimizers.FusedSGD):
    def step(self, closure=None):
        return getattr(super(), "st" + "ep")(closure)


class Asks(optimizers.FusedSGD, own_step=False):
    def step(self, closure=None):
        return getattr(super(), "st" + "ep")(closure)


@pytest.mark.parametrize("level", [*SCALERS, *LEVELS])
@pytest.mark.parametrize("kind", [NamesStep, Asks, CallsByName])
def test_whose_step_it_is_shows_when_it_steps(kind, level):
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(weight := model.weight)
    optimizer = kind(model.parameters(), lr=0.1)
    if level in SCALERS:
        scaler = SCALERS[level]("cpu", init_scale=1024.0)
    else:
        amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).sum()
        if level in SCALERS:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            continue
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert_close(weight.float(), torch.full((1, 3), -0.3), rtol=4e-3, atol=0)
    assert is_fused(optimizer) == (kind is not NamesStep)


def chains():
    """Optimizers, each of which takes over the state of the one before."""
    for ours, torchs, options, more in (
        (optimizers.FusedSGD, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}, {}),
        (optimizers.FusedAdam, torch.optim.AdamW, {"weight_decay": 0.1}, {}),
        (optimizers.FusedAdam, torch.optim.Adam, {"weight_decay": 0.1}, {"adam_w_mode": False}),
        (optimizers.FusedAdagrad, torch.optim.Adagrad, {"lr": 0.01}, {}),
    ):
        first = functools.partial(ours, **options, **more)
        yield first, functools.partial(torchs, **options), first
    for name, (own, options) in OWN.items():
        kinds = [functools.partial(k, **options) for k in (getattr(optimizers, name), own)]
        yield *kinds, kinds[0]
        yield *kinds[::-1], kinds[1]


@pytest.mark.parametrize(
    "chain", list(chains()), ids=lambda c: "-".join(k.func.__name__ for k in c)
)
def test_states_go_from_one_to_the_next(chain):
    """Also torch's and those with a step by hand; they train like one that is not interrupted."""
    first, *others = chain
    optimizer = first(ps := start())
    train(optimizer, range(1, 5))
    before, those = optimizer, ps
    for t, kind in enumerate(others):
        those = copy.deepcopy(those)
        after = kind(those)
        after.load_state_dict(copy.deepcopy(before.state_dict()))
        for each in (optimizer, after):
            train(each, range(5 + 2 * t, 7 + 2 * t))
        assert_close(ps, those, rtol=1e-5, atol=1e-6)
        before = after
