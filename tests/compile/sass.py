"""Reads machine code of sm_90a and follows the descriptors of wgmma operands back to their source.

A descriptor is 64 bits in two uniform registers: the low word holds the address in shared memory
(of 16-byte units), the high word the layout. ptxas 12.8.93, which triton 3.6 and 3.7 bundle for
sm_90, builds some from the wrong register: the stack pointer, a stale constant, or an unrelated
value. The product then reads other memory, in bounds or not.

``findings`` needs one cubin: it follows every word along all paths to its source.
``differences`` needs two cubins of the same PTX: it compares the descriptors that are constants.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import triton

MASK = 0xFFFFFFFF
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
STACK, SHARED = "stack", "shared"
_NONE: frozenset[str] = frozenset()


class Word(NamedTuple):
    """Abstract value of a 32-bit register: its constant if known, and the sources it is made of.

    ``may`` holds the sources on some path, ``must`` those on every path.
    """

    value: int | None
    may: frozenset[str]
    must: frozenset[str]


UNKNOWN = Word(None, frozenset(("unknown",)), _NONE)
State = dict[str, Word]


def constant(n: int) -> Word:
    return Word(n & MASK, _NONE, _NONE)


def source(name: str, value: int | None = None) -> Word:
    return Word(value, frozenset((name,)), frozenset((name,)))


def made_of(words: list[Word], value: int | None = None) -> Word:
    """Return the result of an instruction that reads ``words``."""
    may, must = _NONE, _NONE
    for w in words:
        may, must = may | w.may, must | w.must
    return Word(value, may, must)


def meet(a: Word, b: Word) -> Word:
    """Return what holds of a register that two paths leave as a and as b."""
    if a == b:
        return a
    return Word(a.value if a.value == b.value else None, a.may | b.may, a.must & b.must)


@dataclass
class Block:
    """Instructions without a branch between them; ``next`` are the blocks that may follow."""

    code: list[tuple[int, str]] = field(default_factory=list)
    next: list[int] = field(default_factory=list)


@lru_cache(maxsize=4)
def instructions(cubin: bytes) -> tuple[list[tuple[int, str]], dict[str, int]]:
    """Return (address, text) of every instruction, and the position of each label."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            # without its analysis of indirect branches, which takes a fifth of the time
            [TOOLS / "nvdisasm", "-c", "-ndf", file.name],
            capture_output=True,
            text=True,
            check=True,
        )
    code: list[tuple[int, str]] = []
    labels: dict[str, int] = {}
    for line in done.stdout.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s*/\*([0-9a-f]+)\*/\s+(.*?);", line):
            code.append((int(found[1], 16), found[2].strip()))
    return code, labels


def blocks(code: list[tuple[int, str]], labels: dict[str, int]) -> list[Block]:
    """Return the control-flow graph; block 0 is the entry."""
    starts = {0, *labels.values()}
    ends = re.compile(r"\b(BRA|EXIT|RET|BRX|JMP|CALL)\b")
    starts |= {n + 1 for n, (_, text) in enumerate(code) if ends.search(text)}
    order = sorted(n for n in starts if n < len(code))
    number = {start: n for n, start in enumerate(order)}
    found = []
    for start, end in zip(order, [*order[1:], len(code)], strict=True):
        block = Block(code[start:end])
        last = code[end - 1][1]
        plain = re.sub(r"^@!?U?P\w+\s+", "", last)
        goes_on = True
        if target := re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", last):
            block.next.append(number[labels[target[1]]])
            operands = plain.split("`")[0]
            goes_on = plain != last or ".DIV" in plain or bool(re.search(r"\bU?P\d", operands))
        elif re.search(r"\b(EXIT|RET)\b", last):
            goes_on = plain != last
        if goes_on and end in number:
            block.next.append(number[end])
        found.append(block)
    return found


# --- one instruction ---------------------------------------------------------------------------

_NO_RESULT = (
    "ST", "BAR", "BRA", "EXIT", "WARPG", "MEMBAR", "FENCE", "NOP", "DEPBAR", "LDGSTS", "LDGDEP",
    "BSYNC", "BSSY", "WARPSYNC", "RED", "CCTL", "ERRBAR", "UTMA", "UBLKCP", "SYNCS.ARRIVE",
    "SYNCS.PHASECHK", "ACQBULK", "USETMAXREG", "UCGABAR", "PREEXIT", "NANOSLEEP", "YIELD", "CALL",
    "RET", "ELECT",
)  # fmt: skip
_REGISTER = re.compile(r"(U?R)(\d+)")
_PREDICATE = re.compile(r"!?U?P(T|\d)")


def _read(state: State, operand: str) -> Word:
    """Return the word of an operand."""
    text = operand.strip().replace(".reuse", "")
    flip, text = (text[0], text[1:]) if text[:1] in "-~" and text[1:] else ("", text)
    if text in ("RZ", "URZ"):
        word = constant(0)
    elif re.fullmatch(r"0x[0-9a-f]+", text):
        word = constant(int(text, 16))
    elif _REGISTER.fullmatch(text):
        word = state.get(text, UNKNOWN)
    elif text.startswith(("c[0x0][0x28]",)):
        word = source(STACK)
    elif text.startswith("c["):
        word = source("parameter")
    else:
        word = UNKNOWN
    if not flip or word.value is None:
        return word
    return word._replace(value=(-word.value if flip == "-" else ~word.value) & MASK)


def _width(op: str) -> int:
    """Return how many registers an instruction writes."""
    if op.startswith("HGMMA"):
        found = re.match(r"HGMMA\.64x(\d+)x", op)
        return int(found[1]) // 2 if found else 1
    if op.startswith("LDSM"):
        return int(op[-1]) if op[-1].isdigit() else 1
    if op.startswith("CS2R"):
        return 1 if op.endswith(".32") else 2
    if ".128" in op:
        return 4
    return 2 if ".64" in op or "WIDE" in op or op.startswith(("DADD", "DMUL", "DFMA")) else 1


def _names(first: str, n: int) -> list[str]:
    found = _REGISTER.fullmatch(first)
    return [f"{found[1]}{int(found[2]) + k}" for k in range(n)] if found else []


def _lut(a: int, b: int, c: int, table: int) -> int:
    bits = 0
    for k in range(8):
        if table >> k & 1:
            bits |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
    return bits & MASK


def _value(op: str, v: list[int]) -> int | None:
    """Return the constant that an integer instruction makes of constants, or None."""
    name = op.split(".")[0].removeprefix("U")
    if op in ("MOV", "UMOV", "R2UR", "R2UR.FILL", "MOV32I") or op.startswith("SHFL.IDX"):
        return v[0]
    if op in ("IMAD.MOV.U32", "IMAD.MOV"):
        return v[2]
    if name in ("IADD3", "IADD", "VIADD") and ".X" not in op:
        return sum(v[:3])
    if name == "LOP3":
        return _lut(v[0], v[1], v[2], v[3])
    if op.endswith(("SHF.R.U32.HI", "SHF.R.S32.HI")):
        high = v[2] - (1 << 32) if "S32" in op and v[2] >> 31 else v[2]
        return high >> (v[1] & 31)
    if op in ("SHF.L.U32", "USHF.L.U32", "IMAD.SHL.U32", "USHL"):
        return v[0] << (v[1] & 31) if "SHF" in op else v[0] * v[1]
    if op in ("LEA", "ULEA"):
        return (v[0] << v[2]) + v[1]
    if op in ("LEA.HI", "ULEA.HI"):
        return ((((v[2] << 32) | v[0]) << v[3]) >> 32) + v[1]
    if op.startswith(("SGXT.U32", "USGXT.U32")):
        return v[0] & ((1 << v[1]) - 1)
    if op in ("IMAD", "UIMAD", "IMAD.IADD", "IMAD.U32"):
        return v[0] * v[1] + v[2]
    if name == "SEL" and v[0] == v[1]:
        return v[0]
    return None


def _special(op: str, operands: list[str], thread: int) -> Word | None:
    """Return the result of an instruction that reads no register, or None."""
    text = ",".join(operands)
    if op in ("S2R", "S2UR"):
        if "CgaCtaId" in text:
            return source(SHARED, 0)  # shared memory starts at 0x400 of a block's window
        return source("thread", thread if "TID.X" in text else None)
    if op.startswith("CS2R"):
        return constant(0) if "SRZ" in text else source("clock")
    if op.startswith(("LDG", "LDS", "LD.", "ATOM", "SYNCS", "MUFU")):
        return source("memory")
    if op.startswith("HGMMA"):
        return source("product")
    return None


def _stack(state: State, x: Instruction) -> None:
    """Follow words through local memory."""
    if "slot?" in x.targets:  # an address that is computed may be any slot
        for name in [name for name in state if name.startswith("slot")]:
            state[name] = meet(state[name], UNKNOWN)
        return
    for name, read in zip(x.targets, x.reads, strict=True):
        word = state.get(read, UNKNOWN) if read.startswith("slot") else _read(state, read)
        state[name] = meet(state.get(name, UNKNOWN), word) if x.guarded else word


def _carried(op: str, values: list[int | None], flags: list[str], state: State) -> int | None:
    """Return the sum of an addition before it is cut to 32 bits, or None."""
    if None in values:
        return None
    total = sum(v for v in values if v is not None)
    for flag in flags if ".X" in op else ():
        if flag in ("!PT", "!UPT"):
            continue
        carry = 1 if flag in ("PT", "UPT") else state.get(flag, UNKNOWN).value
        if carry is None:
            return None
        total += carry
    return total


@dataclass(frozen=True)
class Instruction:
    """Return the registers that an instruction reads and writes."""

    op: str
    guarded: bool
    targets: tuple[str, ...]  # registers
    outputs: tuple[str, ...]  # predicates
    reads: tuple[str, ...]
    flags: tuple[str, ...]  # predicates that are read
    local: str = ""  # the whole text of an access to local memory


@lru_cache(maxsize=1 << 16)
def parse(text: str) -> Instruction | None:
    """Return the instruction, or None where it writes no register or predicate."""
    guard = re.match(r"^@(!?)(U?P\w+)\s+(.*)", text)
    if guard and guard[1] and guard[2] in ("PT", "UPT"):
        return None
    guarded = guard is not None and guard[2] not in ("PT", "UPT")
    body = guard[3] if guard else text
    op, _, rest = body.partition(" ")
    if op.startswith(("STL", "LDL")):
        n = _width(op)
        first, second = (rest.split(",")[k].strip() for k in (0, -1))
        load = op.startswith("LDL")
        slots = _slots(rest, n)
        names = tuple(_names(first if load else second, n)) or (second,) * n
        targets, reads = (names, slots) if load else (slots, names)
        return Instruction(op, guarded, targets, (), reads, (), body)
    if op.startswith(_NO_RESULT):
        return None
    operands = [x.strip().replace(".reuse", "") for x in rest.split(",")]
    outputs: list[str] = []
    while operands and _PREDICATE.fullmatch(operands[0]):
        outputs.append(operands.pop(0))
    if not operands or not _REGISTER.match(operands[0]):
        return Instruction(op, guarded, (), tuple(outputs), (), ()) if outputs else None
    targets = tuple(_names(operands.pop(0), _width(op)))
    while operands and re.fullmatch(r"U?P(T|\d)", operands[0]) and not op.startswith("SEL"):
        outputs.append(operands.pop(0))
    flags = tuple(x for x in operands if _PREDICATE.fullmatch(x))
    reads = tuple(x for x in operands if not _PREDICATE.fullmatch(x))
    return Instruction(op, guarded, targets, tuple(outputs), reads, flags)


def _slots(text: str, n: int) -> tuple[str, ...]:
    """Return the words of local memory of an access; "slot?" where R1 is not alone."""
    at = re.search(r"\[R1(?:\+(0x[0-9a-f]+))?\]", text)
    first = int(at[1] or "0", 16) if at else 0
    return tuple(f"slot{first + 4 * k}" if at else "slot?" for k in range(n))


def needed(code: list[tuple[int, str]]) -> set[str]:
    """Return the registers, predicates and slots that the descriptors may depend on."""
    found: set[str] = set()
    for _, text in code:
        if at := re.search(r"gdesc\[UR(\d+)\]", text):
            found |= {f"UR{int(at[1]) + k}" for k in range(4)}
    every = [x for x in (parse(text) for _, text in code) if x is not None]
    writers: dict[str, list[Instruction]] = {}
    for x in every:
        for name in (*x.targets, *x.outputs):
            writers.setdefault(name, []).append(x)
    waiting = list(found)
    while waiting:
        for x in writers.get(waiting.pop(), ()):
            if x.op.startswith("HGMMA") or (_special(x.op, list(x.reads), 0) is not None):
                continue
            for text in (*x.reads, *x.flags):
                name = text.lstrip("-~!|")
                names = _names(name, 2) if ".64" in x.op else [name]
                for one in names or [name]:
                    if one not in found:
                        found.add(one)
                        waiting.append(one)
    return found


def step(state: State, x: Instruction, thread: int) -> None:
    """Apply one instruction to the state."""
    op, guarded, targets, outputs, flags = x.op, x.guarded, x.targets, x.outputs, list(x.flags)
    reads = list(x.reads)
    if x.local:
        _stack(state, x)
        return
    if not targets:
        for name in outputs:
            state.pop(name, None)
        return
    result = _special(op, reads, thread)
    results: list[Word]
    carry: int | None = None
    if result is not None:
        results = [result] * len(targets)
    elif op.endswith(".64") and op.startswith(("UIADD3", "UMOV")):
        results = _wide_sum(state, reads)
    else:
        words = [_read(state, x) for x in reads]
        if not words:
            words = [UNKNOWN]
        values = [w.value for w in words]
        value = None
        if re.match(r"U?IADD3|IMAD\.X", op):
            if op.startswith("IMAD.X") and values[:1] == [0]:
                values = [0, values[2] if len(values) > 2 else None]
            total = _carried(op, values[:3], flags, state)
            value = None if total is None else total & MASK
            carry = None if total is None else total >> 32
        elif op == "IMAD.WIDE.U32" and None not in values[:2] and values[2:3] == [0]:
            product = (values[0] or 0) * (values[1] or 0)
            value = product & MASK
        elif op in ("MOV", "UMOV", "R2UR") and words:
            value = values[0]
        elif op.startswith("IMAD.MOV") and len(values) > 2:
            value = values[2]
        elif None not in values and len(values) > 0:
            try:
                found = _value(op, [v for v in values if v is not None])
            except IndexError:
                found = None
            value = None if found is None else found & MASK
        if op.startswith("IMAD.MOV") and len(words) > 2:
            words = [words[2]]
        results = [made_of(words, value), *[made_of(words)] * (len(targets) - 1)]
    for name, word in zip(targets, results, strict=True):
        state[name] = meet(state.get(name, UNKNOWN), word) if guarded else word
    for name in outputs:
        if carry is None or guarded:
            state.pop(name, None)
        else:
            state[name] = constant(carry)


def _wide_sum(state: State, reads: list[str]) -> list[Word]:
    """Return the two words of a 64-bit sum or move."""
    total: int | None = 0
    low: list[Word] = []
    high: list[Word] = []
    for text in reads:
        sign, name = (-1, text[1:]) if text.startswith("-") else (1, text)
        if name in ("URZ", "RZ"):
            continue
        if name.startswith("0x"):
            pair = [constant(int(name, 16)), constant(int(name, 16) >> 32)]
        else:
            pair = [state.get(x, UNKNOWN) for x in _names(name, 2)] or [UNKNOWN, UNKNOWN]
        low.append(pair[0])
        high.append(pair[1])
        if total is not None and pair[0].value is not None and pair[1].value is not None:
            total += sign * (pair[0].value | pair[1].value << 32)
        else:
            total = None
    values = (None, None) if total is None else (total & MASK, total >> 32 & MASK)
    return [made_of(low, values[0]), made_of(high, values[1])]


# --- a kernel ----------------------------------------------------------------------------------


class Product(NamedTuple):
    """One wgmma: its address, its shape, and (low, high) of the descriptors that it reads."""

    address: int
    name: str
    a: tuple[Word, Word] | None  # None: A comes from registers
    b: tuple[Word, Word]


@lru_cache(maxsize=4)
def products(cubin: bytes, thread: int = 0) -> list[Product]:
    """Return every reachable product by address, as ``thread`` of a block meets it."""
    code, labels = instructions(cubin)
    wanted = needed(code)
    graph = blocks(code, labels)
    steps = [_relevant(block, wanted) for block in graph]
    entries: dict[int, State] = {0: {}}
    waiting = [0]
    while waiting:
        n = waiting.pop()
        state = dict(entries[n])
        for x in steps[n]:
            if isinstance(x, Instruction):
                step(state, x, thread)
        for after in graph[n].next:
            if after not in entries:
                entries[after] = dict(state)
                waiting.append(after)
            elif _merge(entries[after], state):
                waiting.append(after)
    return [p for n in sorted(entries) for p in _products(steps[n], entries[n], thread)]


def _relevant(block: Block, wanted: set[str]) -> list[Instruction | tuple[int, str]]:
    """Return the instructions that write what is wanted, and (address, text) of the products."""
    found: list[Instruction | tuple[int, str]] = []
    for address, text in block.code:
        if "gdesc[" in text:
            found.append((address, text))
        x = parse(text)
        if x and ("slot?" in x.targets or not wanted.isdisjoint((*x.targets, *x.outputs))):
            found.append(x)
    return found


def _merge(entry: State, state: State) -> bool:
    """Meet ``state`` into ``entry``; true if that changed."""
    changed = False
    for name in list(entry):
        word = meet(entry[name], state.get(name, UNKNOWN))
        if word != entry[name]:
            entry[name] = word
            changed = True
    return changed


def _products(
    steps: list[Instruction | tuple[int, str]], entry: State, thread: int
) -> Iterator[Product]:
    state = dict(entry)
    for x in steps:
        if isinstance(x, Instruction):
            step(state, x, thread)
            continue
        address, text = x
        found = re.search(r"(HGMMA\S*)\s+(.*?)gdesc\[UR(\d+)\]", text)
        if found:
            first = int(found[3])
            a, b = (
                (state.get(f"UR{n}", UNKNOWN), state.get(f"UR{n + 1}", UNKNOWN))
                for n in (first, first + 2)
            )
            registers = len(re.findall(r"\bR\d+", found[2])) >= 2
            yield Product(address, found[1], None if registers else a, b)


class Report(NamedTuple):
    """Counts and findings for the descriptors of one kernel."""

    products: int
    known: int  # descriptors of B that are constants
    findings: list[str]
    stack: list[str]


@lru_cache(maxsize=512)
def report(cubin: bytes) -> Report:
    """Return the number of products, and the faults of their descriptors."""
    every = products(cubin)
    known = sum(p.b[0].value is not None and p.b[1].value is not None for p in every)
    return Report(len(every), known, findings(cubin), stack_pointer_as_data(cubin))


def findings(cubin: bytes) -> list[str]:
    """Return a sentence for each descriptor that does not come from shared memory on every path."""
    found = []
    for p in products(cubin):
        for operand, words in (("A", p.a), ("B", p.b)):
            if words is None:
                continue
            low, high = words
            where = f"{p.name} at {p.address:#x}, operand {operand}"
            if STACK in low.may | high.may:
                found.append(f"{where}: made of the stack pointer")
            elif SHARED not in low.must:
                found.append(f"{where}: not made of the base of shared memory on every path")
    return found


def stack_pointer_as_data(cubin: bytes) -> list[str]:
    """Return every use of R1 as a number; it may only address local memory and move itself."""
    moves = r"LDC R1,|U?I?V?I?ADD3? R1, R1,|IMAD\.MOV\.U32 R1, RZ, RZ, c|MOV R1, c"
    return [
        f"{address:#x}: {text}"
        for address, text in instructions(cubin)[0]
        if re.search(r"\bR1\b", re.sub(r"\[[^\]]*\]", "", text)) and not re.match(moves, text)
    ]


def differences(cubin: bytes, other: bytes) -> list[str]:
    """Return a sentence for each descriptor that is a constant in both cubins, and differs."""
    found = []
    for thread in (0, 128):
        mine, theirs = products(cubin, thread), products(other, thread)
        if [p.name for p in mine] != [p.name for p in theirs]:
            return ["the products are not the same: not comparable"]
        for p, q in zip(mine, theirs, strict=True):
            for operand, x, y in (("A", p.a, q.a), ("B", p.b, q.b)):
                for a, b in zip(x or (), y or (), strict=True):
                    if a.value is not None and b.value is not None and a.value != b.value:
                        text = f"{p.name} at {p.address:#x}, operand {operand}"
                        found.append(f"{text}: {a.value:#x}, and {b.value:#x} in the other")
    return found
