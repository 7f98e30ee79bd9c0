"""A training whose every step is skipped says so, once a stretch."""

import pytest
import torch

from ampfuse import amp
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
    for i in range(1, 4 * STRETCH - 5):
        try:
            step(model, optimizer, True)
        except RuntimeError as error:
            message = str(error)
            raised.append(i)
    assert f"{STRETCH} steps in a row" in message
    assert "the last was in bias" in message
    assert raised == [2 * STRETCH, 3 * STRETCH]
    assert torch.equal(model.weight, weight)
    step(model, optimizer, False)  # it trains on
    assert not torch.equal(model.weight, weight)


def test_single_good_steps_are_enough():
    model, optimizer = make(opt_level="O2")
    for i in range(4 * STRETCH):
        step(model, optimizer, i % STRETCH != 7)


def test_a_static_scale_never_skips():
    model, optimizer = make(opt_level="O2", loss_scale=128.0)
    for _ in range(2 * STRETCH + 1):
        step(model, optimizer, True)
    assert model.weight.isnan().all() or model.bias.isnan().all()


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
