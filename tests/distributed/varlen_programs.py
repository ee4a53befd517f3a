"""The functions that ranks run for the tests of packed sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import rowmax
from rowmax import distributed as rd
from rowmax.distributed import Layout, shared
from rowmax.distributed.strategies import keys as by_keys
from rowmax.testing import Answer, Call, Case, cotangents, make

from .programs import LAYOUTS, copies, errors_of, in_stages, mesh_of


def packed_layouts(call: Call, kind: str, ranks: int) -> tuple[Layout, Layout]:
    """Return the layouts of the queries and the keys of all sequences together."""
    if kind == "documents":
        queries, keys = (Layout.documents(cu, ranks) for cu in call.inputs[3:5])
        return queries, keys
    if kind == "chunks of 8":
        layout = Layout.balanced(rowmax.Causal(), call.inputs[0].shape[0], ranks, chunk=8)
        return layout, layout
    queries, keys = (LAYOUTS[kind](t.shape[0], ranks) for t in call.inputs[:2])
    return queries, keys


def one_sequence(call: Call) -> Call:
    """Return the call with a batch dimension for the rows of all sequences."""
    return replace(call, inputs=tuple(t[None] for t in call.inputs[:3]))


def packed_answer(
    rank: int,
    case: Case,
    dtype: torch.dtype,
    kind: str,
    ranks: int,
    stages: int = 1,
    shape: tuple[int, ...] = (),
    **more: Any,
) -> tuple[Answer, int]:
    """Return the answer of a rank's rows, with a batch dimension, and the number of calls."""
    more |= {"mesh": mesh_of(*shape)} if shape else {}
    call = make(case, dtype=dtype)
    queries, keys = packed_layouts(call, kind, ranks)
    i, j = queries.positions(rank), keys.positions(rank)
    named = {**dict(zip("qkv", call.inputs, strict=False)), **call.keywords}
    named.update({"q": named["q"][i], "k": named["k"][j], "v": named["v"][j]})
    leaves = {name: named[name].detach().requires_grad_() for name in call.leaves}
    named.update(leaves)
    cu_q, cu_k = call.inputs[3:5]
    more |= {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "layout": queries, "k_layout": keys}
    with (
        in_stages(stages),
        mock.patch.object(by_keys, "prepared", wraps=by_keys.prepared) as calls,
    ):
        out, lse = rd.attention_varlen(**named, **more, return_lse=True, backend="torch")
        dout, dlse = cotangents(call)
        got = torch.autograd.grad([out, lse], list(leaves.values()), [dout[i], dlse[..., i]])
    gradients = {n: g[None] if n in "qkv" else g for n, g in zip(leaves, got, strict=True)}
    return Answer(out.detach()[None], lse.detach()[None], gradients), calls.call_count


def packed_in_shared_memory(rank: int, *given: Any) -> bool:
    """Return True if copies through shared memory give the bits of collectives."""
    with copies("shared"):
        one, _ = packed_answer(rank, *given)
    other, _ = packed_answer(rank, *given)
    pairs = [(one.out, other.out), (one.lse, other.lse)]
    pairs += [(g, other.gradients[name]) for name, g in one.gradients.items()]
    return all(torch.equal(a, b) for a, b in pairs)


def shows_of_whole_documents(rank: int) -> int:
    """Return how often a rank shows rows where no document is cut."""
    cu = torch.arange(0, 801, 100)
    layout = Layout.documents(cu, 2)
    x = torch.randn(layout.lengths[rank], 2, 16).requires_grad_()

    def call() -> None:
        out: Any = rd.attention_varlen(x, x, x, cu, cu, layout=layout, backend="torch")
        out.sum().backward()

    with copies("shared"):
        call()
        with mock.patch.object(shared.Region, "show") as shows:
            call()
        return shows.call_count


def packed_bits(rank: int, chunk: int) -> list[Tensor]:
    """Return the results in bfloat16 of documents that are cut into many chunks."""
    mask = rowmax.Documents(cu_seqlens=torch.tensor([0, 300, 340, 512])) & rowmax.Causal()
    layout = Layout.balanced(mask, 512, 3, chunk=chunk)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(1, 512, 2, 16, generator=generator).bfloat16() for _ in "qkv"]
    leaves = [t[:, layout.positions(rank)].requires_grad_() for t in rows]
    out: Any = rd.attention(*leaves, mask=mask, layout=layout, backend="torch")
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def offsets_in_place(rank: int) -> bool:
    """Return True if offsets that change in place are those of the second call."""
    layout, cu = Layout.zigzag(64, 2), torch.tensor([0, 20, 64], dtype=torch.int32)
    x = torch.randn(64, 2, 16, generator=torch.Generator().manual_seed(0))
    for values in ([0, 20, 64], [0, 50, 64]):
        cu.copy_(torch.tensor(values))
        i = layout.positions(rank)
        got = rd.attention_varlen(x[i], x[i], x[i], cu, cu, layout=layout, causal=True)
        want = rowmax.attention_varlen(x, x, x, cu, cu, causal=True)
        if not torch.allclose(got, want[i], atol=1e-5):  # pyright: ignore
            return False
    return True


def wrong_packed(rank: int) -> list[str]:
    layout = Layout.zigzag(64, 2)
    x = torch.zeros(32, 2, 16)
    cu, other = torch.tensor([0, 20, 64]), torch.tensor([0, 30, 64])
    one: Any = 1

    def call(cu_q: Tensor = cu, cu_k: Tensor = cu, q: Tensor = x, **options: Any) -> Any:
        return lambda: rd.attention_varlen(
            q, x, x, cu_q, cu_k, layout=layout, backend="torch", **options
        )

    return errors_of(
        [
            call(bias=torch.zeros(1)),
            call(dropout_p=0.1),
            call(mask=rowmax.PrefixLengths(torch.tensor([3]))),
            call(cu, other, causal=True),
            call(cu, torch.tensor([0, 64])),
            call(torch.tensor([0, 20, 63])),
            call(q=x[None]),
            call(causal=one),
            call(cu, other),
        ]
    )
