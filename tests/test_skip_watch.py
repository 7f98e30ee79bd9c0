"""A training whose every step is skipped says so, once a stretch, and without waiting."""

import pytest
import torch

from ampfuse import amp
from ampfuse.optim import skip_watch
from ampfuse.optim.skip_watch import STRETCH


def make(optimizer=torch.optim.AdamW, **options):
    model = torch.nn.Linear(3, 2)
    options = {"verbosity": 0, **options}
    return amp.initialize(model, optimizer(model.parameters(), lr=0.1), **options)


def step(model, optimizer, bad):
    optimizer.zero_grad()
    output = model(torch.ones(1, 3))
    with amp.scale_loss(output.sum(), optimizer) as scaled:
        scaled.backward()
        if bad:
            model.bias.grad.fill_(float("nan"))
    optimizer.step()


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_stretch_of_skipped_steps(level, optimizer):
    model, optimizer = make(optimizer, opt_level=level, init_scale=1024.0)
    step(model, optimizer, False)
    weight = model.weight.detach().clone()
    raised = []
    for i in range(1, 4 * STRETCH):
        try:
            step(model, optimizer, True)
        except RuntimeError as error:
            message = str(error)
            raised.append(i)
    assert f"{STRETCH} steps in a row" in message
    assert "the last was in bias" in message
    assert raised == [STRETCH, 2 * STRETCH, 3 * STRETCH]
    assert torch.equal(model.weight, weight)
    step(model, optimizer, False)  # it trains on
    assert not torch.equal(model.weight, weight)


def test_single_good_steps_are_enough():
    model, optimizer = make(opt_level="O2")
    for i in range(3 * STRETCH):
        step(model, optimizer, i % STRETCH != 7)


def test_a_static_scale_never_skips():
    model, optimizer = make(opt_level="O2", loss_scale=128.0)
    for _ in range(2 * STRETCH + 1):
        step(model, optimizer, True)
    assert model.weight.isnan().all() or model.bias.isnan().all()


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop])
def test_skipped_steps_are_told_at_first_and_then_counted(optimizer, caplog):
    model, optimizer = make(optimizer, opt_level="O2", verbosity=1, init_scale=1024.0)
    quiet = make(opt_level="O2")
    told_at = []
    for i in range(31):
        step(model, optimizer, i % 3 == 1)
        step(*quiet, True)
        if len(caplog.messages) > len(told_at):
            told_at.append(i)
    told = [message.partition(" steps")[0] for message in caplog.messages]
    assert told == ["Gradient overflow: 1", "Gradient overflow: 10"]
    assert told_at == [1, 28]  # at once
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_counts_on_a_device_are_read_when_they_have_arrived(monkeypatch, caplog):
    """Without waiting: what has not arrived is left alone, and no second copy is made then."""

    class Count:
        is_cuda, value = True, 0

    class Slow:
        arrived, made = False, 0

        def __init__(self, count):
            Slow.made += 1
            self.value = count.value

        def has_arrived(self):
            return Slow.arrived

        def values(self):
            assert Slow.arrived
            return [self.value]

    class Table:
        @property
        def inspector(self):
            return self

        def state_field(self, name):
            return Count if name == "skipped_steps" else -1

    monkeypatch.setattr(skip_watch, "Sample", Slow)
    monkeypatch.setattr(skip_watch, "is_captured", lambda count: False)
    watch, table = skip_watch.SkipWatch(), Table()
    for i in range(STRETCH):
        Count.value, Slow.arrived = i // 4, i >= 80
        watch.after_step(table, tell=True)
        if i < 80:
            assert (Slow.made, caplog.messages) == (int(i >= 19), [])
    assert [m.partition(" steps")[0] for m in caplog.messages] == [
        "Gradient overflow: 4",
        "Gradient overflow: 24",
    ]
    raised_at = []
    for i in range(2 * STRETCH + 40):
        Count.value += 1
        Slow.arrived = i < 150 or i >= STRETCH + 150
        try:
            watch.after_step(table)
        except RuntimeError:
            raised_at.append(i)
    assert raised_at == [STRETCH + 179]  # of the second count that is read once copies arrive


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opt_level": "O1"}, "O1: FP32 weights; forward picks FP16 or FP32 for each operation"),
        ({"opt_level": "O2", "loss_scale": "128"}, "O2: FP16 model with FP32 batch norm; "),
    ],
)
def test_the_level_is_logged_in_a_line(options, message, caplog):
    with caplog.at_level("INFO", logger="ampfuse.amp"):
        make(verbosity=1, **options)
    (line,) = caplog.messages
    assert line.startswith(message)
    assert line.endswith("(autocast)." if options["opt_level"] == "O1" else " loss_scale=128.0.")
    assert len(line) < 150
