"""The extension's lists of algorithms and storage types are those of the optimizers."""

import inspect

import pytest
import torch

from ampfuse import optim
from ampfuse._schema import ALGORITHMS, STORAGES
from ampfuse.optim.state import StateSpec
from cases import OPTIMIZERS, make

CLASSES = [
    cls
    for cls in vars(optim).values()
    if isinstance(cls, type) and getattr(cls, "_algorithm", "none") != "none"
]
# AdamW is Adam's kernel with a default of its own.
OTHER_DEFAULTS = {("AdamW", "weight_decay"): 1e-2}


@pytest.mark.parametrize("cls", CLASSES)
def test_constructors_have_the_hyper_parameters_and_defaults_of_the_schema(cls):
    defaults = {name: p.default for name, p in inspect.signature(cls).parameters.items()}
    keys = {hyper.key for hyper in ALGORITHMS[cls._algorithm].hypers}
    taken = {}
    for hyper in ALGORITHMS[cls._algorithm].hypers:
        if hyper.key in defaults:
            value = defaults[hyper.key]
            taken[hyper.key, hyper.name] = value if hyper.index is None else value[hyper.index]
            expected = OTHER_DEFAULTS.get((cls.__name__, hyper.key), hyper.initial)
            assert taken[hyper.key, hyper.name] == expected
    of_groups = {"bias_correction", "decoupled_weight_decay", "wd_after_momentum", None}
    assert keys - defaults.keys() <= of_groups


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("storage", STORAGES)
def test_states_stand_under_the_keys_of_the_schema(name, storage):
    param = torch.randn(8192, requires_grad=True)
    algorithm = make(name, [param]).algorithm
    if storage not in algorithm.storages:
        with pytest.raises(ValueError, match=f"not support state_dtype='{storage}'.*use "):
            make(name, [param], state_dtype=storage)
        return
    optimizer = make(name, [param], state_dtype=storage)
    param.grad = torch.randn_like(param)
    optimizer.step()
    state, of = optimizer.state[param], STORAGES[storage]
    states = algorithm.states_in(optimizer.param_groups[0])
    keys = [key for each in states for key in of.keys(each)]
    assert set(keys) == state.keys() - set(algorithm.numbers)
    held = sum(state[key].numel() * state[key].itemsize for key in keys)
    assert held == len(states) * of.nbytes(param.numel())
    for stored in StateSpec.of(algorithm, optimizer.param_groups[0]):
        assert stored.storage_in(state) == of
        assert {key: state[key].shape for key in of.keys(stored.name)} == stored.shapes(param, of)
