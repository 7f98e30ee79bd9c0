"""The steps as functions of lists of tensors, which apex's amp_C had: ampfuse.compat has that."""

import pytest
import torch

from ampfuse import _core
from cases import KINDS, assert_same_bits, bf16, make, same_bits
from stepping import give_gradients, parameters, params_of

SHAPES = ((300,), (33000,), (0,), (7, 5))


def step(algorithm, grads, params, states, steps, values, models=(), averages=None, **more):
    more = {"lr_tensor": None, "loss_scale": None, "found_inf": None, **more}
    lists = {"grads": grads, "params": params, "states": states, "models": models, "updates": []}
    _core.C.step(algorithm, **lists, steps=steps, values=values, norm_averages=averages, **more)


@pytest.mark.parametrize("kind", KINDS)
def test_step_gives_the_bits_of_the_optimizer(kind, device):
    """On scaled gradients, with model weights; a set flag stops it."""
    optimizer = make(kind, parameters(SHAPES, device=device))
    own, algorithm = params_of(optimizer), optimizer.algorithm
    names = algorithm.states_in(optimizer.param_groups[0])
    values = {hyper.name: hyper.of(optimizer.param_groups[0]) for hyper in algorithm.hypers}
    fill = optimizer.defaults.get(algorithm.filled_with, 0.0)
    params = [param.detach().clone() for param in own]
    states = [[torch.full_like(p, fill) for p in params] for _ in names]
    lists = {"models": [param.to(bf16) for param in params], "params": params, "states": states}
    steps, averages = (torch.zeros(len(params), device=device) for _ in range(2))
    scale, flag = torch.tensor(4.0, device=device), torch.zeros((), device=device)
    numbers = {"steps": steps, "averages": averages, "loss_scale": scale, "found_inf": flag}
    for _ in range(3):
        scaled = [gradient * 4 for gradient in give_gradients(own)]
        optimizer.step()
        step(algorithm.name, scaled, values=values, **lists, **numbers)
    flag.fill_(1)
    step(algorithm.name, scaled, values=values, **lists, **numbers)
    assert steps.tolist() == [3.0 * (param.numel() > 0) for param in params]
    for i, param in enumerate(own):
        assert same_bits(params[i], param.detach())
        assert torch.equal(lists["models"][i], params[i].to(bf16))
        found = {name: states[j][i] for j, name in enumerate(names)}
        assert_same_bits(found, {name: optimizer.state[param][name] for name in names})
        if "exp_avg_norm" in optimizer.state[param]:
            assert averages[i] == optimizer.state[param]["exp_avg_norm"]


@pytest.mark.parametrize(
    ("algorithm", "states", "steps", "message"),
    [
        ("sgd", [], 3, "steps has 3 elements for 4 tensors"),
        ("novograd", [4], 4, "novograd needs norm_averages"),
        ("sgd", [1], 4, r"states\[0\] holds 1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(algorithm, states, steps, message):
    params = [param.detach() for param in parameters(SHAPES)]
    states = [params[:count] for count in states]
    with pytest.raises(ValueError, match=message):
        step(algorithm, params, params, states, torch.zeros(steps), {})
