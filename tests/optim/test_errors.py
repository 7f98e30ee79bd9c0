"""Bad input: the error names the tensor and says what to do, and nothing has changed."""

import contextlib

import pytest
import torch

import reference
from ampfuse import _core, amp, optim
from cases import KINDS, assert_same_bits, bf16, f16, f32, f64, make, snapshot

OPTIMIZERS = [getattr(optim, kind) for kind in reference.RULES]


def model(dtype=f32):
    """Named parameters; the second has the shape (4, 3)."""
    shapes = {"embed.weight": (6, 2), "body.weight": (4, 3), "body.bias": (4,)}
    return [(name, torch.randn(s).to(dtype).requires_grad_()) for name, s in shapes.items()]


def clean_gradients(named):
    for _, param in named:
        param.grad = torch.randn_like(param)


@contextlib.contextmanager
def refused(optimizer, named, error, message):
    """What is inside raises, changes nothing, and a step with good gradients works afterwards."""
    before = snapshot(optimizer)
    with pytest.raises(error, match=message):
        yield
    assert_same_bits(snapshot(optimizer), before)
    clean_gradients(named)
    optimizer.step()
    after = snapshot(optimizer)
    assert any(not torch.equal(after[key], before[key]) for key in before)


def give(param, grad):
    """param.grad = grad, also of a kind that torch's setter does not let through."""
    param.grad = None
    if grad.dtype != param.dtype:
        param.grad_dtype = None
    param.grad = grad


# --- gradients -----------------------------------------------------------------------------------

BAD_GRADIENTS = {
    "sparse": (
        lambda: torch.eye(4, 3).to_sparse(),
        RuntimeError,
        "gradient of body.weight is sparse.*sparse=False",
    ),
    "float64": (
        lambda: torch.randn(4, 3, dtype=f64),
        TypeError,
        "gradient of body.weight is Double.*float32, float16 and bfloat16",
    ),
    "complex": (
        lambda: torch.randn(4, 3, dtype=torch.complex64),
        TypeError,
        "gradient of body.weight is complex.*view_as_real",
    ),
    "integer": (
        lambda: torch.ones(4, 3, dtype=torch.int32),
        TypeError,
        "gradient of body.weight is Int",
    ),
}


@pytest.mark.parametrize("case", BAD_GRADIENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind, case, device):
    make_grad, error, message = BAD_GRADIENTS[case]
    named = [(n, p.detach().to(device).requires_grad_()) for n, p in model()]
    optimizer = make(kind, named, max_grad_norm=1.0)
    clean_gradients(named)
    give(named[1][1], make_grad().to(device))
    with pytest.raises(error, match=message):
        optimizer.step()
    assert kind == "adagrad-all" or not any(optimizer.state.values())  # none is made
    clean_gradients(named)
    optimizer.step()
    clean_gradients(named)
    give(named[1][1], make_grad().to(device))
    with refused(optimizer, named, error, message):
        optimizer.step()


def test_gradients_of_a_half_parameter_with_a_master():
    named = model(bf16)
    optimizer = make("adamw", named, master_weights=True)
    clean_gradients(named)
    optimizer.step()
    clean_gradients(named)
    named[1][1].grad = torch.eye(4, 3, dtype=bf16).to_sparse()
    with refused(optimizer, named, RuntimeError, "body.weight is sparse"):
        optimizer.step()


def test_a_name_is_made_up_where_none_is_given():
    params = [param for _, param in model()]
    optimizer = make("adamw", [{"params": params[:1]}, {"params": params[1:]}])
    clean_gradients([("", param) for param in params])
    params[2].grad = torch.ones(4).to_sparse()
    with pytest.raises(RuntimeError, match=r"param_groups\[1\]\['params'\]\[1\] of shape \(4,\)"):
        optimizer.step()


# --- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [f64, torch.complex64])
def test_parameters_of_another_dtype(optimizer, dtype):
    param = torch.ones(4, 3, dtype=dtype, requires_grad=True)
    name = optimizer.__name__
    with pytest.raises(TypeError, match=rf"\(4, 3\) is {dtype}.*{name} steps.*Convert the model"):
        optimizer([param])
    good = optimizer([torch.ones(3, requires_grad=True)])
    with pytest.raises(TypeError, match=str(dtype)):
        good.add_param_group({"params": [param]})
    assert len(good.param_groups) == 1


def test_parameters_without_kernels():
    far = torch.ones(2, device="meta")
    with pytest.raises(RuntimeError, match="cpu and cuda tensors, not for meta"):
        _core.C.ParamTable("adam", far.device)
    with pytest.raises(RuntimeError, match=r"far is on meta.*one optimizer per device"):
        _core.C.ParamTable("adam", torch.device("cpu")).add_row(far, None, "far")


def test_parameters_without_values():
    """Those of a model that waits on the meta device."""
    named = [*model(), ("far", torch.ones(2, device="meta").requires_grad_())]
    optimizer = make("adamw", named)
    clean_gradients(named[:3])
    before = [param.detach().clone() for _, param in named[:3]]
    with pytest.raises(RuntimeError, match=r"^far is on the meta device.*Materialize it"):
        optimizer.step()
    assert not any(optimizer.state.values())
    assert all(map(torch.equal, before, [param for _, param in named[:3]]))


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_levels_on_the_meta_device(level):
    net = torch.nn.Linear(3, 2, device="meta")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    meta = pytest.raises(RuntimeError, match=r"^weight is on the meta device.*Materialize it")
    with meta, amp.scale_loss(torch.zeros(()), optimizer):
        pass


STRANGE = {
    "gaps": (lambda: torch.randn(8, 3)[::2], r"body.weight of shape \[4, 3\] and strides.*gaps"),
    "overlap": (lambda: torch.randn(1, 3).expand(4, 3), "body.weight.*overlaps in memory"),
    "sparse": (lambda: torch.eye(4, 3).to_sparse(), "body.weight is sparse"),
}


@pytest.mark.parametrize("case", STRANGE)
def test_parameters_that_are_not_dense(case):
    make_param, message = STRANGE[case]
    named = model()
    before = [param.detach().clone() for _, param in named]
    strange = make_param().requires_grad_()
    optimizer = make("adamw", [named[0], ("body.weight", strange), named[2]])
    clean_gradients([named[0], named[2]])
    with pytest.raises((RuntimeError, TypeError), match=message):
        optimizer.step()
    assert all(torch.equal(p.detach(), b) for (_, p), b in zip(named, before, strict=True))


@pytest.mark.parametrize("changed", ["shape", "strides"])
def test_a_parameter_that_changed(changed):
    named = model()
    optimizer = make("adamw", named)
    clean_gradients(named)
    optimizer.step()
    named[1][1].grad = None
    named[1][1].data = torch.randn(5, 3) if changed == "shape" else torch.randn(3, 4).t()
    named[1][1].grad = torch.randn_like(named[1][1])
    with pytest.raises(RuntimeError, match=rf"body.weight.*changed its {changed}"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [f16, bf16])
def test_a_parameter_that_changed_its_dtype(dtype):
    """model.half() after the optimizer was built and used."""
    named = model()
    optimizer = make("adamw", named)
    clean_gradients(named)
    optimizer.step()
    for _, param in named:
        param.grad = None
        param.data = param.data.to(dtype)
    clean_gradients(named)
    # Without masters that is a legitimate thing to do: the weights are stepped as they are now.
    before = [param.detach().clone() for _, param in named]
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    for (_, param), start in zip(named, before, strict=True):
        assert param.dtype == dtype
        assert param.isfinite().all()
        assert not torch.equal(param.detach(), start)
        assert (param.detach() - start).abs().max() <= 0.2


# --- options -------------------------------------------------------------------------------------

BAD_OPTIONS = {
    "lr": ({"lr": -1.0}, ValueError, "learning rate"),
    "weight decay": ({"weight_decay": -1.0}, ValueError, "weight_decay"),
    "differentiable": ({"differentiable": True}, ValueError, r"Use torch\.optim\."),
    "unknown": ({"max_norm": 1.0}, TypeError, "max_norm"),
    "both": ({"foreach": True, "fused": True}, RuntimeError, "fused.*foreach"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_options(optimizer, case):
    options, error, message = BAD_OPTIONS[case]
    if not hasattr(torch.optim, optimizer.__name__) and case in ("differentiable", "both"):
        error, message = TypeError, "differentiable|foreach"  # choices that torch's classes have
    with pytest.raises(error, match=message):
        optimizer(model(), **options)


def test_options_of_one_algorithm():
    with pytest.raises(ValueError, match="beta"):
        optim.AdamW(model(), betas=(1.0, 0.9))
    with pytest.raises(ValueError, match="Nesterov"):
        optim.SGD(model(), nesterov=True)
    with pytest.raises(ValueError, match="norm_type is 1; it has to be 2, inf or 0"):
        optim.NovoGrad(model(), norm_type=1)
    for kind in (optim.LAMB, optim.NovoGrad):
        with pytest.raises(ValueError, match="beta parameter at index 1"):
            kind(model(), betas=(0.9, 1.0))
        with pytest.raises(ValueError, match="epsilon"):
            kind(model(), eps=-1.0)
    with pytest.raises(ValueError, match="empty parameter list"):
        optim.AdamW([])
    with pytest.raises(TypeError, match="positional"):
        optim.SGD(model(), 0.1, 0.9, 0.0, 0.0, False, True)


def test_clip_next_step():
    optimizer = make("adamw", model())
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="max_norm"):
            optimizer.clip_next_step(wrong)


def test_a_step_inside_a_backward_pass():
    named = model()
    optimizer = torch.optim.AdamW(named)
    optim.upgrade(optimizer, master_weights=False)
    clean_gradients(named)
    optimizer.begin_backward()
    with pytest.raises(RuntimeError, match=r"inside the scale_loss context.*after the with block"):
        optimizer.step()
    optimizer.cancel_backward()
    optimizer.step()


def test_a_group_emptied_of_all_parameters():
    optimizer = make("adamw", model())
    optimizer.param_groups.clear()
    with pytest.raises(RuntimeError, match="no parameters; add a parameter group"):
        optimizer.step()


# --- the table itself -----------------------------------------------------------------------------


def test_unknown_algorithm_and_field():
    with pytest.raises(ValueError, match="'lars'; it is one of none, sgd, adam, "):
        _core.C.ParamTable("lars", torch.device("cpu"))
    table = _core.C.ParamTable("sgd", torch.device("cpu"))
    with pytest.raises(ValueError, match="no field 'colour'"):
        table.inspector.state_field("colour")
    with pytest.raises(ValueError, match="no hyper-parameter 'colour'"):
        table.set_hyper(0, 0, None, {"lr": 0.1, "colour": 1.0})


def test_flags_of_a_grad_scaler_that_do_not_fit():
    named = model()
    optimizer = make("adamw", named)
    for wrong, error in ((torch.zeros((), dtype=f64), TypeError), (torch.zeros(0), ValueError)):
        clean_gradients(named)
        optimizer.found_inf = wrong
        with pytest.raises(error, match="found_inf"):
            optimizer.step()
        del optimizer.found_inf
