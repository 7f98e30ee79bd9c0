"""A thread of a kernel, run from its machine code as ``cuobjdump -sass`` prints it, sm_75 to sm_90.

Integers are computed, so that the thread takes the branches that its arguments decide. A result in
floating point is 1, which is on no slow path, and so is what tensors hold.
"""

from __future__ import annotations

import operator
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

WORD, ONE, DOUBLE_ONE, STORED = 0xFFFFFFFF, 0x3F800000, 0x3FF00000 << 32, 0x3F803F80
TENSOR = 40  # a tensor begins at its number times 2^40; tables lie below
_WITHOUT_RESULT = (
    *("ATOMS", "BAR", "BMOV", "BREAK", "BSSY", "BSYNC", "CCTL", "DEPBAR", "ERRBAR", "MEMBAR"),
    *("NOP", "RED", "STL", "STS", "WARPSYNC", "YIELD"),
)
_SIZES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
Kinds = tuple[str, ...]


class Instruction(NamedTuple):
    guard: str
    op: str
    kinds: Kinds
    operands: tuple[str, ...]

    @property
    def fp64(self) -> bool:
        double = {"F64", "RCP64H", "RSQ64H"} & {*self.kinds}
        return bool(double) or self.op in ("DADD", "DMUL", "DFMA", "DSETP")


_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z]\w*)([.\w]*)\s*([^;]*?)\s*;")


def parse(text: str) -> dict[int, Instruction]:
    """The instructions of a function by address."""
    code = {}
    for address, guard, op, kinds, operands in _LINE.findall(text):
        operands = tuple(re.findall(r"[^\s,][^,]*", operands.replace(".reuse", "")))
        one = Instruction(guard or "PT", op, tuple(kinds.split(".")[1:]), operands)
        code[int(address, 16)] = one
    return code


class Scene(NamedTuple):
    """What a thread finds: its place, the kernel's arguments from `base` of the constant bank on,
    and the bytes of tables that are not zero."""

    block: int
    blocks: int
    threads: int
    base: int
    arguments: bytes
    memory: Mapping[int, int] = MappingProxyType({})


class Access(NamedTuple):
    tensor: int
    address: int
    size: int


# ---- integers ------------------------------------------------------------------------------------


def _signed(value: int, bits: int = 32) -> int:
    value &= (1 << bits) - 1
    return value - (value >> bits - 1 << bits)


def _multiply_add(kinds: Kinds, x: list[int], carries: list[bool]) -> int:
    a, b = x[0] & WORD, x[1] & WORD
    if {"WIDE", "HI"} & {*kinds} and "U32" not in kinds:
        a, b = _signed(a), _signed(b)
    total = a * b + x[2] + sum(carries)
    return total >> 32 if "HI" in kinds else total


def _shift_add(kinds: Kinds, x: list[int], carries: list[bool]) -> int:
    low, added, *high, shift = x
    if "HI" not in kinds:
        return (low << shift & WORD) + added
    both = high[0] << 32 | low & WORD if high else _signed(low)  # SX32
    return (both << shift >> 32 & WORD) + added + sum(carries)


def _shift(kinds: Kinds, x: list[int], _: list[bool]) -> int:
    low, by, high = x
    by = by & 31 if "W" in kinds else min(by & WORD, 63 if {"U64", "S64"} & {*kinds} else 32)
    both = high << 32 | low & WORD
    both = _signed(both, 64) if {"S32", "S64"} & {*kinds} else both
    return (both << by if kinds[0] == "L" else both >> by) >> 32 * ("HI" in kinds)


def _logic(_: Kinds, x: list[int], __: list[bool]) -> int:
    a, b, c, table = x
    value = 0
    for row in range(8):
        if table >> row & 1:
            value |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return value & WORD


def _permute(_: Kinds, x: list[int], __: list[bool]) -> int:
    pool = (x[0] & WORD | (x[2] & WORD) << 32).to_bytes(8, "little")
    chosen = [x[1] >> 4 * i & 15 for i in range(4)]
    return sum(
        (pool[n & 7] if n < 8 else 255 * (pool[n & 7] >> 7)) << 8 * i for i, n in enumerate(chosen)
    )


def _extreme(kinds: Kinds, x: list[int], least: list[bool]) -> int:
    values = [value & WORD if "U32" in kinds else _signed(value) for value in x]
    return min(values) if least[0] else max(values)


# Of an instruction's kinds, its operands, and the predicates behind them. The threads of a warp
# hold the same, and so a shuffle is a move.
_INTEGER: dict[str, Callable[[Kinds, list[int], list[bool]], int]] = {
    **dict.fromkeys(("MOV", "LDC", "R2UR", "REDUX", "SHFL", "S2R"), lambda _, x, __: x[0]),
    **dict.fromkeys(("IADD3", "VIADD"), lambda _, x, carries: sum(x) + sum(carries)),
    **dict.fromkeys(("IMNMX", "VIMNMX", "VIMNMX3"), _extreme),
    "VIADDMNMX": lambda kinds, x, least: _extreme(kinds, [x[0] + x[1], x[2]], least),
    "IMAD": _multiply_add,
    "LEA": _shift_add,
    "SHF": _shift,
    "LOP3": _logic,
    "PRMT": _permute,
    "SEL": lambda _, x, first: x[0] if first[0] else x[1],
    "IABS": lambda _, x, __: abs(_signed(x[0])),
    "POPC": lambda _, x, __: (x[0] & WORD).bit_count(),
    "FLO": lambda _, x, __: (x[0] & WORD).bit_length() - 1,
    "CS2R": lambda _, x, __: 0,
    "LDL": lambda _, x, __: 0,
}


_JOINS = {"AND": operator.and_, "OR": operator.or_, "XOR": operator.xor}


# ---- a thread ------------------------------------------------------------------------------------


def _is_predicate(text: str) -> bool:
    return re.fullmatch(r"!?U?P[\dT]", text) is not None


def _float_bits(number: float) -> int:
    return int.from_bytes(struct.pack("<f", number), "little")


class Thread:
    """One that has run to its end.

    Attributes:
        accesses: of tensors, in order.
        issued: instructions.
        fp64: how many of these are in FP64.
    """

    def __init__(self, code: dict[int, Instruction], scene: Scene, index: int) -> None:
        self.scene, self.index = scene, index
        self.registers: dict[str, int] = defaultdict(int)
        self.flags: dict[str, bool] = defaultdict(bool, PT=True, UPT=True)
        self.accesses: list[Access] = []
        self.issued = self.fp64 = pc = 0
        while self.issued < 1_000_000:
            one = code[pc]
            pc += 16
            self.fp64 += one.fp64
            self.issued += 1
            if not self._holds(one.guard) or one.op in _WITHOUT_RESULT:
                continue
            if one.op in ("BRA", "CALL", "EXIT"):
                taken = all(self._holds(text) for text in one.operands if _is_predicate(text))
                if not taken or "DIV" in one.kinds:  # where the threads of a warp went apart
                    continue
                if one.op == "EXIT":
                    return
                pc = self._get(one.operands[-1])
            elif one.op in ("LDG", "LD", "STG", "ST", "ATOMG", "ATOM"):
                self._move(one)
            else:
                self._compute(one)
        raise RuntimeError("a thread that does not end")

    def _holds(self, text: str) -> bool:
        return self.flags[text.lstrip("!")] != text.startswith("!")

    def _get(self, text: str, words: int = 1) -> int:
        """An operand. -x is ~x + 1, not masked: a sum then has the carry that hardware has."""
        mask = (1 << 32 * words) - 1
        sign, body = re.fullmatch(r"([-~]?)\|?([^|]*)\|?", text).groups()
        if body.startswith("0x"):
            value = int(body, 16)
            return -value & mask if sign else value
        if body.startswith("c["):
            bank, place = re.fullmatch(r"c\[(\w+)\]\[(.+)\]", body).groups()
            value = self._constant(bank, sum(map(self._get, place.split("+")))) & mask
        elif found := re.match(r"(U?R)(\d+|Z)", body):
            file, number = found.groups()
            names = [f"{file}{int(number) + i}" for i in range(words)] if number != "Z" else []
            value = sum(self.registers[name] << 32 * i for i, name in enumerate(names))
        elif body.startswith("S"):
            known = {"SR_TID.X": self.index, "SR_CTAID.X": self.scene.block}
            value = known.get(body, self.index % 32 if body == "SR_LANEID" else 0)
        else:
            value = _float_bits(float(text.replace("QNAN", "nan")))
            return value << 32 * (words - 1)  # near enough to the double
        if "|" in text:
            return value & mask >> 1
        return (value ^ mask) + (sign == "-") if sign else value

    def _constant(self, bank: str, place: int) -> int:
        scene = self.scene
        if bank == "0x0" and place < 24:
            return (scene.threads, 1, 1, scene.blocks, 1, 1)[place // 4]
        place -= scene.base
        inside = bank == "0x0" and place >= 0
        return int.from_bytes(scene.arguments[place : place + 8], "little") if inside else 0

    def _set(self, text: str, value: int, words: int = 1) -> None:
        file, number = re.match(r"(U?R)(\d+|Z)", text).groups()
        for i in range(words if number != "Z" else 0):
            self.registers[f"{file}{int(number) + i}"] = value >> 32 * i & WORD

    def _move(self, one: Instruction) -> None:
        """Between registers and global memory."""
        place = next(text for text in one.operands if text.endswith("]"))
        terms = re.search(r"\[([^\[]+)\]$", place)[1].split("+")
        known = [_signed(int(term, 16)) for term in terms if "0x" in term]
        based = [self._get(t, 1 if "U32" in t else 2) for t in terms if "0x" not in t]
        address = sum(known + based) & (1 << 64) - 1
        size = next((_SIZES[kind] for kind in one.kinds if kind in _SIZES), 4)
        tensor, atomic = address >> TENSOR, one.op.startswith("ATOM")
        if tensor and not atomic:
            self.accesses.append(Access(tensor, address, size))
        if not one.op.startswith("ST"):
            stored = (STORED >> 8 * (i % 4) & 255 for i in range(size))
            held = (
                stored if tensor else (self.scene.memory.get(address + i, 0) for i in range(size))
            )
            value = 0 if atomic else int.from_bytes(bytes(held), "little")
            target = next(text for text in one.operands if not _is_predicate(text))
            self._set(target, value, max(1, size // 4))

    def _compute(self, one: Instruction) -> None:
        kinds, texts = one.kinds, list(one.operands)
        op = one.op.removeprefix("U")  # for the whole warp
        if op in ("PLOP3", "P2R", "R2P", "VOTE", "VOTEU", "P2UR"):
            return self._move_flags(op, texts)
        outs, carries, target = [], [], None
        for _ in range(2):  # flags stand before the result or behind it
            while texts and _is_predicate(texts[0]):
                outs.append(texts.pop(0))
            if target is None and not op.endswith("SETP") and op != "FCHK":
                target = texts.pop(0)
        while texts and _is_predicate(texts[-1]):
            carries.insert(0, self._holds(texts.pop()))
        if op.endswith("SETP"):
            return self._compare(op, kinds, texts, outs, carries)
        words = 2 if "64" in kinds or "WIDE" in kinds or (op == "CS2R" and "32" not in kinds) else 1
        if op in _INTEGER or op == "S2UR":
            x = [self._get(text, words if op == "LDC" else 1) for text in texts]
            if op == "IMAD" and {"WIDE", "HI"} & {*kinds}:
                x[2] = self._get(texts[2], 2)
            value = _INTEGER.get(op, _INTEGER["MOV"])(kinds, x, carries)
        elif op == "LDS":  # ones, but for bytes: a flag that some block sets
            words = 4 if "128" in kinds else words
            value = 0 if "U8" in kinds else sum(ONE << 32 * i for i in range(words))
        else:
            value, words = self._float(op, kinds, texts)
        if target is not None:
            self._set(target, value, words)
        high = value >> 32 * words
        self._set_flags(outs, *((value != 0,) if op == "LOP3" else (high > 0, high > 1)))

    def _move_flags(self, op: str, texts: list[str]) -> None:
        if op == "PLOP3":
            row = sum(self._holds(text) << 2 - i for i, text in enumerate(texts[2:5]))
            found = [int(table, 16) >> row & 1 == 1 for table in texts[5:]]
            self._set_flags(texts[:2], *found)
        elif op in ("VOTE", "VOTEU"):  # all of a warp as this thread
            vote = self._holds(texts.pop())
            for text in texts:
                if _is_predicate(text):
                    self._set_flags([text], vote)
                else:
                    self._set(text, WORD * vote)
        else:
            bits = [i for i in range(7) if int(texts[-1], 16) >> i & 1]
            if op in ("P2R", "P2UR"):
                name = texts[1][:-1]  # of PR or UPR
                return self._set(texts[0], sum(self.flags[f"{name}{i}"] << i for i in bits))
            word = self._get(texts[1])
            self._set_flags([f"P{i}" for i in bits], *(word >> i & 1 == 1 for i in bits))

    def _set_flags(self, names: list[str], *values: bool) -> None:
        self.flags |= {n: v for n, v in zip(names, values, strict=False) if n not in ("PT", "UPT")}

    def _compare(
        self, op: str, kinds: Kinds, texts: list[str], outs: list[str], flags: list[bool]
    ) -> None:
        """Floating-point numbers too as integers: none is negative."""
        wide = op == "DSETP"
        a, b = (_signed(self._get(text, 1 + wide), 32 << wide) for text in texts)
        if "U32" in kinds:
            a, b = a & WORD, b & WORD
        relation = kinds[0].removesuffix("U").lower()
        if "EX" in kinds and a == b:  # the upper words; the lower ones are compared already
            found = flags[-1]
        else:  # a number is not NAN
            found = relation == "num" or (relation != "nan" and getattr(operator, relation)(a, b))
        join = next(_JOINS[kind] for kind in kinds[1:] if kind in _JOINS)
        self._set_flags(outs, join(found, flags[0]), join(not found, flags[0]))

    def _float(self, op: str, kinds: Kinds, texts: list[str]) -> tuple[int, int]:
        """1, but for what divides integers and moves constants."""
        if op == "HFMA2" and {text.strip("-") for text in texts[:2]} == {"RZ"}:
            return int.from_bytes(struct.pack("<2e", float(texts[3]), float(texts[2])), "little"), 1
        if op in ("I2F", "I2FP"):
            words = 2 if {"U64", "S64"} & {*kinds} else 1
            return _float_bits(float(self._get(texts[0], words))), 1
        if op == "F2I" or (op == "MUFU" and kinds[0] == "RCP"):
            bits = self._get(texts[0]) & WORD
            number = struct.unpack("<f", bits.to_bytes(4, "little"))[0]
            return (int(number), 1) if op == "F2I" else (_float_bits(1 / (number or 1)), 1)
        if op[0] not in "FHDM":
            raise NotImplementedError(" ".join([op, *kinds, *texts]))
        double = op[0] == "D" or kinds[:1] == ("F64",)
        return (DOUBLE_ONE, 2) if double else (ONE, 1)


def traffic(thread: Thread, neighbour: Thread) -> tuple[int, int]:
    """Of a warp whose other threads are as far apart as these two: the bytes that it asks for, and
    the sectors of 32 bytes that its requests touch."""
    asked = touched = 0
    for one, other in zip(thread.accesses, neighbour.accesses, strict=True):
        apart = other.address - one.address
        asked += 32 * min(one.size, abs(apart)) if apart else one.size
        first = one.address - thread.index % 32 * apart
        starts = [first + lane * apart for lane in range(32)]
        touched += len({at // 32 for start in starts for at in (start, start + one.size - 1)})
    return asked, touched
