"""Finds barriers of sm_90a that may be arrived at before loads from shared memory have arrived.

A warpgroup releases a buffer so: its threads meet, then one of them arrives at the barrier. But a
warp meets the others when its loads are issued. Stores of another warpgroup may delay them by a
thousand cycles, and a TMA copy overtakes them. So an instruction has to wait for the loads before
the threads meet.

Each instruction names the counters that it waits for, and a load the one that it counts down. Loads
from shared memory end in the order in which they began.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from . import sass

#: a section of an ELF file: name, type, flags, address, offset, size, and what is not read
_SECTION = struct.Struct("<IIQQQQIIQQ")
_COUNTERS = 6
_NONE = 7


class Control(NamedTuple):
    """The counters of an instruction."""

    waits: frozenset[int]
    sets: int | None


class Load(NamedTuple):
    """A load whose buffer is not free yet."""

    address: int
    arrived: bool  # its values have; the threads have not met since
    counters: frozenset[int]  # each of them is down only if the load has ended


State = dict[int, Load]


def code_of(cubin: bytes) -> bytes:
    """Return the machine code of a kernel: the one section of an ELF file named ``.text.``."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    count, names = struct.unpack_from("<HH", cubin, 60)
    sections = [_SECTION.unpack_from(cubin, table + _SECTION.size * n) for n in range(count)]
    first_name = sections[names][4]
    found = [x for x in sections if cubin.startswith(b".text.", first_name + x[0])]
    ((_, _, _, _, offset, size, *_),) = found
    return cubin[offset : offset + size]


def controls(cubin: bytes) -> dict[int, Control]:
    """Return the counters of each instruction, by its address."""
    found = {}
    for n, (_, upper) in enumerate(struct.iter_unpack("<QQ", code_of(cubin))):
        bits = upper >> 41
        sets = bits >> 5 & 7
        waits = frozenset(n for n in range(_COUNTERS) if bits >> (11 + n) & 1)
        found[16 * n] = Control(waits, None if sets == _NONE else sets)
    return found


def step(state: State, address: int, text: str, control: Control) -> State:
    """Return the loads after an instruction."""
    waits = control.waits
    if alone := re.search(r"\bDEPBAR\.LE SB(\d), 0x0", text):
        waits |= {int(alone[1])}
    state = {
        n: load._replace(arrived=load.arrived or bool(load.counters & waits))
        for n, load in state.items()
    }
    if "BAR.SYNC" in text:
        state = {n: load for n, load in state.items() if not load.arrived}
    elif re.search(r"\bLDSM?\b", text):
        own = frozenset(() if control.sets is None else (control.sets,))
        state = {n: load._replace(counters=load.counters | own) for n, load in state.items()}
        if "LDSM" not in text:
            state[address] = Load(address, False, own)
    return state


def join(a: State, b: State) -> State:
    """Return what holds after either state."""
    found = dict(a)
    for n, load in b.items():
        other = found.get(n, load)
        found[n] = Load(n, load.arrived and other.arrived, load.counters & other.counters)
    return found


def too_early(cubin: bytes) -> dict[int, set[int]]:
    """Return addresses: of each arrival of one thread for its warpgroup, the loads it may overtake.

    Loads of matrices (LDSM) are left out: a kernel reads some ahead, and releases other buffers
    meanwhile.
    """
    control = controls(cubin)
    blocks = sass.blocks(*sass.instructions(cubin))
    states: list[State] = [{} for _ in blocks]
    todo = list(range(len(blocks)))
    found: dict[int, set[int]] = {}
    while todo:
        n = todo.pop()
        state = states[n]
        for address, text in blocks[n].code:
            if "SYNCS.ARRIVE" in text and state:
                found.setdefault(address, set()).update(state)
            state = step(state, address, text, control[address])
        for following in blocks[n].next:
            joined = join(states[following], state)
            if joined != states[following]:
                states[following] = joined
                todo.append(following)
    return found
