"""``amp.half_function`` and its like with ampfuse's own ``initialize``, whose O1 is autocast."""

import pytest
import torch
from torch import nn

from ampfuse import amp
from cases import LEVELS, bf16, f16, f32, f64

CASTS = {
    "half": (amp.half_function, amp.register_half_function, f16),
    "bfloat16": (amp.bfloat16_function, amp.register_bfloat16_function, bf16),
    "float": (amp.float_function, amp.register_float_function, f32),
    "promote": (amp.promote_function, amp.register_promote_function, f32),
}


def types(*tensors):
    return [t.dtype for t in tensors]


def inside(function, *args, level="O1"):
    """The result of `function` inside the forward of a model at `level`."""
    model = nn.Linear(1, 1)
    model.forward = lambda: function(*args)
    return amp.initialize(model, opt_level=level, verbosity=0)()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CASTS)
def test_they_cast_where_autocast_is_on(name, level):
    decorate, _, to = CASTS[name]
    function = decorate(types)
    given = (torch.ones(1, dtype=f16), torch.ones(1), torch.ones(1, dtype=torch.int64))
    cast = [to, to, torch.int64] if level in ("O1", "O4") else types(*given)
    assert inside(function, *given, level=level) == cast
    assert function(*given) == types(*given)
    amp.cast_everywhere()
    assert function(*given) == cast
    with amp.disable_casts():
        assert function(*given) == types(*given)
    assert inside(function, *given, level="O2") == types(*given)
    assert function(*given) == types(*given)
    assert function.__name__ == "types"


def autocast_state():
    enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return enabled, dtype, torch.is_autocast_cache_enabled()


def test_casting_everywhere_ends_as_it_began():
    """Also inside a region of the user's, and when that has ended before."""
    before = autocast_state()
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        region = autocast_state()
        for _ in range(2):
            amp.initialize(nn.Linear(1, 1), opt_level="O4", verbosity=0)
            amp.cast_everywhere()
            assert autocast_state() == (True, torch.bfloat16, False)
        amp.restore_torch()
        assert autocast_state() == region
        amp.cast_everywhere()
    amp.restore_torch()
    assert autocast_state() == before


def test_promotion_takes_the_widest_type():
    given = (torch.ones(1, dtype=f16), torch.ones(1), torch.ones(1, dtype=f64))
    assert inside(amp.promote_function(types), *given) == [f64] * 3


def test_nested_arguments_are_cast_and_others_stay():
    x = torch.ones(1)
    seen = []
    function = amp.half_function(lambda *args, **kwargs: seen.append((args, kwargs)))
    inside(lambda: function([x, (x, 1)], "text", key={"x": x}))
    (((items, text), kwargs),) = seen
    assert types(items[0], items[1][0], kwargs["key"]["x"]) == [f16] * 3
    assert (items[1][1], text) == (1, "text")
    assert x.dtype == f32


class Library:
    scale = staticmethod(types)


@pytest.mark.parametrize("name", CASTS)
def test_a_registered_function_casts_from_the_next_initialize_on(name):
    _, register, to = CASTS[name]
    with pytest.raises(ValueError, match="missing"):
        register(Library, "missing")
    original = Library.scale
    register(Library, "scale")
    assert Library.scale is original  # until the next initialize
    amp.initialize(nn.Linear(1, 1), opt_level="O2", verbosity=0)
    given = (torch.ones(1, dtype=f16), torch.ones(1))
    assert Library.scale(*given) == [f16, f32]
    assert inside(lambda: Library.scale(*given)) == [to, to]
