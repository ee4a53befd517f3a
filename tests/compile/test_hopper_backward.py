"""What the Hopper backward must compile to, for every head size and feature. Needs no GPU."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("triton") is None or sys.platform != "linux":
    pytest.skip("compiling for a GPU needs triton, on Linux", allow_module_level=True)

import triton

from rowmax.hopper.gradients.tiles import TILES, WIDE
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
    "packed-ordered": {"VARLEN": True, "RAGGED": True, "RIGHT": True, "ORDERED": True},
    "documents": {"DOCUMENTS": True, "RIGHT": True},
    "softcap": {"SOFTCAP": True, "RIGHT": True},
    "alibi": {"ALIBI": True, "RIGHT": True},
    "bias": {"BIAS": True},
    "dbias": {"BIAS": True, "DBIAS": True, "RIGHT": True},
}
SIZES = [
    *((size, "all", tile) for size, tile in TILES.items()),
    *((size, kind, tile) for size, tiles in WIDE.items() for kind, tile in tiles.items()),
]
CONFIGS = [
    pytest.param(size, tile, {"KIND": kind, **features}, id=f"{size[0]}x{size[1]}-{kind}-{name}")
    for size, kind, tile in SIZES
    for name, features in FEATURES.items()
    if kind == "all" or ("ORDERED" not in features and "BIAS" not in features)
]
#: none with the triton that torch 2.11 pins; 3.9 puts by scalars where registers are fewest
OLDEST = triton.__version__.startswith("3.6.")
SPILLS = 0 if OLDEST else 50
#: where dbias is stored too a few scalars; distances beside the widest sums more than that
SPILLS_DBIAS, SPILLS_ALIBI = (12, 40) if OLDEST else (50, 80)
#: bytes of scalars that a thread may put by, out of the loops of the products
STACK = 160 if OLDEST else 192
#: exponentials that may come after the wait for the product beside them, of 32
LATE = 8 if OLDEST else 24


def built(size: tuple[int, int], tile: Any, features: dict[str, Any], dtype: str) -> Built:
    return build(config(*size, tile, **features), tile.registers, dtype)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("size", "tile", "features"), CONFIGS)
def test_loops_keep_to_registers(size, tile, features, dtype):
    kernel = built(size, tile, features, dtype)
    loops = kernel.loops()
    assert len(loops) >= 2
    most = SPILLS_DBIAS if features.get("DBIAS") else SPILLS
    stack = STACK
    if features.get("ALIBI") and size[0] == 256:
        most, stack = SPILLS_ALIBI, 256
    elif features.get("ALIBI") and size[0] == 128:
        most = SPILLS_DBIAS
    for loop in loops:
        assert len([line for line in loop if re.search(r"\b(LDL|STL)\b", line.text)]) <= most
    assert kernel.stack <= stack
    assert kernel.shared <= SHARED


@pytest.mark.parametrize(("size", "tile", "features"), CONFIGS)
def test_products_are_not_serialised(size, tile, features):
    """Three waits in a step (of dV alone two, as where dQ is made beside the next scores); one
    after each HGMMA otherwise."""
    two = features["KIND"] == "dv" or (tile.late == 2 and not features.get("BIAS"))
    for loop in built(size, tile, features, "bf16").loops():
        waits = [line for line in loop if "WARPGROUP.DEPBAR" in line.text]
        assert len(waits) == (2 if two else 3)


@pytest.mark.parametrize(("size", "tile", "features"), CONFIGS)
def test_weights_are_made_beside_products(size, tile, features):
    """The exponentials come before the wait for dP (the first; the second of wide heads)."""
    if features["KIND"] == "dv":
        pytest.skip("dV has no other product in flight")
    for loop in built(size, tile, features, "bf16").loops():
        texts = [line.text for line in loop]
        waits = [n for n, text in enumerate(texts) if "WARPGROUP.DEPBAR" in text]
        wait = waits[0 if features["KIND"] == "all" else 1]
        after = sum("MUFU.EX2" in text for text in texts[wait:])
        assert sum("MUFU.EX2" in text for text in texts[:wait]) + after >= tile.block_q // 2
        assert after <= (max(12, LATE) if features.get("SOFTCAP") else LATE)
