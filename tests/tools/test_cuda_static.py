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


@pytest.fixture
def run(sass):
    """run(lines, ...): a thread after its end, of code as cuobjdump prints it."""

    def run(*lines, index=0, arguments=b"", memory=None):
        code = enumerate([*lines, "EXIT"])
        text = "\n".join(f"/*{16 * i:04x}*/    {line} ;    /* 0x0 */" for i, line in code)
        scene = sass.Scene(5, 9, 256, BASE, arguments, memory or {})
        return sass.Thread(sass.parse(text), scene, index)

    return run


def test_instructions(sass):
    code = sass.parse(
        """
        /*0050*/                   LDG.E R2, desc[UR12][R2.64+0x18] ;  /* 0x0000180c02027981 */
                                                                       /* 0x000ea4000c1ee900 */
        /*0060*/              @!P0 FSETP.NEU.AND P0, PT, R2.reuse, RZ, PT ; /* 0x000000ff0000720b */
                                                                       /* 0x004fd80003f05000 */"""
    )
    assert code == {
        0x50: ("PT", "LDG", ("E",), ("R2", "desc[UR12][R2.64+0x18]")),
        0x60: ("!P0", "FSETP", ("NEU", "AND"), ("P0", "PT", "R2", "RZ", "PT")),
    }


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


def test_accesses_and_instructions_are_counted(run):
    thread = run(
        *ADDRESS,
        f"LDG.E.128 R4, desc[UR6]{PLACE}",
        f"@!PT LDG.E R2, desc[UR6]{PLACE}",
        "DADD R2, R2, R2",
        f"STG.E.64 desc[UR6]{PLACE}, R4",
        index=33,
    )
    assert [access[:2] for access in thread.accesses] == [(3, (3 << 40) + 0x410)] * 2
    assert [access.size for access in thread.accesses] == [16, 8]
    assert (thread.issued, thread.fp64) == (9, 1)


def test_tables_are_read(run):
    memory = {0x100: 5, 0x101: 1, 0x102: 9}
    thread = run("MOV R3, RZ", "MOV R2, 0x100", "LDG.E.U16 R0, [R2]", memory=memory)
    assert thread.registers["R0"] == 0x105
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


def test_the_documentation_has_the_table_of_the_csv(load, static):
    rows = static.known()
    assert {row.case for row in rows} == {case.name for case in static.CASES}
    lines = static.table([row for row in rows if row.arch == "sm_90"])
    assert "\n".join(lines) in (ROOT / "docs/benchmarks.md").read_text()
