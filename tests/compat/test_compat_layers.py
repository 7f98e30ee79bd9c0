"""``apex.mlp`` and ``apex.reparameterization`` against torch's modules."""

import copy

import pytest
import torch
from torch import nn

from ampfuse.compat import apex
from ampfuse.compat.apex import mlp, reparameterization
from ampfuse.compat.apex.reparameterization import apply_weight_norm, remove_weight_norm
from cases import f16

ACTIVATIONS = {"none": nn.Identity(), "relu": nn.ReLU(), "sigmoid": nn.Sigmoid()}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_mlp_is_linear_layers(bias, activation):
    torch.manual_seed(0)
    model, x = mlp.MLP([4, 8, 3], bias=bias, activation=activation), torch.randn(5, 4)
    assert [p.shape for p in model.weights] == [(8, 4), (3, 8)]
    assert len(model.biases) == 2 * bias
    assert f"Bias={bias}, activation={activation}" in repr(model)
    layers = nn.Sequential()
    for i in range(2):
        linear = nn.Linear(*((4, 8), (8, 3))[i], bias=bias)
        linear.weight.data.copy_(getattr(model, f"weight_{i}"))
        if bias:
            linear.bias.data.copy_(getattr(model, f"bias_{i}"))
        layers.extend([linear, ACTIVATIONS[activation]])
    args = bias, model.activation, x, *model.weights, *model.biases
    for out in (model(x), mlp.mlp_function(*args), mlp.MlpFunction.apply(*args)):
        torch.testing.assert_close(out, layers(x))
        model.zero_grad()
        layers.zero_grad()
        out.square().sum().backward()
        layers(x).square().sum().backward()
        expected = {p.shape: p.grad for p in layers.parameters()}
        for p in model.parameters():
            torch.testing.assert_close(p.grad, expected[p.shape])


@pytest.mark.parametrize("function", [False, True])
def test_mlp_at_o2(function):
    model, x = mlp.MLP([4, 8, 3]), torch.randn(5, 4)
    exact = model(x)
    model = apex.amp.initialize(model, opt_level="O2", verbosity=0)
    assert {p.dtype for p in model.parameters()} == {f16}
    args = True, model.activation, x.half(), *model.weights, *model.biases
    out = mlp.MlpFunction.apply(*args) if function else model(x)
    assert out.dtype == (f16 if function else torch.float32)
    torch.testing.assert_close(out.float(), exact, rtol=1e-2, atol=1e-2)
    out.float().sum().backward()
    assert all(p.grad.dtype == f16 and p.grad.any() for p in model.parameters())


def test_mlp_starts_as_apexs_and_refuses_what_it_refused():
    torch.manual_seed(0)
    model = mlp.MLP([200, 300])
    assert model.weight_0.std().item() == pytest.approx((2 / 500) ** 0.5, rel=0.05)
    assert model.bias_0.std().item() == pytest.approx(300**-0.5, rel=0.2)
    with pytest.raises(TypeError, match="gelu"):
        mlp.MLP([2, 2], activation="gelu")


@pytest.mark.parametrize("hook_child", [True, False])
@pytest.mark.parametrize(("dim", "others"), [(0, 1), (1, 0), (None, (0, 1))])
def test_weight_norm(dim, others, hook_child):
    """As the formula has it, with its gradients; copies, loads and goes again."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3), nn.LSTM(3, 5))
    x = torch.randint(7, (6,))
    before = net(x)[0].detach()
    names = set(net.state_dict())
    assert apply_weight_norm(net, dim=dim, hook_child=hook_child) is net
    normed = {"1.weight", "2.weight_ih_l0", "2.weight_hh_l0"}
    ends = {f"{name}_{end}" for name in normed for end in "gv"}
    assert set(net.state_dict()) == set(dict(net.named_parameters())) == names - normed | ends
    twin = copy.deepcopy(net)
    torch.testing.assert_close(net(x)[0], before)
    w = net[1].weight_v.detach().clone().requires_grad_()
    g = net[1].weight_g.detach().clone().requires_grad_()
    (g * w / w.norm(dim=others, keepdim=True) * 3).square().sum().backward()
    net[1](torch.zeros(1, 4)) if hook_child else net(x)
    (net[1].weight * 3).square().sum().backward()
    torch.testing.assert_close(net[1].weight_v.grad, w.grad, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(net[1].weight_g.grad, g.grad)
    with torch.no_grad():
        net[1].weight_g.mul_(2)
    twin.load_state_dict(net.state_dict())
    assert torch.equal(twin(x)[0], net(x)[0])
    assert not torch.equal(net(x)[0], before)
    after = net(x)[0].detach()
    assert remove_weight_norm(net) is net
    assert set(net.state_dict()) == names
    torch.testing.assert_close(net(x)[0], after)
    assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in net.parameters())


def test_weight_norm_of_one_weight_in_half():
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).half()
    apply_weight_norm(net, "1.weight")
    assert set(net.state_dict()) == {"0.weight", "0.bias", "1.weight_g", "1.weight_v", "1.bias"}
    optimizer = apex.fp16_utils.FP16_Optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    before = net[1].weight.detach().clone()
    out = net(torch.ones(2, 4, dtype=f16))
    assert out.dtype == f16
    optimizer.backward(out.float().square().sum())
    optimizer.step()
    net(torch.ones(2, 4, dtype=f16))
    assert not torch.equal(net[1].weight, before)
    with pytest.raises(ValueError, match="nothing"):
        remove_weight_norm(net, "nothing")
    remove_weight_norm(net[1], "weight")
    assert net[1].weight.dtype == f16
    assert apex.reparameterization is reparameterization
