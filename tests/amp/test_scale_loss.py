"""scale_loss: what it yields and leaves behind, who skips, what accumulates."""

import contextlib
import copy
import functools
import itertools
import logging
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import reference
from ampfuse import amp
from ampfuse.amp.scaler import LossScaler
from cases import LEVELS, assert_same, bf16, f16, f32, f64, never_waiting
from trainings import (
    WITH_MASTERS,
    Scalar,
    assert_follows,
    assert_masters_round_to_weights,
    backward,
    give_gradient,
    gradient_of,
    initialized,
    losses_beside_plain_torch,
    scale,
    sgd,
    stepped,
    unskipped,
    weight,
)

DYNAMIC = ("O1", "O2")
inf, nan = math.inf, math.nan
levels = pytest.mark.parametrize("level", LEVELS)


def make_two(level, together=False, **options):
    """Two models with an optimizer each, or with one together."""
    models = [Scalar(), Scalar()]
    optimizers = sgd(nn.ModuleList(models)) if together else [*map(sgd, models)]
    return amp.initialize(models, optimizers, opt_level=level, verbosity=0, **options)


def sum_of(models):
    return sum(model(torch.ones(1)).float().sum() for model in models)


# --- scale_loss: what it yields and leaves behind -------------------------------------------


@levels
@pytest.mark.parametrize("dtype", [f16, bf16, f32, f64])
def test_it_yields_the_loss_in_fp32_times_the_scale(level, dtype):
    model, optimizer = initialized(level)
    loss = model(torch.ones(1)).sum().to(dtype)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.dtype == f32
        assert type(scaled) is torch.Tensor
        assert scaled.item() == scale(optimizer)
        assert scale(optimizer) == (65536.0 if level in DYNAMIC else 1.0)
    for shape in [(), (1,), (2, 3)]:
        with amp.scale_loss(torch.ones(shape), optimizer) as scaled:
            assert scaled.shape == shape


@pytest.mark.covers(2)
@levels
@pytest.mark.parametrize("loss_scale", [None, 1.0, "128.0", "dynamic"])
@pytest.mark.parametrize("delay", [None, "delay_unscale", "delay_overflow_check"])
def test_gradients_are_unscaled_and_add_up(level, loss_scale, delay):
    model, optimizer = initialized(level, loss_scale=loss_scale)
    first_scale = scale(optimizer)
    for passes in (1, 2, 3):
        give_gradient(model, optimizer, 0.25, **{delay: True} if delay and passes < 3 else {})
        assert gradient_of(optimizer) == 0.25 * passes
    if loss_scale == "dynamic":
        counted = 1 if delay else 3
        assert (scale(optimizer), unskipped(optimizer)) == (first_scale, counted)
    assert stepped(optimizer) == 0.25
    assert model.w.item() == 0.25


@levels
def test_a_gradient_made_in_the_body_counts(level):
    model, optimizer = initialized(level)
    with amp.scale_loss(model(torch.ones(1)).sum() * 0.5, optimizer) as scaled:
        scaled.backward()
        model.w.grad.mul_(0.5)  # an all-reduce, say
    assert stepped(optimizer) == 0.75


@pytest.mark.parametrize("loss_id", [3, -1])
def test_a_loss_that_was_not_announced_is_refused(loss_id):
    model, optimizer = initialized("O2", num_losses=3)
    with pytest.raises(IndexError, match="num_losses"):
        give_gradient(model, optimizer, loss_id=loss_id)


def test_calls_of_initialize_stand_side_by_side():
    runs = [
        (*initialized("O2", init_scale=64.0), 64.0),
        (*initialized("O1", init_scale=16.0), 16.0),
        (*initialized("O5"), 1.0),
    ]
    for model, optimizer, expected in runs:
        assert scale(optimizer) == expected
        give_gradient(model, optimizer, 0.25)
        assert stepped(optimizer) == 0.75
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 1.0
    # One loss for optimizers of two calls: the first one's scaler, if both skip alike.
    first, second, third = (optimizer for _, optimizer, _ in runs)
    with amp.scale_loss(torch.ones(()), [second, first]) as scaled:
        assert scaled.item() == 16.0
    for listed, message in (
        ([first, third], "one call"),
        (sgd(Scalar()), r"did not go through amp\.initialize"),
    ):
        with pytest.raises(RuntimeError, match=message), amp.scale_loss(torch.ones(()), listed):
            pass


ZEROING = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "by hand": lambda model, optimizer: delattr(model.w, "grad"),
}


@pytest.mark.covers(2)
@pytest.mark.filterwarnings("error")
@levels
@pytest.mark.parametrize("zero", ZEROING)
@pytest.mark.parametrize("loss_scale", [None, 8.0])
def test_gradients_are_zeroed_by_any_of_the_usual_ways(level, zero, loss_scale):
    """The generator's loss reaches the discriminator of a GAN."""
    models, optimizers = make_two(level, loss_scale=loss_scale)
    first, second = optimizers
    for _ in range(3):
        for listed in (tuple(optimizers), [first]):
            backward(sum_of(models) * 2.0**-4, listed)
            first.step()
        ZEROING[zero](models[1], second)
        give_gradient(models[1], second, 2.0**-4)
        second.step()
        for model, optimizer in zip(models, optimizers, strict=True):
            ZEROING[zero](model, optimizer)
    assert weight(second) == 1.0 - 3 * 2.0**-4


# --- what is read, set and dropped between backward and step ---------------------------------

MASTERS = [(level, {}) for level in LEVELS]
MASTERS += [(level, {"master_weights": "split"}) for level in ("O2", "O5")]


def dropped(p):
    gradient, p.grad = p.grad, None
    return gradient


def assign_views(p):
    flat = torch.full((8,), 0.125, dtype=p.dtype)
    p.grad = flat[3:4].view_as(p)


# What is done to a gradient of 0.25, and what it is then.
CHANGES = {
    "nothing": (lambda p: None, 0.25),
    "read": (lambda p: p.grad, 0.25),
    "assigned back": (lambda p: setattr(p, "grad", dropped(p)), 0.25),
    "in place": (lambda p: p.grad.mul_(0.5), 0.125),
    "what was read": (lambda p: (gradient := p.grad, gradient.mul_(0.5)), 0.125),
    "product": (lambda p: setattr(p, "grad", p.grad * 0.5), 0.125),
    "in the type of the weight": (lambda p: setattr(p, "grad", (p.grad * 0.5).to(p.dtype)), 0.125),
    "unread": (lambda p: setattr(p, "grad", torch.full_like(p, 0.125).detach()), 0.125),
    "a view": (assign_views, 0.125),
    "dropped": (lambda p: setattr(p, "grad", None), 0.0),
    "deleted": (lambda p: delattr(p, "grad"), 0.0),
    "dropped and set": (lambda p: (delattr(p, "grad"), assign_views(p)), 0.125),
}


@pytest.mark.covers(2)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("kind", "level", "options"),
    [(torch.optim.SGD, *run) for run in MASTERS]
    # A step of its own knows no split masters.
    + [(torch.optim.ASGD, level, {}) for level in LEVELS],
)
def test_what_is_set_is_what_the_step_uses(change, kind, level, options):
    """Gradients may be set on weight or master; passes before and after add to them."""
    call, expected = CHANGES[change]
    for case in itertools.product((False, True), repeat=3):
        of_master, before, after = case
        model, optimizer = initialized(level, kind=kind, loss_scale=8.0, **options)
        if before:
            give_gradient(model, optimizer, 0.125)
        give_gradient(model, optimizer, 0.125 if before else 0.25)
        call(next(amp.master_params(optimizer)) if of_master else model.w)
        if after:
            give_gradient(model, optimizer, 0.5)
        optimizer.step()
        assert model.w.item() == pytest.approx(1 - expected - (0.5 if after else 0), abs=1e-3), case


@levels
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("then_a_pass", [False, True])
def test_the_step_uses_gradients_of_ones_own_after_another(level, views, then_a_pass):
    """Views of a flat buffer are gradients that no pass has left."""
    model = nn.Linear(4, 4)
    nn.init.zeros_(model.weight)
    _, optimizer = initialized(level, model, loss_scale=8.0)
    backward(model(torch.ones(1, 4)).sum(), optimizer)
    optimizer.step()
    flat = torch.full((20,), 0.5, dtype=model.weight.dtype)
    for p, part in zip(model.parameters(), flat.split([16, 4]), strict=True):
        p.grad = part.view_as(p) if views else part.view_as(p).clone()
    if then_a_pass:
        backward(model(torch.ones(1, 4)).sum(), optimizer)
    optimizer.step()
    assert torch.equal(model.weight.float(), torch.full((4, 4), -2.5 if then_a_pass else -1.5))


@levels
@pytest.mark.parametrize("read", [False, True])
def test_a_step_that_is_made_again_uses_the_same_gradients(level, read):
    model, optimizer = initialized(level, loss_scale=8.0)
    give_gradient(model, optimizer, 0.25)
    if read:
        assert gradient_of(optimizer) == 0.25
    for expected in (0.75, 0.5):
        assert stepped(optimizer) == expected
    model.zero_grad(set_to_none=False)
    give_gradient(model, optimizer, 0.25)
    assert stepped(optimizer) == 0.25


@pytest.mark.parametrize(("level", "options"), MASTERS)
def test_a_gradient_that_was_read_is_no_part_of_the_state(level, options):
    model, optimizer = initialized(level, **options)
    give_gradient(model, optimizer, 0.25)
    assert gradient_of(optimizer) == 0.25
    saved = copy.deepcopy(optimizer.state_dict()["state"])
    for twin, copied in ((model, optimizer), copy.deepcopy((model, optimizer))):
        assert_same(copied.state_dict()["state"], saved)
        copied.zero_grad()
        give_gradient(twin, copied, 0.25)
        assert stepped(copied) == 0.75


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.ASGD])
def test_gradients_survive_parameters_that_are_taken_out(level, kind):
    """Rows are made anew then, and scaled gradients count as what they are."""
    models = [Scalar(), Scalar()]
    optimizer = kind([{"params": model.parameters()} for model in models], lr=1.0)
    amp.initialize(models, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    backward(sum_of(models) / 16, optimizer)
    del optimizer.param_groups[0]
    optimizer.step()
    assert [model.w.item() for model in models] == pytest.approx([1.0, 1 - 1 / 16], abs=5e-3)


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.ASGD])
@pytest.mark.parametrize("how", ["no pass", "dropped"])
def test_a_plain_backward_pass_gives_masters_gradients(how, level, kind):
    model, optimizer = initialized(level, kind=kind, loss_scale=8.0)
    if how == "dropped":
        give_gradient(model, optimizer)
        model.zero_grad()
    (model(torch.ones(1)).float().sum() * 0.25).backward()
    assert gradient_of(optimizer) == 0.25
    assert stepped(optimizer) == pytest.approx(0.75, abs=1e-3)


def test_what_no_gradient_can_be_is_refused():
    model, optimizer = initialized("O2")
    give_gradient(model, optimizer, 0.25)
    for wrong in (torch.ones(2), torch.ones(2).half(), torch.ones(1, device="meta"), 1.0):
        with pytest.raises((RuntimeError, TypeError), match="grad"):
            model.w.grad = wrong
    assert stepped(optimizer) == 0.75


@levels
def test_a_sparse_gradient_does_not_block_reading_the_others(level):
    models, optimizer = make_two(level, together=True, loss_scale=8.0)
    backward(sum_of(models) * 0.25, optimizer)
    models[0].w.grad = torch.ones(1, dtype=models[0].w.dtype).to_sparse()
    assert models[1].w.grad.item() == 0.25
    with pytest.raises(RuntimeError, match="is sparse"):
        optimizer.step()
    models[0].w.grad = None
    optimizer.step()
    assert [model.w.item() for model in models] == [1.0, 0.75]


# --- overflow -------------------------------------------------------------------------------


@levels
@pytest.mark.parametrize("bad", [inf, -inf, nan])
@pytest.mark.parametrize("loss_scale", ["dynamic", 4.0])
def test_an_overflow_halves_a_dynamic_scale_and_skips_where_the_level_says(level, bad, loss_scale):
    """A dynamic scale halves; a static one stays, and only O4 and O5 skip."""
    is_dynamic = loss_scale == "dynamic"
    model, optimizer = initialized(level, kind=torch.optim.Adam, loss_scale=loss_scale)
    first, skips = scale(optimizer), is_dynamic or level in ("O4", "O5")
    for gradient, counts in ((0.25, (1, 1)), (bad, (0, 2)), (0.25, (1, 3))):
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        optimizer.zero_grad()
        give_gradient(model, optimizer, gradient)
        assert unskipped(optimizer) == counts[0 if is_dynamic else 1]
        optimizer.step()
        assert bool(optimizer.last_step.skipped) == (gradient is bad and skips)
        if gradient is bad and skips:
            assert_same((model.state_dict(), optimizer.state_dict()["state"]), before)
    assert scale(optimizer) == first / (2 if is_dynamic else 1)
    assert math.isfinite(weight(optimizer)) == skips


CLEAN, OVERFLOW = (False, False), (True, False)  # passes, which no step follows


@example([CLEAN, OVERFLOW, CLEAN, (False, True), (False, True)], 4, 1, 0.5)
@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), max_size=30),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([0.5, 0.25]),
)
def test_the_scale_follows_its_rules(passes, interval, hysteresis, backoff):
    """Any sequence of passes (overflow?) and steps (after it?)."""
    rule = {"backoff_factor": backoff, "growth_interval": interval, "hysteresis": hysteresis}
    limits = {"min_loss_scale": 1.0, "max_loss_scale": 32.0}
    model, optimizer = initialized("O2", init_scale=8.0, **limits, **rule)
    expected = reference.LossScale(8.0, 2.0, backoff, interval, 1.0, 32.0, hysteresis)
    doomed, pending, value = False, 0.0, 1.0
    for overflow, then_step in passes:
        give_gradient(model, optimizer, inf if overflow else 2.0**-10)
        expected.update(overflow)
        doomed |= overflow
        pending += 0.0 if overflow else 2.0**-10
        assert (scale(optimizer), unskipped(optimizer)) == (expected.scale, expected.clean)
        if then_step:
            optimizer.step()
            optimizer.zero_grad()
            value -= 0.0 if doomed else pending
            doomed, pending = False, 0.0
            assert weight(optimizer) == value


@pytest.mark.parametrize(
    ("options", "first", "overflow", "last"),
    [
        ({"init_scale": 2.0**-22}, 2.0**-22, True, 2.0**-24),
        ({"init_scale": 2.0**30}, 2.0**24, False, 2.0**24),
        ({"init_scale": 2.0**126, "max_loss_scale": inf}, 2.0**126, False, 2.0**127),
    ],
)
def test_the_scale_stays_in_its_range(options, first, overflow, last):
    scaler = LossScaler("dynamic", scale_window=1, **options)
    assert scaler.loss_scale() == first
    for _ in range(5):
        scaler.update([torch.tensor(float(overflow))])
    assert scaler.loss_scale() == last


def test_overflow_messages_are_for_those_who_wait(caplog):
    model, optimizer = initialized("O2", verbosity=2)
    with caplog.at_level(logging.INFO, logger="ampfuse.amp"):
        give_gradient(model, optimizer, inf)
    assert "loss scale 0 is now 32768" in caplog.text


# --- delays, errors inside the block --------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4"])
@pytest.mark.parametrize("how", ["delay_unscale", "delay_overflow_check", "by hand"])
def test_an_overflow_that_its_own_pass_did_not_tell_of_still_skips(level, how):
    """A delayed one is told of by the pass that unscales."""
    model, optimizer = initialized(level, loss_scale="dynamic")
    if how == "by hand":
        give_gradient(model, optimizer, 0.25)
        next(amp.master_params(optimizer)).grad.fill_(inf)
    else:
        give_gradient(model, optimizer, inf, **{how: True})
    assert scale(optimizer) == 65536.0
    give_gradient(model, optimizer, 0.25)
    # A pass at O2 leaves the masters' gradients alone; elsewhere it adds to what overflowed.
    told = level != "O2" or how == "delay_unscale"
    assert scale(optimizer) == (32768.0 if told else 65536.0)
    assert stepped(optimizer) == 1.0
    optimizer.zero_grad()
    give_gradient(model, optimizer, 0.25)
    assert stepped(optimizer) == 0.75


@levels
def test_a_body_that_raises_loses_nothing(level):
    model, optimizer = initialized(level)
    give_gradient(model, optimizer, 0.25)
    with pytest.raises(KeyError), amp.scale_loss(torch.ones(()), optimizer):
        raise KeyError
    assert gradient_of(optimizer) == 0.25
    give_gradient(model, optimizer, 0.25)
    assert stepped(optimizer) == 0.5


@pytest.mark.parametrize("where", ["begin", "end"])
@pytest.mark.parametrize(("level", "options"), [("O1", {}), *MASTERS[2:3], *MASTERS[5:]])
def test_a_gradient_that_no_step_takes_loses_no_other(level, options, where):
    """The pass is taken in by none of the optimizers, and earlier ones are kept by all."""
    models, optimizers = make_two(level, loss_scale=8.0, **options)
    both = [*zip(models, optimizers, strict=True)]
    for model, optimizer in both:
        give_gradient(model, optimizer, 0.25)
    bad = torch.ones(1, dtype=models[1].w.dtype).to_sparse()
    if where == "begin":
        models[1].w.grad = bad
    refused = pytest.raises(RuntimeError, match="is sparse")
    with refused, amp.scale_loss(sum_of(models), optimizers) as scaled:
        scaled.backward()
        models[1].w.grad = bad
    if where == "begin":
        models[1].w.grad = torch.full_like(models[1].w, 0.25).detach()
    for model, optimizer in both:
        assert model.w.grad.float().item() == 0.25
        give_gradient(model, optimizer, 0.125)
        assert stepped(optimizer) == 1 - 0.375


MISUSED = {
    "of the loss": lambda loss, scaled: loss.backward(),
    "of both": lambda loss, scaled: (scaled.backward(retain_graph=True), loss.backward()),
    "by torch.autograd": lambda loss, scaled: torch.autograd.backward(scaled),
    "with a graph": lambda loss, scaled: scaled.backward(create_graph=True),
    "none": lambda loss, scaled: None,
    "gradients alone": lambda loss, scaled: torch.autograd.grad(scaled, loss),
}


@pytest.mark.filterwarnings("error", "ignore:Using backward.. with create_graph=True")
@levels
@pytest.mark.parametrize("how", MISUSED)
def test_a_backward_pass_of_another_loss_is_told_of(level, how):
    model, optimizer = initialized(level, loss_scale=8.0)
    loss = model(torch.ones(1)).float().sum()
    block = amp.scale_loss(loss, optimizer)
    scaled = block.__enter__()
    MISUSED[how](loss, scaled)
    said = pytest.warns(UserWarning, match="did not come from the scaled loss")
    with said if how == "of the loss" else contextlib.nullcontext():
        block.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="after its scale_loss block"):
        (scaled * 1.0).backward()
    optimizer.zero_grad()


class TakesItsClass:
    """A wrapper that takes on the class of its optimizer, as Lightning's and Fabric's do."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.__class__ = type("Wrapper", (TakesItsClass, type(optimizer)), {})

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


@levels
@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, TakesItsClass])
def test_step_and_another_block_inside_the_block_are_errors(level, wrap):
    model, optimizer = initialized(level)
    nested = pytest.raises(RuntimeError, match="nested")
    with amp.scale_loss(model(torch.ones(1)).sum() * 0.5, wrap(optimizer)) as scaled:
        scaled.backward()
        with pytest.raises(RuntimeError, match="inside the scale_loss context"):
            optimizer.step()
        with nested, amp.scale_loss(torch.ones(()), optimizer):
            pass
    assert stepped(optimizer) == 0.5


@pytest.mark.parametrize("meanwhile", ["overflow", "set"])
@pytest.mark.parametrize("level", DYNAMIC)
def test_a_pass_keeps_its_scale_while_another_changes_it(level, meanwhile):
    """Blocks of two optimizers with one scaler, one in the other."""
    models, (outer, inner) = make_two(level)
    with amp.scale_loss(models[0](torch.ones(1)).sum().float() * 0.25, outer) as scaled:
        if meanwhile == "overflow":
            give_gradient(models[1], inner, inf)
        else:
            outer._amp_session.loss_scalers[0]._loss_scale = 2.0**15
        assert scale(outer) == 2.0**15
        scaled.backward()
    assert stepped(outer) == 0.75
    assert scale(outer) == 2.0**15


class OwnDescent(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad, alpha=self.defaults["lr"])


@pytest.mark.parametrize("kind", [torch.optim.SGD, lambda ps, lr: OwnDescent(ps, {"lr": lr})])
def test_the_weight_cache_of_autocast_is_dropped(kind):
    """Inside an autocast region around the loop, a cast weight must not outlive its step."""
    model, optimizer = initialized("O4", nn.Linear(1, 1, bias=False), kind)
    nn.init.ones_(model.weight)
    with torch.autocast("cpu", dtype=bf16):
        for expected in (1.0, 0.5, 0.0):
            out = (model(torch.ones(1, 1)) + F.linear(torch.ones(1, 1), model.weight)).sum() / 2
            assert out.item() == expected
            backward(out / 2, optimizer)
            optimizer.step()
            optimizer.zero_grad()


# --- clipping, schedulers, state (test_upgrade.py and test_resume.py train) ------------------


MAX_NORM = 0.1  # below that of every gradient here
DESCENT = functools.partial(torch.optim.SGD, lr=1.0)  # the size of the gradients matters

CLIPS = {
    "torch": lambda t: nn.utils.clip_grad_norm_(t.model.parameters(), MAX_NORM),
    "masters": lambda t: nn.utils.clip_grad_norm_(amp.master_params(t.optimizer), MAX_NORM),
    "groups": lambda t: nn.utils.clip_grad_norm_(
        [p for group in t.optimizer.param_groups for p in group["params"]], MAX_NORM
    ),
    "amp": lambda t: amp.clip_grad_norm_(t.optimizer, MAX_NORM),
}


@levels
@pytest.mark.parametrize("clip", CLIPS)
def test_scaled_gradients_are_clipped_as_in_plain_torch(level, clip):
    clips = CLIPS[clip], CLIPS["torch"]
    training, losses, expected = losses_beside_plain_torch(DESCENT, level, clips)
    assert_follows(losses, expected, level)
    if level in WITH_MASTERS:
        assert_masters_round_to_weights(training)


@levels
def test_clip_grad_norm_returns_the_unscaled_norm(level):
    model, optimizer = initialized(level)
    for clipped, expected in ((True, 0.875), (False, 0.375)):  # the next step only
        optimizer.zero_grad()
        give_gradient(model, optimizer, 0.5)
        if clipped:
            assert amp.clip_grad_norm_(optimizer, 0.125).item() == pytest.approx(0.5, rel=1e-6)
        assert stepped(optimizer) == pytest.approx(expected, rel=1e-3)


@levels
def test_what_was_dropped_is_not_in_the_norm(level):
    models, optimizer = make_two(level, together=True, loss_scale="dynamic")
    backward(sum_of(models) * 0.25, optimizer)
    models[0].w.grad = None
    assert amp.clip_grad_norm_(optimizer, 0.125).item() == pytest.approx(0.25, rel=1e-6)
    optimizer.step()
    assert [model.w.item() for model in models] == pytest.approx([1.0, 0.875], rel=1e-3)


@pytest.mark.filterwarnings("error")
@levels
@pytest.mark.parametrize("first", ["scheduler", "initialize"])
@pytest.mark.parametrize("skipped", [0, 1])
def test_lr_schedulers_may_be_built_before_or_after(level, first, skipped):
    model = Scalar(8.0)
    optimizer = sgd(model)
    (group,) = optimizer.param_groups
    by_half = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    schedule = by_half(optimizer) if first == "scheduler" else None
    dynamic = "dynamic" if skipped else None
    amp.initialize(model, optimizer, opt_level=level, loss_scale=dynamic, verbosity=0)
    schedule = schedule or by_half(optimizer)
    for i, lr in enumerate((1.0, 0.5, 0.25)):
        assert group["lr"] == lr
        give_gradient(model, optimizer, inf if i < skipped else 0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        assert bool(optimizer.last_step.skipped) == (i < skipped)
    assert optimizer.param_groups == [group]
    assert weight(optimizer) == 8 - (0.375 if skipped else 0.875)


def of_scaler(loss_scale, unskipped):
    return {"loss_scale": loss_scale, "unskipped": unskipped}


def test_amp_state_is_apexs_and_matched_by_key():
    _, optimizer = initialized("O2", num_losses=2)
    assert amp.state_dict() == {f"loss_scaler{i}": of_scaler(65536.0, 0) for i in (0, 1)}
    destination = {}
    assert amp.state_dict(destination) is destination
    expected = {"loss_scaler1": of_scaler(2.0, 7), "loss_scaler0": of_scaler(4.0, 5)}
    amp.load_state_dict(expected)
    assert amp.state_dict(optimizer=optimizer) == expected
    with pytest.warns(UserWarning, match="those in both"):
        amp.load_state_dict({"loss_scaler1": of_scaler(8.0, 0)})
    assert [scale(optimizer, i) for i in (0, 1)] == [4.0, 8.0]
    for foreign in ({"fc.weight": torch.ones(1)}, {"loss_scaler0": {"scale": 1.0}}):
        with pytest.raises(RuntimeError):
            amp.load_state_dict({"loss_scaler1": of_scaler(1.0, 0), **foreign})
        assert scale(optimizer, 1) == 8.0


def test_a_counter_beyond_the_interval_still_grows():
    model, optimizer = initialized("O2", growth_interval=2)
    amp.load_state_dict({"loss_scaler0": of_scaler(4.0, 1999)})
    give_gradient(model, optimizer, 0.25)
    assert scale(optimizer) == 8.0


def test_loss_scaler_attributes_that_scripts_read_and_set():
    _, optimizer = initialized("O2")
    (scaler,) = optimizer._amp_session.loss_scalers
    assert (scaler.loss_scale(), scaler._loss_scale, scaler._unskipped) == (65536.0, 65536.0, 0)
    assert scaler.dynamic
    scaler._loss_scale = 4.0
    with amp.scale_loss(torch.ones(()), optimizer) as scaled:
        assert scaled.item() == 4.0
    copied = copy.deepcopy(scaler)
    copied._loss_scale = 2.0
    assert scaler.loss_scale() == 4.0
    # A static scale of 1 that a script changes is no longer passed over.
    model, optimizer = initialized("O0")
    optimizer._amp_session.loss_scalers[0]._loss_scale = 4.0
    give_gradient(model, optimizer, 0.25)
    assert gradient_of(optimizer) == 0.25


@pytest.mark.gpu
@levels
def test_the_host_never_waits_under_scale_loss(level):
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x, y = torch.randn(16, 8).cuda(), torch.arange(16).cuda() % 4

    def step():
        backward(F.cross_entropy(model(x), y), optimizer)
        amp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    with never_waiting():
        step()


@levels
def test_gradient_penalties_have_the_gradients_of_fp32(level):
    """The code of docs/guide.md gives the gradients of FP32."""
    gradients = []
    for at in (level, None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        x, optimizer = torch.rand(8, 4, requires_grad=True), sgd(model)
        if at is not None:
            amp.initialize(model, optimizer, opt_level=at, loss_scale=128.0, verbosity=0)
        output = model(x).float()
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        loss = output.mean() + 10 * ((gradient.float().norm(dim=1) - 1) ** 2).mean()
        if at is None:
            loss.backward()
        else:
            backward(loss, optimizer)
        gradients.append([p.grad.float() for p in amp.master_params(optimizer)])
    torch.testing.assert_close(*gradients, rtol=0.02, atol=0.03)
