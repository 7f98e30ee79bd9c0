"""For every test: a fixed seed, the devices to run on, and a reason where there is no GPU."""

import gc
import os
import re
import tempfile
from collections import defaultdict
from itertools import combinations

import pytest
from hypothesis import settings

# A thread that waits leaves its processor to the tests beside it. Read where torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch._dynamo  # as the first step of any optimizer of torch's does
import torch.distributed as dist

from ampfuse import _core
from ampfuse.amp import cast_state, function_casts
from cases import GPU, emulated_module
from programs import in_processes, use_one_gloo_worker

use_one_gloo_worker()

# With a workspace of its own for each stream, cuBLAS gives the same bits in every run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Quick runs draw the same examples each time, so that no test fails by chance. Slow and exhaustive
# runs draw others, and so do those with --hypothesis-seed.
_DRAWN = {"deadline": None, "max_examples": 60, "print_blob": True}
settings.register_profile("same", **_DRAWN, derandomize=True, database=None)
settings.register_profile("random", **_DRAWN, derandomize=False)


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_collection_modifyitems(config, items):
    choose_combinations(items)
    if hasattr(config, "workerinput"):
        # The longest files are in the last folders; where several processes take files, they begin.
        items.sort(key=lambda item: item.path, reverse=True)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; this machine has none"))


def choose_combinations(items):
    """Mark as exhaustive the combinations of a test's parameters that quick runs can do without.
    For a test marked `covers(n)`, every combination of values of n parameters still occurs in a
    quick run; in emulation, every single value does. (It is several times slower than the CPU's
    kernels, and test_cpp.py compares each kernel with those.) The choice depends on nothing but the
    parameters: ``pytest --collect-only -q FILE`` lists the combinations that run, and ``pytest -m
    '' ID`` runs any one. For example:

        parameters: x in (a, b, c), y in (1, 2): a-1, a-2, b-1, b-2, c-1, c-2
        covers(1) keeps a-1, b-2 and c-1, in which each value occurs;
        covers(2) keeps all six, because each pair of values occurs in one alone.
    """
    tables = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            device, mark = item.callspec.params.get("device"), item.get_closest_marker("covers")
            if device == "emulated" or mark:
                n = 1 if device == "emulated" else mark.args[0]
                tables[item.parent, item.originalname, device, n].append(item)
    for (*_, n), combined in tables.items():
        for item in superfluous(combined, n):
            item.add_marker(pytest.mark.exhaustive)


def superfluous(items, n):
    """Return the items that can be left out while every combination of values of `n` parameters
    still occurs. Greedy: the item with the most combinations that have not occurred yet is kept,
    until all have. Values are told apart by repr: two of {} are one, two functions are not."""
    values = [[(name, repr(v)) for name, v in item.callspec.params.items()] for item in items]
    meetings = [set(combinations(row, min(n, len(row)))) for row in values]
    items, uncovered = list(items), set().union(*meetings)
    while uncovered:
        most = max(range(len(items)), key=lambda i: len(meetings[i] & uncovered))
        uncovered -= meetings[most]
        items[most] = None
    return list(filter(None, items))


def is_quick(config):
    chosen = re.sub(r"\bnot (\w+|\([^()]*\))", "", config.option.markexpr)
    return not re.search(r"\b(slow|exhaustive)\b", chosen)


def pytest_configure(config):
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # killed runs leave broken files there
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder.name
    gc.disable()  # during collection, whose imports would spend a third of their time in it
    is_seeded = config.getoption("--hypothesis-seed") is not None
    settings.load_profile("same" if is_quick(config) and not is_seeded else "random")


def pytest_collection_finish():
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def short_collections():
    """Keep what imports and earlier files made out of garbage collections. The experiments ask for
    two in each run and advise for three a level, and most of their tests' time went into them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_casts_stay():
    """End the casts of the whole process, and restore replaced functions, which O1 under apex's
    names leaves."""
    yield
    cast_state.end_everywhere()
    function_casts.restore_registered()


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread: tests run side by side (pytest -n), on tensors too small to share out."""
    torch.set_num_threads(1)


@pytest.fixture
def emulated(monkeypatch):
    """Run the CUDA kernels, on the host, in everything of this test."""
    monkeypatch.setattr(_core, "C", emulated_module())


@pytest.fixture
def one_process():
    """Make a torch.distributed group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["cpu", "emulated", GPU])
def device(request):
    """Run the test on the CPU kernels, on the CUDA kernels in emulation and, with a GPU, there."""
    if request.param == "emulated":
        request.getfixturevalue("emulated")
        return torch.device("cpu")
    return torch.device(request.param)


@pytest.fixture(scope="module")
def errors_by_rank(request, tmp_path_factory):
    """Return the errors of the chosen tests `on_ranks` of so many, by the tests' names."""
    size = request.param
    names = [
        item.originalname
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
        if item.callspec.params.get("errors_by_rank") == size
    ]
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as monkeypatch:
        if size == "cuda":
            monkeypatch.setenv("DEVICE", "cuda")
        outcomes = in_processes(1 if size == "cuda" else size, folder, str(request.path), names)
    return [errors for _, errors in outcomes]


@pytest.fixture(params=["cpu", GPU])
def hardware(request, monkeypatch):
    """The CPU and, where there is one, a GPU: for what runs torch's operations beside ours.

    Convolutions there give the same bits in each run, and compute in FP32 what is FP32.
    """
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "benchmark", False)
    monkeypatch.setattr(cudnn, "deterministic", True)
    cudnn.conv.fp32_precision = "ieee"
    return torch.device(request.param)


_FLAGS = torch.backends.cuda.matmul, torch.backends.cudnn.conv
_PRECISIONS = [flag.fp32_precision for flag in _FLAGS]


@pytest.fixture(autouse=True)
def precision_as_it_was():
    """Restore the FP32 precision that a test changed, which torch.export may refuse."""
    yield
    for flag, precision in zip(_FLAGS, _PRECISIONS, strict=True):
        if flag.fp32_precision != precision:
            flag.fp32_precision = precision
