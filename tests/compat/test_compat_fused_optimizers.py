"""``apex.optimizers``: every flag against apex's formulas, written plainly in float64."""

import copy
import functools
import inspect
import itertools
import math
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import reference
from ampfuse import optim
from ampfuse.compat import apex
from ampfuse.compat.apex import amp, optimizers
from ampfuse.optim.fused import is_fused
from cases import (
    assert_same,
    assert_same_bits,
    bf16,
    f16,
    f32,
    f64,
    give_gradients,
    parameters,
    snapshot,
    through_a_file,
    train,
)
from trainings import started_by_apex, train_by_apex

start = functools.partial(parameters, ((3, 4), (5,), (1,)))

ON, OFF, DECAY = (True, False), (False, True), (0.0, 0.1)
ADAM = {"bias_correction": ON, "adam_w_mode": ON, "weight_decay": DECAY}
AVERAGES = {"bias_correction": ON, "weight_decay": DECAY, "grad_averaging": ON}
LAMB = AVERAGES | {"adam_w_mode": ON, "max_grad_norm": (1.0, 100.0), "use_nvlamb": OFF}
SGD = {"lr": (0.05,), "momentum": (0, 0.9), "weight_decay": (0, 0.1), "dampening": (0, 0.3)}


def every(flags):
    """Every combination of the values of the flags; the first values, each other value alone, and
    all others together, in quick runs too."""
    cases = []
    for values in itertools.product(*flags.values()):
        changed = [v != first for v, (first, *_) in zip(values, flags.values(), strict=True)]
        is_quick = sum(changed) <= 1 or sum(changed) == sum(len(v) > 1 for v in flags.values())
        marks = () if is_quick else pytest.mark.exhaustive
        cases.append(pytest.param(dict(zip(flags, values, strict=True)), marks=marks))
    return cases


OPTIMIZERS = {
    "FusedSGD": (reference.apex_sgd, SGD | {"wd_after_momentum": OFF}),
    "FusedAdam": (reference.apex_adam, ADAM),
    "FusedAdagrad": (reference.apex_adagrad, {"weight_decay": DECAY, "adagrad_w_mode": OFF}),
    "FusedNovoGrad": (
        reference.apex_novograd,
        AVERAGES | {"reg_inside_moment": OFF, "norm_type": (2, 0), "init_zero": OFF},
    ),
    "FusedLAMB": (reference.apex_lamb, LAMB),
    "FusedMixedPrecisionLamb": (reference.apex_lamb, LAMB),
}
# name: the formula and the options of each case
RULES = {name: (rule, every(flags)) for name, (rule, flags) in OPTIMIZERS.items()}
for late in ({}, {"wd_after_momentum": True}):
    nesterov = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
    RULES["FusedSGD"][1].append(pytest.param(nesterov | late))
for name in OPTIMIZERS.keys() - {"FusedSGD"}:
    RULES[name][1].append(pytest.param({"eps": 0.1}))  # so large that it counts
for name in ("FusedLAMB", "FusedMixedPrecisionLamb"):
    # 0 does not switch clipping off: it is the norm that all gradients are clipped to.
    RULES[name][1].extend(pytest.param({"max_grad_norm": norm}) for norm in (0, math.inf))
OLD = {"lr": (0.05,), "eps": (1e-3,), "weight_decay": (0.1,), "bias_correction": ON}
OLD |= {"max_grad_norm": (0.0, 0.5, 100.0)}
for name in ("FusedAdam of 2019", "FusedAdam of contrib"):
    RULES[name] = (reference.clipped_adam_of_2019, every(OLD))


NAMES = [*OPTIMIZERS, "FusedAdam of 2019"]


def kind_of(name, **options):
    """The class of that name, with its options; arguments of 2019 make FusedAdam clip."""
    short, *of = name.split()
    kind = getattr(apex.contrib.optimizers if "contrib" in of else optimizers, short)
    if "2019" in of:
        options = {"max_grad_norm": 1.0, **options}
    return functools.partial(kind, **options)


def make(name, params, **options):
    """An optimizer with a rate, and momentum if it is SGD."""
    usual = {"lr": 0.01} | ({"momentum": 0.9} if name == "FusedSGD" else {})
    return kind_of(name, **(usual | options))(params)


@pytest.mark.parametrize("groups", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, *case.values, marks=case.marks)
        for name, (_, cases) in RULES.items()
        for case in cases
    ],
    ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values())),
)
def test_formulas(name, options, groups):
    """The options hold for groups added later. A weight and a gradient of zeros have norms that
    nothing can be divided by.
    """
    ps, rule = start(), RULES[name][0]
    with torch.no_grad():
        ps[1].zero_()
    exact, states = [p.detach().to(f64) for p in ps], [{} for _ in ps]
    split = [slice(None)] if groups == 1 else [slice(2), slice(2, None)]
    optimizer = kind_of(name, **options)(ps[split[0]])
    if groups == 2:
        optimizer.add_param_group({"params": ps[split[1]]})
    for t in range(1, 5):
        give_gradients(ps, t)
        ps[2].grad.zero_()
        gs = [p.grad.to(f64) for p in ps]
        optimizer.step()
        for part in split if rule is reference.clipped_adam_of_2019 else [slice(None)]:
            rule(exact[part], gs[part], states[part], t, **options)
    assert_close([p.to(f64) for p in ps], exact, rtol=2e-5, atol=1e-6)
    for group in optimizer.param_groups:
        assert group == group | {key: options[key] for key in options if key in group}


def takes(name, option):
    return option in inspect.signature(getattr(optimizers, name)).parameters


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        *((n, {"amsgrad": True}, "AMSGrad") for n in OPTIMIZERS if takes(n, "amsgrad")),
        ("FusedNovoGrad", {"norm_type": 1}, "norm_type"),
        ("FusedAdam", {"master_weights": True}, "capturable"),
        ("FusedAdam", {"eps_inside_sqrt": True}, "eps_mode=0"),
        ("FusedAdam of contrib", {"eps_inside_sqrt": True}, "eps_mode=0"),
        ("FusedSGD", {}, "pass lr"),
    ],
)
def test_what_they_refuse(name, options, error):
    """Besides what the classes of ampfuse.optim refuse."""
    expected = ValueError if name == "FusedSGD" else RuntimeError
    with pytest.raises(expected, match=error):
        kind_of(name, **options)(start())


@pytest.mark.parametrize("name", ["grads", "output_params", "scale", "grad_norms"])
def test_arguments_that_apex_gave_up(name):
    with pytest.raises(RuntimeError, match=name):
        optimizers.FusedAdam(start()).step(**{name: 1})
    with pytest.raises(TypeError, match="nonsense"):
        optimizers.FusedAdam(start()).step(nonsense=1)


@pytest.mark.parametrize("name", NAMES)
def test_closures_run_with_gradients_and_return_the_loss(name):
    ps = start()
    optimizer = make(name, ps)

    def closure():
        assert torch.is_grad_enabled()  # apex's mixed precision LAMB had it off
        optimizer.zero_grad()
        loss = sum(p.pow(2).sum() for p in ps)
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first
    assert optimizer.step() is None


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("drops", [True, False])
def test_zero_grad_does_what_set_grad_none_says(name, drops):
    """In the constructor, or assigned later."""
    ps = start()
    has_option = takes(name, "set_grad_none")
    optimizer = make(name, ps, **({"set_grad_none": drops} if has_option else {}))
    drops |= not has_option

    def assert_zero_grad(dropped, **given):
        train(optimizer, range(1, 2))
        optimizer.zero_grad(**given)
        assert [p.grad is None for p in ps] == [dropped] * len(ps)
        assert dropped or not any(p.grad.any() for p in ps)

    assert_zero_grad(drops)
    assert_zero_grad(True, set_to_none=True)
    assert_zero_grad(False, set_to_none=False)
    if has_option:
        optimizer.set_grad_none = not drops
        assert_zero_grad(not drops)


@pytest.mark.parametrize("level", [f32, f16, bf16, "O0", "O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize("name", NAMES)
def test_they_train_and_resume_with_the_same_bits(name, level):
    """NovoGrad raised KeyError in apex's initialize, and its state crashed; half moments and lost
    masters gave other weights. Without amp, apex cast FP32 moments to the type of the parameters,
    and FusedAdam read them as FP32 then.
    """
    of = {"FusedSGD": {"lr": 0.1, "momentum": 0.9}}.get(name, {"lr": 0.02})
    model, optimizer = started_by_apex(kind_of(name), level, **of)
    losses = train_by_apex(model, optimizer, 3)
    things = (model, optimizer, amp) if isinstance(level, str) else (model, optimizer)
    saved = [copy.deepcopy(thing.state_dict()) for thing in things]
    losses += train_by_apex(model, optimizer, 3)
    assert losses[-1] < losses[0]
    again, resumed = started_by_apex(kind_of(name), level, **of)
    for thing, state in zip((again, resumed, amp), saved, strict=False):
        thing.load_state_dict(state)
    states = resumed.state_dict()["state"].values()
    assert {value.dtype for entry in states for value in entry.values()} == {f32}
    train_by_apex(again, resumed, 3)
    assert_same_bits(snapshot(resumed), snapshot(optimizer))


# The entries of a group in apex's classes.
MOMENTS = "bias_correction betas eps"
GROUPS = {
    "FusedSGD": "momentum dampening nesterov",
    "FusedAdam": MOMENTS,
    "FusedAdagrad": "eps",
    "FusedNovoGrad": f"{MOMENTS} grad_averaging norm_type init_zero",
    "FusedLAMB": f"{MOMENTS} grad_averaging max_grad_norm",
    "FusedMixedPrecisionLamb": f"{MOMENTS} grad_averaging max_grad_norm",
}


def as_apex(name, optimizer):
    """The state of `optimizer`, FP32 and of one group, as apex's class of that name saved it."""
    state_dict = copy.deepcopy(optimizer.state_dict())
    state, (group,) = state_dict["state"], state_dict["param_groups"]
    steps = [entry.pop("step", None) for entry in state.values()]
    group = {key: group[key] for key in ("params", "lr", "weight_decay", *GROUPS[name].split())}
    if name not in ("FusedSGD", "FusedAdagrad"):
        group["step"] = int(steps[0])
    if name == "FusedMixedPrecisionLamb":
        group["step"] = torch.tensor([group["step"]], dtype=torch.int32)
    if name == "FusedNovoGrad":
        norms = [entry.pop("exp_avg_norm") for entry in state.values()]
        group["exp_avg_sq"] = [torch.empty(0), torch.stack(norms)]
    return {"state": state, "param_groups": [group]}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_of_apex_goes_on(name):
    ps = start()
    optimizer = make(name, ps, weight_decay=0.1)  # so that the mode of the decay counts
    train(optimizer, range(1, 5))
    saved = as_apex(name, optimizer)
    untouched = copy.deepcopy(saved)
    again = copy.deepcopy(ps)
    resumed = make(name, again)
    resumed.load_state_dict(saved)
    assert str(saved) == str(untouched)
    train(optimizer, range(5, 7))
    train(resumed, range(5, 7))
    assert_close(ps, again, rtol=1e-6, atol=1e-8)  # apex's lr of FP32 is not the number's


def test_a_state_of_apex_without_moments():
    """Saved before the first step: there is a count alone."""
    optimizer = make("FusedAdam", ps := start())
    train(optimizer, range(1, 5))
    fresh = make("FusedAdam", ps)
    fresh.load_state_dict({**as_apex("FusedAdam", optimizer), "state": {}})
    train(fresh, range(1, 2))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_of_other_groups_is_refused(name):
    ps = start()
    several, one = make(name, [{"params": [p]} for p in ps]), make(name, ps[:1])
    train(several, range(1, 5))
    for optimizer, other in ((several, one), (one, several)):
        before = snapshot(optimizer)
        with pytest.raises(ValueError, match="different number of parameter groups"):
            optimizer.load_state_dict(other.state_dict())
        assert_same_bits(snapshot(optimizer), before)


@pytest.mark.parametrize("name", ["FusedLAMB", "FusedAdam"])
def test_a_recipe_edits_the_state_before_it_loads_it(name):
    """Between the phases of BERT: steps, rate and keys of the recipe's own."""
    ps = start()
    optimizer = make(name, ps)
    train(optimizer, range(1, 5))
    saved = copy.deepcopy(optimizer.state_dict())
    for key in saved["state"]:
        saved["state"][key]["step"] = 0
    for group in saved["param_groups"]:
        group.update(step=0, t_total=10, lr=0.5)
    optimizer.load_state_dict(saved)
    train(optimizer, range(1, 2))
    assert [float(optimizer.state[p]["step"]) for p in ps] == [1.0] * len(ps)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["t_total"] == 10


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n not in ("FusedSGD", "FusedAdagrad")])
def test_groups_know_their_step(name):
    """Schedules of BERT's recipes ask a group, at once after resuming too."""
    ps = start()
    optimizer = make(name, [{"params": ps[:2]}, {"params": []}])
    assert ("step" in optimizer.param_groups[0]) == (name == "FusedMixedPrecisionLamb")
    for t, present in enumerate(((0, 1), (1,), (1,), ()), start=1):
        give_gradients(ps[:2], t)
        for i in {0, 1} - set(present):
            ps[i].grad = None
        optimizer.step()
        assert int(optimizer.param_groups[0]["step"]) == min(t, 3)
    optimizer.add_param_group({"params": ps[2:]})
    train(optimizer, range(1, 2))
    empty = 0 if name == "FusedMixedPrecisionLamb" else -1
    assert [int(group.get("step", -1)) for group in optimizer.param_groups] == [4, empty, 1]
    resumed = make(name, [{"params": start()[:2]}, {"params": []}, {"params": start()[2:]}])
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert [int(group.get("step", -1)) for group in resumed.param_groups] == [4, empty, 1]


@pytest.mark.parametrize("name", [*OPTIMIZERS, "FusedAdam of contrib", "FusedSGD of contrib"])
def test_hooks_run_once_a_step(name):
    """Classes of which there are instances have hooks of torch's in their step: here all bases."""
    public = [*vars(optim).values(), *(vars(optimizers)[each] for each in optimizers.__all__)]
    for cls in reversed(kind_of(name).func.__mro__):
        if cls in public and cls is not optim.AmpOptimizer:
            cls(start(), lr=0.1)
    optimizer, calls = make(name, start()), []
    optimizer.register_step_pre_hook(lambda *args: calls.append("before"))
    optimizer.register_step_post_hook(lambda *args: calls.append("after"))
    optimizer.step()
    assert calls == ["before", "after"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("name", NAMES)
def test_copies_keep_what_the_constructor_said(name, copied):
    options = {"set_grad_none": name == "FusedSGD"}  # not the default
    if name == "FusedMixedPrecisionLamb":
        options = {"reduced_precision_dtype": f16, "step": 3}
    if name == "FusedSGD":
        options |= {"materialize_master_grads": False, "wd_after_momentum": True}
    optimizer = make(name, start(f16), **options)
    other = copied(optimizer)
    inherited = vars(make(name, start())).keys() & vars(optim.AdamW(start())).keys()
    for key in vars(optimizer).keys() - inherited:
        assert vars(other)[key] == vars(optimizer)[key], key
    for each in (optimizer, other):
        train(each, range(1, 5))
    assert_same_bits(snapshot(other), snapshot(optimizer))


def test_novograd_refuses_norms_of_other_parameters():
    optimizer = make("FusedNovoGrad", start())
    train(optimizer, range(1, 5))
    saved = as_apex("FusedNovoGrad", optimizer)
    with pytest.raises(ValueError, match="match the size"):
        make("FusedNovoGrad", start()[:2]).load_state_dict(saved)
    saved["param_groups"][0]["exp_avg_sq"].reverse()
    with pytest.raises(ValueError, match="norms of 3"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("dtype", [f16, bf16])
@pytest.mark.parametrize("name", ["FusedAdam", "FusedMixedPrecisionLamb"])
def test_masters(name, dtype):
    """Groups added later have masters too. In apex such groups were never stepped, and FusedAdam
    stepped bfloat16 parameters without masters.
    """
    options = {"reduced_precision_dtype": dtype}
    if name == "FusedAdam":
        options = {"capturable": True, "master_weights": True}
    ps = start(dtype)
    optimizer = make(name, ps[:1], **options)
    train(optimizer, range(1, 2))
    optimizer.add_param_group({"params": ps[1:]})
    before = copy.deepcopy(ps)
    train(optimizer, range(2, 5))
    for p, b in zip(ps, before, strict=True):
        master = optimizer.state[p]["master_param"]
        assert not torch.equal(p, b)
        assert torch.equal(master.to(dtype), p)
        assert not torch.equal(master, p.float())


def test_sgd_requires_a_learning_rate_of_groups_added_later():
    optimizer = optimizers.FusedSGD([{"params": start(), "lr": 0.1}])
    for each in (optimizer, copy.deepcopy(optimizer)):
        with pytest.raises(ValueError, match="learning rate"):
            each.add_param_group({"params": start()})
        each.add_param_group({"params": start(), "lr": 0.2})
        assert [group["lr"] for group in each.param_groups] == [0.1, 0.2]
    with pytest.raises(TypeError, match="iterable of Tensors"):
        optimizers.FusedSGD(torch.ones(2, requires_grad=True), lr=0.1)


def test_novograd_gives_each_parameter_its_norm():
    """apex listed those of half parameters first, group by group, of those that had a gradient."""
    ps = [nn.Parameter(torch.ones(2, dtype=d)) for d in (f16, f32, bf16, f32, f32)]
    optimizer = optimizers.FusedNovoGrad([{"params": ps[:3]}, {"params": ps[3:]}], norm_type=0)
    state = {i: {"exp_avg": torch.zeros(2)} for i in range(4)}
    norms = [[torch.tensor([1.0, 3.0]), torch.tensor([2.0])], [torch.ones(0), torch.tensor([4.0])]]
    groups = [
        {"params": ids, "lr": 0.1, "step": 7, "norm_type": 0, "exp_avg_sq": of_group}
        for ids, of_group in zip(([0, 1, 2], [3, 4]), norms, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    assert [float(optimizer.state[p]["exp_avg_norm"]) for p in ps[:4]] == [1.0, 2.0, 3.0, 4.0]
    for p in ps[:4]:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    norms = [float(optimizer.state[p]["exp_avg_norm"]) for p in ps[:4]]
    assert norms == pytest.approx([0.999, 1.998, 2.997, 3.996])
    assert [float(optimizer.state[p]["step"]) for p in ps[:4]] == [8.0] * 4


def test_mixed_precision_lamb():
    """Its masters see what a broadcast does before the first step."""
    ps = start(f16)
    optimizer = optimizers.FusedMixedPrecisionLamb(ps, lr=0.0, step=3)
    optimizer.reduced_precision_dtype = f16
    with torch.no_grad():
        for p in ps:
            p.fill_(0.5)
    train(optimizer, range(1, 2))
    for p in ps:
        assert optimizer.state[p]["step"].item() == 4
        assert (optimizer.state[p]["master_param"] == 0.5).all()
        assert (p == 0.5).all()


def test_mixed_precision_lambs_rate_and_step_are_tensors():
    """Of each group its own, into which a schedule writes; also after a checkpoint of numbers."""
    ps = start()
    optimizer = optimizers.FusedMixedPrecisionLamb(ps[:1], lr=0.5, step=3)
    optimizer.add_param_group({"params": ps[1:], "lr": 0.25})
    numbers = copy.deepcopy(optimizer.state_dict())
    for group in numbers["param_groups"]:
        group["lr"] = group["lr"].item()
        del group["step"]
    for load in (lambda: None, lambda: optimizer.load_state_dict(numbers)):
        load()
        groups = optimizer.param_groups
        for name, values in (("lr", [0.5, 0.25]), ("step", [3.0, 3.0])):
            tensors = [group[name] for group in groups]
            assert [t.item() for t in tensors] == values
            assert tensors[0].dtype == f32
            assert len({t.data_ptr() for t in tensors}) == 2
    groups[0]["lr"].zero_()
    before = copy.deepcopy(ps)
    train(optimizer, range(1, 2))
    assert [torch.equal(p, b) for p, b in zip(ps, before, strict=True)] == [True, False, False]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    rate = groups[1]["lr"]
    schedule.step()
    assert (groups[1]["lr"] is rate, rate.item()) == (True, 0.125)


@pytest.mark.parametrize("dtype", [f32, f16])
@pytest.mark.parametrize("largest", [1.0, math.inf])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_mixed_precision_lamb_skips_overflows_without_a_scaler(bad, largest, dtype):
    ps = start(dtype)
    half = dtype if dtype == f16 else None
    optimizer = make(
        "FusedMixedPrecisionLamb", ps, max_grad_norm=largest, reduced_precision_dtype=half
    )
    train(optimizer, range(1, 3))
    before = snapshot(optimizer)
    give_gradients(ps, 3)
    ps[1].grad[2] = bad
    optimizer.step()
    assert_same_bits(snapshot(optimizer), before)
    assert optimizer.param_groups[0]["step"] == 2


# --- what 2018 and 2019 had -----------------------------------------------------------------------


def test_contribs_fused_adam_steps_on_gradients_that_it_is_given():
    """Scaled half ones, as lists for each group; half parameters receive the result."""
    ps = start()
    twins = copy.deepcopy(ps)
    first, second = (give_gradients(ps, t) for t in (1, 2))
    halves = [torch.empty_like(p, dtype=f16) for p in ps]
    options = {"lr": 0.05, "bias_correction": False, "max_grad_norm": 1.0}
    optimizer = apex.contrib.optimizers.FusedAdam(ps, **options)
    plain = apex.contrib.optimizers.FusedAdam(twins, **options)
    assert is_fused(optimizer)
    with pytest.raises(ValueError, match="grads has 2 tensors for 3 parameters"):
        optimizer.step(grads=first[:2])
    grads, own = [g.half() * 8 for g in first], [p.grad for p in ps]
    optimizer.step(grads=[grads], output_params=[halves], scale=8.0, grad_norms=[1.0])
    for q, g in zip(twins, grads, strict=True):
        q.grad = g.float() / 8
    plain.step()
    assert_same(ps, twins)
    assert_same(halves, [p.half() for p in ps])
    assert all(p.grad is g for p, g in zip(ps, own, strict=True))
    # Its own are divided, too, and stay as they were.
    scaled = [8 * g for g in second]
    for q, g in zip(twins, scaled, strict=True):
        q.grad = g
    optimizer.step(grads=[[g.clone() for g in scaled]], scale=8.0)
    plain.step(scale=8.0)
    assert_same(ps, twins)
    assert all(q.grad is g for q, g in zip(twins, scaled, strict=True))


def test_contribs_fused_adam_scales_the_gradients_of_its_closure():
    ps = start()
    twins = copy.deepcopy(ps)
    optimizer, plain = (apex.contrib.optimizers.FusedAdam(each, lr=0.05) for each in (ps, twins))
    for p in ps:
        p.grad = torch.full_like(p, 7.0)  # of an earlier pass

    def closure():
        assert torch.is_grad_enabled()
        give_gradients(ps, 1, scale=8.0)
        return "loss"

    assert optimizer.step(closure, scale=8.0) == "loss"
    gradients = give_gradients(twins, 1)
    plain.step()
    assert_same(ps, twins)
    assert_same([p.grad for p in ps], [8 * g for g in gradients])
    with pytest.raises(ValueError, match="output_params has 1 tensors for 3 parameters"):
        optimizer.step(output_params=[torch.empty(1)])


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [("FusedAdam", {"max_grad_norm": 0.5}, 1.0), ("FusedSGD", {}, 4.0)],
)
def test_contribs_steps_divide_by_their_scale(kind, options, told):
    """And by the scale that it was told; what is clipped by group are copies."""
    ps = start()
    twins = copy.deepcopy(ps)
    make = functools.partial(getattr(apex.contrib.optimizers, kind), lr=0.05, **options)
    optimizer, plain = (make([{"params": p[:1]}, {"params": p[1:]}]) for p in (ps, twins))
    for t in (1, 2):
        scaled = [8 * told * g for g in give_gradients(twins, t)]
        for p, g in zip(ps, scaled, strict=True):
            p.grad = g.clone()
        optimizer.most_recent_scale, optimizer.scale_set_by_backward = told, True
        optimizer.step(scale=8.0)
        plain.step()
        assert_same([p.grad for p in ps], scaled)
        assert (optimizer.most_recent_scale, optimizer.scale_set_by_backward) == (1.0, False)
    for p, twin in zip(ps, twins, strict=True):
        assert_close(p, twin) if options else assert_same(p, twin)


@pytest.mark.parametrize("kind", ["FusedAdam", "FusedSGD"])
def test_contribs_optimizers_divide_half_gradients_in_float(kind):
    make = getattr(apex.contrib.optimizers, kind)
    halves = [nn.Parameter(torch.ones(4, dtype=f16))]
    floats = [nn.Parameter(torch.ones(4))]
    optimizer, plain = (make(each, lr=64.0) for each in (halves, floats))
    halves[0].grad = torch.full((4,), 1e-3, dtype=f16)
    floats[0].grad = halves[0].grad.float()
    for each in (optimizer, plain):
        each.step(scale=2.0**16)
    assert_same(halves, [p.to(f16) for p in floats])
    assert (plain.param_groups[0]["params"][0] != 1).all()


@pytest.mark.parametrize("half", [False, True])
def test_clip_grad_norm(half):
    """Norms of half gradients in FP32: they may be larger than a half number is."""
    ps = [nn.Parameter(torch.zeros(400).to(f16 if half else f32)) for _ in range(2)]
    for p in ps:
        p.grad = torch.full_like(p, 6e4)
    norm = apex.contrib.clip_grad.clip_grad_norm_(ps, 2.0)
    assert_close(norm, torch.tensor(6e4 * 800**0.5))
    assert_close(
        torch.cat([p.grad for p in ps]).float().norm(), torch.tensor(2.0), rtol=1e-2, atol=0
    )
