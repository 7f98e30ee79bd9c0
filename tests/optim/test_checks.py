"""Wrong input: the error names the tensor or option and says what to do, and nothing has changed.

Tables of gradients, parameters, calls, hyper-parameters, options, states and loss scales, over all
optimizers, alone and under amp.
"""

import copy
import functools
import itertools
import math
import pickle

import pytest
import torch
from torch import nn

import cases
import reference
from ampfuse import amp, optim
from ampfuse.amp.policy import make_policy
from ampfuse.compat.apex.amp.scaler import LossScaler
from ampfuse.optim.masters import MASTERS, MasterParameter
from cases import (
    KINDS,
    NEVER_QUANTIZED,
    OPTIMIZERS,
    QUANTIZED,
    TORCH_KINDS,
    bf16,
    f16,
    f32,
    f64,
    give_gradients,
    make,
    make_torch,
    params_of,
    refused,
    set_grad,
    snapshot,
    train,
    weights,
)

ALL = [getattr(optim, kind) for kind in reference.RULES]
inf, nan = torch.inf, torch.nan
every = pytest.mark.parametrize("kind", KINDS)


def parameters(dtype=f32):
    torch.manual_seed(0)
    return cases.parameters(((4, 3), (5,)), dtype)


# Named parameters.
SHAPES = {"embed.weight": (6, 2), "body.weight": (4, 3), "body.bias": (4,)}


def named(dtype=f32, device="cpu"):
    made = cases.parameters(SHAPES.values(), dtype, device=device)
    return list(zip(SHAPES, made, strict=True))


# --- gradients -----------------------------------------------------------------------------------

BAD_GRADIENTS = {
    "sparse": (torch.eye(4, 3).to_sparse(), RuntimeError, "sparse.*sparse=False"),
    "float64": (torch.eye(4, 3).to(f64), TypeError, "Double.*float32, float16 and bfloat16"),
    "complex": (torch.eye(4, 3).to(torch.complex64), TypeError, "complex.*view_as_real"),
    "integer": (torch.eye(4, 3).to(torch.int32), TypeError, "Int"),
}


@pytest.mark.covers(2)
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("case", BAD_GRADIENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_gradients_are_refused(kind, case, masters, device):
    """Before the first step, and after one."""
    gradient, error, message = BAD_GRADIENTS[case]
    params_by_name = named(bf16 if masters else f32, device)
    optimizer = make(kind, params_by_name, master_weights=masters, max_grad_norm=1.0)
    optimizer.param_table()  # with masters, and without states
    params = params_of(optimizer)
    for _ in range(2):
        give_gradients(params)
        set_grad(params[1], gradient.to(device))
        with refused(optimizer, f"gradient of body.weight is {message}", error):
            optimizer.step()
        before = snapshot(optimizer)
        train(optimizer)
        after = snapshot(optimizer)
        assert any(not torch.equal(after[key], before[key]) for key in before)


# --- parameters ----------------------------------------------------------------------------------


@pytest.mark.covers(1)
@pytest.mark.parametrize("optimizer", ALL)
@pytest.mark.parametrize("dtype", [f64, torch.complex64])
def test_parameters_of_another_dtype_are_refused(optimizer, dtype):
    param = torch.ones(4, 3, dtype=dtype, requires_grad=True)
    name = optimizer.__name__
    with pytest.raises(TypeError, match=rf"{name} supports .*got {dtype} of .*Convert the model"):
        optimizer([param])
    good = optimizer(parameters())
    with pytest.raises(TypeError, match=str(dtype)):
        good.add_param_group({"params": [param]})
    assert len(good.param_groups) == 1


STRANGE = {
    "gaps": (torch.ones(8, 3)[::2], r"body.weight of shape \[4, 3\] and strides.*gaps"),
    "overlap": (torch.ones(1, 3).expand(4, 3), "body.weight.*overlaps in memory"),
    "sparse": (torch.eye(4, 3).to_sparse(), "body.weight is sparse"),
    # A parameter of a model that is not materialized yet.
    "meta": (torch.ones(4, 3, device="meta"), "^body.weight is on the meta device.*Materialize it"),
}


@pytest.mark.parametrize("case", STRANGE)
def test_parameters_without_values_of_their_own_are_refused(case):
    strange, message = STRANGE[case]
    (first, good), _, (last, other) = named()
    strange = "body.weight", strange.detach().requires_grad_()
    optimizer = make("adamw", [(first, good), strange, (last, other)])
    good = [good, other]
    give_gradients(good)
    before = weights(good)
    with pytest.raises((RuntimeError, TypeError), match=message):
        optimizer.step()
    assert all(map(torch.equal, good, before))
    assert not any(optimizer.state.values())


@pytest.mark.parametrize("changed", ["shape", "strides"])
def test_a_parameter_that_changed_shape_or_strides_is_refused(changed):
    """States that are not quantized follow other strides."""
    param = cases.parameters([(64, 64)])[0]
    optimizer = make("adamw", [("body.weight", param)], state_dtype="8bit")
    train(optimizer)
    param.grad = None
    param.data = torch.randn(5, 3) if changed == "shape" else torch.randn(64, 64).t()
    param.grad = torch.randn_like(param)
    with pytest.raises(RuntimeError, match=rf"body.weight.*changed its {changed}"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [f16, bf16])
def test_a_parameter_may_change_its_dtype(dtype):
    """model.half() after the optimizer was built and used.

    Without masters that is a legitimate thing to do: the weights are stepped as they are now.
    """
    optimizer = make("adamw", named(), lr=0.1)
    train(optimizer)
    params = params_of(optimizer)
    for param in params:
        param.grad = None
        param.data = param.data.to(dtype)
    before = weights(params)
    train(optimizer, [1])
    for param, start in zip(params, before, strict=True):
        assert param.dtype == dtype
        assert param.isfinite().all()
        assert not torch.equal(param.detach(), start)
        assert (param.detach() - start).abs().max() <= 0.2


# --- calls ---------------------------------------------------------------------------------------


def emptied():
    optimizer = make("adamw", named())
    optimizer.param_groups.clear()
    optimizer.step()


UNKNOWN = r"^{}\.__init__\(\) got an unexpected keyword argument '{}'$"
REFUSED = {
    r"Use torch\.optim\.AdamW": lambda: optim.AdamW(named(), differentiable=True),
    UNKNOWN.format("AdamW", "max_norm"): lambda: optim.AdamW(named(), max_norm=1.0),
    UNKNOWN.format("LAMB", "foreach"): lambda: optim.LAMB(named(), foreach=True),
    "fused.*foreach": lambda: optim.AdamW(named(), foreach=True, fused=True),
    "Nesterov": lambda: optim.SGD(named(), nesterov=True),
    "positional": lambda: optim.SGD(named(), 0.1, 0.9, 0.0, 0.0, False, True),
    "empty parameter list": lambda: optim.AdamW([]),
    "no parameters; add a parameter group": emptied,
    "max_norm is 0.0": lambda: make("adamw", named()).clip_next_step(0.0),
    "max_norm is -1.0": lambda: make("adamw", named()).clip_next_step(-1.0),
    "max_norm is nan": lambda: make("adamw", named()).clip_next_step(nan),
}
TYPE_ERRORS, RUNTIME_ERRORS = ("__init__", "positional"), ("fused", "no parameters")


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_calls_are_refused(message):
    error = TypeError if any(words in message for words in TYPE_ERRORS) else ValueError
    error = RuntimeError if message.startswith(RUNTIME_ERRORS) else error
    with pytest.raises(error, match=message):
        REFUSED[message]()


def test_a_step_inside_a_backward_pass_is_refused():
    optimizer = make("adamw", named())
    optimizer.param_table().gradients.begin_backward()
    with pytest.raises(RuntimeError, match=r"step\(\) inside a backward pass"):
        train(optimizer)
    optimizer.param_table().gradients.cancel_backward()
    train(optimizer)


def test_flags_of_a_grad_scaler_that_do_not_fit():
    optimizer = make("adamw", named())
    give_gradients(params_of(optimizer))
    for wrong, error in ((torch.zeros((), dtype=f64), TypeError), (torch.zeros(0), ValueError)):
        optimizer.found_inf = wrong
        with pytest.raises(error, match="found_inf"):
            optimizer.step()
        del optimizer.found_inf


# --- hyper-parameters ----------------------------------------------------------------------------

NUMBERS = ("lr", "weight_decay", "momentum", "dampening", "eps", "lr_decay")
FLAGS = ("amsgrad", "maximize", "nesterov", "grad_averaging", "use_nvlamb", "init_zero")
TYPE, RANGE = "^{} is .*; it must be", "^Invalid {}: "
WRONG = {  # of a hyper-parameter: the message, and values
    **{
        f"{name}: type": (TYPE.format(name), ("0.9", None, [0.1], torch.ones(2)))
        for name in NUMBERS
    },
    **{f"{name}: type": (TYPE.format(name), ("no", 0.5, torch.ones(2))) for name in FLAGS},
    "initial_accumulator_value: type": (TYPE.format("initial_accumulator_value"), ("1", None)),
    "betas: type": (TYPE.format("betas"), ("xy", None, 0.9, (0.9,), (0.9, "0.9"))),
    "norm_type: type": (TYPE.format("norm_type"), (1, "2", None)),
    "lr: range": (RANGE.format("learning rate"), (-1.0, nan, inf)),
    "weight_decay: range": (RANGE.format("weight_decay value"), (-1.0, nan)),
    "momentum: range": (RANGE.format("momentum value"), (-0.5, nan)),
    "eps: range": (RANGE.format("epsilon value"), (-1.0, nan)),
    "betas: range": (
        RANGE.format("beta parameter at index [01]"),
        ((0.9, 1.0), (0.9, nan), (1.0, 0.9)),
    ),
    "lr_decay: range": (RANGE.format("lr_decay value"), (-1.0, nan)),
    "dampening: range": (RANGE.format("dampening"), (nan,)),
}
HYPER = [
    (kind, case)
    for kind in KINDS
    for case in WRONG
    if case.partition(":")[0] in make(kind, [torch.zeros(1)]).defaults
]


@pytest.mark.parametrize(("kind", "case"), HYPER)
def test_wrong_hyper_parameters_are_refused(kind, case):
    name = case.partition(":")[0]
    message, values = WRONG[case]
    optimizer = make(kind, parameters())
    for wrong in values:
        with pytest.raises(ValueError, match=message):
            make(kind, parameters(), **{name: wrong})
        if name == "initial_accumulator_value":
            continue  # no step reads that from a group
        group = {"params": parameters(), name: wrong}
        with pytest.raises(ValueError, match=message):
            make(kind, [{"params": parameters()}, group])
        with refused(optimizer, message):
            optimizer.add_param_group(group)
        right = optimizer.param_groups[0][name]
        if name in FLAGS:  # equal values change nothing
            optimizer.param_groups[0][name] = False
            train(optimizer)
        optimizer.param_groups[0][name] = "0.91" if wrong == "0.9" else wrong
        give_gradients(params_of(optimizer))
        with refused(optimizer, message):
            optimizer.step()
        optimizer.param_groups[0][name] = right
        train(optimizer)


def test_what_torch_takes_is_taken():
    for lr in (1, torch.tensor(0.1), torch.tensor([0.1])):
        train(optim.SGD(parameters(), lr=lr, weight_decay=torch.tensor(0.1), maximize=None))
    train(optim.AdamW(parameters(), betas=[0.9, 0.99], amsgrad=1))
    group = {"params": parameters(), "name": "head", "betas": "mine", "momentum": None}
    train(optim.Adagrad([group]))  # keys that Adagrad does not look at
    given = {"master_weights": 1, "skip_nonfinite": 1, "unscale_grads": 0}
    optimizer = optim.SGD(parameters(bf16), lr=0.1, **given)
    for one in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert [getattr(one, name) for name in given] == [True, True, False]
        assert all(type(getattr(one, name)) is bool for name in given)


# --- options -------------------------------------------------------------------------------------

OPTIONS = {  # what they have to be, and what is not that
    "master_weights": ("True, False or 'split'", ("Split", "True", None, 2)),
    "state_dtype": ("'fp32', 'bf16'(,| or) '8bit'", ("int8", None, f32)),
    "rounding": ("'nearest' or 'stochastic'", ("up", None, True)),
    "seed": ("an integer from 0 to", (-1, 2**32, "0", 1.5, None)),
    "ema_decay": (r"in \[0, 1\), or None", (1.0, -0.1, nan, "0.9", torch.ones(2))),
    "max_grad_norm": ("positive, or None", (0.0, -1, nan, "1", [1.0])),
    "skip_nonfinite": ("True, False or None", ("yes", 2, 0.5)),
    "skip_spikes": ("positive and finite, or None", (0.0, -6, nan, math.inf, "6", True)),
    "max_skipped_steps": ("a positive integer, or None", (0, -1, 1.5, "9", True)),
    "unscale_grads": ("True or False", ("no", None, 2)),
}


@pytest.mark.covers(1)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("cls", ALL)
def test_values_that_an_option_cannot_have_are_refused(cls, name):
    words, values = OPTIONS[name]
    message = rf"^{name} is .*; it must be {words}"
    assert OPTIONS.keys() == optim.Options.__annotations__.keys()
    optimizer = cls(parameters(), lr=0.1)
    right = getattr(optimizer, name)
    for wrong in values:
        with pytest.raises(ValueError, match=message):
            cls(parameters(), lr=0.1, **{name: wrong})
        with pytest.raises(ValueError, match=message):
            setattr(optimizer, name, wrong)
        assert getattr(optimizer, name) == right
        train(optimizer)


OF_THE_WHOLE = {
    "master_weights": True,
    "rounding": "stochastic",
    "seed": 3,
    "ema_decay": 0.9,
    "max_grad_norm": 1.0,
    "skip_nonfinite": True,
    "skip_spikes": 6.0,
    "max_skipped_steps": 7,
    "unscale_grads": False,
}


@pytest.mark.covers(1)
@pytest.mark.parametrize("name", OF_THE_WHOLE)
@pytest.mark.parametrize("cls", [*ALL, torch.optim.AdamW])
def test_options_of_the_whole_optimizer_are_refused_in_a_group(cls, name):
    """They are refused, also for torch's under amp if the key came after `initialize`."""
    value = OF_THE_WHOLE[name]
    if (cls, name) == (torch.optim.AdamW, "master_weights"):
        value = "split"  # True is what O5 says
    message = rf"^{name}={value!r} is set in a parameter group.*constructor.*optimizer.{name}"
    model = nn.Linear(3, 2)
    optimizer = cls(model.parameters(), lr=0.1)
    group = {"params": parameters(), name: value}
    if cls is torch.optim.AdamW:
        amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    else:
        with pytest.raises(ValueError, match=message):
            cls([{"params": parameters()}, group], lr=0.1)
    for steps in range(2):
        with refused(optimizer, message):
            optimizer.add_param_group(group)
        optimizer.param_groups[0][name] = value
        give_gradients(params_of(optimizer))
        with refused(optimizer, message):
            optimizer.step()
        del optimizer.param_groups[0][name]
        train(optimizer, [steps])


def test_a_group_may_repeat_an_option():
    """ZeroRedundancyOptimizer repeats options in groups; a different value is refused later."""
    optimizer = optim.AdamW([{"params": parameters(), "ema_decay": 0.5}], ema_decay=0.5)
    train(optimizer)
    optimizer.param_groups[0]["ema_decay"] = 0.9
    give_gradients(params_of(optimizer))
    with refused(optimizer, r"^ema_decay=0\.9 is set in a parameter group"):
        optimizer.step()
    optimizer.ema_decay = 0.9
    train(optimizer)


@pytest.mark.parametrize("kind", [*KINDS, "RMSprop under amp"])
def test_a_learning_rate_in_a_tensor_is_checked_at_each_step(kind):
    rate = torch.tensor(0.1)
    if kind in KINDS:
        optimizer, wrong = make(kind, parameters(), lr=rate), (-1.0, nan, inf)
    else:
        model = nn.Linear(3, 2)
        optimizer, wrong = torch.optim.RMSprop(model.parameters(), lr=rate), (nan,)
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        optimizer.param_groups[0]["lr"] = nan  # a number too
        give_gradients(params_of(optimizer))
        with refused(optimizer, "^Invalid learning rate: nan"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = rate
    train(optimizer)
    for value in wrong:
        give_gradients(params_of(optimizer))
        rate.fill_(value)
        with refused(optimizer, "^Invalid learning rate: "):
            optimizer.step()
        rate.fill_(0.1)
        train(optimizer)


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_a_group_may_use_our_option_names_for_its_own_keys(cls):
    """But for the type of states, names that our options have are other people's there."""
    for name in OPTIONS:
        model = nn.Linear(3, 2)
        value = {"state_dtype": "bf16"}.get(name, 0.5)
        optimizer = cls([{"params": model.parameters(), name: value}], lr=0.1)
        amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
        train(optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
        assert saved["param_groups"][0][name] == value
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0][name] == value


@pytest.mark.covers(1)
@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize(
    ("name", "new"),
    [("master_weights", True), ("master_weights", "split"), ("rounding", "stochastic")],
)
def test_some_options_cannot_change_after_the_first_step(cls, name, new):
    optimizer = cls(parameters(bf16), lr=0.1)
    setattr(optimizer, name, new)  # that early it can
    setattr(optimizer, name, old := getattr(cls, name))
    train(optimizer)
    message = rf"^{name} cannot change from {old!r} to {new!r} after .*Save the state"
    for loaded in (False, True):
        if loaded:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        with pytest.raises(ValueError, match=message):
            setattr(optimizer, name, new)
        assert getattr(optimizer, name) == old
        train(optimizer)


@every
def test_averages_may_start_and_end_later(kind):
    """They are those of an optimizer that is created at that point; and they end."""
    optimizer = make(kind, params := parameters())
    train(optimizer, range(2))
    twin = make(kind, twins := copy.deepcopy(params), ema_decay=0.5)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.ema_decay = 0.5
    for each in (optimizer, twin):
        train(each, range(2))
        each.ema_decay = 0.75
        train(each)
    for param, other in zip(params, twins, strict=True):
        assert torch.equal(optimizer.state[param]["ema"], twin.state[other]["ema"])
        assert not torch.equal(optimizer.state[param]["ema"], param)
    with optimizer.swap_ema():
        assert torch.equal(params[0], twin.state[twins[0]]["ema"])
    optimizer.ema_decay = None
    train(optimizer)
    assert not any("ema" in state for state in optimizer.state.values())


# --- amp.initialize ------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["Split", "yes", 2, f32])
def test_an_upgrade_refuses_wrong_master_weights(wrong):
    optimizer = torch.optim.AdamW(parameters())
    with pytest.raises(ValueError, match=r"^master_weights is"):
        optim.upgrade(optimizer, master_weights=wrong)
    assert type(optimizer) is torch.optim.AdamW


def test_split_masters_where_weights_are_whole():
    with pytest.raises(RuntimeError, match=r"master_weights='split' contradicts O0.*O2.*O5"):
        make_policy("O0", master_weights="split")
    assert make_policy("O0", master_weights="split", cast_model_type=bf16).master_weights == "split"


@pytest.mark.parametrize("masters", [True, "split"])
def test_stochastic_weights_get_no_masters(masters):
    message = "master_weights is .*Leave one of the two out"
    with pytest.raises(ValueError, match=message):
        optim.AdamW(parameters(bf16), rounding="stochastic", master_weights=masters)
    model = nn.Linear(3, 2)
    optimizer = optim.AdamW(model.parameters(), rounding="stochastic")
    start = functools.partial(amp.initialize, model, optimizer, verbosity=0, opt_level="O5")
    with refused(optimizer, message):
        start(master_weights=masters)
    assert model.weight.dtype == f32
    start(master_weights=False)


@pytest.mark.parametrize(
    ("level", "own", "given", "kept"),
    [
        ("O5", True, {}, "master_param"),
        ("O5", "split", {}, "master_remainder"),
        ("O2", "split", {"master_weights": "split"}, "master_remainder"),
        ("O3", True, {}, "master_param"),
        ("O1", True, {}, None),
        ("O5", "split", {"master_weights": False}, None),
        ("O5", True, {"master_weights": "split"}, "master_remainder"),
    ],
)
def test_initialize_keeps_the_masters_that_the_constructor_was_told(level, own, given, kept):
    model = nn.Linear(3, 2)
    exact = model.weight.detach().clone()
    optimizer = optim.AdamW(model.parameters(), master_weights=own)
    start = functools.partial(amp.initialize, model, optimizer, opt_level=level, verbosity=0)
    start(**given)
    assert optimizer.master_weights == (given.get("master_weights", own) if kept else False)
    assert (type(next(amp.master_params(optimizer))) is MasterParameter) == (kept == "master_param")
    train(optimizer)
    assert MASTERS & optimizer.state_dict()["state"][0].keys() == ({kept} if kept else set())
    if kept:
        held = optimizer.torch_state_dict()["state"][0]
        torch.testing.assert_close(held["master_param"], exact, rtol=0, atol=2e-3)


# --- states --------------------------------------------------------------------------------------


def ways_of(kind):
    """The ways in which an optimizer of the kind can keep its states."""
    quantized = [] if kind in NEVER_QUANTIZED else QUANTIZED
    under_amp = ("O5", "O5 split") if kind in TORCH_KINDS else ()
    return ("alone", "masters", *quantized, *under_amp)


def trained(kind, how, steps=2):
    """An optimizer after `steps`."""
    if not how.startswith("O5"):
        more = {"alone": {}, "masters": {"master_weights": True, "ema_decay": 0.9}}
        more |= {storage: {"state_dtype": storage} for storage in QUANTIZED}
        params = parameters(bf16 if how == "masters" else f32)
        if how in QUANTIZED:
            params = [nn.Parameter(torch.ones(4096)), *params]
        optimizer = make(kind, params, **more[how])
    else:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = make_torch(kind, model.parameters())
        masters = True if how == "O5" else "split"
        amp.initialize(model, optimizer, opt_level="O5", master_weights=masters, verbosity=0)
    train(optimizer, range(steps))
    return optimizer


def damages(optimizer):
    """Damaged copies of its state dict, each with what has to be said of it."""

    def damaged(key, value):
        saved = copy.deepcopy(optimizer.state_dict())
        if value is None:
            del saved["state"][0][key]
        else:
            saved["state"][0][key] = value
        return saved

    for key, value in optimizer.state_dict()["state"][0].items():
        of = rf"{key} for (weight|param_groups\[0\]\['params'\]\[0\] of shape .*) "
        if key == "master_remainder":
            yield damaged(key, value.half()), rf"{of}is torch.float16 .*; it must be int16"
        if isinstance(value, torch.Tensor) and value.dim():
            yield damaged(key, torch.ones(7).to(value.dtype)), rf"{of}has shape \(7,\).*Nothing"
            yield damaged(key, [1.0]), rf"{of}is \[1.0\] .*; it must be a tensor of shape"
        else:
            for wrong in (-5.0, nan, inf, torch.tensor(nan), torch.tensor(-1), "3", torch.ones(2)):
                message = rf"{of}is .*; it must be a finite number of at least 0"
                yield damaged(key, wrong), message
        algorithm = optimizer.algorithm
        may_lack = set() if algorithm.uses_count else {"step"}
        may_lack |= set(algorithm.states) if algorithm.starts_at_gradient else set()
        if key not in (*MASTERS, "ema", *may_lack):
            yield damaged(key, None), f"{key} for .* is missing in the state dict, which has "
    for key in ("state", "param_groups"):
        saved = copy.deepcopy(optimizer.state_dict())
        del saved[key]
        yield saved, f"the state dict has no '{key}'; its keys are "
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["params"].pop()
    yield saved, "doesn't match the size"


@pytest.mark.parametrize(("kind", "how"), [(kind, how) for kind in KINDS for how in ways_of(kind)])
def test_damaged_states_are_refused(kind, how):
    optimizer = trained(kind, how)
    damaged_states = list(damages(optimizer))
    assert len(damaged_states) >= 5
    for damaged, message in damaged_states:
        with refused(optimizer, message):
            optimizer.load_state_dict(damaged)
    fresh = trained(kind, how, 0)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(fresh)


def go_on_alike(saved, ours, theirs):
    """Ours, which loads what is saved, steps as theirs."""
    ours.load_state_dict(saved)
    for optimizer in (ours, theirs):
        train(optimizer, [5])
    for a, b in zip(params_of(ours), params_of(theirs), strict=True):
        torch.testing.assert_close(a, b)


STEPS = {"tensor": lambda step: step, "float": float, "int": int, "one": lambda s: s.reshape(1)}


@pytest.mark.covers(1)
@pytest.mark.parametrize("number", STEPS)
@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n.partition("-")[0] in
                                  ("sgd", "adam", "adamw", "adagrad")])  # fmt: skip
def test_what_torch_saves_loads(name, number):
    """Numbers as tensors or not, with parameters that never had a gradient."""
    theirs = make_torch(name, parameters())
    params = params_of(theirs)
    params[1].requires_grad_(False)
    for step in range(2):
        give_gradients(params[:1], step)
        theirs.step()
    saved = copy.deepcopy(theirs.state_dict())
    for state in saved["state"].values():
        if "step" in state:
            state["step"] = STEPS[number](torch.as_tensor(state["step"]))
    go_on_alike(saved, make(name, copy.deepcopy(params)), theirs)


@pytest.mark.parametrize("state", [None, {}, {"momentum_buffer": None}], ids=str)
def test_momentum_that_has_not_started(state):
    theirs = torch.optim.SGD(parameters(), lr=0.1, momentum=0.9)
    train(theirs)
    saved = copy.deepcopy(theirs.state_dict())
    saved["state"].pop(1)
    if state is not None:
        saved["state"][1] = state
    theirs.load_state_dict(copy.deepcopy(saved))
    ours = optim.SGD(copy.deepcopy(params_of(theirs)), lr=0.1, momentum=0.9)
    go_on_alike(saved, ours, theirs)


SAME_STATES = [{"adam-all", "adamw"}, {"adamw", "lamb"}]  # which load
OTHERS = [pair for pair in itertools.permutations(KINDS, 2) if set(pair) not in SAME_STATES]


@pytest.mark.covers(1)
@pytest.mark.parametrize("how", ["alone", "masters"])
@pytest.mark.parametrize(("kind", "saved"), OTHERS)
def test_the_state_of_another_optimizer_is_refused(kind, saved, how):
    """Refused in a sentence that names both, or what is missing; torch took SGD's for AdamW's."""
    optimizer, other = trained(kind, how), trained(saved, "alone")
    of_each = rf"is from .*{type(other).__name__}.* which {type(optimizer).__name__} does not use"
    with refused(optimizer, rf"({of_each}|is missing in the state dict).*Nothing was loaded"):
        optimizer.load_state_dict(other.state_dict())
    train(optimizer)


def test_what_a_class_of_somebody_keeps_beside_our_states():
    class Noting(optim.SGD):
        def step(self, closure=None):
            result = super().step(closure)
            for param in params_of(self):
                self.state[param]["exp_avg"] = torch.ones(())
            return result

    optimizer = Noting(parameters(), lr=0.1, momentum=0.9)
    train(optimizer)
    again = Noting(parameters(), lr=0.1, momentum=0.9)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert again.state_dict()["state"][0]["exp_avg"] == 1


def test_the_options_of_saved_groups_decide_which_states_must_be_there():
    """The options of the saved groups decide which states must be there, not this optimizer's."""
    theirs = torch.optim.Adam(parameters())
    train(theirs)
    optim.Adam(parameters(), amsgrad=True).load_state_dict(copy.deepcopy(theirs.state_dict()))
    saved = copy.deepcopy(theirs.state_dict())
    saved["param_groups"][0]["amsgrad"] = True
    with pytest.raises(ValueError, match=r"max_exp_avg_sq for .* is missing"):
        optim.Adam(parameters()).load_state_dict(saved)
    lion = copy.deepcopy(trained("lion-decay", "alone").state_dict())
    for state in lion["state"].values():
        del state["step"]  # which no other Lion has
    optim.Lion(parameters()).load_state_dict(lion)


def test_edits_of_the_state_are_free():
    optimizer = trained("adamw", "alone")
    param = optimizer.param_groups[0]["params"][0]
    del optimizer.state[param]["exp_avg"]
    optimizer.state[param]["step"] = 7
    train(optimizer)
    assert optimizer.state[param]["step"] == 8


# --- loss scales ---------------------------------------------------------------------------------

SCALES = {
    "loss_scale": (inf, nan, -1, 0, 1e39, 1e-60, "1", None, torch.ones(2)),
    "unskipped": (-1, nan, inf, 2**31, "1", None),
    "hysteresis_left": (-1, nan, 2**31, "1"),
}


@pytest.mark.parametrize("key", SCALES)
def test_damaged_loss_scales_are_refused(key):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", num_losses=2, hysteresis=2, verbosity=0)
    apex, before = LossScaler("dynamic", 8.0, hysteresis=2), amp.state_dict()
    right = {"loss_scale": 4.0, "unskipped": 3, "hysteresis_left": 1}
    for wrong in SCALES[key]:
        damaged = {**right, key: wrong}
        with pytest.raises(ValueError, match=f"^{key} of loss_scaler1 is .*; it must be"):
            amp.load_state_dict({"loss_scaler0": right, "loss_scaler1": damaged})
        assert amp.state_dict() == before
        with pytest.raises(ValueError, match=f"^{key} of the loss scaler is "):
            apex.load_state_dict(damaged)
        assert apex.state_dict() == {"loss_scale": 8.0, "unskipped": 0, "hysteresis_left": 2}
    if key != "hysteresis_left":
        for wrong in SCALES[key]:
            with pytest.raises(ValueError, match=f"^{key} is "):
                setattr(apex, f"_{key}", wrong)
    amp.load_state_dict({"loss_scaler0": right, "loss_scaler1": right})
    assert amp.state_dict() == {"loss_scaler0": right, "loss_scaler1": right}


@pytest.mark.parametrize("scale", [inf, nan, -1.0, 1e39, 1e-60])
def test_wrong_static_scales_are_refused(scale):
    with pytest.raises(ValueError, match=r"^loss_scale is .*positive and finite"):
        amp.LossScaler(scale)
    scaler = LossScaler("dynamic")
    state = {**scaler.__getstate__(), "_loss_scale": scale}
    with pytest.raises(ValueError, match=r"^loss_scale is"):
        scaler.__setstate__(state)


def test_a_checkpoint_of_fp16_optimizer_is_whole_or_refused():
    from ampfuse.compat.apex.fp16_utils import FP16_Optimizer

    def start():
        torch.manual_seed(0)
        model = nn.Linear(3, 2).half()
        return FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), 8.0, verbose=False)

    optimizer, saved = start(), start().state_dict()
    saved["optimizer_state_dict"]["param_groups"][0]["lr"] = 0.5
    saved["loss_scaler"]["loss_scale"] = inf
    with pytest.raises(ValueError, match=r"^loss_scale of the loss scaler is inf"):
        optimizer.load_state_dict(saved)
    assert (optimizer.loss_scale, optimizer.param_groups[0]["lr"]) == (8.0, 0.1)
