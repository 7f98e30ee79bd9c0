"""Checkpoints of a training with two losses, loaded at any time of a program."""

import collections
import copy
import itertools
import math
import pickle
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import trainings
from ampfuse import amp, optim
from ampfuse.optim.masters import MASTERS
from cases import (
    KINDS,
    LEVELS,
    NEVER_QUANTIZED,
    QUANTIZED,
    assert_same,
    f32,
    make,
    make_torch,
    through_a_file,
)
from trainings import ORDERS, TIMES, WITH_MASTERS, Delegates, KeptInFloat32, resume

OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5),
    "ours": partial(optim.AdamW, lr=1e-2),
}
# A step of torch's own at O3 computes in FP16, with state in FP16 unless it was loaded as FP32.
RUNS = [(k, level) for k in OPTIMIZERS for level in LEVELS if (k, level) != ("RMSprop", "O3")]
RUNS = [run for run in RUNS if run[0] not in ("ours", "Adagrad") or run[1] == "O2"]


class Training(trainings.Training):
    def __init__(self, kind, seed=0):
        super().__init__(OPTIMIZERS[kind], seed=seed)

    def initialize(self, level):
        return super().initialize(level, num_losses=2)

    def backward(self, seed, factor):
        super().backward(seed, loss_id=0)
        if seed == 2 and self.level in ("O1", "O2"):  # scales and counters differ from now on
            factor = math.inf
        return super().backward(seed + 100, factor, loss_id=1)


def assert_masters_are_the_weights(masters, model):
    """All, or those of the half ones."""
    weights = [p.detach() for p in model.parameters() if p.dtype != f32 or len(masters) > 4]
    assert_same(list(masters), [weight.float() for weight in weights])


WAYS = [
    (times, order)
    for times in itertools.product(TIMES, TIMES)
    for order in (ORDERS if times[0] == times[1] else ORDERS[:1])
]


@pytest.mark.covers(2)
@pytest.mark.parametrize("ways", [WAYS[i::4] for i in range(4)], ids=range(4))
@pytest.mark.parametrize(("kind", "level"), RUNS)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(kind, level, ways):
    training = Training(kind).initialize(level)
    training.steps(range(4))
    saved = through_a_file(training.state())
    losses = training.steps(range(4, 7))
    expected = training.state()
    assert all(map(math.isfinite, losses))
    for times, order in ways:
        again = resume(Training(kind, seed=1), level, saved, times, order)
        assert again.steps(range(4, 7)) == losses, (times, order)
        resumed = again.state()
        if times[1] == "before initialize":  # when torch's class loaded what it knows
            resumed["optimizer"]["step_history"] = expected["optimizer"]["step_history"]
        assert_same(resumed, expected)


def as_apex_saved(state):
    """Without masters: apex kept them in no state dict."""
    state = through_a_file(state)
    for values in state["optimizer"]["state"].values():
        for key in MASTERS & values.keys():
            del values[key]
    return {**state, "amp": collections.OrderedDict(state["amp"])}


@pytest.mark.covers(2)
@pytest.mark.parametrize("when", TIMES)
@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind != "Adagrad"])
def test_checkpoints_of_apex_load(kind, level, when):
    """Masters start from the weights; the moments, which apex rounded to half, stay FP32."""
    training = Training(kind).initialize(level)
    training.steps(range(4))
    saved = as_apex_saved(training.state())
    losses = training.steps(range(4, 7))
    for order in ORDERS:
        again = Training(kind, seed=1)
        for param in again.model.parameters():
            param.data += 1  # where a weight rounds to the saved one, its master stays as it is
        resume(again, level, saved, (when, when), order)
        loaded = again.optimizer.state_dict()["state"]
        for key, values in saved["optimizer"]["state"].items():
            assert_same({name: loaded[key][name] for name in values}, values)
        assert_masters_are_the_weights(again.masters(), again.model)
        assert amp.state_dict() == saved["amp"]
        assert again.steps(range(4, 7)) == pytest.approx(losses, abs=0.02)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda value: pickle.loads(pickle.dumps(value))}


@pytest.mark.covers(2)
@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("make", ["state_dict", *COPIES])
def test_weights_loaded_before_the_first_step_are_in_checkpoints_and_copies(make, kind, level):
    """Pretrained ones, say; a checkpoint at step 0 has to hold them."""
    training = Training(kind).initialize(level)
    model, optimizer = training.model, training.optimizer
    model.load_state_dict({k: v * 2 + 0.25 for k, v in model.state_dict().items()})
    if make == "state_dict":
        state = optimizer.state_dict()["state"]
        masters = [v["master_param"] for v in state.values() if "master_param" in v]
    else:
        _, optimizer = COPIES[make]((model, optimizer))
        masters = [p.detach() for p in amp.master_params(optimizer) if hasattr(p, "model_param")]
    assert len(masters) == 4
    assert_masters_are_the_weights(masters, model)


@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("edited", [False, True])
def test_the_master_of_a_parameter_that_is_frozen_for_a_while(edited, order, level):
    training = Training("AdamW").initialize(level)
    training.steps(range(3))
    saved = through_a_file(training.state())
    master = saved["optimizer"]["state"][0]["master_param"].clone()
    again = Training("AdamW", seed=1)
    frozen = again.model[0].requires_grad_(False)
    again.initialize(level)
    again.load(saved, order)
    again.step(3)
    assert torch.equal(frozen.weight.float(), master.to(frozen.weight.dtype).float())
    if edited:
        with torch.no_grad():
            frozen.weight[0] = 0.5
        master[0] = 0.5
    frozen.requires_grad_(True)
    assert torch.equal(again.optimizer.state_dict()["state"][0]["master_param"], master)
    assert torch.equal(again.masters()[0], master)
    again.step(4)
    assert not torch.equal(again.masters()[0], master)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_masters_that_a_level_does_not_use_are_not_saved_again(level, kind):
    """They would be taken for those of the weights, which have moved on since."""
    saved = Training(kind).initialize("O2")
    saved.steps(range(3))
    without = Training(kind)
    without.load(saved.state())
    without.initialize(level)
    for state in (without.state(), copy.deepcopy(without).state()):
        states = state["optimizer"]["state"].values()
        assert not any(MASTERS & values.keys() for values in states)


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


# --- by torch.distributed.checkpoint --------------------------------------------------------------


class Idle(nn.Module):
    """Has a weight, and does not use it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))

    def forward(self, x):
        return x


class Wide(trainings.Training):
    """A training where one weight is large enough for quantized states and one gets no gradient.

    For the latter, torch's checkpoints cannot tell what another optimizer would keep.
    """

    def state(self):
        """Without the step history, which DCP saves with `skip_spikes` only: see test_skips.py."""
        states = super().state()
        states["optimizer"].pop("step_history", None)
        return states

    def __init__(self, kind, level, mode, seed=0):
        self.has_idle = kind not in GENERIC
        options = dict(MODES_OF_DCP[mode])
        masters = {key: options.pop(key) for key in ("master_weights",) if key in options}
        super().__init__(partial(OF_DCP[kind], **options), seed=seed)
        self.initialize(level, **masters)

    def layers(self):
        idle = [Idle()] if self.has_idle else []
        return nn.Linear(6, 700), nn.Tanh(), nn.BatchNorm1d(700), *idle, nn.Linear(700, 2)

    def save(self, folder, **options):
        model, optimizer = get_state_dict(
            self.model, self.optimizer, options=StateDictOptions(**options)
        )
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder, no_dist=True)

    def resume(self, folder, **options):
        options = StateDictOptions(**options)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        loaded = {"model": model, "optimizer": optimizer}
        dcp.load(loaded, checkpoint_id=folder, no_dist=True)
        states = {"model_state_dict": loaded["model"], "optim_state_dict": loaded["optimizer"]}
        set_state_dict(self.model, self.optimizer, **states, options=options)


OF_DCP = {
    **{kind: partial(make, kind) for kind in KINDS},
    **{f"torch {kind}": partial(make_torch, kind) for kind in ("sgd-dampening", "adagrad-all")},
    "LARC": lambda params: optim.LARC(torch.optim.SGD(params, lr=0.1, momentum=0.9)),
    "RMSprop": OPTIMIZERS["RMSprop"],
    "FP32 state": KeptInFloat32,
    "wrapper": lambda params: Delegates(optim.AdamW(params, lr=0.02, eps=1e-4)),
}
GENERIC = ("RMSprop", "FP32 state", "wrapper")
MODES_OF_DCP = {
    "whole": {},
    "split": {"master_weights": "split"},
    **{name: {"state_dtype": name} for name in (*QUANTIZED, "bf16")},
    "averages": {"ema_decay": 0.9},
    "stochastic": {"rounding": "stochastic", "master_weights": False},
}


def has_mode(kind, level, mode):
    if mode in QUANTIZED and kind in NEVER_QUANTIZED:
        return False  # not theirs
    if (kind, level) == ("RMSprop", "O3"):
        return False  # its step overflows
    if mode == "split" and level not in WITH_MASTERS:
        return False
    if mode == "stochastic" and level != "O5":
        return False
    of_ours = kind in KINDS
    return mode == "whole" or (of_ours or (mode == "split" and kind not in GENERIC))


# Level and mode together decide what there is to save.
RUNS_OF_DCP = [
    (kind, (level, mode))
    for kind, level, mode in itertools.product(OF_DCP, LEVELS, MODES_OF_DCP)
    if has_mode(kind, level, mode)
]
LOOKS = {
    "fresh": lambda training: None,
    "last_step": lambda training: getattr(training.optimizer, "last_step", None),
    "refresh_masters": lambda training: training.optimizer.refresh_masters(),
    "a step": lambda training: training.step(50),
}


@pytest.mark.covers(1)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize(("kind", "keeps"), RUNS_OF_DCP, ids=str)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_distributed_checkpoint_resumes_with_the_same_bits(
    kind, keeps, look, steps, tmp_path
):
    """Whoever looked at the optimizer before; and that it was saved changes nothing."""
    alone = Wide(kind, *keeps).steps(range(steps + 3))
    training = Wide(kind, *keeps)
    training.steps(range(steps))
    scale = copy.deepcopy(amp.state_dict())
    training.save(tmp_path)
    losses = training.steps(range(steps, steps + 3))
    # Before its first step torch makes one with zeros, of an optimizer that keeps its own.
    assert losses == alone[steps:] or (kind in GENERIC and steps == 0)
    expected = training.state()
    again = Wide(kind, *keeps, seed=1)
    LOOKS[look](again)
    again.resume(tmp_path)
    amp.load_state_dict(scale)
    assert again.steps(range(steps, steps + 3)) == losses
    assert_same(again.state(), expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_momentum_whose_first_step_was_skipped_is_saved_as_that(tmp_path):
    """By its count: a buffer of zeros that has begun would go another way."""
    training = Wide("torch sgd-dampening", "O2", "whole")
    training.step(0, math.inf)
    scale = copy.deepcopy(amp.state_dict())
    training.save(tmp_path)
    losses = training.steps(range(1, 4))
    again = Wide("torch sgd-dampening", "O2", "whole", seed=1)
    again.resume(tmp_path)
    amp.load_state_dict(scale)
    assert again.steps(range(1, 4)) == losses


@pytest.mark.parametrize(
    ("level", "mode"),
    [
        (level, mode)
        for level, mode in itertools.product(("O1", "O2"), ("whole", "split", *QUANTIZED))
        if has_mode("adamw", level, mode)
    ],
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_flat_states_resume_or_say_what_they_lack(level, mode, tmp_path):
    """torch takes the names of what it loads from optimizer.state."""
    training = Wide("adamw", level, mode)
    training.steps(range(2))
    training.save(tmp_path, flatten_optimizer_state_dict=True)
    again = Wide("adamw", level, mode, seed=1)
    if (level, mode) == ("O1", "whole"):
        again.resume(tmp_path, flatten_optimizer_state_dict=True)
        assert_same(again.state()["optimizer"], training.state()["optimizer"])
        return
    with pytest.raises(ValueError, match=r"(is missing|must be a tensor).*Nothing was"):
        again.resume(tmp_path, flatten_optimizer_state_dict=True)
