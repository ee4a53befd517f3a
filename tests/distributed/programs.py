"""The functions that ranks run, and the rows that they hold."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import rowmax
from rowmax import distributed as rd
from rowmax.distributed import Layout, agreement, arrivals, shared
from rowmax.distributed.strategies import keys as by_keys
from rowmax.masks import as_mask
from rowmax.testing import Answer, Call, Case, cotangents, make


def uneven(n: int, ranks: int) -> Layout:
    """Return a layout of pieces of any length; the last of several ranks holds nothing."""
    choice = random.Random(n * 10 + ranks)
    cuts = sorted(choice.sample(range(1, n), min(n - 1, 5))) if n > 1 else []
    owned: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for start, stop in zip([0, *cuts], [*cuts, n], strict=True):
        owned[choice.randrange(max(1, ranks - 1))].append((start, stop))
    return Layout(tuple(map(tuple, owned)))


def single(n: int, ranks: int) -> Layout:
    """Return a layout of one row for the first rank, and none for those after the second."""
    ranges = (((0, min(1, n)),), ((min(1, n), n),), *[()] * (ranks - 2))
    return Layout(ranges if ranks > 1 else (((0, n),),))


LAYOUTS: dict[str, Any] = {
    "contiguous": Layout.contiguous,
    "zigzag": Layout.zigzag,
    "balanced": lambda n, ranks: Layout.balanced(rowmax.Causal(), n, ranks, chunk=32),
    "uneven": uneven,
    "single": single,
}
#: the same, and one of packed documents, made of their offsets
PACKED = (*LAYOUTS, "documents")


def layouts(case: Case, kind: str, ranks: int) -> tuple[Layout, Layout]:
    """Return the layouts of queries and of keys."""
    nk = case.nq if case.nk is None else case.nk
    return LAYOUTS[kind](case.nq, ranks), LAYOUTS[kind](nk, ranks)


def has_rows(t: Tensor, n: int) -> bool:
    """Return True if a bias or a mask has a row for each query."""
    return t.dim() > 1 and t.shape[-2] == n and n != 1


def own_call(call: Call, queries: Layout, keys: Layout, rank: int) -> tuple[Any, dict[str, Any]]:
    """Return own rows of q, k and v, and the keywords with own rows."""
    q, k, v = call.inputs[:3]
    i, j = queries.positions(rank), keys.positions(rank)
    keywords = dict(call.keywords)
    if keywords.get("bias") is not None and has_rows(keywords["bias"], queries.n):
        keywords["bias"] = keywords["bias"][..., i, :]
    if keywords.get("mask") is not None:
        mask = as_mask(keywords["mask"])
        if mask.allowed is not None and has_rows(mask.allowed, queries.n):
            mask = rowmax.Mask(**{**mask.fields(), "allowed": mask.allowed[..., i, :]})
        keywords["mask"] = mask
    return (q[:, i], k[:, j], v[:, j]), keywords


def even(count: int) -> Any:
    """Return a rule of stages: kv heads in so many stages, if there are as many."""

    def rule(call: Any, returns: bool) -> tuple[range, ...]:
        heads = call.tensors.k.shape[2]
        n = min(count, heads)
        return tuple(range(heads * s // n, heads * (s + 1) // n) for s in range(n))

    return rule


@contextlib.contextmanager
def in_stages(count: int) -> Iterator[None]:
    """Compute kv heads in so many stages. Calls are planned again, here and after."""

    def forget() -> None:
        for kinds in agreement._agreed.values():
            for kind in kinds.values():
                kind.plans.clear()

    forget()
    try:
        with mock.patch.object(by_keys, "stages_of", even(count)):
            yield
    finally:
        forget()


@contextlib.contextmanager
def heads_apart() -> Iterator[None]:
    """Let heads arrive one after the other however short their copies are."""

    def forget() -> None:
        arrivals.come_by_heads.cache_clear()
        arrivals.ordered.cache_clear()

    with mock.patch.object(arrivals, "LEAST_BYTES", 0):
        forget()
        try:
            yield
        finally:
            forget()


@cache
def mesh_of(*shape: int) -> DeviceMesh:
    """Return a mesh of this world, made once. The last dimension distributes heads."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "keys", "heads")[-len(shape) :])


def own_answer(
    rank: int,
    case: Case,
    dtype: torch.dtype,
    kind: str,
    ranks: int,
    overrides: dict[str, Any],
    stages: int = 1,
    shape: tuple[int, ...] = (),
) -> Answer:
    """Return the answer of a rank's rows; ``shape`` is that of a mesh of two dimensions."""
    if shape:
        overrides = {**overrides, "mesh": mesh_of(*shape)}
    with in_stages(stages):
        return _own_answer(rank, case, dtype, kind, ranks, overrides)


def _own_answer(
    rank: int, case: Case, dtype: torch.dtype, kind: str, ranks: int, overrides: dict[str, Any]
) -> Answer:
    call = make(case, dtype=dtype)
    queries, keys = layouts(case, kind, ranks)
    dout, dlse = cotangents(call)
    (q, k, v), keywords = own_call(call, queries, keys, rank)
    named = {"q": q, "k": k, "v": v, **keywords}
    leaves = {name: named[name].detach().requires_grad_() for name in call.leaves}
    named.update(leaves)
    out, lse = rd.attention(
        **named, layout=queries, k_layout=keys, return_lse=True, **overrides
    )  # fmt: skip
    i = queries.positions(rank)
    outputs, grads = ([out, lse], [dout[:, i], dlse[..., i]])
    got = torch.autograd.grad(outputs, list(leaves.values()), grads)
    # the fake kernels promise it: compilers read strides from them
    assert all(t.is_contiguous() for t in (out, lse, *got))
    return Answer(out.detach(), lse.detach(), dict(zip(leaves, got, strict=True)))


def whole_answer(call: Call, queries: Layout, keys: Layout, parts: Sequence[Answer]) -> Answer:
    """Return the answer of the whole from those of all ranks."""
    q = call.inputs[0]
    n_out = (q.shape[0], queries.n, q.shape[2], call.inputs[2].shape[3])
    first = parts[0]
    out, lse = first.out.new_empty(n_out), first.lse.new_empty(q.shape[0], q.shape[2], queries.n)
    totals: dict[str, Tensor] = {}
    for name, leaf in call.leaves.items():
        wide = torch.promote_types(leaf.dtype, torch.float32)
        totals[name] = torch.zeros(leaf.shape, dtype=wide)
    for rank, part in enumerate(parts):
        i, j = queries.positions(rank), keys.positions(rank)
        out[:, i], lse[..., i] = part.out, part.lse
        for name, total in totals.items():
            got = part.gradients[name]
            if name in "qkv":
                total[:, i if name == "q" else j] = got.to(total.dtype)
            elif name == "bias" and has_rows(total, queries.n):
                total[..., i, :] = got.to(total.dtype)
            else:
                total += got
    gradients = {name: t.to(call.leaves[name].dtype) for name, t in totals.items()}
    return Answer(out, lse, gradients)


@contextlib.contextmanager
def copies(way: str) -> Iterator[None]:
    """Copy in this way: "shared" or "collectives"."""
    with mock.patch.dict(os.environ, {shared.VARIABLE: way}):
        shared._known.clear()  # groups agree again, here and after
        try:
            yield
        finally:
            shared._known.clear()


def errors_of(calls: Sequence[Any]) -> list[str]:
    """Return the errors of some calls."""

    def text(call: Any) -> str:
        try:
            call()
        except (TypeError, ValueError) as error:
            return str(error)
        return "no error"

    return [text(call) for call in calls]
