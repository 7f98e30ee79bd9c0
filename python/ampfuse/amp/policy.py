"""The optimization levels, and the overrides that each allows.

A level is a frozen dataclass: a row of the table below and a sentence. :func:`make_policy` takes
the level's row, puts the caller's overrides over it and checks the result, so what is judged is
the policy that would run, not the path that led to it.

=====  ===========  ========  ==========  =======  ==========
level  model cast   autocast  batch norm  masters  loss scale
=====  ===========  ========  ==========  =======  ==========
O0     float32      no                    no       1.0
O1     no           float16               no       dynamic
O2     float16      no        float32     yes      dynamic
O3     float16      no        as model    no       1.0
O4     no           bfloat16              no       1.0
O5     bfloat16     no        float32     yes      1.0
=====  ===========  ========  ==========  =======  ==========

O0 to O3 are apex's levels; O4 and O5 are O1 and O2 with bfloat16, as AMD's ROCm/apex defined them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import torch

from ampfuse.optim.options import Rule, check
from ampfuse.torch_utils import HALF_DTYPES


@dataclasses.dataclass(frozen=True)
class Policy:
    """A level's properties, under the names that :func:`ampfuse.amp.initialize` takes.

    ``None`` in a field means that the property has no say at this level.
    """

    opt_level: str
    brief: str
    cast_model_type: torch.dtype | Literal[False] | None = None
    patch_torch_functions: bool = False
    patch_torch_functions_type: torch.dtype | None = None
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | Literal["split"] | None = None
    loss_scale: float | Literal["dynamic"] = 1.0
    cast_model_outputs: torch.dtype | None = None
    fuse: bool = False

    def __str__(self) -> str:
        """The level in a sentence, and what differs from it."""
        level = LEVELS[self.opt_level]
        fields = [field.name for field in dataclasses.fields(self)]
        changed = [f for f in fields if getattr(self, f) != getattr(level, f)]
        overrides = ", ".join(f"{name}={getattr(self, name)}" for name in changed)
        return f"{self.opt_level}: {self.brief}" + (f" Here {overrides}." if overrides else "")

    @property
    def weights_type(self) -> torch.dtype | None:
        """The type that the model's weights and inputs are cast to (O0, O2, O3, O5), or None."""
        return self.cast_model_type or None

    @property
    def model_is_low_precision(self) -> bool:
        """True if the model's own weights become half or bfloat16 (O2, O3, O5)."""
        return self.weights_type in HALF_DTYPES

    @property
    def autocast_type(self) -> torch.dtype | None:
        """The type ``forward`` runs in under autocast (O1, O4), or None."""
        return self.patch_torch_functions_type if self.patch_torch_functions else None

    @property
    def computes_in_half(self) -> bool:
        """True where `forward` gives half tensors: at all levels but O0."""
        return self.model_is_low_precision or self.autocast_type is not None

    @property
    def is_dynamic(self) -> bool:
        """True if the loss scale adapts, and a step with a non-finite gradient is skipped."""
        return self.loss_scale == "dynamic"


O0 = Policy(
    "O0",
    "Pure FP32 training: the baseline the other levels are compared with.",
    cast_model_type=torch.float32,
    master_weights=False,
)
O1 = Policy(
    "O1",
    "FP32 weights; forward picks FP16 or FP32 for each operation (autocast).",
    patch_torch_functions=True,
    patch_torch_functions_type=torch.float16,
    loss_scale="dynamic",
)
O2 = Policy(
    "O2",
    "FP16 model with FP32 batch norm; the optimizer steps FP32 master weights.",
    cast_model_type=torch.float16,
    keep_batchnorm_fp32=True,
    master_weights=True,
    loss_scale="dynamic",
)
O3 = Policy(
    "O3",
    "Pure FP16, with no masters: a speed limit to aim for, seldom a way to train.",
    cast_model_type=torch.float16,
    keep_batchnorm_fp32=False,
    master_weights=False,
)
O4 = dataclasses.replace(
    O1,
    opt_level="O4",
    brief="O1 with BF16, whose range is FP32's: no loss scaling needed.",
    patch_torch_functions_type=torch.bfloat16,
    loss_scale=1.0,
)
O5 = dataclasses.replace(
    O2,
    opt_level="O5",
    brief="O2 with BF16: BF16 model, FP32 batch norm and masters, no loss scaling needed.",
    cast_model_type=torch.bfloat16,
    loss_scale=1.0,
)

LEVELS: dict[str, Policy] = {level.opt_level: level for level in (O0, O1, O2, O3, O4, O5)}


def make_policy(opt_level: str, **overrides: object) -> Policy:
    """The policy of `opt_level` with `overrides` (None = keep the level's value) applied.

    Raises:
        RuntimeError: unknown level, or overrides that contradict the level.
        AssertionError: ``keep_batchnorm_fp32`` is not True, False, "True" or "False".
        ValueError: ``loss_scale`` is neither "dynamic" nor a positive number; ``master_weights`` is
            neither a bool nor "split", or another switch none.
        TypeError: a type argument is not a floating point ``torch.dtype``.

    These are the error types of ``apex.amp``.
    """
    level = LEVELS.get(opt_level) if isinstance(opt_level, str) else None
    if level is None:
        raise RuntimeError(
            f"Unknown opt_level {opt_level!r}. The levels are {', '.join(map(repr, LEVELS))}: "
            "the letter O, then a digit."
        )
    given: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
    for name in given.keys() & _TYPES:
        _check_dtype(name, given[name])
    # First by level: at O1 and O4 any value of these is an error, "True" and invalid ones alike.
    if level.patch_torch_functions:
        _check_casts_no_weights(level.opt_level, given)
    for name in given.keys() & _SWITCHES:
        given[name] = parse_switch(name, given[name])
    if "loss_scale" in given:
        given["loss_scale"] = parse_loss_scale(given["loss_scale"])
    policy = dataclasses.replace(level, **given)
    if policy.patch_torch_functions and not level.patch_torch_functions:
        raise RuntimeError(
            f"patch_torch_functions=True contradicts {opt_level}, which casts the model instead of "
            "single operations. For autocast use O1 (float16) or O4 (bfloat16)."
        )
    if policy.patch_torch_functions_type != level.patch_torch_functions_type:
        raise RuntimeError(
            f"patch_torch_functions_type={policy.patch_torch_functions_type} contradicts "
            f"{opt_level}: float16 belongs to O1, bfloat16 to O4, and the other levels have none."
        )
    if policy.master_weights == "split" and policy.weights_type == torch.float32:
        raise RuntimeError(
            f"master_weights='split' contradicts {opt_level}, which keeps FP32 weights: only "
            "half-precision weights are split. Leave it out, or use O2 (float16) or O5 (bfloat16)."
        )
    return policy


_TYPES = {"cast_model_type", "cast_model_outputs", "patch_torch_functions_type"}
_SWITCHES = {"patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "fuse"}
# Numbers are not switches, although 1 == True.
_SWITCH = Rule(lambda value: value in ("True", "False") or value is bool(value), "True or False")
_SPLIT_SWITCH = Rule(
    lambda value: value == "split" or _SWITCH.accepts(value), "True, False or 'split'"
)

_LOSS_SCALE = Rule(
    lambda value: value == "dynamic" or 0 < float(value) < math.inf,
    "'dynamic' or a positive number",
)


def parse_switch(name: str, value: object) -> Any:
    """The value of a switch, given as such or as the string of a command line; or "split".

    Raises:
        ValueError: anything else; AssertionError of ``keep_batchnorm_fp32``, as in apex.
    """
    rule = _SPLIT_SWITCH if name == "master_weights" else _SWITCH
    try:
        check(name, value, rule)
    except ValueError as error:
        if name != "keep_batchnorm_fp32":
            raise
        raise AssertionError(str(error)) from None
    return value if value == "split" else value in (True, "True")


def parse_loss_scale(value: object) -> float | Literal["dynamic"]:
    """``"dynamic"``, or a positive finite number, which may come as a string ("128.0").

    Raises:
        ValueError: anything else.
    """
    check("loss_scale", value, _LOSS_SCALE)
    return "dynamic" if value == "dynamic" else float(value)  # type: ignore[arg-type]


def _check_casts_no_weights(level: str, given: dict[str, Any]) -> None:
    """O1 and O4 leave the weights alone."""
    if given.get("cast_model_type") not in (None, False, torch.float32):
        raise RuntimeError(
            f"cast_model_type={given['cast_model_type']} contradicts {level}, which keeps FP32 "
            "weights and lets autocast choose types. For a half-precision model use O2 "
            "(float16) or O5 (bfloat16)."
        )
    for name, reason in {
        "keep_batchnorm_fp32": "no weight is cast, so batch norm is FP32 already",
        "master_weights": "the weights are FP32 already",
    }.items():
        if name in given:
            raise RuntimeError(f"{name} has no meaning at {level}: {reason}. Leave it out (None).")


def _check_dtype(name: str, value: object) -> None:
    may_be_false = name == "cast_model_type"
    if may_be_false and value is False:
        return
    if not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise TypeError(
            f"{name} must be a floating point torch.dtype such as torch.float16, "
            f"{'None or False' if may_be_false else 'or None'}; got {value!r}."
        )
