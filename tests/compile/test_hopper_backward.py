"""What the Hopper backward must compile to, for every head size and feature. Needs no GPU.

Things that no test of results would notice: registers that overflow into memory in a loop over
tiles, products that the assembler makes wait for one another, exponentials that it moves from under
the product that hides them to after it, and a thread that arrives at a barrier before the others
of its warpgroup have come to what it gives away.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("triton") is None or sys.platform != "linux":
    pytest.skip("compiling for a GPU needs triton, on Linux", allow_module_level=True)

import triton

from rowmax.gpu.hopper.gradients.tiles import SHARED_BIAS, TILES, WARPGROUPS, WIDE, tiles_of
from rowmax.gpu.hopper.tiles import SHARED

from . import sass
from .hopper_backward_build import build, config
from .hopper_build import Built, Line, count

FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "ragged": {"RAGGED": True},
    "causal": {"RIGHT": True},
    "ordered": {"RIGHT": True, "ORDERED": True, "FRESH": True},
    "abreast": {"RIGHT": True, "ORDERED": True, "FRESH": True, "ABREAST": True},
    "window": {"LEFT": True, "RIGHT": True},
    "lengths": {"PREFIX": True, "RAGGED": True},
    "packed": {"VARLEN": True, "RAGGED": True, "RIGHT": True},
    "documents": {"DOCUMENTS": True, "RIGHT": True},
    "softcap": {"SOFTCAP": True, "RIGHT": True},
    "alibi": {"ALIBI": True, "RIGHT": True},
    "dbias": {"BIAS": True, "DBIAS": True, "RIGHT": True},
    "dbias alone": {"BIAS": True, "DBIAS": True, "RIGHT": True, "DQ": False},
    "row": {"ROW": True, "DROW": True, "RIGHT": True},
    "column": {"COLUMN": True, "RIGHT": True},
    "bias": {"BIAS": True},
    "causal bias": {"BIAS": True, "RIGHT": True},
    "bias lengths": {"BIAS": True, "PREFIX": True, "RAGGED": True},
    "bias documents": {"BIAS": True, "DOCUMENTS": True, "RIGHT": True},
}
#: what wide heads are compiled with beside
WIDE_FEATURES = {
    "dq": ("lengths", "packed", "alibi", "bias", "dbias", "row", "column"),
    "pair": (
        "window",
        "lengths",
        "packed",
        "documents",
        "softcap",
        "alibi",
        "causal bias",
        "row",
        "column",
    ),
}


def cases():
    """(head sizes, features, dtype): every size plainly, every feature at the size of most models,
    and at others what is heaviest there."""
    of_all = [name for name in FEATURES if "bias" not in name or "dbias" in name]
    for size in TILES:
        some = ("full", "causal", "packed", "dbias", "dbias alone", "row", "column")
        names = of_all if size == (128, 128) else some
        for name in names:
            yield size, "all", name, "bf16"
        yield size, "all", "causal", "fp16"
    for size, tiles in WIDE.items():
        for kind in tiles:
            more = WIDE_FEATURES[kind] if size == (256, 256) else ()
            for name in ("full", "causal", *more):
                yield size, kind, name, "bf16"
    for size in SHARED_BIAS:
        for name in ("bias", "causal bias", "bias lengths"):
            yield size, "dbias", name, "bf16"
    yield (128, 128), "dbias", "bias documents", "bf16"


#: the triton that torch 2.11 pins
OLDEST = triton.__version__.startswith("3.6.")
#: LDL and STL in a loop, and bytes that a thread may put by out of loops: the most that was
#: measured. With the oldest there are none in a loop but where a bias has a gradient, and for
#: ALiBi's distances.
PUT_BY = (0, 144) if OLDEST else (6, 208)
#: the same for what takes more, with the oldest and with 3.9
MORE = {
    ("all", "dbias"): ((4, 128), PUT_BY),
    ("all", "dbias alone"): ((8, 48), PUT_BY),
    ("all", "row"): ((5, 144), (16, 208)),
    ("pair", "row"): (PUT_BY, (9, 208)),
    # a number a query is 16 more in a thread; such a bias changes lse alone, so it is rare
    # (measured with 3.9, and taken for the oldest as well)
    ("all", "column"): ((22, 240), (22, 240)),
    ("pair", "column"): ((25, 208), (25, 208)),
    ("dq", "alibi"): ((36, 216), PUT_BY),
    ("dq", "dbias"): ((21, 248), (22, 208)),
    ("dbias", "bias"): ((2, 40), (8, 40)),
    ("dbias", "causal bias"): ((3, 40), (16, 40)),
    ("dbias", "bias lengths"): ((2, 40), (27, 56)),
    ("dbias", "bias documents"): ((40, 168), (51, 152)),
}
#: for products, in a step
WAITS = {"all": 3, "dq": 3, "pair": 2, "dbias": 2}
#: exponentials that may come after the wait for the product beside them, of 32
LATE = 7 if OLDEST else 9
#: a row of a bias arrives late: one of the two warpgroups puts its exponentials off until after the
#: product (481 TFLOP/s on an H200, 485 without a bias), the other does not
ONE_IN_TIME = ((64, 64), "all", "row")


@pytest.mark.parametrize(
    ("size", "kind", "name", "dtype"),
    [pytest.param(*case, id=f"{case[0][0]}x{case[0][1]}-{'-'.join(case[1:])}") for case in cases()],
)
def test_compiles_to(size, kind, name, dtype):
    tile = SHARED_BIAS[size] if kind == "dbias" else tiles_of(size)[kind]
    kernel = build(config(*size, tile, KIND=kind, **FEATURES[name]), tile.registers, dtype)
    loops = kernel.loops(16 if (kind, name) == ("dq", "dbias") else 0)  # which are of two numbers
    assert len(loops) >= 2
    stays_in_registers(kernel, loops, kind, name)
    assert kernel.too_early(WARPGROUPS) == []
    report = sass.report(kernel.cubin)
    assert report.products > 0
    assert report.findings == report.stack == []
    late = []
    for loop in loops:
        texts = [line.text for line in loop]
        waits = [n for n, text in enumerate(texts) if "WARPGROUP.DEPBAR" in text]
        # one after each HGMMA where products wait for one another; dQ is waited for, and before it
        # dV, where it takes the registers of P (consumer.step)
        own_dq = kind == "all" and name != "dbias alone"
        assert len(waits) == WAITS[kind] + own_dq + (own_dq and not tile.ahead)
        if kind != "pair":  # which has no other product in flight
            wait = waits[0 if kind == "all" else 1]
            late.append(exponentials_after(texts, wait, tile.block_q))
    if (size, kind, name) == ONE_IN_TIME:
        late = sorted(late)[: len(late) // 2]
    assert all(n <= LATE for n in late)


def stays_in_registers(kernel: Built, loops: list[list[Line]], kind: str, name: str) -> None:
    most, stack = MORE.get((kind, name), (PUT_BY, PUT_BY))[not OLDEST]
    assert max(count(loop, "(LDL|STL)") for loop in loops) <= most
    assert kernel.stack <= stack
    assert kernel.shared <= SHARED
    # one that nobody uses would lie where something else does
    assert len(set(kernel.barriers())) == len(kernel.barriers()) > 0


def exponentials_after(texts: list[str], wait: int, block_q: int) -> int:
    """How many come after the wait for dP (the first; the second of dQ alone), that is not beside
    the product."""
    after = sum("MUFU.EX2" in text for text in texts[wait:])
    assert sum("MUFU.EX2" in text for text in texts[:wait]) + after >= block_q // 2
    return after
