"""What the CUDA kernels cost, from their machine code, and what speed that allows: no GPU needed.

    python benchmarks/cuda_static.py            # the objects of this checkout's build
    python benchmarks/cuda_static.py FILE ...   # objects, cubins or fatbins

A thread of each kernel is run (harness/sass.py), and its neighbour: so many instructions, and so
many bytes. What the schedulers issue bounds the bytes that a multiprocessor moves; that bound over
the bandwidth of a copy is predicted. Waits for memory, launches and tails come on top.

Needs cuobjdump and nvdisasm: a CUDA toolkit's, those of torch's triton, or from ``pip install
nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm``.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from harness.results import RESULTS, parser_of, read, write
from harness.sass import TENSOR, Scene, Thread, parse, traffic
from report import markdown

ROOT = Path(__file__).parents[1]
CSV = RESULTS / "cuda_predicted.csv"


class Chip(NamedTuple):
    """`copy`: GB/s that a copy moves. Of a multiprocessor: the most warps, blocks and shared
    memory, and instructions in FP64 a cycle. `base`: where arguments begin in the constant bank."""

    name: str
    processors: int
    ghz: float
    copy: float
    warps: int
    blocks: int
    shared: int
    fp64: float
    base: int


CHIPS = {
    "sm_75": Chip("T4", 40, 1.35, 240, 32, 16, 64 << 10, 1 / 16, 0x160),
    "sm_80": Chip("A100", 108, 1.41, 1750, 64, 32, 164 << 10, 1, 0x160),
    "sm_90": Chip("H200", 132, 1.83, 4300, 64, 32, 228 << 10, 2, 0x210),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is predicted of a case on an architecture.

    Attributes:
        spills: instructions that move registers to memory and back.
        blocks: resident in a multiprocessor.
        instructions, fp64: of an element; those in FP64 by themselves.
        sectors, sector_use: of a warp's request; the share of their bytes that it asks for.
        predicted_share: of copy bandwidth, at most.
    """

    case: str
    arch: str
    registers: int
    spills: int
    shared: int
    blocks: int
    instructions: float
    fp64: float
    sectors: float
    sector_use: float
    bytes_per_element: float
    predicted_share: float


# ---- a kernel's instance, and what it is called with ---------------------------------------------

# As in csrc/core: DType, List, TableView; a fused layer's images, as its mask counts them.
TYPES = "none fp32 fp16 bf16 rem_fp16 rem_bf16 random s8 u8 e4m3 e5m3".split()
SIZES = {"fp32": 4, "s8": 1, "u8": 1, "e4m3": 1, "e5m3": 1}  # of others: 2
LISTS = (
    *("grad", "accumulated", "grad_out", "unscaled", "param", "model"),
    *("state0", "state1", "state2", "average", "scale0", "scale1", "scale2"),
)
TABLES = ("data", "dtype", "numel", "origin", "scaled", "first_chunk")
IMAGES = (*(f"image{i}" for i in range(5)), "mask", "partials")
_TABLE_BYTES = 1 << 24  # a table begins at its number times this

# A name, the kernel's symbol, and the tensors, of which the first has a
# value for each element. H: of FP16 and of BF16.
_MOMENTS, _CODES = "state0:fp32 state1:fp32", "state0:s8 state1:u8 scale0:fp32 scale1:fp32"
_ADAM, _SPLIT = "apply_kernelINS_6AdamOpE", "grad:bf16 param:rem_bf16 model:bf16"
_METERED = "measure_kernelINS_7MeteredINS_6AdamOpEEE"
_DERIVED = "image0:bf16 image1:bf16 image3:bf16"
_ALL_IMAGES = "image0:bf16 image1:bf16 image2:bf16 image3:bf16"
_CASES = f"""
inspect H | inspect_kernelI | grad:H
adam H | {_ADAM} | grad:H param:fp32 model:H {_MOMENTS}
sgd H | apply_kernelINS_5SgdOpE | grad:H param:fp32 model:H state0:fp32
lamb_moments H | measure_kernelINS_13LambMomentsOpILb0EEE | grad:H param:fp32 {_MOMENTS}
lamb H | apply_kernelINS_6LambOpE | model:H param:fp32 {_MOMENTS}
muon_momentum H | apply_kernelINS_14MuonMomentumOpE | grad:H state0:fp32 state1:bf16
muon H | apply_kernelINS_6MuonOpE | model:H param:fp32 state1:bf16
inspect fp32 | inspect_kernelI | grad:fp32
adam fp32 | {_ADAM} | grad:fp32 param:fp32 {_MOMENTS}
adam fp32 unscaled | {_ADAM} | grad:fp32 unscaled:fp32 param:fp32 {_MOMENTS}
adam H 8bit | {_ADAM} | grad:H param:fp32 model:H {_CODES}
adam bf16 split | {_ADAM} | {_SPLIT} {_MOMENTS}
adam bf16 split 8bit | {_ADAM} | {_SPLIT} {_CODES}
adam bf16 split fp8 | {_ADAM} | {_SPLIT} state0:e4m3 state1:e5m3 scale0:fp32 scale1:fp32
adam bf16 split bf16 | {_ADAM} | {_SPLIT} state0:random state1:random
adam bf16 ema | {_ADAM} | grad:bf16 param:fp32 model:bf16 average:fp32 {_MOMENTS}
adam bf16 metered | {_METERED} | grad:bf16 param:fp32 model:bf16 {_MOMENTS}
norm moments | sum_kernelINS_16BatchNormMoments | image0:bf16
norm apply | map_kernelINS_14BatchNormApply | image0:bf16 image2:bf16 mask
norm apply residual | map_kernelINS_14BatchNormApply | image0:bf16 image1:bf16 image2:bf16 mask
norm reduce | sum_kernelINS_15BatchNormReduce | image0:bf16 image1:bf16 mask
norm reduce residual | sum_kernelINS_15BatchNormReduce | image0:bf16 image1:bf16 image2:bf16 mask
norm dx | map_kernelINS_11BatchNormDx | image0:bf16 image1:bf16 image2:bf16 mask
norm finish moments | finish_kernelINS_16BatchNormMoments | partials:fp32
norm finish reduce | finish_kernelINS_15BatchNormReduce | partials:fp32
norm of rows | row_pass_kernelINS_11NormForwardILb1EE | image0:bf16 image3:bf16
norm of rows, added | row_pass_kernelINS_11NormForwardILb1EE | {_ALL_IMAGES}
norm of rows, backward | row_pass_kernelINS_12NormBackward | {_DERIVED}
norm of rows, weights | sum_kernelINS_11NormWeights | image0:bf16 image1:bf16
norm of rows, added, backward | row_pass_kernelINS_12NormBackward | {_ALL_IMAGES}
gelu, tanh | map_kernelINS_17ActivationForwardINS_8GeluTanhEE | image0:bf16 image2:bf16
gelu, tanh, backward | sum_kernelINS_18ActivationBackwardINS_8GeluTanhEE | {_DERIVED}
gelu | map_kernelINS_17ActivationForwardINS_4GeluEE | image0:bf16 image2:bf16
gelu, backward | sum_kernelINS_18ActivationBackwardINS_4GeluEE | {_DERIVED}
silu, gated | map_kernelINS_17ActivationForwardINS_4SiluEE | image0:bf16 image1:bf16 image2:bf16
silu, gated, backward | sum_kernelINS_18ActivationBackwardINS_4SiluEE | {_ALL_IMAGES} image4:bf16
cross-entropy | row_sum_kernelINS_16CrossEntropyLoss | image0:bf16
cross-entropy, backward | row_map_kernelINS_20CrossEntropyGradient | image0:bf16 image1:bf16
"""


class Case(NamedTuple):
    name: str
    symbol: str
    lists: dict[str, str]

    @property
    def layer(self) -> bool:
        return not self.symbol.startswith(("apply", "measure", "inspect"))

    @property
    def threads(self) -> int:
        return 128 if self.symbol.startswith("sum") else 256


def _cases() -> list[Case]:
    found = []
    for line in _CASES.strip().splitlines():
        for half in ("bf16", "fp16") if "H |" in line or " H " in line else ("",):
            name, symbol, lists = re.sub(r"\bH\b", half, line).split(" | ")
            types = (text.partition(":")[::2] for text in lists.split())
            found.append(Case(name, symbol, dict(types)))
    return found


CASES = _cases()


def instance(case: Case, symbols: list[str]) -> str | None:
    """The one of `symbols` that is launched: of a table's, that which misses most other lists."""
    places = IMAGES if case.layer else LISTS
    present = sum(1 << places.index(name) for name in case.lists)
    if case.layer:
        lists = "b1" if case.name.startswith("cross") else f"j{present}"
        kinds = {"row_pass": r"LS\d_3E", "sum": "Lb1ELi8E"}
        last = next((kinds[kind] for kind in kinds if case.symbol.startswith(kind)), "Lb1E")
        suffix = rf"EL{lists}ELNS_5DTypeE3E{last}" if "image0" in case.lists else ""
        return next((name for name in symbols if re.search(case.symbol + suffix, name)), None)
    compact = {name for name, kind in case.lists.items() if TYPES.index(kind) > TYPES.index("bf16")}
    compact = str(2 if "param" in compact else int(bool(compact)))
    missing = {}
    for name in symbols:
        match = re.search(case.symbol + r"Lj(\d+)E(?:LNS_7CompactE(\d)E)?", name)
        if match and (match[2] or "0") == compact and not int(match[1]) & present:
            missing[int(match[1])] = name
    return missing[max(missing)] if missing else None


def scene(case: Case, chip: Chip) -> Scene:
    """Of a thread in the middle of large tensors. What no table says is zero."""
    # NnArgs; a map's Grid of blocks of 8 x 32 packs, 8 times, or of 256, 8 times; a row's groups
    if case.layer:
        of_rows = case.symbol.startswith("row_")
        rows, channels = (1 << 16, 768) if of_rows else (256 * 56 * 56, 256)
        channels = 1 << 15 if case.name.startswith("cross") else channels
        images = [(i + 1 << TENSOR) * (name in case.lists) for i, name in enumerate(IMAGES[:-1])]
        vectors = [(i + 1) * _TABLE_BYTES for i in range(8)]
        parts = IMAGES.index("partials") + 1
        affine = [9 * _TABLE_BYTES, 10 * _TABLE_BYTES, TYPES.index("bf16")]
        # 0: two numbers; no targets
        pointers = [*images, *vectors, 0, *affine, parts << TENSOR, 0, 0]
        arguments = struct.pack("<3q21Q", rows, channels, TYPES.index("bf16"), *pointers)
        grids = {"map": (8 << 32 | 32, 1, rows // 64), "row_pass": (1,), "row_sum": (8,)}
        grids["row_map"] = (8, 2, 2 * rows)
        grid = next((grids[kind] for kind in grids if case.symbol.startswith(kind)), ())
        grid = struct.pack(f"<{len(grid)}q", *grid)
        return Scene(4, rows // 64, case.threads, chip.base, arguments + grid)
    memory: dict[int, int] = {}

    def put(table: str, place: int, value: bytes) -> None:
        memory.update(enumerate(value, (TABLES.index(table) + 1) * _TABLE_BYTES + place))

    chunks = 1 << 16
    for i, name in enumerate(LISTS):
        if name in case.lists or name == "grad":
            put("data", 8 * i, struct.pack("<Q", i + 1 << TENSOR))
            put("dtype", i, bytes([TYPES.index(case.lists.get(name, "fp32"))]))
    put("numel", 0, struct.pack("<q", chunks << 15))
    put("first_chunk", 8, struct.pack("<q", chunks))
    pointers = [(i + 1) * _TABLE_BYTES for i in range(20)]
    arguments = struct.pack("<12Q4q", *pointers[:12], 1, chunks, 1, -1)  # rows of any algorithm
    if not case.symbol.startswith("inspect"):  # norms, tickets, state and meter; or state
        arguments += struct.pack("<6Q", *pointers[12:18])
    blocks = 4 * chunks if case.symbol.startswith("apply") else chunks
    return Scene(5, blocks, case.threads, chip.base, arguments, memory)


# ---- from code to bounds -------------------------------------------------------------------------


def resident_blocks(chip: Chip, threads: int, registers: int, shared: int) -> int:
    """A warp takes registers by 256, a block shared memory by 256 bytes, and 1 KB from sm_80 on."""
    warps = -(-threads // 32)
    by_registers = 65536 // (-(-registers * 32 // 256) * 256) // warps
    taken = -(-shared // 256) * 256 + 1024 * (chip.warps == 64)
    by_shared = chip.shared // taken if taken else chip.blocks
    return min(chip.blocks, chip.warps // warps, by_registers, by_shared)


def predict(case: Case, arch: str, registers: int, shared: int, text: str) -> Row:
    """From what cuobjdump says of a kernel: its registers, shared memory in bytes, and code."""
    chip, code = CHIPS[arch], parse(text)
    thread, neighbour = (Thread(code, scene(case, chip), index) for index in (33, 34))
    each, kind = next(iter(case.lists.items()))
    number = (IMAGES if case.layer else LISTS).index(each) + 1
    own = [access.size for access in thread.accesses if access.tensor == number]
    if not own:
        raise ValueError(f"{case.name}, {arch}: {each} is not there; have arguments changed?")
    elements = sum(own) / SIZES.get(kind, 2)
    asked, touched = traffic(thread, neighbour)
    moved = asked / 32
    copied = chip.copy / chip.processors / chip.ghz / 32  # bytes of a thread a cycle
    issue_cycles = max(thread.issued / 4, thread.fp64 / chip.fp64)
    numbers = {
        "instructions": (thread.issued - thread.fp64) / elements,
        "fp64": thread.fp64 / elements,
        "sectors": touched / len(thread.accesses),
        "sector_use": moved / touched,
        "bytes_per_element": moved / elements,
        "predicted_share": min(1.0, moved / issue_cycles / copied),
    }
    return Row(
        case=case.name,
        arch=arch,
        registers=registers,
        spills=sum(one.op in ("LDL", "STL") for one in code.values()),
        shared=shared,
        blocks=resident_blocks(chip, case.threads, registers, shared),
        **{name: float(f"{value:.4g}") for name, value in numbers.items()},
    )


def find_tool() -> str | None:
    """The path of cuobjdump."""
    packages = sysconfig.get_paths()["purelib"]
    homes = [os.environ.get("CUDA_HOME", "/usr/local/cuda"), f"{packages}/nvidia/cu13"]
    folders = [f"{home}/bin" for home in [*homes, f"{packages}/triton/backends/nvidia"]]
    return shutil.which("cuobjdump", path=os.pathsep.join([os.environ["PATH"], *folders]))


def built() -> list[Path]:
    """The objects of this checkout's build."""
    return sorted(ROOT.glob("build/cp*/CMakeFiles/ampfuse_cuda*/**/*.cu.o"))


def dump(file: Path, *options: str) -> str:
    """What cuobjdump prints."""
    tool = find_tool()
    if tool is None:
        raise SystemExit("no cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    path = f"{Path(tool).parent}{os.pathsep}{os.environ['PATH']}"  # where it finds nvdisasm
    command = [tool, *options, str(file)]
    environment = {**os.environ, "PATH": path}
    return subprocess.run(command, capture_output=True, text=True, env=environment).stdout


class Usage(NamedTuple):
    """What a kernel takes: registers; bytes of its own memory, where they do not suffice, and of
    shared memory."""

    registers: int
    stack: int
    shared: int


def usages(file: Path, arch: str) -> dict[str, Usage]:
    """Of each kernel, by its symbol."""
    report = dump(file, "-res-usage", "-arch", arch)
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", report)
    return {name: Usage(*map(int, numbers)) for name, *numbers in found}


def predictions(files: list[Path], archs: list[str]) -> list[Row]:
    """Of every case whose kernel one of the files holds."""
    rows = []
    for file in files:
        for arch in archs:
            usage = usages(file, arch)
            here = [(case, name) for case in CASES if (name := instance(case, list(usage)))]
            if not here:
                continue
            wanted = ",".join(sorted({name for _, name in here}))
            text = dump(file, "-sass", "-arch", arch, "-fun", wanted)
            parts = re.split(r"Function : (\S+)", text)
            code = dict(zip(parts[1::2], parts[2::2], strict=True))
            for case, name in here:
                used = usage[name]
                rows.append(predict(case, arch, used.registers, used.shared, code[name]))
    order = [case.name for case in CASES]
    return sorted(rows, key=lambda row: (row.arch, order.index(row.case)))


def known() -> list[Row]:
    """The rows of the CSV."""
    return read(CSV, Row)


# ---- tables --------------------------------------------------------------------------------------

_COLUMNS = {
    "kernel": "{case}",
    "registers": "{registers}",
    "resident blocks": "{blocks}",
    "instructions an element": "{instructions:.0f}",
    "sectors used": "{sector_use:.0%}",
    "bytes": "{bytes_per_element:.3g}",
    "share of copy bandwidth, at most": "{predicted_share:.0%}",
}


def table(rows: list[Row]) -> list[str]:
    """The lines of docs/benchmarks.md."""
    lines = [[form.format(**asdict(row)) for form in _COLUMNS.values()] for row in rows]
    return markdown(list(_COLUMNS), lines)


def main() -> None:
    """Predicts, prints and writes the CSV."""
    parser = parser_of(__doc__)
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--arch", nargs="+", default=list(CHIPS), choices=list(CHIPS))
    parser.add_argument("--csv", type=Path, default=CSV)
    options = parser.parse_args()
    rows = predictions(options.files or built(), options.arch)
    if not rows:
        raise SystemExit("none of these files holds a kernel")
    write(options.csv, rows)
    for arch in options.arch:
        print(f"\n{CHIPS[arch].name}, predicted\n")
        print("\n".join(table([row for row in rows if row.arch == arch])))


if __name__ == "__main__":
    main()
