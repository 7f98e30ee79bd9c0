"""Trainings under DDP against the same in one process.

An overflow on one rank skips the step on all. Gradients are exact, so that bits have to agree.
"""

import contextlib
import itertools
import os

import torch
import torch.distributed as dist
from torch import nn

from ampfuse import amp
from bits import Net
from cases import KINDS, LEVELS, NEVER_QUANTIZED, make
from programs import on_ranks

on_any_number, on_several = on_ranks(1, 2, 4, "cuda"), on_ranks(2, 4)
SIZE = int(os.environ.get("WORLD_SIZE", 1))
QUICK = SIZE <= 2


class Loss(nn.Module):
    """A network whose gradients are exact, so that DDP may divide FP16 ones before it adds them."""

    def __init__(self):
        super().__init__()
        self.network = Net()

    def forward(self, seed, infinite):
        return self.network.loss(seed, infinite=infinite)


def share_of(loss):
    """A loss whose mean over several ranks is `loss`, by factors that keep gradients exact."""
    if SIZE % 2:
        return loss
    return loss * (0.5 + dist.get_rank() % 2)


def gathered(tensor):
    everyone = [torch.empty_like(tensor) for _ in range(SIZE)]
    dist.all_gather(everyone, tensor)
    return everyone


def in_passes(model, optimizer, step, level, delay, together):
    """Three, of which any may overflow; shared after the last alone or, `together`, each."""
    optimizer.zero_grad()
    bad = step % 4
    shared = isinstance(model, nn.parallel.DistributedDataParallel)
    for part in range(3):
        waits = shared and part < 2 and not together
        with model.no_sync() if waits else contextlib.nullcontext():
            infinite = bad == part + 1 and (not shared or dist.get_rank() == SIZE - 1)
            loss = model(3 * step + part, infinite and level in ("O1", "O2"))
            if shared:
                loss = share_of(loss)
            with amp.scale_loss(loss, optimizer, delay_unscale=delay and part < 2) as scaled:
                scaled.backward()
    if step % 2:
        amp.clip_grad_norm_(optimizer, 0.01)
    optimizer.step()


def in_ddp(kind, level, delay=False, views=True, unused=False, together=False):
    """Against one process; an overflow on one rank skips the step on all."""
    case = f"{kind}, {level}, {delay=}, {views=}, {unused=}, {together=}"
    local, distributed = Loss(), Loss()
    optimizers = [make(kind, model.parameters()) for model in (local, distributed)]
    for model, optimizer in zip((local, distributed), optimizers, strict=True):
        options = {"init_scale": 2.0**10, "growth_interval": 5, "verbosity": 0}
        amp.initialize(model.network, optimizer, opt_level=level, **options)
    spread = nn.parallel.DistributedDataParallel(
        distributed, find_unused_parameters=unused, gradient_as_bucket_view=views
    )
    scalers = [optimizer._amp_session.loss_scalers[0] for optimizer in optimizers]
    for step in range(5 if QUICK else 8):
        for model, optimizer in zip((local, spread), optimizers, strict=True):
            in_passes(model, optimizer, step, level, delay, together)
            skips = level in ("O1", "O2") and step % 4 > 0
            assert optimizer.last_step.skipped == skips, (case, step)
        assert scalers[0].state_dict() == scalers[1].state_dict(), (case, step)
        if step % 2:  # measured to clip
            norms = [optimizer.last_step.grad_norm for optimizer in optimizers]
            torch.testing.assert_close(*norms, rtol=0, atol=0, equal_nan=True)
    for expected, found in zip(local.parameters(), distributed.parameters(), strict=True):
        assert all(torch.equal(found, same) for same in gathered(found.detach())), case
        assert torch.equal(found, expected), case


@on_any_number
def test_ddp_trains_as_one_process_does():
    """Gradients in buckets, averaged in each pass."""
    for level, delay in itertools.product(LEVELS, (False, True)):
        in_ddp("adamw", level, delay, together=True)
    for kind in ("sgd-all", *NEVER_QUANTIZED) if QUICK else KINDS:  # two follow norms of rows
        in_ddp(kind, "O2", together=True)


@on_several
def test_passes_under_no_sync_add_up():
    """Accumulation that DDP averages at its end."""
    cases = [*itertools.product(("O1", "O2", "O5"), (False, True), (False, True))]
    if QUICK:  # each two meet
        cases = [case for case in cases if (int(case[0][1]) + case[1] + case[2]) % 2]
    for case in cases:
        in_ddp("sgd-all", *case)
    in_ddp("sgd-all", "O2", views=False, unused=True)


class Branches(nn.Module):
    """A layer for all micro-batches, and one for the first."""

    def __init__(self):
        super().__init__()
        self.always, self.first = (nn.Linear(4, 4, bias=False) for _ in range(2))
        for layer in (self.always, self.first):
            nn.init.zeros_(layer.weight)

    def forward(self, x, both):
        return (self.always(x) + (self.first(x) if both else 0)).float().sum()


def set_views(params):
    """Half of each gradient, in a flat buffer as DDP's buckets are."""
    held = [param for param in params if param.grad is not None]
    flat = torch.cat([param.grad.flatten() for param in held]).to(held[0].dtype) / 2
    for param, part in zip(held, flat.split([param.numel() for param in held]), strict=True):
        param.grad = part.view_as(param)


def halve(params):
    for param in params:
        param.grad.mul_(0.5)


@on_any_number
def test_gradients_may_be_read_and_set_between_passes():
    """Read, edited and set in DDP, which makes its buckets anew after the first pass."""
    touches = (lambda params: [param.grad for param in params], halve, set_views)
    modes = ("views", "static", "unused")
    every = itertools.product(*map(range, (len(LEVELS), len(touches), len(modes))), (0, 2))
    for i, j, k, at in every:
        if QUICK and (i + j + k) % 3:  # each two still meet
            continue
        level, touch, mode = LEVELS[i], touches[j], modes[k]
        ddp = {
            "gradient_as_bucket_view": mode != "unused" or bool(j % 2),
            "static_graph": mode == "static",
            "find_unused_parameters": mode == "unused",
        }
        models = [Branches(), Branches()]
        optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
        amp.initialize(models, optimizers, opt_level=level, loss_scale=64.0, verbosity=0)
        spread = nn.parallel.DistributedDataParallel(models[1], **ddp)
        for _ in range(2):
            for model, optimizer in zip((models[0], spread), optimizers, strict=True):
                optimizer.zero_grad()
                for part in range(3):
                    waits = model is spread and part < 2 and mode != "static"
                    with model.no_sync() if waits else contextlib.nullcontext():
                        x = torch.full((1, 4), (part + 1) / 4)
                        loss = model(x, mode != "unused" or part == 0)
                        loss = share_of(loss) if model is spread else loss
                        with amp.scale_loss(loss, optimizer) as scaled:
                            scaled.backward()
                    if part == at:
                        touch(list(optimizer.param_groups[0]["params"]))
                optimizer.step()
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(one, other), (level, touch, at, mode)


@on_several
def test_a_rank_without_data_goes_along():
    """A rank without data goes along in DDP's collectives; an overflow skips the others' step."""
    for level in ("O1", "O2", "O5"):
        local = Loss()
        optimizer = make("adamw", local.parameters())
        amp.initialize(local.network, optimizer, opt_level=level, init_scale=2.0**8, verbosity=0)
        model = nn.parallel.DistributedDataParallel(local, static_graph=level == "O2")
        with model.join():
            for step in range(4 + 2 * dist.get_rank()):
                infinite = level != "O5" and step == 2
                optimizer.zero_grad()
                with amp.scale_loss(model(step, infinite), optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
                assert optimizer.last_step.skipped == infinite
        for param in local.parameters():
            assert all(torch.equal(param, same) for same in gathered(param.detach())), level
