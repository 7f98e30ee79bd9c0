"""What half models (O2, O5) return: FP32, whose cast waits until somebody looks."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import profile

from ampfuse import amp
from ampfuse.amp.float32_output import Float32Output


def initialized(level="O5", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 60))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def is_cast(output):
    return output._float32 is not None


X, TARGET = torch.linspace(-1, 1, 24).view(4, 6), torch.tensor([0, 59, 7, 30])
VIEWS = {
    "flatten": lambda y: y.view(2, 2, 60).flatten(0, 1),
    "reshape": lambda y: torch.reshape(y.view(2, 2, -1), (4, -1)),
    "rows": lambda y: y[:4],
    "transposed": lambda y: y.t().t().contiguous(),
    "chunks": lambda y: y.split(4)[0],
}
LOOKS = {
    "softmax": lambda y: y.softmax(1),
    "sum": lambda y: y.sum(),
    "operator": lambda y: 2 * y,
    "mse": lambda y: F.mse_loss(y, torch.zeros(4, 60)),
    "stack": lambda y: torch.stack([y, y]),
    "detached": lambda y: y.detach(),
    "list": lambda y: torch.tensor(y.tolist()),
    "pickled": lambda y: pickle.loads(pickle.dumps(y.detach())),
    "copied": lambda y: copy.deepcopy(y.detach()),
    "probabilities": lambda y: F.cross_entropy(y, torch.full((4, 60), 1 / 60)),
}


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_loss_on_a_view_reads_the_half_logits(level, view):
    model, optimizer = initialized(level)
    output = model(X)
    assert (type(output), output.dtype, output.shape) == (Float32Output, torch.float32, (4, 60))
    with profile() as profiled:
        loss = F.cross_entropy(VIEWS[view](output), TARGET)
    names = {event.key for event in profiled.key_averages()}
    assert "ampfuse::cross_entropy_loss" in names
    assert not is_cast(output)
    expected = F.cross_entropy(output.double(), TARGET)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()


@pytest.mark.parametrize("look", LOOKS)
def test_to_every_other_function_it_is_the_float32_tensor(look):
    model, _ = initialized()
    other, _ = initialized(cast_model_outputs=torch.float32)
    output, plain = model(X), other(X)
    assert type(plain) is torch.Tensor
    found, expected = LOOKS[look](output), LOOKS[look](plain)
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    if found.requires_grad:
        for result in (found, expected):
            result.square().sum().backward()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-2, atol=1e-4)


def test_what_is_done_to_it_stays_done():
    model, _ = initialized()
    output = model(X)
    output.mul_(3)
    seen = []
    output.register_hook(seen.append)
    loss = F.cross_entropy(output, TARGET)
    expected = F.cross_entropy(3 * model(X).detach(), TARGET)
    torch.testing.assert_close(loss.detach(), expected)
    loss.backward()
    assert seen[0].dtype == torch.float32


def test_it_is_cast_at_once_where_that_is_all():
    model, _ = initialized()
    with torch.no_grad():
        assert type(model(X)) is torch.Tensor
    assert type(torch.compile(model, backend="eager")(X)) is torch.Tensor


def test_a_step_trains_as_with_outputs_cast_at_once():
    losses = []
    for options in ({}, {"cast_model_outputs": torch.float32}):
        model, optimizer = initialized(**options)
        for _ in range(20):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X), TARGET)
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] < 2
