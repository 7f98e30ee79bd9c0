"""The batches that a captured training step takes: tensors of one structure, shapes and types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten


class Batch:
    """The structure of a batch ``(inputs, *targets)`` with tensors as leaves."""

    _CONSTANTS = (type(None), bool, int, float, str)

    def __init__(self, sample: Sequence[Any]) -> None:
        if not isinstance(sample, (tuple, list)) or not sample:
            raise TypeError(f"sample_batch must be (inputs, *targets), got {type(sample).__name__}")
        leaves, self._structure = _flat(tuple(sample))
        for name, leaf in leaves.items():
            if not isinstance(leaf, (Tensor, *self._CONSTANTS)):
                raise TypeError(f"{name} is a {type(leaf).__name__}; pass tensors")
        self._leaves = {
            name: leaf.to("meta") if isinstance(leaf, Tensor) else leaf
            for name, leaf in leaves.items()
        }

    def tensors_of(self, batch: tuple[Any, ...]) -> list[Tensor]:
        """The tensors of `batch` in order. Raises ValueError unless it is like the sample."""
        found, structure = _flat(batch)
        if structure != self._structure:
            others = sorted(found.keys() ^ self._leaves.keys())
            raise ValueError(f"batch structure differs from the captured one in {others}")
        for name, expected in self._leaves.items():
            now, then = _describe(found[name]), _describe(expected)
            if now != then:
                raise ValueError(
                    f"{name} is {now}, and the step was captured with {then}. A graph has one "
                    "shape: use DataLoader(drop_last=True) or pad, or run such a batch through an "
                    "eager step. Python numbers are constants of the graph: pass tensors for "
                    "values that change."
                )
        return [leaf for leaf in found.values() if isinstance(leaf, Tensor)]

    def filled_with(self, tensors: Sequence[Tensor]) -> Any:
        """The sample with `tensors` in place of its own."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(x, Tensor) else x for x in self._leaves.values()]
        return tree_unflatten(leaves, self._structure)


def _flat(batch: tuple[Any, ...]) -> tuple[dict[str, Any], Any]:
    """The leaves of a batch, by names such as ``inputs['mask']``, and its structure."""
    leaves, structure = tree_flatten_with_path(batch)
    named = {}
    for path, leaf in leaves:
        first: Any = path[0]
        argument = f"targets[{first.idx - 1}]" if first.idx else "inputs"
        named[argument + keystr(path[1:])] = leaf
    return named, structure


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
