"""ampfuse.optim is torch.optim: what users do to an optimizer, done to ours and to torch's."""

import copy
import inspect
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn

from ampfuse import _core, optim
from cases import (
    KINDS,
    OPTIMIZERS,
    TORCH_KINDS,
    assert_same_bits,
    bf16,
    everything,
    f16,
    f32,
    make,
    make_torch,
    same_bits,
    snapshot,
    through_a_file,
)

SHAPES = ((5,), (3, 4), (2, 3, 2, 2), (), (1,))


class Pair:
    """The same parameters in ours and in torch's optimizer of the table's row `name`."""

    def __init__(self, name, shapes=SHAPES, torch_options=None, **options):
        self.name = name
        self.params = [torch.randn(shape).requires_grad_() for shape in shapes]
        self.twins = [param.detach().clone().requires_grad_() for param in self.params]
        self.ours = make(name, self.params, **options)
        self.torch = make_torch(
            name, self.twins, **(options if torch_options is None else torch_options)
        )

    def gradients(self, without=()):
        for i, (param, twin) in enumerate(zip(self.params, self.twins, strict=True)):
            param.grad = None if i in without else torch.randn_like(param)
            twin.grad = None if i in without else param.grad.clone()

    def steps(self, count=3, without=()):
        for _ in range(count):
            self.gradients(without)
            self.ours.step()
            fill_late(self.torch)
            self.torch.step()

    def both(self, action):
        action(self.ours)
        action(self.torch)

    def check(self):
        """Parameters and every state agree within the rounding of FP32."""
        for param, twin in zip(self.params, self.twins, strict=True):
            close(param, twin)
            ours, torchs = self.ours.state.get(param, {}), self.torch.state.get(twin, {})
            assert {k for k, v in ours.items() if v is not None} == {
                k for k, v in torchs.items() if v is not None
            }
            for key, value in torchs.items():
                if value is not None:
                    close(ours[key], value)


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


def close(found, expected):
    torch.testing.assert_close(
        found.detach(), expected.detach(), rtol=1e-5, atol=1e-6, check_stride=False
    )


def clone_of(params):
    return [param.detach().clone().requires_grad_() for param in params]


@pytest.fixture(params=OPTIMIZERS)
def name(request):
    return request.param


kinds = pytest.mark.parametrize("kind", KINDS)
torch_kinds = pytest.mark.parametrize("kind", TORCH_KINDS)


# --- state dicts ---------------------------------------------------------------------------------


def test_state_dict_has_torchs_keys(name):
    pair = Pair(name)
    pair.steps()
    ours, theirs = pair.ours.state_dict(), pair.torch.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    for i, expected in theirs["state"].items():
        assert {k: (v.dtype, v.shape) for k, v in ours["state"][i].items()} == {
            k: (v.dtype, v.shape) for k, v in expected.items()
        }
    assert all(state == {} for i, state in ours["state"].items() if i not in theirs["state"])


@pytest.mark.parametrize("into", ["ours", "torch"])
def test_state_dicts_load_both_ways(name, into):
    pair = Pair(name)
    pair.steps()
    ours, theirs = (pair.ours, pair.params, make), (pair.torch, pair.twins, make_torch)
    (source, have, _), (_, params, maker) = (theirs, ours) if into == "ours" else (ours, theirs)
    state = through_a_file(source.state_dict())
    with torch.no_grad():
        for param, value in zip(params, have, strict=True):
            param.copy_(value)
    setattr(pair, into, maker(name, params))
    getattr(pair, into).load_state_dict(state)
    pair.steps()
    pair.check()


@kinds
@pytest.mark.parametrize("dtype", [f32, f16, bf16])
@pytest.mark.parametrize("used", [False, True])
def test_resume_has_the_bits_of_an_uninterrupted_run(kind, dtype, used):
    """`used`: the optimizer that loads has made steps of its own."""
    params = [torch.randn(s).to(dtype).requires_grad_() for s in SHAPES]
    optimizer = make(kind, params, master_weights=True)
    train(optimizer, params, 4)
    saved = through_a_file({"p": [p.detach() for p in params], "o": optimizer.state_dict()})
    train(optimizer, params, 4, seed=2)

    for order in ("model first", "optimizer first"):
        resumed_params = [torch.randn(s).to(dtype).requires_grad_() for s in SHAPES]
        resumed = make(kind, resumed_params, master_weights=True)
        if used:
            train(resumed, resumed_params, 2, seed=3)
        if order == "optimizer first":
            resumed.load_state_dict(copy.deepcopy(saved["o"]))  # torch's loading shares tensors
        with torch.no_grad():
            for param, value in zip(resumed_params, saved["p"], strict=True):
                param.copy_(value)
        if order == "model first":
            resumed.load_state_dict(copy.deepcopy(saved["o"]))
        train(resumed, resumed_params, 4, seed=2)
        assert_same_bits(snapshot(resumed), snapshot(optimizer))


def train(optimizer, params, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params:
            grad = torch.randn(param.shape, generator=generator)
            param.grad = grad.to(param.dtype).to(param.device)
        optimizer.step()


@kinds
def test_loading_without_masters_takes_them_from_the_model(kind):
    """A torch state dict, into a fresh optimizer and into one that has masters already."""
    params = [torch.randn(50).to(bf16).requires_grad_()]
    plain = make_torch(kind, clone_of(params))
    train(plain, plain.param_groups[0]["params"], 3)
    for used in (False, True):
        own = clone_of(params)
        optimizer = make(kind, own, master_weights=True)
        if used:
            train(optimizer, own, 3)
        with torch.no_grad():
            own[0].copy_(plain.param_groups[0]["params"][0])
        optimizer.load_state_dict(plain.state_dict())
        train(optimizer, own, 1)
        fresh = clone_of(plain.param_groups[0]["params"])
        expected = make(kind, fresh, master_weights=True)
        expected.load_state_dict(plain.state_dict())
        train(expected, fresh, 1)
        assert_same_bits(snapshot(optimizer), snapshot(expected))
        assert "master_param" in optimizer.state_dict()["state"][0]


def test_state_dict_of_another_model_is_refused():
    params = [torch.randn(4, 3).requires_grad_(), torch.randn(7).requires_grad_()]
    optimizer = make("adamw", params)
    train(optimizer, params, 2)
    before = snapshot(optimizer)
    other = [torch.randn(4, 3).requires_grad_(), torch.randn(8).requires_grad_()]
    wrong = make("adamw", other)
    train(wrong, other, 2)
    with pytest.raises(
        ValueError, match=r"exp_avg for .*\[1\].*\(8,\).*\(7,\).*Nothing was loaded"
    ):
        optimizer.load_state_dict(wrong.state_dict())
    fewer = make("adamw", other[:1])
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(fewer.state_dict())
    assert_same_bits(snapshot(optimizer), before)
    train(optimizer, params, 1)


def test_loading_does_not_tie_two_optimizers_together(name):
    """Steps of one leave the other alone, as step counts are views of one column."""
    params = clone_of([torch.randn(9)])
    first = make(name, params)
    train(first, params, 2)
    second = make(name, clone_of(params))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    before = snapshot(second)
    train(first, params, 2)
    assert_same_bits(snapshot(second), before)


# --- step, closures, hooks -----------------------------------------------------------------------


def test_closure(name):
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
        ours = pair.ours.step(closure_of(pair.params))
        theirs = pair.torch.step(closure_of(pair.twins))
        assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-5)
    assert len(seen) == 6
    pair.check()
    assert pair.ours.step() is None


def test_hooks():
    pair = Pair("adamw")
    calls = []
    pair.ours.register_step_pre_hook(lambda o, a, k: calls.append("pre"))
    pair.ours.register_step_post_hook(lambda o, a, k: calls.append("post"))
    pair.ours.register_state_dict_post_hook(lambda o, s: calls.append("saved"))
    pair.ours.register_load_state_dict_pre_hook(lambda o, s: calls.append("loading"))
    pair.ours.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
    pair.steps(2)
    assert calls == ["pre", "post"] * 2
    calls.clear()
    pair.ours.load_state_dict(pair.ours.state_dict())
    assert calls == ["saved", "loading", "loaded"]
    pair.steps(1)
    pair.check()


def test_a_load_hook_that_replaces_the_state_dict():
    pair = Pair("adamw")
    pair.steps(2)
    saved = copy.deepcopy(pair.ours.state_dict())
    pair.ours.register_load_state_dict_pre_hook(lambda optimizer, wrapped: wrapped["inner"])
    pair.steps(1)
    with torch.no_grad():
        for param, twin in zip(pair.params, pair.twins, strict=True):
            twin.copy_(param)
    pair.ours.load_state_dict({"inner": saved})
    pair.torch.load_state_dict(copy.deepcopy(saved))
    pair.steps(2)
    pair.check()


def test_no_gradients_at_all_is_no_step(name):
    pair = Pair(name)
    pair.both(lambda optimizer: optimizer.step())
    pair.check()
    pair.steps(2)
    pair.check()


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_signatures_are_torchs_and_options(name):
    ours = inspect.signature(getattr(optim, name)).parameters
    torchs = inspect.signature(getattr(torch.optim, name)).parameters
    for key, parameter in torchs.items():
        assert (ours[key].default, ours[key].kind) == (parameter.default, parameter.kind)
    assert ours.keys() - torchs.keys() == {"options"}


def test_each_option_is_an_attribute_that_starts_at_its_default():
    optimizer = optim.SGD([torch.zeros(1)])
    assert {name: getattr(optimizer, name) for name in optim.Options.__annotations__} == {
        "master_weights": False,
        "state_dtype": "fp32",
        "rounding": "nearest",
        "seed": 0,
        "ema_decay": None,
        "max_grad_norm": None,
        "skip_nonfinite": False,
        "unscale_grads": True,
    }
    given = {"max_grad_norm": 2.0, "skip_nonfinite": 1, "master_weights": 1, "unscale_grads": 0}
    optimizer = optim.SGD([torch.zeros(1)], **given)
    for one in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert {name: getattr(one, name) for name in given} == given
        assert isinstance(one.master_weights, bool)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "Lion", "LAMB", "NovoGrad"])
def test_an_unknown_option_is_refused_as_python_does(name):
    wrong = rf"^{name}\.__init__\(\) got an unexpected keyword argument 'master_weight'$"
    with pytest.raises(TypeError, match=wrong):
        getattr(optim, name)([torch.zeros(1)], master_weight=True)


@pytest.mark.parametrize("flag", ["foreach", "fused", "capturable"])
@torch_kinds
def test_torchs_choices_of_implementation_are_accepted(kind, flag):
    if flag == "capturable" and kind.startswith(("sgd", "adagrad")):
        pytest.skip("has no capturable")
    pair = Pair(kind, torch_options={"foreach": False}, **{flag: True})
    pair.steps()
    pair.check()


def test_adam_with_decoupled_weight_decay():
    pair = Pair("adam-decay", decoupled_weight_decay=True)
    pair.steps()
    pair.check()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none):
    pair = Pair("sgd-momentum")
    pair.steps(1)
    pair.both(lambda optimizer: optimizer.zero_grad(set_to_none))
    for param in pair.params:
        assert (param.grad is None) if set_to_none else not param.grad.any()
    pair.both(lambda optimizer: optimizer.step())
    pair.check()


# --- parameters and groups -----------------------------------------------------------------------


def test_a_parameter_without_gradient_keeps_its_own_step_count(name):
    """Frozen and thawed, too."""
    pair = Pair(name)
    for without in ((), (0,), (0, 2), (1, 2, 3, 4), (), (4,)):
        for i, param in enumerate(pair.params):
            param.requires_grad_(i not in without)
        pair.steps(2, without)
        pair.check()


def add_group(optimizer, new):
    optimizer.add_param_group({"params": [new], "lr": 1e-3})


def replace(optimizer, new):
    optimizer.param_groups[0]["params"][1] = new


def exchange_data(optimizer, new):
    optimizer.param_groups[0]["params"][1].data = new.data


def remove(which):
    return lambda optimizer, new: optimizer.param_groups[0]["params"].pop(which)


def halve_states(optimizer, new):
    for state in optimizer.state.values():
        for key, value in state.items():
            if key != "step":
                state[key] = value * 0.5


def update_group(optimizer, new):
    group = optimizer.param_groups[0]
    group.update(lr=group["lr"] * 0.5, weight_decay=0.03)


# What users and wrappers do to an optimizer between two steps: layers are frozen by taking their
# parameters out of the groups, momentum is restarted, state tensors are exchanged.
BETWEEN = {
    "add a group": add_group,
    "replace a parameter": replace,
    "exchange the data of a parameter": exchange_data,
    "remove the first parameter": remove(0),
    "remove the last parameter": remove(-1),
    "forget the state": lambda optimizer, new: optimizer.state.clear(),
    "replace the state": halve_states,
    "change hyper-parameters": update_group,
}


# Each set of states is in the quick tests; options beside it are not what these changes are about.
QUICK = (*KINDS, "sgd", "adamw-amsgrad")


@pytest.mark.parametrize("change", BETWEEN)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in OPTIMIZERS]
)
def test_changes_between_steps(name, change):
    pair = Pair(name)
    pair.steps()
    known = [*pair.params]
    shape = SHAPES[1] if change.startswith("exchange") else (4, 4)
    new = torch.randn(shape).requires_grad_()
    for optimizer, one in ((pair.ours, new), (pair.torch, clone_of([new])[0])):
        BETWEEN[change](optimizer, one)
    groups = (pair.ours.param_groups, pair.torch.param_groups)
    pair.params, pair.twins = ([p for g in of for p in g["params"]] for of in groups)
    left = [p for p in known if all(p is not other for other in pair.params)]
    before = [param.detach().clone() for param in left]
    for param in left:
        param.grad = torch.ones_like(param)
    pair.steps()
    pair.check()
    assert all(torch.equal(p, value) for p, value in zip(left, before, strict=True))


def test_a_state_of_another_shape_is_refused():
    pair = Pair("adamw")
    pair.steps()
    state = pair.ours.state[pair.params[1]]
    right, state["exp_avg"] = state["exp_avg"], torch.zeros(3)
    with pytest.raises(ValueError, match=r"exp_avg of .* was given shape \(3,\)"):
        pair.ours.step()
    state["exp_avg"] = right
    pair.steps()
    pair.check()  # the refused step changed nothing


@pytest.mark.parametrize(
    "values",
    [[(0.0, 0.0), (0.9, 0.0), (0.9, 0.3), (0.0, 0.0), (0.5, 0.0)], [(0.0, 0.0), (0.9, 0.5)]],
    ids=["on and off", "with dampening it starts as the gradient"],
)
def test_momentum_switched_later(values):
    pair = Pair("sgd", torch_options={"foreach": False})
    for momentum, dampening in values:
        for optimizer in (pair.ours, pair.torch):
            optimizer.param_groups[0].update(momentum=momentum, dampening=dampening)
        pair.steps(2)
        pair.check()


@pytest.mark.parametrize("dtype", [f32, torch.float64])
@pytest.mark.parametrize("kind", [*KINDS, "sgd"])
def test_tensor_lr(kind, dtype):
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


@pytest.mark.filterwarnings("error:Detected call of")
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@kinds
def test_schedulers(kind, scheduler):
    pair = Pair(kind)
    ours, theirs = SCHEDULERS[scheduler](pair.ours), SCHEDULERS[scheduler](pair.torch)
    for _ in range(8):
        pair.steps(1)
        ours.step()
        theirs.step()
        assert pair.ours.param_groups[0]["lr"] == pair.torch.param_groups[0]["lr"]
    pair.check()


@pytest.mark.filterwarnings("error:Detected call of")
@pytest.mark.parametrize("built", ["before", "after"])
@torch_kinds
def test_schedulers_and_upgrade(kind, built):
    """A scheduler wraps optimizer.step; one built earlier has wrapped the old class's."""
    pair = Pair(kind)
    upgraded = make_torch(kind, pair.params)
    if built == "before":
        scheduler = SCHEDULERS["step"](upgraded)
    calls = []
    upgraded.register_step_post_hook(lambda o, a, k: calls.append("post"))
    optim.upgrade(upgraded, master_weights=False)
    if built == "after":
        scheduler = SCHEDULERS["step"](upgraded)
    pair.ours = upgraded
    theirs = SCHEDULERS["step"](pair.torch)
    for _ in range(6):
        pair.steps(1)
        scheduler.step()
        theirs.step()
    pair.check()
    assert calls == ["post"] * 6
    assert isinstance(upgraded, getattr(optim, type(pair.torch).__name__))
    other = pickle.loads(pickle.dumps(copy.deepcopy(upgraded)))
    train(other, other.param_groups[0]["params"], 1)


def test_no_false_warning_after_a_skipped_first_step():
    param = torch.ones(3, requires_grad=True)
    optimizer = optim.SGD([param], lr=1.0, skip_nonfinite=True)
    scheduler = SCHEDULERS["step"](optimizer)
    param.grad = torch.full((3,), float("nan"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
    assert optimizer.last_step.skipped == 1


# --- memory layouts ------------------------------------------------------------------------------


@kinds
def test_channels_last_parameters(kind):
    pair = Pair(kind, shapes=[(4, 3, 2, 2), (5, 1, 3, 3)])
    pair.params = [p.detach().to(memory_format=torch.channels_last) for p in pair.params]
    pair.params = [p.requires_grad_() for p in pair.params]
    pair.ours = make(kind, pair.params)
    pair.steps()
    pair.check()
    # A state saved from contiguous parameters, and back.
    pair.ours.load_state_dict(through_a_file(pair.torch.state_dict()))
    pair.torch.load_state_dict(through_a_file(pair.ours.state_dict()))
    pair.steps()
    pair.check()
    assert pair.params[0].is_contiguous(memory_format=torch.channels_last)


@kinds
def test_gradients_of_other_strides(kind):
    pair = Pair(kind, shapes=[(6, 4), (6, 4), (8,)])
    for _ in range(3):
        grads = [torch.randn(4, 6).t(), torch.randn(1).expand(6, 4), torch.randn(24)[::3]]
        for param, twin, grad in zip(pair.params, pair.twins, grads, strict=True):
            param.grad, twin.grad = grad, grad.clone()
        kept = [grad.clone() for grad in grads]
        pair.both(lambda optimizer: optimizer.step())
        for param, grad in zip(pair.params, kept, strict=True):
            assert torch.equal(param.grad, grad)  # gradients are never rewritten
    pair.check()


@kinds
def test_parameters_that_are_views(kind):
    """Flattened storage: parameters side by side in one tensor, off alignment."""
    flat = torch.randn(101)
    twin_flat = flat.clone()
    pair = Pair(kind, shapes=[(3,)])
    pair.params = [flat[1:8].requires_grad_(), flat[8:39].view(31).requires_grad_()]
    pair.twins = [twin_flat[1:8].requires_grad_(), twin_flat[8:39].view(31).requires_grad_()]
    edges = flat[[0, *range(39, 101)]].clone()
    pair.ours, pair.torch = make(kind, pair.params), make_torch(kind, pair.twins)
    pair.steps()
    pair.check()
    assert torch.equal(flat[[0, *range(39, 101)]], edges)


def test_a_step_between_forward_and_backward_is_noticed():
    weight = torch.ones(3, requires_grad=True)
    optimizer = optim.SGD([weight], lr=0.1)
    loss = (weight * weight).sum()
    weight.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_empty_parameters_count_steps_as_others(name):
    pair = Pair(name, shapes=[(0,), (3, 0), (2,)])
    pair.steps()
    pair.check()


# --- masters -------------------------------------------------------------------------------------


def with_masters(dtype=bf16, n=1000, **options):
    param = torch.randn(n).to(dtype).requires_grad_()
    optimizer = optim.AdamW([param], lr=1e-2, master_weights=True, **options)
    train(optimizer, [param], 5)
    return param, optimizer


def still(optimizer, param):
    """A step that changes nothing: what the masters are just before an update."""
    for group in optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    param.grad = torch.zeros_like(param)
    optimizer.step()


def test_ema_swap():
    """Evaluate with averaged weights, then train on with the exact masters."""
    param, optimizer = with_masters()
    master = optimizer.state[param]["master_param"]
    before, kept = master.clone(), param.detach().clone()
    with torch.no_grad():
        param.copy_(kept * 0.5)
        param.copy_(kept)
    still(optimizer, param)
    assert same_bits(master, before)


def test_edits_are_part_of_a_checkpoint():
    """Edited, saved and resumed without a step in between: the edit stays."""
    param, optimizer = with_masters()
    with torch.no_grad():
        param.clamp_(-0.5, 0.5)
    saved = through_a_file({"p": param.detach(), "o": optimizer.state_dict()})
    resumed_param = saved["p"].clone().requires_grad_()
    resumed = optim.AdamW([resumed_param], lr=1e-2, master_weights=True)
    resumed.load_state_dict(saved["o"])
    twin = copy.deepcopy(optimizer)
    for o in (optimizer, resumed, twin):
        train(o, o.param_groups[0]["params"], 2, seed=4)
    assert_same_bits(snapshot(resumed), snapshot(optimizer))
    assert_same_bits(snapshot(twin), snapshot(optimizer))


def test_everything_is_what_a_step_writes():
    _, optimizer = with_masters()
    assert set(everything(optimizer)) == {
        "param 0",
        "step 0",
        "exp_avg 0",
        "exp_avg_sq 0",
        "master_param 0",
    }


# --- torch's own GradScaler ----------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("dtype", [f32, f16, bf16])
def test_torch_grad_scaler_drives_ours(kind, dtype):
    """With FP32 weights it is torch's own training; FP16 gradients, which it refuses, work too."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    twin = copy.deepcopy(model)
    model.to(dtype)
    ours = make(kind, model.parameters(), master_weights=dtype != f32)
    theirs = make_torch(kind, twin.parameters())
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) for _ in range(2)]
    overflow_at = 4
    for step in range(8):
        x = torch.randn(32, 8)
        for net, optimizer, scaler in ((model, ours, scalers[0]), (twin, theirs, scalers[1])):
            optimizer.zero_grad()
            loss = net(x.to(next(net.parameters()).dtype)).float().square().mean()
            scaler.scale(loss).backward()
            if step == overflow_at:
                next(net.parameters()).grad[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        assert ours.last_step.skipped == float(step == overflow_at)
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert "grad_scale" not in vars(ours)
        assert "found_inf" not in vars(ours)
    tolerance = 1e-5 if dtype == f32 else 0.05
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param.float(), other, rtol=tolerance, atol=tolerance)


@kinds
def test_torch_grad_scaler_with_unscale_and_clip(kind):
    pair = Pair(kind)
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0) for _ in range(2)]
    for _ in range(4):
        pair.gradients()
        for params, optimizer, scaler in (
            (pair.params, pair.ours, scalers[0]),
            (pair.twins, pair.torch, scalers[1]),
        ):
            scaler.scale(torch.ones(()))  # starts the scaler
            for param in params:
                param.grad *= 256.0
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, 0.5)
            scaler.step(optimizer)
            scaler.update()
    pair.check()


def test_max_grad_norm_under_a_grad_scaler_clips_the_unscaled_gradients():
    pair = Pair("sgd-momentum", torch_options={}, max_grad_norm=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for _ in range(4):
        pair.gradients()
        torch.nn.utils.clip_grad_norm_(pair.twins, 0.5)
        scaler.scale(torch.ones(()))
        for param in pair.params:
            param.grad *= 256.0
        scaler.step(pair.ours)
        scaler.update()
        pair.torch.step()
        assert pair.ours.last_step.loss_scale == 256.0
    pair.check()


class Watched:
    """An object of the extension that notes in `calls` what is asked of it."""

    def __init__(self, watched, calls):
        self.watched, self.calls = watched, calls

    def __getattr__(self, name):
        self.calls.append(name)
        return getattr(self.watched, name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_crosses_into_the_extension_twice(name):
    params = [torch.randn(5, requires_grad=True), torch.randn(3, 2, requires_grad=True)]
    optimizer = make(name, [{"params": params[:1]}, {"params": params[1:], "lr": 1e-4}])
    seen, calls = [], ["collect", "update"]
    for step, expected in enumerate(([], calls, [*calls[:1], "set_hyper", *calls[1:]], calls)):
        for param in params:
            param.grad = torch.randn_like(param)
        if step == 2:
            optimizer.param_groups[1]["lr"] = 1e-5
        optimizer.step()
        if step == 0:
            rows = optimizer._rows
            rows.table, rows.plan = Watched(rows.table, seen), Watched(rows.plan, seen)
        assert seen == expected
        seen.clear()


def test_rows_that_are_made_anew_hold_none_of_those_before():
    optimizer = make("adamw", [torch.ones(3, requires_grad=True)])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    optimizer.step()
    table = weakref.ref(optimizer.param_table())
    optimizer._rows.forget()
    assert table() is None


# A change of states, and whether they hold other objects then.
CHANGES = {
    "assign": (lambda states: states[1].update(a=object()), True),
    "assign again": (lambda states: states[1].update(a=states[1]["a"]), False),
    "remove": (lambda states: states[1].pop("a"), True),
    "empty": (lambda states: states[1].clear(), True),
    "default": (lambda states: states[2].setdefault("c", object()), True),
    "drop": (lambda states: states.pop(2), True),
    "no dict": (lambda states: states.update({2: object()}), True),
    "exchange": (lambda states: states.update({2: dict(states[2])}), False),
}


@pytest.mark.parametrize(("change", "is_other"), CHANGES.values(), ids=CHANGES.keys())
def test_the_table_notices_states_that_somebody_changed(change, is_other):
    """A step looks into the states again unless they say that nobody assigned to them."""
    states = {1: {"a": object()}, 2: {"b": object()}}
    table = _core.C.ParamTable("adam", torch.device("cpu"))
    table.remember(states=states)
    assert table.holds(states=states)
    assert table.holds(states=dict(states))
    change(states)
    for _ in range(2):
        assert table.holds(states=states) == (not is_other)
    table.remember(states=states)
    assert table.holds(states=states)


@pytest.mark.parametrize("size", [1, 7, 8, 17, 2049])
def test_lamb_without_eps(size):
    """Neither padding behind the last element nor an element without gradient divides 0 by 0."""
    torch.manual_seed(size)
    start, grad = torch.randn(size), torch.randn(size)
    grad[size // 2 + 1 :: 3] = 0
    found = []
    for eps in (0.0, 1e-30):
        param = start.clone().requires_grad_()
        param.grad = grad
        optim.LAMB([param], lr=1e-2, eps=eps, weight_decay=0.1).step()
        found.append(param.detach())
    torch.testing.assert_close(*found, rtol=1e-6, atol=0)
    assert not torch.equal(found[0], start)
