"""The batches that a captured training step takes: tensors of one structure, shapes and types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ampfuse import trees


class Batch:
    """The structure of a batch ``(inputs, *targets)`` with tensors as leaves."""

    _CONSTANTS = (type(None), bool, int, float, str)

    def __init__(self, sample: Sequence[Any]) -> None:
        if not isinstance(sample, (tuple, list)) or not sample:
            raise TypeError(
                f"sample_batch is a {type(sample).__name__}; it has to be (inputs, *targets)"
            )
        self._structure = trees.replace(
            tuple(sample), lambda item: item.to("meta") if isinstance(item, Tensor) else item
        )
        self._leaves = _leaves_of(self._structure)
        for name, leaf in self._leaves.items():
            if not isinstance(leaf, (Tensor, *self._CONSTANTS)):
                raise TypeError(f"{name} is a {type(leaf).__name__}; pass tensors")

    def tensors_of(self, batch: tuple[Any, ...]) -> list[Tensor]:
        """The tensors of `batch` in order. Raises ValueError unless it is like the sample."""
        found = _leaves_of(batch)
        if found.keys() != self._leaves.keys():
            names = sorted(found.keys() ^ self._leaves.keys())
            where = "missing" if names[0] in self._leaves else "new"
            raise ValueError(
                f"{names[0]} is {where}: the batch has another structure than captured"
            )
        tensors = []
        for name, expected in self._leaves.items():
            leaf = found[name]
            if isinstance(expected, Tensor):
                _check_like(name, leaf, expected)
                tensors.append(leaf)
            elif leaf != expected:
                raise ValueError(
                    f"{name} is {leaf!r}, and the step was captured with {expected!r}; pass a "
                    "tensor if it changes"
                )
        return tensors

    def filled_with(self, tensors: Sequence[Tensor]) -> Any:
        """The sample with `tensors` in place of its own."""
        rest = iter(tensors)
        return trees.replace(
            self._structure, lambda item: next(rest) if isinstance(item, Tensor) else item
        )


def _check_like(name: str, leaf: Any, expected: Tensor) -> None:
    if not isinstance(leaf, Tensor):
        raise ValueError(f"{name} is a {type(leaf).__name__}; a tensor was captured")
    if leaf.shape != expected.shape:
        raise ValueError(
            f"{name} has shape {tuple(leaf.shape)}, and the step was captured for "
            f"{tuple(expected.shape)}. A graph has one shape: use DataLoader(drop_last=True) or "
            "pad, or run such a batch through an eager step."
        )
    if leaf.dtype != expected.dtype:
        raise ValueError(
            f"{name} is {leaf.dtype}, and the step was captured for {expected.dtype}; convert it"
        )


def _leaves_of(batch: tuple[Any, ...]) -> dict[str, Any]:
    """What is in a batch that is no container, by a name such as ``inputs['mask']``."""
    leaves: dict[str, Any] = {}
    for i, value in enumerate(batch):
        _add_leaves(leaves, "inputs" if i == 0 else f"targets[{i - 1}]", value)
    return leaves


def _add_leaves(leaves: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, (tuple, list)) and not isinstance(value, PackedSequence):
        for i, item in enumerate(value):
            _add_leaves(leaves, f"{name}[{i}]", item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _add_leaves(leaves, f"{name}[{key!r}]", item)
    else:
        leaves[name] = value
