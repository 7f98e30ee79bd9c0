"""``amp.load_master_weights``: FP32 masters from an FP32 checkpoint."""

import copy
import warnings

import pytest
import torch
from torch import nn

from ampfuse import amp, optim


def net():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def step(model, optimizer):
    optimizer.zero_grad()
    with amp.scale_loss(model(torch.ones(3, 4)).pow(2).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
@pytest.mark.parametrize("steps", [0, 2])
def test_masters_have_all_digits_of_the_checkpoint(level, kind, steps):
    """A model that arrives in half trains on with the bits of one that arrived in FP32."""
    checkpoint = net().state_dict()
    trained = []
    for arrives_in_half in (False, True):
        model = net()
        model.load_state_dict(checkpoint)
        if arrives_in_half:
            model.half()
        options = {"opt_level": level, "verbosity": 0, "init_scale": 8.0, "master_weights": True}
        optimizer = kind(model.parameters(), lr=1e-3)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The model arrived")
            model, optimizer = amp.initialize(model, optimizer, **options)
        if arrives_in_half:
            for _ in range(steps):
                step(model, optimizer)
            amp.load_master_weights(optimizer, checkpoint)
        names = dict(model.named_parameters())
        for name, master in zip(names, amp.master_params(optimizer), strict=True):
            assert torch.equal(master, checkpoint[name])
            assert torch.equal(names[name], checkpoint[name].to(names[name].dtype))
        assert torch.equal(model[1].running_var.float(), checkpoint["1.running_var"])
        if steps == 0:
            step(model, optimizer)
        trained.append([p.detach().clone() for p in amp.master_params(optimizer)])
    assert all(map(torch.equal, *trained))


@pytest.mark.parametrize("steps", [0, 2])
def test_of_an_optimizer_alone(steps):
    checkpoint = net().state_dict()
    model = net().bfloat16()
    model[1].float()
    optimizer = optim.SGD(model.parameters(), lr=0.5, weight_decay=1.0, master_weights=True)
    for _ in range(steps):
        model(torch.ones(3, 4).bfloat16()).float().pow(2).sum().backward()
        optimizer.step()
    amp.load_master_weights(optimizer, checkpoint, model=model)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, checkpoint[name].to(weight.dtype))
        weight.grad = torch.zeros_like(weight)
    optimizer.step()  # halves the masters
    for name in ("0.weight", "2.bias"):
        weight = model.get_parameter(name)
        assert torch.equal(optimizer.state[weight]["master_param"], checkpoint[name] / 2)
        assert torch.equal(weight, (checkpoint[name] / 2).bfloat16())


def test_a_state_that_does_not_fit_changes_nothing():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    checkpoint = {f"module.{name}": value + 1 for name, value in net().state_dict().items()}
    before = copy.deepcopy([*model.parameters(), *amp.master_params(optimizer)])
    wrong = r"of the Sequential\. It has keys missing: 0\.weight, .* 5 more; unexpected: module\.0"
    with pytest.raises(RuntimeError, match=wrong):
        amp.load_master_weights(optimizer, checkpoint)
    checkpoint = net().state_dict() | {"2.bias": torch.zeros(3), "3.weight": torch.zeros(1)}
    wrong = r"unexpected: 3\.weight; of another shape: 2\.bias \(\(3,\), not \(2,\)\). Nothing was"
    with pytest.raises(RuntimeError, match=wrong):
        amp.load_master_weights(optimizer, checkpoint)
    after = [*model.parameters(), *amp.master_params(optimizer)]
    assert all(map(torch.equal, before, after))


def test_which_model_and_which_optimizer():
    models = [net(), net()]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
    amp.initialize(models, optimizer, opt_level="O2", verbosity=0)
    checkpoint = net().state_dict()
    with pytest.raises(ValueError, match="with 2 models: pass the one"):
        amp.load_master_weights(optimizer, checkpoint)
    with torch.no_grad():
        models[0][0].weight.zero_()  # an edit, which stays
    amp.load_master_weights(optimizer, checkpoint, model=models[1])
    masters = list(amp.master_params(optimizer))
    assert not masters[0].any()
    assert torch.equal(masters[6], checkpoint["0.weight"])
    alone = torch.optim.SGD(net().parameters(), lr=0.1)
    with pytest.raises(TypeError, match="SGD keeps no FP32 masters"):
        amp.load_master_weights(alone, checkpoint)
