"""ImageNet: ResNet-18 and 50 in FP32, torch.amp and O0 to O5, in one process or under torchrun.

    python -m ampfuse.experiments.imagenet -a resnet50 -b 128 --arm fp32 O2 --data DIR
    python -m ampfuse.experiments.imagenet -a resnet18 -b 128 --static-loss-scale 256 --fp16 DIR
    torchrun --nproc-per-node 4 -m ampfuse.experiments.imagenet --arm O2 [--fsdp] --data DIR

E4 of docs/experiments.md: its recipe, and :func:`build` for the networks.
"""

from __future__ import annotations

import functools
import itertools
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm

from ampfuse.command_line import UsageError
from ampfuse.experiments.arms import Arm, build_arm
from ampfuse.experiments.run import Run
from ampfuse.experiments.settings import HALF_LEVELS, Recipe, Script
from ampfuse.experiments.sweep import main as sweep

E4 = Recipe(
    name="e4",
    title="ResNet-18 and ResNet-50: images per second (2018)",
    models=("resnet18", "resnet50"),
    settings={
        **{"batch_size": 128, "iterations": 360, "image_size": 224},
        **{"optimizer": "sgd", "momentum": 0.9, "lr": 0.1, "weight_decay": 1e-4},
        **{"schedule": "constant", "augment": True, "evaluate": False},
        **{"loader": "workers", "workers": 4},
    },
    by_epochs={"schedule": "steps", "evaluate": True},
    cpu={"batch_size": 16, "iterations": 12},
)
SCRIPT = Script(
    name="imagenet",
    title="ResNets on ImageNet.",
    recipes=(E4,),
    data=None,
    distributed=True,
)


def check(run: Run) -> None:
    """Raise UsageError for what does not go together in several processes."""
    of, size = run.settings, run.world.size
    if of.sync_bn and run.device.type != "cuda":
        raise UsageError("--sync_bn: torch synchronizes batch norm between GPUs only")
    if of.graph and size > 1:
        raise UsageError("--graph: capture under torchrun is not supported; leave it out")
    if of.fsdp and size == 1:
        raise UsageError("--fsdp: one process has nobody to share with; start several by torchrun")
    if of.fsdp and of.fuse and of.arm in HALF_LEVELS:
        raise UsageError(
            f"--fsdp --fuse: at {of.arm} batch norms are gathered apart from the half "
            "weights, which cannot be fused; leave --fuse out"
        )


def build(run: Run) -> Arm:
    """The network with an optimizer, in the precision of the run's arm: alone, as a copy in each
    process (DistributedDataParallel), or as a share of it (FSDP2)."""
    check(run)
    of, model = run.settings, run.network()
    if of.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if of.fsdp:
        shard(model, apart=of.arm in HALF_LEVELS)
    arm = build_arm(of, model, F.cross_entropy, run.device)
    if run.world.size > 1 and not of.fsdp:
        ids = [run.device.index] if run.device.type == "cuda" else None
        arm.model = nn.parallel.DistributedDataParallel(arm.model, device_ids=ids)
    return arm


# ---- shards --------------------------------------------------------------------------------------


def shard(model: nn.Module, *, apart: bool) -> None:
    """Leave each process a share of `model`, gathered block by block. `apart` are its batch norms,
    which stay FP32 among half weights: what is gathered together is of one type."""
    # Scores that are a view of something: nobody writes to them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    model.to(memory_format=torch.contiguous_format)  # FSDP takes no others; images keep theirs
    stages = (model.layer1, model.layer2, model.layer3, model.layer4)
    for block in (*itertools.chain(*stages), model):
        if apart and (norms := [module for module in block.modules() if _is_free_norm(module)]):
            fully_shard(norms)
        fully_shard(block)
    model.register_forward_pre_hook(_take_buffers_of_main)


def _is_free_norm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and not isinstance(module, FSDPModule)


def _take_buffers_of_main(model: nn.Module, inputs: Any) -> None:
    """Batch norm's statistics, as DistributedDataParallel does it."""
    if model.training and (buffers := list(model.buffers())):
        dist._broadcast_coalesced(dist.group.WORLD, buffers, 250 * 2**20, 0)


main = functools.partial(sweep, SCRIPT, build)

if __name__ == "__main__":
    sys.exit(main())
