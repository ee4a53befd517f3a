"""Calls of few queries and of short sequences, and how they are repeated with other tensors."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from torch import Tensor, get_num_threads

from ..call.dispatch import Limit, beyond
from ..call.problem import FAR, Gradients, Problem, Tensors, Wanted
from ..rules import row_stats
from ..torch_compat import Empty, empty_on_cpu, filled_on_cpu
from . import amx, few, short, threads
from .backward import finished, outputs
from .call import (
    Call,
    Words,
    leave_out,
    sequences_again,
    sequences_of,
    sequences_stay,
    word_of,
    words,
)
from .few_vector import HALVES, LANES
from .kernel import address_of
from .vector import PAIRS, TILE_K

#: the dtypes of rows, as kernels distinguish them
_DTYPES = {torch.float32: types.float32, torch.bfloat16: types.uint16}
_DTYPES |= {torch.float16: types.int16} if HALVES else {}
#: (queries of a sequence, those of all heads of a kv head) whose products are made in place
FEW, FEWER_ROWS = (8, 64), (16, 32)
#: the same where keys are too many for a thread to pack; more rows need the registers of AVX-512
FEW_OF_MANY_KEYS = (32, 64 if LANES == 16 else 32)
#: queries and keys of a sequence that a thread packs into its own memory
MOST_TOKENS = 256
#: where tile instructions multiply bfloat16: keys for which it is widened
MOST_WIDENED = 24
MOST_WIDE = 512  # columns of a head

_ANY = (
    Limit(lambda p: p.dtype in _DTYPES, "{0.dtype} is computed by tiles"),
    Limit(
        lambda p: p.d % 16 == p.dv % 16 == 0 and 0 < p.d <= MOST_WIDE and 0 < p.dv <= MOST_WIDE,
        "head sizes {0.d} and {0.dv} are no whole vectors, or too wide",
    ),
)
_FEW = (
    Limit(
        lambda p: p.nk > 0 and 0 < p.nq <= most_queries(p),
        "{0.nq} queries a head in groups of {0.group} are not few",
    ),
)
_SHORT = (
    Limit(
        lambda p: not in_strips(p.dtype) or p.nk <= MOST_WIDENED,
        "tile instructions multiply bfloat16",
    ),
    Limit(
        lambda p: p.nq > 0 and (p.nq <= MOST_TOKENS or in_strips(p.dtype)),
        "{0.nq} queries are not those of a short sequence",
    ),
    Limit(lambda p: 0 < p.nk <= MOST_TOKENS, "{0.nk} keys are not those of a short sequence"),
)


def in_strips(dtype: torch.dtype) -> bool:
    """Return True if tile instructions multiply numbers of a dtype."""
    return dtype == torch.bfloat16 and amx.ready()


def most_queries(p: Problem) -> int:
    """Return the most queries of a sequence that are few.

    Those of a packed sequence do not depend on its keys: others may have more.
    """
    if in_strips(p.dtype):
        bounds = (FEW,)
    elif p.nk > MOST_TOKENS and not p.varlen:
        bounds = (FEW, FEW_OF_MANY_KEYS)
    else:
        bounds = (FEW, FEWER_ROWS)
    return max(min(queries, rows // p.group) for queries, rows in bounds)


def in_pairs(dtype: torch.dtype) -> bool:
    """Return True if kernels multiply pairs of numbers of a dtype: tiles, and short ones."""
    return dtype == torch.bfloat16 and PAIRS and not amx.ready()


class Way(NamedTuple):
    """A way to compute a call: its limits and its kernel.

    ``exact``: its results are those of tiles to the bit, except of bfloat16 in strips.
    """

    limits: tuple[Limit, ...]
    kernel: Any
    passes: int  # over keys and values
    exact: bool = False
    #: bytes of keys and values from which a task has all kv heads, in float32 and in 16 bits
    apart: tuple[int, int] = (0, 0)


#: the first that can is taken
WAYS = {
    "forward": (
        Way(_ANY + _FEW, few.few_forward, 1, apart=(1 << 20, 1 << 25)),
        Way(_ANY + _SHORT, short.short_forward, 1, exact=True),
    ),
    "backward": (
        Way(_ANY + _FEW, few.few_backward, 3, apart=(1 << 20, 1 << 20)),
        Way(_ANY + _SHORT, short.short_backward, 3, exact=True),
    ),
}

#: bytes of a key's rows of some heads from which on these heads are read together: with 1 KiB, 8
#: heads of 64 were no faster than head by head (an AMD EPYC, Zen 5)
TOGETHER = 1 << 11
#: bytes of keys and values that are worth a thread
_BYTES = 1 << 16

Again = Callable[..., Any]
#: the place of a tensor among those of a call, and the word of its address
Places = list[tuple[int, int]]
_noted = threading.local()


def way(problem: Problem, call: str) -> Way | None:
    """Return the way of a forward or backward; None: by tiles.

    A task of short sequences is a kv head. Tiles are more tasks, for more threads, and taken where
    they have the same bits: those of a sequence depend neither on threads nor on other sequences.
    """
    found = _way(problem, call)
    if found is None or not found.exact or in_strips(problem.dtype):
        return found
    return None if problem.batch * problem.hk < get_num_threads() else found


@lru_cache(maxsize=512)
def _way(problem: Problem, call: str) -> Way | None:
    return next((x for x in WAYS[call] if beyond(x.limits, problem) is None), None)


def heads_of_task(call: Call, way: Way) -> int:
    """Return the kv heads of a task of few queries: one, all, or as many as give threads a task.

    Where a key's rows of all heads are next to one another, rows of one head are far apart, and a
    processor does not fetch them ahead of use. All heads of a key are read in the order of memory,
    and by a forward some of them, from TOGETHER bytes on: a backward goes over them three times.
    Where several rows share a kv head their products take longer, and one head is faster. Results
    have the same bits either way.
    """
    p = call.problem
    if not reads_together(call, way, p.total_k if p.varlen else p.batch * p.nk):
        return 1
    least = -(-get_num_threads() // (p.batch * chunks_of(call, way)))
    blocks = next((n for n in range(least, p.hk + 1) if p.hk % n == 0), p.hk)
    heads = p.hk // blocks
    wide = way.passes == 1 and heads * p.d * p.dtype.itemsize >= TOGETHER
    return heads if blocks == 1 or wide else 1


def reads_together(call: Call, way: Way, keys: int) -> bool:
    """Return True if a task of all heads reads so many keys faster than tasks of one head."""
    p, record = call.problem, call.record[0]
    apart = all(record[name]["h"] < record[name]["n"] for name in "kv")
    if way.exact or p.hk == 1 or p.nq * p.group > 1 or not apart or record["states"]["h"]:
        return False
    size = keys * p.hk * (p.d + p.dv) * p.dtype.itemsize
    return size >= way.apart[p.dtype.itemsize < 4]


def chunk_of(call: Call, way: Way) -> int:
    """Return the tiles of keys of a chunk.

    Keys that nearly fill one chunk are two tasks of all heads instead, in float32, if these are
    faster with half as many. Other sequences of a call do not matter, so bits are the same in any
    batch; those of a packed call would.
    """
    p, keys = call.problem, few.CHUNK * TILE_K
    filled = not p.varlen and 7 * keys <= 8 * p.nk <= 8 * keys
    once = way.passes == 1 and p.dtype.itemsize == 4
    halved = filled and once and reads_together(call, way, keys // 2)
    return -(-few.CHUNK // 2) if halved else few.CHUNK


def chunks_of(call: Call, way: Way) -> int:
    """Return the chunks of keys of a sequence, a task each."""
    return 1 if way.exact else -(-call.problem.nk // (chunk_of(call, way) * TILE_K))


def parts_of(call: Call, way: Way) -> tuple[int, int]:
    """Return (parts of all sequences for each task's heads, those from a sequence to the next).

    Packed sequences have as many as their keys need, wherever the lengths are: at most one more
    than their whole chunks, each.
    """
    p = call.problem
    if p.varlen:
        return p.total_k // (chunk_of(call, way) * TILE_K) + p.batch, 1
    chunks = chunks_of(call, way)
    return p.batch * chunks, chunks


_SEQUENCES, _PARTS, _INFINITE = map(word_of, ("sequences", "chunk_parts", "infinite"))


class Launch:
    """The memory that a kernel reads, for one kind of call, and its threads."""

    def __init__(self, call: Call, way: Way, *kept: Tensor) -> None:
        """Describe a call; ``kept`` is memory that repeated calls read, too."""
        self.kept = call.sequences, call.states, *kept
        p = call.problem
        heads, chunks = heads_of_task(call, way), chunks_of(call, way)
        groups = p.batch * p.hk // heads
        self.tasks = groups * chunks
        size = p.dtype.itemsize * way.passes * (p.nk + p.nq * p.nk // 16) * (p.d + p.dv)
        self.most = min(self.tasks, 1 + p.batch * p.hk * size // _BYTES)
        parts, step = parts_of(call, way)
        call.set(tasks=self.tasks, task_heads=heads, chunks=chunks, part_step=step)
        call.set(chunk=chunk_of(call, way))
        #: the numbers of the parts of all chunks: O, m and l of each row, or dq
        columns = p.dv + 2 if way.passes == 1 else p.d
        self.parts = parts * p.hq * p.nq * columns if chunks > 1 else 0
        words = np.concatenate([call.record.view(np.int64), np.zeros(groups, np.int64)])
        self.words = words.tobytes()
        self.kind = ctypes.c_int64 * len(words)
        pairs = way.exact and in_pairs(p.dtype)
        self.worker = address_of(way.kernel, types.uint32 if pairs else _DTYPES[p.dtype])

    def __call__(self, addresses: list[tuple[int, int]], sequences: Words | None = None) -> bool:
        """Run the kernel; return False if results are not finite.

        ``addresses`` are words of the record and their numbers, ``sequences`` what lengths say, if
        they are not as at first.
        """
        data = self.kind.from_buffer_copy(self.words)
        for word, address in addresses:
            data[word] = address
        if sequences is not None:
            data[_SEQUENCES] = ctypes.addressof(sequences)
        if self.parts:
            parts = torch.empty(self.parts, dtype=torch.float32)
            data[_PARTS] = parts.data_ptr()
        threads.run_compiled(self.worker, data, min(self.most, get_num_threads()))
        return not data[_INFINITE]


#: the inputs that a repeated call reads by their addresses, and those that its sequences hold
_BY_ADDRESS = ("q", "k", "v", "bias", "sink", "heads", "allowed")
_IN_SEQUENCES = ("lengths", "prefix", "cu_seqlens_q", "cu_seqlens_k")


def _places(call: Call, tensors: Tensors, more: Sequence[Tensor | None] = ()) -> Places | None:
    """Return the inputs that a kernel reads by address, or None if it needs anything else.

    Then nothing of the record depends on values, except the sequences. ``more`` are other tensors
    that it reads.
    """
    given = [(n, name) for n, name in enumerate(Tensors._fields) if tensors[n] is not None]
    named = [(n, name) for n, name in given if name not in _IN_SEQUENCES]
    if not all(name in _BY_ADDRESS for _, name in named):
        return None
    read = (*(tensors[n] for n, _ in named), *more)
    return [(n, word_of(name)) for n, name in named] if call.reads(read) else None


def _call(problem: Problem, tensors: Tensors) -> Call:
    """Return the record of a call, with memory for the longest sequence of calls like it."""
    call = Call(problem, tensors, in_place=True)
    if problem.varlen:
        call.set(longest_q=problem.nq, longest_k=problem.nk)
    return call


def _apart(problem: Problem) -> Problem | None:
    """Return the problem of the sequences of few queries, where packed ones may have more.

    They are computed apart from the others: the bits of a sequence do not depend on these.
    """
    most = most_queries(problem)
    many = problem.varlen and problem.nq > most > 0 and problem.nk > 0
    return problem._replace(nq=most) if many and beyond(_ANY, problem) is None else None


def few_sequences(problem: Problem, tensors: Tensors) -> np.ndarray | None:
    """Return True for each sequence that is computed apart from the others, None if none is."""
    apart = _apart(problem)
    if apart is None:
        return None
    queries = sequences_of(problem, tensors)["queries"]
    found = (queries > 0) & (queries <= apart.nq)
    return found if found.any() else None


def _divided(sequences: np.ndarray, most: int) -> tuple[Words | None, Words | None]:
    """Return the sequences of at most so many queries, without the others, and these.

    None stands for no sequence. The given ones are changed.
    """
    few = sequences["queries"] <= most
    if not few.any():
        return None, words(sequences)
    if few.all():
        return words(sequences), None
    part = sequences.copy()
    leave_out(part, ~few)
    leave_out(sequences, few)
    return words(part), words(sequences)


class _Forward:
    """A kernel that computes rows of out and lse, for one kind of call."""

    def __init__(self, problem: Problem, tensors: Tensors, taken: Way) -> None:
        call = _call(problem, tensors)
        call.tensor("out", torch.empty(problem.out_shape, device="meta"))  # each run has its own
        call.tensor("lse", torch.empty(problem.lse_shape, device="meta"))
        self.launch, self.places = Launch(call, taken), _places(call, tensors)
        #: the owner of copied inputs, which no other call reads
        self.call = call if self.places is None else None

    def __call__(
        self, tensors: Any, out: Tensor, lse: Tensor, sequences: Words | None = None
    ) -> bool:
        """Write rows; return False if they are not finite."""
        addresses = [(word, tensors[n].data_ptr()) for n, word in self.places or ()]
        addresses += [(_OUT, out.data_ptr()), (_LSE, lse.data_ptr())]
        return self.launch(addresses, sequences)


_OUT, _LSE = word_of("out"), word_of("lse")


def forward(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor] | None:
    """Return (out, lse), or None: by tiles."""
    taken = way(problem, "forward")
    if taken is None:
        return None
    apart = _apart(problem)
    most = 0 if apart is None else apart.nq
    kernel = _Forward(problem, tensors, taken)
    of_few = None if apart is None else _Forward(apart, tensors, WAYS["forward"][0])
    sequences = sequences_again(problem, tensors)
    shape, lse_shape = problem.out_shape, problem.lse_shape
    empty = _empty(problem)
    likes = (_like(shape, problem.dtype), _like(lse_shape, torch.float32))

    def run(tensors: Any, into: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        out, lse = empty(*likes[0]), empty(*likes[1])
        if of_few is None:
            done = kernel(tensors, out, lse, sequences(tensors))
        else:
            few, many = _divided(sequences_of(problem, tensors), most)
            done = few is None or of_few(tensors, out, lse, few)
            done = done and (many is None or kernel(tensors, out, lse, many))
        return (out, lse) if done else None

    results = run(tensors)
    if results is not None and kernel.places is not None:
        _noted.again = run
    return results


def fill(problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor) -> bool:
    """Write the rows of ``few_sequences``; return False if they are not finite."""
    apart = _apart(problem)
    assert apart is not None
    few, _ = _divided(sequences_of(problem, tensors), apart.nq)
    return few is None or _Forward(apart, tensors, WAYS["forward"][0])(tensors, out, lse, few)


def backward(
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Gradients | None:
    """Return the gradients, or None: by tiles."""
    taken = way(problem, "backward")
    if taken is None or not _can(problem, taken, lse, wanted):
        return None
    call = _call(problem, tensors)
    sums = _sums(call, tensors, wanted, taken)
    rows, numbers = {"out": out, "dout": dout}, {"lse": lse, "dlse": dlse}
    for name, t in rows.items():
        call.tensor(name, call.rows(t))
    for name, t in numbers.items():
        if t is not None:
            call.tensor(name, t.detach().to(torch.float32))
    rest = torch.zeros(problem.lse_shape if problem.natural else 0)
    if problem.natural:
        call.tensor("rest", rest)
    delta = torch.empty(problem.lse_shape)
    if wanted.sink:
        call.tensor("delta", delta)
    launch = Launch(call, taken, rest)
    if not launch([]):
        return None
    places = _places(call, tensors, (out, lse, dout, dlse))
    if places is not None and not any(wanted[3:]):  # those are summed after the kernel
        more = sequences_again(problem, tensors), dlse is not None
        _noted.again = _backward_again(problem, tensors, launch, places, wanted, taken, *more)
    if "bias" in sums and tensors.bias is not None:
        sums["bias"] = sums["bias"].sum_to_size(tensors.bias.shape)[None]
    done = finished(problem, tensors, sums)
    if wanted.sink and tensors.sink is not None:
        delta = row_stats.of_seen_rows(delta, lse)
        found = row_stats.dsink(tensors.sink, lse, delta, None)
        done["sink"] = found.to(tensors.sink.dtype)
    return Gradients(**done)


def _can(problem: Problem, taken: Way, lse: Tensor, wanted: Wanted) -> bool:
    """Return True if a kernel computes these gradients.

    It does not sum the weights of a row again (``FAR``), tasks of short sequences share no sum, and
    packed sequences have no number for each pair. Tiles compute those. The order of their scores
    may not be that of the forward; where lse is less than FAR, this changes weights about as much
    as the rounding of lse does.
    """
    if wanted.bias and (taken.exact or problem.varlen):
        return False
    return not problem.natural or not bool((lse.isfinite() & (lse.abs() >= FAR)).any())


def _sums(call: Call, tensors: Tensors, wanted: Wanted, taken: Way) -> dict[str, Tensor]:
    """Return the tensors that a kernel writes.

    Pairs of few queries are few: each has a number in the gradient of a bias.
    """
    p = call.problem
    sums = outputs(call, tensors, wanted._replace(bias=False), 1, chunks=chunks_of(call, taken))
    if wanted.bias:
        sums["bias"] = torch.zeros(p.batch, p.hq, p.nq, p.nk)
        call.tensor("dbias", sums["bias"][None])
        call.set(store_bias=True)
    return sums


def _empty(problem: Problem) -> Empty:
    """Return the function that makes results: torch may fill them in its deterministic mode."""
    return filled_on_cpu if problem.deterministic else empty_on_cpu


def _like(sizes: Sequence[int], dtype: torch.dtype) -> tuple[Any, Any, torch.dtype]:
    """Return the sizes, strides and dtype of a new contiguous tensor."""
    return tuple(sizes), torch.empty(sizes, device="meta").stride(), dtype


def _backward_again(
    problem: Problem,
    tensors: Tensors,
    launch: Launch,
    places: Places,
    wanted: Wanted,
    taken: Way,
    sequences: Callable[[Tensors], Words | None],
    dlse: bool,
) -> Again:
    """Return the function that repeats a backward of the gradients of q, k and v."""
    count = len(Tensors._fields)
    more = ("out", "lse", "dout", "dlse") if dlse else ("out", "lse", "dout")
    places = [*places, *((count + n, word_of(name)) for n, name in enumerate(more))]
    made = [
        (n, word_of(f"d{name}"), _like(t.shape, problem.gradient_dtype(name, t)))
        for n, (name, t) in enumerate(zip("qkv", tensors[:3], strict=True))
        if wanted[n]
    ]
    empty = _empty(problem)
    unchanged = sequences_stay(tensors)

    def again(given: Any, into: Tensor | None = None) -> Gradients | None:
        if problem.natural and not _can(problem, taken, given[count + 1], wanted):
            return None
        found: list[Tensor | None] = [None] * 6
        addresses = [(word, given[n].data_ptr()) for n, word in places]
        for n, word, like in made:
            found[n] = t = empty(*like)
            addresses.append((word, t.data_ptr()))
        done = launch(addresses, None if unchanged else sequences(Tensors(*given[:count])))
        return Gradients(*found) if done else None

    return again


def record(run: Callable[[Any], Any], given: Any) -> tuple[Any, Again | bool]:
    """Return (results of the call, the function that repeats it for other tensors, or False)."""
    _noted.again = None
    results = run(given)
    again, _noted.again = _noted.again, None
    return results, again or False
