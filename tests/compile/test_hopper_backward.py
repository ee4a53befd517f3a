"""The machine code of the Hopper backward, for every head size and feature. Needs no GPU.

No test of results notices these faults: registers that spill in a loop over tiles, products that
the assembler serializes, exponentials that it moves below the product that hides them. Nor does
one notice a thread that arrives at a barrier before its warpgroup has read the buffer.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("triton") is None or sys.platform != "linux":
    pytest.skip("compiling for a GPU needs triton, on Linux", allow_module_level=True)

from rowmax.gpu.hopper.backward_tiles import (
    BETWEEN,
    FLOAT32_BIAS,
    FOUR,
    LATE_D,
    LATE_RUNS,
    LONG,
    SHARED_BIAS,
    SHARED_BY_FOUR,
    TILES,
    WARPGROUPS,
    Config,
    DbiasConfig,
    DkdvConfig,
    DqConfig,
    FusedConfig,
    WideConfig,
)
from rowmax.gpu.hopper.tiles import SHARED

from . import sass
from .hopper_backward_build import build, config
from .hopper_build import Built, Line, count
from .releases import measured

FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "ragged": {"RAGGED": True},
    "causal": {"RIGHT": True},
    "ordered": {"RIGHT": True, "ORDERED": True, "FRESH": True},
    "abreast": {"RIGHT": True, "ORDERED": True, "FRESH": True, "ABREAST": True},
    "complete": {"RIGHT": True, "COMPLETE": True},
    "window": {"LEFT": True, "RIGHT": True},
    "lengths": {"PREFIX": True, "RAGGED": True},
    "packed": {"VARLEN": True, "RAGGED": True, "RIGHT": True},
    "packed late": {"VARLEN": True, "RAGGED": True, "RIGHT": True, "LATE_RUNS": LATE_RUNS},
    "documents": {"DOCUMENTS": True, "RIGHT": True},
    "softcap": {"SOFTCAP": True, "RIGHT": True},
    "alibi": {"ALIBI": True, "RIGHT": True},
    "alibi block": {"ALIBI": True, "RIGHT": True},
    "dropout": {"DROPOUT": True, "RIGHT": True},
    "dbias": {"BIAS": True, "DBIAS": True, "RIGHT": True},
    "dbias alone": {"BIAS": True, "DBIAS": True, "RIGHT": True, "DQ": False},
    "row": {"ROW": True, "DROW": True, "RIGHT": True},
    "column": {"COLUMN": True, "RIGHT": True},
    "bias": {"BIAS": True},
    "causal bias": {"BIAS": True, "RIGHT": True},
    "bias lengths": {"BIAS": True, "PREFIX": True, "RAGGED": True},
    "bias documents": {"BIAS": True, "DOCUMENTS": True, "RIGHT": True},
    "bias dropout": {"BIAS": True, "DROPOUT": True},
    "bias ordered": {"BIAS": True, "ORDERED": True, "FRESH": True},
}
#: by kernel of wide heads: further features at the largest head size
WIDE_FEATURES = {
    "dq": (
        "lengths",
        "packed",
        "dropout",
        "alibi",
        "alibi block",
        "bias",
        "dbias",
        "row",
        "column",
    ),
    "dkdv": (
        "window",
        "lengths",
        "packed",
        "packed late",
        "documents",
        "softcap",
        "dropout",
        "alibi",
        "alibi block",
        "causal bias",
        "row",
        "column",
    ),
    "wide": ("window", "packed", "documents", "softcap", "alibi", "alibi block"),
}


NAMES = {
    FusedConfig: "fused",
    DqConfig: "dq",
    DkdvConfig: "dkdv",
    WideConfig: "wide",
    DbiasConfig: "dbias",
}


def cases():
    """Yield (tile, features, dtype).

    Every size comes plainly, every feature at the size of most models, and at others the features
    that take most registers.
    """
    every = [x for x in FEATURES if ("bias" not in x or "dbias" in x) and x != "complete"]
    for size, tiles in TILES.items():
        for tile in tiles:
            if isinstance(tile, FusedConfig):
                some = ["full", "causal", "packed", "dbias", "dbias alone", "row", "column"]
                names = every if size == (128, 128) else [*some, "dropout"]
            else:
                more = WIDE_FEATURES[NAMES[type(tile)]] if size in ((256, 256), (512, 512)) else ()
                names = ["full", "causal", *more]
            for name in names:
                yield tile, name, "bf16"
            if isinstance(tile, FusedConfig):
                yield tile, "causal", "fp16"
    yield TILES[64, 64][0], "complete", "bf16"
    yield LONG[64, 64], "complete", "bf16"
    for tiles in BETWEEN.values():
        for tile in tiles:
            for name in ("full", "causal", "packed", "ordered", "documents", "softcap", "alibi"):
                if name != "ordered" or isinstance(tile, FusedConfig):
                    yield tile, name, "bf16"
            yield tile, "causal", "fp16"
    for tile in LONG.values():
        for name in ("full", "ragged", "causal", "ordered", "packed", "softcap"):
            yield tile, name, "bf16"
        yield tile, "causal", "fp16"
        if tile.D >= LATE_D:
            yield tile, "packed late", "bf16"
    for name in ("bias", "causal bias", "bias lengths", "bias ordered"):
        yield FOUR, name, "bf16"
    yield FOUR, "bias", "fp16"
    for tile in (*SHARED_BIAS.values(), SHARED_BY_FOUR):
        for name in ("bias", "causal bias", "bias lengths"):
            yield tile, name, "bf16"
    yield SHARED_BIAS[128, 128], "bias documents", "bf16"
    yield SHARED_BIAS[64, 64], "bias dropout", "bf16"
    yield BETWEEN[96, 96][0], "dropout", "bf16"
    for name in ("bias", "causal bias", "bias lengths"):
        yield TILES[32, 32][0], name, "bf16"
        for tiles in FLOAT32_BIAS.values():
            for tile in tiles:
                yield tile, name, "bf16"


#: the most LDL and STL in a loop, and bytes of stack, that were measured. With triton 3.6 there are
#: none in a loop, but where a bias has a gradient, and for ALiBi's distances.
SPILLS = measured((0, 144), (4, 144), (6, 208))
#: the same for kernels with more, with each release
MORE = {
    ("fused", "dbias"): ((4, 128), SPILLS, SPILLS),
    ("fused", "dbias alone"): ((8, 48), SPILLS, SPILLS),
    ("fused", "row"): ((5, 144), (4, 176), (17, 208)),
    # the next tile, while this one is stored
    ("fused", "packed"): (SPILLS, (1, 168), (6, 232)),
    ("fused", "dropout"): ((1, 144), SPILLS, SPILLS),
    ("fused", "packed late"): (SPILLS, (1, 168), (6, 232)),
    ("dkdv", "row"): (SPILLS, SPILLS, (9, 208)),
    # a number for each query is 16 more in a thread; such a bias changes lse alone, so it is rare
    # (measured with 3.9, and used for 3.6 as well)
    ("fused", "column"): ((22, 240), SPILLS, (22, 240)),
    ("dkdv", "column"): ((25, 208), SPILLS, (25, 208)),
    ("dq", "alibi"): ((36, 216), (41, 232), SPILLS),
    ("dq", "alibi block"): ((36, 216), (41, 232), SPILLS),
    ("dq", "dropout"): ((18, 176), (17, 200), (17, 200)),
    ("dq", "dbias"): ((21, 248), (16, 200), (22, 208)),
    ("dbias", "bias"): ((2, 40), SPILLS, (8, 40)),
    ("dbias", "causal bias"): ((3, 40), SPILLS, (16, 64)),
    ("dbias", "bias lengths"): ((2, 40), (6, 80), (27, 56)),
    # the producer, nine tenths of it, in two loops over steps: it draws the next tile in between,
    # which is 1.21 times as fast (8 sequences of 2048, 8 heads on 2, H100, 2026-11-25)
    ("wide", "packed"): ((0, 344), (1, 376), (0, 376)),
    # only where a tile has several documents: others need no mask, and steps without have 0 or 1
    ("dbias", "bias documents"): ((51, 240), (52, 264), (48, 288)),
}
#: for products, in a step; ``wide`` has a loop of weights, and one of gradients
WAITS = {"fused": 3, "dq": 3, "dkdv": 2, "dbias": 2}
#: exponentials that may come after the wait for the product over them, of 32
LATE = measured(7, 9, 9)
#: the same with dropout, whose draws have more instructions under that product than these
LATE_OF_DROPOUT = measured(9, 9, 26)
#: a row of a bias arrives late: one of the two warpgroups has its exponentials after the product
#: (481 TFLOP/s on an H200, 485 without a bias), the other does not
ONE_IN_TIME = {(64, "fused", "row")} | measured(*[{(64, "fused", "column")}] * 2, set())
#: at head size 32 only masked steps are late, where the bias is a number a key or a query
ONE_IN_TIME |= {(32, "fused", "row"), (32, "fused", "column")}
#: one loop over masked steps, of one warpgroup, waits for lse before its exponentials: 16 of 32,
#: and 17 of 64 at head size 32
MASKED_LATE = {("dbias", "causal bias"): 17}


def is_halved(tile: Config) -> bool:
    """Return True if a step has halves (``backward_steps.halved_step``)."""
    return isinstance(tile, FusedConfig) and tile.HALVED


def identity(tile, name, dtype):
    """Return the name of a case."""
    kind = NAMES[type(tile)] + "-float32" * tile.BIAS_FLOAT32 + "-long" * is_halved(tile)
    if isinstance(tile, WideConfig):
        kind += f"-d{tile.GRADIENT}"
    if isinstance(tile, DbiasConfig) and tile.WARPGROUPS == 4:
        kind += "-four"
    return f"{tile.D}x{tile.DV}-{kind}-{name}-{dtype}"


#: one of each kind of kernel
_NEWEST = {
    "32x32-fused-bias-bf16",
    "64x64-fused-long-complete-bf16",
    "128x128-fused-causal-bf16",
    "256x256-dq-causal-bf16",
    "256x256-dkdv-causal-bf16",
    "512x512-wide-dq-causal-bf16",
    "128x128-dbias-bias-bf16",
}
MARKED = [
    pytest.param(*case, id=name, marks=pytest.mark.newest if name in _NEWEST else ())
    for case in cases()
    for name in [identity(*case)]
]
assert len([p for p in MARKED if p.marks]) == len(_NEWEST)


@pytest.mark.parametrize(("tile", "name", "dtype"), MARKED)
def test_compiles_to(tile, name, dtype):
    kind = NAMES[type(tile)]
    kernel = build(config(tile, **FEATURES[name]), dtype, shifted=name == "alibi block")
    # exponents of the dq kernel with dbias are of two numbers
    loops = kernel.loops(16 if (kind, name) == ("dq", "dbias") else 0)
    assert len(loops) >= 2
    stays_in_registers(kernel, loops, kind, name)
    assert kernel.too_early(tile.WARPGROUPS) == []
    report = sass.report(kernel.cubin)
    assert report.products > 0
    assert report.findings == report.stack == []
    late = []
    for loop in loops:
        texts = [line.text for line in loop]
        waits = [n for n, text in enumerate(texts) if "WARPGROUP.DEPBAR" in text]
        # one after each HGMMA where products wait for one another; dQ is waited for, and before it
        # dV, where dQ takes the registers of P (backward_steps.step)
        own_dq = kind == "fused" and name != "dbias alone"
        if kind == "wide":
            of_weights = any("MUFU.EX2" in text for text in texts)
            assert len(waits) == (1 if tile.SCORES_ALONE else 2 if of_weights else 3)
            if tile.SCORES_ALONE and of_weights:  # under S of the next step
                late.append(exponentials_after(texts, waits[0], tile.BLOCK_STREAMED))
            continue
        twice = is_halved(tile) and tile.DP_HALVED
        assert len(waits) == WAITS[kind] + own_dq + (own_dq and not tile.AHEAD) + twice
        if twice:  # both halves, between S and dP
            for begin, wait, end in ((0, waits[1], waits[2]), (waits[2], waits[3], len(texts))):
                part = texts[begin:end]
                late.append(exponentials_after(part, wait - begin, tile.BLOCK_STREAMED // 2))
        elif is_halved(tile):  # the first half's, between S and dP
            found = exponentials_after(texts[: waits[2]], waits[1], tile.BLOCK_STREAMED // 2)
            # At head size 96 ptxas moves those of one warpgroup or both. The kernel is still 1.055
            # times as fast as with whole steps (H200).
            late.append(found if tile.D == 64 else 0)
        elif kind != "dkdv":  # which has no other product in flight
            wait = waits[0 if kind == "fused" else 1]
            late.append(exponentials_after(texts, wait, tile.BLOCK_STREAMED))
    if (tile.D, kind, name) in ONE_IN_TIME and not is_halved(tile):
        late = sorted(late)[: len(late) // 2]
    if (kind, name) in MASKED_LATE:
        late.sort()
        assert late.pop() <= MASKED_LATE[kind, name]
    most = LATE_OF_DROPOUT if name == "dropout" else LATE
    assert all(n <= most for n in late)


def test_a_part_of_a_shared_bias_stays_in_registers():
    kernel = build(config(SHARED_BIAS[64, 64], **FEATURES["bias"]), parts=True)
    stays_in_registers(kernel, kernel.loops(0), "dbias", "bias")
    assert kernel.too_early(WARPGROUPS) == []
    assert sass.report(kernel.cubin).findings == []


@pytest.mark.parametrize("places", ["", "placed", "alone", "shares"])
def test_parts_of_sums_stay_in_registers(places: str) -> None:
    """dk and dv in float32, at places, of a share, or neither: loops are those of a whole call.

    Stores have 8 bytes, as many as a thread has of a row side by side; those of rows that are no
    parts of sums have 4.
    """
    shares = places == "shares"
    placed, alone = places != "" and not shares, places == "alone"
    tile = config(TILES[128, 128][0], **FEATURES["causal"])
    kernel = build(tile, wide=True, placed=placed, alone=alone, shares=shares)
    assert sum("STG.E.64" in line.text for line in kernel.lines) == 128
    assert sum("STG.E " in line.text for line in kernel.lines) == 128 * alone
    stays_in_registers(kernel, kernel.loops(0), "fused", "causal")
    assert kernel.too_early(WARPGROUPS) == []
    assert sass.report(kernel.cubin).findings == []


def stays_in_registers(kernel: Built, loops: list[list[Line]], kind: str, name: str) -> None:
    most, stack = measured(*MORE.get((kind, name), (SPILLS,) * 3))
    assert max(count(loop, "(LDL|STL)") for loop in loops) <= most
    assert kernel.stack <= stack
    assert kernel.shared <= SHARED
    # a barrier without use would share its memory with another
    assert len(set(kernel.barriers())) == len(kernel.barriers()) > 0


def exponentials_after(texts: list[str], wait: int, block: int) -> int:
    """Return how many exponentials come after the wait for dP, so not under the product.

    That is the first wait; the second of the dq kernel.
    """
    after = sum("MUFU.EX2" in text for text in texts[wait:])
    assert sum("MUFU.EX2" in text for text in texts[:wait]) + after >= block // 2
    return after
