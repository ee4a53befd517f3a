"""Checks that the table of cases cannot make: sizes past 2^31, graphs, streams, NaN under masks.

Each function returns what is wrong with a backend on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import rowmax

#: checks that each need most of a GPU's memory
LARGE = ("more_elements_than_31_bits", "bias_of_more_elements_than_31_bits", "linear_memory")
#: the other checks, slow ones first
SMALL = (
    "cuda_graph",
    "cuda_graph_of_tangents",
    "offsets_out_of_range",
    "scores_that_rise",
    "unseen_nan",
    "padding_after_the_last_sequence",
    "float32_is_not_tf32",
    "another_stream",
)
ON_CPU = ("unseen_nan", "padding_after_the_last_sequence", "float32_is_not_tf32")


def _normal(
    *shape: int, device: str = "cuda", seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)


def _far(name: str, got: Tensor, want: Tensor, limit: float = 5e-3) -> list[str]:
    off = ((got.double() - want.double()).norm() / want.double().norm()).item()
    return [] if off <= limit else [f"{name}: relative error {off:.3g}, allowed {limit:.3g}"]


def more_elements_than_31_bits(backend: str, device: str) -> list[str]:
    """Compare the last rows of tensors of more than 2^31 elements with the dense definition."""
    n, h, d, w, some = 131_200, 128, 128, 200, 300
    q, k, v = (_normal(1, n, h, d, seed=s).requires_grad_() for s in range(3))
    dout = _normal(1, n, h, d, seed=3)
    assert q.numel() > 2**31
    mask = rowmax.Window(w, 0)
    out = rowmax.attention(q, k, v, mask=mask, backend=backend)
    got = (out, *torch.autograd.grad(out, (q, k, v), dout))
    wrong = []
    for head in (0, h - 1):
        # the last rows see only the last some + w keys; no other row sees the last ``some`` of them
        part = [t[:, -some - w :, head : head + 1].detach().float() for t in (q, k, v)]
        part = [t.requires_grad_() for t in part]
        o = rowmax.attention(*part, mask=mask, backend="reference")
        g = dout[:, -some - w :, head : head + 1].float()
        want = (o, *torch.autograd.grad(o, part, g))
        for name, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            x = x[:, -some:, head : head + 1]
            wrong += _far(f"{name} of head {head}", x, y[:, -some:])
    return wrong


def scores_that_rise(backend: str, device: str) -> list[str]:
    """Compare long calls whose scores rise by hundreds within and between tiles of keys."""
    wrong = []
    for d, mask, rise in (
        (64, None, 0.0), (64, None, 300.0), (128, None, 1000.0), (128, rowmax.Causal(), 300.0),
        (96, rowmax.Causal(), 300.0), (256, None, 300.0),
    ):  # fmt: skip
        shape = (1, 8192, 16 if d < 256 else 8, d)
        q, k, v = (_normal(*shape, device=device, seed=s) for s in (0, 1, 2))
        if rise:  # half of the queries see the steps
            q[..., 0] = (q[..., 0] > 0).to(q.dtype)
            k[..., 0] = (k[:, ::199, :, 0] * rise).repeat_interleave(199, 1)[:, : k.shape[1]]
        runs = [rowmax.attention(q, k, v, mask=mask, scale=0.125, backend=backend, return_lse=True)
                for _ in range(3)]  # fmt: skip
        if not all(torch.equal(x, y) for r in runs[1:] for x, y in zip(r, runs[0], strict=True)):
            wrong.append(f"head size {d}, steps of {rise}: repeats differ")
        for head in (0, q.shape[2] - 1):
            part = [t[:, :, head : head + 1].float() for t in (q, k, v)]
            want = rowmax.attention(
                *part, mask=mask, scale=0.125, backend="reference", return_lse=True
            )
            name = f"head size {d}, steps of {rise}, head {head}"
            wrong += _far(f"out, {name}", runs[0][0][:, :, head : head + 1], want[0])
            lse = runs[0][1][:, head : head + 1]
            off = ((lse - want[1]).abs() / (want[1].abs() + 1.0)).max().item()
            wrong += [f"lse, {name}: relative error {off:.3g}"] * (not off <= 1e-5)
    return wrong


def bias_of_more_elements_than_31_bits(backend: str, device: str) -> list[str]:
    n, h, d, some = 16_640, 8, 64, 128
    q, k, v = (_normal(1, n, h, d, seed=s).requires_grad_() for s in range(3))
    bias = _normal(1, h, n, n, seed=4).requires_grad_()
    dout = _normal(1, n, h, d, seed=3)
    assert bias.numel() > 2**31
    out = rowmax.attention(q, k, v, bias=bias, backend=backend)
    dbias = torch.autograd.grad(out, bias, dout)[0]
    head = slice(h - 1, h)
    last = [t[:, :, head].detach().float() for t in (q[:, -some:], k, v)]
    part = bias[:, head, -some:].detach().float().requires_grad_()
    o = rowmax.attention(*last, bias=part, backend="reference")
    want = torch.autograd.grad(o, part, dout[:, -some:, head].float())[0]
    return [
        *_far("out", out[:, -some:, head], o),
        *_far("dbias", dbias[:, head, -some:], want),
    ]


def linear_memory(backend: str, device: str) -> list[str]:
    """Allow a few floats a row at N = 64k, where the scores of one head would be 8 GiB.

    Hopper's backward adds dq in float32: d floats more.
    """
    n, h, d = 65_536, 2, 64
    q, k, v = (_normal(1, n, h, d, seed=s).requires_grad_() for s in range(3))
    dout = _normal(1, n, h, d, seed=3)
    out = rowmax.attention(q, k, v, causal=True, backend=backend)
    torch.autograd.grad(out, (q, k, v), dout)
    del out
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = rowmax.attention(q, k, v, causal=True, backend=backend)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    extra = torch.cuda.max_memory_allocated() - before
    size = q.numel() * q.element_size()
    beyond = extra - size * (1 + len(grads))
    floats = 8 + (d if backend == "hopper" else 0)  # for each row and head
    allowed = floats * h * n * 4
    if beyond > allowed:
        return [f"{beyond} bytes beyond out and the gradients, allowed {allowed}"]
    return []


def cuda_graph(backend: str, device: str) -> list[str]:
    q, k, v = (_normal(2, 500, 4, 64, seed=s) for s in range(3))
    cu = torch.tensor([0, 130, 500, 1000], device="cuda", dtype=torch.int32)
    random: dict[str, Any] = {}
    if backend == "triton":
        random = {"dropout_p": 0.1, "seed": torch.tensor(7, device="cuda")}

    def both() -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        keywords = {"causal": True, "backend": backend, "deterministic": True}
        out = rowmax.attention(*leaves, **random, **keywords)
        grads = torch.autograd.grad(out, leaves, q)
        leaves = [t.flatten(0, 1).detach().requires_grad_() for t in (q, k, v)]
        packed = rowmax.attention_varlen(*leaves, cu, cu, **keywords)
        more = torch.autograd.grad(packed, leaves, leaves[0].detach())
        return (out, *grads, packed, *more)  # pyright: ignore

    def change() -> None:
        for t in (q, k, v):
            t.copy_(_normal(*t.shape, seed=int(t.numel()) + 5))
        cu.copy_(torch.tensor([0, 400, 410, 1000]))

    return _replayed(both, change)


def cuda_graph_of_tangents(backend: str, device: str) -> list[str]:
    """Capture a forward, its tangent, a backward, and a backward of the backward."""
    if backend != "triton":
        return []
    q, k, v, *along = (_normal(2, 300, 4, 64, seed=s) for s in range(6))

    def attend(*qkv: Tensor) -> Tensor:
        return rowmax.attention(*qkv, causal=True, backend=backend, deterministic=True)  # pyright: ignore

    def both() -> tuple[Tensor, ...]:
        out, tout = torch.func.jvp(attend, (q, k, v), tuple(along))
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        first = torch.autograd.grad(attend(*leaves), leaves, along[0], create_graph=True)
        return (out, tout, *first, *torch.autograd.grad(first, leaves, along))

    def change() -> None:
        for n, t in enumerate((q, k, v, *along)):
            t.copy_(_normal(*t.shape, seed=n + 50))

    return _replayed(both, change)


def _replayed(call: Callable[[], tuple[Tensor, ...]], change: Callable[[], None]) -> list[str]:
    """Return how a captured call, replayed after a change of its inputs, differs from a new one."""
    for _ in range(3):  # the third repeats recorded launches
        call()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    change()
    graph.replay()
    torch.cuda.synchronize()
    return [
        f"output {n} of a replay differs from a call"
        for n, (a, b) in enumerate(zip(captured, call(), strict=True))
        if not torch.equal(a, b)
    ]


def another_stream(backend: str, device: str) -> list[str]:
    q, k, v = (_normal(2, 2000, 8, 64, seed=s) for s in range(3))
    want = rowmax.attention(q, k, v, backend=backend)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late = q * 1.0  # valid after the sleep, and only on this stream
        got = rowmax.attention(late, k, v, backend=backend)
    torch.cuda.current_stream().wait_stream(side)
    return [] if torch.equal(got, want) else ["the launch was not on the current stream"]  # pyright: ignore


def unseen_nan(backend: str, device: str) -> list[str]:
    """Require that NaN and inf in masked keys and values change no row, forward and backward.

    On Hopper, no row that sees no key of their tile.
    """
    wrong = []
    n, at = 700, 451
    before = slice(at // 128 * 128 if backend == "hopper" else at)
    for bad in (float("nan"), float("inf")):
        q, k, v, dout = (_normal(1, n, 2, 64, device=device, seed=s) for s in range(4))
        clean = [t.clone() for t in (q, k, v)]
        k[0, at:, 0], v[0, at:, 1] = bad, bad
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = rowmax.attention(*leaves, causal=True, backend=backend)
        dq = torch.autograd.grad(out, leaves[0], dout)[0]
        want = [t.requires_grad_() for t in clean]
        right = rowmax.attention(*want, causal=True, backend=backend)
        dq_right = torch.autograd.grad(right, want[0], dout)[0]
        for name, x, y in (("out", out, right), ("dq", dq, dq_right)):
            if not torch.allclose(x[:, before].float(), y[:, before].float(), rtol=2e-2, atol=2e-2):
                wrong.append(f"{name} of rows before the {bad} differs")
            if x[0, at:, 0].isfinite().all():
                wrong.append(f"{name} of rows after the {bad} hides it")
    return wrong


def padding_after_the_last_sequence(backend: str, device: str) -> list[str]:
    """Require zeros for tokens past the last offset, which have no keys; also in gradients."""
    q = _normal(300, 4, 64, device=device).requires_grad_()
    cu = torch.tensor([0, 100, 217], device=device, dtype=torch.int32)
    out, lse = rowmax.attention_varlen(q, q, q, cu, cu, return_lse=True, backend=backend)
    dq = torch.autograd.grad(out, q, torch.ones_like(out))[0]
    wrong = [n for n, x in (("out", out), ("dq", dq)) if x[217:].count_nonzero()]
    if not (lse[:, 217:] == -torch.inf).all():
        wrong.append("lse")
    return [f"{name} past the last sequence is not that of no keys" for name in wrong]


def float32_is_not_tf32(backend: str, device: str) -> list[str]:
    q, k, v = (
        _normal(1, 1024, 4, 128, device=device, seed=s, dtype=torch.float32) for s in range(3)
    )
    got = rowmax.attention(q, k, v, backend=backend)
    want = rowmax.attention(q.double(), k.double(), v.double(), backend="reference")
    return _far("out", got, want, 2e-6)  # pyright: ignore


def offsets_out_of_range(backend: str, device: str) -> list[str]:
    """Require that offsets out of range neither hang nor read or write outside the tensors.

    The Hopper backend clamps them: its results are those of the clamped offsets.
    """
    n, found = 1000, []
    q, k, v, dout = (_normal(n, 4, 64, seed=s) for s in range(4))
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        cu = torch.randint(-500, 1500, (2, 6), dtype=torch.int32, generator=generator)
        cu[0, 2], cu[1, 3] = 2**31 - 1, -(2**31)
        clamped = cu.clamp(0, n)
        clamped[:, 0] = 0
        clamped = clamped.cummax(1).values
        answers = []
        for offsets in (cu, clamped):
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            cu_q, cu_k = offsets.cuda()
            out = rowmax.attention_varlen(
                *leaves, cu_q, cu_k, n, n, causal=True, deterministic=True, backend=backend
            )
            answers.append((out, *torch.autograd.grad(out, leaves, dout)))
        torch.cuda.synchronize()
        same = all(map(torch.equal, *answers))
        if backend == "hopper" and not same:
            found.append(f"seed {seed}: not as with clamped offsets")
    return found
