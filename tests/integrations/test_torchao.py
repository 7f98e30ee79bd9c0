"""torchao's FP8 linear layers: their weights under O5, in checkpoints, compiled and in shards."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

pytest.importorskip("torchao")

from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

import ampfuse
from ampfuse import amp
from ampfuse.amp.policy import LEVELS
from cases import through_a_file
from programs import on_ranks

EMULATED = Float8LinearConfig(emulate=True)  # computes products of rounded numbers on any CPU
MODES = [{}, {"master_weights": "split", "state_dtype": "8bit"}, {"state_dtype": "bf16"}]
modes = pytest.mark.parametrize("memory", MODES, ids=["masters", "split, 8bit", "bf16"])
_draw = torch.Generator().manual_seed(1)
X = torch.randn(32, 64, generator=_draw)
Y = torch.randint(16, (32,), generator=_draw)


def network(config=EMULATED):
    torch.manual_seed(0)
    first, last = nn.Linear(64, 128, bias=False), nn.Linear(128, 16)
    model = nn.Sequential(first, nn.LayerNorm(128), nn.GELU(), last)
    return model if config is None else convert_to_float8_training(model, config=config)


def adamw(model, **memory):
    return ampfuse.optim.AdamW(model.parameters(), lr=1e-2, **memory)


class Training:
    def __init__(self, level="O5", config=EMULATED, memory=MODES[1], **options):
        model = network(config)
        parts = model, adamw(model, **memory)
        self.model, self.optimizer = amp.initialize(*parts, opt_level=level, verbosity=0, **options)

    def step(self):
        loss = nn.functional.cross_entropy(self.model(X), Y)
        with amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        amp.clip_grad_norm_(self.optimizer, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def steps(self, count):
        return [self.step() for _ in range(count)]

    def state(self):
        parts = {"model": self.model, "optimizer": self.optimizer, "amp": amp}
        return through_a_file({name: part.state_dict() for name, part in parts.items()})

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        amp.load_state_dict(state["amp"])


@pytest.mark.parametrize("level", LEVELS)
def test_layers_train_at_every_level(level):
    assert_close_to_other_layers({"level": level})


def assert_close_to_other_layers(options):
    """FP8 numbers have 3 or 2 bits behind the point, so the losses are close, and not the same."""
    training = Training(**options)
    assert isinstance(training.model[0], Float8Linear)
    losses, others = training.steps(10), Training(**options, config=None).steps(10)
    assert losses[-1] < 0.1 * losses[0]
    assert losses == pytest.approx(others, rel=0.05, abs=0.05)
    assert losses != others


def test_norms_and_activations_between_them_are_fused():
    training = Training(fuse=True)
    assert "forward" in vars(training.model[1])  # the fused one
    assert_close_to_other_layers({"fuse": True})


@modes
def test_weights_are_plain_and_have_exact_masters(memory):
    """FP8 copies exist within a forward or backward pass. What is kept is as without them."""
    training, other = Training(memory=memory), Training(memory=memory, config=None)
    for each in (training, other):
        each.steps(2)
    held, expected = (
        [{key: (value.dtype, value.shape) for key, value in state.items()} for state in states]
        for states in (each.optimizer.state.values() for each in (training, other))
    )
    assert held == expected
    weight = training.model[0].weight
    assert weight.dtype == torch.bfloat16
    master = training.state()["model"]["0.weight"]
    assert master.dtype == torch.float32
    assert torch.equal(master.bfloat16(), weight)


@modes
def test_a_resumed_training_goes_on_with_the_same_bits(memory):
    without_a_stop = Training(memory=memory).steps(6)
    first = Training(memory=memory)
    losses = first.steps(3)
    second = Training(memory=memory)
    second.load(first.state())
    assert losses + second.steps(3) == without_a_stop


def test_a_checkpoint_serves_models_with_and_without_the_layers():
    trained = Training()
    trained.steps(3)
    state = trained.state()
    plain = Training(config=None)
    plain.load(state)
    assert plain.step() == pytest.approx(trained.step(), rel=0.05)
    back = Training()
    back.load(plain.state())
    assert back.step() == pytest.approx(trained.step(), rel=0.05)
    network(None).load_state_dict(state["model"])


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="torch's compiled conversions to FP8 are wrong without AVX-512 (2.15)",
)
def test_a_compiled_model_trains_alike():
    training = Training()
    training.model.compile(fullgraph=True)
    assert training.steps(4) == pytest.approx(Training().steps(4), rel=0.02)


def test_a_plan_counts_them_as_plain_layers():
    held = ampfuse.plan(network(), torch.empty(32, 64), "AdamW").held
    others = ampfuse.plan(network(None), torch.empty(32, 64), "AdamW").held
    kinds = "weights", "gradients", "masters", "states"
    for mode in held.keys() & others.keys():
        assert [held[mode][kind] for kind in kinds] == [others[mode][kind] for kind in kinds]


@pytest.mark.parametrize("kind", [ampfuse.optim.AdamW, torch.optim.AdamW])
def test_weights_that_are_gathered_in_fp8_are_refused_by_name(kind):
    model = network(Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    message = r"'0.weight' is a WeightWith\w+, .* enable_fsdp_float8_all_gather=False"
    with pytest.raises(TypeError, match=message):
        amp.initialize(model, kind(model.parameters()), opt_level="O5")


@pytest.mark.slow
@on_ranks(2)
def test_shards_train_as_the_whole_model_does():
    """FSDP2 gathers BF16 weights; a checkpoint of the whole state dict goes on with its bits."""
    mine = slice(dist.get_rank(), None, 2)

    def steps(model, optimizer, count):
        losses = []
        for _ in range(count):
            loss = nn.functional.cross_entropy(model(X[mine].bfloat16()).float(), Y[mine])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def make(config=EMULATED):
        model = fully_shard(network(config).bfloat16())
        return model, adamw(model, **MODES[1])

    losses = steps(*make(), 6)
    assert losses == pytest.approx(steps(*make(None), 6), rel=0.05, abs=0.05)
    first = make()
    assert steps(*first, 3) == losses[:3]
    model_state, state = get_state_dict(*first)
    second = make()
    steps(*second, 1)
    set_state_dict(*second, model_state_dict=model_state, optim_state_dict=state)
    assert steps(*second, 3) == losses[3:]
    model, optimizer = make(Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    with pytest.raises(TypeError, match="enable_fsdp_float8_all_gather=False"):
        steps(model, optimizer, 1)
