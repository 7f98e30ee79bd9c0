"""Optimizers of others: their state resumes bit by bit, and wrappers and old signatures train."""

from functools import partial

import pytest
import torch

from amp_training import Training, follows_plain_torch, resume
from ampfuse import amp, optim
from cases import LEVELS, assert_same_bits, through_a_file
from third_party_optimizers import WRAPPERS, Counting, KeptInFloat32, Odd, ZeroesItself


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
    return dict(enumerate([*training.weights(), *training.masters()]))


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
    try:
        resumes_with_the_same_bits(name, level, "after the first step")
    except RuntimeError as error:
        # In pure FP16 some steps of others do not even run: a state in FP32 beside the weight.
        if level == "O3" and "dtype" in str(error):
            pytest.skip(str(error))
        raise


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
    follows_plain_torch(WRAPPERS[name], level, in_pure_fp16=False)


@pytest.mark.parametrize("level", LEVELS)
def test_hooks_and_schedulers_of_a_wrapper(level):
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


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("make", "key"), [(torch.optim.AdamW, "exp_avg"), (torch.optim.Adafactor, "master_param")]
)
def test_only_what_a_step_of_ours_reads_is_checked(make, key, level):
    training = Training(make, level)
    training.step(0)
    state, before = training.optimizer.state_dict(), tensors(training)
    if key not in state["state"][0]:
        return
    state["state"][0] = {**state["state"][0], key: torch.ones(3, 3)}
    with pytest.raises(ValueError, match=rf"{key} for 0.weight has shape \(3, 3\)"):
        training.optimizer.load_state_dict(state)
    assert_same_bits(tensors(training), before)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cls", [ZeroesItself, Counting])
def test_zero_grad_of_the_optimizers_own(cls, level):
    training = follows_plain_torch(partial(cls, lr=0.02), level, in_pure_fp16=False)
    optimizer = training.optimizer
    optimizer.zero_grad()
    training.backward(0)
    optimizer.zero_grad()  # between a pass and its step too
    for param in (*training.model.parameters(), *amp.master_params(optimizer)):
        assert param.grad is None or not param.grad.any()
    if cls is Counting:
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


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_a_learning_rate_that_became_nan_is_refused(cls, level):
    training = Training(partial(cls, lr=0.1), level)
    training.steps(range(2))
    before = {key: tensor.detach().clone() for key, tensor in tensors(training).items()}
    training.optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match="Invalid learning rate: nan"):
        training.steps(range(2, 3))
    assert_same_bits(tensors(training), before)
