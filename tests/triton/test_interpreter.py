"""The Triton kernels under Triton's interpreter, over the shared table, on the CPU.

Every access of a kernel is checked to lie within its tensors. bfloat16 products are wrong in the
interpreter, so the dtypes are float32 and float16.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rowmax.call import dispatch as backends
from rowmax.call.blocks import Block, block_of
from rowmax.operators.autograd import attend
from rowmax.reference import dense
from rowmax.testing import (
    CASES,
    COVERING,
    Case,
    answer,
    complaints,
    cotangents,
    expected,
    make,
    poisoned,
    tagged,
)
from rowmax.testing.table import EXPANDED
from tests import partial_sums
from tests.extreme_bias import CASES as EXTREMES
from tests.extreme_bias import checks

interpreter = importlib.import_module("triton.runtime.interpreter")
forward = importlib.import_module("rowmax.gpu.triton.forward")
compiled = importlib.import_module("rowmax.gpu.compiled")
launch = importlib.import_module("rowmax.gpu.launch")
preprocess = importlib.import_module("rowmax.gpu.preprocess")
shares = importlib.import_module("rowmax.gpu.shares")
tiles = importlib.import_module("rowmax.gpu.tiles")
ADDED = importlib.import_module("rowmax.gpu.triton.key_parts").add_parts_kernel

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # the interpreter's own, of numpy
    pytest.mark.skipif(
        not isinstance(forward.forward_kernel, interpreter.InterpretedFunction),
        reason="the kernels were imported without TRITON_INTERPRET=1",
    ),
]

CHOSEN = (
    "plain",
    "causal",
    "window-both",
    "lengths",
    "scale-zero",
    "sink",
    "softcap-large",
    "mqa",
    "documents-queries",
    "empty",
    "rows-nq=1-",
    "rows-nq=113",
    "head-d=33",
    "head-d=192",
    "bias-b1q1",
    "bias-1h1k",
    "bias-11qk",
    "strides-layout=sliced",
    "strides-layout=strided",
    "packed-unequal-causal",
    "packed-mask",
    "packed-bound",
    "packed-empty",
    "packed-none",
)
_TAKEN = COVERING + EXPANDED
SINGLES = [c for c in CASES if c not in _TAKEN and c.name.startswith(CHOSEN)]


#: cases of extreme biases: a full, shared, row and column bias, a sink, masks and packed calls
ENDS = (
    *("bhqk", "few-rows", "11qk", "sink", "causal", "lengths"),
    *("packed-full", "packed-row", "dropout"),
)


class Watched:
    """The interpreter's memory, with every access checked against the pointers of the launch."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.ranges: list[tuple[int, int, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._check(pointers, mask, np.dtype(dtype).itemsize)
        return self.real.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self._check(pointers, mask, value.dtype.itemsize)
        return self.real.store(pointers, value, mask)

    def _check(self, pointers: Any, mask: Any, size: int) -> None:
        at = np.asarray(pointers).astype(np.int64)[np.asarray(mask).astype(bool)]
        if not at.size:
            return
        first, last = at.min(), at.max() + size
        if any(low <= first and last <= high for low, high, _ in self.ranges):
            return  # all of them in one range
        inside = np.zeros(at.shape, bool)
        for low, high, _ in self.ranges:
            inside |= (at >= low) & (at + size <= high)
        assert inside.all(), f"{(~inside).sum()} accesses outside of {[r[2] for r in self.ranges]}"


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    watched = Watched(interpreter._interpreter)
    run = compiled.Launch.on

    def checked_run(one: Any, like: Tensor, t: Any) -> None:
        named = {name: x for name, x in t._asdict().items() if x is not None}
        storages = {name: x.untyped_storage() for name, x in named.items()}
        watched.ranges = [
            (s.data_ptr(), s.data_ptr() + s.nbytes(), name) for name, s in storages.items()
        ]
        run(one, like, t)

    monkeypatch.setattr(interpreter, "_interpreter", watched)
    monkeypatch.setattr(compiled.Launch, "on", checked_run)
    monkeypatch.setitem(backends._DEVICES, "triton", ("cpu", "cuda", "xpu"))
    backends.choose.cache_clear()
    launch._jobs.clear()
    yield
    backends.choose.cache_clear()
    launch._jobs.clear()


def _check(case: Case, dtype: torch.dtype) -> None:
    call = make(case, dtype=dtype)
    grads = cotangents(call)
    want = expected(call, *grads)
    with poisoned():
        got = answer(call, *grads, backend="triton")
    wrong = complaints(got, want)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("case", COVERING[::2] + SINGLES[1::2] + EXPANDED, ids=str)
def test_float32(case: Case) -> None:
    _check(case, torch.float32)


@pytest.mark.parametrize("case", COVERING[1::2] + SINGLES[::2], ids=str)
def test_float16(case: Case) -> None:
    _check(case, torch.float16)


def test_float32_partial_sums_of_float16() -> None:
    partial_sums.check("triton", torch.float16)


@pytest.mark.parametrize(
    "case", [c for c in EXTREMES if c.d == 64 and c.name.endswith(ENDS)], ids=str
)
def test_float32_of_any_size(case: Case) -> None:
    """Biases and sinks as large as their dtype goes."""
    wrong = checks("triton", "cpu", ((torch.float32, torch.float32),), [case])
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("case", tagged("blocks"), ids=str)
def test_blocks(case: Case) -> None:
    _check(replace(case, nq=min(case.nq, 90), nk=110, d=32), torch.float32)


@pytest.mark.parametrize(
    "case",
    [
        Case("alibi", b=1, nq=80, nk=100, hq=2, hk=1, d=16, causal=True, alibi=True),
        Case("dropout", b=1, nq=80, nk=100, hq=2, d=16, left=40, right=30, dropout=0.3),
    ],
    ids=str,
)
def test_blocks_have_the_bits_of_the_whole(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of out, lse and dq are equal where no tile is cut; so are kept sets in dk and dv."""
    chosen = tiles.Tiles(16, 32, 4, 2, False)
    monkeypatch.setattr(launch, "tiles_for", lambda *_: chosen)
    tensors, options = make(case).normalized(backend="triton")
    dout, dlse = (torch.randn(1, 80, 2, 16), torch.randn(1, 2, 80))

    def gradients(block: Block) -> tuple[torch.Tensor, ...]:
        part, placed = block_of(tensors, options, block)
        leaves = [t.detach().requires_grad_() for t in part[:3]]
        out, lse = attend(part._replace(q=leaves[0], k=leaves[1], v=leaves[2]), placed, None)
        i, h = block.i or slice(None), block.h or slice(None)
        grads = torch.autograd.grad([out, lse], leaves, [dout[:, i, h], dlse[:, h, i]])
        return out.detach(), lse.detach(), *grads

    out, lse, dq, dk, dv = gradients(Block())
    cuts = [slice(0, 32), slice(32, 80)]
    parts = [gradients(Block(i=i)) for i in cuts]
    for i, part in zip(cuts, parts, strict=True):
        assert torch.equal(part[0], out[:, i])
        assert torch.equal(part[1], lse[:, :, i])
        assert torch.equal(part[2], dq[:, i])
    torch.testing.assert_close(parts[0][3] + parts[1][3], dk)
    torch.testing.assert_close(parts[0][4] + parts[1][4], dv)
    heads = gradients(Block(h=slice(1, 2)))
    assert torch.equal(heads[0], out[:, :, 1:])
    assert torch.equal(heads[2], dq[:, :, 1:])


def test_a_block_that_begins_within_64_keys_is_refused() -> None:
    case = Case("block", dropout=0.3, nq=9, positions=(0, 0, 65, 0, 0))
    with pytest.raises(ValueError, match="it takes no block that begins at key 65"):
        make(case)(backend="triton")


@pytest.mark.parametrize("shape", [(16, 16), (16, 64), (64, 32)], ids=str)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        Case("causal", b=1, nq=70, nk=90, hq=2, causal=True, dropout=0.2),
        Case("window", b=1, nq=100, hq=2, left=33, right=5, bias="bhqk"),
        Case("block", b=1, nq=70, nk=150, hq=2, dropout=0.3, positions=(0, 7, 64, 5, 3)),
        Case("mask", b=1, nq=70, nk=60, hq=2, allowed="11qk", documents="unsorted"),
        Case("packed", hq=2, hk=1, sequences=((20, 37), (0, 5), (50, 41)), causal=True),
    ],
    ids=str,
)
def test_tiles_of_any_shape(
    case: Case, shape: tuple[int, int], split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = tiles.Tiles(*shape, 4, 2, split)
    monkeypatch.setattr(launch, "tiles_for", lambda *_: chosen)
    _check(case, torch.float32)


#: features in which the sharers of a tile of the bias may differ
SHARED = [
    Case("causal", causal=True),
    Case("window", left=33, right=5, softcap=1.5),
    Case("queries-past-keys", nq=130, nk=50, causal=True),
    Case("lengths", b=4, lengths=(0.3, 1.0, 0.0, 0.6), dropout=0.2),
    Case("documents", b=3, documents="batched", alibi=True),
    Case("prefix", b=4, prefix=(0.3, 1.2, 0.0, 0.6), left=70),
    Case("documents-of-all", documents="sorted", causal=True),
    Case("mask", allowed="bhqk", empty_rows=True),
    Case("packed", sequences=((64, 90), (0, 17), (70, 37), (33, 0), (5, 40)), causal=True),
    Case("packed-mask", sequences=((64, 90), (70, 37)), allowed="1hqk", lengths=(0.5, 1.0)),
]


@pytest.mark.parametrize(
    ("bias", "sizes"),
    [
        pytest.param(bias, sizes, id=f"shared-{bias}")
        for bias, sizes in (("1hqk", (80, 72)), ("b1qk", (64, 128)), ("11qk", (32, 32)))
    ],
)
@pytest.mark.parametrize("case", SHARED, ids=str)
def test_bias_that_is_shared(case: Case, bias: str, sizes: tuple[int, int]) -> None:
    """Heads of one part of columns, of several, and of values wider than keys."""
    d, dv = sizes
    nq = case.nq if case.nq != 150 else 100
    _check(replace(case, nq=nq, hq=4, hk=2, d=d, dv=dv, bias=bias), torch.float16)


#: masks and terms of calls whose programs share a tile of keys
OF_SHARES = [
    *SHARED[:3],
    Case("lengths", b=4, lengths=(0.3, 1.0, 0.0, 0.6), dropout=0.2, causal=True),
    Case("documents", b=3, documents="batched", alibi=True, bias="bhqk"),
    Case("column-sums", bias="1h1k", causal=True),
    Case("mask", allowed="bhqk", empty_rows=True, sink=True),
    SHARED[-2],
    Case("wide", nq=70, d=144, dv=200, softcap=1.5),
]


@pytest.mark.parametrize("heads", [(4, 1), (12, 2)], ids=str)
@pytest.mark.parametrize("case", OF_SHARES, ids=str)
def test_shares_of_a_group(
    case: Case, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two programs share a tile of keys, or as many as there are heads."""
    hq, hk = heads
    count = hq // hk if hk == 1 else 2
    monkeypatch.setattr(launch, "shares_of", lambda *_: count)
    nq = case.nq if case.nq != 150 else 80
    _check(replace(case, nq=nq, hq=hq, hk=hk, b=min(case.b, 3)), torch.float16)
    parts = {job.numbers.parts for job in launch._jobs.values() if job.kernel is ADDED}
    assert parts == {count}


def test_number_of_shares() -> None:
    def count(block_k: int = 64, **case: Any) -> int:
        return shares.shares_of(make(Case("", **case)).problem()[0], block_k)

    assert count(b=1, nq=2048, hq=8, hk=1) == 8
    assert count(b=1, nq=2048, hq=32, hk=8) == 1  # 256 tiles
    assert count(128, b=1, nq=2048, hq=32, hk=8) == 2
    assert count(b=1, nq=256, nk=2048, hq=12, hk=1) == 6  # 512 queries each
    assert count(b=1, nq=100, hq=4, hk=1) == 1
    assert count(b=1, nq=1024, hq=6, hk=6) == 1
    assert count(sequences=((1024, 900), (1024, 1148)), hq=6, hk=2) == 6 // 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["k", "v"])
def test_unseen_nan_does_not_matter(name: str, bad: float) -> None:
    """A key that a row may not see has no part in it, forward and backward, whatever its values."""
    call = make(Case("nan", b=1, nq=50, hq=1, d=16, causal=True))
    dout, dlse = cotangents(call)
    clean = answer(call, dout, dlse, backend="triton")
    leaf = call.leaves[name].clone()
    leaf[0, 30:, 0] = bad
    got = answer(call.with_leaves({**call.leaves, name: leaf}), dout, dlse, backend="triton")
    for x, y in ((got.out, clean.out), (got.gradients["q"], clean.gradients["q"])):
        torch.testing.assert_close(x[:, :30], y[:, :30])
    assert not got.out[:, 30:].isfinite().any()


def test_a_triton_of_another_form_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests then run at the interpreter's own speed."""
    faster = importlib.import_module("tests.interpreter")
    before = interpreter._patch_lang
    monkeypatch.delattr(interpreter, faster._DONE)
    for name, arguments in (("_patch_lang", "fn more"), ("no_such_name", "fn")):
        monkeypatch.setattr(faster, "KNOWN", ((interpreter, name, arguments),))
        faster.speed_up()
        assert interpreter._patch_lang is before
        assert not hasattr(interpreter, faster._DONE)


@pytest.mark.parametrize("right", [None, 140], ids=str)
@pytest.mark.parametrize("far", [(), (0,), (17,), (3, 149, 599, 2039)], ids=str)
def test_float32_rest_of_lse_of_many_tiles(far: tuple[int, ...], right: int | None) -> None:
    """In a row of biases of -1e9 lse lacks log n, wherever the row is among those of a program."""
    b, h, nq, nk = 3, 4, 170, 40  # 11 tiles of a head, 8 of a program
    call = make(Case("rest", b=b, hq=h, nq=nq, nk=nk, d=16, bias="bhqk", right=right))
    bias = call.keywords["bias"].detach().clone()
    bias.view(b * h * nq, nk)[list(far)] = -1e9
    problem, tensors = replace(call, keywords={**call.keywords, "bias": bias}).problem()
    _, lse = dense.attention(problem, tensors, torch.float32)
    with poisoned():
        rest = preprocess.row_sums(problem, tensors, lse.float(), tiles.Tiles(16, 16, 4, 2))
    assert rest is not None
    want = torch.zeros(b * h * nq)
    last = torch.tensor(far, dtype=torch.long) % nq + nk - nq + (nq if right is None else right)
    want[list(far)] = torch.log2((last + 1).clamp(max=nk).float())
    torch.testing.assert_close(rest[..., :nq].reshape(-1), want, rtol=0, atol=1e-6)
