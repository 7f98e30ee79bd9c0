"""Arguments in a wrong order, and what a message of initialize says to do."""

import pytest
import torch
from torch import nn

from ampfuse import amp, optim


@pytest.mark.parametrize("enabled", [True, "False"])
def test_swapped_arguments_of_scale_loss(enabled):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, enabled, verbosity=0)
    loss = model(torch.ones(2)).float().sum()
    message = r"swapped: .* amp.scale_loss\(loss, optimizer\)"
    with pytest.raises(TypeError, match=message), amp.scale_loss(optimizer, loss):
        pass


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.RAdam, optim.Lion])
def test_the_way_to_initialize_again(level, cls):
    """The message's, step by step: the training goes on as if nothing had happened."""

    def train(model, optimizer, seeds):
        for seed in seeds:
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
            with amp.scale_loss((model(x).float() - x).square().mean(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    def started():
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = cls(model.parameters(), lr=0.01)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        return train(model, optimizer, range(3)), optimizer

    expected = train(*started(), range(3, 6))
    model, old = started()
    message = r"make a new .* model.parameters\(\).*new.load_state_dict\(old.state_dict\(\)\)"
    with pytest.raises(RuntimeError, match=message):
        amp.initialize(model, old, opt_level=level, verbosity=0)
    scale = amp.state_dict()
    new = cls(model.parameters(), lr=0.01)
    amp.initialize(model, new, opt_level=level, verbosity=0)
    new.load_state_dict(old.state_dict())
    amp.load_state_dict(scale)
    train(model, new, range(3, 6))
    assert torch.equal(model.weight, expected.weight)
