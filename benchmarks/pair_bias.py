"""Time attention with a pair bias, and a Pairformer block, against peers.

    python -m benchmarks.pair_bias --out pair_bias.csv     (a GPU, about ten minutes)
    python -m benchmarks.pair_bias --quick --out quick.csv (any machine, under a minute)

Attention: S rows of S positions, 4 heads of 32, bias [1, 1, 4, S, S], forward alone and forward
with backward, including the gradient of the bias. Providers take turns, in an order that rotates;
a figure is the median of the turns.

    rowmax           triangle_attention(mask=), a boolean mask
    rowmax-lengths   triangle_attention(kv_lengths=)
    cuequivariance   the same call of cuequivariance_torch, where it is installed
    sdpa             torch's attention with attn_mask = bias, plus the mask where there is one

Block: one Pairformer block of examples/pairformer.py at z [1, 384, 384, 128] and s [1, 384, 384],
forward and backward, in bfloat16. AlphaFold 3 has 48 of them: the column ``ms_48`` is 48 times the
median. The share of attention is 1 - t(none) / t, where "none" returns v instead of attention.
"""

from __future__ import annotations

import argparse
import csv
import gc
import statistics
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from examples.pairformer import PairformerBlock
from rowmax.bench.timing import facts, milliseconds
from rowmax.integrations import pair_bias

HEADS, D = 4, 32
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Cell(NamedTuple):
    """The sizes and dtypes of a measurement."""

    s: int
    dtype: str
    bias: str  # its dtype
    masked: bool
    backward: bool


class Inputs(NamedTuple):
    """The tensors of a cell, in cuEquivariance's layout."""

    q: Tensor  # [1, S, H, S, D]
    k: Tensor
    v: Tensor
    bias: Tensor  # [1, 1, H, S, S]
    mask: Tensor | None  # [1, S, 1, 1, S]
    lengths: Tensor | None  # [1, S, 1, 1, 1]
    dout: Tensor


Attend = Callable[[Inputs], Tensor]


def inputs(cell: Cell, device: str) -> Inputs:
    """Return random inputs; with a mask a quarter of the keys, at the end, is padding."""
    torch.manual_seed(0)
    s, dtype = cell.s, DTYPES[cell.dtype]
    # q, k and v as a projection [1, S, S, H, D] gives them; cuEquivariance copies what it needs
    rows = [torch.randn(1, s, s, HEADS, D, device=device, dtype=dtype) for _ in range(4)]
    q, k, v, dout = (t.transpose(2, 3) for t in rows)
    bias = torch.randn(1, 1, HEADS, s, s, device=device).to(DTYPES[cell.bias])
    for t in (q, k, v, bias):
        t.requires_grad_(cell.backward)
    if not cell.masked:
        return Inputs(q, k, v, bias, None, None, dout)
    used = s - s // 4
    mask = (torch.arange(s, device=device) < used).expand(1, s, 1, 1, s).contiguous()
    lengths = torch.full((1, s, 1, 1, 1), used, device=device, dtype=torch.int32)
    return Inputs(q, k, v, bias, mask, lengths, dout)


def of_rowmax(x: Inputs) -> Tensor:
    """Return rowmax's attention of a mask."""
    return pair_bias.triangle_attention(x.q, x.k, x.v, x.bias, x.mask)


def of_lengths(x: Inputs) -> Tensor:
    """Return rowmax's attention of lengths."""
    return pair_bias.triangle_attention(x.q, x.k, x.v, x.bias, kv_lengths=x.lengths)


def of_sdpa(x: Inputs) -> Tensor:
    """Return torch's attention; the sum of bias and mask has a score of each row."""
    bias = x.bias[0].to(x.q.dtype)
    if x.mask is None:
        bias = bias.expand(x.q.shape[1], -1, -1, -1)
    else:
        bias = bias.masked_fill(~x.mask[0], -torch.inf)
    return scaled_dot_product_attention(x.q[0], x.k[0], x.v[0], attn_mask=bias)[None]


@cache
def providers() -> dict[str, Attend]:
    """Return the providers that are installed, by name."""
    found = {"rowmax": of_rowmax, "rowmax-lengths": of_lengths, "sdpa": of_sdpa}
    try:
        import cuequivariance_ops_torch  # noqa: F401
        from cuequivariance_torch import triangle_attention
    except Exception as error:  # a wrong CUDA raises OSError
        print(f"cuequivariance is skipped: {type(error).__name__}: {error}")
        return found

    def of_cuequivariance(x: Inputs) -> Tensor:
        return triangle_attention(x.q, x.k, x.v, x.bias, x.mask)

    return found | {"cuequivariance": of_cuequivariance}


def prepared(attend: Attend, x: Inputs) -> Callable[[], Any]:
    """Return the call that is timed."""
    if not x.q.requires_grad:
        return lambda: attend(x)
    return lambda: torch.autograd.grad(attend(x), (x.q, x.k, x.v, x.bias), x.dout)


def in_turns(
    calls: dict[str, Callable[[], Any]], device: str, turns: int, seconds: float
) -> dict[str, float | str]:
    """Return each call's median of turns in ms, or the error it raised."""
    found: dict[str, Any] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if isinstance(found[name], str):
                continue
            try:
                found[name].append(milliseconds(calls[name], device, True, seconds))
            except (RuntimeError, NotImplementedError, ValueError) as error:
                found[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            gc.collect()
    return {n: t if isinstance(t, str) else statistics.median(t) for n, t in found.items()}


def difference(attend: Attend, x: Inputs) -> float | None:
    """Return norm(out - want) / norm(want), with rowmax's result in float32 as want."""
    with torch.no_grad():
        try:
            out = attend(x).float()
        except (RuntimeError, NotImplementedError, ValueError):
            return None
        q, k, v, bias = (t.float() for t in x[:4])
        want = pair_bias.triangle_attention(q, k, v, bias, x.mask)
    return float((out - want).norm() / want.norm())


def measure_attention(cell: Cell, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each provider."""
    x = inputs(cell, given.device)
    each = {
        name: attend
        for name, attend in providers().items()
        if cell.masked or name != "rowmax-lengths"
    }
    calls = {name: prepared(attend, x) for name, attend in each.items()}
    times = in_turns(calls, given.device, given.turns, given.seconds)
    about = {
        "what": "attention",
        "s": cell.s,
        "dtype": cell.dtype,
        "bias": cell.bias,
        "mask": "padded" if cell.masked else "none",
        "pass": "forward+backward" if cell.backward else "forward",
    }
    return [
        about | {"provider": name} | timed(time) | {"difference": difference(each[name], x)}
        for name, time in times.items()
    ]


def timed(time: float | str) -> dict[str, Any]:
    """Return the columns of a time, or of an error."""
    return {"ms": None, "error": time} if isinstance(time, str) else {"ms": time, "error": None}


class _Nothing(torch.autograd.Function):
    """Return v, with gradients for q, k and the bias too: the layers around them run as usual."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        ctx.shape = bias.shape
        return v.view_as(v)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore
        return dout, dout, dout, dout.new_zeros(ctx.shape)


def none(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """Return v instead of attention."""
    return _Nothing.apply(q, k, v, bias)  # pyright: ignore


def none_single(s: Tensor, z: Tensor, mask: Tensor, heads: int, **weights: Any) -> tuple[Tensor]:
    """Return s: the single attention is left out, too."""
    return (s,)


def measure_block(size: int, dtype: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each attention of a block, with the share of attention."""
    c = 32 if given.quick else 128
    device = given.device

    def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        return of_sdpa(Inputs(q, k, v, bias, mask, None, v))

    kinds: dict[str, dict[str, Any]] = {"rowmax": {}, "sdpa": {"attend": sdpa}}
    kinds["none"] = {"attend": none, "single": none_single}
    if "cuequivariance" in providers():
        from cuequivariance_torch import triangle_attention

        kinds["cuequivariance"] = {"attend": triangle_attention}
    of = {"device": device, "dtype": DTYPES[dtype]}
    s, z = torch.randn(1, size, 3 * c, **of), torch.randn(1, size, size, c, **of)
    mask = torch.ones(1, size, device=device, dtype=torch.bool)

    def step(block: PairformerBlock) -> Callable[[], Any]:
        leaves = [s.clone().requires_grad_(), z.clone().requires_grad_(), *block.parameters()]

        def call() -> Any:
            a, b = block(*leaves[:2], mask)
            loss = a.float().square().mean() + b.float().square().mean()
            return torch.autograd.grad(loss, leaves, allow_unused=True)

        return call

    blocks = {n: PairformerBlock(3 * c, c, HEADS, **more).to(**of) for n, more in kinds.items()}
    calls = {name: step(block) for name, block in blocks.items()}
    times = in_turns(calls, device, given.turns, given.seconds)
    about = {"what": f"block {c}", "s": size, "dtype": dtype, "bias": dtype, "mask": "full"}
    rows = []
    for name, time in times.items():
        row = about | {"pass": "forward+backward", "provider": name} | timed(time)
        if not isinstance(time, str):
            row["ms_48"] = 48 * time
            if not isinstance(times["none"], str):
                row["attention_share"] = 1 - times["none"] / time
        rows.append(row)
    return rows


COLUMNS = ["what", "s", "dtype", "bias", "mask", "pass", "provider", "ms", "ms_48"]
COLUMNS += ["attention_share", "difference", "error"]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print each row, and write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("pair_bias.csv"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, in float32 on a CPU")
    parser.add_argument("--turns", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=None, help="of one turn")
    parser.add_argument("--sizes", type=int, nargs="*", default=None, help="none: the block alone")
    given = parser.parse_args(arguments)
    given.turns = given.turns or (2 if given.quick else 5)
    given.seconds = given.seconds or (0.001 if given.quick else 0.2)
    sizes = given.sizes
    if sizes is None:
        sizes = [16, 24] if given.quick else [256, 384, 512]
    dtype = "float32" if given.quick and given.device == "cpu" else "bfloat16"
    cells = [
        Cell(s, dtype, bias, masked, backward)
        for s, bias, masked, backward in product(
            sizes, dict.fromkeys(("float32", dtype)), (False, True), (False, True)
        )
    ]
    known = facts(given.device)
    with given.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, *known])
        writer.writeheader()

        def write(rows: list[dict[str, Any]]) -> None:
            for row in rows:
                writer.writerow(row | known)
                print("  ".join(f"{row[n]:.4g}" if isinstance(row[n], float) else str(row[n])
                                for n in COLUMNS if row.get(n) is not None))  # fmt: skip
            file.flush()

        for cell in cells:
            write(measure_attention(cell, given))
        write(measure_block(24 if given.quick else 384, dtype, given))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
