"""initialize: what it accepts and returns, what it refuses; the calls that take an optimizer."""

import contextlib
import copy
import re

import pytest
import torch
from torch import nn

from ampfuse import amp
from cases import LEVELS, assert_same, bf16, f16, f32, f64
from trainings import backward, give_gradient, gradient_of, initialized, sgd, stepped

levels = pytest.mark.parametrize("level", LEVELS)


@levels
def test_what_is_given_is_returned(level):
    m, n = nn.Linear(2, 2), nn.Linear(2, 2)
    assert amp.initialize(m, opt_level=level, verbosity=0) is m
    assert amp.initialize(both := [m, n], opt_level=level, verbosity=0) is both
    for pair in (
        (m, sgd(m)),
        (m, [sgd(m)]),
        ([m], sgd(m)),
        ([m, n], [sgd(m), sgd(n)]),
        ((m, n), (sgd(m), sgd(n))),
        (m, []),
    ):
        returned = amp.initialize(*pair, opt_level=level, verbosity=0)
        assert type(returned) is tuple
        assert [*map(id, returned)] == [*map(id, pair)]


def test_initialize_that_is_disabled_changes_nothing():
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    assert amp.initialize(model, enabled=False) is model
    out = amp.initialize(model, optimizer, enabled=False, opt_level="nonsense")
    assert out == (model, optimizer)
    assert type(optimizer) is torch.optim.SGD
    assert type(model) is nn.Linear
    loss = model(torch.ones(1, 2)).sum().double()
    with amp.scale_loss(loss, optimizer) as same:
        assert same is loss
        same.backward()
    assert amp.clip_grad_norm_(optimizer, 0.1) > 0.1
    optimizer.step()
    assert amp.state_dict() == {}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}})
    # An optimizer of an enabled call is not switched off by a later disabled one.
    on, on_optimizer = initialized("O2")
    amp.initialize(model, optimizer, enabled=False)
    give_gradient(on, on_optimizer, 0.25)
    assert gradient_of(on_optimizer) == 0.25


# What somebody wrote, and the call that the message has.
SCALE_LOSS, ONE = "amp.scale_loss(loss, optimizer)", torch.ones(())
MISTAKEN = {
    "clip": (
        lambda m, o: amp.clip_grad_norm_(m.parameters(), 1.0),
        "amp.clip_grad_norm_(optimizer",
    ),
    "masters": (lambda m, o: amp.master_params(m), "amp.master_params(optimizer)"),
    "model": (lambda m, o: enter(ONE, m), SCALE_LOSS),
    "parameters": (lambda m, o: enter(ONE, m.parameters()), SCALE_LOSS),
    "None": (lambda m, o: enter(ONE, None), SCALE_LOSS),
    "swapped": (lambda m, o: enter(o, ONE), SCALE_LOSS),
    "swapped, amp off": (lambda m, o: enter(initialized(enabled="False")[1], ONE), SCALE_LOSS),
}


def enter(*arguments):
    with amp.scale_loss(*arguments):
        pass


@pytest.mark.parametrize("case", MISTAKEN)
def test_functions_refuse_what_is_no_optimizer(case):
    mistake, call = MISTAKEN[case]
    with pytest.raises(TypeError, match=f"takes the optimizer, not .*: write {re.escape(call)}"):
        mistake(*initialized("O2"))


@pytest.mark.parametrize("enabled", [True, False])
def test_scale_loss_without_with_is_an_error(enabled):
    model, optimizer = initialized("O5", enabled=enabled)
    block = amp.scale_loss(model(torch.ones(1)).sum(), optimizer)
    with pytest.raises(
        AttributeError, match=r"with amp.scale_loss\(loss, optimizer\) as scaled_loss"
    ):
        block.backward()
    assert model.w.grad is None
    with block as scaled:  # nothing had begun
        scaled.backward()
    assert gradient_of(optimizer) == 1


class NotAnOptimizer:
    param_groups = ()


def with_complex(model):
    model.c = nn.Parameter(torch.ones(1, dtype=torch.complex64))
    return model


def scripted(model):
    return [model, torch.jit.script(nn.Linear(2, 2))], sgd(model)


def wrapped(model):
    return [nn.Linear(2, 2), nn.DataParallel(model)], sgd(model)


def on_meta(model):
    model = nn.Linear(4, 4, device="meta")
    return model, sgd(model)


def with_a_loose_parameter(model):
    return model, torch.optim.SGD([torch.ones(1, dtype=f64, requires_grad=True)], lr=0.1)


CALL = r"The call is amp\.initialize\(model, optimizer, opt_level="
REFUSED = {
    "no optimizer": (lambda m: (m, NotAnOptimizer()), TypeError, "optimizers must be"),
    "a generator": (lambda m: (m, (o for o in [sgd(m)])), TypeError, "optimizers .* generator"),
    "in a list": (lambda m: (m, [sgd(m), NotAnOptimizer()]), TypeError, "got NotAnOptimizer"),
    "models generated": (lambda m: ((x for x in [m]), sgd(m)), TypeError, "models .* generator"),
    "no model": (lambda m: (None, sgd(m)), TypeError, "models must be .* NoneType"),
    "DataParallel": (wrapped, RuntimeError, "already wrapped in DataParallel"),
    "ScriptModule": (scripted, TypeError, "does not support a ScriptModule"),
    "twice": (lambda m: (m, [sgd(m)] * 2), RuntimeError, "listed twice"),
    "float64": (lambda m: (m.double(), sgd(m)), TypeError, r"'0\.weight' .*float64"),
    "complex": (lambda m: (with_complex(m), sgd(m)), TypeError, "'c' .*complex64"),
    "half": (lambda m: (m.half(), sgd(m)), RuntimeError, r"'0\.weight' is float16.*O1"),
    "bfloat16": (lambda m: (m.bfloat16(), sgd(m)), RuntimeError, r"'0\.weight' is bfloat16.*O1"),
    "loose": (with_a_loose_parameter, TypeError, r"param_groups\[0\].*float64"),
    "swapped": (lambda m: (sgd(m), m), TypeError, rf"models .* got SGD\. {CALL}"),
    "a level": (lambda m: (m, "O5"), TypeError, f"optimizers .* got str. {CALL}"),
    "parameters": (lambda m: (m, [*m.parameters()]), TypeError, f"got Parameter. {CALL}"),
    "meta": (on_meta, RuntimeError, r"'weight' is on the meta device.*Materialize it"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("case", REFUSED)
def test_what_initialize_refuses(case):
    arrange, error, message = REFUSED[case]
    model = nn.Sequential(nn.Linear(2, 2))
    models, optimizers = arrange(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        amp.initialize(models, optimizers, opt_level="O1", verbosity=0)
    assert type(model) is nn.Sequential
    listed = optimizers if isinstance(optimizers, list) else [optimizers]
    assert all(type(o) is torch.optim.SGD for o in listed if isinstance(o, torch.optim.Optimizer))
    assert_same(model.state_dict(), before)


NO_SCALING = ("init_scale", "min_loss_scale", "max_loss_scale", "growth_factor", "backoff_factor")
WRONG = [
    ({"level": "02"}, RuntimeError, "'O2'"),
    ({"level": "O1", "master_weights": True}, RuntimeError, "master_weights has no meaning"),
    ({"loss_scale": "128x"}, ValueError, "loss_scale is '128x'.*a positive number"),
    ({"num_losses": 0}, ValueError, "num_losses must be"),
    ({"growth_factor": 1.0}, ValueError, "growth_factor is 1.0; it must be above 1"),
    ({"backoff_factor": 1.0}, ValueError, "backoff_factor is 1.0; it must be between"),
    ({"growth_interval": 0}, ValueError, "growth_interval is 0; it must be a whole"),
    ({"growth_interval": 1.5}, ValueError, "growth_interval is 1.5; it must be a whole"),
    ({"hysteresis": 0}, ValueError, "hysteresis is 0; it must be a whole"),
    ({"init_scale": -1.0}, ValueError, "init_scale is -1.0; it must be positive"),
    ({"max_loss_scale": None}, ValueError, "max_loss_scale is None; it must be at"),
    ({"min_loss_scale": 8.0, "max_loss_scale": 4.0}, ValueError, "max_loss_scale is 4.0"),
    ({"verbosity": "1"}, TypeError, "verbosity must be 0, 1 or 2, not '1'"),
    ({"enabled": "no"}, ValueError, "^enabled is 'no'; it must be True or False"),
    ({"enabled": "O5"}, ValueError, rf"^enabled is 'O5'; .*\. {CALL}"),
    ({"enabled": bf16}, ValueError, rf"^enabled is torch.bfloat16; .*\. {CALL}"),
    ({"master_weights": "Split"}, ValueError, "^master_weights is .*True, False or 'split'"),
    *(
        ({name: "x"}, ValueError, f"{name} is 'x'; it must be")
        for name in (*NO_SCALING, "growth_interval", "hysteresis")
    ),
]


@pytest.mark.parametrize(("option", "error", "message"), WRONG, ids=str)
def test_wrong_options_change_nothing(option, error, message):
    model = nn.Linear(2, 2)
    with pytest.raises(error, match=message):
        initialized(**{"level": "O2", "model": model, **option})
    assert type(model) is nn.Linear
    assert model.weight.dtype == f32


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("dtype", [f16, bf16])
def test_half_models_are_taken_over_exactly_with_a_word(level, dtype):
    model = nn.Linear(4, 4).to(dtype)
    exact = model.weight.detach().float()
    with pytest.warns(UserWarning, match="already has 2 half-precision"):
        _, optimizer = initialized(level, model)
    assert torch.equal(next(amp.master_params(optimizer)), exact)


def test_half_models_are_taken_on_request_or_frozen():
    initialized("O1", nn.Linear(4, 4).half(), allow_incoming_model_not_fp32=True)
    initialized("O1", nn.Sequential(nn.Linear(4, 4).half().requires_grad_(False), nn.Linear(4, 4)))


@levels
@pytest.mark.parametrize("trains", [False, True])
def test_lazy_modules_are_cast_once_they_have_shapes(level, trains):
    model, x = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)), torch.ones(1, 2)
    optimizer = sgd(model) if trains else None
    if level in ("O2", "O3", "O5"):
        with pytest.raises(RuntimeError, match=r"'1\.weight' has no shape yet"):
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        assert model[0].weight.dtype == f32
        model(x)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if trains:
        if level not in ("O2", "O3", "O5"):
            with pytest.raises(RuntimeError, match=r"1\.weight has no shape yet"):
                optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    out = model(x)
    assert (out.dtype, out.shape) == (f32, (1, 3))
    if trains:
        before = model[1].weight.detach().clone()
        backward(out.sum() / 64, optimizer)
        optimizer.step()
        assert not torch.equal(model[1].weight, before)


@pytest.mark.parametrize("part", [0, 1])
def test_lazy_modules_may_be_in_no_optimizer(part):
    """Or in one that holds nothing else."""
    models = [nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.LazyLinear(3))]
    amp.initialize(models, sgd(models[part]), opt_level="O1", verbosity=0)
    assert models[1](models[0](torch.ones(1, 2))).shape == (1, 3)


@levels
def test_a_model_that_is_a_lazy_module_is_refused(level):
    with pytest.raises(RuntimeError, match="LazyLinear changes its class at the first call"):
        amp.initialize(nn.LazyLinear(3), opt_level=level, verbosity=0)


@pytest.mark.filterwarnings("error")
@levels
@pytest.mark.parametrize("earlier", ["O2", "O5"])
def test_half_weights_of_an_earlier_call_are_told_at_another_level(earlier, level):
    model, _ = initialized(earlier)
    if level in ("O1", "O4"):
        said = pytest.raises(RuntimeError, match=f"'w' is .*float16, but {level} trains FP32")
    elif level == earlier or {earlier, level} == {"O2", "O3"}:
        said = contextlib.nullcontext()
    else:
        said = pytest.warns(UserWarning, match="already has 1 half-precision")
    with said:
        _, optimizer = initialized(level, model)
        give_gradient(model, optimizer, 0.25)
        assert stepped(optimizer) == 0.75
