"""Models of transformers: the loss of causal language models, and masks for packed sequences."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import types
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ampfuse.nn.functional import cross_entropy
from ampfuse.nn.fuse.forwards import class_of, names_in, set_fused
from ampfuse.nn.fuse.trace import Untraceable

# ---- the loss, from half logits ------------------------------------------------------------------


class CausalLMLoss:
    """The ``ForCausalLMLoss`` of transformers, `original`, without its FP32 copy of the logits.

    It pickles as `original`: a pickled model loads unfused, also where ampfuse is not installed.
    """

    def __init__(self, original: Callable[..., Tensor]) -> None:
        self.original = original

    def __reduce__(self) -> Any:
        return operator.itemgetter(0), ((self.original,),)

    def __deepcopy__(self, memo: Any) -> CausalLMLoss:
        return self

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        if shift_labels is None:  # each token predicts the next one
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        rows = logits.view(-1, vocab_size)
        target = shift_labels.reshape(-1).to(logits.device)
        if num_items_in_batch is None:
            return cross_entropy(rows, target, ignore_index=ignore_index)
        total = cross_entropy(rows, target, ignore_index=ignore_index, reduction="sum")
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch


def replace_loss(model: Any) -> bool:
    """Give `model` this loss; False unless it is such a model, without a custom loss."""
    theirs = type(model).__module__.startswith("transformers.")
    if not theirs or "loss_function" not in names_in(model):
        return False
    loss: Any = getattr(model, "loss_function", None)
    name = f"{getattr(loss, '__module__', '')}.{getattr(loss, '__name__', '')}"
    if name != "transformers.loss.loss_utils.ForCausalLMLoss":
        return False
    model.loss_function = CausalLMLoss(loss)
    return True


def restore_loss(model: Any) -> None:
    loss = vars(model).get("_loss_function")  # where the property loss_function keeps it
    if isinstance(loss, CausalLMLoss):
        model.loss_function = loss.original


# ---- masks ---------------------------------------------------------------------------------------

# The decoders treat a sequence as packed if its positions restart. To find out, an eager forward
# waits for the device, and a compiled or captured one builds a mask, which rules out flash kernels.
# Positions that a model counts itself never restart.


def skip_packing(model: nn.Module) -> bool:
    """Have the decoders in `model` not search for packed sequences in positions that they count
    themselves; False if there are none, or all have a custom ``forward``."""
    any_replaced = False
    for module in model.modules():
        cls = class_of(module)
        is_theirs = cls.__module__.startswith("transformers.")
        if is_theirs and (forward := _forward_without_packing(cls)) is not None:
            with contextlib.suppress(Untraceable):
                set_fused(module, forward)
                any_replaced = True
    return any_replaced


def _forward_without_packing(cls: Any) -> Callable[..., Any] | None:
    """The ``forward`` of `cls`, where a call without positions also makes its masks without them;
    None if `cls` is not a decoder."""
    original = cls.forward
    written = inspect.unwrap(original)
    makers = {
        name: _called_without_positions(written.__globals__[name])
        for name in written.__code__.co_names
        if getattr(written.__globals__.get(name), "__module__", "") == "transformers.masking_utils"
        and name.startswith("create_")
    }
    names = list(inspect.signature(written).parameters)
    if not makers or "position_ids" not in names or "arange" not in written.__code__.co_names:
        return None
    whole = _with_globals(original, makers)
    if whole is None:
        return None
    place = names.index("position_ids")

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = (self, *args)[place] if place <= len(args) else kwargs.get("position_ids")
        return (whole if given is None else original)(self, *args, **kwargs)

    return forward


def _called_without_positions(make_mask: Callable[..., Any]) -> Callable[..., Any]:
    names = list(inspect.signature(make_mask).parameters)

    def without_positions(*args: Any, **kwargs: Any) -> Any:
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        kwargs.pop("position_ids", None)
        return make_mask(**kwargs)

    return without_positions


def _with_globals(function: Any, changed: dict[str, Any]) -> Any:
    """A copy of `function`, and of what it decorates, with some globals replaced; None if what a
    decorator wraps cannot be found."""
    scope, closure = {**function.__globals__, **changed}, function.__closure__ or ()
    if (inner := getattr(function, "__wrapped__", None)) is not None:
        places = [i for i, cell in enumerate(closure) if cell.cell_contents is inner]
        if not places or (copied := _with_globals(inner, changed)) is None:
            return None
        closure = tuple(
            types.CellType(copied) if i in places else cell for i, cell in enumerate(closure)
        )
    del scope["__name__"]  # by which torch.compile would look for the globals in the module
    copied = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, closure
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(copied, function)
