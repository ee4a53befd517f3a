"""The CPU backend on few queries and short sequences, which have kernels of their own."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch

import rowmax
from rowmax.call import dispatch, normalize, recent
from rowmax.testing import Case, answer, complaints, cotangents, expected, make, poisoned
from rowmax.testing.table import COVERING

pytest.importorskip("numba")

from rowmax.cpu import few, few_calls
from rowmax.cpu.call import Call
from rowmax.cpu.vector import TILE_K

from . import extreme_bias
from .drawn import drawn
from .few_queries import with_few_queries

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: those that short kernels and tiles compute to the same bits
EXACT = [dtype for dtype in DTYPES if not few_calls.in_strips(dtype)]


def _few(case: Case) -> Case:
    """Return a case with few queries, and its gradients."""
    made = with_few_queries(case)
    return replace(made, d=32, dv=None, sequences=None, grads=case.grads, dlse=case.dlse)


def _short(case: Case) -> Case:
    """Return a case of short sequences."""
    nk = case.nq if case.nk is None else case.nk
    lengths = {"nq": min(case.nq, 150), "nk": min(nk, 250)}
    return replace(case, **lengths, d=48, dv=64, sequences=None)


def _check(case: Case, dtype: torch.dtype) -> None:
    call = make(case, dtype=dtype)
    grads = cotangents(call)
    want = expected(call, *grads)
    for _ in range(3):  # the first is prepared, the second noted, the third repeated
        with poisoned():
            got = answer(call, *grads, backend="cpu")
        found = complaints(got, want)
        assert not found, "\n".join(found)


def _longer(case: Case) -> Case:
    """Return a case of short sequences that are not of few queries."""
    return replace(_short(case), nq=max(17, min(case.nq, 150)))


def _ways(case: Case) -> tuple[bool, bool]:
    """Return whether the (forward, backward) of a case reaches these kernels on one thread."""
    problem = make(case).problem()[0]
    with mock.patch.object(few_calls, "get_num_threads", return_value=1):
        forward, backward = (few_calls.way(problem, x) is not None for x in ("forward", "backward"))
    return forward, backward


#: the cases of the table that reach these kernels once they are made small: ``test_backends`` has
#: the others, which tiles compute
WAYS = {made: {case: _ways(made(case)) for case in COVERING} for made in (_few, _short, _longer)}
REACHING = {made: [case for case, way in ways.items() if any(way)] for made, ways in WAYS.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", REACHING[_few], ids=str)
def test_few_queries(case: Case, dtype: torch.dtype) -> None:
    _check(_few(case), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", REACHING[_short], ids=str)
def test_short_sequences(case: Case, dtype: torch.dtype) -> None:
    _check(_short(case), dtype)


@pytest.mark.parametrize("made", [_few, _short, _longer])
def test_the_table_reaches_these_kernels(made: Callable[[Case], Case]) -> None:
    """Else the tests of cases would prove little."""
    assert len(REACHING[made]) > len(COVERING) * 0.25
    ways = WAYS[made].values()
    assert all(forward == backward for forward, backward in ways)  # one order of sums


def _bits(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    call = make(case, dtype=dtype)
    got = answer(call, *cotangents(call), backend="cpu")
    dq = [got.gradients["q"]] if "q" in got.gradients else []
    return [got.out, got.lse, *dq]  # parts of dk and dv depend on threads in tiles, too


def _compare(run: Callable[[], list[torch.Tensor]]) -> None:
    """Compare the results of short kernels, on one thread, with those of tiles."""
    with mock.patch.object(few_calls, "get_num_threads", return_value=1):
        short = run()
    with mock.patch.object(few_calls, "way", return_value=None):
        tiles = run()
    for a, b in zip(short, tiles, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("case", REACHING[_longer], ids=str)
def test_short_sequences_have_the_bits_of_tiles(case: Case, dtype: torch.dtype) -> None:
    """So the choice may depend on threads, on other sequences and on other queries."""
    _compare(lambda: _bits(_longer(case), dtype))


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize(
    ("nq", "nk"), [(17, 1), (17, 31), (33, 32), (65, 49), (96, 160), (256, 255)]
)
@pytest.mark.parametrize("d", [16, 80, 144])
def test_sizes_have_the_bits_of_tiles(nq: int, nk: int, d: int, dtype: torch.dtype) -> None:
    """The order of sums of pairs depends on the number of keys."""
    _compare(lambda: _bits(Case("size", b=2, nq=nq, nk=nk, hq=6, hk=2, d=d, dv=d + 16), dtype))


#: (queries, keys) of packed sequences: none, one, more than a tile, none of the other
_LENGTHS = ((60, 60), (0, 0), (1, 1), (130, 140), (0, 9), (3, 0), (33, 200), (7, 7))
PACKED: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"left": 20, "right": 5, "alibi": True},
    "terms": {"causal": True, "sink": True, "softcap": 3.0, "dropout": 0.2},
    "bias": {"bias": "bhqk", "shift": 4},
    "mask": {"allowed": "bhqk", "empty_rows": True, "bias": "1h1k"},
    "lengths": {"lengths": (0.3, 0.9, 1.0, 0.0), "causal": True},
    "aligned": {"lengths": (0.3, 0.9, 1.0, 0.0), "causal": True, "align": "lengths"},
    "prefix": {"prefix": (0.5, 0.0, 1.5, 0.2)},
    "bounds": {"max_given": True, "causal": True},
    "strided": {"layout": "sliced/interleaved/strided", "dout": "bhnd"},
    "heads": {"hk": 1, "hq": 1, "causal": True},
    "one": {"sequences": ((17, 17),), "causal": True},
}


def _packed(options: dict[str, Any]) -> Case:
    """Return a case of packed short sequences."""
    return Case("packed", **{"sequences": _LENGTHS, "hq": 4, "hk": 2, "d": 48, "dv": 64, **options})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_packed_short_sequences(name: str, dtype: torch.dtype) -> None:
    case = _packed(PACKED[name])
    assert _ways(case) == (True, True)
    _check(case, dtype)


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_packed_short_sequences_have_the_bits_of_tiles(name: str, dtype: torch.dtype) -> None:
    _compare(lambda: _bits(_packed(PACKED[name]), dtype))


def _drawn_packed(seed: int, dtype: torch.dtype) -> Case:
    """Return a random case of packed short sequences."""
    rng = random.Random(seed)
    case = drawn(seed, str(dtype).removeprefix("torch.")).case

    def length() -> int:
        return rng.choice((0, 1, rng.randint(0, 30), rng.randint(0, few_calls.MOST_TOKENS)))

    pairs = [(length(), length()) for _ in range(rng.randint(1, 7))]
    sequences = tuple(rng.choice((pairs, [(n, n) for n, _ in pairs])))
    sizes = {"b": 1, "d": rng.choice((16, 48, 64, 144)), "dv": rng.choice((16, 64, 80))}
    others = {"documents": None, "padding": None, "step": None, "positions": None}
    return replace(case, sequences=sequences, **sizes, **others)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_packed_short_sequences(dtype: torch.dtype) -> None:
    reached = 0
    for seed in range(12):
        case = _drawn_packed(seed, dtype)
        reached += _ways(case)[0]
        _check(case, dtype)
    assert reached > 6


#: ends of the first two of three sequences
_ENDS = ((80, 160), (80, 160), (80, 160), (10, 230), (0, 240), (239, 240), (100, 101))
#: the same of few queries: more keys than a chunk has, a part of one, none
_FEW_LENGTHS = ((3, 1300), (0, 0), (1, 1), (8, 600), (0, 700), (5, 0), (2, 513), (7, 7))


def _packed_few(options: dict[str, Any]) -> Case:
    """Return a case of packed sequences of few queries, also where the most are only bounded."""
    most = 3 if options.get("max_given") else few_calls.FEW[0]
    sequences = tuple((min(n, most), m) for n, m in _FEW_LENGTHS)
    return _packed({"sequences": sequences, **options})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_packed_few_queries(name: str, dtype: torch.dtype) -> None:
    case = _packed_few(PACKED[name])
    problem = make(case).problem()[0]
    kernel = few_calls.WAYS["forward"][name == "one"].kernel  # which has more
    with mock.patch.object(few_calls, "get_num_threads", return_value=1):
        taken = few_calls.way(problem, "forward")
    assert taken is not None
    assert taken.kernel is kernel
    _check(case, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["window", "terms", "aligned", "strided", "heads"])
def test_heads_and_threads_do_not_change_the_bits_of_packed_few_queries(
    name: str, dtype: torch.dtype
) -> None:
    case = _packed_few(PACKED[name])
    assert case.sequences is not None
    alone = tuple((min(n, 1), m) for n, m in case.sequences)
    _check_bits(case, replace(case, sequences=alone, hq=4, hk=4), dtype)


#: sequences of few queries and of more, whose keys are many, few or none
_MIXED_LENGTHS = ((40, 900), (1, 700), (8, 20), (0, 5), (3, 0), (60, 60), (9, 0), (2, 1100))


def _mixed(options: dict[str, Any]) -> Case:
    """Return a case of packed sequences, some of which have few queries."""
    return _packed({"sequences": _MIXED_LENGTHS, **options})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in PACKED if name != "one"])
def test_packed_sequences_of_few_queries_and_more(name: str, dtype: torch.dtype) -> None:
    _check(_mixed(PACKED[name]), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bound", [0, 3000])
@pytest.mark.parametrize("lengths", [_LENGTHS, _FEW_LENGTHS, _MIXED_LENGTHS])
def test_packed_sequences_have_the_bits_of_their_own_calls(
    lengths: tuple[tuple[int, int], ...], bound: int, dtype: torch.dtype
) -> None:
    """Whatever the others are, and the bound of all."""
    case = _packed({"sequences": lengths, "causal": True, "sink": True})
    call = make(case, dtype=dtype)
    q, k, v, cu_q, cu_k, *_ = call.inputs
    bounds = (bound, bound) if bound else (None, None)
    whole, lse = replace(call, inputs=(q, k, v, cu_q, cu_k, *bounds))(backend="cpu")  # pyright: ignore
    for n, (queries, keys) in enumerate(lengths):
        if queries and keys:
            i, j = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
            rows = (q[None, i], k[None, j], v[None, j])
            more: Any = {"causal": True, "sink": call.keywords["sink"], "backend": "cpu"}
            out, alone = rowmax.attention(*rows, return_lse=True, **more)
            assert torch.equal(out[0], whole[i])
            assert torch.equal(alone[0], lse[:, i])


@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_a_number_that_is_not_finite_is_that_of_tiles(dtype: torch.dtype) -> None:
    """Change no other sequence, whether it has few queries or more."""
    call = make(_mixed({"causal": True}), dtype=dtype)
    v, cu_k = call.inputs[2], call.inputs[4]
    want, _ = call(backend="cpu")
    for n in (0, 1):
        bad = v.clone()
        bad[cu_k[n]] = torch.inf
        out, _ = call.with_leaves({"v": bad})(backend="cpu")
        rows = [slice(a, b) for a, b in pairwise(call.inputs[3].tolist())]
        assert not out[rows[n]].isfinite().all()
        others = [m for m in range(len(rows)) if m != n]
        assert all(out[rows[m]].isfinite().all() for m in others)
        torch.testing.assert_close(out[rows[5]], want[rows[5]], rtol=3e-2, atol=3e-2)


def _recorded(case: Case, dtype: torch.dtype = torch.float32) -> Call:
    return Call(*make(case, dtype=dtype).problem(), in_place=True)


def test_parts_of_packed_sequences_are_as_many_as_their_keys_need() -> None:
    """One long sequence next to many short ones takes no memory for each of these."""
    case = _packed({"sequences": ((1, 3000), *[(1, 16)] * 40, (2, 700)), "hq": 2})
    taken = few_calls.WAYS["forward"][0]
    keys = few.CHUNK * TILE_K
    assert few_calls.parts_of(_recorded(case), taken) == (4340 // keys + 42, 1)
    dense = Case("dense", b=3, nq=1, nk=3 * keys, hq=2)
    assert few_calls.parts_of(_recorded(dense), taken) == (9, 3)
    _check(case, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_packed_few_queries(dtype: torch.dtype) -> None:
    reached = 0
    for seed in range(6):
        rng, case = random.Random(seed), _drawn_packed(100 + seed, dtype)
        pairs = [(rng.randint(0, 16), rng.choice((0, 9, 560))) for _ in range(4)]
        group = min(2, case.hq // (case.hk or case.hq))
        case = replace(case, sequences=tuple(pairs), hk=2, hq=2 * group)
        taken = few_calls.way(make(case).problem()[0], "forward")
        reached += taken is not None and taken.kernel is few.few_forward
        _check(case, dtype)
    assert reached > 3


def _drawn_rows(seed: int, dtype: torch.dtype) -> Case:
    """Return a random case of several queries of many keys, in groups of up to four heads."""
    rng, case = random.Random(seed), _drawn_packed(seed, dtype)
    sizes = {"nq": rng.randint(2, 32), "nk": rng.randint(257, 700), "b": rng.randint(1, 2)}
    heads = {"hk": 2, "hq": 2 * min(4, case.hq // (case.hk or case.hq))}
    return replace(case, sequences=None, max_given=False, **sizes, **heads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_rows_of_many_keys(dtype: torch.dtype) -> None:
    reached = 0
    for seed in range(12):
        case = _drawn_rows(200 + seed, dtype)
        taken = few_calls.way(make(case).problem()[0], "forward")
        reached += taken is not None and taken.kernel is few.few_forward
        _check(case, dtype)
    assert reached > 3


def test_no_number_of_each_pair_is_kept_of_packed_sequences() -> None:
    """A long one would have as many pairs for each of the others."""
    call = make(_packed_few({"bias": "111k"}))
    problem, tensors = call.problem()
    out, lse = few_calls.forward(problem, tensors) or (None, None)
    assert out is not None
    assert lse is not None
    given = problem, tensors, out, lse, out, None
    assert few_calls.backward(*given, call.wanted) is None
    assert few_calls.backward(*given, call.wanted._replace(bias=False)) is not None


@pytest.mark.parametrize("nq", [2, 240])
@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_a_repeated_packed_call_has_its_own_sequences(dtype: torch.dtype, nq: int) -> None:
    """The first ones are the shortest: memory is for the longest that the bounds allow."""
    q, k, v = (torch.randn(n, 4, 32, dtype=dtype).requires_grad_() for n in (nq, 240, 240))
    of_queries = [(round(nq * a / 240), round(nq * b / 240)) for a, b in _ENDS]
    for ends_q, ends in zip(of_queries, _ENDS, strict=True):
        cu_q, cu = (
            torch.tensor([0, *x, n], dtype=torch.int32) for x, n in ((ends_q, nq), (ends, 240))
        )
        found = []
        for backend in ("cpu", "torch"):
            more: Any = {"causal": True, "backend": backend}
            out = rowmax.attention_varlen(q, k, v, cu_q, cu, nq, 240, **more)
            found.append([out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))])
        for a, b in zip(*found, strict=True):
            rtol = 1e-4 if dtype == torch.float32 else 3e-2
            torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_bad_numbers_have_the_bits_of_tiles(dtype: torch.dtype, bad: float) -> None:
    """They are computed in float32, wherever they are."""
    q, k, v, dout = (torch.randn(2, 60, 2, 32, dtype=dtype) for _ in range(4))
    for t in (k, v):
        t[0, 30:] = bad
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def run() -> list[torch.Tensor]:
        mask = rowmax.PrefixLengths(torch.tensor([30, 60]))
        out, lse = rowmax.attention(*leaves, mask=mask, return_lse=True, backend="cpu")
        return [out, lse, *torch.autograd.grad(out, leaves, dout)]

    assert all(t.isfinite().all() for t in run())
    _compare(run)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nq", [1, 8, 300])
def test_a_sequence_has_the_same_bits_in_any_batch(nq: int, dtype: torch.dtype) -> None:
    """On any number of threads, and next to other sequences."""
    q, k, v = (torch.randn(5, n, 4, 32, dtype=dtype) for n in (nq, 20, 20))
    whole = rowmax.attention(q, k, v, causal=True, backend="cpu")
    threads = torch.get_num_threads()
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            alone = rowmax.attention(q[:1], k[:1], v[:1], causal=True, backend="cpu")
            assert torch.equal(alone[0], whole[0])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nk", [20, 130])
def test_blocks_of_queries_have_the_bits_of_the_whole(nk: int, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, n, 4, 32, dtype=dtype) for n in (400, nk, nk))
    whole = rowmax.attention(q, k, v, backend="cpu")
    block = rowmax.attention(q[:, :128], k, v, backend="cpu")
    assert torch.equal(block, whole[:, :128])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (1, 300), (8, 65), (9, 9), (20, 24), (97, 193)])
@pytest.mark.parametrize("d", [16, 48, 80, 144])
def test_sizes_of_vectors(nq: int, nk: int, d: int, dtype: torch.dtype) -> None:
    _check(Case("size", b=2, nq=nq, nk=nk, hq=6, hk=2, d=d, dv=d + 16), dtype)


def test_one_query_has_two_chunks_where_its_keys_nearly_fill_one() -> None:
    """Not where tasks of all heads are slower, and not in a backward, 16 bits or a packed call."""
    keys = few.CHUNK * TILE_K
    least = few_calls.WAYS["forward"][0].apart[0]  # bytes; half of the keys have as many
    heads = next(n for n in (8, 16, 32) if keys // 2 * n * (64 + 64) * 4 >= least)

    def chunks(way: str = "forward", dtype: torch.dtype = torch.float32, **options: Any) -> int:
        case = Case("one", **{"b": 2, "nq": 1, "nk": keys, "hq": heads, "d": 64, **options})
        return few_calls.chunks_of(_recorded(case, dtype), few_calls.WAYS[way][0])

    assert [chunks(nk=n) for n in (1, keys // 2, keys // 8 * 7 - 1, keys + 1)] == [1, 1, 1, 2]
    assert [chunks(nk=n) for n in (keys // 8 * 7, keys)] == [2, 2]
    half = heads // 2
    assert chunks(b=1) == chunks(hq=half, d=128) == 2
    others = {"nq": 2, "hk": half, "hq": half, "layout": "bhnd", "sequences": ((1, keys), (1, 9))}
    assert [chunks(**{name: x}) for name, x in others.items()] == [1] * 5
    assert chunks("backward") == chunks(dtype=torch.bfloat16) == 1


#: chunks that a window leaves empty, at either end and between, and those of one tile
CHUNKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "recent": {"causal": True, "left": 300},
    "distant": {"left": 1200, "right": -900},
    "last": {"nk": 2 * few.CHUNK * TILE_K + 1},
    "halved": {"nk": few.CHUNK * TILE_K - 60, "d": 256, "dv": 256},  # two for one query
    "dropped": {"dropout": 0.2, "softcap": 1.5},
    "heads": {"alibi": True, "step": 3},
    "bias": {"bias": "bhqk", "sink": True},
    "shared": {"bias": "1h1k", "softcap": 1.5, "left": 700},
    "columns": {"bias": "b1q1", "bias_float32": True, "causal": True},
    "lengths": {"lengths": (0.3, 0.9), "allowed": "b11k", "empty_rows": True},
    "documents": {"documents": "sorted", "dout": "bhnd"},
    "strided": {"layout": "sliced/interleaved/strided"},
}


def _of_chunks(options: dict[str, Any]) -> Case:
    """Return a case of few queries, and of keys in chunks."""
    sizes = {"b": 2, "nq": 3, "nk": 1300, "hq": 4, "hk": 2, "d": 48, "dv": 80}
    return Case("chunks", **{**sizes, **options})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", CHUNKED.values(), ids=CHUNKED)
def test_chunks_of_keys(options: dict[str, Any], dtype: torch.dtype) -> None:
    _check(_of_chunks(options), dtype)


def _few_bits(case: Case, dtype: torch.dtype, heads: int, threads: int) -> list[torch.Tensor]:
    """Return the results of kernels of few queries, of so many kv heads a task."""
    call = make(case, dtype=dtype)
    problem, tensors = call.problem()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with poisoned(), mock.patch.object(few_calls, "heads_of_task", return_value=heads):
            done = few_calls.forward(problem, tensors)
            assert done is not None
            grads = (t.reshape(x.shape) for t, x in zip(cotangents(call), done, strict=True))
            found = few_calls.backward(problem, tensors, *done, *grads, call.wanted)
            assert found is not None
    finally:
        torch.set_num_threads(before)
    return [*done, *(t for t in found if t is not None)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", CHUNKED.values(), ids=CHUNKED)
def test_heads_and_threads_do_not_change_the_bits(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    _check_bits(_of_chunks(options), _of_chunks({**options, "nq": 1, "hq": 4, "hk": 4}), dtype)


def _check_bits(case: Case, alone: Case, dtype: torch.dtype) -> None:
    """Compute a case with several threads, and one of one row a kv head with several heads."""
    for given, heads, threads in ((case, 1, 4), (alone, 4, 1), (alone, 2, 4), (alone, 4, 4)):
        want = _few_bits(given, dtype, 1, 1)
        got = _few_bits(given, dtype, heads, threads)
        assert len(got) >= 5
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("d", "dv"), [(16, 48), (128, 96)])
@pytest.mark.parametrize("group", [1, 3])
def test_rows_of_a_block_have_the_bits_of_rows_alone(
    group: int, d: int, dv: int, dtype: torch.dtype
) -> None:
    """Blocks of four rows and of two, whole and in part."""
    torch.manual_seed(0)
    k, v = (torch.randn(2, 600, 2, width, dtype=dtype) for width in (d, dv))
    q = torch.randn(2, 7, 2 * group, d, dtype=dtype)
    out = rowmax.attention(q, k, v, backend="cpu")
    for i in range(7):
        row = rowmax.attention(q[:, i : i + 1], k, v, backend="cpu")
        assert torch.equal(row, out[:, i : i + 1])


@pytest.mark.parametrize("group", [1, 2, 4, 8, 64, 65])
def test_few_queries_depend_on_the_rows_of_a_kv_head(group: int) -> None:
    def most(**options: Any) -> int:
        case = Case("most", **{"hq": group, "hk": 1, "nq": 1, "nk": 256, "d": 16, **options})
        return few_calls.most_queries(make(case).problem()[0])

    fewer = max(min(8, 64 // group), min(16, 32 // group))
    assert most() == fewer
    queries, rows = few_calls.FEW_OF_MANY_KEYS
    assert most(nk=257) == max(min(8, 64 // group), min(queries, rows // group))
    assert most(sequences=((1, 257), (1, 300))) == fewer


@pytest.mark.parametrize(("nq", "nk"), [(3, 60), (5, 1300), (40, 60)])
@pytest.mark.parametrize("case", extreme_bias.CASES, ids=str)
def test_biases_and_sinks_of_any_size(case: Case, nq: int, nk: int) -> None:
    small = replace(case, nq=nq, nk=nk, d=32, sequences=None)
    wrong = extreme_bias.checks("cpu", "cpu", cases=[small])
    assert not wrong, "\n".join(wrong)


def test_heads_are_of_one_task_where_memory_is_read_in_order_only_so() -> None:
    def heads_of(dtype: torch.dtype = torch.float32, **options: Any) -> list[int]:
        case = Case("order", **{"b": 4, "nq": 1, "nk": 2048, **options})
        problem, tensors = make(case, dtype=dtype).problem()
        call = Call(problem, tensors, in_place=True)
        with mock.patch.object(few_calls, "get_num_threads", return_value=4):
            return [few_calls.heads_of_task(call, way[0]) for way in few_calls.WAYS.values()]

    assert heads_of(hq=8, d=64) == [8, 8]
    assert heads_of(hq=8, hk=4, d=64) == [1, 1]  # several rows hide the latency of memory
    assert heads_of(hq=8, d=64, nq=2) == [1, 1]
    assert heads_of(hq=8, d=64, nk=50) == [1, 1]  # it stays in the caches
    assert heads_of(torch.bfloat16, hq=8, d=64) == [1, 8]
    assert heads_of(torch.bfloat16, hq=8, d=64, nk=8192) == [8, 8]
    assert heads_of(hq=8, d=64, layout="bhnd") == [1, 1]
    # tasks would be fewer than threads; a forward has some heads, if their rows are long
    keys = few.CHUNK * TILE_K
    three, one = 3 * keys - 36, keys * 3 // 4  # keys of so many chunks
    assert heads_of(hq=8, d=64, b=1, nk=three) == [1, 1]
    assert heads_of(hq=8, d=128, b=1, nk=three) == [4, 1]
    assert heads_of(hq=32, d=128, b=1, nk=one) == [8, 1]
    assert heads_of(hq=6, d=512, b=1, nk=one) == [1, 1]
    assert heads_of(hq=12, d=256, b=1, nk=one) == [3, 1]
    assert heads_of(hq=32, d=128, b=1, nk=keys - 12) == [16, 1]  # two chunks


@pytest.mark.parametrize("batch", [16, 17])
@pytest.mark.parametrize("nq", [1, 40])
def test_a_repeated_call_has_its_own_lengths(nq: int, batch: int) -> None:
    """Few sequences are limited one by one, many at once; lengths past the keys are all keys."""
    rng = random.Random(nq + batch)
    for _ in range(5):
        lengths = tuple(rng.choice((0.0, 1.5, rng.random())) for _ in range(batch))
        call = make(Case("lengths", b=batch, nq=nq, nk=60, hq=2, hk=2, d=32, lengths=lengths))
        grads = cotangents(call)
        with poisoned():
            got = answer(call, *grads, backend="cpu")
        found = complaints(got, expected(call, *grads))
        assert not found, "\n".join(found)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(("nq", "nk"), [(1, 60), (40, 60), (1, 1300)])
def test_bad_numbers_past_the_mask_stay_out(nq: int, nk: int, bad: float) -> None:
    """Also in a call that is repeated: it is then computed again by tiles."""
    mask = rowmax.PrefixLengths(torch.tensor([30, nk]))
    q, k, v = (torch.randn(2, n, 2, 32) for n in (nq, nk, nk))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    want = rowmax.attention(*leaves, mask=mask, backend="reference")
    grads = torch.autograd.grad(want.sum(), leaves)
    dirty = [t.detach().clone() for t in leaves]
    for t in dirty[1:]:
        t[0, 30:] = bad
    dirty = [t.requires_grad_() for t in dirty]
    for _ in range(3):
        out = rowmax.attention(*dirty, mask=mask, backend="cpu")
        torch.testing.assert_close(out, want)
        for a, b in zip(torch.autograd.grad(out.sum(), dirty), grads, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("nq", "nk"), [(1, 60), (40, 60), (1, 1300)])
def test_a_repeated_call_reads_its_own_tensors(nq: int, nk: int) -> None:
    for n in range(6):
        leaves = [torch.randn(2, m, 2, 32).requires_grad_() for m in (nq, nk, nk)]
        if n == 4:
            with torch.no_grad():
                leaves[2][1, 7, 1, 3] = torch.nan
        answers = []
        for backend in ("cpu", "reference"):
            out, lse = rowmax.attention(*leaves, return_lse=True, backend=backend)
            loss = out.square().sum() + lse.sin().sum()
            answers.append((out, lse, *torch.autograd.grad(loss, leaves)))
        for a, b in zip(*answers, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("nq", "nk"), [(1, 60), (40, 60), (1, 1300)])
def test_a_repeated_call_reads_its_own_bias(nq: int, nk: int) -> None:
    """Its gradient is not wanted, so the backward is repeated, too."""
    for _ in range(6):
        leaves = [torch.randn(2, m, 2, 32).requires_grad_() for m in (nq, nk, nk)]
        terms = {"bias": torch.randn(1, 2, nq, nk), "sink": torch.randn(2)}
        answers = []
        for backend in ("cpu", "reference"):
            with poisoned():
                options = {**terms, "return_lse": True, "backend": backend}
                out, lse = rowmax.attention(*leaves, **options)  # pyright: ignore
                loss = out.square().sum() + lse.sin().sum()
                answers.append((out, lse, *torch.autograd.grad(loss, leaves)))
        for a, b in zip(*answers, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def _lengths(b: int, nq: int, nk: int) -> dict[str, Any]:
    return {"mask": rowmax.PrefixLengths(torch.randint(nq, nk + 1, (b,)), align="lengths")}


def _prefix(b: int, nq: int, nk: int) -> dict[str, Any]:
    return {"mask": rowmax.Prefix(torch.randint(0, nk + 1, (b,)))}


def _of_keys(b: int, nq: int, nk: int) -> dict[str, Any]:
    """Return the mask of a static cache: most tiles of keys are hidden, or all of them."""
    return {"mask": (torch.arange(nk) < torch.randint(0, nk // 2, (b,))[:, None])[:, None, None]}


def _of_pairs(b: int, nq: int, nk: int) -> dict[str, Any]:
    """Return masks of each head, in which some rows see nothing."""
    mask = torch.rand(b, 2, nq, nk) < 0.3
    mask[:, 1, :, : nk // 2] = False
    mask[:, :, nq // 2 :: 3] = False
    return {"mask": mask, "sink": torch.randn(2)}


def _slopes(b: int, nq: int, nk: int) -> dict[str, Any]:
    return {"alibi": torch.rand(2), "causal": True}


MASKS = (_lengths, _prefix, _of_keys, _of_pairs, _slopes)


@pytest.mark.parametrize("terms", MASKS, ids=lambda f: f.__name__[1:])
@pytest.mark.parametrize(("nq", "nk"), [(1, 60), (40, 60), (3, 1300)])
@pytest.mark.parametrize("apart", [1 << 24, 1], ids=["heads", "all-heads"])
def test_a_repeated_call_reads_its_own_mask(
    apart: int, nq: int, nk: int, terms: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a task has all heads. A repeated call makes no record."""
    both = (apart, apart)
    ways = {x: tuple(w._replace(apart=both) for w in few_calls.WAYS[x]) for x in few_calls.WAYS}
    monkeypatch.setattr(few_calls, "WAYS", ways)
    for kept, name in ((dispatch, "_prepared"), (normalize, "_passed"), (recent.calls, "_kinds")):
        monkeypatch.setattr(kept, name, {})
    few_calls._way.cache_clear()
    heads: list[int] = []
    of_task = few_calls.heads_of_task
    monkeypatch.setattr(
        few_calls, "heads_of_task", lambda *given: heads.append(of_task(*given)) or heads[-1]
    )
    for n in range(6):
        leaves = [torch.randn(3, m, 2, 32).requires_grad_() for m in (nq, nk, nk)]
        given = {**terms(3, nq, nk), "return_lse": True}
        answers = []
        for backend in ("cpu", "reference"):
            with poisoned(), mock.patch.object(few_calls, "Call", wraps=Call) as record:
                out, lse = rowmax.attention(*leaves, **given, backend=backend)
                loss = out.square().sum() + torch.where(lse.isfinite(), lse, 0).sin().sum()
                answers.append((out, lse, *torch.autograd.grad(loss, leaves)))
            assert n < 2 or not record.called
        for a, b in zip(*answers, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    few_calls._way.cache_clear()
    # heads with several rows or masks of their own are tasks of their own, and those of short
    # sequences are, too
    every = apart == 1 and nq == 1 and terms is not _of_pairs
    assert set(heads) == {2 if every else 1}


_LESSER = """
import gc; gc.disable()
import torch, rowmax
from rowmax.cpu import few_vector, few_calls
assert few_vector.LANES == 8 and few_vector.HALVES == {halves}
assert (torch.float16 in few_calls._DTYPES) == {halves}
for dtype in (torch.{dtype},):
    for nq, nk in ((1, 300), (7, 300), (40, 60)):
        leaves = [torch.randn(2, n, 2, 48, dtype=dtype).requires_grad_() for n in (nq, nk, nk)]
        answers = []
        for backend in ("cpu", "reference"):
            out = rowmax.attention(*leaves, causal=True, backend=backend)
            answers.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
        for a, b in zip(*answers):
            error = (a - b).float().norm() / b.float().norm()
            assert error < {{4: 2e-6, 2: 2e-3}}[dtype.itemsize], (dtype, nq, error)
print("right")
"""


@pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64", reason="x86-64 names"
)
@pytest.mark.parametrize(
    ("name", "features", "halves"),
    [
        ("haswell", "+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2", True),
        ("nehalem", "+sse4.2,+popcnt", False),
    ],
)
def test_on_lesser_machines(
    name: str, features: str, halves: bool, kernel_folder: Callable[..., str]
) -> None:
    machine = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            _LESSER.format(halves=halves, dtype="float16" if halves else "float32"),
        ],
        capture_output=True,
        text=True,
        env=os.environ | machine | {"NUMBA_CACHE_DIR": kernel_folder("lesser")},
        timeout=400,
        check=False,
    )
    assert done.stdout.strip() == "right", done.stderr


_ONE_ROW = """
import torch
import rowmax

for dtype in (torch.float32, torch.bfloat16):
    for d, value_d in ((512, 512), (16, 512), (320, 48), (48, 320), (272, 208)):
        for nk in (12, 300) * 10:
            shapes = (1, d), (nk, d), (nk, value_d)
            q, k, v = (torch.randn(1, n, 2, width, dtype=dtype) for n, width in shapes)
            leaves = [t.requires_grad_() for t in (q, k, v)]
            dout = torch.randn(1, 1, 2, value_d, dtype=dtype)
            found, want = (
                torch.autograd.grad(rowmax.attention(*leaves, backend=name), leaves, dout)
                for name in ("cpu", "reference")
            )
            for x, y in zip(found, want):
                error = float((x - y).norm() / y.norm())
                allowed = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
                assert error < allowed, (dtype, d, value_d, nk, error)
print("right")
"""


def test_one_row_of_a_wide_head_stays_in_its_memory() -> None:
    """A process whose memory is overwritten ends, or its results are wrong."""
    done = subprocess.run(
        [sys.executable, "-c", _ONE_ROW], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.stdout.strip() == "right", (done.returncode, done.stderr)
