"""Whatever one does to an optimizer, in whatever order: ours stays with torch's."""

import copy
import pickle

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from torch import nn

from cases import KINDS, make, parameters, params_of, through_a_file, weights
from test_optim import BETWEEN, Pair

SHAPES = [(5,), (3, 4), (), (1,), (0,), (2, 3, 2, 2), (17,)]
# A skipped first step makes states of zeros; those of "adagrad-all" start at another value.
ALSO = {"adagrad-decay", "sgd", "sgd-dampening", "adam-decay", "adamw-amsgrad"}
NAMES = sorted({*KINDS, *ALSO} - {"adagrad-all"})
OF_ANY = ("add a group", "forget the state", "replace the state", "change hyper-parameters")
rates = st.sampled_from([1e-3, 1e-2, 0.1])


class Sequences(RuleBasedStateMachine):
    @initialize(name=st.sampled_from(NAMES), seed=st.integers(0, 9), count=st.integers(1, 5))
    def build(self, name, seed, count):
        torch.manual_seed(seed)
        self.name, self.removed = name, []
        params = parameters(SHAPES[:count])
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

    @rule(which=st.sampled_from(sorted(BETWEEN)), shape=st.sampled_from(SHAPES))
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
