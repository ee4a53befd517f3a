"""The backward kernel on the machine of ``machine.py``, beside the definition in float64.

    python -m tests.hopper.backward_model [--only NAME] [--seeds 3]

Its barriers, its indices and its arithmetic; every length, mask and mode of
``backward_cases.py``.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from tests.hopper import language, machine
from tests.hopper.backward_cases import Case, cases

language.install()

from rowmax.gpu.hopper.documents import tile_spans  # noqa: E402
from rowmax.gpu.hopper.gradients.bundles import Numbers, Pointers  # noqa: E402
from rowmax.gpu.hopper.gradients.kernel import backward  # noqa: E402
from rowmax.gpu.hopper.gradients.schedule import order_of, padded_rows, steps_of  # noqa: E402
from rowmax.gpu.hopper.gradients.tiles import GradientConfig  # noqa: E402
from rowmax.gpu.hopper.gradients.wide_kernel import wide  # noqa: E402
from rowmax.gpu.hopper.lib.order import tile_count as steps_of_queries  # noqa: E402
from rowmax.gpu.hopper.tiles import Constants  # noqa: E402

LOG2E = math.log2(math.e)
BLOCK_K = 128


def ids_of(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Documents of queries and of keys, of each of the batch."""
    rng = np.random.default_rng(5)
    ids = rng.integers(0, 5, (case.b, case.nk)).astype(np.int32)
    ids = np.sort(ids, 1) if case.documents == "sorted" else ids
    at = np.clip(np.arange(case.nq) + case.nk - case.nq, 0, None)
    of_queries = np.where(np.arange(case.nq) + case.nk - case.nq < 0, 9, ids[:, at])
    return of_queries.astype(np.int32), ids


def seen(case: Case, b: int, nq: int, nk: int) -> np.ndarray:
    i, j = np.arange(nq)[:, None] + nk - nq, np.arange(nk)[None]
    ok = np.ones((nq, nk), bool)
    if case.left is not None:
        ok &= j >= i - case.left
    if case.right is not None:
        ok &= j <= i + case.right
    if case.documents:
        of_queries, of_keys = ids_of(case)
        ok &= of_queries[b][:, None] == of_keys[b][None]
    if case.lengths is not None:
        ok &= j < case.lengths[b]
    return ok


def sequences_of(case: Case) -> list[tuple[slice, slice]]:
    """(rows, columns) of each sequence in what is packed, or of each of the batch."""
    if case.sequences is None:
        return [(slice(0, case.nq), slice(0, case.nk))] * case.b
    cu = np.cumsum([(0, 0), *case.sequences], 0)
    return [(slice(a, c), slice(b, d)) for (a, b), (c, d) in pairwise(cu.tolist())]


def definition(
    case: Case, q: Any, k: Any, v: Any, do: Any, dlse: Any, scale: float, bias: Any, alibi: Any
) -> Any:
    """(lse, delta - dlse, dq, dk, dv, dbias) in float64."""
    dbias = np.zeros((case.b, case.hq, case.nq, case.nk))
    lse = np.full(dlse.shape, -np.inf)
    delta = np.zeros(dlse.shape)
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    group = case.hq // case.hk
    for n, (rows, cols) in enumerate(sequences_of(case)):
        b = 0 if case.sequences else n
        nq, nk = rows.stop - rows.start, cols.stop - cols.start
        if not nq or not nk:
            continue
        ok = seen(case, n, nq, nk)
        for h in range(case.hq):
            Q, dO = (x[b, rows, h].astype(float) for x in (q, do))
            K, V = (x[b, cols, h // group].astype(float) for x in (k, v))
            x = scale * Q @ K.T
            t = case.softcap * np.tanh(x / case.softcap) if case.softcap else x
            s = t
            if case.alibi:
                i, j = np.arange(nq)[:, None] + nk - nq, np.arange(nk)[None]
                s = s - alibi[h] * abs(i - j)
            if case.bias:
                s = s + bias[n if case.bias[0] > 1 else 0, h if case.bias[1] > 1 else 0]
            s = np.where(ok, s, -np.inf)
            top = np.maximum(s.max(1, keepdims=True), -1e30)
            e = np.exp(s - top)
            total = e.sum(1, keepdims=True)
            P = np.divide(e, total, out=np.zeros_like(e), where=total > 0)
            with np.errstate(divide="ignore"):
                lse[b, h, rows] = (top + np.log(total))[:, 0]
            O = P @ V
            row = (dO * O).sum(1) - dlse[b, h, rows]
            delta[b, h, rows] = row
            dS = P * (dO @ V.T - row[:, None])
            if case.bias:
                dbias[b, h] = dS
            dX = dS * (1 - (t / case.softcap) ** 2) if case.softcap else dS
            dq[b, rows, h] += scale * dX @ K
            dk[b, cols, h // group] += scale * dX.T @ Q
            dv[b, cols, h // group] += P.T @ dO
    return lse, delta, dq, dk, dv, dbias


def packed_order(cu: np.ndarray, block: int = BLOCK_K) -> np.ndarray:
    """What ``packed.order`` writes: a counter, the number of tiles, where sequences begin, and
    the sequence of each tile, the longest first."""
    tiles = -(-np.diff(cu) // block)
    by_length = sorted(range(len(tiles)), key=lambda b: (-np.diff(cu)[b], b))
    begin = np.zeros(len(tiles), np.int32)
    order: list[int] = []
    for b in by_length:
        begin[b] = len(order)
        order += [b] * tiles[b]
    return np.array([0, len(order), *begin, *order], np.int32)


def twice(case: Case, seed: int) -> str | None:
    """A check, and another with the same numbers and other luck, where what no query sees is no
    number: the answer is to be the same, but for dq where none keeps to turns."""
    first, text = check(case, seed, seed, False)
    if text or not (case.options.get("ORDERED") or case.sequences or case.lengths):
        return text
    second, text = check(case, seed, seed + 1000, True)
    of_q, of_k = asked(case, 0), asked(case, 1)
    fixed = case.kind != "all" or case.options.get("ORDERED")
    for name, x, y, of in zip(("dq", "dk", "dv"), first, second, (of_q, of_k, of_k), strict=False):
        if not text and (fixed or name != "dq") and not np.array_equal(x[:, of], y[:, of]):
            text = f"{name}: not the same twice"
    return text


def asked(case: Case, side: int) -> np.ndarray:
    """Which rows (of queries, side 0, or keys) are looked at where every other sequence of a
    packed case is spoiled: those of the rest."""
    if not case.sequences:
        return np.ones((case.nq, case.nk)[side], bool)
    return np.repeat(
        [n % 2 == 0 for n in range(len(case.sequences))], np.array(case.sequences)[:, side]
    )


def spoil(case: Case, q: Any, k: Any, v: Any, do: Any, stats: Any, places: Any) -> None:
    """Keys and values past a prefix length, and every other packed sequence, made infinite or no
    number."""
    if case.lengths:
        for b, n in enumerate(case.lengths):
            k[b, n:], v[b, n:] = np.nan, np.inf
    if case.sequences:
        of_q, of_k = ~asked(case, 0), ~asked(case, 1)
        q[:, of_q], do[:, of_q], k[:, of_k], v[:, of_k] = np.nan, np.inf, -np.inf, np.nan
        for _, r, start in places[1::2]:
            stats[:, :, start : start + r.stop - r.start] = np.nan


def check(
    case: Case, seed: int, luck: int, spoiled: bool
) -> tuple[tuple[np.ndarray, ...], str | None]:
    """(dq, dk, dv, maybe dbias), and what is wrong with them."""
    rng = np.random.default_rng(seed)
    random.seed(luck)
    packed = case.sequences is not None
    batch = len(case.sequences) if case.sequences else case.b
    planes_b = 1 if packed else case.b
    total_q, total_k = np.sum(case.sequences, 0).tolist() if case.sequences else (case.nq, case.nk)
    nq, nk = np.max(case.sequences, 0).tolist() if case.sequences else (case.nq, case.nk)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float16)

    q, do = normal(planes_b, total_q, case.hq, case.d), normal(planes_b, total_q, case.hq, case.dv)
    k, v = normal(planes_b, total_k, case.hk, case.d), normal(planes_b, total_k, case.hk, case.dv)
    dlse = rng.standard_normal((planes_b, case.hq, total_q))
    scale = 0.3
    bias = normal(*(case.bias or (1, 1)), 1 if case.row else nq, nk)
    alibi = (2.0 ** -np.arange(1, case.hq + 1)).astype(np.float32)
    lse, delta, *want = definition(case, q, k, v, do, dlse, scale, bias, alibi)

    config = GradientConfig(
        D=case.d, DV=case.dv, D_OUT=case.d, DV_OUT=case.dv, BLOCK_Q=case.block_q,
        Q_STAGES=case.stages[0], DO_STAGES=case.stages[1],
        LEFT=case.left is not None, RIGHT=case.right is not None,
        RAGGED=packed or case.lengths is not None or nk % BLOCK_K > 0,
        VARLEN=packed, PREFIX=case.lengths is not None, SOFTCAP=case.softcap > 0,
        DOCUMENTS=bool(case.documents), ALIBI=case.alibi,
        BIAS=case.bias is not None and not case.row, ROW=case.row, NATURAL=case.bias is not None,
        **case.options,
    )  # fmt: skip
    C: Any = Constants(config)
    unit = 1.0 if C.NATURAL else LOG2E
    rows = padded_rows(case.block_q, nq, total_q, batch, packed)
    planes = case.hq if packed else case.b * case.hq
    stats = np.full((planes, 2, rows), np.inf, np.float32)
    stats[:, 1] = 0
    sums = np.full((planes, rows, case.d), np.nan if C.FRESH else 0.0, np.float32)
    places = []  # (sequence's rows, its first row in a plane, of the batch)
    for n, (r, _) in enumerate(sequences_of(case)):
        start = (r.start // case.block_q + n) * case.block_q if packed else 0
        places.append((0 if packed else n, r, start))
    for b, r, start in places:
        for h in range(case.hq):
            to = slice(start, start + r.stop - r.start)
            value = lse[b, h, r]
            stats[b * case.hq + h, 0, to] = np.where(np.isinf(value), np.inf, value * unit)
            stats[b * case.hq + h, 1, to] = delta[b, h, r]
    if spoiled:
        spoil(case, q, k, v, do, stats, places)
    # in the order of layouts.by_columns
    stats = stats.reshape(planes, 2, -1, 2, 4, 2).transpose(0, 1, 2, 4, 3, 5)
    stats = np.ascontiguousarray(stats).reshape(planes, 2, rows)
    dk, dv = (np.full(x.size, np.nan, np.float16) for x in (k, v))
    tiles = total_k // BLOCK_K + batch if packed else -(-nk // BLOCK_K)
    turns = np.zeros((1 if packed else case.b) * case.hk * tiles, np.int32)
    cu = np.cumsum([(0, 0), *(case.sequences or ())], 0, dtype=np.int32)
    cu_q, cu_k = np.ascontiguousarray(cu.T)
    if packed:
        made = packed_order(cu_k)
        counter, ends, table = made, made[1:], made[2:]
    else:
        steps = steps_of(case.block_q, BLOCK_K, nq, nk, case.left, case.right)
        blocks = min(case.blocks, steps.shape[0] * case.b * case.hk)
        made = order_of(steps, case.b, case.hk, 2, blocks, C.DRAWN, C.UP)
        table, ends = (t.numpy().reshape(-1) for t in made)
        counter = np.zeros(1, np.int32)
        case = Case(**(case.__dict__ | {"blocks": blocks}))
    dbias = np.zeros((case.b, case.hq, nq, nk), np.float16)
    if C.DROW:
        dbias = np.full((case.b, case.hk, nk), np.nan, np.float32)
        want[3] = want[3].reshape(case.b, case.hk, -1, nq, nk).sum((2, 3))
    lengths = np.array(case.lengths or (0,), np.int32)
    P = machine.Pointer

    def copies(a: np.ndarray, *box: int) -> machine.Descriptor:
        return machine.Descriptor(a, list(box))

    if case.kind != "all":
        given = (q, do, k, v, stats, bias, lengths, cu_q, cu_k, alibi)
        sizes = (nq, nk, batch, rows, packed)
        dq = np.full(q.size, np.nan, np.float16)
        to = (dq, None) if case.kind == "dq" else (dk, dv)
        run_wide(case, config, case.kind, given, sizes, scale, dbias, *to)
        # the others are another launch's
        more = [dbias] if C.DBIAS or C.DROW else []
        if case.kind == "dq":
            got = (dq.reshape(q.shape), *want[1:3], *more)
        else:
            got = (want[0], dk.reshape(k.shape), dv.reshape(v.shape), *more)
        return got, compared(case if spoiled else None, got, want)

    documents, ids = documents_of(case, C)
    machine.run(
        backward, case.blocks,
        copies(q, 1, case.block_q, 1, case.d), copies(do, 1, case.block_q, 1, case.dv),
        copies(stats, 1, 2, case.block_q),
        copies(k, 1, BLOCK_K, 1, case.d), copies(v, 1, BLOCK_K, 1, case.dv),
        copies(sums.reshape(planes, -1, 32), 1, 2 * C.D, 32) if C.DQ else None,
        None if C.ROW else copies(bias, 1, 1, case.block_q, BLOCK_K),
        None if C.ROW else copies(dbias, 1, 1, case.block_q, 64),
        Pointers(
            P(dk), P(dv), None, P(table), P(ends), P(counter), P(turns), P(cu_q), P(cu_k),
            P(lengths), *documents, P(alibi), P(bias.reshape(-1)) if C.ROW else None,
            P(dbias.reshape(-1)) if C.DROW else None,
        ),
        machine.given(Numbers(
            case.hk, 256, rows, nq, nk, case.left or 0, case.right or 0, batch,
            *ids, *(int(n > 1) for n in case.bias or (1, 1)),
            scale / case.softcap if case.softcap else 0.0, (case.softcap or scale) * unit,
            scale, case.hq, case.hq // case.hk, case.hq // case.hk, *steps_of_bias(bias),
        )),
        C, 240, 24,
    )  # fmt: skip
    dq = np.zeros(q.shape)
    # from the order of layouts.by_threads
    sums = sums.reshape(planes, -1, 4, case.d // 8, 8, 4, 2, 2).transpose(0, 1, 2, 6, 4, 3, 5, 7)
    sums = sums.reshape(planes, rows, case.d)
    for b, r, start in places:
        for h in range(case.hq):
            dq[b, r, h] = scale * sums[b * case.hq + h, start : start + r.stop - r.start]
    dq = dq if C.DQ else want[0]  # another launch's
    got = (dq, dk.reshape(k.shape), dv.reshape(v.shape), *([dbias] if C.DBIAS or C.DROW else []))
    return got, compared(case if spoiled else None, got, want)


def steps_of_bias(bias: np.ndarray) -> tuple[int, ...]:
    """As of ``plans.steps_of_bias``."""
    return tuple(
        n // bias.itemsize // 8 if size > 1 else 0
        for n, size in zip(bias.strides[:3], bias.shape, strict=False)
    )


def documents_of(case: Case, C: Any) -> tuple[Any, Any]:
    """Spans with the ids of queries and keys, and the steps of those."""
    P = machine.Pointer
    if not case.documents:
        return (None, None, None), (0, 0)
    both = ids_of(case)
    stays, passes = both if C.KIND == "dq" else both[::-1]
    spans = tile_spans(
        torch.from_numpy(stays), torch.from_numpy(passes), C.BLOCK_K, C.BLOCK_Q, case.b
    )
    q_ids, k_ids = (x.reshape(-1) for x in both)
    steps = (case.nq, case.nk) if case.b > 1 else (0, 0)
    return (P(spans.numpy().reshape(-1)), P(q_ids), P(k_ids)), steps


def run_wide(
    case: Case, config: Any, kind: str, given: Any, sizes: Any, scale: float, dbias: Any, out: Any,
    dv: Any,
) -> None:  # fmt: skip
    q, do, k, v, stats, bias, lengths, cu_q, cu_k, alibi = given
    nq, nk, batch, rows, packed = sizes
    C: Any = Constants(replace(config, KIND=kind))
    unit = 1.0 if C.NATURAL else LOG2E
    of_queries = kind == "dq"
    heads = case.hq if of_queries else case.hk
    if packed:
        made = packed_order(cu_q if of_queries else cu_k, C.BLOCK_K)
        counter, ends, table = made, made[1:], made[2:]
        blocks = case.blocks
    else:
        if of_queries:
            steps = steps_of_queries(C.BLOCK_K, case.block_q, nq, nk, case.left, case.right)
        else:
            steps = steps_of(case.block_q, C.BLOCK_K, nq, nk, case.left, case.right)
        blocks = min(case.blocks, steps.shape[0] * case.b * heads)
        section = 2 * heads // case.hk
        made = order_of(steps, case.b, heads, section, blocks, C.DRAWN, False, C.BLOCK_K)
        table, ends = (t.numpy().reshape(-1) for t in made)
        counter = np.zeros(1, np.int32)
    P = machine.Pointer

    def copies(a: np.ndarray, tokens: int, parts: int = 1) -> machine.Descriptor:
        return machine.Descriptor(a, [1, tokens, 1, a.shape[-1] // parts])

    stays, passes = ((q, do), (k, v)) if of_queries else ((k, v), (q, do))
    group = case.hq // case.hk
    documents, ids = documents_of(case, C)
    machine.run(
        wide, blocks,
        *(copies(a, C.BLOCK_K, 1 + C.ALONE) for a in stays),
        *(copies(a, case.block_q) for a in passes),
        machine.Descriptor(stats, [1, 2, case.block_q]),
        None if of_queries or not C.BIAS else machine.Descriptor(
            bias, [1, 1, case.block_q, C.BLOCK_K]
        ),
        Pointers(
            P(out), None if dv is None else P(dv), P(stats.reshape(-1)), P(table), P(ends),
            P(counter), None, P(cu_q), P(cu_k), P(lengths), *documents, P(alibi),
            P(bias.reshape(-1)) if C.ROW or (of_queries and C.BIAS) else None,
            P(dbias.reshape(-1)) if C.DBIAS or C.DROW else None,
        ),
        machine.given(Numbers(
            heads, 256, rows, nq, nk, case.left or 0, case.right or 0, batch, *ids,
            *(int(n > 1) for n in case.bias or (1, 1)),
            scale / case.softcap if case.softcap else 0.0, (case.softcap or scale) * unit,
            scale, case.hq, 1 if of_queries else group, group, *steps_of_bias(bias),
        )),
        C, 240, 24,
    )  # fmt: skip


def compared(spoiled: Case | None, got: tuple[np.ndarray, ...], want: Any) -> str | None:
    for n, (name, x, y) in enumerate(zip(("dq", "dk", "dv", "dbias"), got, want, strict=False)):
        if spoiled and n < 3:
            of = asked(spoiled, int(n > 0))
            x, y = x[:, of], y[:, of]
        if np.isnan(x).any():
            return f"{name}: {int(np.isnan(x).sum())} of {x.size} are NaN"
        off, size = np.linalg.norm(x.astype(float) - y), np.linalg.norm(y)
        if off > 3e-3 * size + 1e-3:
            return f"{name}: error {off:.3g} of {size:.3g}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    bad = done = 0
    for case in cases():
        if options.only not in case.name:
            continue
        for seed in range(options.seeds):
            begin = time.monotonic()
            try:
                text = twice(case, seed)
            except Exception as error:
                if options.only:
                    raise
                text = f"{type(error).__name__}: {error}"
            done += 1
            bad += text is not None
            if text or options.only:
                took = f"{time.monotonic() - begin:.1f} s"
                print(case.name, seed, text or "right", took, flush=True)
            if text and text.startswith("Stuck"):
                return 1
    print(f"{done - bad} right, {bad} wrong")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
