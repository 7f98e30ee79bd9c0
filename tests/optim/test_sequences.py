"""Whatever one does to an optimizer, in whatever order: ours stays with torch's."""

import copy
import pickle

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from cases import make, make_torch, through_a_file

SHAPES = [(5,), (3, 4), (), (1,), (0,), (2, 3, 2, 2), (17,)]
NAMES = ("sgd", "sgd-all", "sgd-dampening", "adam-all", "adam-decay", "adamw", "adamw-amsgrad")
rates = st.sampled_from([1e-3, 1e-2, 0.1])


def close(found, expected):
    torch.testing.assert_close(
        found.detach(), expected.detach(), rtol=2e-5, atol=2e-6, check_stride=False
    )


class Sequences(RuleBasedStateMachine):
    @initialize(name=st.sampled_from(NAMES), seed=st.integers(0, 9), count=st.integers(1, 5))
    def build(self, name, seed, count):
        self.generator = torch.Generator().manual_seed(seed)
        self.name = name
        params = [self.random(SHAPES[i]).requires_grad_() for i in range(count)]
        twins = [param.detach().clone().requires_grad_() for param in params]
        self.ours = make(name, params, skip_nonfinite=True)
        self.torch = make_torch(name, twins, foreach=False)
        self.saved = None

    def random(self, shape):
        return torch.randn(shape, generator=self.generator)

    def pairs(self):
        for ours, theirs in zip(self.ours.param_groups, self.torch.param_groups, strict=True):
            yield from zip(ours["params"], theirs["params"], strict=True)

    def groups(self):
        return [*self.ours.param_groups, *self.torch.param_groups]

    @rule(missing=st.sets(st.integers(0, 6)), times=st.integers(1, 2))
    def step(self, missing, times):
        for _ in range(times):
            for i, (param, twin) in enumerate(self.pairs()):
                param.grad = None if i in missing else self.random(param.shape)
                twin.grad = None if i in missing else param.grad.clone()
            self.ours.step()
            self.torch.step()
        self.check()

    @rule(bad=st.sampled_from([float("inf"), float("nan")]))
    def skipped_step(self, bad):
        if not any(param.numel() for param, _ in self.pairs()):
            return
        for param, _ in self.pairs():
            param.grad = torch.full_like(param, bad)
        self.ours.step()
        assert self.ours.last_step.skipped == 1
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

    @rule(shape=st.sampled_from(SHAPES), lr=rates)
    def add_group(self, shape, lr):
        param = self.random(shape).requires_grad_()
        twin = param.detach().clone().requires_grad_()
        self.ours.add_param_group({"params": [param], "lr": lr})
        self.torch.add_param_group({"params": [twin], "lr": lr})

    @rule(which=st.integers(0, 6))
    def take_out(self, which):
        if len(list(self.pairs())) < 2:
            return
        for optimizer in (self.ours, self.torch):
            groups = [group for group in optimizer.param_groups if group["params"]]
            params = groups[which % len(groups)]["params"]
            optimizer.state.pop(params.pop(which % len(params)), None)

    @rule()
    def forget(self):
        self.ours.state.clear()
        self.torch.state.clear()

    @rule(factor=st.sampled_from([0.0, 0.5]))
    def exchange_states(self, factor):
        for param, twin in self.pairs():
            for key, value in self.torch.state.get(twin, {}).items():
                if key != "step" and value is not None:
                    self.torch.state[twin][key] = value * factor
                    self.ours.state[param][key] = self.ours.state[param][key] * factor

    @rule(shift=st.sampled_from([0.0, 1.0]))
    def edit_weights(self, shift):
        with torch.no_grad():
            for param, twin in self.pairs():
                param.mul_(0.5).add_(shift)
                twin.mul_(0.5).add_(shift)

    @rule()
    def exchange_data(self):
        for param, twin in self.pairs():
            value = self.random(param.shape)
            param.data, twin.data = value, value.clone()

    @rule(protocol=st.sampled_from(["deepcopy", "pickle", "save"]))
    def go_on_with_a_copy(self, protocol):
        if protocol == "deepcopy":
            self.ours = copy.deepcopy(self.ours)
        elif protocol == "pickle":
            self.ours = pickle.loads(pickle.dumps(self.ours))
        else:
            state = through_a_file(self.ours.state_dict())
            groups = [{"params": group["params"], "lr": 1.0} for group in self.ours.param_groups]
            self.ours = make(self.name, groups, skip_nonfinite=True)
            self.ours.load_state_dict(state)

    @rule()
    def load_from_torch(self):
        self.ours.load_state_dict(copy.deepcopy(self.torch.state_dict()))

    @rule()
    def load_into_torch(self):
        self.torch.load_state_dict(copy.deepcopy(self.ours.state_dict()))

    def check(self):
        for param, twin in self.pairs():
            close(param, twin)
            states = [
                {k: v for k, v in o.state.get(p, {}).items() if v is not None}
                for o, p in ((self.ours, param), (self.torch, twin))
            ]
            # States are made for the first step, also if that is skipped: zeros, then.
            for key in states[0].keys() | states[1].keys():
                close(states[0][key], states[1].get(key, torch.zeros_like(states[0][key])))


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=80, stateful_step_count=20, deadline=None)
