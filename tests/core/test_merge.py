"""Steps that several ranks decide together, each a thread here: with the norms that one would find.

optim/test_sharded.py has processes and DTensors; this is what the core makes of their findings.
"""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ampfuse import optim
from ampfuse.optim import sharding
from cases import assert_same_bits, everything, fractions, make

RANKS = 3
STEPS = 4
SHAPES = [(1 + i % 7, 5) for i in range(260)]  # more norms than a block of the GPU takes


class Ranks:
    """Gathers what threads hand over, as torch.distributed.all_gather_into_tensor."""

    def __init__(self):
        self.barrier = threading.Barrier(RANKS, timeout=60)
        self.handed = [None] * RANKS
        self.calls = 0

    def run(self, body):
        with ThreadPoolExecutor(RANKS) as threads:
            return list(threads.map(body, range(RANKS)))

    def join(self, rank, optimizer, counted_elsewhere=None):
        def gather(mine):
            self.handed[rank] = mine.clone()
            if rank == 0:
                self.calls += 1
            self.barrier.wait()
            everyone = torch.cat(self.handed)
            self.barrier.wait()
            return everyone

        optimizer.param_table().inspector.set_gather(gather, counted_elsewhere)


BAD = {1: {41: torch.inf, 203: torch.nan}, 2: {259: torch.nan}}


@functools.cache
def gradients_of(step):
    gradients = [fractions(shape, 100 * step + i) - 0.5 for i, shape in enumerate(SHAPES)]
    for i, value in BAD.get(step, {}).items():
        gradients[i][-1, 2] = value  # of one rank
    return gradients


def larc(params, **options):
    return optim.LARC(optim.SGD(params, lr=0.1, weight_decay=0.1, **options))


# One whose step asks for no norms of rows; of gradients, of updates, of parameters.
MAKE = {kind: functools.partial(make, kind) for kind in ("adamw", "novograd-decay", "lamb")}
MAKE["larc"] = larc


def train(optimizer, params, part):
    """Skipped, norm and overflow of each step; `part` is this rank's of a gradient."""
    told = []
    for step in range(STEPS):
        for i, (param, gradient) in enumerate(zip(params, gradients_of(step), strict=True)):
            param.grad = part(gradient, i)
        optimizer.step()
        last = optimizer.last_step
        told.append((float(last.skipped), float(last.grad_norm), last.overflow()))
    return told


@pytest.mark.parametrize(("clip", "copies"), [(None, False), (0.5, True)])
@pytest.mark.parametrize("kind", MAKE)
def test_ranks_decide_as_one(kind, clip, copies, device):
    """Each has its rows of every parameter; with `copies`, of every third all have the whole."""
    is_copy = [copies and i % 3 == 0 for i in range(len(SHAPES))]
    ranks = Ranks()

    def trained(rank):
        """The parameters of one rank, or of a single process where `rank` is None."""

        def part(value, i):
            mine = value if rank is None or is_copy[i] else value.tensor_split(RANKS)[rank]
            return mine.to(device, copy=True)

        params = [nn.Parameter(part(fractions(s, i), i)) for i, s in enumerate(SHAPES)]
        named = [(str(i), param) for i, param in enumerate(params)]
        optimizer = MAKE[kind](named, max_grad_norm=clip, skip_nonfinite=True)
        if rank is not None:
            elsewhere = torch.tensor(is_copy, device=device) if copies and rank else None
            ranks.join(rank, optimizer, elsewhere)
        told = train(optimizer, params, part)
        return [param.detach().cpu() for param in params], told

    whole, expected = trained(None)
    shares = ranks.run(trained)
    for _, told in shares:
        assert repr(told) == repr(shares[0][1])  # NaN is not NaN
        for (skipped, norm, overflow), (skips, wanted, where) in zip(told, expected, strict=True):
            assert (skipped, overflow) == (skips, where)
            assert norm == pytest.approx(wanted, rel=1e-6, nan_ok=True)
    for i, value in enumerate(whole):
        parts = [params[i] for params, _ in shares]
        merged = parts[0] if is_copy[i] else torch.cat(parts)
        torch.testing.assert_close(merged, value, rtol=2e-5, atol=2e-6)
        assert not is_copy[i] or all(torch.equal(part, merged) for part in parts)
    # LAMB has another for its updates; of a skipped step on a GPU too, as the host knows nothing.
    applied = STEPS - len(BAD)
    assert ranks.calls in ({STEPS} if kind != "lamb" else {STEPS + applied, 2 * STEPS})


@pytest.mark.parametrize("kind", MAKE)
def test_a_group_of_one_decides_as_nobody_else_does(kind, device, tmp_path):
    """By the collectives of the device's own backend: NCCL on a GPU."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = f"file://{tmp_path}/store"
    dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
    try:
        snapshots = []
        for grouped in (False, True):
            params = [nn.Parameter(fractions(s, i).to(device)) for i, s in enumerate(SHAPES)]
            optimizer = MAKE[kind](params, max_grad_norm=0.5, skip_nonfinite=True)
            if grouped:
                sharding.Ranks(dist.group.WORLD, None).join(optimizer.param_table())
            told = train(optimizer, params, lambda gradient, i: gradient.to(device, copy=True))
            skipped, norms, _ = zip(*told, strict=True)
            assert skipped == tuple(step in BAD for step in range(STEPS))
            snapshots.append(everything(optimizer) | {"norms": torch.tensor(norms)})
        assert_same_bits(*snapshots)
    finally:
        dist.destroy_process_group()
