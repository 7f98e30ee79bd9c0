"""``amp.half_function`` and its like with ampfuse's own ``initialize``, whose O1 is autocast."""

import pytest
import torch
from torch import nn

from ampfuse import amp
from ampfuse.amp import function_casts, weight_cache
from cases import bf16, f16, f32, f64

CASTS = {
    "half": (amp.half_function, amp.register_half_function, f16),
    "bfloat16": (amp.bfloat16_function, amp.register_bfloat16_function, bf16),
    "float": (amp.float_function, amp.register_float_function, f32),
    "promote": (amp.promote_function, amp.register_promote_function, f32),
}


@pytest.fixture(autouse=True)
def off_afterwards():
    yield
    function_casts.restore_registered()
    amp.initialize(nn.Linear(1, 1), enabled=False)


def types(*tensors):
    return [t.dtype for t in tensors]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize("name", CASTS)
def test_they_cast_where_the_level_casts_functions(name, level):
    """That of the latest call of initialize."""
    decorate, _, to = CASTS[name]
    function = decorate(types)
    given = (torch.ones(1, dtype=f16), torch.ones(1), torch.ones(1, dtype=torch.int64))
    assert function(*given) == types(*given)
    amp.initialize(nn.Linear(1, 1), opt_level=level, verbosity=0)
    casts = level in ("O1", "O4")
    assert function(*given) == ([to, to, torch.int64] if casts else types(*given))
    with amp.disable_casts():
        assert function(*given) == types(*given)
    for other in ({"opt_level": "O2"}, {"enabled": False}):
        amp.initialize(nn.Linear(1, 1), verbosity=0, **other)
        assert function(*given) == types(*given)
    assert function.__name__ == "types"


def test_promotion_takes_the_widest_type():
    amp.initialize(nn.Linear(1, 1), verbosity=0)
    given = (torch.ones(1, dtype=f16), torch.ones(1), torch.ones(1, dtype=f64))
    assert amp.promote_function(types)(*given) == [f64] * 3


def test_nested_arguments_and_what_is_not_a_tensor():
    amp.initialize(nn.Linear(1, 1), verbosity=0)
    x = torch.ones(1)
    function = amp.half_function(lambda *args, **kwargs: (args, kwargs))
    (items, text), kwargs = function([x, (x, 1)], "text", key={"x": x})
    assert types(items[0], items[1][0], kwargs["key"]["x"]) == [f16] * 3
    assert (items[1][1], text) == (1, "text")
    assert x.dtype == f32


def test_a_weight_is_cast_once_within_a_forward():
    weight = nn.Parameter(torch.rand(2, 2))
    product = amp.half_function(lambda w: seen.append(w) or w.sum())
    seen = []

    class Net(nn.Module):
        def forward(self, x):
            return product(weight) + product(weight)

    amp.initialize(Net(), verbosity=0)(torch.ones(1)).backward()
    assert seen[0] is seen[1]
    assert weight.grad.tolist() == [[2.0, 2.0]] * 2
    assert not weight_cache.copies()


def test_frozen_weights_and_no_grad():
    weight = nn.Parameter(torch.rand(2, 2))
    with torch.no_grad():
        assert not weight_cache.cast(weight, f16).requires_grad
    copy = weight_cache.cast(weight, f16)
    assert copy.requires_grad
    assert weight_cache.cast(weight, f16) is copy
    with torch.no_grad():
        assert not weight_cache.cast(weight, f16).requires_grad
        weight.add_(1)
    assert torch.equal(weight_cache.cast(weight, f16), weight.half())
    weight.requires_grad_(False)
    assert not weight_cache.cast(weight, f16).requires_grad
    weight_cache.clear()


class Library:
    scale = staticmethod(types)


@pytest.mark.parametrize("name", CASTS)
def test_registered(name):
    _, register, to = CASTS[name]
    with pytest.raises(ValueError, match="missing"):
        register(Library, "missing")
    original = Library.scale
    register(Library, "scale")
    assert Library.scale is original  # until the next initialize
    amp.initialize(nn.Linear(1, 1), opt_level="O2", verbosity=0)
    given = (torch.ones(1, dtype=f16), torch.ones(1))
    assert Library.scale(*given) == [f16, f32]
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    assert Library.scale(*given) == [to, to]


def test_a_registered_operation_of_torchs_wins_over_autocast():
    amp.register_float_function(torch, "bmm")

    class Net(nn.Module):
        def forward(self, x):
            return torch.bmm(x, x), torch.matmul(x, x)

    out = amp.initialize(Net(), verbosity=0)(torch.rand(1, 2, 2))
    assert types(*out) == [f32, f16]
