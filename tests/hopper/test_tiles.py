"""The rules by which a tile is chosen, without kernels."""

from __future__ import annotations

from itertools import product

import pytest

pytest.importorskip("triton")

import torch

from rowmax.gpu.hopper import tiles
from rowmax.gpu.hopper.lib.rules import key_tiles_of_tensors
from rowmax.rules.band import any_range
from rowmax.testing import Case, make

ROWS = tiles.ROWS


def cut_twice(nq: int, nk: int, left: int, right: int, block: int, rows: int) -> bool:
    """Return True if both limits cut a key tile of 64 queries, or the left one the last tile."""
    offset = nk - nq
    for top in range(0, nq, rows):
        bottom = min(top + rows, nq) - 1
        low, high = any_range(top, bottom, offset, left, right, nk)
        lo, hi = (int(x) for x in key_tiles_of_tensors(*torch.tensor([[low], [high]]), block))
        for first, j in product(range(top, min(top + rows, nq), ROWS), range(lo, hi)):
            begin, end = j * block, (j + 1) * block
            # rows past the last query are tested like others, unless the tile is the last
            bottom = first + ROWS - 1 if j < hi - 1 else min(first + ROWS, nq) - 1
            by_left = begin < bottom + offset - left
            # a reference that lags takes the tile of the first query's last key as cut
            by_right = end > first + offset + right
            if by_left and (by_right or j == hi - 1):
                return True
    return False


def is_apart(nq: int, nk: int, left: int, right: int, block: int) -> bool:
    case = Case("", b=1, nq=nq, nk=nk, hq=1, d=64, left=left, right=right)
    return tiles.limits_apart(make(case).problem()[0], block)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("right", [-20, 0, 1, 70])
@pytest.mark.parametrize(("nq", "nk"), [(400, 400), (333, 501), (460, 390), (64, 450)])
def test_limits_that_are_apart_cut_no_tile_together(
    nq: int, nk: int, right: int, block: int
) -> None:
    found = 0
    for left in (*range(block - 2, block + 2), *range(100, 300, 7), 2 * block + 80):
        if is_apart(nq, nk, left, right, block):
            found += 1
            for rows in (64, 128, 192):
                assert not cut_twice(nq, nk, left, right, block, rows)
    assert found


@pytest.mark.parametrize(
    ("nq", "nk", "left", "right"),
    [(460, 587, 189, 0), (460, 547, 149, 40), (512, 512, 126, 200)],
)
def test_limits_at_the_edge_of_the_rule(nq: int, nk: int, left: int, right: int) -> None:
    """The rule is not stricter than it must be: with one key less, some tile is cut twice."""
    assert not is_apart(nq, nk, left, right, 128)
    assert is_apart(nq, nk, left + 1, right, 128)
    assert cut_twice(nq, nk, left, right, 128, 128)


def test_lengths_and_documents_are_not_apart() -> None:
    for more in ({"lengths": (0.5,)}, {"documents": "sorted"}):
        case = Case("", b=1, nq=400, nk=400, hq=1, d=64, left=300, right=0, **more)
        assert not tiles.limits_apart(make(case).problem()[0], 128)


@pytest.mark.parametrize(
    ("d", "left", "want"),
    [
        *[(d, 250, (2, 64)) for d in (32, 64, 96, 128, 256)],
        *[(d, 1024, (2, 128)) for d in (32, 64, 96, 128)],
        *[(64, 4096, (3, 128)), (96, 4096, (2, 128))],
    ],
)
def test_tiles_follow_the_keys_of_a_query(d: int, left: int, want: tuple[int, int]) -> None:
    case = Case("", b=1, nq=9000, nk=9000, hq=2, d=d, left=left, right=0)
    tile = tiles.tile_for(make(case, dtype=torch.bfloat16).problem()[0], "", 132)
    assert (tile.warpgroups, tile.block_k) == want


@pytest.mark.parametrize("right", [None, 0])
def test_tiles_follow_the_mean_without_a_bound(right: int | None) -> None:
    """Packed sequences of 1024 have the tile, and the launches, that a bound of 1024 gives."""
    case = Case("", hq=16, d=64, right=right, sequences=((1024, 1024),) * 16)
    bounded = make(case, dtype=torch.bfloat16).problem()[0]
    rows = bounded.total_k
    open_ended = bounded._replace(nq=rows, nk=rows)
    assert open_ended.usual == bounded == bounded.usual
    assert tiles.tile_for(open_ended, "", 132) == tiles.tile_for(bounded, "", 132)
    assert tiles.tile_for(bounded, "", 132).warpgroups == 2
    assert not tiles.lags(open_ended, "")
    long = bounded._replace(nq=rows - 1, nk=rows - 1)  # a bound below all rows is one
    assert long.usual == long
    assert tiles.tile_for(long, "", 132).warpgroups == 3


def test_the_mean_is_of_several_sequences() -> None:
    one = make(Case("", d=64, sequences=((9000, 9000),)), dtype=torch.bfloat16).problem()[0]
    assert one.usual == one
