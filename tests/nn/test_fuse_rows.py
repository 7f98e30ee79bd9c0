"""fuse() on layer and RMS norms and activations: in blocks as people write them, and in models of
libraries.
"""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import profile

from ampfuse import amp
from ampfuse.nn import fuse, unfuse
from conftest import compilers

bf16 = torch.bfloat16
ROOT = Path(__file__).parents[2]


class PreNorm(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm1, self.norm2 = norm(24), norm(24)
        self.mix, self.mlp = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x):
        x = x + self.mix(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PostNorm(PreNorm):
    def forward(self, x):
        x = self.norm1(torch.add(x, self.mix(x)))
        x = self.norm2(self.mlp(x) + x)
        return x * 2


class InPlace(PreNorm):
    """Adds that fusing must leave: in place, or of a sum that is written to before the norm."""

    def forward(self, x):
        y = self.mix(x)
        y += x
        y = self.norm1(y)
        total = x + y
        total.mul_(2)
        return self.norm2(total)


class Gated(nn.Module):
    """A gate as a transformer's, and a product of one value with itself."""

    def __init__(self, act=nn.SiLU):
        super().__init__()
        self.gate, self.up = nn.Linear(24, 40, bias=False), nn.Linear(24, 40)
        self.down, self.act, self.other = nn.Linear(40, 24), act(), act()

    def forward(self, x):
        y = self.down(self.up(x) * self.act(self.gate(x)))
        z = self.other(y)
        return z * z


class Functions(nn.Module):
    """Activations that are no modules."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(24, 40), nn.Linear(40, 24)
        self.third = nn.Linear(24, 24, bias=False)

    def forward(self, x):
        x = self.second(nn.functional.gelu(self.first(x), approximate="tanh"))
        return nn.functional.silu(self.third(x)) + nn.functional.silu(x, inplace=False)


class Shared(nn.Module):
    """Layers whose results others see, or whose activation works in place."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)
        self.act, self.in_place = nn.GELU(), nn.SiLU(inplace=True)

    def forward(self, x):
        y = self.first(x)
        return self.in_place(self.second(self.act(y))) + y


def passes(model, *inputs, op="norm", **named):
    with profile() as profiled:
        result = model(*inputs, **named)
    count = sum(event.name == f"ampfuse::{op}_forward" for event in profiled.events())
    return result, count


def trained(model, x):
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_near(found, expected, eps):
    for one, right in zip(found, expected, strict=True):
        assert (one - right).abs().max() <= eps * right.abs().max()


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize(
    ("block", "with_add"), [(PreNorm, {"norm2"}), (PostNorm, {"norm1", "norm2"}), (InPlace, set())]
)
def test_blocks_as_people_write_them(norm, block, with_add):
    torch.manual_seed(0)
    model = block(norm)
    x = torch.randn(3, 5, 24)
    expected, keys = trained(model, x), list(model.state_dict())
    report = fuse(model)
    assert report.fused == {
        name: "with add" if name in with_add else "alone" for name in ("norm1", "norm2")
    }
    assert report.summary == "2 of 2 norms and activations fused"
    assert list(model.state_dict()) == keys
    assert_near(trained(model, x), expected, 1e-5)
    for other in (model, copy.deepcopy(model)):
        assert passes(other, x)[1] == 2
    assert passes(pickle.loads(pickle.dumps(model)), x)[1] == 0
    assert set(fuse(model).left.values()) <= {"already fused"}
    unfuse(model)
    assert passes(model, x)[1] == 0
    assert all(torch.equal(*pair) for pair in zip(trained(model, x), expected, strict=True))


@pytest.mark.parametrize(
    ("parts", "fused"), [(["norms"], {"0.norm1", "0.norm2"}), (["activations"], {"2"}), ([], set())]
)
def test_parts(parts, fused):
    model = nn.Sequential(PreNorm(nn.LayerNorm), nn.Linear(24, 40), nn.GELU())
    x = torch.randn(3, 5, 24)
    expected = trained(model, x)
    report = fuse(model, parts)
    assert (report.fused.keys(), report.left) == (fused, {})
    assert_near(trained(model, x), expected, 1e-5)
    assert passes(model, x)[1] == 2 * ("norms" in parts)
    assert passes(model, x, op="activation")[1] == ("activations" in parts)
    with pytest.raises(ValueError, match="parts holds 'norm'; it has to hold some of norms, act"):
        fuse(model, ["norm"])


@pytest.mark.parametrize(
    ("block", "fused", "count"),
    [
        (lambda: nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24)), {"1": "bias"}, 1),
        (Gated, {"act": "product", "other": "bias"}, 2),
        (lambda: Gated(lambda: nn.GELU("tanh")), {"act": "product", "other": "bias"}, 2),
        (Functions, {"first": "gelu_tanh"}, 1),
        (Shared, {"act": None}, 1),
    ],
)
def test_activations_with_what_is_beside_them(block, fused, count):
    torch.manual_seed(0)
    model = block()
    x = torch.randn(3, 5, 24)
    expected, keys = trained(model, x), list(model.state_dict())
    report = fuse(model)
    assert report.fused == {name: f"with {it}" if it else "alone" for name, it in fused.items()}
    assert not report.left
    assert list(model.state_dict()) == keys
    assert_near(trained(model, x), expected, 1e-5)
    for other in (model, copy.deepcopy(model)):
        assert passes(other, x, op="activation")[1] == count
    unfuse(model)
    assert passes(model, x, op="activation")[1] == 0
    assert all(torch.equal(*pair) for pair in zip(trained(model, x), expected, strict=True))


def test_layers_and_activations_that_are_exchanged_or_hooked_run():
    model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24))
    gated = Gated()
    fuse(model)
    fuse(gated)
    seen = []
    x = torch.randn(2, 24)
    handle = model[0].register_forward_hook(lambda module, args, output: seen.append(output))
    model(x)
    torch.testing.assert_close(seen, [model[0](x)] * len(seen))
    assert len(seen) == 2
    handle.remove()
    model[1] = nn.Tanh()
    torch.testing.assert_close(model(x), model[2](model[0](x).tanh()))
    model[0] = nn.Sequential(nn.Linear(24, 40), nn.ReLU())
    torch.testing.assert_close(model(x), model[2](model[0](x).tanh()))
    gated.act = nn.ReLU()
    gated.other = nn.Identity()
    torch.testing.assert_close(gated(x), gated.down(gated.up(x) * gated.gate(x).relu()).square())


def test_hooks_and_modules_in_their_place_run():
    model = PreNorm(nn.LayerNorm)
    fuse(model)
    seen = []
    model.norm2.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    x = torch.randn(2, 24)
    model(x)
    assert seen == [(2, 24)]
    model.norm1 = nn.Identity()
    expected = x + model.mix(x)
    expected = expected + model.mlp(nn.functional.layer_norm(expected, [24]))
    torch.testing.assert_close(model(x), expected)


def test_types_that_differ_are_added_as_torch_adds_them():
    model = PreNorm(nn.LayerNorm)
    model.mix.to(bf16)
    model.norm1.to(bf16)
    fuse(model)
    x = torch.randn(2, 24)
    model.norm1.register_forward_pre_hook(lambda module, args: args[0].to(bf16))
    assert model(x).dtype == torch.float32


@pytest.mark.parametrize("block", [lambda: PreNorm(nn.LayerNorm), Gated, Functions])
@compilers
def test_compiles_in_one_graph(backend, block):
    torch.manual_seed(0)
    model = block()
    fuse(model)
    x = torch.randn(4, 24)
    expected = trained(model, x)
    assert_near(trained(torch.compile(model, fullgraph=True, backend=backend), x), expected, 1e-5)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_at_each_level(level):
    losses = {}
    for fused in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(PreNorm(nn.LayerNorm), PreNorm(nn.LayerNorm), nn.Linear(24, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, fuse=fused, verbosity=0
        )
        x = torch.randn(64, 24)
        losses[fused] = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = (model(x).float() - x[:, :1]).square().mean()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            losses[fused].append(loss.item())
    assert losses[True][-1] < losses[True][0] / 2
    assert losses[True] == pytest.approx(losses[False], rel=0.03)


# ---- of libraries --------------------------------------------------------------------------------


def check_library_model(model, *inputs, count, with_add=0, acts=("bias", 2), **named):
    """Fuses a model, and compares what it returns.

    Arguments:
        count: its norms.
        acts: what its activations take with them, and how many there are.
    """
    model.eval()
    expected = model(*inputs, **named)
    report = fuse(model)
    assert not report.left, report
    assert len(report.fused) == count + acts[1], report
    assert sum(what == "with add" for what in report.fused.values()) == with_add, report
    assert sum(what == f"with {acts[0]}" for what in report.fused.values()) == acts[1], report
    found, run = passes(model, *inputs, **named)
    assert run == count
    assert passes(model, *inputs, op="activation", **named)[1] == acts[1]
    pick = (lambda y: y[0]) if not isinstance(expected, torch.Tensor) else (lambda y: y)
    torch.testing.assert_close(pick(found), pick(expected), rtol=1e-4, atol=1e-4)
    model.train()
    pick(model(*inputs, **named)).float().square().mean().backward()
    for name in report.fused:
        assert all(p.grad.isfinite().all() for p in model.get_submodule(name).parameters())


@pytest.mark.parametrize(
    ("name", "options", "count", "with_add"),
    [
        ("vit_tiny_patch16_224", {"depth": 2, "img_size": 32}, 5, 2),
        (
            "convnext_atto",
            {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 16), "conv_mlp": False},
            9,
            0,
        ),
        (
            "swin_tiny_patch4_window7_224",
            {"depths": (1, 1), "num_heads": (1, 2), "embed_dim": 8},
            7,
            0,
        ),
    ],
)
def test_timm(name, options, count, with_add):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3, **options)
    side = options.get("img_size", 224)
    x = torch.randn(2, 3, side, side)
    acts = ("bias", sum(options["depths"]) if "depths" in options else options["depth"])
    check_library_model(model, x, count=count, with_add=with_add, acts=acts)


def test_torchvision():
    models = pytest.importorskip("torchvision").models
    torch.manual_seed(0)
    model = models.VisionTransformer(32, 16, 2, 2, 24, 48)
    check_library_model(model, torch.randn(2, 3, 32, 32), count=5, with_add=2)


def test_encoder_layers_of_torch():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 2, 48, norm_first=True, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train()
    report = fuse(model)
    assert len(report.fused) == 4, report
    assert passes(model, torch.randn(2, 5, 24))[1] == 4


@pytest.mark.parametrize(
    ("name", "count", "with_add"), [("Llama", 5, 2), ("GPT2", 5, 2), ("Bert", 5, 4)]
)
def test_transformers(name, count, with_add):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    if name == "GPT2":
        sizes = {"vocab_size": 50, "n_embd": 24, "n_layer": 2, "n_head": 2}
    else:
        sizes["intermediate_size"] = 48
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes))
    acts = ("product" if name == "Llama" else "bias", 2)
    words = torch.arange(12).view(2, 6)
    check_library_model(model, words, count=count, with_add=with_add, acts=acts)


def test_the_loss_of_causal_language_models():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 48}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    model = transformers.LlamaForCausalLM(config).to(bf16)
    words = torch.randint(50, (3, 9))
    labels = words.masked_fill(words % 5 == 0, -100)
    options = [{}, {"num_items_in_batch": torch.tensor(7)}, {"num_items_in_batch": 7}]
    options.append({"shift_labels": labels.roll(-1, 1)})
    expected = [model(words, labels=labels, **some).loss for some in options]
    assert fuse(model).has_loss
    for some, right in zip(options, expected, strict=True):
        with profile() as profiled:
            loss = model(words, labels=labels, **some).loss
        assert "ampfuse::cross_entropy_loss" in {event.key for event in profiled.key_averages()}
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, right, rtol=0.01, atol=0.01)
    loss.backward()
    assert not fuse(model).has_loss  # already
    unfuse(model)
    assert model.loss_function.__name__ == "ForCausalLMLoss"
    model.loss_function = lambda **_: torch.zeros(())
    assert not fuse(model).has_loss


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_training_is_as_good_fused(level):
    """The licence's bytes, 200 steps, three seeds: losses differ by less than the seeds' do."""
    transformers = pytest.importorskip("transformers")
    text = torch.frombuffer(bytearray((ROOT / "LICENSE").read_bytes()), dtype=torch.uint8)
    found = {True: [], False: []}
    for seed in range(3):
        for fused in found:
            torch.manual_seed(seed)
            sizes = {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 64}
            drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            config = transformers.GPT2Config(vocab_size=256, **sizes, **drop)
            model = transformers.GPT2LMHeadModel(config)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            model, optimizer = amp.initialize(
                model, optimizer, opt_level=level, fuse=fused, verbosity=0
            )
            last = []
            for step in range(200):
                begin = torch.randint(len(text) - 64, (8,))
                words = torch.stack([text[i : i + 64] for i in begin]).long()
                optimizer.zero_grad()
                loss = model(words, labels=words).loss
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
                if step >= 150:
                    last.append(loss.detach().float())
            found[fused].append(torch.stack(last).mean())
    fused, plain = (torch.stack(found[key]) for key in (True, False))
    assert plain.max() < 3.5  # from 5.5
    spread = plain.max() - plain.min()
    assert (fused - plain).abs().max() < spread / 2
