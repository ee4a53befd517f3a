"""The Hopper backward beside what torch has, on the same tensors in one run.

    python benchmarks/hopper_backward.py --out results.csv [--flex] [--rounds 3] [--only TEXT]
        [--rested]
    python benchmarks/hopper_backward.py --tries [--only TEXT]

The 36 cells of ``hopper_forward.py``, then features; all that a backward launches is counted.
Every cell is timed in turns, of which the median is kept (``hopper_forward.measured``). FLOPs: 2.5
times the forward's; the bar of a cell is as there.
``--rested``: each turn begins with 15 ms of rest (``hopper_forward.rested``).
``--tries`` measures our own kernels with other tiles and options instead.
"""

from __future__ import annotations

import argparse
import csv
import datetime
from pathlib import Path

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import rowmax
from hopper_forward import LENGTHS, TOKENS, WIDTH, Bars, Run, measured, normal, rested, sustained
from rowmax.call.problem import Gradients, Options, Tensors, Wanted, problem_of
from rowmax.gpu import hopper
from rowmax.gpu.hopper import backward_host as host

WANTED = Wanted(True, True, True, False, False)
KINDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}


#: lengths of packed sequences; those that differ are of random cuts
PACKED = {
    "packed causal, 16 x 2048": [2048] * 16,
    "packed causal, 16 of 73 to 6306": [
        73, 1980, 328, 850, 361, 511, 375, 1682, 219, 1580, 1174, 5864, 2613, 5035, 6306, 3817,
    ],
}  # fmt: skip


#: keys of four sequences
SHORT = (2048, 1500, 1100, 600)
#: (tokens, heads, head size, the bias, keys of each sequence): of each pair, shared, of each key
BIASES = (
    (4096, 16, 128, (1, 16, 4096, 4096), (4096,)),
    (2048, 32, 64, (1, 32, 2048, 2048), (2048,) * 4),
    (2048, 16, 128, (1, 16, 2048, 2048), (2048,) * 4),
    (4096, 8, 256, (1, 8, 4096, 4096), (4096,)),
    (2048, 8, 256, (1, 8, 2048, 2048), (2048,) * 4),
    (2048, 16, 128, (4, 1, 1, 2048), (2048,) * 4),
    (2048, 32, 64, (1, 32, 2048, 2048), SHORT),
    (2048, 16, 128, (1, 16, 2048, 2048), SHORT),
)


def backward_of(out: torch.Tensor, leaves: tuple[torch.Tensor, ...]) -> Run:
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def ours(*tensors, function=rowmax.attention, modes=(False, True), **options) -> dict[str, Run]:
    """Both modes; a bias is a leaf as well."""
    leaves = [t.requires_grad_() for t in tensors if t.is_floating_point()]
    if "bias" in options:
        leaves.append(options["bias"].requires_grad_())
    runs = {}
    for deterministic in modes:
        out = function(*tensors, deterministic=deterministic, **options)
        name = "rowmax deterministic" if deterministic else "rowmax"
        runs[name] = backward_of(out, tuple(leaves))
    return runs


def of_torch(kind: SDPBackend, q, k, v, **options) -> Run:
    """The backward of a call in the layout that torch wants; fails when it is run."""
    leaves = tuple(t.detach().transpose(1, 2).requires_grad_() for t in (q, k, v))
    try:
        with sdpa_kernel(kind):
            return backward_of(scaled_dot_product_attention(*leaves, **options), leaves)
    except RuntimeError as error:
        text = str(error)

        def fails() -> None:
            raise RuntimeError(text)

        return fails


def of_flex(q, k, v, causal: bool, **options) -> Run:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n = q.shape[1]
    leaves = tuple(t.detach().transpose(1, 2).requires_grad_() for t in (q, k, v))
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n) if causal else None
    return backward_of(torch.compile(flex_attention)(*leaves, block_mask=mask, **options), leaves)


def plain_cells(flex: bool, only: str):
    for d in (64, 128, 256):
        for n in LENGTHS:
            for causal in (False, True):
                name = f"D{d} N{n} {'causal' if causal else 'full'}"
                if only not in name:
                    continue
                b, h = TOKENS // n, WIDTH // d
                q, k, v = (normal(b, n, h, d) for _ in range(3))
                runs = ours(q, k, v, causal=causal)
                for other, kind in KINDS.items():
                    runs[other] = of_torch(kind, q, k, v, is_causal=causal)
                if flex:
                    runs["flex"] = of_flex(q, k, v, causal)
                yield name, runs, 10 * b * h * n * n * d / (2 if causal else 1)


def feature_cells(only: str):
    n, d = 16384, 128

    def grouped(name: str, flops: float, **options):
        if only in name:
            q, k, v = normal(1, n, 32, d), normal(1, n, 8, d), normal(1, n, 8, d)
            yield name, ours(q, k, v, **options), flops

    half = 10 * 32 * n * n * d / 2
    pairs = 1024 * n - 1024 * 1023 // 2 + n
    window = rowmax.Window(left=1024, right=0)
    yield from grouped("GQA 32/8 causal N16384", half, causal=True)
    yield from grouped("GQA 32/8 causal N16384, softcap 30", half, causal=True, softcap=30.0)
    yield from grouped("GQA 32/8 N16384, window 1024", 10 * 32 * pairs * d, mask=window)
    for name, lengths in PACKED.items():
        if only not in name:
            continue
        q, k, v = (normal(32768, 16, d) for _ in range(3))
        cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()

        offsets = (cu, cu, max(lengths), max(lengths))

        def packed(q, k, v, offsets=offsets, **options):
            return rowmax.attention_varlen(q, k, v, *offsets, causal=True, **options)

        flops = 10 * 16 * sum(n * n for n in lengths) * d / 2
        yield name, ours(q, k, v, function=packed), flops
    for n, h, d, shape, lengths in BIASES:
        b, least = len(lengths), min(lengths)
        short = f", {least} to {n} keys" if least < n else ""
        name = f"bias and dbias {shape}, B{b} D{d}{short}"
        if only not in name:
            continue
        q, k, v = (normal(b, n, h, d) for _ in range(3))
        bias = normal(*shape)
        if short:
            mask = rowmax.PrefixLengths(torch.tensor(lengths, device="cuda"))
            runs = ours(q, k, v, bias=bias, mask=mask)
            plain = ours(q, k, v, bias=bias, mask=mask, modes=(False,), backend="triton")
            runs["rowmax triton"] = plain["rowmax"]
        else:
            runs = ours(q, k, v, bias=bias)
            # without the gradient of the bias, which it does not have
            cudnn = SDPBackend.CUDNN_ATTENTION
            runs["cudnn"] = of_torch(cudnn, q, k, v, attn_mask=bias.detach())
        yield name, runs, 10 * h * n * sum(lengths) * d


#: by head size: (tiles, options) of what may be faster
TRIES = {
    64: {
        "as it is": (None, {}),
        "not held": (None, {"HELD": False}),
        "in order": (None, {"ORDERED": True, "FRESH": True}),
    },
    128: {
        "as it is": (None, {}),
        "as it comes": (None, {"ORDERED": False, "FRESH": False}),
        "in order": (None, {"ORDERED": True, "FRESH": True}),
    },
    256: {
        "as it is": (None, {}),
        "two of Q": (None, {"Q_STAGES": 2, "ALONE": False}),
    },
}


def tries(only: str):
    for d, options in TRIES.items():
        for n in (512, 4096, 16384):
            for causal in (False, True):
                name = f"D{d} N{n} {'causal' if causal else 'full'}"
                if only not in name:
                    continue
                b, h = TOKENS // n, WIDTH // d
                q, k, v, dout = (normal(b, n, h, d) for _ in range(4))
                tensors = Tensors(q, k, v)
                problem = problem_of(tensors, Options(d**-0.5, right=0 if causal else None))
                out, lse = hopper.forward(problem, tensors)
                given = (problem, tensors, out, lse, dout, None, WANTED)
                runs = {}
                for label, (tiles, more) in options.items():
                    plan = host.build_plan(problem, tensors, dout, tiles, **more)
                    runs[label] = lambda plan=plan, given=given: host.launch(plan, *given)
                plan = host.build_plan(problem, tensors, dout)
                made = Gradients(*(torch.empty_like(t) for t in (q, k, v)))
                args = (problem, tensors, (out, lse, dout, None), WANTED, made)
                runs["rows before"] = lambda p=plan, a=args: host.prepare(p, *a)
                t, _ = host.prepare(plan, *args)  # then without the passes before and after
                more = (problem, tensors, dout, t, made)
                for n, work in enumerate(plan.works):
                    name_ = f"{type(work.config).__name__} alone"
                    runs[name_] = lambda w=work, a=(*more, n): host.run(w, *a)
                yield name, runs, 10 * b * h * n * n * d / (2 if causal else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("hopper_backward.csv"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flex", action="store_true")
    parser.add_argument("--tries", action="store_true")
    parser.add_argument("--rested", action="store_true", help="after 15 ms of rest")
    parser.add_argument("--only", default="", help="cells whose name has this in it")
    options = parser.parse_args()
    timer = rested if options.rested else sustained
    versions = f"torch {torch.__version__} triton {triton.__version__}"
    a = normal(8192, 8192)
    ceiling = measured({"matmul": lambda: a @ a}, 2 * 8192**3, options.rounds)["matmul"]
    with options.out.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["case", "implementation", "tflops", "device", "versions", "date"])
        about = [torch.cuda.get_device_name(), versions, datetime.date.today().isoformat()]
        rows.writerow(["matmul 8192", "cublas", f"{ceiling:.0f}", *about])
        print(f"{about}, matmul {ceiling:.0f} TFLOP/s")
        every, bars = (tries(options.only),), Bars("backward")
        if not options.tries:
            every = (plain_cells(options.flex, options.only), feature_cells(options.only))
        for cells in every:
            for name, runs, flops in cells:
                speeds = measured(runs, flops, options.rounds, timer)
                ratio = bars.ratio(name, speeds) if "fa2" in speeds else ""
                print(f"{name:40}", *(f"{n} {x:.0f}" for n, x in speeds.items()), ratio, flush=True)
                for n, x in speeds.items():
                    rows.writerow([name, n, f"{x:.0f}", *about])
                file.flush()
        if bars.ratios:
            print(bars.mean())


if __name__ == "__main__":
    main()
