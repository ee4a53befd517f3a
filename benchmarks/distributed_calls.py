"""The calls of ``benchmarks.distributed``, as each rank runs them.

A contestant is ``one`` (the first device alone computes the whole), ``rowmax:STRATEGY``, both
with ``:deterministic`` or the name of a backend if wanted, or ``torch:ROTATION``: torch's
``context_parallel`` with cuDNN's attention, which gathers keys and values ("allgather") or passes
them around ("alltoall").
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from rowmax import distributed as rd
from rowmax.bench import timing
from rowmax.bench.cells import Cell, Inputs
from rowmax.bench.providers import UnsupportedError, arguments, of_rowmax, refuse

from .distributed_cells import layout_for
from .ranks import Rank

SAMPLED = 64  # rows of one device's results that ranks compare theirs with
COLUMNS = 64  # every so many columns of the gradient of a bias
LONG = 200.0  # milliseconds of a call that is not repeated to decide how many a turn has
ASLEEP = 25_000_000  # clocks, about 15 ms, in which the host can enqueue calls
#: the inputs in the order of their generators
_NAMES = ("q", "k", "v", "dout", "bias")
#: the collectives that are measured: names in torch before 2.13, and from then on
_RENAMED = {
    "all_gather": ("all_gather_into_tensor", "all_gather_single"),
    "reduce_scatter": ("reduce_scatter_tensor", "reduce_scatter_single"),
}


class Turn(NamedTuple):
    """The milliseconds of a call, those of the host to enqueue it, and the number of calls."""

    ms: float
    host_ms: float
    calls: int


@dataclass
class Contestant:
    """A contestant's inputs on one rank, and its function of q, k and v."""

    cell: Cell
    x: Inputs
    attend: Callable[..., Tensor]
    positions: Tensor  # those of own rows
    layout: str = ""
    heads_first: bool = False  # tensors are [B, H, N, D]
    context: Callable[[], Any] = contextlib.nullcontext
    out: Tensor | None = field(default=None)

    def __post_init__(self) -> None:
        self.leaves = [t.requires_grad_() for t in (self.x.q, self.x.k, self.x.v)]
        self.wanted = list(self.leaves)
        if self.x.bias is not None and self.cell.dbias:
            self.wanted.append(self.x.bias.requires_grad_())

    def call(self, what: str) -> list[Tensor]:
        """Return the results of a pass: out, or gradients of q, k, v and the bias."""
        if what == "forward":
            with torch.no_grad():
                return [self.attend(*self.leaves)]
        if self.out is None:
            self.out = self.attend(*self.leaves)
        return list(torch.autograd.grad(self.out, self.wanted, self.x.dout, retain_graph=True))

    def rows(self, results: list[Tensor]) -> list[Tensor]:
        """Return results with own rows first."""
        found = []
        for n, t in enumerate(results):
            if n == 3:  # the bias has columns as well
                found.append(t[..., ::COLUMNS].movedim(-2, 0))
            else:
                t = t.transpose(-3, -2) if self.heads_first else t
                found.append(t.movedim(-3, 0))
        return found


# --- inputs --------------------------------------------------------------------------------------


def whole(cell: Cell, name: str, device: torch.device) -> Tensor | None:
    """Return an input of the whole cell, the same on every rank; None for a bias that is not."""
    if name == "bias" and not cell.bias:
        return None
    generator = torch.Generator(device).manual_seed(_NAMES.index(name))
    heads = {"q": cell.hq, "dout": cell.hq}.get(name, cell.hk)
    shape = (*(() if cell.packed else (cell.b,)), cell.n, heads, cell.d)
    if name == "bias":
        sizes = {"b": cell.b, "h": cell.hq, "q": cell.n, "k": cell.n, "1": 1}
        shape = tuple(sizes[x] for x in cell.bias)
    dtype = getattr(torch, cell.dtype)
    return torch.randn(shape, device=device, dtype=dtype, generator=generator)


def own_inputs(cell: Cell, positions: Tensor | None, device: torch.device) -> Inputs:
    """Return the rows of a rank at some positions; None is all."""
    found: dict[str, Any] = {}
    for name in _NAMES:
        t = whole(cell, name, device)
        if t is not None and positions is not None:
            dim = -2 if name == "bias" else -3
            t = t.index_select(dim, positions) if t.shape[dim] == cell.n else t
        found[name] = t
    if cell.packed:
        offsets = torch.tensor((0, *cell.packed), device=device).cumsum(0).int()
        found |= {"offsets": offsets, "q_offsets": offsets}
    return Inputs(**found)


# --- contestants ---------------------------------------------------------------------------------


def contestant(rank: Rank, cell: Cell, name: str) -> Contestant:
    """Return a contestant of a cell.

    Raises:
        UnsupportedError: it does not compute the cell.
    """
    if cell.bias and cell.bias[-2:] != "qk":
        raise UnsupportedError(f"a bias of sizes {cell.bias!r}; want a row for each query")
    family, *words = name.split(":")
    if family == "one":
        x = own_inputs(cell, None, rank.device)
        everything = torch.arange(cell.n, device=rank.device)
        return Contestant(cell, x, of_rowmax(cell, x, words), everything, "whole")
    if family == "rowmax":
        return _of_rowmax(rank, cell, words)
    if family == "torch":
        return _of_torch(rank, cell, words)
    raise UnsupportedError(f"provider: got {name!r}; want one, rowmax:..., torch:...")


def _of_rowmax(rank: Rank, cell: Cell, words: list[str]) -> Contestant:
    refuse(cell, "alibi dropout lengths documents sink")
    strategy, *words = words or ["auto"]
    kind, layout = layout_for(cell, strategy, rank.size, "balanced" in words)
    positions = layout.positions(rank.rank, rank.device)
    x = own_inputs(cell, positions, rank.device)
    options = arguments(cell, x)
    options |= {"layout": layout, "strategy": strategy, "deterministic": "deterministic" in words}
    more_words = ("deterministic", "balanced")
    options["backend"] = next((word for word in words if word not in more_words), None)
    function: Any = rd.attention
    more: tuple[Any, ...] = ()
    if cell.packed:
        function, more = rd.attention_varlen, (x.offsets, x.offsets)
        options.pop("bias")
    return Contestant(cell, x, lambda q, k, v: function(q, k, v, *more, **options), positions, kind)


def _of_torch(rank: Rank, cell: Cell, words: list[str]) -> Contestant:
    """Return torch's context_parallel; "repeated": each query head has a kv head of its own."""
    refuse(cell, "packed window bias softcap alibi dropout lengths documents sink")
    if not words or words[0] not in ("allgather", "alltoall"):
        raise UnsupportedError("torch rotates by allgather or alltoall")
    if cell.n % (2 * rank.size):
        raise UnsupportedError(f"it takes multiples of {2 * rank.size} positions, not {cell.n}")
    try:
        module: Any = import_module("torch.distributed.tensor.experimental")
        private: Any = import_module("torch.distributed.tensor.experimental._attention")
        state: Any = private._cp_options
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(f"this torch has no context_parallel: {error}") from None
    if "mesh" not in rank.kept:
        rank.kept["mesh"] = init_device_mesh(rank.device.type, (rank.size,))
    mesh = rank.kept["mesh"]

    @contextlib.contextmanager
    def context(order: Tensor | None = None) -> Any:
        """Enter context_parallel, which leaves own positions in ``order``."""
        before, method = state.enable_load_balance, state.rotate_method
        private.set_rotate_method(words[0])
        state.enable_load_balance = cell.causal  # without causal its balance raises
        order = torch.arange(cell.n, device=rank.device) if order is None else order
        options = {"buffer_seq_dims": [0], "no_restore_buffers": {order}}
        raised = None
        with module.context_parallel(mesh, buffers=[order], **options):
            # the context may set the option by its own rule
            state.enable_load_balance = cell.causal
            try:
                yield
            except Exception as error:  # torch 2.11 restores nothing after an error
                raised = error
        state.enable_load_balance, state.rotate_method = before, method
        if raised is not None:
            raise raised

    positions = torch.arange(cell.n, device=rank.device)
    with context(positions):
        positions = positions.clone()
    x = own_inputs(cell, positions, rank.device)
    for name in ("q", "k", "v", "dout"):
        setattr(x, name, getattr(x, name).transpose(1, 2).contiguous())
    kernels = [SDPBackend.CUDNN_ATTENTION if rank.device.type == "cuda" else SDPBackend.MATH]
    options: dict[str, Any] = {"is_causal": cell.causal}
    repeats = cell.hq // cell.hk if "repeated" in words else 1
    options |= {"enable_gqa": True} if cell.hq != cell.hk * repeats else {}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if repeats > 1:
            k, v = (t.repeat_interleave(repeats, 1) for t in (k, v))
        with sdpa_kernel(kernels):  # the context replaces the function of this module
            return functional.scaled_dot_product_attention(q, k, v, **options)

    kind = "zigzag" if cell.causal else "contiguous"
    return Contestant(cell, x, attend, positions, kind, True, context)


# --- programs of ranks ---------------------------------------------------------------------------


def _norms(got: list[Tensor], want: list[Tensor]) -> float:
    """Return the largest relative difference in norm; the largest result sets the least scale."""
    norms = [float(t.float().norm()) for t in want]
    least = 0.2 * max([*norms, 1e-30])
    off = [float((a.float() - b.float()).norm()) for a, b in zip(got, want, strict=True)]
    return max(x / max(norm, least) for x, norm in zip(off, norms, strict=True))


def is_one(name: str) -> bool:
    """Return True for a contestant that the first rank runs alone."""
    return name.partition(":")[0] == "one"


def check_short(rank: Rank, cell: Cell, name: str, peer: str = "one") -> dict[str, Any]:
    """Return the largest difference of own rows from one device's, both passes."""
    try:
        ours, one = contestant(rank, cell, name), contestant(rank, cell, peer)
        off = []
        for what in ("forward", "backward"):
            with ours.context():
                got = ours.rows(ours.call(what))
            want = one.rows(one.call(what))
            off.append(_norms(got, [t[ours.positions] for t in want]))
        return {"off": max(off)}
    except UnsupportedError as error:
        return {"error": str(error)}


def prepare(rank: Rank, cell: Cell, name: str) -> str:
    """Make a contestant of a cell, and keep it; return the name of its layout."""
    found = rank.kept.setdefault("contestants", {})[name] = contestant(rank, cell, name)
    return found.layout


def release(rank: Rank, names: tuple[str, ...] | None = None) -> None:
    """Drop contestants, all if None."""
    kept = rank.kept.setdefault("contestants", {})
    for name in list(kept) if names is None else names:
        kept.pop(name, None)
    if rank.device.type == "cuda":
        torch.cuda.empty_cache()


def first_call(rank: Rank, name: str, what: str, sample: list[Tensor] | None) -> dict[str, Any]:
    """Run a pass for the first time, and again for its peak of memory; compare sampled rows.

    Its time decides how many calls a turn has, and is that of later calls: if a turn had one short
    call alone, the start of ranks at different times would be a tenth of it.
    """
    one: Contestant = rank.kept["contestants"][name]
    with one.context():
        got = one.rows(one.call(what))
        facts: dict[str, Any] = {}
        every = max(1, one.cell.n // SAMPLED)
        at = one.positions % every == 0
        mine = [t[at] for t in got]
        if is_one(name):
            facts["sample"] = [t.detach().cpu() for t in mine]
        elif sample is not None:
            rows = (one.positions[at] // every).cpu()
            facts["off"] = _norms(mine, [t[rows].to(rank.device) for t in sample])
        del got, mine
        if rank.device.type == "cuda":
            facts["peak_mib"] = timing.device_mib(lambda: one.call(what))
        _wait(rank)
        for calls in (1, 2):  # the first is recorded, and later ones repeat its launches
            if facts.get("ms", 0.0) < LONG:
                begin = time.perf_counter()
                for _ in range(calls):
                    one.call(what)
                _wait(rank)
                facts["ms"] = 1e3 * (time.perf_counter() - begin) / calls
    return facts


def take_turn(rank: Rank, name: str, what: str, calls: int) -> Turn:
    """Time some calls, one after the other, without a barrier between them."""
    one: Contestant = rank.kept["contestants"][name]
    with one.context():
        if not is_one(name):
            dist.barrier()
        return _timed(rank, lambda: one.call(what), calls, together=not is_one(name))


def _timed(rank: Rank, call: Callable[[], Any], calls: int, together: bool) -> Turn:
    """Time some calls on the device; ``together``: all ranks begin at the same time."""
    if rank.device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        each = 1e3 * (time.perf_counter() - begin) / calls
        return Turn(each, each, calls)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    one = torch.ones(1, device=rank.device)
    torch.cuda.synchronize()
    torch.cuda._sleep(ASLEEP)
    if together:  # a rank that begins early would measure how long it waits for others
        dist.all_reduce(one)
    start.record()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    host = time.perf_counter() - begin
    end.record()
    torch.cuda.synchronize()
    return Turn(start.elapsed_time(end) / calls, 1e3 * host / calls, calls)


def _wait(rank: Rank) -> None:
    if rank.device.type == "cuda":
        torch.cuda.synchronize()


def wire(rank: Rank, name: str, mib: float, calls: int) -> tuple[float, float]:
    """Return milliseconds of a collective with ``mib`` MiB a rank, and the MiB that it receives.

    An all-gather sends a piece of that size, a reduce-scatter and an all-to-all receive one.
    """
    each = max(1, int(mib * 2**20) // 4 // rank.size) * rank.size
    small = torch.zeros(each, device=rank.device)
    function: Any
    if name == "all_to_all":
        large = torch.empty_like(small)
        arguments, received = (large, small), each * (rank.size - 1) / rank.size
        function = dist.all_to_all_single
    else:
        large = torch.zeros(each * rank.size, device=rank.device)
        arguments = (large, small) if name == "all_gather" else (small, large)
        received = each * (rank.size - 1)
        old, new = _RENAMED[name]
        function = getattr(dist, new, None) or getattr(dist, old)
    function(*arguments)
    dist.barrier()
    turn = _timed(rank, lambda: function(*arguments), calls, together=True)
    return turn.ms, 4 * received / 2**20


def facts(rank: Rank) -> dict[str, str]:
    """Return device, versions and date, with NCCL's version and whether devices see each other."""
    kind = rank.device.type
    found = timing.facts(kind) | {"nccl": "", "peer_access": ""}
    if kind == "cuda":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        others = [other for other in range(rank.size) if other != rank.rank]
        seen = [torch.cuda.can_device_access_peer(rank.rank, other) for other in others]
        found["peer_access"] = "yes" if all(seen) else "no"
        found["memory"] = str(torch.cuda.get_device_properties(rank.device).total_memory)
    return found
