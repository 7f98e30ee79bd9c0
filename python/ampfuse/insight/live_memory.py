"""The memory of tensors while operations run, one by one or as torch.compile's graphs would."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ampfuse import pytree
from ampfuse.amp.float32_output import Float32Output

# Inductor's rules below are those of torch 2.15: torch/_inductor/lowering.py says what is fused.
# Elementwise, but without the tag that torch has for such operations.
_ELEMENTWISE = {"aten::_to_copy", "prims::convert_element_type", "prims::iota"}
_ELEMENTWISE |= {"prims::_low_memory_max_pool_offsets_to_indices"}
# Operations besides reductions that compute elementwise operands as they read them.
_TAKES_FUSED = {"aten::scatter_add", "aten::index_put", "aten::max_pool2d_with_indices_backward"}
_TAKES_FUSED |= {"aten::_unsafe_masked_index_put_accumulate"}


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of storages that operations have made, while they live.

    Attributes:
        now: the bytes at present.
        peak: the most so far.
        is_fused: the running operation is within a kernel, and its result takes no memory.
        is_in_place: it may write into the memory of an operand that is not used again.
    """

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # with another mode, torch.compile's graphs would not run

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.is_fused = self.is_in_place = False
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.ampfuse.cross_entropy_gradient.default:
            # Without a mode it overwrites the logits, which only the loss holds.
            self._free(args[1].untyped_storage()._cdata)
        for tensor in [] if self.is_fused else pytree.tensors(result):
            memory = tensor.memory.present if isinstance(tensor, Float32Output) else tensor
            if isinstance(memory, FakeTensor):
                self._count(memory.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive or key in self._known:
            return
        self._alive[key] = storage.nbytes()
        weakref.finalize(storage, self._free, key)
        self.now += storage.nbytes()
        if not self.is_in_place:
            self.see_peak()

    def see_peak(self) -> None:
        self.peak = max(self.peak, self.now)

    def _free(self, key: int) -> None:
        self.now -= self._alive.pop(key, 0)


@contextlib.contextmanager
def compiled_graphs(model: nn.Module, live: LiveMemory, device: str) -> Iterator[None]:
    """Let torch.compile make the graphs of `model`, and Inductor's rules say what they keep for the
    backward pass; operations run one by one, and `live` counts what Inductor would not fuse on
    `device`, "cpu" or "cuda"."""

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        def run(args: list[Any]) -> Any:
            interpreter = _Interpreter(graph)  # which keeps the results of a run
            interpreter.live, interpreter.most_reads = live, most_reads
            keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
            with torch._C._ExcludeDispatchKeyGuard(keys):  # no result is known to be a view
                return interpreter.boxed_run(args)

        run._boxed_call = True  # type: ignore[attr-defined]  # the arguments are its own to free
        return run

    import torch._inductor.compile_fx  # all of it, which takes seconds
    import torch._inductor.config as inductor
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    if (most := inductor.realize_acc_reads_threshold) is None:  # as from torch 2.15 on
        of_cpu, of_gpu = "realize_cpu_acc_reads_threshold", "_realize_acc_reads_threshold_default"
        most = getattr(inductor, of_cpu if device == "cpu" else of_gpu)
    most_reads = most, inductor.realize_reads_threshold
    backend = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch.compiler.reset()
    model.compile(backend=backend)
    try:
        yield
    finally:
        torch.compiler.reset()  # or graphs of fake tensors would count as versions of the user's


class _Interpreter(torch.fx.Interpreter):
    live: LiveMemory
    most_reads: tuple[int, int]  # of a kernel, and of each of several that compute the same

    def run_node(self, n: torch.fx.Node) -> Any:
        live = self.live
        live.see_peak()  # what was used last before is free now
        live.is_in_place = _is_elementwise(n)
        operands = [self.env[each] for each in n.all_input_nodes]
        reads = {id(read): read for each in operands for read in getattr(each, "_reads", [each])}
        live.is_fused = (
            live.is_in_place
            and len(reads) <= self.most_reads[len(n.users) > 1]
            and all(map(_takes_fused, n.users))
        )
        try:
            result = super().run_node(n)
            if live.is_fused and isinstance(result, Tensor):  # the kernel of its users reads these
                result._reads = list(reads.values())  # type: ignore[attr-defined]
        finally:
            live.is_fused = live.is_in_place = False
        return result


def _is_elementwise(node: torch.fx.Node) -> bool:
    """Return whether `node` is a view, or each element depends on one of each operand."""
    operation = node.target
    if not isinstance(operation, torch._ops.OpOverload):
        return operation is operator.getitem
    has_tag = torch.Tag.pointwise in operation.tags
    return has_tag or operation.is_view or operation._schema.name in _ELEMENTWISE


def _takes_fused(node: torch.fx.Node) -> bool:
    """Return whether Inductor computes elementwise operands in the kernel of `node`."""
    operation = node.target
    if _is_elementwise(node):
        return True
    if not isinstance(operation, torch._ops.OpOverload):
        return False
    return torch.Tag.reduction in operation.tags or operation._schema.name in _TAKES_FUSED
