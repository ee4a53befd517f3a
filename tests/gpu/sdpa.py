"""Check ``rowmax.integrations.sdpa`` on a GPU; print a line for each check.

    python -m tests.gpu.sdpa
    python -m tests.gpu.sdpa --calls 40 --only compile,varlen
    python -m tests.gpu.sdpa --device cpu --calls 5

Ends with 1 if a check fails. The calls are those of ``tests/integrations/sdpa_cases.py``.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import mha
from torch.nn import attention as torch_attention
from torch.nn.attention import varlen as torch_varlen
from torch.utils.checkpoint import checkpoint

from rowmax.integrations import sdpa
from rowmax.integrations.sdpa import dense
from tests.integrations.sdpa_cases import Block, counted, draw, make, wrong, wrong_varlen

THEIRS = F.scaled_dot_product_attention
THEIR_VARLEN = torch_varlen.varlen_attn
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}

#: returns what is wrong; an error is wrong, too
Check = Callable[[], list[str]]


def enabled_sdpa(*args: Any, **keywords: Any) -> Tensor:
    """Compute torch's function as a user calls it."""
    return F.scaled_dot_product_attention(*args, **keywords)


def enabled_varlen(*args: Any, **keywords: Any) -> Any:
    return torch_varlen.varlen_attn(*args, **keywords)


def differs(name: str, got: Tensor, want: Tensor, allowed: float) -> list[str]:
    """Return a sentence if two tensors differ by more than a part of the largest number."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return [f"{name}: {got.dtype} {list(got.shape)}, want {want.dtype} {list(want.shape)}"]
    error = (got.double() - want.double()).abs().max().item()
    size = want.double().abs().max().item()
    return (
        [] if error <= allowed * max(size, 1e-3) else [f"{name}: off by {error:.3g} of {size:.3g}"]
    )


def counts(calls: list[str], want: list[str]) -> list[str]:
    return [] if calls == want else [f"rowmax computed {calls}, want {want}"]


class Checks:
    """The checks of a device."""

    def __init__(self, device: str, calls: int) -> None:
        self.device, self.calls = device, calls

    def tensors(self, *sizes: int, dtype: torch.dtype = torch.bfloat16, n: int = 3) -> list[Tensor]:
        rng = torch.Generator().manual_seed(0)
        made = (torch.randn(sizes, generator=rng).to(self.device, dtype) for _ in range(n))
        return [t.requires_grad_() for t in made]

    def all(self) -> dict[str, Check]:
        """Return the checks by name."""
        found: dict[str, Check] = {}
        for name, dtype in NAMES.items():
            found[f"random {name}"] = lambda dtype=dtype: self.random(dtype)
            found[f"varlen {name}"] = lambda dtype=dtype: self.varlen(dtype)
            found[f"modules {name}"] = lambda dtype=dtype: self.modules(dtype)
            found[f"compile {name}"] = lambda dtype=dtype: self.compile(dtype)
        found["dynamic"] = self.dynamic
        found["causal alignment"] = self.alignment
        found["empty rows"] = self.empty_rows
        found["dropout"] = self.dropout
        found["autocast"] = self.autocast
        found["falls through"] = self.falls_through
        found["registry"] = self.registry
        found["restored"] = self.restored
        if self.device == "cuda":
            found["varlen against torch"] = self.varlen_against_torch
            found["CUDA graph"] = self.cuda_graph
        return found

    def random(self, dtype: torch.dtype) -> list[str]:
        texts = []
        for seed in range(self.calls):
            drawn = draw(seed, (dtype,), longest=150, most_d=128)
            call = make(drawn, self.device)
            with sdpa.enable(), counted() as calls:
                found = wrong(call, enabled_sdpa)
            found += counts(calls, ["forward", "backward"])
            texts += [f"{text} of {drawn}" for text in found]
        return texts

    def varlen(self, dtype: torch.dtype) -> list[str]:
        texts = []
        for seed in range(self.calls):
            with sdpa.enable(), counted() as calls:
                found = wrong_varlen(seed, dtype, self.device, enabled_varlen, longest=150)
            texts += [f"{t} of seed {seed}" for t in found + counts(calls, ["forward", "backward"])]
        return texts

    def varlen_against_torch(self) -> list[str]:
        q, k, v = self.tensors(300, 4, 64)
        cu = torch.tensor([0, 100, 129, 300], dtype=torch.int32, device=self.device)
        found = []
        for window in ((-1, -1), (-1, 0), (16, 0)):
            given = (q, k, v, cu, cu, 171, 171)
            want = THEIR_VARLEN(*given, window_size=window)
            with sdpa.enable():
                got = enabled_varlen(*given, window_size=window)
            found += differs(f"out {window}", got, want, 0.02)
            gradients = (torch.autograd.grad(x, (q, k, v), torch.ones_like(x)) for x in (got, want))
            for name, a, b in zip("qkv", *gradients, strict=True):
                found += differs(f"d{name} {window}", a, b, 0.03)
        return found

    def modules(self, dtype: torch.dtype) -> list[str]:
        """Compare MultiheadAttention and an encoder with float64, in both modes."""
        found = []
        allowed = 1e-4 if dtype == torch.float32 else 0.05
        x = self.tensors(3, 70, 128, dtype=dtype, n=1)[0].detach()
        causal = nn.Transformer.generate_square_subsequent_mask(70, device=self.device)
        padding = torch.arange(70, device=self.device) >= torch.tensor(
            [[70], [40], [9]], device=self.device
        )
        plain = nn.MultiheadAttention(128, 4, batch_first=True, device=self.device, dtype=dtype)
        layer = nn.TransformerEncoderLayer(
            128, 4, 256, 0.0, batch_first=True, device=self.device, dtype=dtype
        )
        given = {
            "plain": {},
            "causal": {"attn_mask": causal.to(dtype), "is_causal": True},
            "padding": {"key_padding_mask": padding},
            "mask": {"attn_mask": (causal != 0), "key_padding_mask": padding},
        }
        for train in (True, False):
            for name, keywords in given.items():

                def run(module: nn.Module, x: Tensor, keywords: Any = keywords) -> list[Tensor]:
                    x = x.detach().requires_grad_()
                    wide = {
                        n: m.to(x.dtype) if isinstance(m, Tensor) and m.is_floating_point() else m
                        for n, m in keywords.items()
                    }
                    out = module(x, x, x, need_weights=False, **wide)[0]
                    return [out, *torch.autograd.grad(out.square().sum(), x)]

                want = run(copy.deepcopy(plain).double().train(train), x.double())
                with sdpa.enable(), counted() as calls:
                    got = run(plain.train(train), x)
                found += counts(calls, ["forward", "backward"])
                for part, a, b in zip(("out", "dx"), got, want, strict=True):
                    found += differs(f"{name} {part}", a, b.to(dtype), allowed)
            with torch.set_grad_enabled(train):
                want = copy.deepcopy(layer).double().train(train)(x.double())
                with sdpa.enable(), counted() as calls:
                    got = layer.train(train)(x)
            found += counts(calls, ["forward"]) + differs("layer", got, want.to(dtype), allowed)
        return found

    def compile(self, dtype: torch.dtype) -> list[str]:
        """Compile with Inductor without breaks, and turn the switch between the calls."""
        found = []
        block = Block().to(self.device, dtype)
        x = self.tensors(2, 96, 32, dtype=dtype, n=1)[0]
        bias = self.tensors(96, 96, dtype=dtype, n=1)[0]
        allowed = 1e-3 if dtype == torch.float32 else 0.06
        for mask in (None, bias):
            torch._dynamo.reset()
            leaves = [x, *block.parameters(), *([] if mask is None else [mask])]
            compiled = torch.compile(block, fullgraph=True)
            want = torch.autograd.grad(block(x, mask).square().sum(), leaves)
            for n, on in enumerate((False, True, False, True)):
                if n == 2:
                    torch._dynamo.reset()
                if on:
                    sdpa.enable()
                with counted() as calls:
                    got = torch.autograd.grad(compiled(x, mask).square().sum(), leaves)
                sdpa.disable()
                found += counts(calls, ["forward", "forward", "backward", "backward"] * on)
                for a, b in zip(got, want, strict=True):
                    found += differs(f"a gradient, {on=}", a, b, allowed)
        return found

    def dynamic(self) -> list[str]:
        """Compile one graph for all lengths."""
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
        compiled = torch.compile(
            lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True),
            backend=counter, fullgraph=True, dynamic=True,
        )  # fmt: skip
        found, frames = [], []
        with sdpa.enable():
            for nq, nk in ((40, 90), (70, 50), (33, 111)):
                q, k = self.tensors(2, 3, nq, 64, n=1)[0], self.tensors(2, 3, nk, 64, n=1)[0]
                found += differs("out", compiled(q, k), THEIRS(q, k, k, is_causal=True), 0.02)
                frames.append(counter.frame_count)
        return found + ([] if frames[0] == frames[-1] else [f"graphs: {frames}"])

    def alignment(self) -> list[str]:
        found = []
        for nq, nk in ((64, 64), (40, 90), (90, 40)):
            q, k, v = (self.tensors(2, 3, n, 64, n=1)[0] for n in (nq, nk, nk))
            want = THEIRS(*(t.double() for t in (q, k, v)), is_causal=True).to(q.dtype)
            with sdpa.enable():
                got = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            found += differs(f"{nq} queries, {nk} keys", got, want, 0.02)
            if not got.transpose(1, 2).is_contiguous():
                found.append(f"strides {got.stride()}")
        return found

    def empty_rows(self) -> list[str]:
        q, k, v = self.tensors(2, 3, 40, 64)
        seen = torch.ones(40, 40, dtype=torch.bool, device=self.device)
        seen[7] = False
        found = []
        added = torch.zeros(40, 40, device=self.device, dtype=q.dtype)
        for mask in (seen, added.masked_fill(~seen, -torch.inf)):
            with sdpa.enable():
                out = F.scaled_dot_product_attention(q, k, v, mask)
            (dq,) = torch.autograd.grad(out.sum(), q)
            if out[:, :, 7].any() or dq[:, :, 7].any() or not dq.isfinite().all():
                found.append(f"{mask.dtype}: a row without keys is not zero")
        return found

    def dropout(self) -> list[str]:
        q, k, v = (t.detach() for t in self.tensors(4, 4, 128, 64))
        found = []
        with sdpa.enable():
            v = torch.eye(128, device=self.device, dtype=q.dtype).expand(4, 4, 128, 128)
            weights = F.scaled_dot_product_attention(q * 0, k, v, dropout_p=0.25)
            share = (weights != 0).double().mean().item()
            if abs(share - 0.75) > 0.005 or abs(weights.double().sum(-1).mean().item() - 1) > 0.01:
                found.append(f"keeps {share:.4f}, want 0.75")
            results = []
            for repeated in (False, True):
                torch.manual_seed(4)
                x = k.detach().requires_grad_()

                def run(x: Tensor) -> Tensor:
                    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5).square().sum()

                y = checkpoint(run, x, use_reentrant=False) if repeated else run(x)
                results += torch.autograd.grad(y, x)  # pyright: ignore
        return found + differs("a checkpoint's gradient", results[1], results[0], 1e-2)

    def autocast(self) -> list[str]:
        q, k, v = self.tensors(2, 3, 64, 64, dtype=torch.float32)
        with torch.autocast(self.device, torch.bfloat16):
            want = THEIRS(q, k, v)
            with sdpa.enable(), counted() as calls:
                got = F.scaled_dot_product_attention(q, k, v)
        return counts(calls, ["forward"]) + differs("out", got, want, 0.02)

    def falls_through(self) -> list[str]:
        found = []
        wide = self.tensors(1, 2, 8, 520)
        (q, _, _), (one, _, _) = self.tensors(2, 3, 8, 64), self.tensors(1, 3, 8, 64)
        for name, given in {"head size": wide, "broadcast batch": [q, one, one]}.items():
            with sdpa.enable(), counted() as calls:
                got = F.scaled_dot_product_attention(*given)
            found += counts(calls, []) + differs(name, got, THEIRS(*given), 1e-6)
            if sdpa.explain(*given).by != "torch":
                found.append(f"{name}: explain says rowmax")
        parts = [t.detach() for t in self.tensors(9, 2, 64, n=2)]
        jagged = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
        with sdpa.enable(), counted() as calls:
            got = F.scaled_dot_product_attention(jagged, jagged, jagged)
        found += counts(calls, [])
        return found + ([] if got.is_nested else ["nested: the result is dense"])

    def registry(self) -> list[str]:
        q, k, v = self.tensors(2, 3, 64, 64)
        torch_attention.activate_flash_attention_impl("rowmax")
        with counted() as calls:
            F.scaled_dot_product_attention(q, k, v)
        found = counts(calls, ["forward"])
        torch_attention.restore_flash_attention_impl()
        return found + ([] if F.scaled_dot_product_attention is THEIRS else ["not restored"])

    def restored(self) -> list[str]:
        q, k, v = self.tensors(2, 3, 64, 64)
        before = F.scaled_dot_product_attention(q, k, v)
        sdpa.enable()
        F.scaled_dot_product_attention(q, k, v)
        sdpa.disable()
        with counted() as calls:
            after = F.scaled_dot_product_attention(q, k, v)
        found = counts(calls, []) + ([] if before.equal(after) else ["torch's result changed"])
        if F.scaled_dot_product_attention is not THEIRS or not mha.get_fastpath_enabled():
            found.append("a function or the fast path is not restored")
        return found + ([] if torch_varlen.varlen_attn is THEIR_VARLEN else ["varlen_attn is not"])

    def cuda_graph(self) -> list[str]:
        q, k, v = (t.detach() for t in self.tensors(2, 4, 128, 64))
        with sdpa.enable():
            for _ in range(3):
                F.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            q.copy_(q.roll(1, 2))
            graph.replay()
            torch.cuda.synchronize()
            want = dense.scaled_dot_product_attention(q, k, v, is_causal=True)
        return [] if out.equal(want) else differs("out", out, want, 1e-3) or ["not equal"]

    def host_times(self) -> str:
        """Return the microseconds that the host spends on a small call."""
        q, k, v = (t.detach() for t in self.tensors(1, 4, 16, 64))

        def best() -> float:
            times = []
            for _ in range(20):
                begin = time.perf_counter()
                for _ in range(50):
                    F.scaled_dot_product_attention(q, k, v)
                times.append((time.perf_counter() - begin) / 50)
                if self.device == "cuda":
                    torch.cuda.synchronize()
            return 1e6 * min(times)

        torchs = best()
        with sdpa.enable():
            return f"torch {torchs:.1f} us, rowmax {best():.1f} us"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--calls", type=int, default=25, help="random calls of each dtype")
    parser.add_argument("--only", default="", help="texts, with commas; names have one of them")
    given = parser.parse_args(words)
    warnings.simplefilter("ignore")
    checks, bad, ran = Checks(given.device, given.calls), 0, 0
    for name, check in checks.all().items():
        if not any(text in name for text in given.only.split(",")):
            continue
        begin = time.time()
        try:
            found = check()
        except Exception:
            found = [traceback.format_exc(limit=-4)]
        finally:
            sdpa.disable()
        ran, bad = ran + 1, bad + bool(found)
        print(f"{'WRONG' if found else 'right'} {name} ({time.time() - begin:.1f} s)", flush=True)
        for text in found[:5]:
            print(f"    {text}", flush=True)
    print(f"host time of a small call: {checks.host_times()}")
    print(f"{ran} checks, {bad} wrong")
    return int(bad > 0 or ran == 0)


if __name__ == "__main__":
    sys.exit(main())
