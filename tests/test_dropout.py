"""The dropout generator: its words, its layout, its statistics, the same set everywhere."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import rowmax
from rowmax.call.problem import each_sequence
from rowmax.rules import dropout
from rowmax.testing import Call, Case, make

# --- the generator -----------------------------------------------------------------------------


def philox(counter: tuple[int, ...], key: tuple[int, ...], rounds: int = 7) -> list[int]:
    """Return Philox4x32 in Python's own integers, as Salmon et al. state it."""
    c, k, word = list(counter), list(key), 2**32 - 1
    for _ in range(rounds):
        left, right = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (right >> 32) ^ c[1] ^ k[0],
            right & word,
            (left >> 32) ^ c[3] ^ k[1],
            left & word,
        ]
        k = [(k[0] + 0x9E3779B9) & word, (k[1] + 0xBB67AE85) & word]
    return c


#: published with Random123: philox4x32, 7 rounds; counter, key, answer
KNOWN = [
    ("00000000 " * 4, "00000000 " * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff " * 4, "ffffffff " * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "4dfccaba 190a87f0 c47362ba b6b5242a",
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: str, key: str, answer: str) -> None:
    c, k, want = ([int(word, 16) for word in text.split()] for text in (counter, key, answer))
    assert philox(tuple(c), tuple(k)) == want
    got = dropout.philox(tuple(map(torch.tensor, c)), tuple(map(torch.tensor, k)))  # pyright: ignore
    assert [int(word) for word in got] == want


def test_words_of_many_counters() -> None:
    counters = torch.randint(2**32, (4, 50), generator=torch.Generator().manual_seed(1))
    key = (torch.tensor(0x9E3779B9), torch.tensor(2**32 - 1))
    got = torch.stack(dropout.philox(tuple(counters), key), 1)
    for column, words in zip(counters.T.tolist(), got.tolist(), strict=True):
        assert philox(tuple(column), (0x9E3779B9, 2**32 - 1)) == words


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
def test_layout_of_draws(seed: int) -> None:
    """Column 64 a + 8 lane + r is the lane's draw of counter (8 a + r, i, h, b)."""
    key = (seed & (2**32 - 1), (seed >> 32) & (2**32 - 1))
    threshold = 20000
    places = [(0, 0, 0, j) for j in range(0, 200, 3)]
    places += [(2, 5, 7, 63), (3, 1, 1000, 64), (1, 63, 2, 65), (70000, 12, 9, 4097)]
    for b, h, i, j in places:
        words = philox((8 * (j // 64) + j % 8, i, h, b), key)
        lane = (j // 8) % 8
        draw = (words[lane % 4] >> (16 * (lane // 4))) & 0xFFFF
        place = (torch.tensor(x) for x in (b, h, i, j))
        kept = dropout.keep_tile(torch.tensor(seed), *place, threshold)
        assert bool(kept) == (draw >= threshold), (b, h, i, j)


# --- the kept set of a call --------------------------------------------------------------------


def kept(call: Call, backend: str) -> Tensor:
    """Return R of a call, ``[B, Hq, Nq, Nk]`` (packed: ``[1, Hq, total_q, total_k]``).

    Scores are all 0 and each value stands for its own key, so out is R / Nk.
    """
    q, k, v = call.inputs[:3]
    nk = k.shape[-3]
    each = torch.eye(nk, dtype=v.dtype).unsqueeze(1).expand(*v.shape[:-1], nk)
    same = call.with_leaves({"q": torch.zeros_like(q), "k": torch.zeros_like(k), "v": each})
    out, lse = same(backend=backend, return_lse=True)
    out = out if out.dim() == 4 else out[None]
    lse = lse if lse.dim() == 3 else lse[None]
    return out.transpose(1, 2) * lse.exp()[..., None]


_SHAPES = [
    Case("small", b=2, nq=5, nk=70, hq=3, d=4, dropout=0.4),
    Case("tiles", b=2, nq=150, nk=200, hq=4, hk=2, d=8, dropout=0.3),
    Case("one-row", b=3, nq=1, nk=131, hq=2, d=8, dropout=0.5),
    Case("packed", sequences=((20, 30), (0, 5), (70, 90)), hq=2, d=8, dropout=0.4),
]


@pytest.mark.parametrize("case", _SHAPES, ids=str)
def test_every_backend_keeps_the_same(case: Case, backend: str) -> None:
    call = make(case)
    problem, tensors = call.problem()
    if problem.varlen:
        want = torch.zeros(1, problem.hq, problem.total_q, problem.total_k)
        for rows, cols, one, t in each_sequence(problem, tensors):
            want[:, :, rows, cols] = dropout.dense(one, t)
    else:
        want = dropout.dense(problem, tensors)
    torch.testing.assert_close(kept(call, backend), want, rtol=1e-4, atol=1e-4)


def test_causal_rows_keep_what_full_ones_do(backend: str) -> None:
    """Nothing about which tiles are visited enters."""
    full = make(Case("full", b=1, nq=150, hq=2, d=8, dropout=0.5))
    causal = make(Case("causal", b=1, nq=150, hq=2, d=8, dropout=0.5, causal=True))
    causal = Call(causal.case, full.inputs, {**full.keywords, "causal": True})
    below = torch.ones(150, 150).tril()
    got, want = kept(causal, backend), kept(full, backend) * below
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_packed_keeps_what_a_batch_does(backend: str) -> None:
    """b is the number of the sequence, i and j are positions within it."""
    q = torch.randn(3, 40, 2, 8)
    batch = rowmax.attention(q, q, q, dropout_p=0.5, seed=11, backend=backend)
    cu = torch.tensor([0, 40, 80, 120])
    flat = q.flatten(0, 1)
    packed = rowmax.attention_varlen(
        flat, flat, flat, cu, cu, dropout_p=0.5, seed=11, backend=backend
    )
    torch.testing.assert_close(packed.view_as(batch), batch)


# --- statistics --------------------------------------------------------------------------------


def _draws(seed: int, shape: tuple[int, int, int, int], threshold: int) -> Tensor:
    index = [torch.arange(n) for n in shape]
    b, h, i, j = (x.view([-1 if d == n else 1 for d in range(4)]) for n, x in enumerate(index))
    return dropout.keep_tile(torch.tensor(seed), b, h, i, j, threshold)


@pytest.mark.parametrize("p", [0.0001, 0.1, 0.5, 0.9, 0.9999])
def test_the_mean_is_right(p: float) -> None:
    """The kept share of n independent draws is within 5 standard deviations of 1 - p."""
    call = make(Case("p", dropout=p))
    problem, _ = call.problem()
    share = 1 - problem.dropout_threshold / 65536
    assert abs(share - (1 - p)) <= 0.5 / 65536
    assert problem.keep_scale == 1 / share
    keep = _draws(5, (2, 2, 200, 256), problem.dropout_threshold)
    deviation = math.sqrt(share * (1 - share) / keep.numel())
    assert abs(keep.double().mean().item() - share) < 5 * deviation


def test_out_is_unbiased() -> None:
    """The mean of out over seeds approaches out without dropout."""
    q, k, v = (torch.randn(1, 16, 2, 8, dtype=torch.float64) for _ in range(3))
    want = rowmax.attention(q, k, v, backend="torch")
    seeds = 400
    outs = torch.stack(
        [
            rowmax.attention(q, k, v, dropout_p=0.3, seed=seed, backend="torch")
            for seed in range(seeds)
        ]
    )
    error = (outs.mean(0) - want) / (outs.std(0) / math.sqrt(seeds))
    assert error.abs().max() < 5  # over 256 numbers, in standard deviations


@pytest.mark.parametrize("axis", ["batch", "head", "row", "column", "seed"])
def test_neighbours_are_uncorrelated(axis: str) -> None:
    """The choice at one index does not depend on the next one, along any axis."""
    if axis == "seed":
        fields = [_draws(seed, (1, 2, 128, 256), 32768) for seed in (1, 2, 3, 1 << 32, 2 << 32)]
    else:
        dim = ("batch", "head", "row", "column").index(axis)
        shape = [2, 2, 100, 256]
        shape[dim] = max(shape[dim], 6)
        keep = _draws(9, tuple(shape), 32768)  # pyright: ignore
        fields = [keep.select(dim, n) for n in (0, 1, 2, 3, 4, 5)]
    for a, b in itertools.combinations(fields, 2):
        agree = (a == b).double().mean().item()
        assert abs(agree - 0.5) < 5 * 0.5 / math.sqrt(a.numel())


def test_columns_are_uncorrelated_at_every_distance_in_a_block() -> None:
    keep = _draws(3, (1, 4, 256, 128), 32768)
    for distance in (*range(1, 17), 24, 32, 56, 63, 64):
        agree = (keep[..., distance:] == keep[..., :-distance]).double()
        assert abs(agree.mean().item() - 0.5) < 5 * 0.5 / math.sqrt(agree.numel())


# --- seeds -------------------------------------------------------------------------------------


def test_seed_is_drawn_from_the_generator_of_torch() -> None:
    q = torch.randn(1, 32, 2, 8)

    def run(**keywords: object) -> Tensor:
        return rowmax.attention(q, q, q, dropout_p=0.5, backend="torch", **keywords)  # pyright: ignore

    torch.manual_seed(1)
    first, second = run(), run()
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(run(), first)
    assert torch.equal(run(), second)
    assert torch.equal(run(seed=4), run(seed=torch.tensor(4)))
    assert not torch.equal(run(seed=4), run(seed=5))
    before = torch.get_rng_state()
    run(seed=4)
    rowmax.attention(q, q, q, backend="torch")
    assert torch.equal(torch.get_rng_state(), before)  # a given seed, or none needed, draws none


def test_none_is_dropped_without_dropout() -> None:
    q = torch.randn(1, 32, 2, 8)
    assert torch.equal(rowmax.attention(q, q, q, seed=3), rowmax.attention(q, q, q))


def test_the_smallest_probability_still_drops() -> None:
    problem, _ = make(Case("p", dropout=1e-9)).problem()
    assert problem.dropout_threshold == 1
    problem, _ = make(Case("p", dropout=1 - 1e-9)).problem()
    assert problem.dropout_threshold == 65535
