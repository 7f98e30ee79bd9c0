"""ampfuse.optim is torch.optim: what users do to an optimizer, done to ours and to torch's."""

import copy
import inspect
import itertools
import operator
import pickle
import weakref

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from torch import nn

import cases
from ampfuse import optim
from cases import (
    KINDS,
    OPTIMIZERS,
    bf16,
    copy_weights,
    f16,
    f32,
    make,
    make_torch,
    parameters,
    params_of,
    snapshot,
    through_a_file,
    train,
    weights,
)

SHAPES = ((5,), (3, 4), (2, 3, 2, 2), (), (1,), (3, 0))


class Pair:
    """The same parameters in ours and in torch's optimizer of the table's row `name`."""

    def __init__(self, name, params=None, torch_options=None, **options):
        params = parameters(SHAPES) if params is None else params
        twins = [nn.Parameter(param.detach().float().clone()) for param in params]
        self.ours = make(name, params, **options)
        self.torch = make_torch(
            name, twins, **(options if torch_options is None else torch_options)
        )

    @property
    def params(self):
        return params_of(self.ours)

    def pairs(self):
        return zip(self.params, params_of(self.torch), strict=True)

    def gradients(self, without=(), scale=1.0):
        for i, (param, twin) in enumerate(self.pairs()):
            param.grad = None if i in without else torch.randn_like(param) * scale
            twin.grad = None if i in without else param.grad.float().clone()

    def steps(self, count=3, without=()):
        for _ in range(count):
            self.gradients(without)
            self.ours.step()
            fill_late(self.torch)
            self.torch.step()

    def both(self, action):
        action(self.ours)
        action(self.torch)

    def check(self, tolerance=1e-5, skipped=False):
        """Parameters and every state agree within the rounding of FP32."""
        for param, twin in self.pairs():
            close(param, twin, tolerance)
            states = self.ours.state.get(param, {}), self.torch.state.get(twin, {})
            found, expected = ({k: v for k, v in s.items() if v is not None} for s in states)
            if skipped:  # also for such a step states are made: zeros
                expected = {key: torch.zeros_like(found[key]) for key in found} | expected
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                close(found[key], value, tolerance)


def fill_late(optimizer):
    """The Adagrad of torch 2.11 has states for the parameters it was made with, and no others."""
    if isinstance(optimizer, torch.optim.Adagrad):
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None and not optimizer.state[param]:
                    value = group["initial_accumulator_value"]
                    optimizer.state[param] = {
                        "step": torch.tensor(0.0),
                        "sum": torch.full_like(param.detach(), value),
                    }


def close(found, expected, tolerance=1e-5):
    bounds = {"rtol": tolerance, "atol": tolerance / 10}
    torch.testing.assert_close(found.detach(), expected.detach(), check_stride=False, **bounds)


@pytest.fixture(params=OPTIMIZERS)
def name(request):
    return request.param


kinds = pytest.mark.parametrize("kind", KINDS)
torch_kinds = pytest.mark.parametrize("kind", cases.TORCH_KINDS)


# --- state dicts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("into", ["ours", "torch"])
def test_state_dicts_load_both_ways(name, into):
    """They have the same keys too."""
    pair = Pair(name)
    pair.steps()
    saved = [optimizer.state_dict() for optimizer in (pair.ours, pair.torch)]
    assert saved[0]["param_groups"] == saved[1]["param_groups"]
    for i in range(len(SHAPES)):
        assert saved[0]["state"].get(i, {}).keys() == saved[1]["state"].get(i, {}).keys()
    source, target, maker = pair.torch, pair.ours, make
    if into == "torch":
        source, target, maker = pair.ours, pair.torch, make_torch
    copy_weights(params_of(source), params_of(target))
    setattr(pair, into, maker(name, params_of(target)))
    getattr(pair, into).load_state_dict(through_a_file(source.state_dict()))
    pair.steps()
    pair.check()


@kinds
@pytest.mark.parametrize("used", [False, True])
def test_loading_without_masters_takes_them_from_the_model(kind, used):
    """A torch state dict, into a fresh optimizer and into one that has masters already."""
    plain = make_torch(kind, parameters([(50,)], bf16))
    train(plain, range(3))
    params = copy.deepcopy(params_of(plain))
    optimizer = make(kind, params, master_weights=True)
    if used:
        train(optimizer, range(3))
    copy_weights(params_of(plain), params)
    expected = make(kind, copy.deepcopy(params), master_weights=True)
    for each in (optimizer, expected):
        each.load_state_dict(plain.state_dict())
        train(each)
    cases.assert_same_bits(snapshot(optimizer), snapshot(expected))
    assert "master_param" in optimizer.state_dict()["state"][0]


# --- step, closures, hooks -----------------------------------------------------------------------


def test_a_closure_runs_with_gradients_as_in_torch(name):
    pair = Pair(name)
    seen = []

    def closure_of(params):
        def closure():
            assert torch.is_grad_enabled()
            for param in params:
                param.grad = None
            loss = sum((param**2).sum() for param in params)
            loss.backward()
            seen.append(float(loss.detach()))
            return loss

        return closure

    for _ in range(3):
        for optimizer in (pair.ours, pair.torch):
            loss = optimizer.step(closure_of(params_of(optimizer)))
            assert float(loss.detach()) == seen[-1]
        assert seen[-2] == pytest.approx(seen[-1], rel=1e-5)
    assert len(seen) == 6
    pair.check()
    assert pair.ours.step() is None


def test_a_load_hook_that_replaces_the_state_dict():
    pair = Pair("adamw")
    pair.steps(2)
    saved = copy.deepcopy(pair.ours.state_dict())
    pair.ours.register_load_state_dict_pre_hook(lambda optimizer, wrapped: wrapped["inner"])
    pair.steps(1)
    copy_weights(pair.params, params_of(pair.torch))
    pair.ours.load_state_dict({"inner": saved})
    pair.torch.load_state_dict(copy.deepcopy(saved))
    pair.steps(2)
    pair.check()


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_signatures_are_torchs_and_options(name):
    ours = inspect.signature(getattr(optim, name)).parameters
    torchs = inspect.signature(getattr(torch.optim, name)).parameters
    for key, parameter in torchs.items():
        assert (ours[key].default, ours[key].kind) == (parameter.default, parameter.kind)
    assert ours.keys() - torchs.keys() == {"options"}


@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        *itertools.product(cases.TORCH_KINDS, ("foreach", "fused")),
        ("adam-all", "capturable"),
        ("adamw", "capturable"),
    ],
)
def test_torchs_choices_of_implementation_are_accepted(kind, flag):
    pair = Pair(kind, torch_options={"foreach": False}, **{flag: True})
    pair.steps()
    pair.check()


def test_adam_decouples_weight_decay_on_request():
    pair = Pair("adam-decay", decoupled_weight_decay=True)
    pair.steps()
    pair.check()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_is_torchs(set_to_none):
    pair = Pair("sgd-momentum")
    pair.steps(1)
    pair.both(lambda optimizer: optimizer.zero_grad(set_to_none))
    for param in pair.params:
        assert (param.grad is None) if set_to_none else not param.grad.any()
    pair.both(lambda optimizer: optimizer.step())
    pair.check()


# --- parameters and groups -----------------------------------------------------------------------


def test_a_parameter_without_gradient_keeps_its_own_step_count(name):
    """Frozen and thawed, too; where none has a gradient, no step is made."""
    pair = Pair(name)
    for without in (range(6), (), (0,), (0, 2), (1, 2, 3, 4, 5), (), (5,)):
        for i, param in enumerate(pair.params):
            param.requires_grad_(i not in without)
        pair.steps(2, without)
        pair.check()


def halve_states(optimizer, new):
    for state in optimizer.state.values():
        for key, value in state.items():
            if key != "step" and value is not None:
                state[key] = value * 0.5


def update_group(optimizer, new):
    group = optimizer.param_groups[0]
    group.update(lr=group["lr"] * 0.5, weight_decay=0.03)


# Changes that users and wrappers make between two steps, for `Sequences`: they take
# parameters out of the groups to freeze layers, restart momentum, exchange state tensors.
BETWEEN = {
    "add a group": lambda o, new: o.add_param_group({"params": [new], "lr": 1e-3}),
    "replace a parameter": lambda o, new: operator.setitem(o.param_groups[0]["params"], 1, new),
    "exchange the data of a parameter": lambda o, new: setattr(params_of(o)[1], "data", new.data),
    "remove the first parameter": lambda o, new: o.param_groups[0]["params"].pop(0),
    "remove the last parameter": lambda o, new: o.param_groups[0]["params"].pop(-1),
    "forget the state": lambda o, new: o.state.clear(),
    "forget the state of one": lambda o, new: o.state.pop(params_of(o)[1], None),
    "empty the state of one": lambda o, new: o.state[params_of(o)[1]].clear(),
    "replace the state": halve_states,
    "change hyper-parameters": update_group,
}


def test_rows_that_are_made_anew_hold_none_of_those_before():
    optimizer = make("adamw", parameters([(3,)]))
    train(optimizer)
    table = weakref.ref(optimizer.param_table())
    optimizer.param_groups[0]["params"] = parameters([(3,)])
    train(optimizer)
    assert table() is None


def test_a_state_of_another_shape_is_refused():
    pair = Pair("adamw")
    pair.steps()
    state = pair.ours.state[pair.params[1]]
    right, state["exp_avg"] = state["exp_avg"], torch.zeros(3)
    with pytest.raises(ValueError, match=r"exp_avg of .*, got \(3,\)"):
        pair.ours.step()
    state["exp_avg"] = right
    pair.steps()
    pair.check()  # the refused step changed nothing


@pytest.mark.parametrize("dtype", [f32, torch.float64])
@pytest.mark.parametrize("kind", [*KINDS, "sgd"])
def test_a_rate_in_a_tensor_may_change(kind, dtype):
    lr = torch.tensor(0.01, dtype=dtype)
    pair = Pair(kind, lr=lr, torch_options={"lr": lr.clone(), "foreach": False})
    pair.steps()
    pair.both(lambda optimizer: optimizer.param_groups[0]["lr"].mul_(0.5))
    pair.steps()
    pair.both(lambda optimizer: optimizer.param_groups[0].update(lr=torch.tensor(0.1)))
    pair.steps()
    pair.check()


# --- learning-rate schedulers --------------------------------------------------------------------

SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "one-cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(
        o, 0.1, total_steps=20, cycle_momentum=bool({"momentum", "betas"} & o.defaults.keys())
    ),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (t + 1)),
    "warm-up": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [3],
    ),
}


def follow(pair, *schedules):
    for _ in range(8):
        pair.steps(1)
        for schedule in schedules:
            schedule.step()
        assert pair.ours.param_groups[0]["lr"] == pair.torch.param_groups[0]["lr"]
    pair.check()


@pytest.mark.filterwarnings("error:Detected call of")
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_torchs_schedulers_drive_ours(scheduler):
    pair = Pair("adamw")
    follow(pair, SCHEDULERS[scheduler](pair.ours), SCHEDULERS[scheduler](pair.torch))


@pytest.mark.filterwarnings("error:Detected call of")
@pytest.mark.parametrize("built", ["before", "after"])
@torch_kinds
def test_schedulers_drive_an_upgraded_optimizer(kind, built):
    """A scheduler wraps optimizer.step; one built earlier has wrapped the old class's."""
    pair = Pair(kind)
    pair.ours = make_torch(kind, pair.params)
    schedules = [SCHEDULERS["step"](pair.ours)] if built == "before" else []
    optim.upgrade(pair.ours, master_weights=False)
    schedules += [SCHEDULERS["step"](pair.ours)] if built == "after" else []
    follow(pair, *schedules, SCHEDULERS["step"](pair.torch))
    assert isinstance(pair.ours, getattr(optim, type(pair.torch).__name__))
    train(pickle.loads(pickle.dumps(copy.deepcopy(pair.ours))))


# --- memory layouts ------------------------------------------------------------------------------


@kinds
def test_channels_last_parameters_step_as_contiguous_ones(kind):
    params = parameters([(4, 3, 2, 2), (5, 1, 3, 3)])
    pair = Pair(kind, [nn.Parameter(p.to(memory_format=torch.channels_last)) for p in params])
    pair.torch = make_torch(kind, copy.deepcopy(params))
    pair.steps()
    pair.check()
    # A state saved from contiguous parameters, and back.
    pair.ours.load_state_dict(through_a_file(pair.torch.state_dict()))
    pair.torch.load_state_dict(through_a_file(pair.ours.state_dict()))
    pair.steps()
    pair.check()
    assert pair.params[0].is_contiguous(memory_format=torch.channels_last)


@kinds
def test_gradients_of_other_strides_step_as_in_torch(kind):
    pair = Pair(kind, parameters([(6, 4), (6, 4), (8,)]))
    for _ in range(3):
        grads = [torch.randn(4, 6).t(), torch.randn(1).expand(6, 4), torch.randn(24)[::3]]
        for (param, twin), grad in zip(pair.pairs(), grads, strict=True):
            param.grad, twin.grad = grad, grad.clone()
        kept = [grad.clone() for grad in grads]
        pair.both(lambda optimizer: optimizer.step())
        # Gradients are never rewritten.
        assert all(torch.equal(p.grad, g) for p, g in zip(pair.params, kept, strict=True))
    pair.check()


@kinds
def test_parameters_may_be_views(kind):
    """Flattened storage: parameters side by side in one tensor, off alignment."""
    flat = torch.randn(101)
    edges = flat[[0, *range(39, 101)]].clone()
    pair = Pair(kind, [flat[1:8].requires_grad_(), flat[8:39].view(31).requires_grad_()])
    pair.steps()
    pair.check()
    assert torch.equal(flat[[0, *range(39, 101)]], edges)


def test_a_step_between_forward_and_backward_is_noticed():
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    train(optim.SGD([weight], lr=0.1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("size", [1, 7, 8, 17, 2049])
def test_lamb_without_eps_divides_no_zero_by_zero(size):
    """Neither padding after the last element nor an element without gradient divides 0 by 0."""
    torch.manual_seed(size)
    start, grad = torch.randn(size), torch.randn(size)
    grad[size // 2 + 1 :: 3] = 0
    weights = []
    for eps in (0.0, 1e-30):
        param = start.clone().requires_grad_()
        param.grad = grad
        optim.LAMB([param], lr=1e-2, eps=eps, weight_decay=0.1).step()
        weights.append(param.detach())
    torch.testing.assert_close(*weights, rtol=1e-6, atol=0)
    assert not torch.equal(weights[0], start)


# --- torch's own GradScaler ----------------------------------------------------------------------


@pytest.mark.covers(1)
@pytest.mark.parametrize(
    ("dtype", "clip"),  # it unscales no half gradients as we do, for a clipping by hand
    [*itertools.product((f32, f16, bf16), (None, "in the step")), (f32, "by hand")],
)
@kinds
def test_torchs_grad_scaler_drives_ours(kind, dtype, clip):
    """FP16 gradients, which it refuses to unscale, too: masters go as FP32 weights do."""
    norm = 0.5 if clip == "in the step" else None
    params = parameters(SHAPES, dtype)
    pair = Pair(kind, params, {}, master_weights=dtype != f32, max_grad_norm=norm)
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3) for _ in range(2)]
    for step in range(6):
        scale = scalers[0].get_scale()
        pair.gradients(scale=scale)
        if step == 4:
            pair.params[0].grad[0] = params_of(pair.torch)[0].grad[0] = torch.inf
        for optimizer, scaler in zip((pair.ours, pair.torch), scalers, strict=True):
            scaler.scale(torch.ones(()))  # starts the scaler
            if clip == "by hand" or (clip and optimizer is pair.torch):
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params_of(optimizer), 0.5)
            scaler.step(optimizer)
            scaler.update()
        assert pair.ours.last_step.skipped == (step == 4)
        assert pair.ours.last_step.loss_scale == (1.0 if clip == "by hand" else scale)
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert not {"grad_scale", "found_inf"} & vars(pair.ours).keys()
    for param, twin in pair.pairs():
        close(pair.ours.state[param].get("master_param", param), twin)
    if dtype == f32:
        pair.check()


# --- masters of a step that is not ours ----------------------------------------------------------


class InCpp(torch.optim.SGD):
    """Reads gradients as an extension does: without the property that updates them."""

    @torch.no_grad()
    def step(self, closure=None):
        for param in params_of(self):
            param.sub_(torch.Tensor.grad.__get__(param))


def test_a_step_in_cpp_finds_the_gradients_of_masters():
    weight = nn.Parameter(torch.ones(3, dtype=bf16))
    optimizer = InCpp([weight])
    optim.upgrade(optimizer, master_weights=True)
    optimizer.param_table().gradients.begin_backward()
    weight.grad = torch.ones_like(weight)
    optimizer.end_backward(torch.tensor(4.0), True)
    optimizer.step()
    assert torch.equal(weight.detach(), torch.full_like(weight, 0.75))


# --- any sequence ---------------------------------------------------------------------------------

SOME_SHAPES = [(5,), (3, 4), (), (1,), (0,), (2, 3, 2, 2), (17,)]
# A skipped first step makes states of zeros; those of "adagrad-all" start at another value.
ALSO = {"adagrad-decay", "sgd", "sgd-dampening", "adam-decay", "adamw-amsgrad"}
NAMES = sorted({*KINDS, *ALSO} - {"adagrad-all"})
OF_ANY = ("add a group", "forget the state", "replace the state", "change hyper-parameters")
rates = st.sampled_from([1e-3, 1e-2, 0.1])


class Sequences(RuleBasedStateMachine):
    """Whatever one does to an optimizer, in whatever order: ours stays with torch's."""

    @initialize(name=st.sampled_from(NAMES), seed=st.integers(0, 9), count=st.integers(1, 5))
    def build(self, name, seed, count):
        torch.manual_seed(seed)
        self.name, self.removed = name, []
        params = parameters(SOME_SHAPES[:count])
        self.pair = Pair(name, params, {"foreach": False}, skip_nonfinite=True)

    def groups(self):
        return [*self.pair.ours.param_groups, *self.pair.torch.param_groups]

    @rule(missing=st.sets(st.integers(0, 6)), times=st.integers(1, 2))
    def step(self, missing, times):
        self.pair.steps(times, missing)
        self.check()

    def check(self):
        self.pair.check(tolerance=2e-5, skipped=True)
        assert all(torch.equal(param, value) for param, value in self.removed)

    @rule(bad=st.sampled_from([float("inf"), float("nan")]))
    def skipped_step(self, bad):
        if not any(param.numel() for param in self.pair.params):
            return
        for param in self.pair.params:
            param.grad = torch.full_like(param, bad)
        self.pair.ours.step()
        assert self.pair.ours.last_step.skipped == 1
        self.check()

    @rule(lr=rates, decay=st.sampled_from([0.0, 0.1]), tensor=st.booleans())
    def change_group(self, lr, decay, tensor):
        for group in self.groups():
            group["lr"] = torch.tensor(lr) if tensor else lr
            group["weight_decay"] = decay

    @rule(momentum=st.sampled_from([0.0, 0.5, 0.9]))
    def change_momentum(self, momentum):
        for group in self.groups():
            if "momentum" in group and not group["nesterov"]:
                group["momentum"] = momentum

    @rule(which=st.sampled_from(sorted(BETWEEN)), shape=st.sampled_from(SOME_SHAPES))
    def change(self, which, shape):
        params = self.pair.ours.param_groups[0]["params"]
        if len(params) < 2 and which not in OF_ANY:
            return
        known, new = self.pair.params, torch.randn(params[1].shape if "data" in which else shape)
        self.pair.both(lambda optimizer: BETWEEN[which](optimizer, nn.Parameter(new.clone())))
        present = set(map(id, self.pair.params))
        removed = [param for param in known if id(param) not in present]
        self.removed += zip(removed, weights(removed), strict=True)
        # torch does not save a state without its parameter, and Adagrad does not load an empty one.
        for optimizer in (self.pair.ours, self.pair.torch):
            known = {id(param) for param in params_of(optimizer)}
            for param, state in list(optimizer.state.items()):
                if id(param) not in known or not state:
                    del optimizer.state[param]

    @rule(shift=st.sampled_from([0.0, 1.0]))
    def edit_weights(self, shift):
        with torch.no_grad():
            for each in self.pair.pairs():
                for param in each:
                    param.mul_(0.5).add_(shift)

    @rule(protocol=st.sampled_from(["deepcopy", "pickle", "save"]))
    def go_on_with_a_copy(self, protocol):
        ours = self.pair.ours
        if protocol == "deepcopy":
            self.pair.ours = copy.deepcopy(ours)
        elif protocol == "pickle":
            self.pair.ours = pickle.loads(pickle.dumps(ours))
        else:
            groups = [{"params": group["params"], "lr": 1.0} for group in ours.param_groups]
            self.pair.ours = make(self.name, groups, skip_nonfinite=True)
            self.pair.ours.load_state_dict(through_a_file(ours.state_dict()))

    @rule()
    def load_from_torch(self):
        self.pair.ours.load_state_dict(copy.deepcopy(self.pair.torch.state_dict()))

    @rule()
    def load_into_torch(self):
        self.pair.torch.load_state_dict(copy.deepcopy(self.pair.ours.state_dict()))


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=200, stateful_step_count=20, deadline=None)
