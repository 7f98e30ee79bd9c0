"""timm with the fused optimizers by name; and what all of ampfuse.integrations has in common."""

import copy
import inspect

import pytest
import torch
from torch import nn

pytest.importorskip("timm")

import timm
from timm.optim import create_optimizer_v2
from timm.utils import NativeScaler

import ampfuse.integrations.timm  # noqa: F401, registers
from cases import assert_same
from programs import python


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adagrad", "lamb", "novograd", "lion"])
def test_each_name_makes_its_optimizer_with_all_that_timm_passes(name):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    options = {"lr": 0.1, "weight_decay": 0.01, "eps": 1e-3, "betas": (0.7, 0.8), "momentum": 0.6}
    optimizer = create_optimizer_v2(model, f"ampfuse-{name}", **options, master_weights=True)
    kind = type(optimizer)
    assert kind.__module__ == "ampfuse.optim.optimizers"
    assert kind.__name__.lower() == name
    taken = options.keys() & inspect.signature(kind).parameters.keys()
    for group, decay in zip(optimizer.param_groups, (0.0, 0.01), strict=True):
        expected = {key: options[key] for key in taken} | {"weight_decay": decay}
        assert {key: group[key] for key in taken} == expected
        assert bool(group.get("nesterov")) == (name == "sgd")
    assert optimizer.master_weights is True


class Run:
    """timm's train script with ``--amp --amp-dtype float16``; the loss of step 3 is inf."""

    def __init__(self, name):
        torch.manual_seed(0)
        options = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
        model = timm.models.VisionTransformer(**options, num_classes=4)
        optimizer = create_optimizer_v2(model, name, lr=0.01, momentum=0.9)
        self.parts = model, optimizer, NativeScaler(device="cpu")
        self.images, self.losses = torch.randn(4, 3, 16, 16), []

    def train(self, steps, clip):
        model, optimizer, scaler = self.parts
        for step in steps:
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.cross_entropy(model(self.images), torch.arange(4))
            self.losses.append(loss.item())
            loss = loss * float("inf") if step == 3 else loss
            scaler(loss, optimizer, clip, parameters=model.parameters())
            optimizer.zero_grad()
        return [dict(part.state_dict()) for part in self.parts]


@pytest.mark.parametrize("clip", [None, 0.1])
def test_native_scaler_of_timm_drives_the_fused_step_and_resumes(clip):
    torchs, run, first, resumed = map(Run, ["sgd", *["ampfuse-sgd"] * 3])
    expected, trained = torchs.train(range(6), clip), run.train(range(6), clip)
    assert expected[0].keys() == trained[0].keys()
    for a, b in zip(trained[0].values(), expected[0].values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert_same(trained[2], expected[2])  # the scale
    assert run.losses[-1] < run.losses[0]
    assert run.losses[4] == run.losses[3]  # the step in between was skipped
    for part, state in zip(resumed.parts, first.train(range(4), clip), strict=True):
        part.load_state_dict(copy.deepcopy(state))
    assert_same(resumed.train(range(4, 6), clip), trained)


def test_ampfuse_imports_none_of_them():
    code = (
        "import sys, ampfuse; from ampfuse import amp, optim, integrations;"
        "print({'lightning', 'accelerate', 'transformers', 'timm'} & sys.modules.keys())"
    )
    assert python("-c", code).stdout == "set()\n"
