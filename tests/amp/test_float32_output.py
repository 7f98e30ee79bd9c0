"""What models that compute in half return: float32 tensors to all that is done with them.

Each use of an output is compared with the same use of a plain FP32 copy, which the same model makes
with ``cast_model_outputs=torch.float32``: equal values, equal gradients of the weights.
"""

import collections
import copy
import dataclasses
import io
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.functional import cross_entropy as imported_by_name
from torch.profiler import profile
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from amp_training import backward
from ampfuse import amp
from ampfuse.amp import float32_output
from ampfuse.amp.float32_output import Float32Output
from cases import bf16, f16, f32

HALF = {"O1": f16, "O2": f16, "O3": f16, "O4": bf16, "O5": bf16}
halves = pytest.mark.parametrize("level", HALF)
CLASSES = 60


@pytest.fixture(autouse=True)
def no_output_is_too_small(monkeypatch):
    monkeypatch.setattr(float32_output, "LEAST", 1)


def initialized(level="O5", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def plain(level="O5"):
    return initialized(level, cast_model_outputs=f32)


X, TARGET = torch.linspace(-1, 1, 24).view(4, 6), torch.tensor([0, 59, 7, 30])
OTHER = torch.linspace(-1, 1, 240).view(4, CLASSES)
SOFT = OTHER.softmax(1)


def ce(y, target=TARGET):
    return F.cross_entropy(y, target)


# --- the loss of half logits ------------------------------------------------------------------

# Ways from an output to the rows of a loss, none of which needs an FP32 copy.
ROWS = {
    "itself": lambda y: y,
    "flatten": lambda y: y.view(2, 2, CLASSES).flatten(0, 1),
    "reshape": lambda y: torch.reshape(y.view(2, 2, -1), (4, -1)),
    "slice": lambda y: y[:4],
    "shifted": lambda y: (
        torch.cat([y, y]).view(2, 4, CLASSES)[:, :-2].contiguous().view(4, CLASSES)
    ),
    "transposed": lambda y: y.t().t().contiguous(),
    "chunks": lambda y: y.split(4)[0],
    "picked": lambda y: y[torch.arange(4)],
    "float": lambda y: y.float(),
    "to": lambda y: y.to(torch.float32),
    "to dtype": lambda y: y.to(dtype=f32, device="cpu"),
    "type": lambda y: y.type(torch.float32),
    "type name": lambda y: y.type("torch.FloatTensor"),
    "type_as": lambda y: y.type_as(OTHER),
    "clone": lambda y: y.clone(),
    "unsqueezed": lambda y: y.unsqueeze_(0).squeeze_(0),
}
# Looks at an output that leave no FP32 copy of it.
GLANCES = {
    "nothing": lambda y: None,
    "accuracy": lambda y: (y.argmax(1) == TARGET).float().mean(),
    "top 5": lambda y: y.topk(5, dim=1)[1],
    "largest": lambda y: y.max(1).values.sum().item(),
    "softmax": lambda y: y.softmax(1).max(),
    "detached": lambda y: y.detach().mean().item(),
    "NaN": lambda y: torch.isnan(y).any(),
}


@pytest.mark.parametrize("level", ["O1", "O5"])
@pytest.mark.parametrize("rows", ROWS)
def test_a_loss_reads_half_logits(level, rows):
    check_reads_half_logits(level, lambda y: ce(ROWS[rows](y)))


@pytest.mark.parametrize("level", ["O2", "O4"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("glance", GLANCES)
def test_a_loss_reads_half_logits_after_a_look(level, mode, glance):
    def loss(y):
        with mode():
            GLANCES[glance](y)
        return ce(y)

    check_reads_half_logits(level, loss)


COLUMN = torch.stack([TARGET, TARGET], 1)[:, 0]
WEIGHTS = torch.stack([SOFT[0], SOFT[1]], 1)[:, 0] + 1
LOSSES = {
    "by name": lambda y: imported_by_name(y, TARGET),
    "column": lambda y: F.cross_entropy(y, COLUMN, WEIGHTS),
    "log_softmax, column": lambda y: F.nll_loss(y.log_softmax(1), COLUMN, WEIGHTS),
    "module": lambda y: nn.CrossEntropyLoss(label_smoothing=0.1)(y, TARGET),
    "weights": lambda y: F.cross_entropy(y, TARGET, SOFT[0] + 1, reduction="none").sum(),
    "log_softmax": lambda y: F.nll_loss(y.log_softmax(1), TARGET),
    "log_softmax, weights": lambda y: F.nll_loss(F.log_softmax(y, -1), TARGET, SOFT[0] + 1),
    "log_softmax, sum": lambda y: F.nll_loss(F.log_softmax(y, -1), TARGET, reduction="sum"),
    "log_softmax, each": lambda y: F.nll_loss(
        F.log_softmax(y, -1), TARGET, ignore_index=7, reduction="none"
    ).sum(),
    "modules": lambda y: nn.NLLLoss(ignore_index=7)(nn.LogSoftmax(1)(y), TARGET),
}


@pytest.mark.parametrize("level", ["O1", "O3", "O5"])
@pytest.mark.parametrize("loss", LOSSES)
def test_other_names_of_the_loss_read_half_logits(level, loss):
    check_reads_half_logits(level, LOSSES[loss])


def check_reads_half_logits(level, loss_of):
    """The loss and its gradients are right, and made by the kernels, in the end of half logits."""
    (model, optimizer), (reference, _) = initialized(level), plain(level)
    output = model(X)
    assert (type(output), output.dtype, output.shape) == (Float32Output, f32, (4, CLASSES))
    with profile() as profiled:
        loss = loss_of(output)
        loss.backward()
    names = {event.key for event in profiled.key_averages()}
    assert {"ampfuse::cross_entropy_loss"} <= names
    assert output._memory.float32 is None, "the output was copied to FP32"
    expected = loss_of(reference(X))
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert model[2].bias.grad is not None
    same_gradients(model, reference)
    optimizer.step()


def same_gradients(model, reference):
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if theirs.grad is None:
            continue
        mine, theirs = mine.grad.float(), theirs.grad.float()
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2 * theirs.abs().max().item())


@pytest.mark.parametrize("loss", ["cross_entropy", "log_softmax"])
def test_the_loss_of_half_logits_makes_no_fp32_tensor_of_their_size(loss):
    model, _ = initialized()
    rows = 512
    x, target = torch.randn(rows, 6), torch.randint(CLASSES, (rows,))
    with profile(profile_memory=True, record_shapes=True) as profiled:
        y = model(x)
        (
            ce(y, target) if loss == "cross_entropy" else F.nll_loss(y.log_softmax(1), target)
        ).backward()
    allocated = [e.self_cpu_memory_usage for e in profiled.events() if e.self_cpu_memory_usage > 0]
    assert max(allocated) < 4 * rows * CLASSES


# --- every other use ----------------------------------------------------------------------------


def by_numpy(y):
    return torch.from_numpy(y.detach().numpy().copy())


def into_a_view(y):
    rows = y.view(2, 120)
    rows[0].zero_()
    return ce(y) + y.sum()


def added_in_place(y):
    y.add_(1)
    y[0] = 0
    y[:, 1] *= 2
    return ce(y)


def written_as_out(y):
    torch.add(OTHER, 1, out=(z := y.detach()))
    return z.sum() + y.detach().sum()


def changed_through_numpy(y):
    y.detach().numpy()[:] = 2
    return y.detach().sum()


def by_hook(y):
    seen = []
    y.register_hook(seen.append)
    y.view(-1).register_hook(seen.append)
    loss = ce(y)
    loss.backward(retain_graph=True)
    return torch.cat([g.view(-1) for g in seen])


def hook_that_scales(y):
    y.register_hook(lambda g: g * 3)
    return ce(y)


def retained(y):
    y.retain_grad()
    ce(y).backward(retain_graph=True)
    return y.grad.clone()


def as_a_leaf(y):
    z = y.detach().requires_grad_()
    ce(z).backward()
    return z.grad


def twice(y):
    (g,) = torch.autograd.grad(ce(y), y, create_graph=True)
    return g.square().sum() * 100


def twice_by_log_softmax(y):
    (g,) = torch.autograd.grad(F.nll_loss(y.log_softmax(1), TARGET), y, create_graph=True)
    return g.square().sum() * 100


class Named(torch.Tensor):
    pass


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return y * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2 + 0 * ctx.saved_tensors[0]


def saved(y):
    buffer = io.BytesIO()
    torch.save(y.detach(), buffer)
    buffer.seek(0)
    return torch.load(buffer)


def offloaded(y):
    with torch.autograd.graph.save_on_cpu():
        return ce(y) + y.log_softmax(1).square().mean()


def anomaly(y):
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        return ce(y) + y.square().mean()


def under_autocast(y):
    with torch.autocast("cpu", dtype=bf16):
        return ce(y) + (y @ OTHER.t()).float().mean()


def pickled_for_backward(y):
    with torch.autograd.graph.saved_tensors_hooks(pickle.dumps, pickle.loads):
        return ce(y) + F.nll_loss(y.log_softmax(1), TARGET) + y.exp().mean()


def in_batches(y):
    return torch.autograd.grad(
        F.cross_entropy(y, TARGET, reduction="none"), y, torch.eye(4), is_grads_batched=True
    )


def written_through_other_type(y):
    with torch.no_grad():
        y.view(torch.int32)[0] = 0
    return y.detach() + 0


def data_set(y):
    y.data = 2 * OTHER
    return ce(y)


def dual(y):
    with torch.autograd.forward_ad.dual_level():
        loss = ce(torch.autograd.forward_ad.make_dual(y.detach(), OTHER))
        return torch.autograd.forward_ad.unpack_dual(loss).tangent


def jagged(y):
    return torch.nested.nested_tensor_from_jagged(y.view(-1), torch.tensor([0, 3, 240])).values()


def stepped(y):
    y.unsqueeze_(1)
    y.t_() if y.dim() == 2 else y.transpose_(0, 1)
    return y.mul(OTHER).sum()


def traced(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


# Each gives a tensor, or tuple of them; of what requires a gradient the gradients are compared too.
USES = {
    "softmax": lambda y: y.softmax(1),
    "sum": lambda y: y.sum(),
    "operator": lambda y: 2 * y + y / 3,
    "stack": lambda y: torch.stack([y, y]),
    "cat": lambda y: torch.cat([y, OTHER, y]).logsumexp(0),
    "where": lambda y: torch.where(y > 0, y, OTHER),
    "einsum": lambda y: torch.einsum("nc,mc->nm", y, OTHER),
    "pad": lambda y: F.pad(y, (1, 1)),
    "iterated": lambda y: torch.stack(list(y)),
    "split": lambda y: sum(part.sum() for part in y.split(7, dim=1)),
    "expand": lambda y: y.expand(2, 4, CLASSES).sum(0),
    "detached": lambda y: y.detach(),
    "data": lambda y: y.data.clone(),
    "list": lambda y: torch.tensor(y.tolist(), dtype=y.dtype),
    "numpy": by_numpy,
    "dlpack": lambda y: torch.from_dlpack(y.detach()).clone(),
    "array": lambda y: torch.as_tensor(y.detach().__array__()).clone(),
    "storage": lambda y: torch.tensor(y.untyped_storage().nbytes() // y.numel()),
    "pickled": lambda y: pickle.loads(pickle.dumps(y.detach())),
    "saved": saved,
    "copied": lambda y: copy.deepcopy(y.detach()),
    "bits": lambda y: y.detach().view(torch.int32),
    "double": lambda y: y.double() * 2,
    "half": lambda y: y.half() * 2,
    "zeros_like": lambda y: torch.zeros_like(y) + y.new_ones(1),
    "item": lambda y: torch.tensor(y[0, 0].item() + float(y[1, 1])),
    "sorted": lambda y: y.sort(1),
    "topk": lambda y: y.topk(3),
    "max": lambda y: y.max(1),
    "amax": lambda y: y.amax(),
    "masked": lambda y: y[y > 0],
    "gather": lambda y: y.gather(1, TARGET[:, None]),
    "by list": lambda y: y[[0, 2]],
    "cross_entropy": ce,
    "two losses": lambda y: ce(y) + F.mse_loss(y, OTHER),
    "probabilities": lambda y: F.cross_entropy(y, SOFT),
    "with spatial": lambda y: F.cross_entropy(
        y.view(2, 2, CLASSES).transpose(1, 2), TARGET.view(2, 2)
    ),
    "log_softmax itself": lambda y: y.log_softmax(1),
    "log_softmax, viewed": lambda y: F.nll_loss(
        y.view(2, 2, -1).log_softmax(-1).view(4, -1), TARGET
    ),
    "log_softmax, looked at": lambda y: (lambda z: F.nll_loss(z, TARGET) + z.mean())(
        y.log_softmax(1)
    ),
    "log_softmax, scaled": lambda y: F.nll_loss(2 * y.log_softmax(1), TARGET),
    "mse": lambda y: F.mse_loss(y, OTHER),
    "huber": lambda y: F.huber_loss(y, OTHER),
    "bce": lambda y: F.binary_cross_entropy_with_logits(y, SOFT),
    "kl": lambda y: F.kl_div(F.log_softmax(y, -1), SOFT, reduction="batchmean"),
    "hinge": lambda y: F.relu(1 - y).mean(),
    "by hand": lambda y: ((y - OTHER) ** 2).sum(),
    "norm": lambda y: torch.linalg.vector_norm(y) + y.norm(),
    "view written": into_a_view,
    "written": added_in_place,
    "out": written_as_out,
    "through numpy": changed_through_numpy,
    "hook": by_hook,
    "scaling hook": hook_that_scales,
    "retain_grad": retained,
    "gradient": lambda y: torch.autograd.grad(ce(y), y)[0],
    "leaf": as_a_leaf,
    "second derivative": twice,
    "second derivative, log_softmax": twice_by_log_softmax,
    "function": lambda y: Doubled.apply(y),
    "offloaded": offloaded,
    "anomaly": anomaly,
    "autocast": under_autocast,
    "shape in place": stepped,
    "func.grad": lambda y: grad(ce)(y.detach()),
    "func.vmap": lambda y: vmap(lambda row, t: ce(row, t))(y.detach(), TARGET),
    "uint8 targets": lambda y: F.nll_loss(y.log_softmax(1), TARGET.to(torch.uint8)),
    "complex": lambda y: torch.view_as_complex(y.view(4, -1, 2)).abs(),
    "other type written": written_through_other_type,
    "jagged": jagged,
    "data set": data_set,
    "tensors in a list": lambda y: torch.tensor([y[0, 0], y[1, 1]]),
    "format": lambda y: torch.tensor(float(f"{y[0, 0]:.3f}")),
    "subclass": lambda y: (2 * y.as_subclass(Named)).as_subclass(torch.Tensor),
    "stored by pickle": pickled_for_backward,
    "in batches": in_batches,
    "dual": dual,
    "compiled": lambda y: torch.compile(lambda z: (2 * z).exp().sum(1), backend="aot_eager")(y),
    "compiled loss": lambda y: torch.compile(ce, backend="aot_eager", fullgraph=True)(y),
    "compiled, every other row": lambda y: torch.compile(
        lambda z: F.cross_entropy(z, TARGET[::2]), backend="aot_eager"
    )(y[::2]),
    "compiled write": lambda y: torch.compile(lambda z: z.clone().mul_(2) + z, backend="aot_eager")(
        y
    ),
}


@pytest.mark.parametrize("level", ["O1", "O5"])
@pytest.mark.parametrize("use", USES)
def test_in_every_use_it_is_the_float32_tensor(use, level):
    torch._dynamo.reset()
    (model, _), (reference, _) = initialized(level), plain(level)
    output, expected = model(X), reference(X)
    assert (type(output), type(expected)) == (Float32Output, torch.Tensor)
    assert output.requires_grad
    assert not output.is_leaf
    mine, theirs = (pytree.tree_leaves(USES[use](y)) for y in (output, expected))
    for found, right in zip(mine, theirs, strict=True):
        assert (found.dtype, found.shape, found.requires_grad) == (
            right.dtype,
            right.shape,
            right.requires_grad,
        )
        torch.testing.assert_close(found.detach() + 0, right.detach(), rtol=1e-2, atol=1e-3)
        if right.requires_grad:
            for result in (found, right):
                result.square().sum().backward(retain_graph=True)
    assert torch.equal(output.detach(), expected.detach()), "the output's values afterwards"
    if any(right.requires_grad for right in theirs):
        same_gradients(model, reference)


@halves
def test_a_scale_of_65536_gives_finite_gradients(level):
    """A half loss would receive 65536, which is inf in FP16, as its gradient."""
    output = initialized(level)[0](X)
    (gradient,) = torch.autograd.grad(output.mean() * 65536.0, output)
    assert gradient.dtype == f32
    assert gradient.isfinite().all()


def test_its_shape_and_text_are_those_of_the_tensor():
    output, expected = initialized()[0](X), plain()[0](X)
    assert str(output.detach()) == str(expected.detach())
    assert (len(output), output.stride(), output.is_contiguous()) == (4, (CLASSES, 1), True)
    assert output.element_size() == 4


# --- functions of the whole model ---------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, net, reentrant):
        super().__init__()
        self.net, self.reentrant = net, reentrant

    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=self.reentrant)


def sum_of_squares(model, x):
    return model(x).square().sum()


def under_forward_ad(model, x):
    with torch.autograd.forward_ad.dual_level():
        y = model(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        return torch.autograd.forward_ad.unpack_dual(y).tangent


def by_functional_call(model, x):
    def loss(weights):
        return ce(functional_call(model, weights, (x,)))

    return grad(loss)({name: p.detach() for name, p in model.named_parameters()})["2.bias"].float()


def stale(model, x):
    """An output that was read before its model ran again."""
    y = model(x)
    model(2 * x)
    return y.detach()


WHOLE = {
    "checkpoint": lambda m, x: ce(Checkpointed(m, False)(x)),
    "reentrant checkpoint": lambda m, x: ce(Checkpointed(m, True)(x.clone().requires_grad_())),
    "vjp": lambda m, x: vjp(m, x)[1](OTHER)[0],
    "jvp": lambda m, x: jvp(m, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda m, x: jacrev(m)(x[0]).float(),
    "jacfwd": lambda m, x: jacfwd(m)(x[0]).float(),
    "hessian": lambda m, x: hessian(lambda z: sum_of_squares(m, z))(x[0]).float(),
    "vmap": lambda m, x: vmap(m)(x).float(),
    "functional_call": by_functional_call,
    "forward AD": under_forward_ad,
    "DataParallel": lambda m, x: ce(nn.DataParallel(m)(x)),
    "compiled": lambda m, x: ce(torch.compile(m, backend="aot_eager", fullgraph=True)(x)),
    "compiled with its loss": lambda m, x: torch.compile(
        lambda z: ce(m(z)), backend="aot_eager", fullgraph=True
    )(x),
    "dynamic": lambda m, x: ce(torch.compile(m, backend="aot_eager", dynamic=True)(x)),
    "traced": lambda m, x: ce(torch.jit.trace(m, x, check_trace=False)(x)),
    "exported": lambda m, x: torch.export.export(m, (x,)).module()(x).detach(),
    "read late": stale,
}


@pytest.mark.parametrize("level", ["O1", "O5"])
@pytest.mark.parametrize("use", WHOLE)
def test_a_function_of_the_model(use, level):
    torch._dynamo.reset()
    (model, _), (reference, _) = initialized(level), plain(level)
    found, expected = (WHOLE[use](m, X) for m in (model, reference))
    assert found.dtype == expected.dtype == f32
    torch.testing.assert_close(found.detach() + 0, expected.detach(), rtol=1e-2, atol=1e-2)
    if expected.requires_grad:
        found.sum().backward()
        expected.sum().backward()
        same_gradients(model, reference)


COMPILED = {
    "torch.compile": lambda m: torch.compile(m, backend="aot_eager", fullgraph=True),
    "dynamic": lambda m: torch.compile(m, backend="aot_eager", dynamic=True),
    "method": lambda m: m.compile(backend="aot_eager") or m,
}


@pytest.mark.parametrize("level", ["O1", "O5"])
@pytest.mark.parametrize("loss_too", [False, True])
@pytest.mark.parametrize("how", COMPILED)
def test_a_compiled_model_returns_half_logits_to_the_loss(how, loss_too, level):
    torch._dynamo.reset()
    (model, optimizer), (reference, _) = initialized(level), initialized(level)
    compiled = COMPILED[how](model)
    loss_of = torch.compile(ce, backend="aot_eager", fullgraph=True) if loss_too else ce
    for _ in range(2):
        output, expected = compiled(X), reference(X)
        assert type(output) is Float32Output
        assert torch.equal(output.argmax(1), expected.argmax(1))
        backward(loss_of(output), optimizer)
        ce(expected).backward()
        assert output._memory.float32 is None
        same_gradients(model, reference)
        optimizer.zero_grad()
        reference.zero_grad()


def added_without_grad(z):
    with torch.no_grad():
        z.add_(1)
    return z.sum()


IN_GRAPHS = {
    "write": lambda z: z.mul_(2).sum(),
    "item": lambda z: (z.__setitem__(0, 0.0), z.sum())[1],
    "write without grad": added_without_grad,
    "view": lambda z: z[:2],
    "views": lambda z: z.view(2, 2, -1).unbind(),
    "itself": lambda z: z,
    "detached": lambda z: z.detach(),
    "clone": lambda z: z.clone(),
    "picked": lambda z: z[[2, 0]],
    "log_softmax": lambda z: z.log_softmax(1),
}


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("name", IN_GRAPHS)
def test_in_a_compiled_function_it_is_the_float32_tensor(name, detached):
    torch._dynamo.reset()
    (model, _), (reference, _) = initialized(), plain()
    output, expected = model(X), reference(X)
    output, expected = (y.detach() if detached else y for y in (output, expected))
    found = torch.compile(IN_GRAPHS[name], backend="aot_eager")(output)
    found, right = pytree.tree_leaves(found), pytree.tree_leaves(IN_GRAPHS[name](expected))
    torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-3)
    assert torch.equal(output.detach(), expected.detach())
    if right[0].requires_grad:
        for results in (found, right):
            sum(result.square().sum() for result in results).backward()
        same_gradients(model, reference)


def whole_and_loss(y):
    return y, y.view(-1), ce(y)


def later_written(y):
    loss = ce(y)
    y[0] = 0
    return loss + y.sum()


def view_written(y):
    y.view(-1)[0] = 3
    y[:, 1].mul_(2)
    return ce(y) + y.mean()


def log_softmax_and_loss(y):
    z = y.log_softmax(1)
    return z, F.nll_loss(z, TARGET)


OF_OUTPUTS = {
    "whole": whole_and_loss,
    "views": lambda y: (y[:2], *y.unbind(), ce(y)),
    "detached": lambda y: (y.detach(), y.detach()[:2], ce(y)),
    "values": lambda y: (y.argmax(1), y.topk(3)[0], y.double(), ce(y)),
    "written": later_written,
    "view written": view_written,
    "log_softmax": log_softmax_and_loss,
}


@pytest.mark.parametrize("level", ["O1", "O5"])
@pytest.mark.parametrize("name", OF_OUTPUTS)
def test_in_one_graph_with_its_model_it_is_the_float32_tensor(name, level):
    torch._dynamo.reset()
    (model, _), (reference, _) = initialized(level), initialized(level)
    step = torch.compile(lambda x: OF_OUTPUTS[name](model(x)), backend="aot_eager", fullgraph=True)
    found, right = (pytree.tree_leaves(r) for r in (step(X), OF_OUTPUTS[name](reference(X))))
    for mine, theirs in zip(found, right, strict=True):
        assert (mine.dtype, mine.requires_grad) == (theirs.dtype, theirs.requires_grad)
        torch.testing.assert_close(mine.detach() + 0, theirs.detach() + 0, rtol=1e-3, atol=1e-3)
    for results in (found, right):
        sum(r.square().sum() for r in results if r.requires_grad).backward()
    same_gradients(model, reference)


def test_hooks_of_a_compiled_model_see_float32():
    model, _ = initialized()
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    ce(torch.compile(model, backend="aot_eager")(X)).backward()
    assert seen == [f32]


# --- what models return -------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", ["logits", "rest"])


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    rest: object = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    logits: torch.Tensor
    name: str = dataclasses.field(init=False, default="frozen")


class Registered:
    def __init__(self, logits):
        self.logits = logits


pytree.register_pytree_node(
    Registered, lambda r: ([r.logits], None), lambda items, _: Registered(*items)
)


class Unknown:
    def __init__(self, logits):
        self.logits = logits


class Returning(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.net, self.make = nn.Linear(6, CLASSES), make

    def forward(self, x):
        return self.make(self.net(x))


CONTAINERS = {
    "dict": (lambda y: {"logits": y}, lambda out: out["logits"]),
    "nested": (lambda y: [(y, {"a": [y]})], lambda out: out[0][1]["a"][0]),
    "namedtuple": (lambda y: Pair(y, None), lambda out: out.logits),
    "dataclass": (lambda y: Output(y, [1, "a"]), lambda out: out.logits),
    "in a dataclass": (lambda y: Output(OTHER, {"y": [y]}), lambda out: out.rest["y"][0]),
    "frozen": (Frozen, lambda out: out.logits),
    "registered": (Registered, lambda out: out.logits),
}


@halves
@pytest.mark.parametrize("name", CONTAINERS)
def test_tensors_in_containers_are_float32(name, level):
    make, get = CONTAINERS[name]
    model = Returning(make)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    out = model(X)
    assert type(out) is type(make(OTHER))
    assert get(out).dtype == f32
    assert get(model(300 * X)).pow(2).mean().dtype == f32
    with torch.no_grad():
        assert get(model(X)).dtype == f32


@pytest.mark.parametrize("make", [Unknown, lambda y: (part for part in y)])
def test_what_cannot_be_walked_is_named_once(make):
    model = amp.initialize(Returning(make), opt_level="O5", verbosity=0)
    with pytest.warns(UserWarning, match=r"returns a (Unknown|generator), whose tensors"):
        model(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X)


def test_a_capsule_of_memory_that_is_not_there_is_an_error():
    with pytest.raises(RuntimeError, match="no FP32 memory to point to"):
        torch.utils.dlpack.to_dlpack(initialized()[0](X).detach())


def test_a_sparse_output_is_float32():
    model = amp.initialize(Returning(lambda y: y.to_sparse()), opt_level="O5", verbosity=0)
    output = model(X)
    output.to_dense().sum().backward()
    assert (output.dtype, output.layout) == (f32, torch.sparse_coo)
    assert model.net.weight.grad.isfinite().all()


def test_a_parameter_that_is_returned_is_copied_at_once():
    model = Returning(lambda y: (y, weight, weight.t()))
    weight = model.net.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    y, whole, view = model(X)
    before = weight.detach().float()
    backward(ce(y), optimizer)
    optimizer.step()
    assert torch.equal(whole, before)
    assert torch.equal(view, before.t())


def test_an_output_that_its_model_changes_later_is_an_error():
    kept = []
    model = amp.initialize(Returning(lambda y: kept.append(y) or y), opt_level="O5", verbosity=0)
    output = model(X)
    with torch.no_grad():
        kept[0].zero_()
    with pytest.raises(RuntimeError, match="modified one of its outputs in place"):
        output.sum()


def test_it_has_fp32_memory_at_once_where_that_is_all(monkeypatch):
    model, _ = initialized()
    with monkeypatch.context() as patched:
        patched.setattr(float32_output, "LEAST", 1 << 15)
        assert type(model(X)) is torch.Tensor
    with torch.no_grad():
        assert type(model(X)) is torch.Tensor
    with torch.inference_mode():
        assert type(model(X)) is torch.Tensor
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert type(model(X)) is torch.Tensor
