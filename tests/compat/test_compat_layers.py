"""Layers: ``apex.mlp``, ``normalization``, ``reparameterization`` and ``contrib.xentropy``."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampfuse.compat import apex
from ampfuse.compat.apex import mlp, reparameterization
from ampfuse.compat.apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from ampfuse.compat.apex.normalization import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
)
from ampfuse.compat.apex.normalization.fused_layer_norm import (
    fused_layer_norm,
    fused_layer_norm_affine,
    fused_rms_norm,
    fused_rms_norm_affine,
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
)
from ampfuse.compat.apex.reparameterization import apply_weight_norm, remove_weight_norm
from cases import bf16, f16, f32

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
    assert out.dtype == (f16 if function else f32)
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
    """Weight norm follows the formula, with its gradients; it copies, loads and is removed."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3), nn.LSTM(3, 5))
    x = torch.randint(7, (6,))
    before = network(x)[0].detach()
    names = set(network.state_dict())
    for _ in range(2):  # once more changes nothing
        assert apply_weight_norm(network, dim=dim, hook_child=hook_child) is network
    normed = {"1.weight", "2.weight_ih_l0", "2.weight_hh_l0"}
    ends = {f"{name}_{end}" for name in normed for end in "gv"}
    assert (
        set(network.state_dict()) == set(dict(network.named_parameters())) == names - normed | ends
    )
    twin = copy.deepcopy(network)
    torch.testing.assert_close(network(x)[0], before)
    w = network[1].weight_v.detach().clone().requires_grad_()
    g = network[1].weight_g.detach().clone().requires_grad_()
    (g * w / w.norm(dim=others, keepdim=True) * 3).square().sum().backward()
    network[1](torch.zeros(1, 4)) if hook_child else network(x)
    (network[1].weight * 3).square().sum().backward()
    torch.testing.assert_close(network[1].weight_v.grad, w.grad, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(network[1].weight_g.grad, g.grad)
    with torch.no_grad():
        network[1].weight_g.mul_(2)
    twin.load_state_dict(network.state_dict())
    assert torch.equal(twin(x)[0], network(x)[0])
    assert not torch.equal(network(x)[0], before)
    after = network(x)[0].detach()
    assert remove_weight_norm(network) is network
    assert set(network.state_dict()) == names
    torch.testing.assert_close(network(x)[0], after)
    assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in network.parameters())


def test_weight_norm_of_one_weight_in_half():
    network = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).half()
    apply_weight_norm(network, "1.weight")
    assert set(network.state_dict()) == {"0.weight", "0.bias", "1.weight_g", "1.weight_v", "1.bias"}
    optimizer = apex.fp16_utils.FP16_Optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    before = network[1].weight.detach().clone()
    out = network(torch.ones(2, 4, dtype=f16))
    assert out.dtype == f16
    optimizer.backward(out.float().square().sum())
    optimizer.step()
    network(torch.ones(2, 4, dtype=f16))
    assert not torch.equal(network[1].weight, before)
    with pytest.raises(ValueError, match="nothing"):
        remove_weight_norm(network, "nothing")
    remove_weight_norm(network[1], "weight")
    assert network[1].weight.dtype == f16
    assert apex.reparameterization is reparameterization


# --- normalization --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [6, (6,), [2, 6]])
def test_norms_are_torchs(shape):
    x = torch.rand(3, 2, 6)
    for ours, theirs in ((FusedLayerNorm, nn.LayerNorm), (FusedRMSNorm, nn.RMSNorm)):
        for affine in (True, False):
            module = ours(shape, elementwise_affine=affine, memory_efficient=True)
            reference = theirs(shape, eps=1e-5, elementwise_affine=affine)
            torch.testing.assert_close(module(x), reference(x))
            assert module.state_dict().keys() == reference.state_dict().keys()
    torch.testing.assert_close(fused_layer_norm(x, 6), F.layer_norm(x, (6,), eps=1e-6))
    torch.testing.assert_close(fused_rms_norm(x, 6), F.rms_norm(x, (6,), eps=1e-6))


@pytest.mark.parametrize("x", [f16, bf16, f32])
@pytest.mark.parametrize("weights", [f16, bf16, f32])
def test_types_of_norms(x, weights):
    data = torch.rand(3, 6).to(x)
    for plain, mixed in ((FusedLayerNorm, MixedFusedLayerNorm), (FusedRMSNorm, MixedFusedRMSNorm)):
        exact = plain(6)(data.float())
        for kind, out in ((plain, x), (mixed, weights)):
            result = kind(6).to(weights)(data)
            assert result.dtype == out
            torch.testing.assert_close(result.float(), exact, rtol=0.02, atol=0.02)
    weight, bias = torch.rand(6).to(weights), torch.rand(6).to(weights)
    assert fused_layer_norm_affine(data, weight, bias, 6).dtype == x
    assert fused_rms_norm_affine(data, weight, 6).dtype == x
    with pytest.raises(RuntimeError, match="weights"):
        MixedFusedLayerNorm(6, elementwise_affine=False)


# --- contrib.xentropy -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [f16, bf16, f32])
@pytest.mark.parametrize("half_to_float", [False, True])
@pytest.mark.parametrize(("smoothing", "padding"), [(0.0, 0), (0.1, 3), (0.1, -100)])
def test_losses_of_rows(dtype, half_to_float, smoothing, padding):
    logits = (3 * torch.randn(6, 40)).to(dtype).requires_grad_()
    labels = torch.tensor([0, 3, 39, 7, 0, 3])
    losses = SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, padding, half_to_float)
    assert losses.dtype == (f32 if half_to_float else dtype)
    z = logits.detach().double().requires_grad_()
    options = {"ignore_index": padding, "label_smoothing": smoothing, "reduction": "none"}
    exact = F.cross_entropy(z, labels, **options)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(losses.double(), exact, rtol=max(eps, 1e-5), atol=1e-5)
    factor = torch.arange(1.0, 7.0)
    (losses * factor).sum().backward()
    (exact * factor.double()).sum().backward()
    torch.testing.assert_close(logits.grad.double(), z.grad, rtol=max(eps, 1e-5), atol=4 * eps)


def test_arguments_of_the_loss_have_apexs_defaults():
    logits, labels = torch.randn(3, 5), torch.tensor([0, 1, 4])
    losses = SoftmaxCrossEntropyLoss.apply(logits, labels)
    expected = F.cross_entropy(logits, labels, ignore_index=0, reduction="none")
    torch.testing.assert_close(losses, expected)


def test_fused_layer_norm_is_a_module_as_in_apex():
    import ampfuse.compat.apex.normalization.fused_layer_norm as module

    assert apex.normalization.fused_layer_norm is module
    assert module.FusedLayerNorm is apex.normalization.FusedLayerNorm is FusedLayerNorm
    assert callable(module.fused_layer_norm)


def test_functions_take_memory_efficient_last():
    x, weight, bias = torch.randn(2, 4), torch.randn(4), torch.randn(4)
    for function, params in {
        fused_layer_norm: [],
        fused_layer_norm_affine: [weight, bias],
        mixed_dtype_fused_layer_norm_affine: [weight, bias],
        fused_rms_norm: [],
        fused_rms_norm_affine: [weight],
        mixed_dtype_fused_rms_norm_affine: [weight],
    }.items():
        args = x, *params, (4,), 1e-3
        assert torch.equal(function(*args, True), function(*args))
