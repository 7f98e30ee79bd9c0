"""Optimizers as people write them: with states of any kind, around others, for an older torch."""

from collections import defaultdict

import torch

from ampfuse import optim


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


class KeptInFloat32(torch.optim.Optimizer):
    """FP32 state whatever the parameter is, as optimizers for half models keep."""

    def __init__(self, params, lr=0.5):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    zeros = torch.zeros_like(p, dtype=torch.float32)
                    average = self.state[p].setdefault("average", zeros).lerp_(p.grad.float(), 0.1)
                    p.sub_((group["lr"] * average).to(p.dtype))


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


class Delegates(torch.optim.Optimizer):
    """Everything by property."""

    def __init__(self, inner):
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

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
