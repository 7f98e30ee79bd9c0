"""A thread of a kernel, run from its machine code as ``cuobjdump -sass`` prints it, sm_75 to sm_90.

Integers are computed, so that the thread takes the branches that its arguments decide. A result in
floating point is 1, which is on no slow path, and so is what tensors hold. The control bits of each
instruction say which scoreboard it clears and which it waits for: from them comes the time.
"""

from __future__ import annotations

import re
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

WORD, ONE, DOUBLE_ONE, STORED = 0xFFFFFFFF, 0x3F800000, 0x3FF00000 << 32, 0x3F803F80
TENSOR = 40  # a tensor begins at its number times 2^40; tables lie below
_FIXED_CYCLES = 30  # until shared memory, a shuffle or a special function answers
_WITHOUT_RESULT = (
    *("ATOMS", "BAR", "BMOV", "BREAK", "BSSY", "BSYNC", "CCTL", "DEPBAR", "ERRBAR", "MEMBAR"),
    *("NOP", "RED", "STL", "STS", "WARPSYNC", "YIELD"),
)
_SIZES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


class Instruction(NamedTuple):
    """`clears`: the scoreboard that its result clears, or 7; `waits`: a bit for each scoreboard."""

    guard: str
    op: str
    kinds: tuple[str, ...]
    operands: tuple[str, ...]
    stall: int
    clears: int
    waits: int

    @property
    def fp64(self) -> bool:
        double = {"F64", "RCP64H", "RSQ64H"} & {*self.kinds}
        return bool(double) or self.op in ("DADD", "DMUL", "DFMA", "DSETP")


_LINE = re.compile(
    r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z]\w*)([.\w]*)\s*([^;]*?)\s*;"
    r"\s*/\* 0x[0-9a-f]{16} \*/\s*/\* 0x([0-9a-f]{16}) \*/"
)


def parse(text: str) -> dict[int, Instruction]:
    """The instructions of a function by address. Control bits, from bit 41 of the second word on:
    stall cycles (4), yield, scoreboards of the result and of the operands (3 each), waits (6)."""
    code = {}
    for address, guard, op, kinds, operands, word in _LINE.findall(text):
        control = int(word, 16) >> 41
        code[int(address, 16)] = Instruction(
            guard or "PT",
            op,
            tuple(kinds.split(".")[1:]),
            tuple(re.findall(r"[^\s,][^,]*", operands.replace(".reuse", ""))),
            stall=control & 15,
            clears=control >> 5 & 7,
            waits=control >> 11 & 63,
        )
    return code


class Scene(NamedTuple):
    """What a thread finds: its place, the kernel's arguments from `base` of the constant bank on,
    the bytes of tables that are not zero, and how many cycles memory and the L2 cache take."""

    block: int
    blocks: int
    threads: int
    base: int
    cycles: int
    l2_cycles: int
    arguments: bytes
    memory: Mapping[int, int] = MappingProxyType({})
    in_l2: int = -1  # the number of a tensor that is there


class Access(NamedTuple):
    tensor: int
    address: int
    size: int


# ---- integers ------------------------------------------------------------------------------------


def _signed(value: int, bits: int = 32) -> int:
    value &= (1 << bits) - 1
    return value - (value >> bits - 1 << bits)


def _multiply_add(kinds: tuple[str, ...], x: list[int], carries: list[bool]) -> int:
    a, b = x[0] & WORD, x[1] & WORD
    if {"WIDE", "HI"} & {*kinds} and "U32" not in kinds:
        a, b = _signed(a), _signed(b)
    total = a * b + x[2] + sum(carries)
    return total >> 32 if "HI" in kinds else total


def _shift_add(kinds: tuple[str, ...], x: list[int], carries: list[bool]) -> int:
    low, added, *high, shift = x
    if "HI" not in kinds:
        return (low << shift & WORD) + added
    both = high[0] << 32 | low & WORD if high else _signed(low)  # SX32
    return (both << shift >> 32 & WORD) + added + sum(carries)


def _shift(kinds: tuple[str, ...], x: list[int], _: list[bool]) -> int:
    low, by, high = x
    by = by & 31 if "W" in kinds else min(by & WORD, 63 if {"U64", "S64"} & {*kinds} else 32)
    both = high << 32 | low & WORD
    both = _signed(both, 64) if {"S32", "S64"} & {*kinds} else both
    return (both << by if kinds[0] == "L" else both >> by) >> 32 * ("HI" in kinds)


def _logic(_: tuple[str, ...], x: list[int], __: list[bool]) -> int:
    a, b, c, table = x
    value = 0
    for row in range(8):
        if table >> row & 1:
            value |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return value & WORD


def _permute(_: tuple[str, ...], x: list[int], __: list[bool]) -> int:
    pool = (x[0] & WORD | (x[2] & WORD) << 32).to_bytes(8, "little")
    chosen = [x[1] >> 4 * i & 15 for i in range(4)]
    return sum(
        (pool[n & 7] if n < 8 else 255 * (pool[n & 7] >> 7)) << 8 * i for i, n in enumerate(chosen)
    )


def _extreme(kinds: tuple[str, ...], x: list[int], least: list[bool]) -> int:
    values = [value & WORD if "U32" in kinds else _signed(value) for value in x]
    return min(values) if least[0] else max(values)


_Compute = Callable[[tuple[str, ...], list[int], list[bool]], int]
# Of an instruction's kinds, its operands, and the predicates behind them. The threads of a warp
# hold the same, and so a shuffle is a move.
_INTEGER: dict[str, _Compute] = {
    **dict.fromkeys(("MOV", "LDC", "R2UR", "REDUX", "SHFL"), lambda _, x, __: x[0]),
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


# ---- a thread ------------------------------------------------------------------------------------


def _is_predicate(text: str) -> bool:
    return re.fullmatch(r"!?U?P[\dT]", text) is not None


def _float_bits(number: float) -> int:
    return int.from_bytes(struct.pack("<f", number), "little")


class Thread:
    """One that has run to its end.

    Attributes:
        accesses: of tensors, in order.
        issued: instructions: "main", "fp64", and "slow", in functions that returned.
        rounds: of each time that it waited for a tensor, the loads in flight and their bytes.
        cycles: from its first instruction to its last, with no other thread about.
    """

    def __init__(self, code: dict[int, Instruction], scene: Scene, index: int) -> None:
        self.scene, self.index = scene, index
        self.registers: dict[str, int] = defaultdict(int)
        self.flags: dict[str, bool] = defaultdict(bool, PT=True, UPT=True)
        self.accesses: list[Access] = []
        self.issued: Counter[str] = Counter()
        self.rounds: list[tuple[int, int]] = []
        self.cycles = 0
        self._pending: list[tuple[int, int, int]] = []  # scoreboard, when, bytes of a tensor
        pc, called = 0, 0
        for _ in range(1_000_000):
            one = code[pc]
            pc += 16
            self._wait(one)
            self.issued["fp64" if one.fp64 else "main"] += 1
            if not self._holds(one.guard):
                continue
            if one.op in ("BRA", "CALL", "RET", "EXIT"):
                taken = all(self._holds(text) for text in one.operands if _is_predicate(text))
                if not taken or "DIV" in one.kinds:  # where the threads of a warp went apart
                    continue
                if one.op == "EXIT":
                    return
                if one.op == "CALL":
                    called = self.issued["main"]
                if one.op == "RET":
                    self.issued["slow"] += self.issued["main"] - called
                    self.issued["main"] = called
                pc = self._get(one.operands[-1].split()[0])
            elif one.op in ("LDG", "LD", "STG", "ST", "ATOMG", "ATOM"):
                self._move(one)
            elif one.op not in _WITHOUT_RESULT:
                self._compute(one)
        raise RuntimeError("a thread that does not end")

    def _wait(self, one: Instruction) -> None:
        boards = [board for board in range(6) if one.waits >> board & 1]
        awaited = [each for each in self._pending if each[0] in boards]
        if one.op == "DEPBAR":  # until all but the last few
            boards = [int(one.operands[0][2:])]
            awaited = [each for each in self._pending if each[0] in boards]
            awaited = awaited[: len(awaited) - int(one.operands[1], 16)]
        until = max((when for _, when, _ in awaited), default=self.cycles)
        if until > self.cycles and any(size for *_, size in awaited):
            sizes = [size for _, when, size in self._pending if size and when > self.cycles]
            self.rounds.append((len(sizes), sum(sizes)))
        self._pending = [each for each in self._pending if each[0] not in boards or each[1] > until]
        self.cycles = max(self.cycles, until) + max(1, one.stall)
        if one.clears != 7 and one.op not in ("LDG", "LD"):
            self._pending.append((one.clears, self.cycles + _FIXED_CYCLES, 0))

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
        if one.op.startswith("ST"):
            return
        scene = self.scene
        near = tensor in (0, scene.in_l2)
        if not atomic:
            when = self.cycles + (scene.l2_cycles if near else scene.cycles)
            self._pending.append((one.clears, when, size if tensor else 0))
        stored = (STORED >> 8 * (i % 4) & 255 for i in range(size))
        held = stored if tensor else (scene.memory.get(address + i, 0) for i in range(size))
        value = 0 if atomic else int.from_bytes(bytes(held), "little")
        self._set(next(t for t in one.operands if not _is_predicate(t)), value, max(1, size // 4))

    def _compute(self, one: Instruction) -> None:
        op, kinds, texts = one.op, one.kinds, list(one.operands)
        if op.startswith("U"):  # for the whole warp
            op = op[1:]
        if op in ("PLOP3", "P2R", "P2UR", "R2P", "VOTE", "VOTEU"):
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
        if op in _INTEGER or op in ("S2R", "S2UR"):
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
        self, op: str, kinds: tuple[str, ...], texts: list[str], outs: list[str], flags: list[bool]
    ) -> None:
        """Floating-point numbers too as integers: none is negative."""
        wide = op == "DSETP"
        a, b = (_signed(self._get(text, 1 + wide), 32 << wide) for text in texts)
        if "U32" in kinds:
            a, b = a & WORD, b & WORD
        name = kinds[0].removesuffix("U")
        found = name == "NUM"  # not NAN
        if name not in ("NUM", "NAN"):
            found = getattr(a, f"__{name.lower()}__")(b)
        if "EX" in kinds and a == b:  # the upper words; the lower ones are compared already
            found = flags[-1]
        for out, value in zip(outs, (found, not found), strict=False):
            join = {"OR": bool.__or__, "XOR": bool.__xor__}.get(kinds[-1 - ("EX" in kinds)])
            self._set_flags([out], (join or bool.__and__)(bool(value), flags[0]))

    def _float(self, op: str, kinds: tuple[str, ...], texts: list[str]) -> tuple[int, int]:
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
