"""Levels and overrides: every cell of the tables, and the errors with their types."""

import contextlib
import dataclasses
import math

import pytest
import torch

from ampfuse.amp.policy import LEVELS, make_policy
from cases import bf16, f16, f32, f64

AUTOCASTING = ("O1", "O4")

# level: cast_model_type, patch, its type, keep_batchnorm_fp32, master_weights, loss_scale; of all
# levels cast_model_outputs is None and fuse False
TABLE = {
    "O0": (f32, False, None, None, False, 1.0),
    "O1": (None, True, f16, None, None, "dynamic"),
    "O2": (f16, False, None, True, True, "dynamic"),
    "O3": (f16, False, None, False, False, 1.0),
    "O4": (None, True, bf16, None, None, 1.0),
    "O5": (bf16, False, None, True, True, 1.0),
}


@pytest.mark.parametrize("level", TABLE)
def test_each_level_has_its_defaults(level):
    p = make_policy(level)
    opt_level, brief, *defaults = dataclasses.astuple(p)
    assert opt_level == level
    assert brief.endswith(".")
    assert defaults == [*TABLE[level], None, False]
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.loss_scale = 2.0


@pytest.mark.parametrize("bad", ["02", "00", "o2", "o5", "O6", "O", "", None, 2, ["O2"]])
def test_unknown_levels_are_refused(bad):
    with pytest.raises(RuntimeError, match="letter O"):
        make_policy(bad)


# A field, a value, what it becomes at O0, O2, O3 and O5, and at O1 and O4; or the error.
OVERRIDES = [
    *(("cast_model_type", dtype, dtype, RuntimeError) for dtype in (f16, bf16, f64)),
    ("cast_model_type", f32, f32, f32),
    ("cast_model_type", False, False, False),
    ("patch_torch_functions", False, False, False),
    ("patch_torch_functions", True, RuntimeError, True),
    *(("keep_batchnorm_fp32", value, True, RuntimeError) for value in (True, "True")),
    *(("keep_batchnorm_fp32", value, False, RuntimeError) for value in (False, "False")),
    *(
        ("keep_batchnorm_fp32", value, AssertionError, RuntimeError)
        for value in ("true", "None", "", 1, 0, "nonsense")
    ),
    ("master_weights", True, True, RuntimeError),
    ("master_weights", False, False, RuntimeError),
    ("master_weights", "False", False, RuntimeError),  # as words too, which would be true
    *(("master_weights", value, ValueError, RuntimeError) for value in ("yes", "Split", 2, f32)),
    ("patch_torch_functions", "False", False, False),
    ("fuse", "False", False, False),
    ("fuse", None, False, False),  # the level's
    *((name, "yes", ValueError, ValueError) for name in ("patch_torch_functions", "fuse")),
    *(("loss_scale", value, 128.0, 128.0) for value in (128, "128.0")),
    *(("loss_scale", value, value, value) for value in (0.5, "dynamic")),
    *(
        ("loss_scale", value, ValueError, ValueError)
        for value in ("Dynamic", "", "x1", 0, -1.0, math.nan, math.inf, "-2", [1])
    ),
    *(
        (name, value, TypeError, TypeError)
        for name in ("cast_model_type", "cast_model_outputs")
        for value in (True, "float16", torch.int64, 16)
    ),
]


@pytest.mark.parametrize(("name", "value", "casting", "autocasting"), OVERRIDES)
def test_an_override_is_taken_or_refused_by_its_level(name, value, casting, autocasting):
    for level in LEVELS:
        expected = autocasting if level in AUTOCASTING else casting
        if isinstance(expected, type):
            with pytest.raises(expected, match=name):
                make_policy(level, **{name: value})
            continue
        policy = make_policy(level, **{name: value})
        option = getattr(policy, name)
        assert (level, option, type(option)) == (level, expected, type(expected))
        assert policy.is_dynamic is (policy.loss_scale == "dynamic")
        assert policy.weights_type is (policy.cast_model_type or None)
        assert policy.autocast_type is (TABLE[level][2] if policy.patch_torch_functions else None)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [f16, bf16])
def test_the_type_of_patched_functions_is_that_of_the_level(level, dtype):
    refused = pytest.raises(RuntimeError, match="patch_torch_functions_type")
    with contextlib.nullcontext() if dtype == TABLE[level][2] else refused:
        make_policy(level, patch_torch_functions_type=dtype)
