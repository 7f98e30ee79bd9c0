"""What models that compute in half return: FP32, whose cast waits until somebody looks."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import cross_entropy as imported_by_name
from torch.profiler import profile

from amp_training import backward
from ampfuse import amp
from ampfuse.amp.float32_output import Float32Output
from cases import bf16, f16, f32

HALF = {"O1": f16, "O2": f16, "O4": bf16, "O5": bf16}
halves = pytest.mark.parametrize("level", HALF)


def initialized(level="O5", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 60))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


X, TARGET = torch.linspace(-1, 1, 24).view(4, 6), torch.tensor([0, 59, 7, 30])
OTHER = torch.linspace(-1, 1, 240).view(4, 60)
SOFT = OTHER.softmax(1)
VIEWS = {
    "itself": lambda y: y,
    "flatten": lambda y: y.view(2, 2, 60).flatten(0, 1),
    "reshape": lambda y: torch.reshape(y.view(2, 2, -1), (4, -1)),
    "rows": lambda y: y[:4],
    "transposed": lambda y: y.t().t().contiguous(),
    "chunks": lambda y: y.split(4)[0],
}
# Looks that are float32 tensors, losses among them.
LOOKS = {
    "softmax": lambda y: y.softmax(1),
    "sum": lambda y: y.sum(),
    "operator": lambda y: 2 * y,
    "stack": lambda y: torch.stack([y, y]),
    "detached": lambda y: y.detach(),
    "list": lambda y: torch.tensor(y.tolist(), dtype=y.dtype),
    "pickled": lambda y: pickle.loads(pickle.dumps(y.detach())),
    "copied": lambda y: copy.deepcopy(y.detach()),
    "probabilities": lambda y: F.cross_entropy(y, SOFT.to(y.dtype)),
    "cross_entropy": lambda y: F.cross_entropy(y, TARGET),
    "by name": lambda y: imported_by_name(y, TARGET),
    "module": lambda y: nn.CrossEntropyLoss(label_smoothing=0.1)(y, TARGET),
    "view": lambda y: F.cross_entropy(y.view(2, 2, 60).transpose(1, 2), TARGET.view(2, 2)),
    "log_softmax": lambda y: F.nll_loss(y.log_softmax(1), TARGET),
    "mse": lambda y: F.mse_loss(y, OTHER.to(y.dtype)),
    "l1": lambda y: nn.L1Loss()(y, OTHER),
    "huber": lambda y: F.huber_loss(y, OTHER.to(y.dtype)),
    "bce": lambda y: F.binary_cross_entropy_with_logits(y, SOFT.to(y.dtype)),
    "kl": lambda y: F.kl_div(F.log_softmax(y, -1), SOFT, reduction="batchmean"),
    "wgan": lambda y: -y.mean(),
    "hinge": lambda y: F.relu(1 - y).mean(),
    "by hand": lambda y: ((y - OTHER) ** 2).sum(),
    "half by hand": lambda y: (y * y)[y > 0].sum(),
    "pow": lambda y: y.pow(2).mean(),
    "norm": lambda y: torch.linalg.vector_norm(y) + y.norm(),
    "split": lambda y: sum(part.sum() for part in y.split(7, dim=1)),
    "cat": lambda y: torch.cat([y, y]).logsumexp(0).sum(),
}


@halves
@pytest.mark.parametrize("view", VIEWS)
def test_a_loss_on_a_view_reads_the_half_logits(level, view):
    model, optimizer = initialized(level)
    output = model(X)
    assert (type(output), output.dtype, output.shape) == (Float32Output, f32, (4, 60))
    with profile() as profiled:
        loss = F.cross_entropy(VIEWS[view](output), TARGET)
    names = {event.key for event in profiled.key_averages()}
    assert "ampfuse::cross_entropy_loss" in names
    assert output._float32 is None  # nobody has looked
    assert torch.equal(output, output.to(HALF[level]))
    expected = F.cross_entropy(output.double(), TARGET)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    backward(loss, optimizer)
    optimizer.step()


@halves
@pytest.mark.parametrize("look", LOOKS)
def test_to_every_other_function_it_is_the_float32_tensor(look, level):
    model, _ = initialized(level)
    other, _ = initialized(level, cast_model_outputs=f32)
    output, plain = model(X), other(X)
    assert type(plain) is torch.Tensor
    found, expected = LOOKS[look](output), LOOKS[look](plain)
    assert type(found) is torch.Tensor
    assert found.dtype == f32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    exact = LOOKS[look](plain.detach().double())
    torch.testing.assert_close(found.double(), exact.double(), rtol=1e-5, atol=1e-5)
    if found.requires_grad:
        for result in (found, expected):
            result.square().sum().backward()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-2, atol=1e-4)


@halves
def test_a_scale_of_65536_gives_finite_gradients(level):
    """A half loss would receive 65536, which is inf in FP16, as its gradient."""
    output = initialized(level)[0](X)
    (gradient,) = torch.autograd.grad(output.mean() * 65536.0, output)
    assert gradient.isfinite().all()


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
    assert seen[0].dtype == f32


def test_it_is_cast_at_once_where_that_is_all():
    model, _ = initialized()
    with torch.no_grad():
        assert type(model(X)) is torch.Tensor
    assert type(torch.compile(model, backend="eager")(X)) is torch.Tensor
