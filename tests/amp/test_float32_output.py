"""Outputs of models that compute in half precision are float32 tensors in every use.

Each use of an output is compared with the same use of a plain FP32 copy, which the same model makes
with ``cast_model_outputs=torch.float32``: equal values, equal gradients of the weights.
test_half_logits.py tests that a loss needs no such copy.
"""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils import _pytree as pytree

from ampfuse import amp
from ampfuse.amp import float32_output
from ampfuse.amp.float32_output import Float32Output
from cases import HALF_TYPES, bf16, f32, through_a_file
from trainings import backward

CLASSES = 60


@pytest.fixture(autouse=True)
def no_output_is_too_small(monkeypatch):
    monkeypatch.setattr(float32_output, "LEAST", 1)
    torch._dynamo.reset()


def initialized(level="O5", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)[0]


X, TARGET = torch.linspace(-1, 1, 24).view(4, 6), torch.tensor([0, 59, 7, 30])
OTHER = torch.linspace(-1, 1, 240).view(4, CLASSES)
SOFT = OTHER.softmax(1)


def ce(y, target=TARGET):
    return F.cross_entropy(y, target)


def nll(y):
    return F.nll_loss(y.log_softmax(1), TARGET)


# --- uses of an output --------------------------------------------------------------------------


def last(*results):
    return results[-1]


def within(context, use):
    def run(y):
        with context():
            return use(y)

    return run


def gradient_of(loss, **options):
    return lambda y: torch.autograd.grad(loss(y), y, **options)[0]


def by_hook(y):
    seen = []
    y.register_hook(seen.append)
    y.view(-1).register_hook(seen.append)
    ce(y).backward(retain_graph=True)
    return torch.cat([g.view(-1) for g in seen])


def leaf(y):
    z = y.detach().requires_grad_()
    ce(z).backward()
    return z.grad


def twice(loss):
    return lambda y: gradient_of(loss, create_graph=True)(y).square().sum() * 100


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


def dual(y):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(ce(forward_ad.make_dual(y.detach(), OTHER))).tangent


def data_set(y):
    y.data = 2 * OTHER
    return ce(y)


def written_with_log_softmax(y):
    z = y.log_softmax(1)
    return z, F.nll_loss(z, TARGET)


def aot(function, **options):
    return torch.compile(function, backend="aot_eager", **options)


# In a compiled function too.
COMPILED = {
    "operator": lambda y: (2 * y).exp().sum(1),
    "cross_entropy": ce,
    "write": lambda y: y.mul_(2).sum(),
    "item": lambda y: last(y.__setitem__(0, 0.0), y.sum()),
    "write without grad": lambda y: last(within(torch.no_grad, lambda y: y.add_(1))(y), y.sum()),
    "write to a clone": lambda y: y.clone().mul_(2) + y,
    "view": lambda y: y[:2],
    "views": lambda y: y.view(2, 2, -1).unbind(),
    "itself": lambda y: y,
    "detached": lambda y: y.detach(),
    "clone": lambda y: y.clone(),
    "picked": lambda y: y[[2, 0]],
    "log_softmax": lambda y: y.log_softmax(1),
}
# In one graph with the model too.
WITH_MODEL = {
    "and whole": lambda y: (y, y.view(-1), ce(y)),
    "and views": lambda y: (y[:2], *y.unbind(), ce(y)),
    "and detached": lambda y: (y.detach(), y.detach()[:2], ce(y)),
    "and values": lambda y: (y.argmax(1), y.topk(3)[0], y.double(), ce(y)),
    "written later": lambda y: last(loss := ce(y), y.__setitem__(0, 0), loss + y.sum()),
    "view written": lambda y: last(y.view(-1).__setitem__(0, 3), y[:, 1].mul_(2), ce(y) + y.mean()),
    "and log_softmax": written_with_log_softmax,
}
# Each gives a tensor, or tuple of them; of what requires a gradient the gradients are compared too.
USES = {
    **COMPILED,
    **WITH_MODEL,
    "cat": lambda y: torch.cat([y, OTHER, y]).logsumexp(0),
    "where": lambda y: torch.where(y > 0, y, OTHER),
    "split": lambda y: sum(part.sum() for part in y.split(7, dim=1)),
    "data": lambda y: y.data.clone(),
    "list": lambda y: torch.tensor(y.tolist(), dtype=y.dtype),
    "numpy": lambda y: torch.from_numpy(y.detach().numpy().copy()),
    "dlpack": lambda y: torch.from_dlpack(y.detach()).clone(),
    "array": lambda y: torch.as_tensor(y.detach().__array__()).clone(),
    "storage": lambda y: torch.tensor(y.untyped_storage().nbytes() // y.numel()),
    "pickled": lambda y: pickle.loads(pickle.dumps(y.detach())),
    "saved": lambda y: through_a_file(y.detach()),
    "copied": lambda y: copy.deepcopy(y.detach()),
    "a template": lambda y: torch.empty(0).resize_as_(y.detach()).zero_(),
    "set from it": lambda y: torch.empty(0).set_(y.detach()).clone(),
    "bits": lambda y: y.detach().view(torch.int32),
    "double": lambda y: y.double() * 2,
    "half": lambda y: y.half() * 2,
    "zeros_like": lambda y: torch.zeros_like(y) + y.new_ones(1),
    "item read": lambda y: torch.tensor(y[0, 0].item() + float(y[1, 1])),
    "topk": lambda y: y.topk(3),
    "masked": lambda y: y[y > 0],
    "two losses": lambda y: ce(y) + F.mse_loss(y, OTHER),
    "probabilities": lambda y: F.cross_entropy(y, SOFT),
    "with spatial": lambda y: ce(y.view(2, 2, CLASSES).transpose(1, 2), TARGET.view(2, 2)),
    "log_softmax, viewed": lambda y: F.nll_loss(
        y.view(2, 2, -1).log_softmax(-1).view(4, -1), TARGET
    ),
    "log_softmax, looked at": lambda y: (lambda z: F.nll_loss(z, TARGET) + z.mean())(
        y.log_softmax(1)
    ),
    "log_softmax, along columns": lambda y: F.nll_loss(y.log_softmax(0), TARGET),
    "log_softmax, scaled": lambda y: F.nll_loss(2 * y.log_softmax(1), TARGET),
    "bce": lambda y: F.binary_cross_entropy_with_logits(y, SOFT),
    "kl": lambda y: F.kl_div(F.log_softmax(y, -1), SOFT, reduction="batchmean"),
    "row of a view written": lambda y: last(y.view(2, 120)[0].zero_(), ce(y) + y.sum()),
    "written": lambda y: last(y.add_(1), y.__setitem__(0, 0), y[:, 1].mul_(2), ce(y)),
    "out": lambda y: last(torch.add(OTHER, 1, out=(z := y.detach())), z.sum() + y.detach().sum()),
    "through numpy": lambda y: last(y.detach().numpy().fill(2), y.detach().sum()),
    "hook": by_hook,
    "scaling hook": lambda y: last(y.register_hook(lambda g: g * 3), ce(y)),
    "retain_grad": lambda y: last(
        y.retain_grad(), ce(y).backward(retain_graph=True), y.grad.clone()
    ),
    "gradient": gradient_of(ce),
    "leaf": leaf,
    "second derivative": twice(ce),
    "second derivative, log_softmax": twice(nll),
    "function": lambda y: Doubled.apply(y),
    "offloaded": within(
        torch.autograd.graph.save_on_cpu, lambda y: ce(y) + y.log_softmax(1).square().mean()
    ),
    "anomaly": within(
        lambda: torch.autograd.set_detect_anomaly(True, check_nan=True),
        lambda y: ce(y) + y.square().mean(),
    ),
    "autocast": within(
        lambda: torch.autocast("cpu", dtype=bf16), lambda y: ce(y) + (y @ OTHER.t()).float().mean()
    ),
    "shape in place": lambda y: last(
        y.unsqueeze_(1), y.transpose_(0, 1), y.squeeze_(0).t_(), y.mul(OTHER.t()).sum()
    ),
    "func.grad": lambda y: grad(ce)(y.detach()),
    "func.vmap": lambda y: vmap(lambda row, t: ce(row, t))(y.detach(), TARGET),
    "uint8 targets": lambda y: F.nll_loss(y.log_softmax(1), TARGET.to(torch.uint8)),
    "complex": lambda y: torch.view_as_complex(y.view(4, -1, 2)).abs(),
    "other type written": lambda y: last(
        y.detach().view(torch.int32).__setitem__(0, 0), y.detach() + 0
    ),
    "jagged": lambda y: torch.nested.nested_tensor_from_jagged(
        y.view(-1), torch.tensor([0, 3, 240])
    ).values(),
    "data set": data_set,
    "tensors in a list": lambda y: torch.tensor([y[0, 0], y[1, 1]]),
    "format": lambda y: torch.tensor(float(f"{y[0, 0]:.3f}")),
    "subclass": lambda y: (2 * y.as_subclass(Named)).as_subclass(torch.Tensor),
    "stored by pickle": within(
        lambda: torch.autograd.graph.saved_tensors_hooks(pickle.dumps, pickle.loads),
        lambda y: ce(y) + nll(y) + y.exp().mean(),
    ),
    "in batches": lambda y: torch.autograd.grad(
        F.cross_entropy(y, TARGET, reduction="none"), y, torch.eye(4), is_grads_batched=True
    ),
    "dual": dual,
    "every other row, compiled": lambda y: aot(lambda z: ce(z, TARGET[::2]))(y[::2]),
}
IN_A_GRAPH = [
    *((use, how) for use in COMPILED for how in ("compiled", "detached and compiled")),
    *((use, "compiled with its model") for use in WITH_MODEL),
]
EVERY_USE = [(use, "as it is", level) for use in USES for level in ("O1", "O5")]
# The levels take turns in quick runs.
EVERY_USE += [
    pytest.param(*run, level, marks=() if (i + i // 2 + j) % 2 else pytest.mark.exhaustive)
    for i, run in enumerate(IN_A_GRAPH)
    for j, level in enumerate(("O1", "O5"))
]


def same_gradients(model, reference):
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            mine, theirs = mine.grad.float(), theirs.grad.float()
            limit = 2e-2 * theirs.abs().max().item()
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=limit)


def assert_alike(found, right, model, reference, atol=1e-3):
    """Types, values and the gradients of the weights."""
    found, right = pytree.tree_leaves(found), pytree.tree_leaves(right)
    for mine, theirs in zip(found, right, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert mine.requires_grad == theirs.requires_grad
        torch.testing.assert_close(mine.detach() + 0, theirs.detach() + 0, rtol=1e-2, atol=atol)
    if any(theirs.requires_grad for theirs in right):
        for results in (found, right):
            sum(r.square().sum() for r in results if r.requires_grad).backward()
        same_gradients(model, reference)


@pytest.mark.parametrize(("use", "how", "level"), EVERY_USE)
def test_in_every_use_it_is_the_float32_tensor(use, how, level):
    model, reference = initialized(level), initialized(level, cast_model_outputs=f32)
    if how == "compiled with its model":
        found = aot(lambda x: USES[use](model(x)), fullgraph=True)(X)
        assert_alike(found, USES[use](reference(X)), model, reference)
        return
    outputs = output, expected = model(X), reference(X)
    assert (type(output), type(expected)) == (Float32Output, torch.Tensor)
    assert output.requires_grad
    assert not output.is_leaf
    if "detached" in how:
        outputs = output, expected = output.detach(), expected.detach()
    calls = (aot(USES[use]) if "compiled" in how else USES[use]), USES[use]
    found, right = (call(y) for call, y in zip(calls, outputs, strict=True))
    values = [y.detach().clone() for y in outputs]
    assert_alike(found, right, model, reference)
    assert torch.equal(*values), "the output's values afterwards"


@pytest.mark.parametrize("level", HALF_TYPES)
def test_a_scale_of_65536_gives_finite_gradients(level):
    """A half loss would receive 65536, which is inf in FP16, as its gradient."""
    output = initialized(level)(X)
    (gradient,) = torch.autograd.grad(output.mean() * 65536.0, output)
    assert gradient.dtype == f32
    assert gradient.isfinite().all()


def test_its_shape_and_text_are_those_of_the_tensor():
    output, expected = initialized()(X), initialized(cast_model_outputs=f32)(X)
    assert str(output.detach()) == str(expected.detach())
    assert (len(output), output.stride(), output.is_contiguous()) == (4, (CLASSES, 1), True)
    assert output.element_size() == 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("look", [lambda y: y.softmax(1).max(), lambda y: y.detach().mean().item()])
def test_a_look_without_gradients_keeps_no_fp32_copy(look, mode):
    output = initialized()(X)
    with mode():
        look(output)
    assert output.memory.float32 is None
    output.exp()
    assert output.memory.float32 is not None


# --- functions of the whole model ---------------------------------------------------------------


def under_forward_ad(model, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def by_functional_call(model, x):
    def loss(weights):
        return ce(functional_call(model, weights, (x,)))

    return grad(loss)({name: p.detach() for name, p in model.named_parameters()})["2.bias"].float()


WHOLE = {
    "vjp": lambda m, x: vjp(m, x)[1](OTHER)[0],
    "jvp": lambda m, x: jvp(m, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda m, x: jacrev(m)(x[0]).float(),
    "jacfwd": lambda m, x: jacfwd(m)(x[0]).float(),
    "hessian": lambda m, x: hessian(lambda z: m(z).square().sum())(x[0]).float(),
    "vmap": lambda m, x: vmap(m)(x).float(),
    "functional_call": by_functional_call,
    "forward AD": under_forward_ad,
    "DataParallel": lambda m, x: ce(nn.DataParallel(m)(x)),
    "traced": lambda m, x: ce(torch.jit.trace(m, x, check_trace=False)(x)),
    "exported": lambda m, x: torch.export.export(m, (x,)).module()(x).detach(),
    "read after its model ran again": lambda m, x: last(y := m(x), m(2 * x), y.detach()),
}


@pytest.mark.parametrize("level", ["O1", "O5"])
@pytest.mark.parametrize("use", WHOLE)
def test_a_function_of_the_model_sees_float32(use, level):
    models = initialized(level), initialized(level, cast_model_outputs=f32)
    found, expected = (WHOLE[use](model, X) for model in models)
    assert found.dtype == f32
    assert_alike(found, expected, *models, atol=1e-2)


def test_hooks_of_a_compiled_model_see_float32():
    model = initialized()
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    ce(aot(model)(X)).backward()
    assert seen == [f32]


# --- what models return (in containers: test_amp_casts.py) --------------------------------------


class Unknown:
    def __init__(self, logits):
        self.logits = logits


class Returning(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.net, self.make = nn.Linear(6, CLASSES), make

    def forward(self, x):
        return self.make(self.net(x))


def returning(make):
    return amp.initialize(Returning(make), opt_level="O5", verbosity=0)


@pytest.mark.parametrize("make", [Unknown, lambda y: (part for part in y)])
def test_what_cannot_be_walked_is_named_once(make):
    model = returning(make)
    with pytest.warns(UserWarning, match=r"returns a (Unknown|generator), whose tensors"):
        model(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X)


def test_a_capsule_of_memory_that_is_not_there_is_an_error():
    with pytest.raises(RuntimeError, match="no FP32 memory to point to"):
        torch.utils.dlpack.to_dlpack(initialized()(X).detach())


@pytest.mark.parametrize("change", [lambda y: y.set_(torch.zeros(3)), lambda y: y.resize_(3)])
def test_an_output_gets_no_other_memory(change):
    output = initialized()(X).detach()
    with pytest.raises(RuntimeError, match=r"is not supported on a model's output: call it on"):
        change(output)


def test_a_sparse_output_is_float32():
    model = returning(lambda y: y.to_sparse())
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


def test_an_output_that_its_model_made_in_place_may_be_read_in_float32_first():
    output = returning(lambda y: y.relu_())(X)
    values = torch.from_numpy(output.detach().numpy())  # from here on it has FP32 memory
    assert torch.equal(output.clone(), values)
    assert torch.equal(output.amax(), values.amax())
    assert torch.equal(ce(output), ce(values))


def test_an_output_that_its_model_changes_later_is_an_error():
    kept = []
    output = returning(lambda y: last(kept.append(y), y))(X)
    with torch.no_grad():
        kept[0].zero_()
    with pytest.raises(RuntimeError, match="modified one of its outputs in place"):
        output.sum()


def test_it_has_fp32_memory_at_once_where_that_is_all(monkeypatch):
    model = initialized()
    with monkeypatch.context() as patched:
        patched.setattr(float32_output, "LEAST", 1 << 15)
        assert type(model(X)) is torch.Tensor
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert type(model(X)) is torch.Tensor
    model.requires_grad_(False)
    assert type(model(X)) is torch.Tensor
