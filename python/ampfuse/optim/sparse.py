"""Sparse gradients, as ``nn.Embedding(sparse=True)`` gives them, under amp.

Optimizers that step by themselves may take them. The extension's table knows dense gradients alone:
while it looks for those, sparse ones are put aside; here they are unscaled, inspected and added up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ampfuse import _core
from ampfuse.optim.ledger import Ledger
from ampfuse.optim.masters import (
    MasterParameter,
    gradient_as_it_is,
    leaf_of,
    set_gradient_as_it_is,
)
from ampfuse.uncompiled import uncompiled

_INFINITY = 0x7F800000  # the bits of inf as FP32; those of NaN are larger


class SparseLedger(Ledger):
    """:class:`Ledger` of gradients of which some may be sparse.

    A pass leaves sparse gradients coalesced, unscaled and in the type of what the step works on:
    of a half weight with a master in FP32, under both names.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        # By row, what earlier passes left, while one runs; whether nobody has looked at it.
        self._earlier: dict[int, Tensor] = {}
        self._is_unseen = False

    def _set_sparse_aside(self) -> None:
        self._earlier = self._take()

    @uncompiled
    def end(self, scale: Tensor, check: bool) -> bool:
        with self.aside() as found:
            new = self._end_pass(found, scale)
            left = bool(new) | super().end(scale, check)
            if check:
                self.inspect_sparse(found if self._is_unseen else new)
        self._is_unseen = False
        return left

    @uncompiled
    def mark(self, scale: Tensor) -> None:
        """As of dense gradients, but sparse ones are unscaled at once; nobody looks at them yet."""
        with self.aside() as found:
            self._end_pass(found, scale)
            super().mark(scale)
        self._is_unseen = True

    def cancel(self) -> None:
        self._take()
        super().cancel()
        self._put(self._earlier)
        self._earlier = {}

    def unscale(self, scale: Tensor) -> Tensor:
        self._rows.current()
        with self.aside() as found:
            _unscale(found.values(), scale)
            flag = super().unscale(scale)
            self.inspect_sparse(found)
        return flag

    def earlier_sparse(self, rows: Iterable[int]) -> list[str]:
        names = self._rows.parameter_names()
        return [names[row] for row in rows if row in self._earlier]

    def _end_pass(self, found: dict[int, Tensor], scale: Tensor) -> dict[int, Tensor]:
        """Unscale the gradients in `found` and make them sums with those of earlier passes.

        Returns:
            The unscaled gradients of this pass alone.
        """
        earlier, self._earlier = self._earlier, {}
        table = self._rows.known()
        # Of a row that gets both kinds the sum is dense, and the table's.
        for row in [row for row in found if table.gradients.accumulated(row) is not None]:
            set_gradient_as_it_is(self._leaf(row), found.pop(row).to_dense())
        for row in [row for row in earlier if gradient_as_it_is(self._leaf(row)) is not None]:
            dense = table.gradients.accumulated(row, make=True)
            assert dense is not None
            dense.add_(earlier.pop(row))
        _unscale(found.values(), scale)
        new = dict(found)
        for row, gradient in earlier.items():
            if row in found:  # on the CPU torch adds no half ones
                total = gradient.float() + found[row].float()
                gradient = total.to(gradient.dtype).coalesce()
            found[row] = gradient
        return new

    @torch.no_grad()
    def inspect_sparse(self, gradients: dict[int, Tensor]) -> None:
        """Have the state of the table know, as of dense gradients, whether these are finite."""
        filled = {row: g._values() for row, g in gradients.items() if g._nnz() > 0}
        if not filled:
            return
        largest = torch.stack(torch._foreach_norm(list(filled.values()), float("inf"))).float()
        bits = largest.view(torch.int32)
        is_bad = bits >= _INFINITY
        first = is_bad.int().argmax()
        field = self._rows.field
        told = ~is_bad.any() | (field("bad_row") >= 0)
        rows = torch.tensor(list(filled), dtype=torch.int32, device=bits.device)
        for name, values in (("bad_row", rows), ("bad_bits", bits)):
            field(name).copy_(torch.where(told, field(name), values.take(first)))
        for name in ("found_inf", "pass_found_inf"):
            field(name).copy_(torch.maximum(field(name), is_bad.any().float()))

    @torch.no_grad()
    def add_norm(self, gradients: dict[int, Tensor]) -> None:
        """Have the norm that a step reports be of `gradients` too. One not known stays so."""
        if gradients:
            norms = torch._foreach_norm([gradient._values() for gradient in gradients.values()])
            of_all = self._rows.field("grad_norm")
            of_all.copy_(torch.hypot(of_all, torch.stack(norms).float().norm()))

    def spend(self, gradients: dict[int, Tensor]) -> None:
        """After a step with `gradients`: as dense ones, those of masters are used up."""
        for row in gradients:
            if isinstance(self._rows.params[row], MasterParameter):
                self._set_gradient(row, None)

    # --- where they are ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def aside(self) -> Iterator[dict[int, Tensor]]:
        """For a block there is no sparse gradient; after it, those in the dictionary."""
        found = self._take()
        try:
            yield found
        finally:
            self._put(found)

    def _take(self) -> dict[int, Tensor]:
        """The sparse gradients by row, coalesced; they are no longer where they were."""
        found = {}
        for row, param in enumerate(self._rows.params):
            leaf = leaf_of(param)
            gradient = gradient_as_it_is(leaf)
            of_master = gradient if leaf is param else gradient_as_it_is(param)
            if not (_is_sparse(gradient) or _is_sparse(of_master)):
                continue
            # Under both names it is one tensor, and dropped if it is under either.
            if gradient is not None and gradient.dtype == param.dtype:
                gradient = of_master
            self._set_gradient(row, None)
            if gradient is not None:
                found[row] = gradient.detach().to(param.dtype).coalesce()
        return found

    def _put(self, gradients: dict[int, Tensor]) -> None:
        for row, gradient in gradients.items():
            self._set_gradient(row, gradient)

    def _leaf(self, row: int) -> Tensor:
        return leaf_of(self._rows.params[row])

    def _set_gradient(self, row: int, gradient: Tensor | None) -> None:
        for param in (self._leaf(row), self._rows.params[row]):
            set_gradient_as_it_is(param, gradient)


def _is_sparse(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.layout is torch.sparse_coo


def _unscale(gradients: Iterable[Tensor], scale: Tensor) -> None:
    values = [gradient._values() for gradient in gradients]
    if values:
        _core.C.unscale(values, values, scale.double().reciprocal().float())
