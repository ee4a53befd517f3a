"""Kernels of rowmax, each alone, with other tiles; only this file uses private names.

A change is text, in the order of a tile's fields or by name: "128,64,8,3,split", "k_stages=4".
Capitals name constants of the kernel (STAGED=0). In the Hopper backward of wide heads a name may
begin with the launch that it belongs to (dkdv.q_stages=2). TOGETHER=0.25 of a Triton kernel: a
quarter of the heads in turns. Names within rowmax are imported where they are used: a measurement
of another checkout takes that checkout's own version of this file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from rowmax.bench.cells import Cell, Inputs
from rowmax.bench.providers import UnsupportedError, arguments, longest

Call = Callable[[], Any]


#: a kernel, its head size (with "bias" or "causal" for such cells), and the changes to try
TRIED = """
hopper.forward 64: warpgroups=2,registers=240+24 ordered=0 LAGS=0 LAGS=1
hopper.forward 128: v_stages=3,q_stages=1 LAGS=0 LAGS=1
hopper.forward 256: STAGED=0 LAGS=0 LAGS=1
hopper.forward 32 bias: onto_bias=0 onto_bias=0,sides=1,registers=240+24,overlap
hopper.forward 32 bias: onto_bias=0,overlap k_stages=2,v_stages=2
hopper.forward 32 bias: onto_bias=0,strip=0,sides=1,block_k=128,b_stages=2,registers=240+24,overlap
hopper.forward 64 bias: b_stages=1,k_stages=4,v_stages=4,q_stages=2
hopper.forward 64 bias: b_stages=2,k_stages=2,v_stages=2,q_stages=2
hopper.forward 64 bias: b_stages=3,block_k=64,k_stages=4,v_stages=4
hopper.forward 128 bias: b_stages=1,q_stages=2 b_stages=1,q_stages=1
hopper.forward 128 bias: b_stages=2,block_k=64,k_stages=3,v_stages=3
hopper.forward 128 bias: b_stages=4,block_k=64,k_stages=3,v_stages=3
hopper.forward 256 bias: b_stages=1
hopper.backward 64: HELD=0 ORDERED=1,FRESH=1
hopper.backward 128: ORDERED=0,FRESH=0 ORDERED=1,FRESH=1
hopper.backward 256: dkdv.Q_STAGES=2,dkdv.ALONE=0
hopper.dv 512: dv.FIRST_STAGES=2 dv.HELD=64
triton.delta 128: 16,16,4,2 32,16,4,2 64,16,4,2 64,16,8,2 128,16,8,2 TOGETHER=0
triton.delta 256: 16,16,4,2 32,16,4,2 64,16,4,2 32,16,8,2 64,16,8,2 TOGETHER=0
triton.dkdv 128: 64,128,8,3 64,128,8,4 64,128,8,2 64,64,4,2
triton.dkdv 128 causal: 64,128,8,3,split TOGETHER=0 TOGETHER=0.25 TOGETHER=4
triton.dq 128: 128,64,8,3 128,64,8,4 64,64,4,2
triton.dq 128 causal: 128,64,8,3,split TOGETHER=0 TOGETHER=0.25 TOGETHER=4
triton.dk 256: 32,128,8,2 32,128,8,3 64,64,4,2 32,64,4,3 32,64,4,4
triton.dk 256 causal: 32,64,8,3 64,64,8,2 TOGETHER=0 TOGETHER=0.25 TOGETHER=4
triton.dv 256: 32,128,8,3 32,128,8,4 32,128,8,5 64,128,8,2 64,64,4,2
triton.dv 256 causal: 64,64,8,3 32,64,4,4 TOGETHER=0 TOGETHER=0.25 TOGETHER=4
triton.dq 256: 64,32,4,3 64,32,4,4 64,64,4,2 128,32,8,3
triton.dq 256 causal: 128,32,8,3,split 64,32,4,3,split 64,64,8,2
triton.dq 256 causal: TOGETHER=0 TOGETHER=0.25 TOGETHER=4
triton.few 128: parts=8 parts=16 parts=64 parts=128 stages=3 stages=5 warps=2 warps=8
triton.few 128: block_k=32 block_k=32,warps=2 block_k=32,stages=6 block_k=128 block_k=128,stages=3
triton.few 128: block_k=128,warps=8,stages=3 block_k=128,parts=16 block_k=32,warps=2,parts=64
triton.few 64: parts=16 parts=64 stages=3 stages=5 warps=2 block_k=64 block_k=256,stages=3
triton.few 256: parts=16 parts=64 stages=3 stages=5 warps=8 block_k=64,stages=3 block_k=16
triton.dbias 64 bias: 128,128,8,3 128,128,8,2 128,128,16,3 128,64,8,3 64,128,4,2 64,64,4,3
triton.dbias 128 bias: 128,128,8,3 128,128,8,2 128,128,16,3 128,64,8,3 64,128,4,2 64,64,4,3
"""


def tried(kernel: str, cell: Cell) -> list[str]:
    """Return the changes that are measured if none is named."""
    of = f"{kernel} {cell.d}" + " bias" * bool(cell.bias)
    lines = [line.split(":") for line in TRIED.strip().splitlines()]
    wanted = (of, f"{of} causal") if cell.causal else (of,)
    return [change for name, changes in lines if name in wanted for change in changes.split()]


def changed(tile: Any, text: str, launch: str = "") -> tuple[Any, dict[str, Any]]:
    """Return (the tile with its changes, the constants) of a text."""
    names, of_tile, constants = [f.name for f in fields(tile)], {}, {}
    for n, part in enumerate(text.split(",") if text != "shipped" else []):
        key, _, x = part.rpartition("=")
        if not key:
            key, x = (x, "1") if x in names else (names[n], x)
        owner, _, key = key.rpartition(".")
        parts = [float(y) if "." in y else int(y) for y in x.split("+")]
        value = parts[0] if len(parts) == 1 else tuple(parts)
        if owner not in ("", launch):
            continue
        if key.isupper() and not owner:
            constants[key] = value
        else:
            of_tile[key] = bool(value) if isinstance(getattr(tile, key), bool) else value
    return replace(tile, **of_tile), constants


def posed(cell: Cell, x: Inputs) -> tuple[Any, Any, torch.Tensor]:
    """Return the arguments of a backend for a cell: tensors, problem, and dout."""
    from rowmax.attention import arguments as call_of
    from rowmax.call.normalize import normalized
    from rowmax.call.problem import problem_of

    packed = ()
    if x.q_offsets is not None:
        packed = ((x.q_offsets, x.offsets), longest(cell))
    tensors, options, known = normalized(call_of(x.q, x.k, x.v, *packed, **arguments(cell, x)))
    problem = known.problem if known else problem_of(tensors, options)
    return tensors, problem, x.dout[None] if cell.packed else x.dout


# --- Hopper ------------------------------------------------------------------------------------


def hopper_forward(cell: Cell, x: Inputs, change: str) -> Call:
    """Return the launch of the forward kernel with a change, its plan built before."""
    _, pointers, run, _ = _forward_launch(cell, x, change)
    if cell.packed or cell.documents:  # the counter of tiles begins at 0
        return lambda: run(pointers())
    made = pointers()
    return lambda: run(made)


def _forward_launch(cell: Cell, x: Inputs, change: str, **more: Any) -> tuple[Any, Any, Any, Any]:
    """Return the plan of a change and of constants, what makes its pointers, what runs it, bases.

    PARTS are those of the keys of a tile.
    """
    from rowmax.gpu.hopper import forward_parts, host
    from rowmax.gpu.hopper.tiles import tile_for

    tensors, problem, _ = posed(cell, x)
    q, k, v, bias = tensors[:4]
    out = q.new_empty(problem.out_shape)
    lse = torch.empty(problem.lse_shape, device=q.device)
    path, most = host.bias_path(problem, bias), host.processors(q.device)
    usual = forward_parts.parts_of(problem, most)
    _, options = changed(tile_for(problem, path, most), change)
    parts = int(options.pop("PARTS", usual))
    of_parts = forward_parts.tile_of_parts(problem)
    tile, _ = changed(of_parts if parts > 1 else tile_for(problem, path, most), change)
    plan = host.build_plan(problem, tensors, out, tile, parts, **options, **more)
    pointers = partial(host.pointers, plan, problem, tensors, out, lse)
    bases = host.bases(q, k, v, bias, out)

    def run(t: Any) -> torch.Tensor:
        host.run(plan, problem, tensors, t, bases, (out, lse))
        return out

    return plan, pointers, run, bases


def hopper_clocks(cell: Cell, x: Inputs, change: str, events: int) -> tuple[list[Any], float]:
    """Return the clocks of a forward's events (lib/clocks.py), and its milliseconds."""
    from rowmax.gpu.hopper.lib.clocks import USES

    plan, pointers, _, bases = _forward_launch(cell, x, change, CLOCKS=events)
    shape = (plan.tile.warpgroups + 1, USES.value, 8)
    clocks = torch.zeros(shape, dtype=torch.int32, device=x.q.device)
    pointers = pointers()._replace(clocks=clocks)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(15):  # until the power cap is in effect
        plan.launch(pointers, bases)
    begin.record()
    plan.launch(pointers, bases)
    end.record()
    torch.cuda.synchronize()
    return clocks.tolist(), begin.elapsed_time(end)


#: the name of a config of a Hopper backward -> its part
_PARTS = {"FusedConfig": "fused", "DqConfig": "dq", "DkdvConfig": "dkdv"}


def _part_of(config: Any) -> str:
    """Return the part of a Hopper backward that a config is of; of wide heads dq, dk or dv."""
    return _PARTS.get(type(config).__name__) or f"d{config.GRADIENT}"


def hopper_backward(part: str, cell: Cell, x: Inputs, change: str) -> Call:
    """Return the whole backward, or only its pass over rows, or only one launch of gradients."""
    from rowmax.call.inputs import Gradients, Wanted
    from rowmax.gpu import hopper
    from rowmax.gpu.hopper import backward_host as host
    from rowmax.gpu.hopper.backward_bias import kind_of
    from rowmax.gpu.hopper.backward_plan import build_plan
    from rowmax.gpu.hopper.backward_tiles import tiles_of

    tensors, problem, dout = posed(cell, x)
    shipped = tiles_of(problem, kind_of(problem) == "tile")
    found = [changed(tile, change, _part_of(tile)) for tile in shipped]
    tiles = tuple(tile for tile, _ in found)
    out, lse = hopper.forward(problem, tensors)
    options = found[0][1]
    shares = options.pop("SHARES", None)
    plan = build_plan(problem, tensors, dout, tiles, cell.dbias, shares, **options)
    wanted = Wanted(True, True, True, cell.dbias, False)
    if not part:
        return lambda: host.launch(plan, problem, tensors, out, lse, dout, None, wanted, None)[:4]
    if cell.bias and plan.dbias not in ("", "shared"):
        raise UnsupportedError("a launch alone with a bias whose gradient others share")
    dbias = torch.empty_like(tensors.bias) if plan.dbias else None
    made = Gradients(*(torch.empty_like(t) for t in tensors[:3]), dbias)
    made = host.with_shares(plan, made, lse)
    rows = (out, lse, dout, None)
    if part == "rows":
        return lambda: host.prepare(plan, problem, tensors, rows, wanted, made) and None
    t, _ = host.prepare(plan, problem, tensors, rows, wanted, made)
    if part == "dbias":
        return _shared_bias(plan, problem, tensors, dout, t, made)
    works = [(n, w) for n, w in enumerate(plan.works) if _part_of(w.config) == part]
    if not works:
        raise UnsupportedError(f"no launch {part} at this head size")
    n, work = works[0]
    return lambda: host.run(work, problem, tensors, dout, t, made, n)


def _shared_bias(plan: Any, problem: Any, tensors: Any, dout: Any, t: Any, made: Any) -> Call:
    """Return the launches that make the gradient of a shared bias."""
    from rowmax.gpu.hopper import backward_host as host
    from rowmax.gpu.hopper.backward_args import PartPointers

    if plan.shared is None:
        raise UnsupportedError("no launch for the gradient of a shared bias")
    parts = None
    if plan.total is not None:
        parts = torch.empty((plan.parts, *made.bias.shape), device=dout.device)

    def call() -> Any:
        host.run(plan.shared, problem, tensors, dout, t, made, parts=parts)
        if plan.total is not None:
            plan.total(PartPointers(parts, made.bias))
        return (made.bias,)

    return call


# --- Triton ------------------------------------------------------------------------------------


def triton_job(job: str, cell: Cell, x: Inputs, change: str) -> Call:
    """Return the launch of one Triton kernel with a change."""
    from rowmax.gpu.kernel_args import Pointers, strided
    from rowmax.gpu.launch import build_job
    from rowmax.gpu.tiles import tiles_for

    if cell.packed:
        raise UnsupportedError("without packed sequences")
    tensors, problem, _ = posed(cell, x)
    tiles, options = changed(tiles_for(job, problem, x.q.device), change)
    if job in ("forward", "few"):
        forward = import_module(f"rowmax.gpu.triton.{job}").forward
        return lambda: forward(problem, tensors, tiles)[0]
    spec, made, results = _triton_operands(job, problem, tensors, x)
    run = build_job(spec, problem, tensors, tiles, strided(made))
    if "TOGETHER" in options:
        heads = max(1, int(run.numbers.together * options["TOGETHER"]))
        run.launch.last = (run.numbers._replace(together=heads), run.config)
    inputs = (tensors.q,) if spec.resident == "rows" else tensors
    pointers = Pointers(*inputs, **made)
    return lambda: (run.run(pointers), results)[1]


def _triton_operands(job: str, problem: Any, tensors: Any, x: Inputs) -> tuple[Any, Any, Any]:
    """Return (the spec of a job, the tensors that it reads and writes, its results)."""
    from rowmax.gpu import preprocess

    forward = import_module("rowmax.gpu.triton.forward").forward
    backward = import_module("rowmax.gpu.triton.backward")
    out, lse = forward(problem, tensors)
    rest = None
    if problem.natural:
        rest = lse.new_zeros(preprocess.padded_rows(problem))
    rows: dict[str, Any] = {"dout": x.dout, "rest": rest}
    read, names = {**rows, "out": out, "lse": lse}, ("lse2", "delta")
    given = preprocess.DELTA, problem, tensors, read, names, {}, None
    vectors, _ = preprocess.row_vectors(*given)
    rows |= vectors
    if job == "delta":
        return preprocess.DELTA, read | vectors, (vectors["delta"],)
    q, k, v = (torch.empty_like(t) for t in tensors[:3])
    written: dict[str, dict[str, Any]] = {
        "dq": {"dq": q},
        "dkdv": {"dk": k, "dv": v},
        "dk": {"dk": k},
        "dv": {"dv": v},
        "dbias": {"dbias": None if x.bias is None else torch.empty_like(x.bias)},
    }
    specs = {name: getattr(backward, name.upper()) for name in written}
    return specs[job], rows | written[job], tuple(written[job].values())


#: by name: the maker, and the products that are counted
KERNELS: dict[str, tuple[Callable[[Cell, Inputs, str], Call], int]] = {
    "hopper.forward": (hopper_forward, 2),
    "hopper.backward": (partial(hopper_backward, ""), 5),
    "hopper.rows": (partial(hopper_backward, "rows"), 0),
    "hopper.fused": (partial(hopper_backward, "fused"), 5),
    "hopper.dbias": (partial(hopper_backward, "dbias"), 2),
    "hopper.dq": (partial(hopper_backward, "dq"), 3),
    "hopper.dkdv": (partial(hopper_backward, "dkdv"), 4),
    "hopper.dk": (partial(hopper_backward, "dk"), 3),
    "hopper.dv": (partial(hopper_backward, "dv"), 2),
}
_JOBS = {"forward": 2, "few": 2, "delta": 0, "dkdv": 4, "dk": 3, "dv": 2, "dq": 3, "dbias": 2}
KERNELS |= {f"triton.{job}": (partial(triton_job, job), n) for job, n in _JOBS.items()}


# --- other private names ----------------------------------------------------------------------


def use_usual_assembler() -> None:
    """Assemble all kernels of this process with the ptxas that Triton chooses."""
    from rowmax.gpu import assembler

    usual = assembler.choice().usual
    assembler.choice = lambda: assembler.Choice(usual, usual)


def usage(call: Call) -> dict[str, str]:
    """Return registers and words of local memory of every kernel that a call launches."""
    from rowmax.gpu import compiled

    launches, usual = [], compiled.Launch.__call__

    def recorded(self: Any, *args: Any) -> None:
        launches.append(self)
        usual(self, *args)

    compiled.Launch.__call__ = recorded
    try:
        call()
    finally:
        compiled.Launch.__call__ = usual
    kernels = [x.kernel for one in launches for x in compiled._kernels.values() if one in x.users]
    return {
        column: " ".join(f"{x.name}:{getattr(x, field, '?')}" for x in kernels)
        for column, field in (("registers", "n_regs"), ("local", "n_spills"))
    }
