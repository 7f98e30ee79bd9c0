"""Trainings on shards, under FSDP2 and ZeRO, against the same on whole parameters.

Gradients are the same for both, so that bits have to agree. (On a GPU there is one rank, as two
would need two GPUs; test_merge.py has joint decisions.)
"""

import dataclasses
import functools
import itertools
import os
import unittest.mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ampfuse
from ampfuse import amp, optim
from cases import (
    KINDS,
    MODES,
    QUANTIZED,
    bf16,
    f16,
    f32,
    fractions,
    history_of_norms,
    integers,
    make,
    params_of,
    with_whole_masters,
)
from programs import in_processes, on_ranks

on_any_number, on_several = on_ranks(1, 2, 4, "cuda"), on_ranks(2, 4)
SIZE = int(os.environ.get("WORLD_SIZE", 1))
DEVICE = os.environ.get("DEVICE", "cpu")
STEPS = 30
QUICK = SIZE <= 2
FEWER = 6 if QUICK else STEPS  # a row without gradient in the fourth, an overflow in the fifth
GRID = (min(SIZE, 2), max(SIZE // 2, 1))
SHAPES = ((160, 32), (5, 31), (1,), (3, 7), (64, 80))  # uneven, and empty on most ranks
PLACES = {  # how a mesh has the parameters; each in one dimension or two
    "rows": ((SIZE,), [Shard(0)]),
    "copies": ((SIZE,), [Replicate()]),
    "copies of rows": (GRID, [Replicate(), Shard(0)]),
    "rows and columns": (GRID, [Shard(0), Shard(1)]),
}


def mesh_of(places):
    shape, _ = PLACES[places]
    return init_device_mesh(DEVICE, shape, mesh_dim_names=("a", "b")[: len(shape)])


def params_in(dtypes, places):
    """The same parameters whole and in shards."""
    mesh = mesh_of(places)
    wholes, shards = [], []
    for i, shape in enumerate(SHAPES):
        value = fractions(shape, i).to(dtypes[i % len(dtypes)])
        wholes.append(nn.Parameter(value.clone()))
        dims = list(PLACES[places][1])
        if len(shape) == 1:  # has no columns
            dims = [Replicate() if place == Shard(1) else place for place in dims]
        shards.append(nn.Parameter(distribute_tensor(value, mesh, dims, src_data_rank=None)))
    return wholes, shards


def set_gradients(params, step, scale=1.0, infinite=False):
    """Exact in every type. An infinite one is in one place: in one rank's shard, or its copies."""
    for i, param in enumerate(params):
        gradient = integers(tuple(param.shape), step + i, 7) / 64 * scale
        if infinite and i == 0:
            gradient[-1, 3] = float("inf")
        gradient = gradient.to(param.dtype)
        if isinstance(param, DTensor):
            gradient = distribute_tensor(
                gradient, param.device_mesh, param.placements, src_data_rank=None
            )
        param.grad = None if i == 1 and step % 7 == 3 else gradient


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_whole_and_shards_agree(whole, shards, exact=True, case=""):
    """Parameters, masters and states of two optimizers."""
    for param, shard in zip(params_of(whole), params_of(shards), strict=True):
        weight = getattr(param, "model_param", param)
        compare(f"{case} the parameter", weight.detach(), shard.detach(), exact)
    saved, others = with_whole_masters(whole)["state"], shards.state_dict()["state"]
    assert saved.keys() == others.keys(), case
    for i, state in saved.items():
        for key in state:  # in one order on all ranks, as each comparison is a collective
            if key in others[i]:  # quantized states are saved decoded
                compare(f"{case} {key} of {i}", state[key], others[i][key], exact)


def compare(what, expected, found, exact=True):
    found, expected = full(torch.as_tensor(found)), torch.as_tensor(expected)
    bound = 0.0 if exact else 1e-2 if found.dtype != f32 else 1e-5
    bounds = {"rtol": bound, "atol": bound / 10}
    torch.testing.assert_close(found, expected, msg=lambda text: f"{what}: {text}", **bounds)


def step_alike(params_of_each, optimizers, step, skips=False):
    """A step of each, on the same gradients."""
    for params, optimizer in zip(params_of_each, optimizers, strict=True):
        set_gradients(params, step, infinite=skips)
        optimizer.step()
        assert optimizer.last_step.skipped == skips


def train_both(kind, places, dtypes=(f32,), clip=False, exact=True, steps=STEPS, **options):
    """Under our GradScaler with planted overflows."""
    case = f"{kind}, {places}, {options}"
    wholes, shards = params_in(dtypes, places)
    optimizers = [make(kind, params, **options) for params in (wholes, shards)]
    scalers = [ampfuse.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=5) for _ in range(2)]
    for step in range(steps):
        for params, optimizer, scaler in zip((wholes, shards), optimizers, scalers, strict=True):
            scaler.scale(torch.ones(()))
            set_gradients(params, step, scaler.get_scale(), infinite=step % 11 == 4)
            if clip and step % 2:
                scaler.clip_grad_norm_(optimizer, 0.5)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale(), (case, step)
        one, other = (optimizer.last_step for optimizer in optimizers)
        assert one.skipped == other.skipped == (step % 11 == 4), (case, step)
        torch.testing.assert_close(one.grad_norm, other.grad_norm, equal_nan=True)
    assert_whole_and_shards_agree(*optimizers, exact, case)


FOLLOW_NORMS = [kind for kind in KINDS if kind.startswith(("lamb", "novograd"))]


@on_any_number
def test_shards_train_as_the_whole_with_every_optimizer():
    for kind in KINDS:
        train_both(kind, "rows", exact=kind not in FOLLOW_NORMS, steps=FEWER)
        train_both(kind, "rows", clip=True, exact=False, steps=min(FEWER, 24))


@on_any_number
def test_groups_and_frozen_parameters_step_as_whole_ones():
    """Several groups, of which one has no trained parameter, and a row without any gradient."""
    both = params_in((f32, bf16), "rows")
    optimizers = []
    for params in both:
        params[2].requires_grad_(False)
        first, last = {"params": params[:2], "lr": 1e-2}, {"params": params[3:], "lr": 1e-3}
        groups = [first, {"params": params[2:3]}, {**last, "weight_decay": 0.3}]
        optimizers.append(make("adamw", groups, master_weights=True, skip_nonfinite=True))
    trained = [[*params[:2], params[3]] for params in both]
    for step in range(20):
        step_alike(trained, optimizers, step, skips=step == 4)
    assert_whole_and_shards_agree(*optimizers)


@on_any_number
def test_spikes_are_found_on_any_number_of_ranks():
    """Sums of squares of integers are exact, and so the same on any number of ranks."""
    both = params_in((f32, bf16), "rows")
    optimizers = [make("adamw", each, master_weights=True, skip_spikes=6.0) for each in both]
    for optimizer in optimizers:
        optimizer.load_history(history_of_norms(1.93))
    for step in range(12):
        for params, optimizer in zip(both, optimizers, strict=True):
            set_gradients(params, step, 1024.0 if step in (2, 3, 7) else 1.0, infinite=step == 5)
            optimizer.step()
            assert int(optimizer.last_step.skipped) == {2: 2, 3: 2, 5: 1, 7: 2}.get(step, 0)
    one, other = (each.state_dict()["step_history"] for each in optimizers)
    assert torch.equal(one[-3:], other[-3:])
    assert torch.equal(one[:5], other[:5])
    assert_whole_and_shards_agree(*optimizers)


@on_any_number
def test_gradients_of_other_kinds_are_redistributed_or_refused():
    """A gradient with other placements, and one that is not a DTensor."""
    mesh = mesh_of("rows")
    whole = nn.Parameter(fractions((12, 4), 0))
    shard = nn.Parameter(distribute_tensor(whole.detach().clone(), mesh, [Shard(0)]))
    optimizers = [
        make("adamw", [(name, param)]) for name, param in zip("ws", (whole, shard), strict=True)
    ]
    for step in range(3):
        whole.grad = integers((12, 4), step, 7)
        shard.grad = distribute_tensor(whole.grad.clone(), mesh, [Replicate()])
        for optimizer in optimizers:
            optimizer.step()
    assert_whole_and_shards_agree(*optimizers)
    shard.grad = torch.ones(12, 4)
    with pytest.raises(TypeError, match="gradient of s is not a DTensor"):
        optimizers[1].step()
    shard.grad = DTensor._make_wrapper_subclass(DTensor, (12, 4))
    with pytest.raises(TypeError, match="gradient of s is not a DTensor"):
        optimizers[1].step()
    compare("the parameter", whole.detach(), shard.detach())


@on_any_number
def test_a_gradient_that_was_read_in_vain_is_dropped_with_the_others():
    """The second parameter's gradient is refused after the first one's was read."""
    mesh = mesh_of("rows")
    ones = functools.partial(distribute_tensor, torch.ones(12, 4), mesh, [Shard(0)])
    params = [nn.Parameter(ones()), nn.Parameter(ones())]
    gradients = optim.AdamW(params).param_table().gradients
    params[0].grad, params[1].grad = ones(), torch.ones(12, 4)
    with pytest.raises(TypeError, match="is not a DTensor"):
        gradients.check()
    params[0].grad = params[1].grad = None
    gradients.begin_backward()
    assert gradients.accumulated(0) is None


@on_any_number
def test_shards_train_as_the_whole_in_every_place():
    for places in PLACES:
        train_both("adamw", places, dtypes=(f32, bf16, f16), master_weights=True, steps=FEWER)
        train_both("adamw", places, clip=True, exact=False, steps=FEWER)
        train_both("novograd-decay", places, exact=False, steps=FEWER)


@on_any_number
def test_shards_train_as_the_whole_in_every_mode():
    """The shards of quantized states are whole blocks here."""
    kinds = ("adamw", "sgd-all", "lion-decay")
    for i, options in enumerate(MODES.values()):
        for kind in (kinds[i % 3],) if QUICK else kinds:
            train_both(kind, "rows", dtypes=(bf16, f16), steps=FEWER, **options)


@on_any_number
def test_muon_trains_shards_as_the_whole():
    """Matrices by Muon, of which each rank has some whole, and the rest by AdamW."""
    modes = ({}, {"master_weights": True}, {"master_weights": "split", "state_dtype": "bf16"})
    for places, options in itertools.product(PLACES, modes):
        if "state_dtype" in options and places == "rows and columns":
            continue  # random bits follow the elements of shards that are rows
        both = params_in((bf16, f16) if options else (f32,), places)
        optimizers = []
        for params in both:
            by_muon = {"params": [params[0], params[4]]}, {"params": [params[3]], "ns_steps": 3}
            by_adamw = {"params": [params[1], params[2]], "algorithm": "adamw"}
            optimizer = optim.Muon([*by_muon, by_adamw], lr=0.05, skip_nonfinite=True, **options)
            optimizers.append(optimizer)
        for step in range(FEWER // 5):
            step_alike(both, optimizers, step, skips=step == 1)
        assert_whole_and_shards_agree(*optimizers)


@on_any_number
def test_muon_beside_tensor_parallel_layers():
    """FSDP2 over tensor parallelism shards a dimension twice, the later first."""
    mesh = init_device_mesh(DEVICE, GRID, mesh_dim_names=("data", "tensor"))

    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 24))

    whole, sharded = network(), network()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(sharded, mesh["tensor"], plan)
    fully_shard(sharded, mesh=mesh["data"])
    both, optimizers = [list(model.parameters()) for model in (whole, sharded)], []
    for params in both:
        matrices, vectors = ([p for p in params if p.ndim == ndim] for ndim in (2, 1))
        groups = [{"params": matrices}, {"params": vectors, "algorithm": "adamw"}]
        optimizers.append(optim.Muon(groups, lr=0.05))
    for step in range(4):
        step_alike(both, optimizers, step)
    assert_whole_and_shards_agree(*optimizers)


def networks(dtype=f32):
    """A model whole and under FSDP2, with the same weights. One layer has too few rows for all."""

    def network():
        torch.manual_seed(0)
        layers = [nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)]
        return nn.Sequential(*layers).to(dtype)

    whole, sharded = network(), network()
    # Gradients are added in FP32: FP16 ones would be divided before, and lose digits.
    options = {"mesh": mesh_of("rows"), "mp_policy": MixedPrecisionPolicy(reduce_dtype=f32)}
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return whole, fully_shard(sharded, **options)


def networks_at(level, maker, **options):
    """The models of `networks` at a level, and an optimizer of each."""
    models = networks()
    optimizers = [maker(model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        options = {"init_scale": 2.0**8, "verbosity": 0, **options}
        amp.initialize(model, optimizer, opt_level=level, **options)
    return models, optimizers


def losses(models, step, dtype=f32):
    """All ranks have the same batch, so that the mean of their gradients is that of one."""
    inputs = fractions((16, 24), step).to(dtype)
    return [model(inputs).float().square().mean() for model in models]


def step_by_scaler(loss, optimizer, scaler, infinite):
    optimizer.zero_grad()
    scaler.scale(loss * torch.inf if infinite else loss).backward()
    scaler.step(optimizer)
    scaler.update()


def train_on(model, optimizer, scaler, dtype, steps):
    """By a GradScaler, with an overflow now and then."""
    for step in steps:
        infinite = scaler.is_enabled() and step % 6 == 4
        step_by_scaler(*losses([model], step, dtype), optimizer, scaler, infinite)


def train_networks(models, optimizers, dtype):
    for model, optimizer in zip(models, optimizers, strict=True):
        scaler = ampfuse.GradScaler(DEVICE, init_scale=2.0**8)
        train_on(model, optimizer, scaler, dtype, range(10))


def step_by_amp(loss, optimizer, infinite, max_norm=None):
    optimizer.zero_grad()
    with amp.scale_loss(loss * torch.inf if infinite else loss, optimizer) as scaled:
        scaled.backward()
    if max_norm is not None:
        amp.clip_grad_norm_(optimizer, max_norm)
    optimizer.step()
    assert optimizer.last_step.skipped == infinite


@on_any_number
def test_fsdp_trains_as_the_whole():
    for dtype, options in [
        (f32, {}),
        (bf16, {"master_weights": True}),
        (f16, {"master_weights": "split"}),
        (bf16, {"rounding": "stochastic", "state_dtype": "bf16"}),
    ]:
        models = networks(dtype)
        optimizers = [make("adamw", model.parameters(), **options) for model in models]
        train_networks(models, optimizers, dtype)
        assert optimizers[1].last_step.overflow()["skipped_steps"] == 1
        if "rounding" not in options:
            assert_whole_and_shards_agree(*optimizers)


@on_any_number
def test_fsdp_trains_as_the_whole_at_each_level():
    for level, clip in itertools.product(("O0", "O1", "O2", "O4", "O5"), (False, True)):
        models, optimizers = networks_at(level, functools.partial(make, "adamw"))
        for step in range(min(FEWER, 20) if clip else FEWER):
            skips = level in ("O1", "O2") and step % 12 == 4
            for one in zip(losses(models, step), optimizers, strict=True):
                step_by_amp(*one, skips, 0.01 if clip and step % 3 == 1 else None)
        assert_whole_and_shards_agree(*optimizers, exact=not clip)


@on_any_number
def test_a_step_of_its_own():
    """An optimizer that amp does not fuse steps FP32 shards, but not half ones."""
    for level in ("O1", "O4", "O5"):
        models, optimizers = networks_at(level, functools.partial(torch.optim.RMSprop, lr=1e-3))
        if level == "O5":
            with pytest.raises(TypeError, match="RMSprop is not fused"):
                step_by_amp(losses(models, 0)[1], optimizers[1], False)
            return
        for i in range(8):
            for one in zip(losses(models, i), optimizers, strict=True):
                step_by_amp(*one, level == "O1" and i == 5)
        assert_whole_and_shards_agree(*optimizers)


@on_any_number
def test_accumulation_in_fsdp():
    """FSDP keeps gradients that it does not share, in the loss's scale: which stays meanwhile."""
    for level in ("O1", "O2"):
        models, optimizers = networks_at(
            level, functools.partial(make, "sgd-all"), growth_interval=3
        )
        for step in range(6):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                for part in range(3):
                    if model is models[1]:
                        model.set_requires_gradient_sync(part == 2)
                    with amp.scale_loss(losses([model], 3 * step + part)[0], optimizer) as scaled:
                        scaled.backward()
                optimizer.step()
        grown = [optimizer._amp_session.loss_scalers[0].loss_scale() for optimizer in optimizers]
        assert grown == [2.0 ** (8 + 6), 2.0 ** (8 + 2)], level
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(one, full(other.detach()), rtol=2e-3, atol=1e-4)


@on_several
def test_an_inspection_takes_one_collective():
    """An inspection takes one collective; LAMB has another for the norms of its updates."""
    gather = dist.all_gather_into_tensor
    with unittest.mock.patch.object(dist, "all_gather_into_tensor", wraps=gather) as calls:
        for kind, options, count in [
            ("adamw", {"skip_nonfinite": False}, 0),
            ("adamw", {}, 1),
            ("adamw", {"max_grad_norm": 1.0}, 1),
            ("adamw", {"skip_nonfinite": True, "max_grad_norm": 1.0}, 1),
            ("novograd", {"max_grad_norm": 1.0}, 1),
            ("lamb", {"skip_nonfinite": False}, 1),
            ("lamb", {"max_grad_norm": 1.0}, 2),
        ]:
            params = params_in((f32,), "rows")[1]
            optimizer = make(kind, params, **options)
            for step in range(3):
                set_gradients(params, step)
                calls.reset_mock()
                optimizer.step()
                assert calls.call_count == count, (kind, options, step)


@on_any_number
def test_zero_redundancy_trains_as_the_whole():
    """States of each parameter on one rank; the others get its weights."""
    half = [(bf16, {"master_weights": "split"})]
    # (On CUDA torch's GradScaler, which scales what is not ours, takes no BF16.)
    for dtype, options in [(f32, {}), *(half if DEVICE == "cpu" else [])]:
        models = [networks(dtype)[0] for _ in range(2)]
        plain = optim.AdamW(models[0].parameters(), lr=1e-2, **options)
        redundant = ZeroRedundancyOptimizer(models[1].parameters(), optim.AdamW, lr=1e-2, **options)
        train_networks(models, (plain, redundant), dtype)
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            compare("the parameter", one.detach(), other.detach())


@dataclasses.dataclass(frozen=True)
class Resumed:
    """A training that is saved on some ranks and resumed on others."""

    dtype: torch.dtype = bf16
    options: dict = dataclasses.field(default_factory=dict)  # of the optimizer
    kind: str = "adamw"  # one of KINDS, or "muon"
    level: str | None = None  # of amp; None: under a GradScaler
    saved_whole: bool = False  # the saved one is not in shards
    steps_before: int = 6  # those before it is saved, of 12


RESUMED = {
    "fp32": Resumed(f32),
    **{
        name: Resumed(options={"master_weights": "split", "state_dtype": name})
        for name in QUANTIZED
    },
    "muon": Resumed(options={"master_weights": "split"}, kind="muon"),
    "stochastic": Resumed(
        options={"rounding": "stochastic", "state_dtype": "bf16", "ema_decay": 0.9}
    ),
    "adagrad": Resumed(options={"master_weights": True}, kind="adagrad-all"),
    "fresh": Resumed(f32, kind="sgd-dampening", steps_before=0),
    "saved whole": Resumed(
        options={"master_weights": "split", "state_dtype": QUANTIZED[0]}, saved_whole=True
    ),
    "O5": Resumed(f32, level="O5"),
    "O5 split": Resumed(f32, {"master_weights": "split"}, level="O5"),
}


def resumable(resumed, whole=False):
    """Model, optimizer and GradScaler; `whole`: not in shards."""
    scaler = ampfuse.GradScaler(
        DEVICE, init_scale=2.0**8, growth_interval=5, enabled=resumed.level is None
    )
    if resumed.level is not None:
        make_it = functools.partial(make, resumed.kind)
        (_, model), (_, optimizer) = networks_at(resumed.level, make_it, **resumed.options)
        return model, optimizer, scaler
    unsharded, sharded = networks(resumed.dtype)
    model = unsharded if whole else sharded
    if resumed.kind == "muon":
        optimizer = optim.Muon(optim.muon_groups(model), lr=1e-2, **resumed.options)
    else:
        optimizer = make(resumed.kind, model.parameters(), **resumed.options)
    return model, optimizer, scaler


def save_and_go_on():
    """With torch.distributed.checkpoint; the end of the training is saved too."""
    for name, resumed in RESUMED.items():
        model, optimizer, scaler = resumable(resumed, whole=resumed.saved_whole)
        begun = resumed.steps_before
        train_on(model, optimizer, scaler, resumed.dtype, range(begun))
        weights, states = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": states, "scaler": scaler.state_dict()}
        if name == "O5":
            checkpoint.async_save(saved, checkpoint_id=name).result()
        else:
            checkpoint.save(saved, checkpoint_id=name)
        train_on(model, optimizer, scaler, resumed.dtype, range(begun, 12))
        ended = [full(param.detach()) for param in model.parameters()]
        if dist.get_rank() == 0:
            torch.save([ended, scaler.state_dict()], f"{name}.pt")
    dist.barrier()


def resume():
    """On as many ranks as there are; equal bits, where no quantized block ends with a shard."""
    for i, (name, resumed) in enumerate(RESUMED.items()):
        model, optimizer, scaler = resumable(resumed)
        if i % 2:  # last_step was read before
            assert optimizer.last_step.skipped == 0
        weights, states = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": states, "scaler": scaler.state_dict()}
        checkpoint.load(saved, checkpoint_id=name)
        set_state_dict(
            model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )
        scaler.load_state_dict(saved["scaler"])
        train_on(model, optimizer, scaler, resumed.dtype, range(resumed.steps_before, 12))
        expected, scale = torch.load(f"{name}.pt")
        assert scaler.state_dict() == scale, name
        for one, param in zip(expected, model.parameters(), strict=True):
            compare(name, one, param.detach())


def run(size, folder, *jobs):
    outcomes = in_processes(size, folder, __file__, [job.__name__ for job in jobs])
    for rank, (_, errors) in enumerate(outcomes):
        for job, error in errors.items():
            raise AssertionError(f"{job}, rank {rank} of {size}: {error}")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The folder of those that two ranks saved."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run(2, folder, save_and_go_on)
    return folder


TWO, FOUR = (pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))


@pytest.mark.parametrize("size", [1, TWO, FOUR])
def test_checkpoints_resume_on_any_number_of_ranks(size, checkpoints):
    """Checkpoints of two ranks by torch.distributed.checkpoint resume with equal bits."""
    run(size, checkpoints, resume)


@pytest.mark.gpu
def test_checkpoints_resume_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("DEVICE", "cuda")
    run(1, tmp_path, save_and_go_on, resume)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_batch_norms_among_half_weights_train_in_a_group_of_their_own(level, one_process):
    """FSDP itself refuses to put them into one with half weights."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    fully_shard([layers[1]])
    model = fully_shard(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert model(torch.randn(3, 4)).isfinite().all()
