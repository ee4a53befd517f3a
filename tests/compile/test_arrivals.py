"""``arrivals.step`` and ``join`` over a few lines of machine code."""

from __future__ import annotations

import pytest

from .arrivals import Control, Load, State, join, step

LOAD, SECOND = "LDS R4, [UR4+0x100]", "LDSM.16.M88.4 R8, [R9]"
MEET, READ = "BAR.SYNC.DEFER_BLOCKING 0x2, 0x80", "FADD R1, R1, R4"


def after(*lines: tuple[str, set[int], int | None]) -> State:
    """Return the loads after lines of (text, counters waited for, counter set)."""
    state: State = {}
    for n, (text, waits, sets) in enumerate(lines):
        state = step(state, n, text, Control(frozenset(waits), sets))
    return state


def test_threads_that_meet_do_not_wait_for_loads():
    assert after((LOAD, set(), 0), (MEET, set(), None)) == {0: Load(0, False, frozenset((0,)))}
    assert after((LOAD, set(), 0), (MEET, set(), None), (READ, {0}, None))[0].arrived


@pytest.mark.parametrize("wait", [READ, MEET, "DEPBAR.LE SB0, 0x0"])
def test_a_wait_before_the_meeting_is_enough(wait):
    waits = set() if "SB0" in wait else {0}
    assert after((LOAD, set(), 0), (wait, waits, None), (MEET, set(), None)) == {}


def test_another_counter_is_not_enough():
    assert after((LOAD, set(), 0), (READ, {1}, None), (MEET, set(), None))


def test_loads_end_in_order():
    """A wait for a later load is one for the earlier, which has no counter."""
    lines = ((LOAD, set(), None), (SECOND, set(), 3))
    assert after(*lines, (MEET, set(), None))
    assert after(*lines, (READ, {3}, None), (MEET, set(), None)) == {}


def test_a_path_without_a_wait_counts():
    waited, not_waited = after((LOAD, set(), 0), (READ, {0}, None)), after((LOAD, set(), 0))
    assert not join(waited, not_waited)[0].arrived
    assert join({}, waited) == waited
