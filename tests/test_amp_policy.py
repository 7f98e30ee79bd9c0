"""Levels and overrides: every cell of the tables, and the errors with their types."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampfuse.amp.policy import LEVELS, make_policy, parse_loss_scale

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
CASTING = ("O0", "O2", "O3", "O5")
AUTOCASTING = ("O1", "O4")

# level: cast_model_type, patch, its type, keep_batchnorm_fp32, master_weights, loss_scale
TABLE = {
    "O0": (f32, False, None, None, False, 1.0),
    "O1": (None, True, f16, None, None, "dynamic"),
    "O2": (f16, False, None, True, True, "dynamic"),
    "O3": (f16, False, None, False, False, 1.0),
    "O4": (None, True, bf16, None, None, 1.0),
    "O5": (bf16, False, None, True, True, 1.0),
}


@pytest.mark.parametrize("level", TABLE)
def test_defaults_of_each_level(level):
    p = make_policy(level)
    found = (
        p.cast_model_type,
        p.patch_torch_functions,
        p.patch_torch_functions_type,
        p.keep_batchnorm_fp32,
        p.master_weights,
        p.loss_scale,
    )
    assert found == TABLE[level]
    assert p.cast_model_outputs is None
    assert p.brief.endswith(".")
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.loss_scale = 2.0


@pytest.mark.parametrize("bad", ["02", "00", "o2", "O6", "O", "", None, 2, ["O2"]])
def test_unknown_level(bad):
    with pytest.raises(RuntimeError, match="letter O"):
        make_policy(bad)


def test_zero_for_the_letter_is_explained():
    with pytest.raises(RuntimeError, match="starts with a zero; did you mean 'O2'"):
        make_policy("02")
    with pytest.raises(RuntimeError, match="did you mean 'O5'"):
        make_policy("o5")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [f16, bf16, f64])
def test_cast_model_type(level, dtype):
    if level in AUTOCASTING:
        with pytest.raises(RuntimeError, match="cast_model_type"):
            make_policy(level, cast_model_type=dtype)
    else:
        assert make_policy(level, cast_model_type=dtype).cast_model_type == dtype


@pytest.mark.parametrize("level", LEVELS)
def test_cast_model_type_float32_and_false_go_everywhere(level):
    assert make_policy(level, cast_model_type=f32).weights_type == f32
    off = make_policy(level, cast_model_type=False)
    assert off.cast_model_type is False
    assert off.weights_type is None


@pytest.mark.parametrize("level", LEVELS)
def test_patch_torch_functions(level):
    assert make_policy(level, patch_torch_functions=False).autocast_type is None
    if level in AUTOCASTING:
        on = make_policy(level, patch_torch_functions=True)
        assert on.autocast_type == TABLE[level][2]
    else:
        with pytest.raises(RuntimeError, match="patch_torch_functions"):
            make_policy(level, patch_torch_functions=True)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [f16, bf16])
def test_patch_torch_functions_type(level, dtype):
    if dtype == TABLE[level][2]:
        make_policy(level, patch_torch_functions_type=dtype)
    else:
        with pytest.raises(RuntimeError, match="patch_torch_functions_type"):
            make_policy(level, patch_torch_functions_type=dtype)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("value", [True, False, "True", "False"])
def test_keep_batchnorm_fp32(level, value):
    if level in AUTOCASTING:
        with pytest.raises(RuntimeError, match="keep_batchnorm_fp32"):
            make_policy(level, keep_batchnorm_fp32=value)
    else:
        policy = make_policy(level, keep_batchnorm_fp32=value)
        assert policy.keep_batchnorm_fp32 is (value in (True, "True"))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("value", ["true", "None", "", 1, 0, "nonsense"])
def test_keep_batchnorm_fp32_nonsense(level, value):
    expected = RuntimeError if level in AUTOCASTING else AssertionError
    with pytest.raises(expected, match="keep_batchnorm_fp32"):
        make_policy(level, keep_batchnorm_fp32=value)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("value", [True, False])
def test_master_weights(level, value):
    if level in AUTOCASTING:
        with pytest.raises(RuntimeError, match="master_weights"):
            make_policy(level, master_weights=value)
    else:
        assert make_policy(level, master_weights=value).master_weights is value


@pytest.mark.parametrize("name", ["patch_torch_functions", "master_weights", "fuse_batchnorm"])
def test_other_switches(name):
    """As words too, which would be true by their length."""
    assert getattr(make_policy("O2", **{name: "False"}), name) is False
    with pytest.raises(ValueError, match=f"^{name} is 'yes'; it has to be True"):
        make_policy("O2", **{name: "yes"})


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("value", "parsed"), [(128, 128.0), (0.5, 0.5), ("128.0", 128.0), ("dynamic", "dynamic")]
)
def test_loss_scale(level, value, parsed):
    policy = make_policy(level, loss_scale=value)
    assert policy.loss_scale == parsed
    assert policy.is_dynamic is (parsed == "dynamic")


@pytest.mark.parametrize(
    "value", ["Dynamic", "", "x1", 0, -1.0, float("nan"), float("inf"), "-2", [1]]
)
def test_bad_loss_scale(value):
    with pytest.raises(ValueError, match=r"loss_scale|could not convert"):
        make_policy("O2", loss_scale=value)


@given(st.floats(min_value=1e-30, max_value=1e30))
def test_loss_scale_survives_the_command_line(scale):
    assert parse_loss_scale(str(scale)) == parse_loss_scale(scale) == scale


@pytest.mark.parametrize("name", ["cast_model_type", "cast_model_outputs"])
@pytest.mark.parametrize("value", [True, "float16", torch.int64, 16])
def test_types_must_be_floating_dtypes(name, value):
    with pytest.raises(TypeError, match=name):
        make_policy("O2", **{name: value})


def test_overrides_left_out_keep_the_level():
    nothing = dict.fromkeys(
        ("cast_model_type", "keep_batchnorm_fp32", "master_weights", "loss_scale")
    )
    assert make_policy("O2", **nothing) == LEVELS["O2"]
