"""Optimizers of others: their state resumes bit by bit, and wrappers and old signatures train."""

import copy
from collections import defaultdict

import pytest
import torch
from torch import nn

from ampfuse import amp, optim
from ampfuse.optim.base import AmpOptimizer
from cases import LEVELS, same_bits, through_a_file

HALF = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}


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
                state = self.state[p]
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
                state["count"] += 1
                state["step"] += 1
                state["single"].mul_(0.5).add_(p.grad.float())
                state["double"] += p.grad.double().square().sum() / 3
                state["mask"] |= p.grad.flatten() > 0
                state["seen"][state["count"] % 3] += 2**24 + 1
                state["history"] = [*state["history"][-1:], p.grad.float().flatten()[:2] / 3]
                state["by_name"]["rows"] = state["by_name"]["rows"] * 0.9 + p.grad.float().sum(-1)
                state["by_name"]["deep"][0]["scale"] *= 0.99
                assert state["mask"].dtype == torch.bool
                direction = state["single"] + state["history"][0].sum() * 0.1
                direction = direction / (1 + state["double"].float().sqrt())
                direction = direction + 0.01 * state["by_name"]["rows"].tanh().unsqueeze(-1)
                direction = direction * (0.5 + 0.5 * state["mask"].view_as(p))
                factor = state["by_name"]["deep"][0]["scale"] * (state["seen"].sum() % 7 + 1)
                p.sub_((group["lr"] * factor * direction / self.state["all"]["calls"]).to(p.dtype))


class KeptInFloat32(torch.optim.Optimizer):
    """FP32 state whatever the parameter is, as optimizers for half models keep."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                average = state.setdefault("average", torch.zeros_like(p, dtype=torch.float32))
                average.lerp_(p.grad.float(), 0.1)
                p.sub_((group["lr"] * average).to(p.dtype))


def of_torch():
    """Those that take dense gradients of any parameters."""
    found = {}
    for name, cls in vars(torch.optim).items():
        is_class = isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
        if is_class and cls is not torch.optim.Optimizer and name not in ("SparseAdam", "Muon"):
            found[name] = cls
    return found


def of_timm():
    try:
        from timm.optim import create_optimizer_v2, list_optimizers
    except ImportError:
        return {}

    def maker(name):
        options = {"lr": 1e-2, "momentum": 0.9}
        return lambda params: create_optimizer_v2(list(params), opt=name, **options)

    # Not those that need other packages; AdaHessian differentiates the gradients of the weights.
    names = list_optimizers(exclude_filters=["bnb*", "fused*", "adahessian"])
    return {f"timm {name}": maker(name) for name in names}


OWN = {"odd": Odd, "FP32 state": KeptInFloat32}
MAKERS = {**of_torch(), **OWN, **of_timm()}


class Training:
    def __init__(self, make, level, seed=0, *, load=None):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = make(self.model.parameters())
        if load is not None:
            self.load(load)
        self.level = level
        if level is not None:
            amp.initialize(self.model, self.optimizer, opt_level=level, verbosity=0)

    def step(self, seed):
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)  # some optimizers throw dice
        x = torch.randn(16, 6, generator=generator)
        self.optimizer.zero_grad()
        loss = (self.model(x).float() - x[:, :2].sin()).square().mean()
        if self.level is None:
            loss.backward()
        else:
            with amp.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
        value = loss.item()
        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(lambda: loss.detach())
        else:
            self.optimizer.step()
        return value

    def steps(self, seeds):
        return [self.step(seed) for seed in seeds]

    def state(self):
        return copy.deepcopy(
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            | ({"amp": amp.state_dict()} if self.level else {})
        )

    def load(self, saved):
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def tensors(self):
        masters = amp.master_params(self.optimizer)
        return [p.detach().clone() for p in (*self.model.parameters(), *masters)]


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    try:
        from timm.optim import kron
    except ImportError:
        return
    monkeypatch.setattr(kron, "has_dynamo", False)


# timm's 60 at the level with masters; as for the rest they are like torch's.
RESUMED = [(n, level) for level in ("O0", "O1", "O2", "O3") for n in (*of_torch(), *OWN)]
RESUMED += [(name, "O2") for name in of_timm()]
# All of torch's with masters and in pure FP16, and a part of timm's; without either, states are
# torch's own business.
QUICK = {run for run in RESUMED if run[1] in ("O2", "O3") or run[0] in OWN}
QUICK -= {run for i, run in enumerate(RESUMED) if run[0].startswith("timm") and i % 4}


@pytest.mark.parametrize(
    ("name", "level"),
    [pytest.param(*run, marks=() if run in QUICK else pytest.mark.slow) for run in RESUMED],
)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(name, level):
    make = MAKERS[name]
    training = Training(make, level)
    try:
        training.steps(range(5))
    except RuntimeError as error:
        # In pure FP16 some steps of others do not even run: a state in FP32 beside the weight.
        if level == "O3" and "dtype" in str(error):
            pytest.skip(str(error))
        raise
    saved = through_a_file(training.state())
    losses = training.steps(range(5, 9))
    again = Training(make, level, seed=1)
    again.steps(range(50, 52))  # and over what is there
    again.load(saved)
    amp.load_state_dict(saved["amp"])
    assert repr(again.steps(range(5, 9))) == repr(losses)  # at O3 some are NaN
    for found, expected in zip(again.tensors(), training.tensors(), strict=True):
        assert torch.equal(found.isnan(), expected.isnan())
        assert same_bits(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("name", [*OWN, "Adafactor"])
def test_state_that_followed_a_half_parameter_follows_a_wider_one(name):
    """From pure FP16 to masters: what was half because the weight was steps in FP32."""
    training = Training(MAKERS[name], "O3")
    training.steps(range(3))
    saved = training.state()
    again = Training(MAKERS[name], "O2", seed=1)
    again.load(saved)
    master = next(amp.master_params(again.optimizer))
    for key, value in again.optimizer.state[master].items():
        if isinstance(value, torch.Tensor) and value.dtype == torch.float16:
            raise AssertionError(key)
    again.steps(range(3))
    if name == "odd":
        assert again.optimizer.state[master]["single"].dtype == torch.float32
        assert again.optimizer.state[master]["double"].dtype == torch.float64


@pytest.mark.parametrize("level", LEVELS)
def test_only_what_a_step_of_ours_reads_is_checked(level):
    for make, key in ((torch.optim.AdamW, "exp_avg"), (torch.optim.Adafactor, "master_param")):
        training = Training(make, level)
        training.step(0)
        state = training.optimizer.state_dict()
        before = training.tensors()
        if key not in state["state"][0]:
            continue
        state["state"][0] = {**state["state"][0], key: torch.ones(3, 3)}
        with pytest.raises(ValueError, match=rf"{key} for 0.weight has shape \(3, 3\)"):
            training.optimizer.load_state_dict(state)
        for found, expected in zip(training.tensors(), before, strict=True):
            assert same_bits(found, expected)


# --- wrappers that do without torch's constructor ---------------------------------------------


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
    """One state dict for both, and the inner optimizer's state dict as its own."""

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


class Delegates(torch.optim.Optimizer):
    """Everything by property."""

    def __init__(self, inner):
        self.inner = inner

    @property
    def param_groups(self):
        return self.inner.param_groups

    @property
    def state(self):
        return self.inner.state

    def step(self, closure=None):
        return self.inner.step(closure)

    def zero_grad(self):
        self.inner.zero_grad()

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict)


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


@pytest.mark.covers(1)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_trains_as_in_plain_torch(name, level):
    plain, amped = Training(WRAPPERS[name], None), Training(WRAPPERS[name], level)
    assert isinstance(amped.optimizer, AmpOptimizer)
    expected, losses = plain.steps(range(12)), amped.steps(range(12))
    if level == "O0":
        assert losses == expected
    elif level != "O3":
        assert losses == pytest.approx(expected, rel=0.1, abs=0.02)
        assert losses[-1] < 0.8 * losses[0]
    if level in ("O2", "O5"):
        masters = list(amp.master_params(amped.optimizer))
        for master, weight in zip(
            sorted(masters, key=lambda p: (p.dim(), p.numel())),
            sorted(amped.model.parameters(), key=lambda p: (p.dim(), p.numel())),
            strict=True,
        ):
            assert master.dtype == torch.float32
            assert same_bits(master.detach().to(HALF[level]), weight.detach())


# Before initialize no amp reads a format of their own.
IN_TORCHS_FORMAT = [
    f"{kind} of {name}" for kind in ("SharesState", "Delegates") for name in ("AdamW", "SGD")
]


@pytest.mark.covers(1)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize(
    ("name", "before"), [(n, False) for n in WRAPPERS] + [(n, True) for n in IN_TORCHS_FORMAT]
)
def test_a_wrapper_resumes_with_the_same_bits(name, level, before):
    training = Training(WRAPPERS[name], level)
    training.steps(range(5))
    saved = training.state()
    losses = training.steps(range(5, 9))
    again = Training(WRAPPERS[name], level, seed=1, load=saved if before else None)
    if not before:
        again.load(saved)
    amp.load_state_dict(saved["amp"])
    assert again.steps(range(5, 9)) == losses
    for found, expected in zip(again.tensors(), training.tensors(), strict=True):
        assert same_bits(found, expected)


@pytest.mark.parametrize("level", LEVELS)
def test_hooks_and_schedulers_of_a_wrapper(level):
    training = Training(WRAPPERS["SharesState of SGD"], None)
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, 0.5)
    amp.initialize(training.model, training.optimizer, opt_level=level, verbosity=0)
    training.level = level
    calls = []
    training.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    training.steps(range(3))
    scheduler.step()
    assert calls == [1, 1, 1]
    assert training.optimizer.inner.param_groups[0]["lr"] == 0.05


# --- signatures of older torch ----------------------------------------------------------------


class ZeroesItself(torch.optim.SGD):
    """``zero_grad`` as it was before torch 1.7: no argument, and zeros stay."""

    def zero_grad(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.detach_()
                    p.grad.zero_()


class CountsItself(torch.optim.RMSprop):
    calls = 0

    def zero_grad(self, *args, **kwargs):
        self.calls += 1
        super().zero_grad(*args, **kwargs)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cls", [ZeroesItself, CountsItself])
def test_zero_grad_of_the_optimizers_own(cls, level):
    def make(params):
        return cls(params, lr=0.01, momentum=0.5)

    plain, amped = Training(make, None), Training(make, level)
    expected, losses = plain.steps(range(6)), amped.steps(range(6))
    if level == "O0":
        assert losses == expected
    elif level != "O3":
        assert losses == pytest.approx(expected, rel=0.1, abs=0.02)
    amped.optimizer.zero_grad()
    with amp.scale_loss(amped.model(torch.ones(4, 6)).float().sum(), amped.optimizer) as scaled:
        scaled.backward()
    amped.optimizer.zero_grad()  # between a pass and its step too
    for param in (*amped.model.parameters(), *amp.master_params(amped.optimizer)):
        assert param.grad is None or not param.grad.any()
    if cls is CountsItself:
        assert amped.optimizer.calls == 8
        amped.optimizer.zero_grad(set_to_none=False)
    else:
        with pytest.raises(TypeError):
            amped.optimizer.zero_grad(set_to_none=False)


def test_larc_passes_zero_grad_on():
    optimizer = optim.LARC(ZeroesItself([torch.ones(3, requires_grad=True)], lr=0.1))
    optimizer.zero_grad()
