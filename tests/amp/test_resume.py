"""Checkpoints of two models, two optimizers and two losses, loaded at any time of a program."""

import collections
import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

from ampfuse import amp, optim
from cases import LEVELS, assert_same, f32, through_a_file

MASTERED = ("O2", "O5")
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.5),
    "ours": lambda params: optim.AdamW(params, lr=1e-2),
}
# A step of torch's own at O3 computes in FP16, with state in FP16 unless it was loaded as FP32.
RUNS = [(k, level) for k in OPTIMIZERS for level in LEVELS if (k, level) != ("RMSprop", "O3")]
RUNS = [run for run in RUNS if run[0] not in ("ours", "Adagrad") or run[1] == "O2"]
TIMES = ("before initialize", "after initialize", "after the first step")


class Training:
    def __init__(self, kind, level, seed=0):
        torch.manual_seed(seed)
        self.models = [
            nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
            for _ in range(2)
        ]
        self.optimizers = [OPTIMIZERS[kind](model.parameters()) for model in self.models]
        self.level = level

    def initialize(self):
        amp.initialize(
            self.models, self.optimizers, opt_level=self.level, num_losses=2, verbosity=0
        )
        return self

    def train(self, steps):
        losses = []
        first, second = self.models
        for step in steps:
            x = torch.rand(8, 4, generator=torch.Generator().manual_seed(step))
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss = first(x).float().pow(2).mean()
            with amp.scale_loss(loss, self.optimizers[0], loss_id=0) as scaled:
                scaled.backward()
            losses.append(loss.item())
            loss = (second(x).float() - first(x).float()).pow(2).mean()
            if step == 2 and self.level in ("O1", "O2"):  # scales and counters differ from now on
                loss = loss * float("inf")
            with amp.scale_loss(loss, self.optimizers, loss_id=1) as scaled:
                scaled.backward()
            losses.append(loss.item())
            for optimizer in self.optimizers:
                optimizer.step()
        return losses

    def state(self):
        return {
            "models": [model.state_dict() for model in self.models],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "amp": amp.state_dict(),
        }

    def load_models(self, saved):
        for model, state in zip(self.models, saved["models"], strict=True):
            model.load_state_dict(state)

    def load_optimizers(self, saved):
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)

    def masters(self):
        return [p.detach() for o in self.optimizers for p in amp.master_params(o)]


def resumed(kind, level, saved, models_at, optimizers_at, models_first):
    saved = copy.deepcopy(saved)  # torch's optimizers keep the tensors that they load
    training = Training(kind, level, seed=1)
    for time in TIMES:
        if time == "after initialize":
            training.initialize()
        if time == models_at == optimizers_at == "after the first step":
            training.train([50])
        loads = [(models_at, training.load_models), (optimizers_at, training.load_optimizers)]
        for when, load in loads if models_first else reversed(loads):
            if when == time:
                load(saved)
    amp.load_state_dict(saved["amp"])
    return training


@pytest.mark.parametrize(("kind", "level"), RUNS)
def test_the_bits_of_an_uninterrupted_run(kind, level):
    training = Training(kind, level).initialize()
    training.train(range(4))
    saved = through_a_file(training.state())
    losses = training.train(range(4, 7))
    expected = training.state()
    assert all(loss == loss for loss in losses)
    for models_at, optimizers_at in itertools.product(TIMES, TIMES):
        for models_first in (True, False) if models_at == optimizers_at else (True,):
            again = resumed(kind, level, saved, models_at, optimizers_at, models_first)
            assert again.train(range(4, 7)) == losses, (models_at, optimizers_at, models_first)
            assert_same(again.state(), expected)


def as_apex_saved(state):
    """Without masters: apex kept them in no state dict."""
    state = through_a_file(state)
    for optimizer in state["optimizers"]:
        for values in optimizer["state"].values():
            values.pop("master_param", None)
    state["amp"] = collections.OrderedDict(state["amp"])
    return state


@pytest.mark.covers(2)
@pytest.mark.parametrize("when", TIMES)
@pytest.mark.parametrize("level", MASTERED)
@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind != "Adagrad"])
def test_checkpoints_of_apex(kind, level, when):
    """Masters start from the weights; the moments, which apex rounded to half, stay FP32."""
    training = Training(kind, level).initialize()
    training.train(range(4))
    saved = as_apex_saved(training.state())
    losses = training.train(range(4, 7))
    for models_first in (True, False):
        again = resumed(kind, level, saved, when, when, models_first)
        for optimizer, state in zip(again.optimizers, saved["optimizers"], strict=True):
            loaded = optimizer.state_dict()["state"]
            for key, values in state["state"].items():
                assert_same({name: loaded[key][name] for name in values}, values)
        weights = [p for model in again.models for p in model.parameters()]
        for master, weight in zip(again.masters(), weights, strict=True):
            assert torch.equal(master, weight.float())
        assert amp.state_dict() == saved["amp"]
        assert again.train(range(4, 7)) == pytest.approx(losses, abs=0.02)


@pytest.mark.covers(2)
@pytest.mark.parametrize("level", MASTERED)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("make", ["state_dict", "deepcopy", "pickle"])
def test_weights_loaded_before_the_first_step_are_in_checkpoints_and_copies(make, kind, level):
    """Pretrained ones, say; a checkpoint at step 0 has to hold them."""
    training = Training(kind, level).initialize()
    pretrained = {k: v * 2 + 0.25 for k, v in training.models[0].state_dict().items()}
    training.models[0].load_state_dict(pretrained)
    if make == "state_dict":
        state = training.optimizers[0].state_dict()["state"]
        masters = [v["master_param"] for v in state.values() if "master_param" in v]
    else:
        copied = copy.deepcopy if make == "deepcopy" else lambda x: pickle.loads(pickle.dumps(x))
        _, optimizer = copied((training.models[0], training.optimizers[0]))
        masters = [p for p in amp.master_params(optimizer) if hasattr(p, "model_param")]
    weights = [p for p in training.models[0].parameters() if p.dtype != f32]
    assert len(masters) == len(weights) == 4
    for master, weight in zip(masters, weights, strict=True):
        assert torch.equal(master, weight.float())


@pytest.mark.parametrize("level", MASTERED)
def test_masters_that_somebody_looks_at_have_followed_the_model(level):
    training = Training("SGD", level).initialize()
    for scale in (0.5, 0.25):
        training.models[0].load_state_dict(
            {k: v * scale for k, v in training.models[0].state_dict().items()}
        )
        weights = list(training.models[0].parameters())
        for master, weight in zip(training.masters(), weights, strict=False):
            assert torch.equal(master, weight.float())
        training.train([0])


@pytest.mark.parametrize("level", MASTERED)
@pytest.mark.parametrize("models_first", [True, False])
@pytest.mark.parametrize("edited", [False, True])
def test_the_master_of_a_parameter_that_is_frozen_for_a_while(edited, models_first, level):
    training = Training("AdamW", level).initialize()
    training.train(range(3))
    saved = through_a_file(training.state())
    master = saved["optimizers"][0]["state"][0]["master_param"].clone()
    again = Training("AdamW", level, seed=1)
    frozen = again.models[0][0].requires_grad_(False)
    again.initialize()
    loads = [again.load_models, again.load_optimizers]
    for load in loads if models_first else reversed(loads):
        load(saved)
    again.train([3])
    assert torch.equal(frozen.weight.float(), master.to(frozen.weight.dtype).float())
    if edited:
        with torch.no_grad():
            frozen.weight[0] = 0.5
        master[0] = 0.5
    frozen.requires_grad_(True)
    assert torch.equal(again.optimizers[0].state_dict()["state"][0]["master_param"], master)
    assert torch.equal(again.masters()[0], master)
    again.train([4])
    assert not torch.equal(again.masters()[0], master)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_masters_that_a_level_does_not_use_are_not_saved_again(level, kind):
    """They would be taken for those of the weights, which have moved on since."""
    saved = Training(kind, "O2").initialize()
    saved.train(range(3))
    without = Training(kind, level)
    without.load_models(saved.state())
    without.load_optimizers(saved.state())
    without.initialize()
    for state in (without.state(), copy.deepcopy(without).state()):
        for optimizer in state["optimizers"]:
            assert not any("master_param" in values for values in optimizer["state"].values())


def test_a_master_that_was_not_saved_starts_from_its_weight():
    params = [torch.rand(3).bfloat16().requires_grad_() for _ in range(2)]
    optimizer = optim.AdamW(params, master_weights=True)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][1]
    optimizer.load_state_dict(saved)
    state = optimizer.state_dict()["state"]
    assert torch.equal(state[0]["master_param"], saved["state"][0]["master_param"])
    assert torch.equal(state[1]["master_param"], params[1].float())
