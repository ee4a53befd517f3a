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
import subprocess
import tempfile
from itertools import pairwise
from typing import NamedTuple

from . import sass

_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+.*?;\s*/\* 0x[0-9a-f]{16} \*/")
_UPPER = re.compile(r"/\* (0x[0-9a-f]{16}) \*/")
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


def controls(cubin: bytes) -> dict[int, Control]:
    """Return the counters of each instruction, by its address."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [sass.TOOLS / "nvdisasm", "-c", "-hex", file.name]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {}
    rows = lines.splitlines()
    for row, after in pairwise(rows):
        line, upper = _LINE.match(row), _UPPER.search(after)
        if line and upper:
            bits = int(upper[1], 16) >> 41
            sets = bits >> 5 & 7
            waits = frozenset(n for n in range(_COUNTERS) if bits >> (11 + n) & 1)
            found[int(line[1], 16)] = Control(waits, None if sets == _NONE else sets)
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
