"""Check attention across devices: NCCL on 2 or more GPUs, gloo on a CPU.

    python -m tests.gpu.distributed --ranks 2 --out distributed.csv --minutes 4
    python -m tests.gpu.distributed --ranks 4 --kind cases --all --minutes 8
    python -m tests.gpu.distributed --ranks 2 --device cpu --only window --repeats 5

Kinds:

    cases      covering cases in bfloat16 and float16, some in float32 and float64: each with one or
               two pairs of layout and strategy, with --all every pair
    dtypes     calls of the same sizes in one dtype after the other
    dropout    the kept set is that of one device
    one-rank   a group of one rank equals one device to the bit
    repeats    deterministic calls are equal to the bit while one rank is delayed at random
    stages     stages of heads, through shared memory, have the bits of collectives
    meshes     two dimensions: one of them as long as the group has the bits of a strategy; on 4
               ranks, and more, both have the definition's results
    graphs     replays of a CUDA graph, between other calls, are right (GPUs)
    streams    calls of two groups of the same ranks, each on its stream, are equal to the bit while
               one rank is delayed at random (GPUs)
    multicast  no pointer of it exists (GPUs)
    waits      warm calls copy nothing to the host (GPUs)
    memory     peaks, and what a GPU holds with a million tokens on four, are within bounds (GPUs)

Several groups of ranks share the GPUs (``--groups``): most of the time kernels compile. Ranks that
hang or die are replaced, and the others go on. Checks that do not begin in ``--minutes`` are left
for a run with ``--after``; ``--patience`` seconds later every process is killed. The file has the
rows of ``results.py``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any
from unittest import mock
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import rowmax
from benchmarks.ranks import ENVIRONMENT, Rank, Ranks, RanksError
from rowmax import distributed as rd
from rowmax.bench import timing
from rowmax.distributed import Layout
from rowmax.distributed.groups import group_of
from rowmax.distributed.shared import shares_memory
from rowmax.distributed.strategies import STRATEGIES
from rowmax.testing import COVERING, Answer, Call, Case, complaints, cotangents, expected, make
from tests.distributed.attention_programs import with_unit_values
from tests.distributed.programs import LAYOUTS, copies, heads_apart, in_stages, own_call
from tests.distributed.rows import joined, prepared
from tests.gpu import results
from tests.gpu.check import EVERY, Report
from tests.gpu.kinds import Check

#: layouts and strategies, one after the other
PAIRS = [(kind, strategy) for strategy, kind in product(STRATEGIES, LAYOUTS)]
SIZE = 4  # times the lengths of a case, on a GPU
COMPILE = 240.0  # seconds of any check
GROUPS = 6
DELAY = 3e-3  # seconds, the longest of one rank
#: in errors of packed calls with features that they do not take, and of a strategy
REFUSED = ("attention of [1, n, H, D] with mask=Documents", "no position aligned to the lengths")
FEATURES = Case(
    "features", b=2, nq=200, hk=2, d=64, left=90, causal=True, documents="sorted", sink=True,
    alibi=True, bias="1hqk", dropout=0.2,
)  # fmt: skip
PLAIN = Case("causal", b=1, nq=1000, hq=8, hk=4, d=128, causal=True)
CALLS = (PLAIN, FEATURES)
#: a call of own keys runs before that of others, which has a stream of its own
WINDOW = Case("window", b=1, nq=4096, hq=8, hk=4, d=128, left=300, causal=True)
_LENGTHS = ((60, 60), (3, 3), (0, 0), (130, 130), (57, 57))
#: the table's packed cases have features that packed calls across ranks refuse
PACKED_CASES = (
    Case("packed-causal", sequences=_LENGTHS, hk=2, d=64, causal=True, sink=True, softcap=9.0),
    Case("packed-window", sequences=_LENGTHS, d=64, left=20, right=5, alibi=True),
    Case("packed-full", sequences=((60, 30), (1, 200), (130, 7)), hk=1, d=64),
)
DTYPES = ("bfloat16", "float16", "float32", "float64")
#: the most memory that a call adds, in copies of the keys and values of all ranks: forward,
#: backward. It has out, gradients, gathered rows (as received and in order) and float32 sums
COPIES = {"keys": (4.0, 14.0), "heads": (8.0, 16.0)}
#: positions of a rank, a million on four; and the most GiB of a GPU in use after both passes
LONG_RANK, MOST_IN_USE = 2**18, 32.0


# --- what ranks run ------------------------------------------------------------------------------


def layouts_of(call: Call, kind: str, ranks: int) -> tuple[Layout, Layout]:
    """Return the layouts of queries and keys."""
    axis = 0 if call.case.packed else 1
    queries, keys = (LAYOUTS[kind](t.shape[axis], ranks) for t in call.inputs[:2])
    return queries, keys


def maybe_apart(case: Case) -> AbstractContextManager[None]:
    """Let heads arrive one after the other in half of the cases, by name."""
    return nullcontext() if crc32(case.name.encode()) % 2 else heads_apart()


def check_case(
    rank: Rank, case: Case, dtype: str, size: int, kind: str, strategy: str, backend: str | None
) -> list[str]:
    """Return what is wrong with a case; the first rank alone compares.

    In half of the cases heads arrive one after the other (``maybe_apart``). Calls of other values
    come before, one in each region of rows: a missing copy would leave those.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    call = make(case, rank.device, getattr(torch, dtype), size=size)
    layouts = layouts_of(call, kind, rank.size)
    try:
        with maybe_apart(case):
            answer = prepared(rank, call, layouts, {"strategy": strategy, "backend": backend})
            for factor in (-0.5, 2.0):
                answer(factor)
            own = answer()
    except ValueError as error:
        if not any(text in str(error) for text in REFUSED):
            raise
        return [f"refused: {error}"]
    got = joined(call, layouts, rank.rank, own)
    return complaints(got, expected(call, *cotangents(call))) if rank.rank == 0 else []


def check_dtypes(rank: Rank, case: Case, kind: str, backend: str | None) -> list[str]:
    """Return what is wrong with a case in one dtype after another: what is kept fits one alone."""
    found = []
    for dtype in (*DTYPES, DTYPES[0]):
        texts = check_case(rank, case, dtype, 1, kind, "keys", backend)
        found += [f"{dtype}: {text}" for text in texts]
    return found


def check_dropout(
    rank: Rank, dtype: str, kind: str, strategy: str, backend: str | None
) -> list[str]:
    """Return an error if another set of pairs is kept than on one device.

    With values that are a unit matrix, out is the weights: those of dropped pairs are 0.
    """
    case = Case("kept", b=2, nq=190, nk=232, hk=2, d=16, dv=232, dropout=0.4)
    call = with_unit_values(make(case, rank.device, getattr(torch, dtype)))
    unit = torch.eye(232).to(call.inputs[0])[None, :, None].expand(call.inputs[2].shape)
    whole = rowmax.attention(*call.inputs[:2], unit, **call.keywords, backend=backend)
    assert isinstance(whole, Tensor)
    queries, keys = layouts_of(call, kind, rank.size)
    (q, k, _), keywords = own_call(call, queries, keys, rank.rank)
    v = unit[:, keys.positions(rank.rank, rank.device)]
    more = {"layout": queries, "k_layout": keys, "strategy": strategy, "backend": backend}
    out = rd.attention(q, k, v, **keywords, **more)
    assert isinstance(out, Tensor)
    want = whole[:, queries.positions(rank.rank, rank.device)] != 0
    found = [f"{int(((out != 0) != want).sum())} pairs"] if not torch.equal(out != 0, want) else []
    dropped = 1.0 - float((whole != 0).float().mean())
    return found + ([] if 0.3 < dropped < 0.5 else [f"one device drops {dropped:.2f}"])


def check_one_rank(rank: Rank, case: Case, dtype: str, backend: str | None) -> list[str]:
    """Return what differs from one device in a group of this rank alone."""
    groups = rank.kept.get("alone") or [dist.new_group([other]) for other in range(rank.size)]
    rank.kept["alone"] = groups
    call = make(case, rank.device, getattr(torch, dtype), size=2)
    more = {"deterministic": True, "backend": backend}
    alone, group = Rank(0, 1, rank.device, {}), {"mesh": groups[rank.rank]}
    got = prepared(alone, call, layouts_of(call, "zigzag", 1), more | group)()
    leaves = {name: t.detach().requires_grad_() for name, t in call.leaves.items()}
    out, lse = call.with_leaves(leaves)(**more)
    grads = torch.autograd.grad([out, lse], list(leaves.values()), cotangents(call))
    want = [out, lse, *grads]
    pairs = zip(got.items(), want, strict=True)
    return [f"{name} differs" for (name, t, _), x in pairs if not torch.equal(t, x)]


def check_repeats(
    rank: Rank, case: Case, kind: str, strategy: str, times: int, backend: str | None
) -> list[str]:
    """Return the results that differ in any repeat; the last rank begins each call late."""
    call = make(case, rank.device, torch.bfloat16)
    layouts = layouts_of(call, kind, rank.size)
    more = {"strategy": strategy, "deterministic": True, "backend": backend}
    once = prepared(rank, call, layouts, more)
    with maybe_apart(case):
        first = once()
        draw = random.Random(0)
        zero = torch.zeros((), dtype=torch.int64, device=rank.device)
        counts = {name: zero.clone() for name, *_ in first.items()}
        for _ in range(times):
            if rank.rank == rank.size - 1:
                _delay(rank, draw.random() * DELAY)
            again = once()
            for (name, a, _), (_, b, _) in zip(first.items(), again.items(), strict=True):
                counts[name] += (a != b).any()
    return [f"{name} differs in {int(n)} of {times}" for name, n in counts.items() if int(n)]


def _delay(rank: Rank, seconds: float) -> None:
    """Delay the device and its host, each half of the time."""
    time.sleep(seconds / 2)
    if rank.device.type == "cuda":
        torch.cuda._sleep(int(seconds / 2 * 1.7e9))


def check_stages(rank: Rank, case: Case, stages: int, times: int, backend: str | None) -> list[str]:
    """Return the results that differ in a repeat from those of collectives in as many stages."""
    call = make(case, rank.device, torch.bfloat16, size=2)
    layouts = layouts_of(call, "zigzag", rank.size)
    once = prepared(rank, call, layouts, {"deterministic": True, "backend": backend})
    with copies("collectives"), in_stages(stages):
        first = once()
    draw = random.Random(0)
    zero = torch.zeros((), dtype=torch.int64, device=rank.device)
    counts = {name: zero.clone() for name, *_ in first.items()}
    with copies("shared"), in_stages(stages):
        for n in range(times):
            if rank.rank == n % rank.size:
                _delay(rank, draw.random() * DELAY)
            again = once()
            for (name, a, _), (_, b, _) in zip(first.items(), again.items(), strict=True):
                counts[name] += (a != b).any()
        shares = shares_memory(group_of(None), rank.device)
    found = [f"{name} differs in {int(n)} of {times}" for name, n in counts.items() if int(n)]
    return found + ([] if shares else ["no memory is shared"])


def check_mesh(
    rank: Rank, case: Case, keys: int, heads: int, strategy: str, backend: str | None
) -> list[str]:
    """Return what differs from the strategy of one dimension; of two, from the definition."""
    meshes = rank.kept.setdefault("meshes", {})
    if (keys, heads) not in meshes:
        names = ("keys", "heads")
        shape = (keys, heads)
        meshes[shape] = init_device_mesh(rank.device.type, shape, mesh_dim_names=names)
    call = make(case, rank.device, torch.bfloat16, size=2)
    layouts = layouts_of(call, "zigzag", rank.size)
    more = {"deterministic": True, "backend": backend}
    across = "keys" if strategy == "heads" else strategy
    mesh = {"mesh": meshes[keys, heads], "strategy": across}
    got = prepared(rank, call, layouts, {**more, **mesh})()
    if keys > 1 < heads:
        whole = joined(call, layouts, rank.rank, got)
        return complaints(whole, expected(call, *cotangents(call))) if rank.rank == 0 else []
    want = prepared(rank, call, layouts, {**more, "strategy": strategy})()
    pairs = zip(got.items(), want.items(), strict=True)
    return [f"{name} differs" for (name, a, _), (_, b, _) in pairs if not torch.equal(a, b)]


def check_graph(rank: Rank, case: Case, kind: str, strategy: str, backend: str | None) -> list[str]:
    """Return the results of a CUDA graph that differ from calls outside of it.

    A longer call has replaced the shared memory before the graph is replayed.
    """
    # chunks of whole blocks: others are for torch's operations, which no graph takes
    more = {"strategy": strategy, "deterministic": True, "backend": backend}

    def of_size(size: int) -> Callable[[], Answer]:
        call = make(case, rank.device, torch.bfloat16, size=size * rank.size)
        return prepared(rank, call, layouts_of(call, kind, rank.size), more)

    once, longer = of_size(2), of_size(4)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            want = once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        got = once()
    longer()
    found = []
    for n in range(4):
        for _, t, _ in got.items():
            t.fill_(torch.nan)
        graph.replay()
        between = once() if n % 2 else want
        torch.cuda.synchronize()
        for result in (got, between):
            for (name, a, _), (_, b, _) in zip(want.items(), result.items(), strict=True):
                if not torch.equal(a, b):
                    found.append(f"{name} of replay {n} differs")
    return found


def check_streams(
    rank: Rank, case: Case, kind: str, strategy: str, times: int, backend: str | None
) -> list[str]:
    """Return the results that differ where two groups call at the same time, on two streams."""
    if "twins" not in rank.kept:
        rank.kept["twins"] = [dist.new_group(list(range(rank.size))) for _ in range(2)]
    call = make(case, rank.device, torch.bfloat16, size=SIZE)
    layouts = layouts_of(call, kind, rank.size)
    more = {"strategy": strategy, "deterministic": True, "backend": backend}
    calls = [prepared(rank, call, layouts, {**more, "mesh": mesh}) for mesh in rank.kept["twins"]]
    streams = [torch.cuda.Stream(rank.device) for _ in calls]
    torch.cuda.synchronize()
    with heads_apart():
        first = calls[0]()
        torch.cuda.synchronize()
        draw = random.Random(0)
        zero = torch.zeros((), dtype=torch.int64, device=rank.device)
        counts = [{name: zero.clone() for name, *_ in first.items()} for _ in streams]
        torch.cuda.synchronize()
        for n in range(times):
            if rank.rank == n % rank.size:
                _delay(rank, draw.random() * DELAY)
            for one, stream, count in zip(calls, streams, counts, strict=True):
                with torch.cuda.stream(stream):
                    for (name, a, _), (_, b, _) in zip(first.items(), one().items(), strict=True):
                        count[name] += (a != b).any()
        torch.cuda.synchronize()
    differ = {name: sum(int(count[name]) for count in counts) for name in counts[0]}
    return [f"{name} differs in {n} of {2 * times}" for name, n in differ.items() if n]


def check_multicast(rank: Rank, strategy: str, backend: str | None) -> list[str]:
    """Return the multicast pointers of workspaces that a call has made."""
    found = [f"{key} is not {x}" for key, x in ENVIRONMENT.items() if os.environ.get(key) != x]
    memory: Any = importlib.import_module("torch.distributed._symmetric_memory")
    handles: list[Any] = []
    real = memory.rendezvous

    def recorded(*args: Any, **keywords: Any) -> Any:
        handles.append(real(*args, **keywords))
        return handles[-1]

    call = make(PLAIN, rank.device, torch.bfloat16, size=5)  # lengths that no call has had
    with mock.patch.object(memory, "rendezvous", recorded), copies("shared"):
        more = {"strategy": strategy, "backend": backend}
        prepared(rank, call, layouts_of(call, "zigzag", rank.size), more)()
    if strategy == "keys" and not handles:
        found.append("no memory is shared")
    pointers = [handle.multicast_ptr for handle in handles]
    return found + [f"a multicast pointer {x:#x}" for x in pointers if x]


def check_waits(rank: Rank, case: Case, kind: str, strategy: str, backend: str | None) -> list[str]:
    """Return the first copy to the host, or other wait for the device, of warm calls."""
    call = make(case, rank.device, torch.bfloat16, size=SIZE)
    more = {"strategy": strategy, "backend": backend}
    once = prepared(rank, call, layouts_of(call, kind, rank.size), more)
    for _ in range(3):
        once()
    torch.cuda.synchronize()
    error = ""
    torch.cuda.set_sync_debug_mode("error")
    try:
        once()
    except RuntimeError as raised:
        at = traceback.extract_tb(raised.__traceback__)[-1]
        error = f"{str(raised).splitlines()[0]} at {Path(at.filename).name}:{at.lineno}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [error] if error else []


def check_memory(rank: Rank, n: int, kind: str, strategy: str, backend: str | None) -> list[str]:
    """Return the peaks that are beyond their bounds, or the peaks."""
    layout = LAYOUTS[kind](n, rank.size)
    i = layout.lengths[rank.rank]
    q, dout = (torch.randn(1, i, 16, 128, device=rank.device).bfloat16() for _ in "qd")
    k, v = (torch.randn(1, i, 4, 128, device=rank.device).bfloat16() for _ in "kv")
    leaves = [t.requires_grad_() for t in (q, k, v)]
    more: dict[str, Any] = {"layout": layout, "causal": True, "strategy": strategy}
    more["backend"] = backend
    kept: list[Any] = []

    def forward() -> Any:
        kept[:] = [rd.attention(*leaves, **more)]

    def backward() -> Any:
        return torch.autograd.grad(kept[0], leaves, dout, retain_graph=True)

    for call in (forward, backward):
        call()
    kept.clear()
    unit = 2 * n * 4 * 128 * 2 / 2**20
    found = [timing.device_mib(call) / unit for call in (forward, backward)]
    of = zip(("forward", "backward"), found, COPIES[strategy], strict=True)
    text = [f"{what} {x:.2f} of {most:g} copies" for what, x, most in of]
    wrong = [t for t, x, most in zip(text, found, COPIES[strategy], strict=True) if x > most]
    return wrong or ["right: " + ", ".join(text)]


def check_in_use(rank: Rank, backend: str | None) -> list[str]:
    """Return the GiB in use on the fullest GPU after both passes of a long call.

    The driver counts them: the context, kernels, inputs, results, memory that ranks share, and the
    peak of torch's allocator. Another process of the GPU would count as well.
    """
    layout = LAYOUTS["zigzag"](LONG_RANK * rank.size, rank.size)
    q, dout = (torch.randn(1, LONG_RANK, 32, 128, device=rank.device).bfloat16() for _ in "qd")
    k, v = (torch.randn(1, LONG_RANK, 8, 128, device=rank.device).bfloat16() for _ in "kv")
    torch.cuda.empty_cache()  # no float32 numbers that were drawn
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = rd.attention(*leaves, layout=layout, causal=True, strategy="keys", backend=backend)
    grads = torch.autograd.grad(out, leaves, dout)
    free, total = torch.cuda.mem_get_info(rank.device)
    most = torch.tensor((total - free) / 2**30, device=rank.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    finite = all(bool(t.isfinite().all()) for t in (out, *grads))
    text = f"{most.item():.1f} of {MOST_IN_USE:g} GiB are in use"
    wrong = ([text] if most.item() > MOST_IN_USE else []) + ([] if finite else ["not finite"])
    return wrong or [f"right: {text}"]


# --- the checks ----------------------------------------------------------------------------------

#: (dtype, every how many cases, pairs of layout and strategy of each)
_DTYPES = (("bfloat16", 1, 2), ("float16", 1, 1), ("float32", 6, 1), ("float64", 12, 1))


def cases(given: argparse.Namespace) -> Iterator[Check]:
    """Yield covering cases, with pairs of layout and strategy that follow each other."""
    following = cycle(PAIRS)
    size = 1 if given.device == "cpu" else SIZE
    if given.device != "cpu":
        args = (WINDOW, "bfloat16", 1, "contiguous", "keys")
        yield Check("", WINDOW.name, "bfloat16", "contiguous keys", check_case, args)
    for dtype, every, some in _DTYPES:
        for case in (*PACKED_CASES, *COVERING)[::every]:
            pairs = PAIRS if given.all else list(islice(following, some))
            for kind, strategy in dict.fromkeys(pairs):
                args = (case, dtype, size, kind, strategy)
                yield Check("", case.name, dtype, f"{kind} {strategy}", check_case, args)


def dtypes(given: argparse.Namespace) -> Iterator[Check]:
    """Yield calls of the same sizes in several dtypes: plain, packed, with features."""
    for case, kind in product((PLAIN, FEATURES, PACKED_CASES[0]), ("contiguous", "uneven")):
        args = (case, kind)
        yield Check("", f"dtypes: {case.name}", "all", f"{kind} keys", check_dtypes, args)


def dropout(given: argparse.Namespace) -> Iterator[Check]:
    """Yield a check of the kept set for each pair of layout and strategy."""
    for dtype, (kind, strategy) in product(("float32", "bfloat16"), PAIRS):
        variant = f"{kind} {strategy}"
        yield Check("", "dropout", dtype, variant, check_dropout, (dtype, kind, strategy))


def one_rank(given: argparse.Namespace) -> Iterator[Check]:
    """Yield calls of a group of one rank."""
    for case in (PLAIN, FEATURES):
        for dtype in ("bfloat16", "float32"):
            yield Check("", f"one rank: {case.name}", dtype, "", check_one_rank, (case, dtype))


def ways() -> Iterator[tuple[Case, str, str]]:
    """Yield (case, layout, strategy)."""
    for case, strategy in product(CALLS, STRATEGIES):
        yield case, "zigzag", strategy
    yield WINDOW, "contiguous", "keys"


def repeats(given: argparse.Namespace) -> Iterator[Check]:
    """Yield repeated calls with random delays."""
    for case, kind, strategy in (*ways(), (PACKED_CASES[0], "contiguous", "keys")):
        args = (case, kind, strategy, given.repeats)
        name = f"{given.repeats} repeats: {case.name}"
        limit = COMPILE + given.repeats * 0.1
        found = Check("", name, "bfloat16", f"{kind} {strategy}", check_repeats, args)
        yield found._replace(limit=limit)


def stages(given: argparse.Namespace) -> Iterator[Check]:
    """Yield repeated calls in stages, with random delays."""
    for case, count in product(CALLS, (1, 2)):
        args = (case, count, given.repeats)
        name = f"{given.repeats} repeats of {count} stages: {case.name}"
        found = Check("", name, "bfloat16", "zigzag keys", check_stages, args)
        yield found._replace(limit=COMPILE + given.repeats * 0.1)


def meshes(given: argparse.Namespace) -> Iterator[Check]:
    """Yield meshes of two dimensions."""
    n = given.ranks
    shapes = [(n, 1, "keys"), (n, 1, "queries"), (1, n, "heads")]
    if n % 2 == 0 and n > 2:
        shapes += [(n // 2, 2, "keys"), (2, n // 2, "queries")]
    for case, (keys, heads, strategy) in product(CALLS, shapes):
        args = (case, keys, heads, strategy)
        name = f"mesh {keys} x {heads}: {case.name}"
        yield Check("", name, "bfloat16", f"zigzag {strategy}", check_mesh, args)


def graphs(given: argparse.Namespace) -> Iterator[Check]:
    """Yield CUDA graphs of calls."""
    for case, kind, strategy in ways():
        args = (case, kind, strategy)
        yield Check("", f"graph: {case.name}", "bfloat16", f"{kind} {strategy}", check_graph, args)


def streams(given: argparse.Namespace) -> Iterator[Check]:
    """Yield calls of two groups at the same time."""
    for case, kind, strategy in ways():
        name = f"streams: {case.name}"
        args = (case, kind, strategy, given.repeats // 10)
        found = Check("", name, "bfloat16", f"{kind} {strategy}", check_streams, args)
        yield found._replace(limit=COMPILE + given.repeats * 0.02)


def multicast(given: argparse.Namespace) -> Iterator[Check]:
    """Yield checks that no multicast pointer exists."""
    for strategy in STRATEGIES:
        yield Check("", "multicast", "bfloat16", strategy, check_multicast, (strategy,))


def waits(given: argparse.Namespace) -> Iterator[Check]:
    """Yield warm calls that must not wait for the device."""
    for case, strategy in product((*CALLS, PACKED_CASES[0]), STRATEGIES):
        args = (case, "zigzag", strategy)
        yield Check("", f"waits: {case.name}", "bfloat16", f"zigzag {strategy}", check_waits, args)


def memory(given: argparse.Namespace) -> Iterator[Check]:
    """Yield the peaks of memory of a long call."""
    for kind, strategy in (("zigzag", "keys"), ("contiguous", "keys"), ("contiguous", "heads")):
        args = (32768, kind, strategy)
        yield Check("", "memory", "bfloat16", f"{kind} {strategy}", check_memory, args)
    yield Check("", "memory in use", "bfloat16", "zigzag keys", check_in_use, ())


KINDS = {
    "repeats": repeats,
    "stages": stages,
    "meshes": meshes,
    "graphs": graphs,
    "streams": streams,
    "memory": memory,
    "waits": waits,
    "multicast": multicast,
    "dropout": dropout,
    "dtypes": dtypes,
    "one-rank": one_rank,
    "cases": cases,
}
#: kinds that need no GPU
ON_CPU = ("repeats", "stages", "meshes", "dropout", "dtypes", "one-rank", "cases")


def checks_of(given: argparse.Namespace) -> list[Check]:
    """Return all checks, with the backend as last argument; a row names the number of ranks."""
    found = [check for kind in given.kinds for check in KINDS[kind](given)]
    ranks = f"{given.ranks} ranks"
    named = [
        one._replace(
            kind="distributed",
            variant=" ".join(filter(None, (ranks, one.variant, given.backend))),
            args=(*one.args, given.backend),
        )
        for one in found
    ]
    return [x for x in named if any(text in f"{x.name} {x.variant}" for text in given.only)]


def result_of(ranks: Ranks, check: Check) -> str:
    """Return the result of a check, in the form of its row."""
    try:
        each = ranks.run(check.function, *check.args, limit=check.limit or COMPILE)
    except RanksError as error:
        return f"fault: {error}"[:700]
    # a refusal, or measured peaks, that several ranks state is one
    found = list(dict.fromkeys(text for one in each for text in one))
    wrong = [text for text in found if not text.startswith(("right", "refused"))]
    return "; ".join(wrong or found[:1]) or "right"


class Queue:
    """Checks that groups of ranks take, and their report."""

    def __init__(self, given: argparse.Namespace) -> None:
        before = results.read(given.after) if given.after else []
        kept = [row for row in before if row.right or row.refused]
        known = {row.key for row in kept}
        self.given = given
        self.todo = [check for check in checks_of(given) if check.key not in known]
        self.report = Report(given, kept, len(kept) + len(self.todo))
        self.end = self.report.begin + 60 * given.minutes
        self.lock = threading.Lock()

    def take(self) -> Check | None:
        """Return the next check, None at the end."""
        with self.lock:
            return self.todo.pop(0) if self.todo and time.time() < self.end else None

    def serve(self, _: int) -> None:
        """Run checks on a group of ranks of its own; start another group after a hang."""
        ranks: Ranks | None = None
        try:
            while (check := self.take()) is not None:
                if ranks is None or not ranks.alive:
                    hard = self.end + self.given.patience
                    ranks = Ranks(self.given.ranks, self.given.device, hard)
                begin = time.time()
                result = result_of(ranks, check)
                with self.lock:
                    self.report.add(check, result, time.time() - begin)
                    self.report.tell(EVERY)
        except RanksError as error:
            print(f"ranks do not start: {error}", flush=True)
        finally:
            if ranks is not None:
                ranks.close()


def run_all(given: argparse.Namespace) -> int:
    """Run checks on groups of ranks; return 1 if one is wrong or did not run."""
    queue = Queue(given)
    with ThreadPoolExecutor(given.groups) as pool:
        for _ in pool.map(queue.serve, range(min(given.groups, len(queue.todo)))):
            pass
    queue.report.tell()
    queue.report.tell_refusals()
    return int(queue.report.bad > 0 or queue.report.left > 0)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kind", dest="kinds", help=f"some of {', '.join(KINDS)}")
    parser.add_argument("--backend", help="of every call, for that of the device")
    parser.add_argument("--only", default="", help="texts of names or variants")
    parser.add_argument("--all", action="store_true", help="each case with every pair")
    parser.add_argument("--repeats", type=int, default=1000, help="of deterministic calls")
    parser.add_argument("--out", type=Path, default=Path("distributed_check.csv"))
    parser.add_argument("--after", type=Path, help="a result to go on from")
    parser.add_argument("--minutes", type=float, default=4.0, help="then no check begins")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds, then all are killed")
    parser.add_argument("--groups", type=int, help=f"of ranks, side by side; {GROUPS} on GPUs")
    given = parser.parse_args(words)
    most = GROUPS if given.device == "cuda" else 1
    given.groups = given.groups or max(1, min(most, (os.cpu_count() or 1) // (2 * given.ranks)))
    usual = ON_CPU if given.device == "cpu" else tuple(KINDS)
    given.kinds = given.kinds.split(",") if given.kinds else usual
    given.only = given.only.split(",")
    if unknown := set(given.kinds) - set(KINDS):
        parser.error(f"--kind: got {', '.join(unknown)}; want some of {', '.join(KINDS)}")
    if given.device == "cpu" and (needing := set(given.kinds) - set(ON_CPU)):
        parser.error(f"--kind: {', '.join(needing)} needs GPUs")
    if given.device == "cuda" and torch.cuda.device_count() < given.ranks:
        there = torch.cuda.device_count()
        parser.error(f"--ranks: got {given.ranks}; this host has {there} GPUs")
    return given


def main(words: list[str] | None = None) -> int:
    given = arguments(words)
    if not checks_of(given):
        print("no check has such a name")
        return 2
    return run_all(given)


if __name__ == "__main__":
    sys.exit(main())
