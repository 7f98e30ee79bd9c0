"""The predictions from machine code: its parser, the thread that is run, and the arithmetic.

That no kernel gets worse, test_cuda_code.py says, which compiles them.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BASE = 0x210


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


@pytest.fixture
def sass(load):
    return load("harness.sass")


@pytest.fixture
def static(load):
    return load("cuda_static")


def dumped(*lines):
    """As cuobjdump prints it. A line may be (text, stall, scoreboard that it clears, waits)."""
    text = ["\t\tFunction : kernel"]
    for i, line in enumerate(lines):
        code, stall, clears, waits = line if isinstance(line, tuple) else (line, 1, 7, 0)
        control = (stall | clears << 5 | 7 << 8 | waits << 11) << 41
        text.append(f"        /*{16 * i:04x}*/    {code} ;    /* 0x{i:016x} */")
        text.append(f"                                /* 0x{control:016x} */")
    return "\n".join(text)


@pytest.fixture
def run(sass):
    """run(lines, ...): a thread after its end."""

    def run(*lines, index=0, arguments=b"", memory=None):
        scene = sass.Scene(5, 9, 256, BASE, 1000, 200, arguments, memory or {})
        return sass.Thread(sass.parse(dumped(*lines, "EXIT")), scene, index)

    return run


def test_instructions_and_their_control_bits(sass):
    code = sass.parse(
        """
        /*0050*/                   LDG.E R2, desc[UR12][R2.64+0x18] ;  /* 0x0000180c02027981 */
                                                                       /* 0x000ea4000c1ee900 */
        /*0060*/              @!P0 FSETP.NEU.AND P0, PT, R2.reuse, RZ, PT ; /* 0x000000ff0000720b */
                                                                       /* 0x004fd80003f05000 */"""
    )
    load, compare = code[0x50], code[0x60]
    assert load[:4] == ("PT", "LDG", ("E",), ("R2", "desc[UR12][R2.64+0x18]"))
    assert (load.stall, load.clears, load.waits) == (2, 2, 0)
    assert compare[:3] == ("!P0", "FSETP", ("NEU", "AND"))
    assert compare.operands == ("P0", "PT", "R2", "RZ", "PT")
    assert (compare.stall, compare.clears, compare.waits) == (12, 7, 0b100)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["MOV R1, -0x1", "IADD3 R0, P0, R1, 0x1, RZ", "IADD3.X R0, RZ, RZ, RZ, P0, !PT"], 1),
        (["MOV R1, 0x5", "IADD3 R2, P0, -R1, 0x5, RZ", "IMAD.X R0, RZ, RZ, ~RZ, P0"], 0),
        (["MOV R1, -0x3", "IMAD.WIDE R0, R1, 0x8, RZ"], -24),
        (["MOV R2, 0x10001", "IMAD.WIDE.U32 R0, R2, 0x10000, RZ"], 0x1_0001_0000),
        (["MOV R1, 0x80000000", "IMAD.HI.U32 R0, R1, 0x6, RZ"], 3),
        (["MOV R4, 0x1", "LEA.HI.X R0, RZ, 0x2, R4, 0x3, !PT"], 10),
        (["MOV R4, -0x1", "LEA.HI.X.SX32 R0, R4, 0x5, 0x1, !PT"], 4),
        (["MOV R4, -0x8", "SHF.R.S32.HI R0, RZ, 0x1f, R4"], 0xFFFFFFFF),
        (["MOV R4, 0x3", "SHF.L.U64.HI R0, -0x1, 0x1, R4"], 7),
        (["MOV R4, 0x180", "PRMT R0, R4, 0x9910, RZ"], 0x180),
        (["MOV R4, 0xff80", "PRMT R0, R4, 0x9910, RZ"], 0xFFFFFF80),
        (["MOV R4, 0x6", "LOP3.LUT R0, R4, 0x3, RZ, 0xc0, !PT"], 2),
        (["LOP3.LUT P1, RZ, RZ, 0xf, RZ, 0xc0, !PT", "SEL R0, 0x1, 0x2, P1"], 2),
        (["VIMNMX R0, -0x1, 0x4, !PT"], 4),
        (["UMOV UR4, 0x7", "R2UR UR5, R3", "IMAD.U32 R0, RZ, RZ, UR4"], 7),
        (["HFMA2.MMA R0, -RZ, RZ, 0, 5.9604644775390625e-08"], 1),
        (["S2R R0, SR_CTAID.X"], 5),
        (["IMAD.MOV.U32 R0, RZ, RZ, c[0x0][0xc]"], 9),
        ([f"LDC.64 R0, c[0x0][{BASE + 8:#x}]"], 77 << 32),
        (["FADD R0, R1, R2"], 0x3F800000),
        (["PLOP3.LUT P2, PT, PT, PT, PT, 0x80, 0x8", "SEL R0, 0x1, 0x2, !P2"], 2),
        (["VOTEU.ANY UR4, UPT, PT", "IMAD.U32 R0, RZ, RZ, UR4"], 0xFFFFFFFF),
        (["R2P PR, 0x5, 0x6", "P2R R0, PR, RZ, 0x7f"], 4),
        (
            [
                "UISETP.NE.AND UP1, UPT, UR4, 0x1, UPT",
                "UP2UR UR5, UPR, URZ, 0x7f",
                "IMAD.U32 R0, RZ, RZ, UR5",
            ],
            2,
        ),
        (["@!PT MOV R0, 0x1"], 0),
        (["BRA 0x20", "MOV R0, 0x1", "NOP"], 0),
        (
            [
                "MOV R4, 0x30",
                "CALL.REL.NOINC 0x40",
                "EXIT",
                "EXIT",
                "MOV R0, 0x4",
                "RET.REL.NODEC R4 0x0",
            ],
            4,
        ),
    ],
)
def test_a_thread_computes_integers(run, lines, expected):
    thread = run(*lines, arguments=bytes(12) + b"\x4d\0\0\0")
    words = 2 if expected < 0 or expected > 0xFFFFFFFF else 1
    value = thread.registers["R0"] | (thread.registers["R1"] << 32 if words == 2 else 0)
    assert value == expected & (1 << 32 * words) - 1


@pytest.mark.parametrize(
    ("kinds", "a", "b", "expected"),
    [
        ("LT", -1, 0, True),
        ("LT", 1 << 40, 2, False),
        ("GE", 1 << 32, 1 << 32, True),
        ("NE", 1 << 32, 1, True),
        ("EQ", 7, 7, True),
    ],
)
def test_a_thread_compares_two_words(run, kinds, a, b, expected):
    low, high = ((value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF) for value in (a, b))
    thread = run(
        f"MOV R2, {low[0]:#x}",
        f"MOV R3, {low[1]:#x}",
        f"ISETP.{kinds}.U32.AND P0, PT, R2, {high[0]:#x}, PT",
        f"ISETP.{kinds}.AND.EX P0, P1, R3, {high[1]:#x}, PT, P0",
    )
    assert (thread.flags["P0"], thread.flags["P1"]) == (expected, not expected)


def test_integers_are_divided_by_the_reciprocal(run):
    """As nvcc does, 1000 / 7: the quotient is right but for one, which it then corrects."""
    thread = run(
        *("MOV R0, 0x7", "MOV R8, 0x3e8", "I2F.U32.RP R4, R0", "MUFU.RCP R4, R4"),
        *("IADD3 R2, R4, 0xffffffe, RZ", "F2I.FTZ.U32.TRUNC.NTZ R3, R2", "MOV R2, RZ"),
        *("IADD3 R5, RZ, -R3, RZ", "IMAD R5, R5, R0, RZ", "IMAD.HI.U32 R3, R3, R5, R2"),
        "IMAD.HI.U32 R3, R3, R8, RZ",
    )
    assert thread.registers["R3"] in (141, 142)


ADDRESS = ("S2R R0, SR_TID.X", "UMOV UR4, 0x0", "UMOV UR5, 0x300", "IMAD.SHL.U32 R0, R0, 0x10, RZ")
PLACE = "[R0.U32+UR4+0x200]"  # of tensor 3


def test_loads_that_are_in_flight_when_a_thread_waits(run):
    thread = run(
        *ADDRESS,
        (f"LDG.E.128 R4, desc[UR6]{PLACE}", 2, 0, 0),
        (f"LDG.E.64 R8, desc[UR6]{PLACE}", 2, 1, 0),
        (f"@!PT LDG.E R2, desc[UR6]{PLACE}", 2, 1, 0),
        ("FADD R4, R4, R5", 4, 7, 0b1),
        ("FADD R8, R8, R9", 4, 7, 0b10),
        ("DADD R2, R2, R2", 4, 7, 0),
        (f"STG.E.128 desc[UR6]{PLACE}, R4", 1, 7, 0),
        index=33,
    )
    assert [access[:2] for access in thread.accesses] == [(3, (3 << 40) + 0x410)] * 3
    assert [access.size for access in thread.accesses] == [16, 8, 16]
    # The second answers while the thread waits for the first, but for its two cycles.
    assert thread.rounds == [(2, 24)] or thread.rounds == [(2, 24), (1, 8)]
    assert 1000 < thread.cycles < 1030
    assert thread.issued == {"main": 11, "fp64": 1}


def test_tables_are_read_and_answer_sooner(run):
    thread = run(
        "MOV R3, RZ",
        "MOV R2, 0x100",
        ("LDG.E.U16 R0, [R2]", 1, 0, 0),
        ("NOP", 1, 7, 1),
        memory={0x100: 5, 0x101: 1, 0x102: 9},
    )
    assert thread.registers["R0"] == 0x105
    assert 200 < thread.cycles < 210
    assert thread.rounds == []
    assert thread.accesses == []


@pytest.mark.parametrize(
    ("apart", "expected"), [(0x10, (512, 16)), (0x20, (512, 32)), (0x0, (16, 1)), (0x2, (64, 3))]
)
def test_bytes_and_sectors_of_a_request(run, sass, apart, expected):
    lines = (*ADDRESS[:3], f"IMAD.SHL.U32 R0, R0, {apart:#x}, RZ", f"LDG.E.128 R4, {PLACE}")
    assert sass.traffic(run(*lines, index=32), run(*lines, index=33)) == expected


def test_what_is_not_known_is_an_error(run):
    with pytest.raises(NotImplementedError, match="BREV"):
        run("BREV R0, R1")


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "blocks"),
    [
        ("sm_90", 256, 64, 0, 4),
        ("sm_90", 256, 109, 0, 2),
        ("sm_90", 256, 136, 0, 1),
        ("sm_90", 128, 32, 0, 16),
        ("sm_90", 128, 32, 16384, 13),
        ("sm_75", 256, 32, 0, 4),
        ("sm_75", 256, 32, 20000, 3),
    ],
)
def test_resident_blocks(static, arch, threads, registers, shared, blocks):
    assert static.resident_blocks(static.CHIPS[arch], threads, registers, shared) == blocks


def test_the_instance_of_a_case(static):
    case = next(case for case in static.CASES if case.name == "adam fp32 unscaled")
    names = [
        f"x{case.symbol}Lj{mask}ELNS_7CompactE{compact}E"
        for mask in (778, 770, 0)
        for compact in range(3)
    ]
    assert static.instance(case, names) == f"x{case.symbol}Lj770ELNS_7CompactE0E"
    for name, compact in (("adam bf16 8bit", 1), ("adam bf16 split 8bit", 2)):
        case = next(case for case in static.CASES if case.name == name)
        assert static.instance(case, names) == f"x{case.symbol}Lj778ELNS_7CompactE{compact}E"
    assert static.instance(case, ["other"]) is None


def test_every_measured_case_is_predicted(load, static):
    step, results = load("step"), load("harness.results")
    modes = ["", *(f" {mode}" for mode in load("harness.routes").MODES), ", metered"]
    known = {case.name for case in static.CASES}
    rows = []
    for case in load("harness.cases").cases("cuda"):
        for mode in modes if case.optimizer == "AdamW" and case.precision == "bf16" else [""]:
            rows += results.rows_of(
                step.torch.device("cpu"), {f"ampfuse{mode}": [1.0, 1.0]}, **case.columns
            )
    for row in rows:
        assert known >= {*static.passes(row)}, row
    assert {tuple(static.passes(row)) for row in rows} >= {("inspect bf16", "adam bf16 split 8bit")}
    layers = [results.Row(**{**vars(rows[0]), "case": name}) for name in load("layers").LAYERS]
    assert all(known >= {*static.passes(row)} for row in layers)


def test_measured_beside_predicted(load, static):
    row = load("harness.results").rows_of(
        load("torch").device("cpu"),
        {"ampfuse": [2.0, 2.0], "copy": [1.0, 1.0]},
        params=1000,
        bytes_per_param={"ampfuse": 30.0, "copy": 30.0},
        case="c",
        optimizer="AdamW",
        dtype="bf16",
        does="clip",
    )
    row = [type(one)(**{**vars(one), "device": "cuda", "hardware": "NVIDIA H200"}) for one in row]
    predicted = {
        name: dict.fromkeys(static.Row.__annotations__, 0) for name in static.passes(row[0])
    }
    for name, share, moved in zip(predicted, (1.0, 0.7), (2, 28), strict=True):
        predicted[name] |= {"case": name, "arch": "sm_90"}
        predicted[name] |= {"predicted_share": share, "bytes_per_element": moved}
    lines = static.compare(row, [static.Row(**columns) for columns in predicted.values()])
    assert lines[2:] == ["| c | ampfuse | H200 | 71% | 50% | 0.70 |"]


def test_the_documentation_has_the_table_of_the_csv(load, static):
    rows = load("harness.results").read(static.CSV, static.Row)
    lines = static.table([row for row in rows if row.arch == "sm_90"])
    assert "\n".join(lines) in (ROOT / "docs/benchmarks.md").read_text()
