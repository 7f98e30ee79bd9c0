"""Optimizers of others: their state resumes bit by bit, and wrappers and old signatures train."""

from collections import defaultdict
from functools import partial

import pytest
import torch

from ampfuse import amp, optim
from cases import LEVELS, assert_same_bits, through_a_file
from trainings import (
    WITH_MASTERS,
    Delegates,
    KeptInFloat32,
    Training,
    resume,
    train_as_in_plain_torch,
)


class Odd(torch.optim.Optimizer):
    """State of every kind that somebody may think of, all of which the step depends on."""

    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr})
        self.state["all"] = {"calls": 0}

    @torch.no_grad()
    def step(self, closure=None):
        self.state["all"]["calls"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad.float(), self.state[p]
                if not state:
                    state["count"] = 0
                    state["step"] = torch.tensor(0.0)
                    state["single"] = torch.zeros_like(p, dtype=torch.float32)
                    state["double"] = torch.zeros((), dtype=torch.float64)
                    state["mask"] = torch.zeros(p.numel(), dtype=torch.bool)
                    state["seen"] = torch.zeros(3, dtype=torch.int64)
                    state["history"] = []
                    state["by_name"] = {"rows": p.float().sum(-1), "deep": [{"scale": 1.0 / 3}]}
                    state["nothing"] = None
                by_name, (deep,) = state["by_name"], state["by_name"]["deep"]
                state["count"] += 1
                state["step"] += 1
                state["single"].mul_(0.5).add_(grad)
                state["double"] += grad.double().square().sum() / 3
                state["mask"] |= grad.flatten() > 0
                state["seen"][state["count"] % 3] += 2**24 + 1
                state["history"] = [*state["history"][-1:], grad.flatten()[:2] / 3]
                by_name["rows"] = by_name["rows"] * 0.9 + grad.sum(-1)
                deep["scale"] *= 0.99
                assert state["mask"].dtype == torch.bool
                direction = state["single"] + state["history"][0].sum() * 0.1
                direction = direction / (1 + state["double"].float().sqrt())
                direction = direction + 0.01 * by_name["rows"].tanh().unsqueeze(-1)
                direction = direction * (0.5 + 0.5 * state["mask"].view_as(p))
                factor = group["lr"] * deep["scale"] * (state["seen"].sum() % 7 + 1)
                p.sub_((factor * direction / self.state["all"]["calls"]).to(p.dtype))


class Counting(torch.optim.AdamW):
    """A user's subclass, which may mean anything by its methods."""

    steps = zeroed = 0

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure)

    def zero_grad(self, *args, **kwargs):
        self.zeroed += 1
        super().zero_grad(*args, **kwargs)


class ZeroesItself(torch.optim.SGD):
    """``zero_grad`` as it was before torch 1.7: no argument, and zeros stay."""

    def zero_grad(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.detach_()
                    p.grad.zero_()


# --- wrappers that do without torch's constructor -------------------------------------------------


class Lookahead(torch.optim.Optimizer):
    """The usual one: groups of the inner optimizer, slow weights of its own."""

    def __init__(self, inner, alpha=0.5, k=2):
        self.inner, self.alpha, self.k, self.calls = inner, alpha, k, 0
        self.param_groups = inner.param_groups
        self.state = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.inner.step(closure)
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if self.calls % self.k == 0:
                    slow.add_(p - slow, alpha=self.alpha)
                    p.copy_(slow)
        return loss

    def zero_grad(self):
        self.inner.zero_grad()

    def state_dict(self):
        slow = [self.state[p].get("slow") for g in self.param_groups for p in g["params"]]
        return {"inner": self.inner.state_dict(), "slow": slow, "calls": self.calls}

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict["inner"])
        self.param_groups = self.inner.param_groups
        params = [p for g in self.param_groups for p in g["params"]]
        for p, slow in zip(params, state_dict["slow"], strict=True):
            self.state[p]["slow"] = slow.clone()
        self.calls = state_dict["calls"]


class SharesState(Lookahead):
    """A wrapper with the inner optimizer's state and state dict."""

    def __init__(self, inner):
        super().__init__(inner)
        self.state = inner.state
        self.defaults = inner.defaults

    def state_dict(self):
        return {**self.inner.state_dict(), "calls": self.calls}

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.calls = state_dict["calls"]


class OwnGroups(Lookahead):
    """Groups made anew, so the inner optimizer has lists of its own."""

    def __init__(self, inner):
        super().__init__(inner)
        self.param_groups = [{**g, "params": list(g["params"])} for g in inner.param_groups]

    def load_state_dict(self, state_dict):
        groups = self.param_groups
        super().load_state_dict(state_dict)
        self.param_groups = groups


class Several(torch.optim.Optimizer):
    """Weights to one optimizer, biases to another."""

    def __init__(self, params):
        params = list(params)
        self.inner = [
            torch.optim.AdamW([p for p in params if p.dim() > 1], lr=0.02),
            torch.optim.RMSprop([p for p in params if p.dim() == 1], lr=0.01, eps=1e-3),
        ]
        self.param_groups = [group for one in self.inner for group in one.param_groups]

    def step(self, closure=None):
        for one in self.inner:
            one.step()

    def zero_grad(self, set_to_none=True):
        for one in self.inner:
            one.zero_grad(set_to_none)

    def state_dict(self):
        return {"all": [one.state_dict() for one in self.inner]}

    def load_state_dict(self, state_dict):
        for one, state in zip(self.inner, state_dict["all"], strict=True):
            one.load_state_dict(state)


INNER = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.02, eps=1e-4),
    "ours": lambda params: optim.AdamW(params, lr=0.02, eps=1e-4),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}
WRAPPERS = {
    f"{cls.__name__} of {name}": lambda params, cls=cls, inner=inner: cls(inner(params))
    for cls in (Lookahead, SharesState, OwnGroups, Delegates)
    for name, inner in INNER.items()
} | {"Several": Several}


# --- trainings ------------------------------------------------------------------------------------


def of_torch():
    """torch's optimizers that take dense gradients of any parameters."""
    return {
        name: cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
        if name not in ("Optimizer", "SparseAdam", "Muon")
    }


def of_timm():
    try:
        from timm.optim import create_optimizer_v2, list_optimizers
    except ImportError:
        return {}
    # Not those that need other packages; AdaHessian differentiates the gradients of the weights.
    names = list_optimizers(exclude_filters=["bnb*", "fused*", "adahessian"])
    return {
        f"timm {name}": lambda params, name=name: create_optimizer_v2(
            list(params), opt=name, lr=1e-2, momentum=0.9
        )
        for name in names
    }


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    try:
        from timm.optim import kron
    except ImportError:
        return
    monkeypatch.setattr(kron, "has_dynamo", False)


OWN = {"odd": Odd, "FP32 state": KeptInFloat32}
MAKERS = {**of_torch(), **OWN, **of_timm(), **WRAPPERS}
# timm's 60 at the level with masters; as for the rest they are like torch's.
RESUMED = [(n, level) for level in ("O0", "O1", "O2", "O3") for n in (*of_torch(), *OWN)]
RESUMED += [(name, "O2") for name in of_timm()]
# All of torch's with masters and in pure FP16, and a part of timm's; without either, states are
# torch's own business.
QUICK = {run for run in RESUMED if run[1] in ("O2", "O3") or run[0] in OWN}
QUICK -= {run for i, run in enumerate(RESUMED) if run[0].startswith("timm") and i % 4}


def tensors(training):
    """Weights and masters. A step in pure FP16 may leave NaNs, whose sign depends on the CPU."""
    values = [*training.weights(), *training.masters()]
    return dict(enumerate(value.masked_fill(value.isnan(), torch.nan) for value in values))


def resumes_with_the_same_bits(name, level, time):
    training = Training(MAKERS[name], level)
    training.steps(range(5))
    saved = through_a_file(training.state())
    again = resume(Training(MAKERS[name], seed=1), level, saved, (time, time))
    losses, expected = again.steps(range(5, 9)), training.steps(range(5, 9))
    assert repr(losses) == repr(expected)  # at O3 some are NaN
    assert_same_bits(tensors(again), tensors(training))


@pytest.mark.parametrize(
    ("name", "level"),
    [pytest.param(*run, marks=() if run in QUICK else pytest.mark.slow) for run in RESUMED],
)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(name, level):
    resumes_with_the_same_bits(name, level, "after the first step")


# Before initialize no amp reads a format of their own.
IN_TORCHS_FORMAT = [
    f"{kind} of {name}" for kind in ("SharesState", "Delegates") for name in ("AdamW", "SGD")
]


@pytest.mark.covers(1)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize(
    ("name", "time"),
    [(n, "after initialize") for n in WRAPPERS]
    + [(n, "before initialize") for n in IN_TORCHS_FORMAT],
)
def test_a_wrapper_resumes_with_the_same_bits(name, level, time):
    resumes_with_the_same_bits(name, level, time)


@pytest.mark.covers(1)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_trains_as_in_plain_torch(name, level):
    train_as_in_plain_torch(WRAPPERS[name], level)


@pytest.mark.parametrize("level", LEVELS)
def test_hooks_and_schedulers_of_a_wrapper_work(level):
    training, calls = Training(WRAPPERS["SharesState of SGD"]), []
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, 0.5)
    training.initialize(level)
    training.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    training.steps(range(3))
    scheduler.step()
    assert calls == [1, 1, 1]
    assert training.optimizer.inner.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("name", [*OWN, "Adafactor"])
def test_state_that_followed_a_half_parameter_follows_a_wider_one(name):
    """From pure FP16 to masters: what was half because the weight was steps in FP32."""
    training = Training(MAKERS[name], "O3")
    training.steps(range(3))
    again = Training(MAKERS[name], "O2", seed=1)
    again.load(training.state())
    master = next(amp.master_params(again.optimizer))
    held = again.optimizer.state[master].values()
    assert torch.float16 not in {getattr(value, "dtype", None) for value in held}
    again.steps(range(3))
    if name == "odd":
        assert again.optimizer.state[master]["single"].dtype == torch.float32
        assert again.optimizer.state[master]["double"].dtype == torch.float64


@pytest.mark.parametrize(
    ("make", "key", "level"),
    [(torch.optim.AdamW, "exp_avg", level) for level in LEVELS]
    + [(torch.optim.Adafactor, "master_param", level) for level in WITH_MASTERS],
)
def test_only_what_a_step_of_ours_reads_is_checked(make, key, level):
    training = Training(make, level)
    training.step(0)
    state, before = training.optimizer.state_dict(), tensors(training)
    state["state"][0] = {**state["state"][0], key: torch.ones(3, 3)}
    with pytest.raises(ValueError, match=rf"{key} for 0.weight has shape \(3, 3\)"):
        training.optimizer.load_state_dict(state)
    assert_same_bits(tensors(training), before)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [partial(ZeroesItself, lr=0.02), partial(Counting, lr=0.02)])
def test_zero_grad_of_the_optimizers_own_runs(make, level):
    training = train_as_in_plain_torch(make, level)
    optimizer = training.optimizer
    optimizer.zero_grad()
    training.backward(0)
    optimizer.zero_grad()  # between a pass and its step too
    for param in (*training.model.parameters(), *amp.master_params(optimizer)):
        assert param.grad is None or not param.grad.any()
    if isinstance(optimizer, Counting):
        overflow = optimizer.last_step.overflow()
        assert optimizer.steps == 25 - (overflow["skipped_steps"] if overflow else 0)
        assert optimizer.zeroed == 27
        optimizer.zero_grad(set_to_none=False)
    else:
        with pytest.raises(TypeError):
            optimizer.zero_grad(set_to_none=False)


def test_larc_passes_zero_grad_on():
    optimizer = optim.LARC(ZeroesItself([torch.ones(3, requires_grad=True)], lr=0.1))
    optimizer.zero_grad()
