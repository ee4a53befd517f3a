"""What the Hopper forward must compile to, for every head size and feature. Needs no GPU.

Three things that no test of results would notice: registers that overflow into memory in a loop
over key tiles, products that the assembler makes wait for one another, and a softmax that it
moves from under the product that hides it to after it.
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

from rowmax.hopper.tiles import LONG_64, SHARED, TILES, Tile, shared_bytes

from .hopper_build import Built, build, config

FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"RIGHT": True},
    "window": {"LEFT": True, "RIGHT": True},
    "lengths": {"PREFIX": True},
    "packed": {"VARLEN": True, "RIGHT": True},
    "documents": {"DOCUMENTS": True, "RIGHT": True},
    "softcap": {"SOFTCAP": True, "RIGHT": True},
    "alibi": {"ALIBI": True, "RIGHT": True},
    "sink-grouped": {"SINK": True, "GROUP": 4},
    "bias": {"BIAS": "copied"},
}
TABLE = [*TILES.items(), *([((64, 64), LONG_64)] if LONG_64 else [])]
#: every size plainly, every feature at the size of most models and at the widest
CONFIGS = [
    pytest.param(size, tile, features, id=f"{size[0]}x{size[1]}w{tile.warpgroups}-{name}")
    for size, tile in TABLE
    for name, features in FEATURES.items()
    if name in ("full", "causal") or size in ((128, 128), (256, 256))
]
#: none with the triton that torch 2.11 pins; 3.9 puts by a scalar a key tile where registers
#: are fewest (head size 256 with a window)
SPILLS = 0 if triton.__version__.startswith("3.6.") else 1
#: bytes of scalars that a thread may put by once a query tile, out of the loops
STACK = 160


def built(size: tuple[int, int], tile: Tile, features: dict[str, Any]) -> Built:
    if features.get("BIAS") == "copied":
        import torch

        small = Tile(tile.warpgroups, 64, tile.stages, 1)
        tile = Tile(tile.warpgroups, tile.block_k, tile.stages, 1)
        tile = tile if shared_bytes(tile, *size, torch.bfloat16) <= SHARED else small
    return build(config(*size, tile, **features), tile.registers)


@pytest.mark.parametrize(("size", "tile", "features"), CONFIGS)
def test_loops_keep_to_registers(size, tile, features):
    kernel = built(size, tile, features)
    loops = kernel.loops()
    assert len(loops) >= tile.warpgroups
    for loop in loops:
        assert len([line for line in loop if re.search(r"\b(LDL|STL)\b", line.text)]) <= SPILLS
    assert kernel.stack <= STACK
    assert kernel.shared <= SHARED


@pytest.mark.parametrize(("size", "tile", "features"), CONFIGS)
def test_products_are_not_serialised(size, tile, features):
    """One wait for scores and one for the output in a loop; one after each HGMMA otherwise."""
    for loop in built(size, tile, features).loops():
        waits = [line for line in loop if "WARPGROUP.DEPBAR" in line.text]
        assert len(waits) == 2


@pytest.mark.parametrize(("size", "tile", "features"), CONFIGS)
def test_softmax_runs_under_the_output(size, tile, features):
    """All exponentials of the weights come before the wait for the product that hides them."""
    for loop in built(size, tile, features).loops():
        texts = [line.text for line in loop]
        waits = [n for n, text in enumerate(texts) if "WARPGROUP.DEPBAR" in text]
        ends = waits[-1]
        after = sum("MUFU.EX2" in text for text in texts[ends:])
        before = sum("MUFU.EX2" in text for text in texts[waits[0] : ends])
        assert before >= tile_columns(size, tile, features)
        assert after <= 2  # what O is scaled by may come late


def tile_columns(size: tuple[int, int], tile: Tile, features: dict[str, Any]) -> int:
    """The weights of a tile that one thread makes: 64 rows by the columns, over 128 threads."""
    return 32 if features.get("BIAS") == "copied" else tile.block_k // 2
