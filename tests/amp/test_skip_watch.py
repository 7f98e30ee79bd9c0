"""Skipped steps at the levels: who skips, what is logged, and when it is too many."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from ampfuse import amp
from ampfuse.optim.last_step import READ_EVERY, SkipWatch
from cases import history_of_norms
from trainings import Training

LIMIT = 20


def training(optimizer=torch.optim.AdamW, level="O2", **options):
    options = {"init_scale": 1024.0, "min_loss_scale": 1.0, **options}
    run = Training(partial(optimizer, lr=0.1, eps=1e-4), level, **options)
    run.optimizer.max_skipped_steps = LIMIT
    return run


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_too_many_skipped_steps_in_a_row_raise(level, optimizer, caplog):
    run = training(optimizer, level)
    run.step(0)
    before = run.masters()
    raised = {}
    for i in range(1, 3 * LIMIT):
        try:
            run.step(i, math.nan)
        except RuntimeError as error:
            raised[i] = str(error)
    assert [*raised] == [LIMIT, 2 * LIMIT]
    assert f"{LIMIT} steps in a row" in raised[LIMIT]
    assert "the last was in 0.weight" in raised[LIMIT]
    assert not caplog.messages
    assert all(map(torch.equal, run.masters(), before))
    run.step(0)  # it trains on
    assert not all(map(torch.equal, run.masters(), before))


@pytest.mark.parametrize("second", [4, 5, 6])
def test_a_second_streak_of_skipped_steps_raises_too(second):
    """Also if its beginning is not looked at, as on a GPU, and the first was longer."""
    history, optimizer, watch = torch.zeros(10), SimpleNamespace(max_skipped_steps=3), SkipWatch()
    fields = {"history": history, "last_bad_row": torch.tensor(-1)}
    table = SimpleNamespace(inspector=SimpleNamespace(state_field=fields.get))
    for streak in (5, second):
        for step in range(1, READ_EVERY + 1):
            history[0] += 1  # steps
            history[3] = max(0, step - (READ_EVERY - streak))  # skipped in a row
            if step < READ_EVERY:
                watch.after_step(optimizer, table, False, ())
        with pytest.raises(RuntimeError, match=f"{streak} steps in a row"):
            watch.after_step(optimizer, table, False, ())


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_spikes_are_skipped_at_every_level(level, optimizer, caplog):
    """The loss scale does not react to them."""
    run = training(optimizer, level, init_scale=8.0)
    run.optimizer.skip_spikes, run.optimizer.param_groups[0]["lr"] = 10.0, 1e-3
    run.step(0)
    run.optimizer.load_history(history_of_norms(0, 0.01))
    run.step(1)
    weights, masters = run.weights(), run.masters()
    run.step(2, 30.0)
    assert run.optimizer.last_step.skipped == 2
    if level in ("O1", "O2"):
        assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 8.0
        assert amp.state_dict()["loss_scaler0"]["unskipped"] == 3
    assert all(map(torch.equal, run.masters(), masters))
    assert all(map(torch.equal, run.weights(), weights))
    run.step(3)
    assert run.optimizer.last_step.skipped == 0
    (line,) = caplog.messages
    assert line.startswith("Step 2 was skipped: its gradient norm")


def test_a_spike_is_logged_also_when_an_overflow_came_before_the_look(caplog):
    """Dynamic scaling logs spikes alone. On a GPU several steps pass between two looks."""
    run = training(torch.optim.AdamW)
    run.optimizer.skip_spikes, run.optimizer.param_groups[0]["lr"] = 10.0, 1e-3
    run.step(0)
    table, watch = run.optimizer.param_table(), SkipWatch()
    history = history_of_norms(0, 0.01)
    history[:7] = torch.tensor([19, 1, 1, 2, 19, 1, 30.0])  # a spike in step 18, overflow in 19
    run.optimizer.load_history(history)
    watch.after_step(run.optimizer, table, True, ("spike",))
    (line,) = caplog.messages
    assert line.startswith("A step before step 19 was skipped: its gradient norm, 30, is a spike")
    assert line.endswith(" 1 of 19 steps so far.")


SKIPS = [  # where, options, whether a step with a NaN changes nothing; and with a step of its own
    ("O0", {}, False, False),
    ("O3", {}, False, False),
    ("O2 static", {}, False, False),
    *((level, {"skip_nonfinite": True}, True, True) for level in ("O0", "O3", "O4", "O5")),
    *((level, {"max_grad_norm": 1.0}, True, None) for level in ("O0", "O3", "O4", "O5")),
    ("O4", {}, True, True),
    ("O5", {}, True, True),
    ("O5 static", {}, True, True),
    ("O4", {"skip_nonfinite": False}, False, False),
    ("O5", {"skip_nonfinite": False}, False, False),
    ("O2", {"skip_nonfinite": False}, True, True),
]


@pytest.mark.parametrize(
    ("kind", "level", "options", "skips"),
    [("AdamW", level, options, fused) for level, options, fused, _ in SKIPS]
    # None: an option of fused optimizers.
    + [("RMSprop", level, options, own) for level, options, _, own in SKIPS if own is not None],
)
def test_steps_with_nan_are_skipped_where_the_level_or_the_user_says(
    kind, level, options, skips, caplog
):
    level, _, static = level.partition(" ")
    more = {"loss_scale": 8.0} if static else {}
    run = Training(partial(getattr(torch.optim, kind), lr=0.1, eps=1e-4), level, **more)
    for name, value in options.items():
        setattr(run.optimizer, name, value)
    run.step(0)
    before, masters = run.weights(), run.masters()
    for i in range(1, 6):
        run.step(i, math.nan)
    assert all(map(torch.equal, run.masters(), masters)) == skips
    assert all(map(torch.equal, run.weights(), before)) == skips
    assert all(each.isfinite().all() for each in run.weights()) == skips
    run.step(0)
    assert not all(map(torch.equal, run.masters(), masters))
    lines = [message for message in caplog.messages if "was skipped:" in message]
    counts = [1, 2, 4] if skips and level != "O2" else []
    assert len(lines) == len(counts)
    for line, count in zip(lines, counts, strict=True):
        assert f"Step {count + 1} was skipped: the gradient of 0.weight was not finite." in line
        assert line.endswith(f" {count} of {count + 1} steps so far.")


def test_single_good_steps_are_enough():
    run = training()
    for i in range(3 * LIMIT):
        run.step(i, math.nan if i % LIMIT != 7 else 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opt_level": "O1"}, "O1: FP32 weights; forward picks FP16 or FP32 for each operation"),
        ({"opt_level": "O2", "loss_scale": "128"}, "O2: FP16 model with FP32 batch norm; "),
    ],
)
def test_the_level_is_logged_in_a_line(options, message, caplog):
    with caplog.at_level("INFO", logger="ampfuse.amp"):
        amp.initialize(torch.nn.Linear(3, 2), verbosity=1, **options)
    (line,) = caplog.messages
    assert line.startswith(message)
    assert line.endswith("(autocast)." if options["opt_level"] == "O1" else " loss_scale=128.0.")
    assert len(line) < 150
