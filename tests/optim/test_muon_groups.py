"""ampfuse.optim.muon_groups: which parameters of a model are Muon's, and as what matrices."""

import pytest
import torch
from torch import nn

from ampfuse import optim
from cases import params_of, train


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.depthwise = nn.Conv1d(3, 16, 5), nn.Conv2d(16, 16, 3, groups=16)
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(16, 50)


def test_layers_decide_the_groups_of_a_model():
    model = Model()
    groups = optim.muon_groups(model, muon={"lr": 0.02}, adamw={"lr": 1e-3, "weight_decay": 0.0})
    matrices = {
        name: {key: value for key, value in group.items() if key in ("split", "flatten", "lr")}
        for group in groups
        if group["algorithm"] == "muon"
        for name in group["param_names"]
    }
    assert matrices == {
        "stem.weight": {"flatten": True, "lr": 0.02},
        "qkv.weight": {"split": 3, "lr": 0.02},
        "proj.weight": {"lr": 0.02},
    }
    named = [name for group in groups for name in group["param_names"]]
    assert sorted(named) == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    text = str(groups)
    assert "proj.weight: (16, 16), of a Linear" in text
    assert "depthwise.weight: a convolution of each channel by itself" in text
    optimizer = optim.Muon(groups)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.1, 0.0}
    train(optimizer)


def test_groups_by_name_and_names_that_are_not_there():
    model = Model()
    groups = optim.muon_groups(model, heads=["proj"], split={"head": [30, 20]})
    of = {name: group for group in groups for name in group["param_names"]}
    assert of["proj.weight"]["algorithm"] == "adamw"
    assert of["head.weight"]["split"] == [30, 20]
    for wrong in ({"heads": ["lm_head"]}, {"split": {"kv": 2}}):
        with pytest.raises(ValueError, match="nothing in the model has that name"):
            optim.muon_groups(model, **wrong)


class Any(nn.Module):
    """A module with the parts that are given: modules, parameters by their shapes, and values."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(torch.randn(part)) if type(part) is tuple else part)


class Config:
    def __init__(self, **values):
        vars(self).update(values)


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def placed(groups):
    """For each parameter its group, and what the report says of it."""
    said = dict(line.strip().split(": ", 1) for line in str(groups).splitlines() if line[0] == " ")
    return {name: (group, said[name]) for group in groups for name in group["param_names"]}


# A parameter of no layer, what makes the module, and whose it is.
BARE = {
    **dict.fromkeys(("weight", "w1", "W_q", "Wx", "up_proj", "kernel", "experts", "lora"), "muon"),
    **dict.fromkeys(("wte", "wpe", "A_log", "rel_pos_w", "embed_proj", "vocabulary"), "adamw"),
    **dict.fromkeys(("token_weight", "queries", "bias_table", "mixing", "layer_scale"), "adamw"),
}


@pytest.mark.parametrize("name", BARE)
def test_the_name_decides_of_what_is_no_layers(name):
    model = Any(inner=Any(**{name: (16, 8)}), out=nn.Linear(8, 4))
    group, why = placed(optim.muon_groups(model))[f"inner.{name}"]
    assert group["algorithm"] == BARE[name], why
    assert BARE[name] == "muon" or "by its name" in why or f"split={{'{name}': 1}}" in why
    given = placed(optim.muon_groups(model, split={name: 1}))[f"inner.{name}"][0]
    assert given["algorithm"] == "muon"


weight_norm = nn.utils.parametrizations.weight_norm


def classes_called(names):
    """Classes of modules, which are recognized by their names."""
    return [type(name, (Any,), {}) for name in names.split()]


TokenEmbedding, PairNorm, TernaryLinear, LinearTransformer = classes_called(
    "TokenEmbedding PairNorm TernaryLinear LinearTransformer"
)
ORIGINAL = "parametrizations.weight.original1"
LAYERS = {
    "a layer that is called as a table": (Any(wte=linear(8, 4)), "wte.weight", "muon"),
    "parametrized": (Any(fc=weight_norm(linear(8, 4))), f"fc.{ORIGINAL}", "muon"),
    "a list": (Any(weights=nn.ParameterList([torch.randn(8, 4)])), "weights.0", "muon"),
    "a list of tables": (Any(tables=nn.ParameterList([torch.randn(8, 4)])), "tables.0", "adamw"),
    "a norm": (Any(norm=nn.LayerNorm([8, 4])), "norm.weight", "adamw"),
    "a norm of others": (Any(inner=PairNorm(weight=(8, 4))), "inner.weight", "adamw"),
    "an embedding of others": (Any(inner=TokenEmbedding(weight=(8, 4))), "inner.weight", "adamw"),
    "a table in a module": (Any(wte=Any(weight=(8, 4))), "wte.weight", "adamw"),
    "a parametrized table": (Any(e=weight_norm(nn.Embedding(8, 4))), f"e.{ORIGINAL}", "adamw"),
    "of a model of linear layers": (LinearTransformer(wte=(8, 4)), "wte", "adamw"),
    "a linear layer of others": (Any(inner=TernaryLinear(packed=(8, 4))), "inner.packed", "muon"),
    "experts": (Any(moe=Any(gate=(2, 8, 4))), "moe.gate", "muon"),
    "no experts": (Any(inner=Any(filters=(2, 8, 4))), "inner.filters", "adamw"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_decides_of_what_is_its_own(name):
    first, param, algorithm = LAYERS[name]
    groups = placed(optim.muon_groups(Any(first=first, out=nn.Linear(8, 4))))
    group, why = groups[f"first.{param}"]
    assert group["algorithm"] == algorithm, why


def attention(name, outputs, **more):
    """A module with a fused projection, and the name of that."""
    return Any(**{name: linear(64, outputs)}, **more), name


def experts(shape, **more):
    return Any(gate_up_proj=shape, **more), "gate_up_proj"


GQA = {"num_attention_heads": 8, "num_key_value_heads": 2}
TAKING_TURNS = {"is_transposed": True, "is_concatenated": False}
# What has a fused projection, its name, and how it is split; None: whole, and the report says so.
FUSED = {
    "as many": (*attention("qkv", 192), 3),
    "heads of the module": (*attention("Wqkv", 96, num_heads=8, num_kv_heads=2), [64, 16, 16]),
    "heads of its config": (*attention("qkv_proj", 96, config=Config(**GQA)), [64, 16, 16]),
    "size of a head": (*attention("qkv_proj", 128, n_heads=4, head_dim=16), [64, 32, 32]),
    "wide heads": (*attention("qkv_proj", 192, config=Config(**GQA, head_dim=16)), [128, 32, 32]),
    "the next layer": (*attention("qkv", 128, o_proj=linear(64, 64)), [64, 32, 32]),
    "heads that do not fit": (*attention("qkv", 100, num_heads=8, num_kv_heads=2), None),
    "nothing known": (*attention("Wqkv", 128), None),
    "head by head": (*attention("query_key_value", 192, num_heads=8), None),
    "Mamba": (*attention("in_proj", 256, out_proj=linear(128, 64)), None),
    "a projection": (*attention("in_proj", 64), 1),
    "gate and up": (*attention("gate_up_proj", 256), 2),
    "odd halves": (*attention("gate_up_proj", 255), None),
    "keys and values": (*attention("to_kv", 32), 2),
    "torch's": (nn.MultiheadAttention(64, 4), "in_proj_weight", 3),
    "torch's of other widths": (nn.MultiheadAttention(64, 4, kdim=8, vdim=8), "k_proj_weight", 1),
    "LSTM": (nn.LSTM(8, 16, proj_size=4), "weight_hh_l0", 4),
    "its projection": (nn.LSTM(8, 16, proj_size=4), "weight_hr_l0", 1),
    "GRU": (nn.GRUCell(8, 16), "weight_ih", 3),
    "experts": (*experts((4, 64, 16), down_proj=(4, 16, 32)), 2),
    "experts, inputs first": (*experts((4, 16, 64), down_proj=(4, 32, 16)), 2),
    "experts that take turns": (*experts((4, 16, 64), **TAKING_TURNS), None),
    "experts alone": (*experts((4, 64, 16)), None),
}
TRANSPOSED = ("experts, inputs first", "experts that take turns")


@pytest.mark.parametrize("case", FUSED)
def test_fused_projections_are_split_where_sizes_are_known(case):
    inner, name, parts = FUSED[case]
    model = Any(inner=inner, head=nn.Linear(16, 5))
    param = next(n for n, _ in model.named_parameters() if f".{name}" in n)
    groups = optim.muon_groups(model)
    group, why = placed(groups)[param]
    assert group["algorithm"] == "muon"
    assert group.get("split", 1) == (parts or 1)
    assert ("one matrix" in why) == (parts is None)
    assert group.get("transposed", False) == (case in TRANSPOSED)
    assert placed(optim.muon_groups(model, split={name: 1}))[param][0]["split"] == 1
    optimizer = optim.Muon(groups)  # which refuses what does not fit
    assert len(params_of(optimizer)) == len(list(model.parameters()))


class Tied(Any):
    def __init__(self, **parts):
        super().__init__(**parts)
        self.head.weight = self.words.weight


TABLES = {"words": nn.Embedding(40, 8), "places": nn.Embedding(32, 8)}
BLOCKS = nn.ModuleList([Any(up=linear(8, 32), down=linear(32, 8))])
NARROW = {"words": nn.Embedding(32, 8), "blocks": BLOCKS}
# A model, and the names of its heads.
HEADS = {
    "the vocabulary": (Any(**TABLES, head=linear(8, 40), blocks=BLOCKS), ["head"]),
    "by no name": (Any(**TABLES, out=linear(8, 40), blocks=BLOCKS), ["out"]),
    "tied": (Tied(**TABLES, head=linear(8, 40), blocks=BLOCKS), []),
    "two": (Any(**TABLES, a=linear(8, 40), b=linear(8, 40), blocks=BLOCKS), ["a", "b"]),
    "as wide as blocks": (Any(**NARROW, out=linear(8, 32)), ["out"]),
    "in a row": (nn.Sequential(nn.Embedding(40, 8), linear(8, 40), linear(40, 40)), ["2"]),
    "a class": (Any(**TABLES, classifier=linear(8, 3), blocks=BLOCKS), ["classifier"]),
    "the last": (Any(blocks=BLOCKS, out=linear(8, 3)), ["out"]),
}


@pytest.mark.parametrize("case", HEADS)
def test_the_head_ends_in_the_vocabulary_or_is_the_last(case):
    model, wanted = HEADS[case]
    places = placed(optim.muon_groups(model))
    heads = {name for name, (_, why) in places.items() if why.startswith("the head")}
    assert heads == {f"{name}.weight" for name in wanted}
    assert places.keys() == {name for name, _ in model.named_parameters()}
    tables = {name for name, (_, why) in places.items() if why == "an embedding"}
    assert {name for name, (g, _) in places.items() if g["algorithm"] == "adamw"} == heads | tables


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 4, "pad_token_id": 0, "eos_token_id": 0, "bos_token_id": 0}
CONFIGS = {
    "GPT2": {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8},
    "Phi3": {**SIZES, "num_key_value_heads": 2},
    "Mamba": {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
}
# By the ends of their names, the options of parameters of Muon; None for those of AdamW.
OF_TRANSFORMERS = {
    ("GPT2", "attn.c_attn.weight"): {"transposed": True, "split": 3},
    ("GPT2", "mlp.c_proj.weight"): {"transposed": True},
    ("GPT2", "wte.weight"): None,
    ("Phi3", "qkv_proj.weight"): {"split": [32, 16, 16]},
    ("Phi3", "gate_up_proj.weight"): {"split": 2},
    ("Phi3", "lm_head.weight"): None,
    ("Mamba", "A_log"): None,
    ("Mamba", "x_proj.weight"): {},
    ("Mamba", "conv1d.weight"): None,
}


@pytest.mark.parametrize(("name", "end"), OF_TRANSFORMERS)
def test_models_of_transformers_are_grouped(name, end):
    transformers = pytest.importorskip("transformers")
    kind = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    config = getattr(transformers, f"{name}Config")(**CONFIGS[name])
    places = placed(optim.muon_groups(getattr(transformers, f"{name}{kind}")(config)))
    ((group, why),) = (places[param] for param in places if param.endswith(end))
    seen = {key: group[key] for key in ("split", "transposed") if key in group}
    assert (seen if group["algorithm"] == "muon" else None) == OF_TRANSFORMERS[name, end], why
