"""The functions that ranks run for the tests of attention across ranks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import rowmax
from rowmax import distributed as rd
from rowmax.call import dispatch
from rowmax.call.problem import Problem
from rowmax.distributed import Layout, collectives, exchange, operators
from rowmax.operators.autograd import is_direct
from rowmax.testing import Call, Case, cotangents, make

from .programs import copies, errors_of, layouts, mesh_of, own_answer, own_call


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


class _Seen(TorchDispatchMode):
    """A mode that notes the operators of rowmax."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names += [func.name()] if func.namespace == "rowmax" else []
        return func(*args, **(kwargs or {}))


def observed(rank: int, way: str) -> list[tuple[list[str], list[bool]]]:
    """Return the operators that a mode sees of calls of one kind, and which pass the dispatcher by.

    The calls are equal to the bit.

    Inputs differ in strides, and in which of them need gradients.
    """
    layout, found, first = Layout.zigzag(200, 2), [], None
    x = torch.randn(3, 1, layout.lengths[rank], 4, 16)
    other = x.transpose(2, 3).contiguous().transpose(2, 3)
    with copies(way):
        for n in range(6):
            given = (other if n % 2 else x).clone(memory_format=torch.preserve_format)
            q, k, v = (t.requires_grad_(n != 4) for t in given.unbind())
            seen, direct = _Seen(), []

            def noted(tensors: Any, direct: list[bool] = direct) -> bool:
                direct.append(is_direct(tensors))
                return direct[-1]

            patch = mock.patch.object(operators, "is_direct", noted)
            with seen if n % 3 == 2 else contextlib.nullcontext(), patch:
                out: Any = rd.attention(q, k, v, layout=layout, causal=True, backend="torch")
                got = [out.detach()]
                if n != 4:
                    got += torch.autograd.grad(out, (q, k, v), out.detach())
            found.append((seen.names, direct))
            first = first or got
            assert all(torch.equal(a, b) for a, b in zip(first, got, strict=False))
    return found


def after_inference(rank: int, way: str) -> list[bool]:
    """Return True for calls that train after calls of their sizes in inference mode, and are right.

    The second calls replace the memory that ranks share by more.
    """
    found = []
    with copies(way):
        for n in (200, 70_000):
            layout = Layout.zigzag(n, 2)
            x = torch.randn(1, n, 2, 8, generator=torch.Generator().manual_seed(0))
            own = x[:, layout.positions(rank)]
            mask = rowmax.Window(20, 0)
            with torch.inference_mode():
                first: Any = rd.attention(own, own, own, layout=layout, mask=mask, backend="torch")
            leaf = own.clone().requires_grad_()
            out: Any = rd.attention(leaf, leaf, leaf, layout=layout, mask=mask, backend="torch")
            (got,) = torch.autograd.grad(out.sum(), leaf)
            with torch.inference_mode():
                again: Any = rd.attention(own, own, own, layout=layout, mask=mask, backend="torch")
            found.append(torch.equal(first, out.detach()) and torch.equal(again, first))
            found.append(bool(got.isfinite().all()))
    return found


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
        return errors_of([lambda: torch.testing.assert_close(_round_trip(x, layout), x)])[0]


def _round_trip(x: Tensor, layout: Layout) -> Tensor:
    return rd.unshard(rd.shard(x, layout), layout)
