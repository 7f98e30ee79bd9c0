"""initialize and scale_loss: what they accept and return, who skips, what accumulates."""

import contextlib
import copy
import functools
import logging
import math
import pickle
import warnings

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

DYNAMIC = ("O1", "O2")
inf, nan = math.inf, math.nan


class Scalar(nn.Module):
    """y = w * x, so that a loss of y has the gradient x: every gradient can be chosen."""

    def __init__(self, w=1.0, n=1):
        super().__init__()
        self.w = nn.Parameter(torch.full((n,), float(w)))

    def forward(self, x):
        return self.w * x


def make(level="O2", w=1.0, lr=1.0, optimizer=torch.optim.SGD, **options):
    """A Scalar model and its optimizer, initialized. SGD with lr 1: the step is the gradient."""
    model = Scalar(w)
    opt = optimizer(model.parameters(), lr=lr)
    options.setdefault("verbosity", 0)
    return amp.initialize(model, opt, opt_level=level, **options)


def backward(model, optimizers, gradient=0.5, **options):
    """One pass that gives every weight of `model` the gradient `gradient`.

    Up to 0.5 it fits FP16 at the first scale of 65536.
    """
    loss = (model(torch.ones(1)) * 1.0).sum().float() * gradient
    with amp.scale_loss(loss, optimizers, **options) as scaled:
        scaled.backward()


def sgd(model, lr=1.0):
    return torch.optim.SGD(model.parameters(), lr=lr)


def two(level, **options):
    models = [Scalar(), Scalar()]
    optimizers = [sgd(model) for model in models]
    options.setdefault("verbosity", 0)
    amp.initialize(models, optimizers, opt_level=level, **options)
    return models, optimizers


def backward_of_both(models, listed):
    loss = sum(model(torch.ones(1)).float().sum() for model in models) * 2.0**-4
    with amp.scale_loss(loss, listed) as scaled:
        scaled.backward()


def weight(optimizer):
    """The weight that the optimizer steps: the master where there is one."""
    return next(amp.master_params(optimizer)).item()


def scale(optimizer, loss_id=0):
    return amp.state_dict(optimizer=optimizer)[f"loss_scaler{loss_id}"]["loss_scale"]


def unskipped(optimizer, loss_id=0):
    return amp.state_dict(optimizer=optimizer)[f"loss_scaler{loss_id}"]["unskipped"]


# --- initialize: arguments and return values ------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_return_shapes(level):
    for arrange in (
        lambda m, n, o, p: (m, None),
        lambda m, n, o, p: ([m], None),
        lambda m, n, o, p: (m, o),
        lambda m, n, o, p: (m, [o]),
        lambda m, n, o, p: ([m], o),
        lambda m, n, o, p: ([m, n], [o, p]),
        lambda m, n, o, p: ((m, n), (o, p)),
        lambda m, n, o, p: (m, []),
    ):
        m, n = nn.Linear(2, 2), nn.Linear(2, 2)
        models, optimizers = arrange(m, n, sgd(m), sgd(n))
        found = amp.initialize(models, optimizers, opt_level=level, verbosity=0)
        if optimizers is None:
            assert found is models
        else:
            assert type(found) is tuple
            assert found[0] is models
            assert found[1] is optimizers


@pytest.mark.parametrize("level", LEVELS)
def test_the_optimizer_stays_the_users_object(level):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    group = optimizer.param_groups[0]
    returned = amp.initialize(model, optimizer, opt_level=level, verbosity=0)[1]
    assert returned is optimizer
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0] is group
    masters = list(amp.master_params(optimizer))
    assert {p.dtype for p in masters} == ({f16} if level == "O3" else {f32})
    if level in ("O2", "O5"):
        assert all(master is not p for master, p in zip(masters, model.parameters(), strict=True))


def test_disabled_changes_nothing():
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    cls, forward = type(optimizer), type(model)
    assert amp.initialize(model, enabled=False) is model
    out = amp.initialize(model, optimizer, enabled=False, opt_level="nonsense")
    assert out == (model, optimizer)
    assert type(optimizer) is cls
    assert type(model) is forward
    loss = model(torch.ones(1, 2)).sum().double()
    with amp.scale_loss(loss, optimizer) as same:
        assert same is loss
        same.backward()
    norm = amp.clip_grad_norm_(optimizer, 0.1)
    assert norm > 0.1
    optimizer.step()
    assert amp.state_dict() == {}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}})
    # An optimizer of an enabled call is not switched off by a later disabled one.
    on, on_optimizer = make("O2")
    amp.initialize(model, optimizer, enabled=False)
    backward(on, on_optimizer, 0.25)
    assert next(amp.master_params(on_optimizer)).grad.item() == 0.25


class NotAnOptimizer:
    param_groups = ()


def with_complex(model):
    model.c = nn.Parameter(torch.ones(1, dtype=torch.complex64))
    return model


REFUSED = {
    "no optimizer": (lambda m: (m, NotAnOptimizer()), TypeError),
    "a generator of optimizers": (lambda m: (m, (o for o in [sgd(m)])), TypeError),
    "no optimizer in a list": (lambda m: (m, [sgd(m), NotAnOptimizer()]), TypeError),
    "a generator of models": (lambda m: ((x for x in [m]), sgd(m)), TypeError),
    "no model": (lambda m: (None, sgd(m)), TypeError),
    "DataParallel": (lambda m: ([nn.Linear(2, 2), nn.DataParallel(m)], sgd(m)), RuntimeError),
    "twice": (lambda m: (m, [sgd(m)] * 2), RuntimeError),
    "float64": (lambda m: (m.double(), sgd(m)), TypeError),
    "complex": (lambda m: (with_complex(m), sgd(m)), TypeError),
    "half": (lambda m: (m.half(), sgd(m)), RuntimeError),
    "bfloat16": (lambda m: (m.bfloat16(), sgd(m)), RuntimeError),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_initialize_refuses(case):
    arrange, error = REFUSED[case]
    model = nn.Linear(2, 2)
    models, optimizers = arrange(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error) as raised:
        amp.initialize(models, optimizers, opt_level="O1", verbosity=0)
    assert len(str(raised.value)) > 20
    assert type(model) is nn.Linear
    listed = optimizers if isinstance(optimizers, list) else [optimizers]
    assert all(type(o) is torch.optim.SGD for o in listed if isinstance(o, torch.optim.Optimizer))
    assert_same(model.state_dict(), before)


def test_errors_name_the_parameter():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    optimizer = sgd(model)
    with pytest.raises(RuntimeError, match=r"'1\.weight' is float16.*O4"):
        amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    model[1].double()
    with pytest.raises(TypeError, match=r"'1\.weight'.*float64"):
        amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    loose = torch.optim.SGD([torch.ones(1, dtype=f64, requires_grad=True)], lr=0.1)
    with pytest.raises(TypeError, match=r"param_groups\[0\]"):
        amp.initialize(nn.Linear(1, 1), loose, opt_level="O2", verbosity=0)


NO_SCALING = ("init_scale", "min_loss_scale", "max_loss_scale", "growth_factor", "backoff_factor")
WRONG = [
    ({"opt_level": "02"}, RuntimeError, "'O2'"),
    ({"opt_level": "O1", "master_weights": True}, RuntimeError, "master_weights has no meaning"),
    ({"keep_batchnorm_fp32": "yes"}, AssertionError, "keep_batchnorm_fp32 is 'yes'"),
    ({"loss_scale": "128x"}, ValueError, "loss_scale is '128x'.*a positive number"),
    ({"num_losses": 0}, ValueError, "num_losses must be"),
    ({"growth_factor": 1.0}, ValueError, "growth_factor is 1.0; it has to be above 1"),
    ({"backoff_factor": 1.0}, ValueError, "backoff_factor is 1.0; it has to be between"),
    ({"growth_interval": 0}, ValueError, "growth_interval is 0; it has to be a whole"),
    ({"growth_interval": 1.5}, ValueError, "growth_interval is 1.5; it has to be a whole"),
    ({"hysteresis": 0}, ValueError, "hysteresis is 0; it has to be a whole"),
    ({"init_scale": -1.0}, ValueError, "init_scale is -1.0; it has to be positive"),
    ({"max_loss_scale": None}, ValueError, "max_loss_scale is None; it has to be at"),
    ({"min_loss_scale": 8.0, "max_loss_scale": 4.0}, ValueError, "max_loss_scale is 4.0"),
    ({"verbosity": "1"}, TypeError, "verbosity must be 0, 1 or 2, not '1'"),
    ({"enabled": "no"}, ValueError, "enabled is 'no'; it has to be True or False"),
    *(
        ({name: "x"}, ValueError, f"{name} is 'x'; it has to be")
        for name in (*NO_SCALING, "growth_interval", "hysteresis")
    ),
]


@pytest.mark.parametrize(("option", "error", "message"), WRONG, ids=str)
def test_wrong_options_change_nothing(option, error, message):
    model = nn.Linear(2, 2)
    arguments = {"optimizers": sgd(model), "opt_level": "O2", "verbosity": 0, **option}
    with pytest.raises(error, match=message):
        amp.initialize(model, **arguments)
    assert type(model) is nn.Linear
    assert model.weight.dtype == f32


def test_an_optimizer_is_initialized_once_and_a_model_as_often_as_one_likes():
    model, optimizer = make("O2")
    with pytest.raises(RuntimeError, match="already"):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    again = sgd(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp.initialize(model, again, opt_level="O2", verbosity=0)
    backward(model, again, 0.25)
    again.step()
    assert weight(again) == 0.75


@pytest.mark.parametrize("world_size", ["1", "2"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_of_several_processes_start_from_what_ddp_hands_on(level, world_size, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", world_size)  # by torchrun, before there is a process group
    model, optimizer = make(level, w=1 / 3)
    rounded = model.w.detach().float().item()
    assert rounded != pytest.approx(1 / 3, rel=1e-7)
    assert weight(optimizer) == (rounded if world_size == "2" else torch.tensor(1 / 3).item())


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("dtype", [f16, bf16])
def test_half_models_are_taken_over_exactly_with_a_word(level, dtype):
    model = nn.Linear(4, 4).to(dtype)
    exact = model.weight.detach().float()
    optimizer = sgd(model)
    with pytest.warns(UserWarning, match="arrived with 2 half-precision"):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert torch.equal(next(amp.master_params(optimizer)), exact)


def test_half_models_on_request_and_frozen():
    model = nn.Linear(4, 4).half()
    optimizer = sgd(model)
    amp.initialize(
        model, optimizer, opt_level="O1", verbosity=0, allow_incoming_model_not_fp32=True
    )
    frozen = nn.Sequential(nn.Linear(4, 4).half().requires_grad_(False), nn.Linear(4, 4))
    optimizer = sgd(frozen[1])
    amp.initialize(frozen, optimizer, opt_level="O1", verbosity=0)


# --- scale_loss: what it yields and leaves behind -------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [f16, bf16, f32, f64])
def test_it_yields_the_loss_in_fp32_times_the_scale(level, dtype):
    model, optimizer = make(level)
    loss = model(torch.ones(1)).sum().to(dtype)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.dtype == f32
        assert type(scaled) is torch.Tensor
        assert scaled.item() == scale(optimizer)
        assert scale(optimizer) == (65536.0 if level in DYNAMIC else 1.0)
    for shape in [(), (1,), (2, 3)]:
        with amp.scale_loss(torch.ones(shape), optimizer) as scaled:
            assert scaled.shape == shape


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_scale", [None, 1.0, "128.0", "dynamic"])
def test_gradients_are_unscaled_and_add_up(level, loss_scale):
    model, optimizer = make(level, loss_scale=loss_scale)
    parameter = next(amp.master_params(optimizer))
    for passes in (1, 2, 3):
        backward(model, optimizer, 0.25)
        assert parameter.grad.float().item() == 0.25 * passes
    optimizer.step()
    assert weight(optimizer) == 0.25
    assert model.w.item() == 0.25


def drop(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = None


ZEROING = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "by hand": drop,
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("zero", ZEROING)
def test_gradients_are_zeroed_by_any_of_the_usual_ways(level, zero):
    model, optimizer = make(level)
    for _ in range(3):
        backward(model, optimizer, 0.25)
        optimizer.step()
        ZEROING[zero](model, optimizer)
    assert weight(optimizer) == 0.25


@pytest.mark.parametrize("level", ["O5", "O4", "O0"])
def test_64_passes_give_the_sum_in_fp32(level):
    gradients = torch.rand(64, generator=torch.Generator().manual_seed(3))
    model, optimizer = make(level)
    for gradient in gradients.tolist():
        backward(model, optimizer, gradient)
    received = gradients.to(model.w.dtype).double()  # what autograd hands over, per pass
    found = next(amp.master_params(optimizer)).grad
    torch.testing.assert_close(found.double().squeeze(), received.sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_a_gradient_made_in_the_body_counts(level):
    model, optimizer = make(level)
    with amp.scale_loss(model(torch.ones(1)).sum() * 0.5, optimizer) as scaled:
        scaled.backward()
        for parameter in model.parameters():  # an all-reduce, say
            parameter.grad.mul_(0.5)
    optimizer.step()
    assert weight(optimizer) == 0.75


def test_two_losses_with_scales_of_their_own_add_up():
    model, optimizer = make("O2", num_losses=3)
    scalers = optimizer._amp_session.loss_scalers
    scalers[1]._loss_scale = 8.0
    scalers[2]._loss_scale = 2.0**-3
    for loss_id, gradient in enumerate([0.125, 0.25, 0.5]):
        backward(model, optimizer, gradient, loss_id=loss_id)
    optimizer.step()
    assert weight(optimizer) == 1 - 0.875
    for loss_id in (3, -1):
        with pytest.raises(IndexError, match="num_losses"):
            backward(model, optimizer, loss_id=loss_id)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sequence", [list, tuple])
def test_several_optimizers_as_list_or_tuple(level, sequence):
    models, optimizers = two(level)
    for _ in range(2):
        backward_of_both(models, sequence(optimizers))
    for optimizer in optimizers:
        optimizer.step()
    assert [weight(o) for o in optimizers] == [1.0 - 2 * 2.0**-4] * 2


def test_two_calls_of_initialize_stand_side_by_side():
    first, first_optimizer = make("O2", init_scale=64.0)
    second, second_optimizer = make("O1", init_scale=16.0)
    third, third_optimizer = make("O5")
    for model, optimizer, expected in [
        (first, first_optimizer, 64.0),
        (second, second_optimizer, 16.0),
        (third, third_optimizer, 1.0),
    ]:
        with amp.scale_loss(torch.ones(()), optimizer) as scaled:
            assert scaled.item() == expected
        backward(model, optimizer, 0.25)
        optimizer.step()
        assert weight(optimizer) == 0.75
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 1.0
    # One loss for optimizers of two calls: the first one's scaler, if both skip alike.
    with amp.scale_loss(torch.ones(()), [second_optimizer, first_optimizer]) as scaled:
        assert scaled.item() == 16.0
    stranger = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    for listed, message in (
        ([first_optimizer, third_optimizer], "one call"),
        (stranger, r"did not go through amp\.initialize"),
    ):
        with pytest.raises(RuntimeError, match=message), amp.scale_loss(torch.ones(()), listed):
            pass


# --- overflow -------------------------------------------------------------------------------


@pytest.mark.parametrize("level", DYNAMIC)
@pytest.mark.parametrize("bad", [inf, -inf, nan])
def test_overflow_skips_the_step_and_halves_the_scale(level, bad):
    model, optimizer = make(level, optimizer=torch.optim.Adam, lr=0.5)
    backward(model, optimizer, 0.25)
    optimizer.step()
    optimizer.zero_grad()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    backward(model, optimizer, bad)
    assert scale(optimizer) == 32768.0
    assert unskipped(optimizer) == 0
    optimizer.step()
    assert bool(optimizer.last_step.skipped)
    for now, then in zip((model.state_dict(), optimizer.state_dict()), before, strict=True):
        assert_same(now, then)
    optimizer.zero_grad()
    backward(model, optimizer, 0.25)
    optimizer.step()
    assert not bool(optimizer.last_step.skipped)
    assert scale(optimizer) == 32768.0
    assert unskipped(optimizer) == 1


@pytest.mark.parametrize("level", LEVELS)
def test_a_static_scale_never_skips(level):
    model, optimizer = make(level, loss_scale=4.0)
    backward(model, optimizer, inf)
    optimizer.step()
    assert not math.isfinite(weight(optimizer))
    assert scale(optimizer) == 4.0
    assert unskipped(optimizer) == 1


@pytest.mark.parametrize("second", [0.25, inf])
def test_exactly_the_optimizers_of_the_pass_skip(second):
    """The first model overflows; the second was in the same pass; the third was not."""
    models = [Scalar() for _ in range(3)]
    optimizers = [sgd(m) for m in models]
    amp.initialize(models, optimizers, opt_level="O2", num_losses=2, verbosity=0)
    loss = models[0](torch.ones(1)).float() * inf + models[1](torch.ones(1)).float() * second
    with amp.scale_loss(loss.sum(), optimizers[:2], loss_id=0) as scaled:
        scaled.backward()
    backward(models[2], optimizers[2], 0.25, loss_id=1)
    for optimizer in optimizers:
        optimizer.step()
    assert [weight(o) for o in optimizers] == [1.0, 1.0, 0.75]
    assert [scale(optimizers[0], i) for i in (0, 1)] == [32768.0, 65536.0], "once per pass"


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
    model, optimizer = make("O2", init_scale=8.0, **limits, **rule)
    expected = reference.LossScale(8.0, 2.0, backoff, interval, 1.0, 32.0, hysteresis)
    doomed, pending, value = False, 0.0, 1.0
    for overflow, then_step in passes:
        backward(model, optimizer, inf if overflow else 2.0**-10)
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


def test_the_scale_has_a_floor_by_default():
    scaler = LossScaler("dynamic", init_scale=2.0**-22)
    scaler.snapshot(torch.device("cpu"))
    for _ in range(5):
        scaler.update([torch.ones(())])
    assert scaler.loss_scale() == 2.0**-24
    assert LossScaler("dynamic", init_scale=2.0**30).loss_scale() == 2.0**24


def test_a_large_bfloat16_gradient_is_no_overflow():
    model, optimizer = make("O5", loss_scale="dynamic", init_scale=1.0)
    backward(model, optimizer, 1e20)
    amp.clip_grad_norm_(optimizer, 0.5)
    optimizer.step()
    assert not bool(optimizer.last_step.skipped)
    assert weight(optimizer) == pytest.approx(0.5, rel=1e-6)


def test_overflow_messages_are_for_those_who_wait(caplog):
    model, optimizer = make("O2", verbosity=2)
    with caplog.at_level(logging.INFO, logger="ampfuse.amp"):
        backward(model, optimizer, inf)
    assert "loss scale 0 is now 32768" in caplog.text


# --- delays, errors inside the block --------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_delay_unscale(level):
    model, optimizer = make(level)
    backward(model, optimizer, 0.125, delay_unscale=True)
    backward(model, optimizer, 0.25, delay_unscale=True)
    backward(model, optimizer, 0.5)
    assert next(amp.master_params(optimizer)).grad.float().item() == 0.875
    optimizer.step()
    assert weight(optimizer) == 0.125
    if level in DYNAMIC:
        assert unskipped(optimizer) == 1, "only the pass that unscales is counted"


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4"])
@pytest.mark.parametrize("how", ["delayed pass", "unchecked pass", "by hand"])
def test_an_overflow_that_its_own_pass_did_not_tell_of_still_skips(level, how):
    """A delayed one is told of by the pass that unscales."""
    model, optimizer = make(level, loss_scale="dynamic")
    if how == "by hand":
        backward(model, optimizer, 0.25)
        next(amp.master_params(optimizer)).grad.fill_(inf)
    else:
        delay = "delay_unscale" if how == "delayed pass" else "delay_overflow_check"
        backward(model, optimizer, inf, **{delay: True})
    assert scale(optimizer) == 65536.0
    backward(model, optimizer, 0.25)
    assert scale(optimizer) == 32768.0 or how != "delayed pass"
    optimizer.step()
    assert weight(optimizer) == 1.0
    optimizer.zero_grad()
    backward(model, optimizer, 0.25)
    optimizer.step()
    assert weight(optimizer) == 0.75


def test_delay_overflow_check():
    model, optimizer = make("O2")
    backward(model, optimizer, 0.25, delay_overflow_check=True)
    assert next(amp.master_params(optimizer)).grad.item() == 0.25
    assert (scale(optimizer), unskipped(optimizer)) == (65536.0, 0)
    optimizer.step()
    assert weight(optimizer) == 0.75


@pytest.mark.parametrize("level", LEVELS)
def test_a_body_that_raises_loses_nothing(level):
    model, optimizer = make(level)
    backward(model, optimizer, 0.25)
    with contextlib.suppress(KeyError), amp.scale_loss(torch.ones(()), optimizer):
        raise KeyError
    assert next(amp.master_params(optimizer)).grad.float().item() == 0.25
    backward(model, optimizer, 0.25)
    optimizer.step()
    assert weight(optimizer) == 0.5


@pytest.mark.parametrize("level", LEVELS)
def test_step_and_another_block_inside_the_block_are_errors(level):
    model, optimizer = make(level)
    with amp.scale_loss(model(torch.ones(1)).sum() * 0.5, optimizer) as scaled:
        scaled.backward()
        with pytest.raises(RuntimeError):
            optimizer.step()
        with (
            pytest.raises(RuntimeError, match="nested"),
            amp.scale_loss(torch.ones(()), optimizer),
        ):
            pass
    optimizer.step()
    assert weight(optimizer) == 0.5


@pytest.mark.parametrize("meanwhile", ["overflow", "set"])
@pytest.mark.parametrize("level", DYNAMIC)
def test_a_pass_keeps_its_scale_while_another_changes_it(level, meanwhile):
    """Blocks of two optimizers with one scaler, one in the other."""
    models, (outer, inner) = two(level)
    with amp.scale_loss(models[0](torch.ones(1)).sum().float() * 0.25, outer) as scaled:
        if meanwhile == "overflow":
            backward(models[1], inner, inf)
        else:
            outer._amp_session.loss_scalers[0]._loss_scale = 2.0**15
        assert scale(outer) == 2.0**15
        scaled.backward()
    outer.step()
    assert weight(outer) == 0.75
    assert scale(outer) == 2.0**15


def test_the_weight_cache_of_autocast_is_dropped():
    """Inside an autocast region around the loop, a cast weight must not outlive its step."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    with torch.autocast("cpu", dtype=bf16):
        for expected in (1.0, 0.5, 0.0):
            out = model(torch.ones(1, 1)).sum()
            assert out.item() == expected
            with amp.scale_loss(out, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()


# --- training: against FP32, clipping, schedulers (test_resume.py goes on with it) -----------


def build(level, kind=torch.optim.AdamW, **options):
    """A small classifier with batch norm, and data for it, the same at every level."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = kind(model.parameters(), lr=0.01)
    if level is not None:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return model, optimizer


def data(step):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(16, 8, generator=g)
    return x, (x[:, :4]).argmax(1)


def train(model, optimizer, steps, clip=None):
    losses = []
    for step in steps:
        x, y = data(step)
        loss = F.cross_entropy(model(x), y)
        if hasattr(optimizer, "_amp_session"):
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        else:  # the reference: plain torch in FP32
            loss.backward()
        if clip is not None:
            clip(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


PRECISION = {"O0": 1e-5, "O1": 5e-3, "O2": 5e-3, "O3": 5e-2, "O4": 4e-2, "O5": 4e-2}


def assert_close(level, found, expected):
    torch.testing.assert_close(*map(torch.tensor, (found, expected)), rtol=0, atol=PRECISION[level])


@functools.cache  # for all levels
def losses_in_fp32(kind, clip=None):
    return train(*build(None, kind), range(40), clip)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_training_follows_fp32_within_the_levels_precision(level, kind):
    options = {"keep_batchnorm_fp32": True} if level == "O3" else {}
    losses = train(*build(level, kind, **options), range(40))
    assert_close(level, losses, losses_in_fp32(kind))


MAX_NORM = 0.3
CLIPS = {
    "model.parameters": lambda m, o: nn.utils.clip_grad_norm_(m.parameters(), MAX_NORM),
    "master_params": lambda m, o: nn.utils.clip_grad_norm_(amp.master_params(o), MAX_NORM),
    "param_groups": lambda m, o: nn.utils.clip_grad_norm_(
        [p for group in o.param_groups for p in group["params"]], MAX_NORM
    ),
    "amp": lambda m, o: amp.clip_grad_norm_(o, MAX_NORM),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("route", CLIPS)
def test_clipping(level, route):
    """SGD, so that the size of the gradients matters; every gradient here is above the limit."""
    losses = train(*build(level, torch.optim.SGD), range(40), CLIPS[route])
    assert_close(level, losses, losses_in_fp32(torch.optim.SGD, CLIPS["model.parameters"]))


def test_clip_grad_norm_returns_the_unscaled_norm():
    for level in LEVELS:
        model, optimizer = make(level, w=1.0)
        backward(model, optimizer, 0.5)
        norm = amp.clip_grad_norm_(optimizer, 0.125)
        optimizer.step()
        assert norm.item() == pytest.approx(0.5, rel=1e-6)
        assert weight(optimizer) == pytest.approx(0.875, rel=1e-3)
        # It clips the next step only.
        optimizer.zero_grad()
        backward(model, optimizer, 0.5)
        optimizer.step()
        assert weight(optimizer) == pytest.approx(0.375, rel=1e-3)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("first", ["scheduler", "initialize"])
@pytest.mark.parametrize("skipped", [0, 1])
def test_lr_schedulers_built_before_or_after(level, first, skipped):
    model = Scalar(8.0)
    optimizer = sgd(model)
    if first == "scheduler":
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    dynamic = "dynamic" if skipped else None
    amp.initialize(model, optimizer, opt_level=level, loss_scale=dynamic, verbosity=0)
    if first == "initialize":
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for i, lr in enumerate((1.0, 0.5, 0.25)):
        assert optimizer.param_groups[0]["lr"] == lr
        backward(model, optimizer, inf if i < skipped else 0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        assert bool(optimizer.last_step.skipped) == (i < skipped)
    assert weight(optimizer) == 8 - (0.375 if skipped else 0.875)


def test_amp_state_is_apexs_and_matched_by_key():
    _, optimizer = make("O2", num_losses=2)
    assert amp.state_dict() == {
        f"loss_scaler{i}": {"loss_scale": 65536.0, "unskipped": 0} for i in (0, 1)
    }
    destination = {}
    assert amp.state_dict(destination) is destination
    amp.load_state_dict(
        {
            "loss_scaler1": {"loss_scale": 2.0, "unskipped": 7},
            "loss_scaler0": {"loss_scale": 4.0, "unskipped": 5},
        }
    )
    assert (scale(optimizer, 0), unskipped(optimizer, 0)) == (4.0, 5)
    assert (scale(optimizer, 1), unskipped(optimizer, 1)) == (2.0, 7)
    with pytest.warns(UserWarning, match="those in both"):
        amp.load_state_dict({"loss_scaler1": {"loss_scale": 8.0, "unskipped": 0}})
    assert [scale(optimizer, i) for i in (0, 1)] == [4.0, 8.0]
    for foreign in ({"fc.weight": torch.ones(1)}, {"loss_scaler0": {"scale": 1.0}}):
        with pytest.raises(RuntimeError):
            amp.load_state_dict({"loss_scaler1": {"loss_scale": 1.0, "unskipped": 0}, **foreign})
        assert scale(optimizer, 1) == 8.0


def test_a_counter_beyond_the_interval_still_grows():
    model, optimizer = make("O2", growth_interval=2)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 1999}})
    backward(model, optimizer, 0.25)
    assert scale(optimizer) == 8.0


def test_loss_scaler_attributes_that_scripts_read_and_set():
    model, optimizer = make("O2")
    scaler = optimizer._amp_session.loss_scalers[0]
    assert (scaler.loss_scale(), scaler._loss_scale, scaler._unskipped) == (65536.0, 65536.0, 0)
    assert scaler.dynamic
    scaler._loss_scale = 4.0
    with amp.scale_loss(torch.ones(()), optimizer) as scaled:
        assert scaled.item() == 4.0
    copied = copy.deepcopy(scaler)
    copied._loss_scale = 2.0
    assert scaler.loss_scale() == 4.0
    # A static scale of 1 that a script changes is no longer passed over.
    model, optimizer = make("O0")
    optimizer._amp_session.loss_scalers[0]._loss_scale = 4.0
    backward(model, optimizer, 0.25)
    assert next(amp.master_params(optimizer)).grad.item() == 0.25


@pytest.mark.parametrize("level", LEVELS)
def test_copies_of_a_model_in_training(level):
    """For an average or a teacher: weights of its own, and gradients of its own."""
    model, optimizer = build(level)
    train(model, optimizer, range(2))
    average = torch.optim.swa_utils.AveragedModel(model)
    clones = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), average.module]
    before = [copy.deepcopy(clone.state_dict()) for clone in clones]
    train(model, optimizer, range(2, 4))
    average.update_parameters(model)
    x, y = data(9)
    for clone, state in zip(clones[:2], before, strict=False):
        assert_same(clone.state_dict(), state)
        F.cross_entropy(clone(x), y).backward()
        assert all(p.grad is not None for p in clone.parameters())
    assert all(p.grad is None for p in model.parameters())
    assert average(x).dtype == model(x).dtype


@pytest.mark.gpu
@pytest.mark.parametrize("level", LEVELS)
def test_the_host_never_waits(level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x, y = (t.cuda() for t in data(0))

    def step():
        with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
            scaled.backward()
        amp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    with never_waiting():
        step()


@pytest.mark.parametrize("level", LEVELS)
def test_gradient_penalties(level):
    """As docs/guide.md writes them."""
    torch.manual_seed(0)
    inputs = torch.rand(8, 4)

    def gradients(amp_level):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = sgd(model)
        if amp_level is not None:
            amp.initialize(model, optimizer, opt_level=amp_level, loss_scale=128.0, verbosity=0)
        x = inputs.clone().requires_grad_()
        output = model(x).float()
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        loss = output.mean() + 10 * ((gradient.float().norm(dim=1) - 1) ** 2).mean()
        if amp_level is None:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        return [p.grad.float() for p in amp.master_params(optimizer)]

    for found, expected in zip(gradients(level), gradients(None), strict=True):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.03)


# --- an optimizer that the block was not told of --------------------------------------------


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("zero", ZEROING)
def test_gradients_dropped_in_between_are_no_concern(level, zero):
    """The generator's loss reaches the discriminator of a GAN."""
    models, (first, second) = two(level, loss_scale=8.0)
    for _ in range(3):
        for optimizer, listed in ((first, [first, second]), (first, first)):
            backward_of_both(models, listed)
            optimizer.step()
        ZEROING[zero](models[1], second)
        backward_of_both(models[1:], second)
        second.step()
        first.zero_grad()
        second.zero_grad()
    assert weight(second) == 1.0 - 3 * 2.0**-4
