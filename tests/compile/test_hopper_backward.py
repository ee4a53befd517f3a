"""What the Hopper backward must compile to, for every head size and feature. Needs no GPU.

Three things that no test of results would notice: registers that overflow into memory in a loop
over tiles, products that the assembler makes wait for one another, and exponentials that it moves
from under the product that hides them to after it.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("triton") is None or sys.platform != "linux":
    pytest.skip("compiling for a GPU needs triton, on Linux", allow_module_level=True)

import triton

from rowmax.hopper.gradients.tiles import APART, TILES, WIDE
from rowmax.hopper.tiles import SHARED

from .hopper_backward_build import build, config
from .hopper_build import Built

FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "ragged": {"RAGGED": True},
    "causal": {"RIGHT": True},
    "ordered": {"RIGHT": True, "ORDERED": True, "FRESH": True},
    "window": {"LEFT": True, "RIGHT": True},
    "lengths": {"PREFIX": True, "RAGGED": True},
    "packed": {"VARLEN": True, "RAGGED": True, "RIGHT": True},
    "documents": {"DOCUMENTS": True, "RIGHT": True},
    "softcap": {"SOFTCAP": True, "RIGHT": True},
    "alibi": {"ALIBI": True, "RIGHT": True},
    "dbias": {"BIAS": True, "DBIAS": True, "RIGHT": True},
}
#: what wide heads are compiled with beside, by the gradient that it weighs on most
WIDE_FEATURES = {
    "dq": ("lengths", "alibi"),
    "dk": ("packed", "alibi"),
    "dv": ("window", "documents"),
    "pair": ("window", "lengths", "packed", "documents", "softcap", "alibi"),
}
LAUNCHES = {size: APART[size] | WIDE[size] for size in WIDE}


def cases():
    """(head sizes, features, dtype): every size plainly, every feature at the size of most models,
    and at others what is heaviest there."""
    for size in TILES:
        names = FEATURES if size == (128, 128) else ("full", "causal", "packed", "dbias")
        for name in names:
            yield size, "all", name, "bf16"
        yield size, "all", "causal", "fp16"
    for size, tiles in LAUNCHES.items():
        for kind in tiles:
            more = WIDE_FEATURES[kind] if size == (256, 256) else ()
            for name in ("full", "causal", *more):
                yield size, kind, name, "bf16"


#: none with the triton that torch 2.11 pins; 3.9 puts by scalars where registers are fewest
OLDEST = triton.__version__.startswith("3.6.")
SPILLS = 0 if OLDEST else 50
#: where dbias is stored too a few scalars; distances beside the widest sums more than that
SPILLS_DBIAS, SPILLS_ALIBI = (12, 40) if OLDEST else (50, 80)
#: bytes of scalars that a thread may put by, out of the loops of the products
STACK = 160 if OLDEST else 240
#: exponentials that may come after the wait for the product beside them, of 32
LATE = 8 if OLDEST else 24


@pytest.mark.parametrize(
    ("size", "kind", "name", "dtype"),
    [pytest.param(*case, id=f"{case[0][0]}x{case[0][1]}-{'-'.join(case[1:])}") for case in cases()],
)
def test_compiles_to(size, kind, name, dtype):
    tile = TILES[size] if kind == "all" else LAUNCHES[size][kind]
    features = FEATURES[name]
    kernel = build(config(*size, tile, KIND=kind, **features), tile.registers, dtype)
    loops = kernel.loops()
    assert len(loops) >= 2
    stays_in_registers(kernel, size, features)
    for loop in loops:
        texts = [line.text for line in loop]
        waits = [n for n, text in enumerate(texts) if "WARPGROUP.DEPBAR" in text]
        # in a step; one after each HGMMA where products wait for one another
        assert len(waits) == {"all": 4, "dv": 2, "pair": 2}.get(kind, 3)
        if kind not in ("dv", "pair"):  # which have no other product in flight
            made_beside_products(texts, waits[0 if kind == "all" else 1], tile.block_q, features)


def stays_in_registers(kernel: Built, size: tuple[int, int], features: dict[str, Any]) -> None:
    most = SPILLS_DBIAS if features.get("DBIAS") else SPILLS
    stack = STACK
    if features.get("ALIBI") and size[0] == 256:
        most, stack = SPILLS_ALIBI, 256
    elif features.get("ALIBI") and size[0] == 128:
        most = SPILLS_DBIAS
    for loop in kernel.loops():
        assert len([line for line in loop if re.search(r"\b(LDL|STL)\b", line.text)]) <= most
    assert kernel.stack <= stack
    assert kernel.shared <= SHARED


def made_beside_products(
    texts: list[str], wait: int, block_q: int, features: dict[str, Any]
) -> None:
    """The exponentials come before the wait for dP (the first; the second of wide heads)."""
    after = sum("MUFU.EX2" in text for text in texts[wait:])
    assert sum("MUFU.EX2" in text for text in texts[:wait]) + after >= block_q // 2
    assert after <= (max(12, LATE) if features.get("SOFTCAP") else LATE)
