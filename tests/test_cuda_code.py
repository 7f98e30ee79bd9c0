"""What nvcc makes of the hot kernels: no register spills, and memory in accesses of 16 bytes."""

import importlib
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow

# The kernels that steps spend their time in: (its name in the symbol, lists read, lists written).
# Of its instances the hot one is that for tables without rare lists, the largest mask of missing
# lists.
HOT = {
    "inspect": ("inspect_kernelI", 1, 0),
    "param_norms": ("measure_kernelINS_11ParamNormOpE", 1, 0),
    "sgd": ("apply_kernelINS_5SgdOpE", 3, 3),
    "adam": ("apply_kernelINS_6AdamOpE", 4, 4),
    "adagrad": ("apply_kernelINS_9AdagradOpE", 3, 3),
    "novograd": ("apply_kernelINS_10NovoGradOpE", 3, 3),
    "lamb_moments": ("measure_kernelINS_13LambMomentsOpILb0EEE", 4, 2),
    "lamb": ("apply_kernelINS_6LambOpE", 3, 2),
    "layerwise": ("apply_kernelINS_11LayerwiseOpE", 2, 1),
}


@pytest.fixture(scope="module", params=[75, 80, 90])
def compiled(request, tmp_path_factory):
    """{symbol: (PTX, what ptxas says of it)} of csrc/cuda/backend.cu for one architecture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "buildtools")
        nvcc = importlib.import_module("probe").find_nvcc()
    if nvcc is None:
        pytest.skip("needs nvcc of CUDA 12 or later (CUDACXX, CUDA_HOME, PATH, /usr/local/cuda)")
    folder = tmp_path_factory.mktemp("cuda")
    flags = ["-std=c++17", "-O3", "-fmad=false", f"-arch=sm_{request.param}", "-Xptxas", "-v"]
    keep = ["--keep", f"--keep-dir={folder}", "-cubin", "-o", str(folder / "backend.cubin")]
    result = subprocess.run(
        [nvcc.path, *flags, *keep, str(ROOT / "csrc/cuda/backend.cu")],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    ptx = re.split(r"\.entry (\w+)\(", (folder / "backend.ptx").read_text())
    said = re.split(r"Compiling entry function '(\w+)'", result.stdout + result.stderr)
    reports = dict(zip(said[1::2], said[2::2], strict=True))
    return {name: (code, reports[name]) for name, code in zip(ptx[1::2], ptx[2::2], strict=True)}


def hot_instance(compiled, symbol):
    """The PTX and the report of the instance that misses most lists."""
    missing = {}
    for name, found in compiled.items():
        match = re.search(re.escape(symbol) + r"Lj(\d+)E", name)
        if match:
            missing[int(match[1])] = found
    assert missing, f"no kernel {symbol} among {sorted(compiled)}"
    return missing[max(missing)]


@pytest.mark.parametrize("kernel", HOT)
def test_registers_do_not_spill(kernel, compiled):
    _, report = hot_instance(compiled, HOT[kernel][0])
    counts = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
    )
    assert counts.groups() == ("0", "0", "0"), report


@pytest.mark.parametrize("kernel", HOT)
def test_memory_moves_in_16_bytes(kernel, compiled):
    """Eight elements of a list are one access as halves and two as FP32."""
    symbol, read, written = HOT[kernel]
    code, _ = hot_instance(compiled, symbol)
    loads, stores = code.count("ld.global.v4."), code.count("st.global.v4.")
    assert loads >= 3 * read
    assert stores >= 3 * written
    generic = re.findall(r"\b(?:ld|st)\.v4\.\S+", code)  # accesses that could be anywhere
    assert generic == []
