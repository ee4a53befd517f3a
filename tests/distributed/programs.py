"""The functions that ranks run, and the rows that they hold."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import rowmax
from rowmax import distributed as rd
from rowmax.call import dispatch
from rowmax.call.problem import Problem
from rowmax.distributed import Layout, collectives, exchange, shared
from rowmax.distributed.groups import group_of
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
    with mock.patch.object(by_keys, "stages_of", even(stages)):
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


# --- programs of test_attention ----------------------------------------------------------------


def one_rank(rank: int, case: Case) -> bool:
    """Return True if a world of one rank gives one device's results without a collective."""
    call = make(case)
    layout, keys = (Layout.zigzag(t.shape[1], 1) for t in call.inputs[:2])
    dout, dlse = cotangents(call)
    found = []
    with mock.patch.object(collectives, "_gather", None), _no_collectives():
        for function, more in (
            (rowmax.attention, {}),
            (rd.attention, {"layout": layout, "k_layout": keys}),
        ):
            named = {**dict(zip("qkv", call.inputs, strict=False)), **call.keywords}
            leaves = {name: t.detach().requires_grad_() for name, t in call.leaves.items()}
            out, lse = function(**{**named, **leaves}, return_lse=True, backend="torch", **more)
            grads = torch.autograd.grad([out, lse], list(leaves.values()), [dout, dlse])
            found.append((out, lse, *grads))
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def parts_known(rank: int, case: Case, ranks: int, strategy: str) -> list[bool]:
    """Return for each backward of a rank if its problem says that lse is of more keys."""
    known = []
    run = dispatch.run_backward

    def recorded(plan: Any, problem: Problem, *given: Any) -> Any:
        known.append(problem.part)
        return run(plan, problem, *given)

    with mock.patch.object(dispatch, "run_backward", recorded):
        own_answer(rank, case, torch.float32, "zigzag", ranks, {"strategy": strategy})
    return known


@contextlib.contextmanager
def _no_collectives() -> Iterator[None]:
    names = ("all_to_all_single", "all_gather_object", "broadcast")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(dist, name, None))
        yield


def with_unit_values(call: Call) -> Call:
    """Return the call with a unit matrix for the values of each head."""
    q, k, v = call.inputs
    unit = torch.eye(v.shape[1])[None, :, None].expand(v.shape)
    return replace(call, inputs=(q, k, unit))


def kept(
    rank: int, case: Case, kind: str, ranks: int, strategy: str, shape: tuple[int, ...] = ()
) -> Tensor:
    """Return True where a pair of own queries is kept."""
    call = with_unit_values(make(case))
    queries, keys = layouts(case, kind, ranks)
    (q, k, v), keywords = own_call(call, queries, keys, rank)
    more: dict[str, Any] = {"layout": queries, "k_layout": keys, "strategy": strategy}
    more |= {"mesh": mesh_of(*shape)} if shape else {}
    out = rd.attention(q, k, v, backend="torch", **keywords, **more)
    assert isinstance(out, Tensor)
    return out != 0


def drawn_seed(rank: int, ranks: int, shape: tuple[int, ...] = ()) -> tuple[Tensor, Tensor, Tensor]:
    """Return own next seed, and own rows with the first rank's: of one device, and distributed."""
    layout = Layout.zigzag(130, ranks)
    x = torch.randn(1, 130, 2, 16, generator=torch.Generator().manual_seed(0))
    mine = layout.positions(rank)
    torch.manual_seed(rank)
    own = torch.randint(2**63 - 1, ())
    torch.manual_seed(0)
    seed = torch.randint(2**63 - 1, ())
    whole = rowmax.attention(x, x, x, dropout_p=0.3, seed=seed, backend="torch")
    torch.manual_seed(rank)
    more: Any = {"mesh": mesh_of(*shape)} if shape else {}
    rows = rd.attention(*(x[:, mine],) * 3, layout=layout, dropout_p=0.3, backend="torch", **more)
    assert isinstance(rows, Tensor)
    return own, whole[:, mine], rows


def received_rows(rank: int, n: int, left: int) -> int:
    """Return the rows of k and v that a windowed call gathers, own ones among them."""
    layout = Layout.contiguous(n, 4)
    x = torch.randn(1, layout.lengths[rank], 2, 16)
    seen: list[int] = []
    wait = exchange.Gather.wait

    def counted(gather: exchange.Gather) -> list[Tensor]:
        found = wait(gather)
        seen.extend(t.shape[1] for t in found)
        return found

    with mock.patch.object(exchange.Gather, "wait", counted):
        mask = rowmax.Window(left, 0)
        rd.attention(x, x, x, layout=layout, mask=mask, backend="torch")
    assert len(set(seen)) <= 1
    return seen[0] if seen else 0


def compiled(rank: int, kind: str, shape: tuple[int, ...] = ()) -> int:
    """Return the graphs of a compiled call, after a check of its results and gradients."""
    counter = CompileCounterWithBackend("aot_eager")
    layout = Layout.zigzag(256, dist.get_world_size())
    mesh: Any = None
    if kind == "grid":
        mesh = mesh_of(*shape)
    elif kind != "default":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"]
        mesh = mesh.get_group() if kind == "group" else mesh
    x = torch.randn(1, 256, 4, 16, generator=torch.Generator().manual_seed(0))

    def f(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sink: Tensor) -> Tensor:
        keywords = {"causal": True, "bias": bias, "sink": sink, "softcap": 5.0, "seed": 3}
        out = rd.attention(q * 2, k, v, mesh=mesh, layout=layout, dropout_p=0.1, **keywords)
        return rd.unshard(out, layout, mesh).square()

    found = []
    torch.compiler.reset()
    for function in (f, torch.compile(f, backend=counter, fullgraph=True)):
        leaves = [rd.shard(t, layout, mesh).requires_grad_() for t in (x, x[:, :, :2], x[:, :, 2:])]
        bias = torch.linspace(0, 1, leaves[0].shape[1] * 256).view(-1, 256).requires_grad_()
        leaves += [bias, torch.zeros(4, requires_grad=True)]
        out = function(*leaves)
        found.append((out, *torch.autograd.grad(out.sum(), leaves)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    return counter.frame_count


def checkpointed(rank: int) -> bool:
    """Return True if a checkpointed call, with a seed of None, has the gradients of a plain one."""
    layout = Layout.zigzag(200, 2)
    x = torch.randn(1, layout.lengths[rank], 2, 16).requires_grad_()

    def f(x: Tensor) -> Any:
        return rd.attention(x, x, x, layout=layout, causal=True, dropout_p=0.2, backend="torch")

    found = []
    for function in (f, lambda x: checkpoint(f, x, use_reentrant=False)):
        torch.manual_seed(rank)
        found.append(torch.autograd.grad(function(x).square().sum(), x)[0])
    return torch.equal(*found)


def refused_derivative(rank: int, name: str) -> str:
    """Return the error of a derivative that is not there."""
    layout = Layout.zigzag(64, 2)
    x = torch.randn(1, layout.lengths[rank], 2, 16).requires_grad_()

    def f(x: Tensor) -> Any:
        return rd.attention(x, x, x, layout=layout, backend="torch")

    try:
        if name == "second":
            (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
            torch.autograd.grad(g.sum(), x)
        else:
            with warnings.catch_warnings():  # torch compiles its decompositions the first time
                warnings.filterwarnings("ignore", message="`torch.jit", category=DeprecationWarning)
                torch.func.jvp(f, (x.detach(),), (x.detach(),))
    except NotImplementedError as error:
        return str(error)
    return "no error"


def loss_of_one(rank: int) -> bool:
    """Return True if ranks with different losses finish, with finite gradients."""
    layout = Layout.zigzag(200, 2)
    x = torch.randn(1, layout.lengths[rank], 2, 16).requires_grad_()
    out, lse = rd.attention(x, x, x, layout=layout, return_lse=True, backend="torch")
    loss = lse.sum() if rank == 0 else 0 * out.sum()
    return bool(torch.autograd.grad(loss, x)[0].isfinite().all())


def without_names(rank: int) -> str:
    """Return the error of a round trip where torch finds no group by name."""
    layout, x = Layout.zigzag(10, 2), torch.arange(10.0)[None]
    with mock.patch.object(dist.distributed_c10d, "_resolve_process_group", None):
        return _errors([lambda: torch.testing.assert_close(_round_trip(x, layout), x)])[0]


def _round_trip(x: Tensor, layout: Layout) -> Tensor:
    return rd.unshard(rd.shard(x, layout), layout)


# --- programs of test_stages -------------------------------------------------------------------


class Events:
    """The order in which copies begin, are waited for, and calls run."""

    def __init__(self, fail: int | None = None) -> None:
        self.seen: list[str] = []
        self.calls = 0
        self.fail = fail  # the number of the call that raises

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the events of calls by keys."""
        wait, ready = collectives.Copy.wait, by_keys.prepared

        def begun(name: str) -> Any:
            real = getattr(exchange, name)

            def begin(*given: Any) -> Any:
                copy = real(*given)
                self.seen.append(f"begin {id(copy)}")
                return copy

            return mock.patch.object(exchange, name, begin)

        def waited(copy: collectives.Copy) -> list[Tensor]:
            self.seen.append(f"wait {id(copy)}")
            return wait(copy)

        def called(*given: Any) -> Any:
            self.calls += 1
            self.seen.append("call")
            if self.calls == self.fail:
                raise ValueError("a call that fails")
            return ready(*given)

        with (
            begun("begin_all_gather"),
            begun("begin_all_to_all"),
            mock.patch.object(collectives.Copy, "wait", waited),
            mock.patch.object(by_keys, "prepared", called),
        ):
            yield

    def numbered(self) -> list[str]:
        """Return the events, with a number for each copy in the order that they begin."""
        begun = [x.split()[1] for x in self.seen if x.startswith("begin")]
        assert len(set(begun)) == len(begun)
        number = {name: str(n) for n, name in enumerate(begun)}
        return [" ".join(number.get(word, word) for word in x.split()) for x in self.seen]


def staged(rank: int, stages: int, fail: int | None = None) -> tuple[list[str], list[str], str]:
    """Return the events of a forward and of its backward, two calls a stage, and the errors."""
    layout = Layout((((0, 64), (128, 192)), ((64, 128), (192, 256))))
    # full masks gather all rows: there are copies of both kinds
    q = torch.randn(1, 128, 8, 16).requires_grad_()
    k = torch.randn(1, 128, 4, 16).requires_grad_()

    def f() -> Any:
        return rd.attention(q, k, k, layout=layout, backend="torch")

    with mock.patch.object(by_keys, "stages_of", even(stages)):
        out = f()
        events, texts = (Events(fail), Events(fail)), []
        for one, function in zip(events, (f, lambda: out.sum().backward()), strict=True):
            with one.recorded():
                texts += _errors([function])
    return events[0].numbered(), events[1].numbered(), ", ".join(texts)


def equal_to_one_device(rank: int) -> float:
    """Return the share of dk and dv in bfloat16, of many chunks, with the bits of one device."""
    n = 16
    owned = [[(32 * c, 32 * c + 32) for c in range(r, n, 2)] for r in range(2)]
    layout = Layout(tuple(map(tuple, owned)))
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 32 * n, 2, 16, generator=generator).bfloat16() for _ in "qkvo")
    i = layout.positions(rank)
    found = []
    for rows, function, more in (
        (slice(None), rowmax.attention, {}),
        (i, rd.attention, {"layout": layout}),
    ):
        leaves = [t[:, rows].clone().requires_grad_() for t in (k, v)]
        out: Any = function(q[:, rows], *leaves, backend="torch", **more)
        found.append(torch.autograd.grad(out, leaves, dout[:, rows]))
    same = [(a[:, i] == b).double().mean() for a, b in zip(*found, strict=True)]
    return float(min(same))


def fails_alone(rank: int) -> str:
    """Return the error of a rank while the call of another one fails between its stages."""
    layout = Layout.zigzag(256, 3)
    x = torch.randn(1, layout.lengths[rank], 4, 16)
    events = Events(fail=1 if rank == 1 else None)
    with mock.patch.object(by_keys, "stages_of", even(4)):
        rd.attention(x, x, x, layout=layout, backend="torch")
        with events.recorded():
            try:
                rd.attention(x, x, x, layout=layout, backend="torch")
            except (RuntimeError, ValueError) as error:
                waits = sum(e.startswith("wait") for e in events.seen)
                begins = sum(e.startswith("begin") for e in events.seen)
                assert waits >= begins
                return str(error)
    return "no error"


# --- programs of test_shared ---------------------------------------------------------------------


@contextlib.contextmanager
def copies(way: str) -> Iterator[None]:
    """Copy in this way: "shared" or "collectives"."""
    with mock.patch.dict(os.environ, {shared.VARIABLE: way}), shared.forgotten():
        yield


def shared_answer(rank: int, *given: Any) -> tuple[Answer, int]:
    """Return the answer of a rank's rows with shared memory, and the uses of it."""
    used = 0
    show = shared.Region.show

    def counted(region: shared.Region) -> None:
        nonlocal used
        used += 1
        show(region)

    with copies("shared"), mock.patch.object(shared.Region, "show", counted):
        return own_answer(rank, *given), used


def one_after_the_other(rank: int, size: int, calls: int) -> float:
    """Return the largest difference of calls with shared memory, of sizes that change."""
    worst = 0.0
    for way in ("shared", "collectives"):
        generator, found = torch.Generator().manual_seed(0), []
        with copies(way):
            for one in range(calls):
                n = (64, 1024, 192)[one % 3] * size
                layout = Layout.zigzag(n, size)
                q = torch.randn(3, 1, n, 4, 64, generator=generator)[:, :, layout.positions(rank)]
                leaves = [t.clone().requires_grad_() for t in q]
                if rank == one % size:
                    time.sleep(0.02)  # another rank comes late
                out: Any = rd.attention(*leaves, layout=layout, backend="torch", mask=_CAUSAL)
                found += [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]
        if way == "shared":
            first = found
        else:
            pairs = zip(first, found, strict=True)
            worst = max(float((a - b).abs().max()) for a, b in pairs)
    return worst


_CAUSAL = rowmax.Causal()


def shared_or_not(rank: int, trouble: str) -> tuple[bool, bool, str]:
    """Return if memory is shared where rank 1 has a trouble, if the result is right, the error."""
    layout = Layout.zigzag(4096, 2)
    x = torch.randn(1, 4096, 2, 128, generator=torch.Generator().manual_seed(0))
    mine = x[:, layout.positions(rank)]
    want = rowmax.attention(x, x, x, backend="torch")[:, layout.positions(rank)]  # pyright: ignore
    makes = shared._File.__init__

    def failing(self: Any, size: int, group: Any, device: torch.device) -> None:
        if trouble == "at once" or size > 1 << 21:
            collectives.all_objects(("", "no room"), group)
            raise OSError("no room")
        makes(self, size, group, device)

    patches = {
        "host": mock.patch.object(shared, "_host", return_value=f"host {rank}"),
        "word": mock.patch.dict(os.environ, {shared.VARIABLE: "shmem"} if rank else {}),
        "none": contextlib.nullcontext(),
    }
    patch = patches.get(trouble) or mock.patch.object(shared._File, "__init__", failing)
    with copies("shared"), patch:
        try:
            got: Any = rd.attention(mine, mine, mine, layout=layout, backend="torch")
        except ValueError as error:
            return False, False, str(error)
        regions = shared.shares_memory(group_of(None), x.device)
    return regions, torch.allclose(got, want, atol=1e-5), ""


# --- programs of test_sharding -----------------------------------------------------------------


def _errors(calls: Sequence[Any]) -> list[str]:
    """Return the errors of some calls."""

    def text(call: Any) -> str:
        try:
            call()
        except (TypeError, ValueError) as error:
            return str(error)
        return "no error"

    return [text(call) for call in calls]


def round_trips(rank: int, kind: str, ranks: int, shape_of_mesh: tuple[int, ...] = ()) -> bool:
    """Return True if the rows of every shape and dtype come back."""
    mesh = mesh_of(*shape_of_mesh) if shape_of_mesh else None
    for shape, dim in (((3, 50, 2), 1), ((50,), 0), ((2, 3, 4, 50), -1), ((0, 50), 1), ((1, 0), 1)):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64):
            whole = torch.arange(torch.Size(shape).numel()).view(shape)
            x = (whole % 3 == 0) if dtype == torch.bool else whole.to(dtype)
            layout = LAYOUTS[kind](shape[dim], ranks)
            rows = rd.shard(x, layout, mesh, dim=dim)
            assert torch.equal(rows, x.index_select(dim, layout.positions(rank)))
            assert torch.equal(rd.unshard(rows, layout, mesh, dim=dim), x)
    return True


def dot_products(rank: int, kind: str, ranks: int) -> dict[str, Any]:
    """Return the products of a shard and of a join, and what their derivatives are."""
    layout = LAYOUTS[kind](70, ranks)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, 70, 3, generator=generator, dtype=torch.float64) for _ in "xy")
    own = y[:, layout.positions(rank)].clone()

    def cut(t: Tensor) -> Tensor:
        return rd.shard(t, layout)

    def join(t: Tensor) -> Tensor:
        return rd.unshard(t, layout)

    (of_shard,) = torch.autograd.grad(cut(x.requires_grad_()), x, own)
    (of_join,) = torch.autograd.grad(join(own.requires_grad_()), own, x)
    with warnings.catch_warnings():  # torch compiles its decompositions the first time
        warnings.filterwarnings("ignore", message="`torch.jit", category=DeprecationWarning)
        _, tangent = torch.func.jvp(cut, (torch.zeros_like(x),), (x.detach(),))
    (g,) = torch.autograd.grad(cut(x).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(g.sum(), x)
    x, own, tangent = x.detach(), own.detach(), tangent.detach()
    return {
        "whole": float((x * join(own)).sum()),
        "shards": float((cut(x) * own).sum()),
        "tangents": float((tangent * own).sum()),
        "gradient of shard": torch.equal(of_shard, y),
        "gradient of unshard": torch.equal(of_join, x[:, layout.positions(rank)]),
        "second derivative": torch.allclose(second, 6 * x),
    }


def wrong_shards(rank: int) -> list[str]:
    layout = Layout.zigzag(8, 2)
    x: Any = torch.zeros(1, 7)
    mesh = mesh_of(1, 1, 2)
    words: Any = "words"
    return _errors(
        [
            lambda: rd.shard(x, Layout.zigzag(7, 3)),
            lambda: rd.shard(x, layout),
            lambda: rd.unshard(x, layout),
            lambda: rd.shard(x.tolist(), layout),
            lambda: rd.shard(x, words),
            lambda: rd.shard(x, layout, dim=3),
            lambda: rd.shard(x, layout, mesh),
            lambda: rd.shard(x, layout, words),
        ]
    )


def unlike_shards(rank: int) -> str:
    layout = Layout.zigzag(8, 2)
    return _errors([lambda: rd.unshard(torch.zeros(3 + rank, 4), layout)])[0]


# --- programs of test_agreement ----------------------------------------------------------------

_LOCAL_ERRORS: dict[str, Any] = {
    "q": lambda x: {"q": x[:, 1:]},
    "k": lambda x: {"k": x.double()},
    "bias": lambda x: {"bias": torch.zeros(x.shape[1], 3)},
    "causal": lambda x: {"causal": 1},
    "unexpected": lambda x: {"is_causal": True},
    "strategy": lambda x: {"strategy": "rings"},
    "backend": lambda x: {"backend": "hopper"},
    "mask": lambda x: {"mask": rowmax.Documents(torch.zeros(5, dtype=torch.int32))},
}
_UNLIKE: dict[str, Any] = {
    "band of mask": lambda x: {"causal": True},
    "layout": lambda x: {"layout": Layout.contiguous(384, 3)},
    "scale": lambda x: {"scale": 0.5},
    "sink": lambda x: {"sink": torch.zeros(2)},
    "rows of bias": lambda x: {"bias": torch.zeros(1, 384)},
    "dropout_p": lambda x: {"dropout_p": 0.5, "seed": 1},
    "seed": lambda x: {"dropout_p": 0.5},
    "head terms": lambda x: {"alibi": torch.ones(2)},
    "reduce_replicated": lambda x: {"reduce_replicated": True},
    "strategy": lambda x: {"strategy": "heads"},
    "dtype": lambda x: {"q": x.double(), "k": x.double(), "v": x.double()},
}


def refused(
    rank: int, kind: str, name: str, rank_of_it: int | None, shape: tuple[int, ...] = ()
) -> str:
    """Return the error of a call with a wrong argument, on one rank or on all."""
    layout = Layout.zigzag(384, dist.get_world_size())
    x = torch.zeros(1, layout.lengths[rank], 2, 16)
    named: dict[str, Any] = {"q": x, "k": x, "v": x, "layout": layout, "backend": "torch"}
    named |= {"mesh": mesh_of(*shape)} if shape else {}
    if rank_of_it in (None, rank):
        more = (_LOCAL_ERRORS if kind == "local" else _UNLIKE)[name](x)
        if name == "layout":  # the lengths of this rank fit its layout
            n = more["layout"].lengths[rank]
            more |= dict.fromkeys("qkv", torch.zeros(1, n, 2, 16))
        named |= more
    return _errors([lambda: rd.attention(**named)])[0]


def named(rank: int, strategy: str) -> list[Any]:
    """Return the facts that a named backend checks, of the problem and the wanted gradients."""
    layout, facts = Layout.zigzag(64, dist.get_world_size()), []
    n = layout.lengths[rank]
    x, bias = torch.zeros(1, n, 2, 8), torch.zeros(1, 2, n, 1, requires_grad=True)
    module = sys.modules["rowmax.distributed.attention"]

    def check(problem: Any, name: str, wanted: Any) -> None:
        facts.append((name, problem.part, problem.nq, problem.nk, problem.bias, *wanted))

    options: Any = {"layout": layout, "strategy": strategy, "bias": bias, "backend": "torch"}
    with mock.patch.object(module, "check_named", check):
        rd.attention(x, x, x, **options)
        with torch.no_grad():
            rd.attention(x, x, x, **options)
    return facts


def other_functions(rank: int) -> str:
    """Return the error of a rank that joins rows while others attend."""
    layout = Layout.zigzag(384, 3)
    x = torch.zeros(1, layout.lengths[rank], 2, 8)
    attend = rank != 1
    named: Any = {"layout": layout, "backend": "torch"}
    return _errors([lambda: rd.attention(x, x, x, **named) if attend else rd.unshard(x, layout)])[0]


def unlike_gradients(rank: int) -> str:
    """Return the error of a backward in which one rank needs no gradient of k and v."""
    layout = Layout.zigzag(200, 3)
    q, k = (torch.zeros(1, layout.lengths[rank], 2, 16) for _ in "qk")
    q.requires_grad_()
    k.requires_grad_(rank != 1)
    out: Any = rd.attention(q, k, k, layout=layout, backend="torch")
    return _errors([lambda: out.sum().backward()])[0]


def with_limit(keys: int, heads: int, seconds: float = 4.0) -> DeviceMesh:
    """Return a mesh of two dimensions whose groups have a time limit: torch's is half an hour."""
    ranks, groups = torch.arange(keys * heads).view(keys, heads), []
    for rows in (ranks.T, ranks):
        each = [dist.new_group(row, timedelta(seconds=seconds)) for row in rows.tolist()]
        groups.append(each[int((rows == dist.get_rank()).nonzero()[0, 0])])
    return DeviceMesh.from_group(groups, "cpu", ranks, mesh_dim_names=("keys", "heads"))


def killed(rank: int, way: str, shape: tuple[int, ...] = ()) -> str:
    """End one rank before or within a call; return the error that the others see."""
    layout = Layout.zigzag(200, dist.get_world_size())
    x = torch.zeros(1, layout.lengths[rank], 8, 16)
    mesh: Any = with_limit(*shape) if shape else None

    def f() -> Any:
        return rd.attention(x, x, x, layout=layout, mesh=mesh, backend="torch")

    def end(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    dist.barrier()
    if way != "first call":
        f()
    if rank == 1 and way == "raises":
        return "raised"
    if rank == 1 and way != "within":
        end()
    patch = contextlib.nullcontext()
    if rank == 1:  # while rows of the next stage move, and before those of the last
        patch = mock.patch.object(by_keys, "prepared", end)
    with mock.patch.object(by_keys, "stages_of", even(4)), patch:
        try:
            f()
        except RuntimeError as error:
            return str(error)
    return "no error"


def late(rank: int, repeats: int, way: str, shape: tuple[int, ...] = ()) -> bool:
    """Return True if all repeats have the same bits, with a rank that is late at random."""
    size, draw = dist.get_world_size(), random.Random(rank)
    layout = Layout.zigzag(150, size)
    x = torch.randn(3, 1, 150, 4, 16, generator=torch.Generator().manual_seed(0))
    rows = [t.requires_grad_() for t in x[:, :, layout.positions(rank)].unbind()]
    mesh: Any = mesh_of(*shape) if shape else None
    first: list[Tensor] = []
    with copies(way), mock.patch.object(by_keys, "stages_of", even(2)):
        for _ in range(repeats):
            out: Any = rd.attention(
                *rows, layout=layout, mesh=mesh, causal=True, deterministic=True, backend="torch"
            )
            if rank == 1 and draw.random() < 0.3:
                time.sleep(draw.random() * 0.004)
            found = [out.detach(), *torch.autograd.grad(out.square().sum(), rows)]
            first = first or found
            if not all(torch.equal(a, b) for a, b in zip(first, found, strict=True)):
                return False
    return True


# --- programs of test_varlen -------------------------------------------------------------------


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
        mock.patch.object(by_keys, "stages_of", even(stages)),
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

    return _errors(
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
