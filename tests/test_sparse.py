"""Sparse gradients under amp: unscaled, inspected, added up, skipped together with dense ones."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampfuse
from ampfuse import amp, optim

# SparseAdam's own step has to square gradients at O3 in FP16, where most vanish.
LEVELS = ("O0", "O1", "O2", "O4", "O5")
# Of how far the weights went.
TOLERANCE = {"O0": 1e-5, "O1": 2e-3, "O2": 1e-2, "O3": 0.05, "O4": 0.02, "O5": 0.05}
ADAM = {"eps": 1e-4}  # below which the difference of two gradients near 0 is large


class Net(nn.Module):
    def __init__(self, kind=nn.EmbeddingBag):
        super().__init__()
        self.items = kind(30, 8, sparse=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        vectors = self.items(x)
        return self.head(vectors if vectors.dim() == 2 else vectors.mean(1))


def split(make_sparse):
    return lambda model: [
        make_sparse(model.items.parameters()),
        torch.optim.AdamW(model.head.parameters(), lr=0.02, **ADAM),
    ]


OPTIMIZERS = {
    "SparseAdam": split(lambda params: torch.optim.SparseAdam(params, lr=0.02, **ADAM)),
    "one SGD": lambda model: [torch.optim.SGD(model.parameters(), lr=0.5)],
    "one Adagrad": lambda model: [torch.optim.Adagrad(model.parameters(), lr=0.1, eps=1e-4)],
}


def loss_of(model, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 30, (16, 5), generator=generator)
    return F.cross_entropy(model(x).float(), x.sum(1) % 4)


def backward(model, optimizers, seed, **options):
    with amp.scale_loss(loss_of(model, seed), optimizers, **options) as scaled:
        scaled.backward()


def made(level, name="SparseAdam", kind=nn.EmbeddingBag, **options):
    torch.manual_seed(0)
    model = Net(kind)
    optimizers = OPTIMIZERS[name](model)
    if level is not None:
        amp.initialize(model, optimizers, opt_level=level, verbosity=0, **options)
    return model, optimizers


def trained(level, name, kind, passes, delays=False, **options):
    model, optimizers = made(level, name, kind, **options)
    for step in range(8):
        for i in range(passes):
            seed = passes * step + i
            if level is None:
                loss_of(model, seed).backward()
            else:
                delay = {"delay_unscale": True} if delays and i < passes - 1 else {}
                backward(model, optimizers, seed, loss_id=i % options.get("num_losses", 1), **delay)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    return {name: value.float() for name, value in model.state_dict().items()}


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_close(found, expected, name, kind, tolerance):
    start = made(None, name, kind)[0].state_dict()
    moved = torch.cat([(expected[key] - start[key]).flatten() for key in start])
    wrong = torch.cat([(expected[key] - found[key]).flatten() for key in start])
    assert moved.norm() > 0.3
    assert wrong.norm() < tolerance * moved.norm()


CASES = [(level, name) for name in OPTIMIZERS for level in LEVELS] + [("O3", "one SGD")]


@pytest.mark.parametrize(("level", "name"), CASES)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_training(level, name, kind):
    scale = {"loss_scale": 128.0} if level in ("O3", "O5") else {}
    for passes, options in ((1, scale), (3, scale), (3, {**scale, "num_losses": 2})):
        expected = trained(None, name, kind, passes)
        found = trained(level, name, kind, passes, **options)
        assert_close(found, expected, name, kind, TOLERANCE[level])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_delayed_passes(level):
    expected = trained(None, "one SGD", nn.Embedding, 3)
    found = trained(level, "one SGD", nn.Embedding, 3, delays=True)
    assert_close(found, expected, "one SGD", nn.Embedding, TOLERANCE[level])


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("where", ["items", "head"])
@pytest.mark.parametrize("delay", [False, True])
def test_an_overflow_in_either_skips_both(level, where, delay):
    model, optimizers = made(level)
    scaler = amp.state_dict()["loss_scaler0"]["loss_scale"]
    backward(model, optimizers, 0)
    part = getattr(model, where).weight
    hook = part.register_hook(lambda gradient: gradient * float("inf"))
    backward(model, optimizers, 1, delay_unscale=delay)
    hook.remove()
    if delay:
        backward(model, optimizers, 2)
    before = weights(model)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.last_step.skipped.item() == 1
    assert all(map(torch.equal, weights(model), before))
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == scaler / 2
    told = [optimizer.last_step.overflow() for optimizer in optimizers]
    assert [each and each["parameter"] for each in told] == (
        ["items.weight", None] if where == "items" else [None, "head.weight"]
    )
    backward(model, optimizers, 3)
    for optimizer in optimizers:
        optimizer.step()
        assert optimizer.last_step.skipped.item() == 0
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == scaler / 2  # halved once
    assert not any(map(torch.equal, weights(model), before))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_that_users_see(level):
    model, (sparse, dense) = made(level)
    loss_of(model, 0).backward()
    expected = model.items.weight.grad.to_dense().float()
    model.zero_grad()
    backward(model, [sparse, dense], 0)
    (master,) = amp.master_params(sparse)
    assert model.items.weight.grad is master.grad
    assert master.grad.is_sparse
    assert master.grad.dtype == torch.float32
    assert torch.allclose(master.grad.to_dense(), expected, rtol=1e-2, atol=1e-4)
    norm = expected.norm().item()
    assert amp.clip_grad_norm_(sparse, 0.5 * norm).item() == pytest.approx(norm, rel=1e-2)
    assert master.grad.to_dense().norm().item() == pytest.approx(norm / 2, rel=1e-2)
    sparse.step()
    assert sparse.last_step.grad_norm.item() == pytest.approx(norm / 2, rel=1e-2)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("zero", ["model", "optimizer", "masters"])
def test_dropped_gradients(level, zero):
    """As in a GAN: a pass reaches the embedding, and its gradients are not wanted."""
    model, (sparse, dense) = made(level)
    backward(model, [sparse, dense], 0)
    if zero == "masters":
        for master in amp.master_params(sparse):
            master.grad = None
    else:
        {"model": model, "optimizer": sparse}[zero].zero_grad()
    before = model.items.weight.detach().clone()
    sparse.step()
    assert torch.equal(model.items.weight, before)
    backward(model, [sparse, dense], 1)
    sparse.step()
    assert not torch.equal(model.items.weight, before)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("sparse_first", [True, False])
def test_sparse_and_dense_gradients_of_one_parameter(level, sparse_first):
    """Of an embedding that serves as the output layer too, in a pass of its own."""

    def passes(model):
        def dense():
            return model.head(model.items.weight).float().square().mean()

        return [lambda: loss_of(model, 0), dense][:: 1 if sparse_first else -1]

    plain, (reference,) = made(None, "one SGD")
    for loss in passes(plain):
        loss().backward()
    reference.step()
    model, (optimizer,) = made(level, "one SGD")
    for loss in passes(model):
        with amp.scale_loss(loss(), optimizer) as scaled:
            scaled.backward()
    optimizer.step()
    found = model.items.weight.float()
    assert torch.allclose(found, plain.items.weight, rtol=0, atol=2e-3)


def test_an_exception_in_the_block_leaves_earlier_gradients():
    model, optimizers = made("O2")
    backward(model, optimizers, 0)
    (master,) = amp.master_params(optimizers[0])
    before = master.grad.to_dense()
    part = model.head.weight
    hook = part.register_hook(lambda gradient: gradient.missing)
    with pytest.raises(AttributeError, match="missing"):
        backward(model, optimizers, 1)
    hook.remove()
    assert torch.equal(master.grad.to_dense(), before)
    optimizers[0].step()


@pytest.mark.parametrize("initialized", [None, "O0", "O2"])
def test_grad_scaler(initialized):
    options = {} if initialized is None else {"loss_scale": 1.0}
    model, optimizers = made(initialized, **options)
    plain, references = made(None)
    scaler = ampfuse.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        scaler.scale(loss_of(model, step)).backward()
        loss_of(plain, step).backward()
        for optimizer, reference in zip(optimizers, references, strict=True):
            if step == 1:
                scaler.clip_grad_norm_(optimizer, 0.1)
                params = [p for group in reference.param_groups for p in group["params"]]
                nn.utils.clip_grad_norm_(params, 0.1)
            scaler.step(optimizer)
            reference.step()
        scaler.update()
        model.zero_grad()
        plain.zero_grad()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(found.float(), expected, rtol=0, atol=2e-3)
    before = weights(model)[0]
    scaler.scale(loss_of(model, 3) * float("inf")).backward()
    scaler.step(optimizers[0])
    assert torch.equal(model.items.weight, before)


def test_state_resumes():
    model, optimizers = made("O2")
    backward(model, optimizers, 0)
    optimizers[0].step()
    other, others = made("O2")
    other.load_state_dict(model.state_dict())
    others[0].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for each, owned in ((model, optimizers), (other, others)):
        each.zero_grad()
        backward(each, owned, 1)
        owned[0].step()
    assert torch.equal(model.items.weight, other.items.weight)


def test_a_fused_optimizer_names_the_way():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    message = r"items.weight is sparse.*SparseAdam.*amp.initialize and amp.scale_loss take"
    with pytest.raises(RuntimeError, match=message):
        backward(model, optimizer, 0)
    # An optimizer that is fused by itself stays so.
    model = Net()
    amp.initialize(model, optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)


def test_passes_under_no_sync_are_refused():
    """DistributedDataParallel would average the sparse gradients of the last pass alone."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model, optimizers = made("O2")
        parallel = nn.parallel.DistributedDataParallel(model)
        with parallel.no_sync():
            backward(parallel, optimizers, 0)
        with pytest.raises(
            RuntimeError, match=r"items.weight has a sparse .*Leave no_sync\(\) out"
        ):
            backward(parallel, optimizers, 1)
        model.zero_grad()
        before = model.items.weight.detach().clone()
        for seed in range(2):  # the way that is named
            backward(parallel, optimizers, seed)
        optimizers[0].step()
        assert not torch.equal(model.items.weight, before)
    finally:
        distributed.destroy_process_group()
