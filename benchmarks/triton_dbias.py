"""The Triton kernel of a bias's gradient summed over the batch or the heads, with several tiles.

    python benchmarks/triton_dbias.py [TILES...] [--d 64 128] [--bias 1hqk b1qk] [--case full]

bfloat16, 4 sequences of 4096, H * D = 2048; TILES are BLOCK_Q,BLOCK_K,warps,stages, beside those
that a call takes. Tiles take turns on the device. TFLOP/s count the two products that the kernel
makes, causal half; "off" is the largest difference from the first tiles' result, in units of its
largest number.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import product

import torch
import triton
from triton.runtime.errors import OutOfResources

from rowmax.call.problem import Options, Tensors, problem_of
from rowmax.gpu.triton.backward_dbias import DBIAS
from rowmax.gpu.triton.kernel_args import Pointers
from rowmax.gpu.triton.launch import build_job
from rowmax.gpu.triton.preprocess import padded_rows
from rowmax.gpu.triton.tiles import Tiles, tiles_for

WIDTH = 2048
TRIED = {
    64: "128,128,8,3 128,128,8,2 128,128,16,3 128,64,8,3 64,128,4,2 64,64,4,3",
    128: "128,128,8,3 128,128,8,2 128,128,16,3 128,64,8,3 64,128,4,2 64,64,4,3",
}


def tiles_of(text: str) -> Tiles:
    return Tiles(*map(int, text.split(",")))


def measure(d: int, pattern: str, causal: bool, options: argparse.Namespace) -> None:
    b, n, h = options.batch, options.n, WIDTH // d
    shape = (b, n, h, d)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    sizes = {"b": b, "h": h, "q": n, "k": n, "1": 1}
    bias = torch.randn([sizes[x] for x in pattern], device="cuda", dtype=torch.bfloat16)
    tensors = Tensors(q, k, v, bias)
    problem = problem_of(tensors, Options(scale=d**-0.5, right=0 if causal else None))
    rows = q.new_empty(padded_rows(problem), dtype=torch.float32)
    t = Pointers(
        *tensors,
        dout=dout,
        lse2=torch.full_like(rows, 13.0),
        rest=torch.zeros_like(rows),
        delta=torch.zeros_like(rows),
    )
    shipped = tiles_for("dbias", problem, q.device)
    every = [shipped, *map(tiles_of, options.tiles or TRIED[d].split())]
    jobs, results = {}, {}
    for tiles in dict.fromkeys(every):
        job = build_job(DBIAS, problem, tensors, tiles, dout)
        to = t._replace(dbias=torch.empty_like(bias))
        try:
            job.run(to)
        except OutOfResources:
            print(f"    {tiles} does not fit")
            continue
        torch.cuda.synchronize()
        jobs[tiles], results[tiles] = (lambda job=job, to=to: job.run(to)), to.dbias.float()
    times: dict[Tiles, list[float]] = {tiles: [] for tiles in jobs}
    for _ in range(options.rounds):
        for tiles, run in jobs.items():
            times[tiles].append(triton.testing.do_bench(run, 20, 100, return_mode="median"))
    first = next(iter(results.values()))
    print(f"D{d} {'causal' if causal else 'full'} bias {pattern}, B {b}, N {n}, H {h}")
    for tiles in jobs:
        ms = statistics.median(times[tiles])
        speed = 4e-9 * b * h * n * n * d * (0.5 if causal else 1.0) / ms
        off = ((results[tiles] - first).abs().max() / first.abs().max()).item()
        shape = f"{tiles.block_q},{tiles.block_k},{tiles.warps},{tiles.stages}"
        note = " (shipped)" if tiles == shipped else ""
        print(f"    {shape:16} {ms:8.3f} ms {speed:5.0f} TFLOP/s, off {off:.1e}{note}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # pyright: ignore
    parser.add_argument("tiles", nargs="*")
    parser.add_argument("--d", type=int, nargs="+", default=[64, 128], choices=list(TRIED))
    parser.add_argument("--bias", nargs="+", default=["1hqk", "b1qk"])
    parser.add_argument("--case", nargs="+", default=["full", "causal"])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for d, pattern, case in product(options.d, options.bias, options.case):
        measure(d, pattern, case == "causal", options)


if __name__ == "__main__":
    main()
