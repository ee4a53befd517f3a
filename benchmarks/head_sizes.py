"""Check and time head sizes between powers of two: two checkouts, tiles, and cuDNN.

    python -m benchmarks.head_sizes --old .carry/base --passes forward --csv out.csv

Contestants take turns in an order that rotates. Each checkout has a process of its own.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

#: (D, Dv, N, causal)
CELLS = [
    (d, dv, n, causal)
    for n, causal in ((16384, True), (16384, False), (4096, True))
    for d, dv in ((96, 96), (80, 80), (192, 128))
]
_THREE = "warpgroups=3,registers=160+32"
TILES = {
    (96, 96): [f"{_THREE},overlap=0,q_stages=2", f"{_THREE},overlap=0,q_stages=1,k_stages=3",
               f"{_THREE},block_k=64,k_stages=4,v_stages=4,q_stages=2"],
    (80, 80): [f"{_THREE},overlap=0,q_stages=2", f"{_THREE},overlap=0,q_stages=1,k_stages=3,v_stages=3"],
    (192, 128): [f"{_THREE},block_k=64,k_stages=3,v_stages=3", f"{_THREE},block_k=64,k_stages=4,v_stages=2", "overlap=0"],
    (128, 128): [f"{_THREE},overlap=0,q_stages=1"],
    (64, 64): ["overlap=0"],
}  # fmt: skip


class Calls:
    """The calls of one process."""

    def __init__(self) -> None:
        self.inputs: dict[Any, Any] = {}

    def tensors(self, d: int, dv: int, n: int, heads: int, batch: int) -> Any:
        key = d, dv, n, heads, batch
        if key not in self.inputs:
            self.inputs.clear()
            torch.manual_seed(0)
            sizes = (d, d, dv, dv)
            self.inputs[key] = [
                torch.randn(batch, n, heads, x, device="cuda", dtype=torch.bfloat16) for x in sizes
            ]
        return self.inputs[key]

    def made(self, cell: Any, what: str, name: str, heads: int = 0, batch: int = 0) -> Any:
        d, dv, n, causal = cell
        q, k, v, dout = self.tensors(d, dv, n, heads or 2048 // d, batch or 16384 // n)
        if name == "cudnn":
            return self.cudnn(q, k, v, dout, causal, what)
        from rowmax.attention import arguments
        from rowmax.call.inputs import Wanted
        from rowmax.call.normalize import normalized
        from rowmax.call.problem import problem_of
        from rowmax.gpu.hopper import backward_host, host, tiles

        tensors, options, known = normalized(arguments(q, k, v, causal=causal))
        problem = known.problem if known else problem_of(tensors, options)
        out = q.new_empty(problem.out_shape)
        lse = q.new_empty(problem.lse_shape, dtype=torch.float32)
        if what == "forward":
            tile = tiles.tile_for(problem, "", host.processors(q.device))
            constants: dict[str, Any] = {}
            if name not in ("old", "new"):
                from .variants import changed

                tile, constants = changed(tile, name)
            plan = host.build_plan(problem, tensors, out, tile, **constants)
            bases, t = host.bases(q, k, v, None, out), host.pointers(plan, problem, tensors, out, lse)
            return lambda: (plan.launch(t, bases), (out, lse))[1]
        out, lse = host.forward(problem, tensors)
        constants = {}
        if name in ("old", "new"):
            found = None
        else:
            found = backward_host.tiles_of(problem)
        if name not in ("old", "new"):
            from .variants import changed

            names = {"FusedConfig": "fused", "DqConfig": "dq", "DkdvConfig": "dkdv"}
            each = [changed(tile, name, names[type(tile).__name__]) for tile in found]
            found, constants = tuple(x for x, _ in each), each[0][1]
        plan = backward_host.build_plan(problem, tensors, dout, found, **constants)
        wanted = Wanted(q=True, k=True, v=True)
        return lambda: backward_host.launch(
            plan, problem, tensors, out, lse, dout, None, wanted
        )[:3]

    def cudnn(self, q: Any, k: Any, v: Any, dout: Any, causal: bool, what: str) -> Any:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        attend = torch.nn.functional.scaled_dot_product_attention

        def forward() -> Any:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return attend(q, k, v, is_causal=causal)

        if what == "forward":
            return lambda: (forward().transpose(1, 2),)
        x = [t.detach().requires_grad_() for t in (q, k, v)]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = attend(*x, is_causal=causal)
        dout = dout.transpose(1, 2)
        return lambda: [
            g.transpose(1, 2) for g in torch.autograd.grad(out, x, dout, retain_graph=True)
        ]


def serve() -> None:
    """Answer requests, a line of JSON each: prepare, turn."""
    calls, ready = Calls(), {}
    for line in sys.stdin:
        what, *given = json.loads(line)
        answer: Any = None
        try:
            if what == "made":
                cell, kind, name = given
                if name == "clear":
                    ready.clear()
                else:
                    ready[name] = calls.made(tuple(cell), kind, name)
                    ready[name]()
                    torch.cuda.synchronize()
            elif what == "turn":
                import triton

                answer = triton.testing.do_bench(ready[given[0]], warmup=8, rep=40, return_mode="median")
            elif what == "check":
                answer = check(calls, *given)
        except Exception as error:
            answer = f"FAILED {error!r}"[:300]
        print("@" + json.dumps(answer), flush=True)


def check(calls: Calls, cell: Any, kind: str, name: str) -> str:
    """Compare a small call with float32 attention, and with bfloat16 attention's own error."""
    d, dv, n, causal = cell
    got = calls.made(tuple(cell), kind, name, 3, 2)()
    q, k, v, dout = calls.tensors(d, dv, n, 3, 2)

    def whole(dtype: Any) -> Any:
        x = [t.transpose(1, 2).to(dtype).detach().requires_grad_() for t in (q, k, v)]
        s = (x[0] @ x[1].transpose(2, 3)) * d**-0.5
        if causal:
            s = s.masked_fill(torch.ones(n, n, device="cuda", dtype=torch.bool).triu(1), -torch.inf)
        out = s.softmax(-1) @ x[2]
        if kind == "forward":
            return [out.transpose(1, 2)]
        g = torch.autograd.grad(out, x, dout.transpose(1, 2).to(dtype))
        return [y.transpose(1, 2) for y in g]

    texts = []
    for a, b, c in zip(got, whole(torch.float32), whole(torch.bfloat16)):
        ours, theirs = (a.float() - b).abs().max().item(), (c.float() - b).abs().max().item()
        texts.append(f"{ours:.2e}/{theirs:.2e}" + (" WRONG" if not ours <= 2 * theirs else ""))
    return " ".join(texts)


class Child:
    def __init__(self, root: str) -> None:
        env = {**os.environ, "PYTHONPATH": f"{root}/src:."}
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.head_sizes", "--serve"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)

    def ask(self, *given: Any) -> Any:
        self.send(*given)
        return self.answer()

    def send(self, *given: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(given) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        return "FAILED: the process has ended"


def names_of(cell: Any, what: str) -> list[str]:
    tiles = TILES if what == "forward" else BACKWARD_TILES
    return ["new", *(tiles.get(cell[:2], []) if cell[2] == 16384 else [])]


def cells_of(what: str) -> list[Any]:
    tiles = TILES if what == "forward" else BACKWARD_TILES
    more = [(128, 128, 16384, True), (64, 64, 16384, True)]
    return CELLS + [c for c in more if c[:2] in tiles]


def prepared(options: Any) -> dict[Any, str]:
    """Compile all kernels in many processes, and return the checks of small calls."""
    tasks = []
    for what in options.passes:
        for cell in cells_of(what):
            for name in names_of(cell, what):
                tasks.append((".", "made", cell, what, name))
                if cell[2] == 16384:
                    tasks.append((".", "check", (*cell[:2], 515, cell[3]), what, name))
            if options.old:
                tasks.append((options.old, "made", cell, what, "old"))
    pools = {root: [Child(root) for _ in range(n)] for root, n in ((".", 13), (options.old, 4)) if root}
    sent: list[Any] = []
    count = dict.fromkeys(pools, 0)
    for root, *task in tasks:
        child = pools[root][count[root] % len(pools[root])]
        count[root] += 1
        child.send(*task)
        sent.append((child, task))
    found = {}
    for child, task in sent:
        answer = child.answer()
        if task[0] == "check" or answer is not None:
            found[tuple(map(str, task))] = answer
    for child in (x for pool in pools.values() for x in pool):
        child.process.kill()
    return found


def measured(cell: Any, what: str, names: list[str], children: Any, turns: int) -> list[Any]:
    new, rows = children["new"], []
    owner = {name: children.get(name, new) for name in names}
    for child in children.values():
        child.ask("made", cell, what, "clear")
    for name in list(names):
        found = owner[name].ask("made", cell, what, name)
        if found is not None:
            print(cell, what, name, found, flush=True)
            names.remove(name)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns):
        for k in range(len(names)):
            name = names[(k + turn) % len(names)]
            time.sleep(0.05)
            ms = owner[name].ask("turn", name)
            if isinstance(ms, str):
                print(cell, name, ms, flush=True)
            else:
                times[name].append(ms)
    d, dv, n, causal = cell
    width = 2 * (d + dv) if what == "forward" else 2 * (3 * d + 2 * dv)
    flops = width * (2048 // d) * 16384 * n / (2 if causal else 1)
    base = statistics.median(times["cudnn"]) if times.get("cudnn") else float("nan")
    for name in filter(times.get, names):
        ms = statistics.median(times[name])
        row = {"cell": cell, "what": what, "name": name, "ms": round(ms, 4),
               "tflops": round(flops / ms / 1e9, 1), "over_cudnn": round(base / ms, 3)}  # fmt: skip
        rows.append(row)
        print(*row.values(), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--old")
    parser.add_argument("--passes", nargs="+", default=["forward"])
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=140)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    begin = time.perf_counter()
    checked = prepared(options)
    print(f"compiled and checked in {time.perf_counter() - begin:.0f} s", flush=True)
    for key, text in checked.items():
        print("check", *key, text, flush=True)
    new = Child(".")
    children = {"new": new} | ({"old": Child(options.old)} if options.old else {})
    rows: list[dict[str, Any]] = []
    for what in options.passes:
        for cell in cells_of(what):
            if time.perf_counter() - begin > options.seconds:
                print("stopped before", cell, what)
                break
            names = [*names_of(cell, what), "cudnn"] + (["old"] if options.old else [])
            rows += measured(cell, what, names, children, options.turns)
            print(f"{time.perf_counter() - begin:.0f} s", flush=True)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)


BACKWARD_TILES: dict[Any, list[str]] = {
    (96, 96): ["AHEAD=1", "DQ_STAGES=2", "AHEAD=1,DQ_STAGES=2"],
    (80, 80): ["HELD=1", "AHEAD=1", "HELD=1,DQ_STAGES=2"],
    (192, 128): [],
}

if __name__ == "__main__":
    main()
