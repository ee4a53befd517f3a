"""Gates of the Hopper forward's machine code, for every head size and feature. Needs no GPU.

No test of results notices these faults: spills in a loop over key tiles, products that the
assembler serializes, a softmax that it moves from under its product to after it. Nor does one
notice an arrival at a barrier before all threads of the warpgroup have read the buffer.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("triton") is None or sys.platform != "linux":
    pytest.skip("compiling for a GPU needs triton, on Linux", allow_module_level=True)

import torch

from rowmax.gpu.hopper.host import bias_path
from rowmax.gpu.hopper.tiles import (
    LAGS_OPERATIONS,
    LONG,
    LONG_64_SPILLS,
    SHARED,
    TILES,
    WideConfig,
    lags,
    tile_for,
)
from rowmax.testing import Case, make

from . import sass
from .hopper_build import Built, Line, build, count
from .releases import measured

FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"left": 700, "right": 0, "nq": 900},
    "narrow": {"left": 200, "right": 0, "nq": 900},
    "lengths": {"lengths": (0.5,)},
    "packed": {"sequences": ((100, 100), (28, 60)), "causal": True},
    "packed-grouped": {"sequences": ((100, 100), (28, 60)), "causal": True, "hk": 8},
    "documents": {"documents": "sorted", "causal": True},
    "documents-grouped": {"documents": "sorted", "causal": True, "hk": 8},
    "softcap": {"softcap": 2.0, "causal": True},
    "alibi": {"alibi": True, "causal": True},
    "alibi-block": {"alibi": True, "causal": True, "positions": (5, 0, 0, 0, 0)},
    "sink-grouped": {"sink": True, "hk": 1, "nq": 40},
    "bias": {"bias": "bhqk", "nq": 256},
    "bias-row": {"bias": "bh1k", "nq": 256},
    "bias-column": {"bias": "bhq1", "nq": 256},
    "bias-gathered": {"bias": "bhqk", "nq": 251},
    "even": {"nq": 256},
    "dropout": {"dropout": 0.1, "causal": True},
}
#: every size without features, every feature at the size of most models and at the widest
CASES = [
    Case(f"{d}x{dv}-{name}", **{"b": 1, "hq": 64, "d": d, "dv": dv, **features})
    for d, dv in TILES
    for name, features in FEATURES.items()
    if name in ("full", "causal")
    or (d, dv) == (128, 128)
    or ((d, dv) == (256, 256) and name != "narrow")
    or ((d, dv) == (512, 512) and not name.startswith(("bias", "dropout", "narrow")))
]
CASES += [
    Case("64x64-narrow", b=1, hq=64, d=64, **FEATURES["narrow"]),
    Case("96x96-narrow", b=1, hq=64, d=96, **FEATURES["narrow"]),
    Case("64x64-dropout", b=1, hq=64, d=64, dropout=0.1),
    Case("64x64-dropout-bias", b=1, hq=64, nq=256, d=64, dropout=0.1, bias="bhqk"),
]
CASES += [Case(f"{d}x{dv}-few", b=1, d=d, dv=dv, causal=True) for d, dv in TILES]
LONG_CASES = [
    Case(f"{d}x{d}-long-{name}", b=2, hq=2, nq=9000, nk=9001, d=d, **FEATURES[name])
    for d, _ in LONG
    for name in ("full", "causal")
]
LONG_CASES += [
    Case(f"{d}x{d}-long-grouped", b=2, hq=8, hk=2, nq=9000, nk=9001, d=d, causal=True)
    for d, _ in LONG
]
LONG_CASES += [Case("64x64-long-window", b=2, hq=2, nq=9000, nk=9001, d=64, left=4000, right=0)]
CASES += LONG_CASES
#: blocks that keep a bias: with two sides and four of heads of 32, with one of 64
STRIPS = [
    Case(name, **{"b": 68, "nq": 512, "hq": 4, "d": 32, "bias": "1hqk"} | more)
    for name, more in {
        "32-strip": {},
        "32-strip-lengths": {"lengths": (0.5,)},
        "32-strip-odd": {"b": 67, "nk": 504},
        "32-strip-768": {"nq": 768},
        "32-strip-768-lengths": {"nq": 768, "lengths": (0.5,)},
        "32-strip-float32": {"bias_float32": True},
        "32-strip-softcap": {"nq": 384, "softcap": 2.0, "sink": True},
        "32-streamed": {"nq": 1152},
        "32-streamed-float32": {"nq": 768, "bias_float32": True, "sink": True},
        "64-strip": {"d": 64},
        "64-strip-lengths": {"d": 64, "lengths": (0.5,)},
    }.items()
]
CASES += STRIPS
#: one of each kind of kernel
_NEWEST = {"128x128-causal", "64x64-long-causal", "256x256-packed", "512x512-causal", "32-strip"}
MARKED = [pytest.param(c, marks=pytest.mark.newest if c.name in _NEWEST else ()) for c in CASES]
assert len([p for p in MARKED if p.marks]) == len(_NEWEST)
#: none with triton 3.6; 3.9 spills up to three scalars a key tile where registers are fewest (head
#: size 256 with a window, ALiBi or a bias for each query)
SPILLS = measured(0, 1, 3)
SPILLS_OF_DROPOUT = measured(0, 1, 5)
#: the same where three warpgroups have 64 columns, for which the host does not give way
THREE = measured(0, 8, 0)
#: with a reference that lags under a window, 1.033 times as fast (H200): statistics of the rows
LAGGING_WINDOW = measured(4, 0, 0)
#: the same in a loop over query tiles: four consumers have 112 registers each, so 3.9 keeps up to
#: 25 addresses and limits of a query tile in local memory, outside its loops over key tiles
ONCE = measured(0, 2, 25)
#: the same with wide values, and where these have documents: each key tile has ranges of ids
WIDE, WIDE_DOCUMENTS = measured((0, 0), (12, 15), (3, 10))
#: bytes of scalars that a thread may spill once a query tile, out of the loops; with wide values
STACK, WIDE_STACK = measured((160, 160), (160, 200), (160, 208))
_LATE = {"256x256-packed": 2}
#: by case: exponentials of a key tile that may come after the wait for the product over them
LATE: dict[str, int] = measured(_LATE | {"256x256-packed-grouped": 2}, _LATE, {})


#: long calls whose three warpgroups a compiler may refuse registers: triton 3.9.0 does
MAY_SPILL = {"64x64-long-causal", "64x64-long-grouped", "64x64-long-window"}


def spills(kernel: Built) -> bool:
    """Return True for three warpgroups that the host would not take."""
    return kernel.plan.tile in LONG.values() and kernel.stack > 4 * LONG_64_SPILLS


def kept(case: Case, *, lags: bool = False) -> Built:
    """Return the kernel of a case. Skip three warpgroups that the host would not take."""
    kernel = build(case, lags=lags)
    if spills(kernel):
        assert case.name in MAY_SPILL  # a fifth of the speed at head size 64
        pytest.skip("three warpgroups spill with this compiler: the host takes the next tile")
    return kernel


def has_output(kernel: Built, loop: list[Line]) -> bool:
    """Return True for a loop over key tiles: without overlap others have scores alone."""
    return kernel.plan.tile.overlap or any("tnspB" in line.text for line in loop)


def is_wide(kernel: Built) -> bool:
    """Return True if one warpgroup makes the weights of both (forward_wide.py)."""
    return isinstance(kernel.plan.constants.config, WideConfig)


def spills_in(loop: list[Line]) -> int:
    """Return the loads and stores of local memory in a loop."""
    return count(loop, "(LDL|STL)")


def most_spills(kernel: Built, loop: list[Line], case: Case) -> int:
    """Return how many a loop may have."""
    if is_wide(kernel):
        return WIDE_DOCUMENTS if case.documents else WIDE
    if kernel.plan.tile in LONG.values() and case.d == 64:
        return max(SPILLS, THREE)
    if case.dropout:
        return SPILLS_OF_DROPOUT
    return SPILLS if has_output(kernel, loop) else ONCE


@pytest.mark.parametrize("case", LONG_CASES, ids=str)
def test_three_warpgroups_give_way_where_they_spill(case):
    """The host knows local memory alone: a kernel below its limit must have none in its loops."""
    kernel = build(case)
    assert kernel.plan.tile == LONG[case.d, case.d]
    spilled = max(map(spills_in, kernel.loops()))
    most = THREE if case.d == 64 and not spills(kernel) else 0
    assert spilled <= most or spills(kernel)
    assert not spills(kernel) or (spilled and case.name in MAY_SPILL)
    problem, _ = make(case, dtype=torch.bfloat16).problem()
    assert tile_for(problem, "", 132, spilled=True) == TILES[case.d, case.d]


@pytest.mark.parametrize("case", MARKED, ids=str)
def test_loops_keep_to_registers(case):
    kernel = kept(case)
    loops = kernel.loops()
    consumers = kernel.plan.tile.warpgroups * kernel.plan.tile.sides
    assert len(loops) >= consumers
    for loop in loops:
        assert spills_in(loop) <= most_spills(kernel, loop, case)
    assert kernel.stack <= (WIDE_STACK if is_wide(kernel) else STACK)
    assert kernel.shared <= SHARED
    # a barrier that nothing uses would lie where another does
    assert len(set(kernel.barriers())) == len(kernel.barriers()) > 0
    assert kernel.too_early(consumers) == []
    report = sass.report(kernel.cubin)
    assert report.products > 0
    assert report.findings == report.stack == []


@pytest.mark.parametrize("name", ["128x128-causal", "256x256-packed"])
def test_a_producer_that_waits_for_keys_keeps_to_registers(name: str) -> None:
    """The loops over key tiles are as long as without, to 2%."""
    case = next(case for case in CASES if case.name == name)
    kernel, whole = build(case, arriving=True), build(case)
    assert kernel.count(r"LD\S*\.STRONG\.SYS") == 2  # one where tiles begin, one within them
    for mine, theirs in zip(kernel.loops(), whole.loops(), strict=True):
        assert len(mine) <= 1.02 * len(theirs)
    assert max(map(spills_in, kernel.loops())) <= SPILLS
    assert kernel.stack <= STACK
    assert kernel.shared <= SHARED
    assert sass.report(kernel.cubin).findings == []


@pytest.mark.parametrize("name", ["128x128-causal", "512x512-full"])
def test_a_part_of_the_keys_keeps_to_registers(name: str) -> None:
    """It stores float32 and no lse; its loops over key tiles are as long as those of all keys."""
    case = next(case for case in CASES if case.name == name)
    kernel, whole = build(case, parts=2), build(case)
    for mine, theirs in zip(kernel.loops(), whole.loops(), strict=True):
        assert len(mine) <= 1.02 * len(theirs)
    assert max(map(spills_in, kernel.loops())) <= SPILLS
    assert kernel.stack <= (WIDE_STACK if is_wide(kernel) else STACK)
    assert kernel.shared <= SHARED
    assert kernel.too_early(2) == []
    assert sass.report(kernel.cubin).findings == []


@pytest.mark.parametrize("case", MARKED, ids=str)
def test_products_are_not_serialised(case):
    """One wait for scores and one for the output in a loop; one after each HGMMA otherwise.

    Without overlap a loop over query tiles has scores and no output. A warpgroup of weights waits
    for the next scores and the output at once, one of values for the output.
    """
    kernel = kept(case)
    for loop in kernel.loops():
        waits = [line for line in loop if "WARPGROUP.DEPBAR" in line.text]
        assert len(waits) == 1 + (has_output(kernel, loop) and not is_wide(kernel))


@pytest.mark.parametrize("case", MARKED, ids=str)
def test_softmax_runs_under_the_output(case):
    """All exponentials of the weights come before the wait for the product that hides them.

    Of wide values that is the product of the next scores.
    """
    kernel = kept(case)
    if not kernel.plan.tile.overlap:
        return  # it runs under the products of other warpgroups
    # the weights of a tile that one thread makes: 64 rows by the columns, over 128 threads
    weights = kernel.plan.tile.block_k // 2
    loops = kernel.loops()
    if is_wide(kernel):
        loops = [loop for loop in loops if any("MUFU.EX2" in line.text for line in loop)]
        assert loops
    for loop in loops:
        texts = [line.text for line in loop]
        waits = [n for n, text in enumerate(texts) if "WARPGROUP.DEPBAR" in text]
        ends = waits[-1]
        after = sum("MUFU.EX2" in text for text in texts[ends:])
        issued = next(n for n, text in enumerate(texts) if "HGMMA" in text)
        begin = issued if is_wide(kernel) else waits[0]
        before = sum("MUFU.EX2" in text for text in texts[begin:ends])
        late = LATE.get(case.name, 0)
        assert before >= weights - late
        assert after <= 2 + late  # the factor of O may come late


@pytest.mark.parametrize("case", STRIPS, ids=str)
def test_blocks_keep_a_bias(case):
    """Two sides where a strip of 128 queries fits next to two tiles, else four of 64 queries.

    Where no strip fits two sides read the bias at the same time.
    """
    tile = build(case).plan.tile
    odd, wide = "odd" in case.name, case.nq == 768 or case.bias_float32
    streamed = "streamed" in case.name
    sides = 1 if case.d == 64 or odd else 4 if wide and not streamed else 2
    assert tile.strip is not streamed
    assert (tile.sides, tile.overlap) == (sides, sides == 1)


@pytest.mark.parametrize("case", [c for c in STRIPS if "streamed" in c.name], ids=str)
def test_a_bias_is_used_before_its_buffer_is_free(case):
    """Loads that are issued may not have returned when threads meet; exponentials need them."""
    for loop in build(case).loops():
        last = {
            name: max(n for n, line in enumerate(loop) if name in line.text)
            for name in ("MUFU.EX2", "SYNCS.ARRIVE")
        }
        between = loop[last["MUFU.EX2"] : last["SYNCS.ARRIVE"]]
        assert any("BAR.SYNC" in line.text for line in between)


def may_lag(case: Case) -> bool:
    """Return True if some call of these head sizes and mask has a reference that lags."""
    mask = "window" if case.left is not None else "causal" if case.causal else "full"
    return ((case.d, case.dv or case.d), mask) in LAGS_OPERATIONS


#: every head size that may lag, and the features with a reference that lags
LAGGING = [
    *(c for c in CASES
      if c.name.endswith(("-full", "-causal")) and "long" not in c.name and may_lag(c)),
    *(Case(f"128x128-{name}", **{"b": 1, "hq": 64, "d": 128, **FEATURES[name]})
      for name in ("window", "lengths", "packed", "sink-grouped")),
    *filter(may_lag, LONG_CASES),
    *(c for c in STRIPS if c.name in ("32-strip", "32-strip-768-lengths", "32-streamed-float32")),
]  # fmt: skip


#: minima and maxima of a step that moves a reference that lags
MOVES = 6


@pytest.mark.parametrize("case", LAGGING, ids=str)
def test_steps_that_lag_take_no_maximum(case):
    """Their loops keep to registers, too, and their softmax runs under the output."""
    kernel = kept(case, lags=True)
    free = 0
    for loop in kernel.loops():
        texts = [line.text for line in loop]
        most = LAGGING_WINDOW if case.name == "64x64-long-window" else 0
        assert spills_in(loop) <= max(most, most_spills(kernel, loop, case))
        waits = [n for n, text in enumerate(texts) if "WARPGROUP.DEPBAR" in text]
        late = sum("MUFU.EX2" in text for text in texts[waits[-1] :])
        assert late <= 2 or not kernel.plan.tile.overlap
        free += sum("FMNMX" in text for text in texts) <= MOVES
    consumers = kernel.plan.tile.warpgroups * kernel.plan.tile.sides
    assert free >= consumers
    assert kernel.plan.tile.onto_bias is bool(case.bias)
    assert kernel.stack <= STACK
    assert kernel.too_early(consumers) == []
    report = sass.report(kernel.cubin)
    assert report.findings == report.stack == []


@pytest.mark.parametrize("case", [LAGGING[0], *LONG_CASES[-2:], *LONG_CASES[2:6]], ids=str)
def test_the_second_launch_is_the_shipped_kernel(case):
    """It takes maxima, as without a reference that lags, and keeps to shared memory."""
    kernel = build(case, lags=True, mends=True)
    assert kernel.shared <= SHARED
    assert kernel.too_early(kernel.plan.tile.warpgroups) == []
    report = sass.report(kernel.cubin)
    assert report.products > 0
    assert report.findings == report.stack == []
    usual = build(case)
    for loop, same in zip(kernel.loops(), usual.loops(), strict=True):
        maxima = [sum("FMNMX" in line.text for line in x) for x in (loop, same)]
        assert maxima[0] == maxima[1] > MOVES


@pytest.mark.parametrize("d", [64, 128])
def test_stores_of_clocks_leave_loops_in_registers(d):
    """A measurement with spills in the loops would be one of another kernel."""
    case = Case("even", b=200, hq=1, nq=8, nk=5120, d=d)  # without a mask, as is measured
    assert kept(case).count("SR_CLOCKLO") == 0
    events = 0b01111 if d == 64 else 0b11111
    kernel = build(case, clocks=events)
    assert kernel.count("SR_CLOCKLO") > 0
    loops = sorted(kernel.loops(stores=events.bit_count()), key=len)
    # longer ones begin and end a query tile
    steps = loops[: kernel.plan.tile.warpgroups]
    assert len(steps) == kernel.plan.tile.warpgroups
    for loop in steps:
        assert spills_in(loop) <= (THREE if d == 64 else 0)


def test_three_warpgroups_take_turns():
    """A warpgroup waits before its products and passes the turn on after them."""
    for case in (case for case in LONG_CASES if case.d == 64):
        kernel = kept(case)
        assert kernel.plan.constants.config.ORDERED
        for loop in kernel.loops():
            texts = [x.text for x in loop]
            waits, passes, products = (
                [n for n, text in enumerate(texts) if re.search(pattern, text)]
                for pattern in (r"BAR\.SYNC\S* \S+, 0x100", r"BAR\.ARV \S+, 0x100", "HGMMA")
            )
            assert len(waits) == len(passes) == 1
            assert waits[0] < products[0] < products[-1] < passes[0]


@pytest.mark.parametrize(
    ("features", "lagging"),
    [
        ({}, True),
        ({"d": 64}, True),
        ({"causal": True}, True),
        ({"causal": True, "d": 64, "hq": 4}, True),
        ({"causal": True, "d": 80, "hq": 8}, True),
        ({"d": 96, "hq": 4}, True),
        ({"d": 96, "hq": 128, "nq": 8192, "nk": 8192}, False),  # slower with two warpgroups
        ({"d": 192, "dv": 128}, True),
        ({"causal": True, "hq": 1}, True),
        ({"causal": True, "d": 64}, False),  # little work
        ({"causal": True, "left": 1024}, False),  # not measured, nor other head sizes
        ({"d": 256}, False),
        ({"hq": 1, "nq": 8200, "nk": 8200}, False),  # little work
        ({"sequences": ((16384, 16384),) * 4}, True),
        ({"sequences": ((12000, 12000), *[(64, 64)] * 19)}, False),
        ({"bias": "bh1k"}, False),
        ({"alibi": True}, False),
        ({"softcap": 2.0}, False),
        ({"dropout": 0.1}, True),
    ],
    ids=str,
)
def test_references_lag_where_there_is_much_work(features, lagging):
    shape = {} if "sequences" in features else {"b": 1, "nq": 32776, "nk": 32776}
    case = Case("", **{"hq": 2, "d": 128, **shape, **features})
    for dtype in (torch.bfloat16, torch.float16):
        problem, tensors = make(case, dtype=dtype).problem()
        path = bias_path(problem, tensors.bias)
        assert lags(problem, path) is (lagging and dtype == torch.bfloat16)


@pytest.mark.parametrize(
    ("features", "tall"),
    [
        ({}, True),
        ({"d": 72}, True),
        ({"causal": True, "sink": True}, True),
        ({"nk": 8192}, False),
        ({"nq": 8192}, False),
        ({"b": 1, "hq": 1}, False),  # no more rows than processors with one warpgroup each
        ({"lengths": (0.5,)}, False),
        ({"sequences": ((9000, 9000),)}, False),
        ({"bias": "bh1k"}, False),
        ({"softcap": 2.0}, False),
        ({"dropout": 0.1}, False),
        ({"d": 128}, False),
    ],
    ids=str,
)
def test_tall_tiles_serve_the_calls_that_they_were_measured_on(features, tall):
    given = {"b": 2, "hq": 2, "nq": 8300, "nk": 8300, "d": 96, **features}
    problem, tensors = make(Case("", **given), dtype=torch.bfloat16).problem()
    tile = tile_for(problem, bias_path(problem, tensors.bias), 132)
    assert (tile.warpgroups == 3) is tall
