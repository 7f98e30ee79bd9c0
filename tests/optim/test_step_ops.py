"""The steps as functions of lists of tensors: what apex's amp_C had, for whoever builds on them."""

import pytest
import torch

from ampfuse import _core, optim
from cases import assert_same_bits, bf16, f16, f32, same_bits

SHAPES = ((300,), (33000,), (0,), (7, 5))
ADAM = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1, "decoupled": True}

# algorithm: values, the same optimizer of ours, its states in the kernel's order
CASES = {
    "sgd": (
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        ("momentum_buffer",),
    ),
    "adam": (
        {"lr": 0.1, **ADAM},
        lambda p: optim.AdamW(p, lr=0.1, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1),
        ("exp_avg", "exp_avg_sq"),
    ),
    "adagrad": (
        {"lr": 0.1, "eps": 1e-10, "weight_decay": 0.1},
        lambda p: optim.Adagrad(p, lr=0.1, weight_decay=0.1),
        ("sum",),
    ),
    "novograd": (
        {"lr": 0.1, **ADAM, "init_zero": True},
        lambda p: optim.NovoGrad(
            p, lr=0.1, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1, init_zero=True
        ),
        ("exp_avg",),
    ),
    "lamb": (
        {"lr": 0.1, **ADAM},
        lambda p: optim.LAMB(p, lr=0.1, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1),
        ("exp_avg", "exp_avg_sq"),
    ),
}


def tensors(device, dtype=f32):
    return [torch.randn(shape).to(device, dtype) for shape in SHAPES]


def step(algorithm, grads, params, states, steps, values, **more):
    arguments = {
        "models": [],
        "updates": [],
        "norm_averages": None,
        "lr_tensor": None,
        "loss_scale": None,
        "found_inf": None,
        **more,
    }
    _core.C.step(
        algorithm,
        grads=grads,
        params=params,
        states=states,
        steps=steps,
        values=values,
        **arguments,
    )


@pytest.mark.parametrize("algorithm", CASES)
def test_step_gives_the_bits_of_the_optimizer(algorithm, device):
    values, make, names = CASES[algorithm]
    own = [param.requires_grad_() for param in tensors(device)]
    optimizer = make(own)
    params = [param.detach().clone() for param in own]
    models = [param.to(bf16) for param in params]
    states = [[torch.zeros_like(p) for p in params] for _ in names]
    steps = torch.zeros(len(params), device=device)
    averages = torch.zeros(len(params), device=device)
    scale = torch.tensor(4.0, device=device)
    for _ in range(3):
        grads = tensors(device)
        for param, grad in zip(own, grads, strict=True):
            param.grad = grad
        optimizer.step()
        scaled = [grad * 4 for grad in grads]
        more = {"models": models, "norm_averages": averages, "loss_scale": scale}
        step(algorithm, scaled, params, states, steps, values, **more)
    assert steps.tolist() == [3.0 * (param.numel() > 0) for param in params]
    for i, param in enumerate(own):
        assert same_bits(params[i], param.detach())
        assert torch.equal(models[i], params[i].to(bf16))
        found = {name: states[j][i] for j, name in enumerate(names)}
        assert_same_bits(found, {name: optimizer.state[param][name] for name in names})


@pytest.mark.parametrize("algorithm", CASES)
def test_a_set_flag_stops_the_step(algorithm, device):
    values, _, names = CASES[algorithm]
    params = tensors(device)
    states = [[torch.ones_like(p) for p in params] for _ in names]
    steps, averages = (torch.zeros(len(params), device=device) for _ in range(2))
    before = [p.clone() for p in params]
    flag = torch.ones((), device=device)
    more = {"norm_averages": averages, "found_inf": flag}
    step(algorithm, tensors(device), params, states, steps, values, **more)
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert not steps.any()
    assert not averages.any()


def test_l2norm_with_an_inverse_scale_measures_unscaled_values(device):
    values = tensors(device, f16)
    inverse = torch.tensor(0.25, device=device)
    flag = torch.zeros((), device=device)
    norm, norms = _core.C.l2norm(values, True, inverse, flag)
    plain, each = _core.C.l2norm(values, True)
    torch.testing.assert_close(norm, plain / 4)
    torch.testing.assert_close(norms, each / 4)
    assert flag == 0
    values[0][3] = float("inf")
    _core.C.l2norm(values, False, inverse, flag)
    assert flag == 1


@pytest.mark.parametrize(
    ("algorithm", "states", "steps", "message"),
    [
        ("sgd", [], 3, "steps has 3 elements for 4 tensors"),
        ("novograd", [4], 4, "novograd needs norm_averages"),
        ("sgd", [1], 4, r"states\[0\] holds 1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(algorithm, states, steps, message):
    params = tensors("cpu")
    states = [params[:count] for count in states]
    with pytest.raises(ValueError, match=message):
        step(algorithm, params, params, states, torch.zeros(steps), {})
