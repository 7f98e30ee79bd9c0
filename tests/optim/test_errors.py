"""Bad input: the error names the tensor and says what to do, and nothing has changed."""

import pytest
import torch

import reference
from ampfuse import optim
from cases import (
    KINDS,
    bf16,
    f16,
    f32,
    f64,
    give_gradients,
    make,
    parameters,
    params_of,
    refused,
    set_grad,
    snapshot,
    train,
    weights,
)

OPTIMIZERS = [getattr(optim, kind) for kind in reference.RULES]
# Named parameters.
SHAPES = {"embed.weight": (6, 2), "body.weight": (4, 3), "body.bias": (4,)}


def model(dtype=f32, device="cpu"):
    return list(zip(SHAPES, parameters(SHAPES.values(), dtype, device=device), strict=True))


# --- gradients -----------------------------------------------------------------------------------

BAD_GRADIENTS = {
    "sparse": (torch.eye(4, 3).to_sparse(), RuntimeError, "sparse.*sparse=False"),
    "float64": (torch.eye(4, 3).to(f64), TypeError, "Double.*float32, float16 and bfloat16"),
    "complex": (torch.eye(4, 3).to(torch.complex64), TypeError, "complex.*view_as_real"),
    "integer": (torch.eye(4, 3).to(torch.int32), TypeError, "Int"),
}


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("case", BAD_GRADIENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_gradients_are_refused(kind, case, masters, device):
    """Before the first step, and after one."""
    gradient, error, message = BAD_GRADIENTS[case]
    named = model(bf16 if masters else f32, device)
    optimizer = make(kind, named, master_weights=masters, max_grad_norm=1.0)
    optimizer.param_table()  # with masters, and without states
    params = params_of(optimizer)
    for _ in range(2):
        give_gradients(params)
        set_grad(params[1], gradient.to(device))
        with refused(optimizer, f"gradient of body.weight is {message}", error):
            optimizer.step()
        before = snapshot(optimizer)
        train(optimizer)
        after = snapshot(optimizer)
        assert any(not torch.equal(after[key], before[key]) for key in before)


# --- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [f64, torch.complex64])
def test_parameters_of_another_dtype_are_refused(optimizer, dtype):
    param = torch.ones(4, 3, dtype=dtype, requires_grad=True)
    name = optimizer.__name__
    with pytest.raises(TypeError, match=rf"{name} supports .*got {dtype} of .*Convert the model"):
        optimizer([param])
    good = optimizer(parameters([(3,)]))
    with pytest.raises(TypeError, match=str(dtype)):
        good.add_param_group({"params": [param]})
    assert len(good.param_groups) == 1


STRANGE = {
    "gaps": (torch.ones(8, 3)[::2], r"body.weight of shape \[4, 3\] and strides.*gaps"),
    "overlap": (torch.ones(1, 3).expand(4, 3), "body.weight.*overlaps in memory"),
    "sparse": (torch.eye(4, 3).to_sparse(), "body.weight is sparse"),
    # A parameter of a model that is not materialized yet.
    "meta": (torch.ones(4, 3, device="meta"), "^body.weight is on the meta device.*Materialize it"),
}


@pytest.mark.parametrize("case", STRANGE)
def test_parameters_without_values_of_their_own_are_refused(case):
    strange, message = STRANGE[case]
    named = model()
    named[1] = "body.weight", strange.detach().requires_grad_()
    optimizer, good = make("adamw", named), [named[0][1], named[2][1]]
    give_gradients(good)
    before = weights(good)
    with pytest.raises((RuntimeError, TypeError), match=message):
        optimizer.step()
    assert all(map(torch.equal, good, before))
    assert not any(optimizer.state.values())


@pytest.mark.parametrize("changed", ["shape", "strides"])
def test_a_parameter_that_changed_shape_or_strides_is_refused(changed):
    """States that are not quantized follow other strides."""
    param = parameters([(64, 64)])[0]
    optimizer = make("adamw", [("body.weight", param)], state_dtype="8bit")
    train(optimizer)
    param.grad = None
    param.data = torch.randn(5, 3) if changed == "shape" else torch.randn(64, 64).t()
    param.grad = torch.randn_like(param)
    with pytest.raises(RuntimeError, match=rf"body.weight.*changed its {changed}"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [f16, bf16])
def test_a_parameter_may_change_its_dtype(dtype):
    """model.half() after the optimizer was built and used.

    Without masters that is a legitimate thing to do: the weights are stepped as they are now.
    """
    optimizer = make("adamw", model(), lr=0.1)
    train(optimizer)
    params = params_of(optimizer)
    for param in params:
        param.grad = None
        param.data = param.data.to(dtype)
    before = weights(params)
    train(optimizer, [1])
    for param, start in zip(params, before, strict=True):
        assert param.dtype == dtype
        assert param.isfinite().all()
        assert not torch.equal(param.detach(), start)
        assert (param.detach() - start).abs().max() <= 0.2


# --- options -------------------------------------------------------------------------------------

UNKNOWN = r"^{}\.__init__\(\) got an unexpected keyword argument '{}'$"
BAD_OPTIONS = {
    "differentiable": ({"differentiable": True}, ValueError, r"Use torch\.optim\."),
    "unknown": ({"max_norm": 1.0}, TypeError, None),
    "both": ({"foreach": True, "fused": True}, RuntimeError, "fused.*foreach"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_wrong_options_are_refused(optimizer, case):
    options, error, message = BAD_OPTIONS[case]
    name, option = optimizer.__name__, next(iter(options))
    of_torch = case in ("differentiable", "both")  # choices that torch's classes have
    if case == "unknown" or (of_torch and not hasattr(torch.optim, name)):
        error, message = TypeError, UNKNOWN.format(name, option)
    with pytest.raises(error, match=message):
        optimizer(model(), **options)


def emptied():
    optimizer = make("adamw", model())
    optimizer.param_groups.clear()
    optimizer.step()


REFUSED = {
    "nesterov": (lambda: optim.SGD(model(), nesterov=True), "Nesterov"),
    "by place": (lambda: optim.SGD(model(), 0.1, 0.9, 0.0, 0.0, False, True), "positional"),
    "no parameters": (lambda: optim.AdamW([]), "empty parameter list"),
    "no groups": (emptied, "no parameters; add a parameter group"),
    "clip to 0": (lambda: make("adamw", model()).clip_next_step(0.0), "max_norm"),
    "clip to -1": (lambda: make("adamw", model()).clip_next_step(-1.0), "max_norm"),
    "clip to NaN": (lambda: make("adamw", model()).clip_next_step(float("nan")), "max_norm"),
}
NO_VALUE_ERROR = {"by place": TypeError, "no groups": RuntimeError}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_calls_are_refused(case):
    call, message = REFUSED[case]
    with pytest.raises(NO_VALUE_ERROR.get(case, ValueError), match=message):
        call()


def test_a_step_inside_a_backward_pass_is_refused():
    optimizer = make("adamw", model())
    optimizer.param_table().gradients.begin_backward()
    with pytest.raises(RuntimeError, match=r"step\(\) inside a backward pass"):
        train(optimizer)
    optimizer.param_table().gradients.cancel_backward()
    train(optimizer)


def test_flags_of_a_grad_scaler_that_do_not_fit():
    optimizer = make("adamw", model())
    give_gradients(params_of(optimizer))
    for wrong, error in ((torch.zeros((), dtype=f64), TypeError), (torch.zeros(0), ValueError)):
        optimizer.found_inf = wrong
        with pytest.raises(error, match="found_inf"):
            optimizer.step()
        del optimizer.found_inf
