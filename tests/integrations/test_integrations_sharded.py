"""Lightning, Fabric and Accelerate under FSDP2 against the same on copies, in two processes."""

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")
pytest.importorskip("accelerate")

import lightning
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from lightning.fabric import strategies as of_fabric
from lightning.pytorch import strategies
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import ampfuse
from ampfuse.integrations import fabric
from ampfuse.integrations.accelerate import initialize
from ampfuse.integrations.lightning import AmpFuse
from programs import on_ranks
from trainings import quiet_trainer

CPUS = {"accelerator": "cpu", "devices": 2}
SHARDS = {"data_parallel_size": 2, "tensor_parallel_size": 1, "process_group_backend": "gloo"}
BATCHES = torch.randn(2, 8, 4, 8, generator=torch.Generator().manual_seed(1))
BATCHES = BATCHES[int(os.environ.get("RANK", 0))]


pytestmark = pytest.mark.slow


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 17), nn.LayerNorm(17), nn.ReLU(), nn.Linear(17, 8))


def shard(model, mesh):
    for layer in model:
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network, self.losses = network(), []

    def configure_model(self):
        shards = isinstance(self.trainer.strategy, strategies.ModelParallelStrategy)
        if shards and not isinstance(next(self.parameters()), DTensor):
            shard(self.network, self.device_mesh)

    def training_step(self, x, _):
        loss = nn.functional.mse_loss(self.network(x), x)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return adamw(self)


def by_lightning(level, strategy, epochs=2, resume=None, save=None):
    """The losses of the last epoch."""
    options = {"gradient_clip_val": 0.05, "use_distributed_sampler": False, "devices": 2}
    plugin = AmpFuse(level, verbosity=0)
    trainer = quiet_trainer(plugin, strategy=strategy, max_epochs=epochs, **options)
    model = Lit()
    loaded = {"ckpt_path": resume, "weights_only": True} if resume else {}
    trainer.fit(model, DataLoader(BATCHES, batch_size=None), **loaded)
    if save:
        trainer.save_checkpoint(save)
    return model.losses[-len(BATCHES) :]


@on_ranks(2)
def test_lightning_trains_shards_as_copies():
    for level in ("O0", "O1", "O2", "O5"):
        copies = by_lightning(level, strategies.DDPStrategy(process_group_backend="gloo"))
        shards = by_lightning(level, strategies.ModelParallelStrategy(**SHARDS))
        # On some CPUs torch's products round otherwise by where a tensor lies in memory.
        assert shards == pytest.approx(copies, rel=1e-5), level
    for level in ("O1", "O5"):
        whole = by_lightning(level, strategies.ModelParallelStrategy(**SHARDS))
        for kind in (True, False):  # a folder of shards, or one file
            path = Path(f"{level}-{kind}.ckpt")
            made = {**SHARDS, "save_distributed_checkpoint": kind}
            by_lightning(level, strategies.ModelParallelStrategy(**made), 1, save=path)
            resumed = by_lightning(level, strategies.ModelParallelStrategy(**made), resume=path)
            assert resumed == whole, (level, kind)


def steps(fabric_, model, optimizer, batches):
    losses = []
    for x in batches:
        loss = nn.functional.mse_loss(model(x).float(), x)
        optimizer.zero_grad()
        fabric_.backward(loss)
        fabric_.clip_gradients(model, optimizer, max_norm=0.05, error_if_nonfinite=False)
        optimizer.step()
        losses.append(loss.item())
    return losses


def sharded_by_fabric(level):
    plugin = fabric.AmpFuse(level, verbosity=0)
    strategy = of_fabric.ModelParallelStrategy(shard, **SHARDS)
    made = lightning.Fabric(plugins=plugin, strategy=strategy, **CPUS)
    made.launch()
    model = made.setup_module(network())
    model, optimizer = plugin.setup(made, model, adamw(model))
    return made, model, optimizer, {"model": model, "optimizer": optimizer, "amp": plugin}


@on_ranks(2)
def test_fabric_trains_shards_as_copies():
    for level in ("O1", "O2", "O5"):
        plugin = fabric.AmpFuse(level, verbosity=0)
        copied = of_fabric.DDPStrategy(process_group_backend="gloo")
        made = lightning.Fabric(plugins=plugin, strategy=copied, **CPUS)
        made.launch()
        model = network()
        expected = steps(made, *plugin.setup(made, model, adamw(model)), BATCHES)
        path = Path(f"fabric-{level}")
        made, model, optimizer, parts = sharded_by_fabric(level)
        losses = steps(made, model, optimizer, BATCHES[:4])
        made.save(path, parts)
        losses += steps(made, model, optimizer, BATCHES[4:])
        assert losses == expected, level
        made, model, optimizer, parts = sharded_by_fabric(level)
        made.load(path, parts)
        assert steps(made, model, optimizer, BATCHES[4:]) == expected[4:], level
    model = network()
    with pytest.raises(ValueError, match=r"Call model = fabric\.setup_module"):
        plugin.setup(made, model, adamw(model))


@on_ranks(2)
def test_accelerate_trains_shards_as_copies():
    """Which has FSDP on GPUs alone; here it is told that these are some."""
    losses = []
    for shards in (False, True):
        accelerator = Accelerator(cpu=True)
        if shards:
            for state in (AcceleratorState, PartialState):
                state._shared_state["distributed_type"] = DistributedType.FSDP
            accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="size_based_wrap", cpu_ram_efficient_loading=False
            )
        model = network()
        optimizer = ampfuse.optim.AdamW(model.parameters(), lr=1e-2)
        if shards:
            with pytest.raises(ValueError, match="With FSDP2 do not use a level"):
                initialize(accelerator, model, optimizer, "O1")
        model, optimizer = accelerator.prepare(model, optimizer)
        losses.append([])
        for x in BATCHES:
            loss = nn.functional.mse_loss(model(x), x)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert isinstance(next(model.parameters()), DTensor)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
