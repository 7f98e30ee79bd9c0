"""A training whose every step is skipped says so, once a stretch, and without waiting."""

import itertools

import pytest
import torch

from ampfuse import amp
from ampfuse.optim import skip_watch
from ampfuse.optim.skip_watch import STRETCH


def make(optimizer=torch.optim.AdamW, **options):
    model = torch.nn.Linear(3, 2)
    return amp.initialize(model, optimizer(model.parameters(), lr=0.1), verbosity=0, **options)


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
    model, optimizer = make(optimizer, opt_level=level)
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
    assert STRETCH <= raised[0] < 2 * STRETCH
    assert all(b - a == STRETCH for a, b in itertools.pairwise(raised))
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


def test_copies_that_have_not_arrived_are_not_read(monkeypatch):
    """On a GPU the count is read when its copy is there: a stretch later."""

    class Slow(skip_watch._Sample):
        arrived = False

        def has_arrived(self):
            return self.arrived

        def value(self):
            assert self.arrived
            return super().value()

    class Table:
        steps = 0

        def state_field(self, name):
            return torch.tensor(self.steps if name == "skipped_steps" else -1)

    monkeypatch.setattr(skip_watch, "_Sample", Slow)
    watch, table = skip_watch.SkipWatch(), Table()
    for _ in range(3 * STRETCH - 1):
        table.steps += 1
        watch.after_step(table)
        if table.steps == 2 * STRETCH + 1:
            for sample in watch._samples:
                sample.arrived = True
    table.steps += 1
    with pytest.raises(RuntimeError, match="in a row"):
        watch.after_step(table)
