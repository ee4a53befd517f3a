"""The functions that ranks run for the tests of contexts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import rowmax
from rowmax import distributed as rd
from rowmax.call import recent
from rowmax.distributed import collectives
from rowmax.integrations import sdpa

from .programs import mesh_of

attend = partial(rowmax.attention, backend="torch")


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the same normal numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def caught(call: Callable[[], Any]) -> str:
    """Return the error of a call."""
    try:
        call()
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def compare(
    whole: Callable[..., Tensor], own: Callable[..., Tensor], layout: Any, dim: int = 1
) -> None:
    """Compare results and gradients of own rows with those of one device.

    Args:
        whole: of the whole x and its projection w, on one device.
        own: of own rows and w.
    """
    shape = (1, 96, 4, 16) if dim == 1 else (96, 4, 16)
    x, w = numbers(*shape).requires_grad_(), numbers(16, 16, seed=1).requires_grad_()
    scale = numbers(*shape, seed=2)
    out = whole(x, w)
    want = torch.autograd.grad((out * scale).sum(), (x, w))
    with torch.no_grad():
        rows, scale = (rd.shard(t, layout, dim=dim) for t in (x, scale))
    rows.requires_grad_()
    got = own(rows, w)
    torch.testing.assert_close(rd.unshard(got.detach(), layout, dim=dim), out)
    dx, dw = torch.autograd.grad((got * scale).sum(), (rows, w))
    dist.all_reduce(dw)
    torch.testing.assert_close(rd.unshard(dx, layout, dim=dim), want[0])
    torch.testing.assert_close(dw, want[1])


# --- programs of test_context ------------------------------------------------------------------


def same_as_one_device(rank: int, size: int) -> None:
    """Compare both calls in a context, with a mask of their own and one of the context."""
    layout = rd.Layout.zigzag(96, size)
    documents = rowmax.Documents(cu_seqlens=torch.tensor([0, 40, 96]))
    bias = numbers(96, 96, seed=3)

    cu = torch.tensor([0, 30, 30, 96])

    def packed(x: Tensor, w: Tensor) -> Tensor:
        out = rowmax.attention_varlen(
            x @ w, x[:, :2], x[:, :2], cu, cu, causal=True, backend="torch"
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    def dense(x: Tensor, w: Tensor, **more: Any) -> Tensor:
        return attend(x @ w, x[:, :, :2], x[:, :, :2], causal=True, **more)

    def own_dense(x: Tensor, w: Tensor) -> Tensor:
        with rd.context_parallel(None, layout, mask=documents):
            return dense(x, w, bias=rd.shard(bias, layout, dim=0))

    def own_packed(x: Tensor, w: Tensor) -> Tensor:
        with rd.context_parallel(None, layout, strategy="heads"):
            return packed(x, w)

    compare(partial(dense, mask=documents, bias=bias), own_dense, layout)
    compare(packed, own_packed, layout, dim=0)


def scopes(rank: int, size: int) -> None:
    """Check that contexts nest, end with an error, and belong to a thread."""
    layout, other = rd.Layout.zigzag(96, size), rd.Layout.contiguous(96, size)
    x = numbers(1, 96, 2, 16)
    alone = attend(x, x, x)
    assert rd.current_context() is None
    context = rd.context_parallel(None, layout)
    with context as entered:
        assert rd.current_context() is entered is context
        assert torch.equal(entered.positions, layout.positions(rank))
        with rd.context_parallel(None, other), context:  # one that is entered twice
            assert rd.current_context() is context
        assert rd.current_context() is context
        with rd.context_parallel(None, None):
            assert rd.current_context() is None
            torch.testing.assert_close(attend(x, x, x), alone)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(attend(x, x, x)))
        thread.start()
        thread.join()
        torch.testing.assert_close(found[0], alone)
        rows = rd.shard(x, layout)
        torch.testing.assert_close(rd.unshard(attend(rows, rows, rows), layout), alone)
        # an explicit call has its own layout
        rows = rd.shard(x, other)
        explicit = rd.attention(rows, rows, rows, layout=other, backend="torch")
        torch.testing.assert_close(rd.unshard(explicit, other), alone)  # pyright: ignore
    try:
        with context:
            raise KeyError
    except KeyError:
        pass
    assert rd.current_context() is None
    torch.testing.assert_close(attend(x, x, x), alone)


def warm(rank: int) -> None:
    """Check that a call which has passed all checks before does not skip the context."""
    layout = rd.Layout.contiguous(96, 2)
    whole = [numbers(1, 96, 2, 16, seed=seed) for seed in range(3)]
    rows = [rd.shard(x, layout) for x in whole]
    alone = [attend(*rows) for _ in range(3)][-1]
    key = recent.key_of(False, None, 0.0, 0.0, "torch", False)
    assert key is not None
    assert recent.calls.recall(key, rows[0], rows[1], rows[2]) is not None
    for _ in range(3):
        with rd.context_parallel(None, layout):
            out = attend(*rows)
        torch.testing.assert_close(rd.unshard(out, layout), attend(*whole))
        assert torch.equal(attend(*rows), alone)


def in_a_grid(rank: int, size: int) -> None:
    """Compare calls in a context of a mesh of two dimensions, and torch's attention in it."""
    layout, mesh = rd.Layout.zigzag(96, 4), mesh_of(2, 2)
    documents = rowmax.Documents(cu_seqlens=torch.tensor([0, 40, 96]))

    def dense(x: Tensor, w: Tensor, **more: Any) -> Tensor:
        return attend(x @ w, x[:, :, :2], x[:, :, :2], causal=True, **more)

    def own(x: Tensor, w: Tensor) -> Tensor:
        with rd.context_parallel(mesh, layout, mask=documents) as context:
            assert torch.equal(context.positions, layout.positions(rank))
            return dense(x, w)

    compare(partial(dense, mask=documents), own, layout)
    x = numbers(1, 4, 96, 16)
    rows = rd.shard(x, layout, mesh, dim=2)
    want = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    with sdpa.enable(), rd.context_parallel(mesh, layout) as context:
        out = F.scaled_dot_product_attention(rows, rows, rows, is_causal=True)
    torch.testing.assert_close(context.unshard(out, dim=2), want)


def refused_grids(rank: int) -> list[str]:
    """Return the errors of calls over a mesh of two dimensions."""
    mesh, layout = mesh_of(2, 2), rd.Layout.zigzag(96, 4)
    x = numbers(1, layout.lengths[rank], 2, 16)
    lengths = rowmax.PrefixLengths(torch.tensor([50]), align="lengths") & rowmax.Causal()

    def call(**more: Any) -> Callable[[], Any]:
        named = {"mesh": mesh, "layout": layout, "backend": "torch", **more}
        return lambda: rd.attention(x, x, x, **named)

    def second() -> Any:
        q = x.clone().requires_grad_()
        out: Any = rd.attention(q, x, x, mesh=mesh, layout=layout, backend="torch")
        (g,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        return torch.autograd.grad(g.sum(), q)

    return [
        caught(one)
        for one in (
            call(strategy="heads"),
            call(strategy="rings"),
            call(strategy="queries", mask=lengths),
            call(layout=rd.Layout.zigzag(96, 2)),
            call(mesh=mesh_of(1, 2, 2)),
            call(mask=torch.ones(96, 96, dtype=torch.bool)),
            second,
            lambda: rd.context_parallel(mesh, rd.Layout.zigzag(96, 2)),
        )
    ]


def backward_elsewhere(rank: int) -> None:
    """Compare gradients of a backward after the context, in another thread."""
    layout = rd.Layout.zigzag(96, 2)
    x, scale = numbers(1, 96, 2, 16).requires_grad_(), numbers(1, 96, 2, 16, seed=1)
    (want,) = torch.autograd.grad((attend(x, x, x, causal=True) * scale).sum(), x)
    rows = rd.shard(x.detach(), layout).requires_grad_()
    with rd.context_parallel(None, layout):
        loss = (attend(rows, rows, rows, causal=True) * rd.shard(scale, layout)).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert rows.grad is not None
    torch.testing.assert_close(rd.unshard(rows.grad, layout), want)


def checkpoints(rank: int) -> list[str]:
    """Compare a checkpoint that recomputes after its context; return errors of others."""
    layout = rd.Layout.zigzag(96, 2)
    context = rd.context_parallel(None, layout)

    def block(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(attend(x @ w, x, x, causal=True))

    def own(x: Tensor, w: Tensor, **more: Any) -> Tensor:
        with context:
            return checkpoint(block, x, w, **more)

    compare(block, partial(own, use_reentrant=False, context_fn=rd.checkpoint_contexts), layout)

    def without(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(block, x, w, use_reentrant=False, context_fn=rd.checkpoint_contexts)

    x, w = numbers(1, 96, 2, 16).requires_grad_(), numbers(16, 16)
    found = []
    for function in (block, without):
        out = function(x, w)
        with context:
            found.append(torch.autograd.grad(out.square().sum(), x)[0])
    assert torch.equal(*found)

    rows = rd.shard(x.detach(), layout).requires_grad_()
    errors = []
    for reentrant in (False, True):
        out = own(rows, w, use_reentrant=reentrant)
        errors.append(caught(lambda out=out: out.sum().backward()))
    return errors


def compiled(rank: int) -> int:
    """Return the number of graphs of a compiled block, called in contexts and outside."""
    layout, other = rd.Layout.zigzag(96, 2), rd.Layout.contiguous(96, 2)
    counter = CompileCounterWithBackend("aot_eager")

    def block(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(attend(x @ w, x, x, causal=True))

    torch.compiler.reset()
    fast = torch.compile(block, backend=counter, fullgraph=True, dynamic=False)

    def own(x: Tensor, w: Tensor, one: rd.Layout) -> Tensor:
        with rd.context_parallel(None, one):
            return fast(x, w)

    x, w = numbers(1, 48, 4, 16), numbers(16, 16)
    for _ in range(2):  # graphs of before are there in the second turn
        torch.testing.assert_close(fast(x, w), block(x, w))
        compare(block, partial(own, one=layout), layout)
        compare(block, partial(own, one=other), other)
    return counter.frame_count


def refused(rank: int) -> list[str]:
    """Return the errors of calls in a context that are not of own rows."""
    layout = rd.Layout.zigzag(96, 2)
    x, y = numbers(1, 48, 2, 16), numbers(1, 40, 2, 16)
    jagged = torch.nested.nested_tensor([x[0], x[0, :9]], layout=torch.jagged)
    cu, short = torch.tensor([0, 96]), torch.tensor([0, 48])
    words: Any = "words"
    with rd.context_parallel(None, layout):
        return [
            caught(call)
            for call in (
                lambda: attend(x, y, y),
                lambda: attend(y, x, x),
                lambda: attend(jagged, jagged, jagged),
                lambda: attend(x, x, x, mask=torch.ones(48, 48, dtype=torch.bool)),
                lambda: rowmax.attention_varlen(x[0], y[0], y[0], cu, cu),
                lambda: rowmax.attention_varlen(x[0], x[0], x[0], short, short),
                lambda: attend(words, x, x),
                lambda: rd.context_parallel(None, words),
                lambda: rd.context_parallel(None, rd.Layout.zigzag(96, 3)),
                lambda: rd.context_parallel(None, layout, mask=words),
                lambda: rd.context_parallel(None, layout, strategy="rings"),
                lambda: rd.context_parallel(None, None, mask=rowmax.Causal()),
                lambda: rowmax.attention_varlen(x[0], x[0], x[0], cu, cu, 95, 96),
                lambda: rowmax.attention_varlen(x[0], x[0], x[0], cu, cu, 96, -1),
            )
        ]


def cross(rank: int) -> None:
    """Compare a context of other layouts for keys, under torch's and rowmax's alignment."""
    queries, keys = rd.Layout.zigzag(96, 2), rd.Layout.contiguous(130, 2)
    q, k = numbers(1, 96, 2, 16), numbers(1, 130, 2, 16, seed=1)
    rows = rd.shard(q, queries), rd.shard(k, keys)
    for causal in (False, True):
        want = attend(q, k, k, causal=causal)
        with rd.context_parallel(None, queries, k_layout=keys):
            out = attend(rows[0], rows[1], rows[1], causal=causal)
        torch.testing.assert_close(rd.unshard(out, queries), want)


def by_sdpa(rank: int) -> list[str]:
    """Compare torch's attention in a context; return errors of what torch would compute."""
    layout, keys = rd.Layout.zigzag(96, 2), rd.Layout.zigzag(64, 2)
    q, k = numbers(1, 2, 96, 16), numbers(1, 2, 64, 16, seed=1)
    allowed = numbers(96, 64, seed=2) > -1
    mine, theirs = rd.shard(q, layout, dim=2), rd.shard(k, keys, dim=2)
    own_rows = rd.shard(allowed, layout, dim=0)
    attention = F.scaled_dot_product_attention
    for more, own in (
        ({"is_causal": True}, {"is_causal": True}),  # aligned to the first key
        ({"attn_mask": allowed}, {"attn_mask": own_rows}),
        ({"attn_mask": allowed.double()}, {"attn_mask": own_rows.double()}),
    ):
        want = attention(q, k, k, **more)
        with sdpa.enable(), rd.context_parallel(None, layout, k_layout=keys):
            out = F.scaled_dot_product_attention(mine, theirs, theirs, **own)
            again = sdpa.scaled_dot_product_attention(mine, theirs, theirs, **own)
        torch.testing.assert_close(rd.unshard(out, layout, dim=2), want)
        assert torch.equal(out, again)
    errors = []
    with sdpa.enable(), rd.context_parallel(None, layout, k_layout=keys):
        errors += [
            caught(lambda own=own: F.scaled_dot_product_attention(mine, theirs, theirs, **own))
            for own in ({"attn_mask": torch.ones(48, 32, dtype=torch.bool)}, {"dropout_p": 1.0})
        ]
        cu = torch.tensor([0, 48], dtype=torch.int32)
        packed = mine[0].transpose(0, 1)
        errors.append(
            caught(lambda: sdpa.varlen_attn(packed, packed, packed, cu, cu, 48, 48, num_splits=1))
        )
        with rd.context_parallel(None, None):  # torch computes what rowmax does not
            assert attention(mine, theirs, theirs, dropout_p=1.0).abs().sum() == 0
    return errors


# --- programs of test_explain ------------------------------------------------------------------


class Counted:
    """The bytes that this rank sends to others and receives, while ``on``."""

    def __init__(self) -> None:
        self.sent = self.received = 0

    def gather(self, found: Tensor, x: Tensor, group: Any, async_op: bool = False) -> Any:
        others = dist.get_world_size(group) - 1
        self.sent += others * x.nbytes
        self.received += others * x.nbytes
        return self._gather(found, x, group=group, async_op=async_op)

    def exchange(
        self, found: Tensor, x: Tensor, received: Any, sent: Any, group: Any, async_op: bool = False
    ) -> Any:
        rank = dist.get_rank(group)
        self.sent += x.nbytes - sent[rank] * x.itemsize
        self.received += found.nbytes - received[rank] * x.itemsize
        return self._exchange(found, x, received, sent, group=group, async_op=async_op)

    def __enter__(self) -> Counted:
        self._gather, self._exchange = collectives._gather, dist.all_to_all_single
        collectives._gather, dist.all_to_all_single = self.gather, self.exchange
        return self

    def __exit__(self, *_: object) -> None:
        collectives._gather, dist.all_to_all_single = self._gather, self._exchange


def explained(
    rank: int, size: int, strategy: str, kind: str, shape: tuple[int, ...] = ()
) -> tuple[Any, Any]:
    """Return the explained and the counted bytes of both directions."""
    layout = rd.Layout.balanced(rowmax.Causal(), 300, size, chunk=64)
    n = layout.lengths[rank]
    b = 1 if kind == "documents" else 2
    q, k, v = (numbers(b, n, h, d).bfloat16() for h, d in ((4, 16), (2, 16), (2, 8)))
    bias = torch.zeros(1, 4, n, 300)
    options: dict[str, Any] = {"backend": "torch", "layout": layout, "strategy": strategy}
    options |= {"mesh": mesh_of(*shape)} if shape else {}
    documents = rowmax.Documents(cu_seqlens=torch.tensor([0, 90, 91, 300])) & rowmax.Causal()
    options |= {
        "window": {"mask": rowmax.Window(30, 0)},
        "bias": {"bias": bias},
        "documents": {"mask": documents},
    }.get(kind, {})
    found = rd.explain(q, k, v, **options)
    leaves = [t.requires_grad_() for t in (q, k, v, *([bias] if kind == "bias" else []))]
    counts = []
    with Counted() as forward:
        out = rd.attention(q, k, v, **options)
    with Counted() as backward:
        torch.autograd.grad(out.sum(), leaves)  # pyright: ignore
    for one, want in ((forward, found.forward), (backward, found.backward)):
        counts.append((want.wire[rank], (one.sent, one.received)))
    return counts[0], counts[1]
