"""The functions of flash-attn, compared with their documentation in plain torch."""

from __future__ import annotations

import importlib
import random
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import rowmax.integrations.flash_attn as flash_attn
from rowmax.testing import complaint

pytestmark = pytest.mark.usefixtures("one_thread")


def definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of dense attention in q's dtype; keys before ``first`` are hidden."""
    b, nq, h, d = q.shape
    nk = k.shape[1]
    k, v = (t.repeat_interleave(h // t.shape[2], 2) for t in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k)
    s = s * (d**-0.5 if softmax_scale is None else softmax_scale)
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    distance = torch.arange(nk) - (torch.arange(nq)[:, None] + nk - nq)  # j - position of i
    if alibi_slopes is not None:
        slopes = alibi_slopes.expand(b, h).to(q.dtype)
        s = s - slopes[:, :, None, None] * distance.abs().to(q.dtype)
    left, right = window_size
    right = 0 if causal else right
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    seen &= torch.arange(nk) >= first
    s = s.masked_fill(~seen, -torch.inf)
    lse = s.logsumexp(-1)
    p = (s - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp()
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def drawn(seed: int) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return random sizes (B, Nq, Nk, H, Hk, D) and keywords."""
    r = random.Random(seed)
    hk = r.choice((1, 2))
    h = hk * r.choice((1, 3))
    b, d = r.choice((1, 2, 3)), r.choice((8, 12, 16))
    sizes = (b, r.randint(1, 20), r.randint(1, 20), h, hk, d)
    options: dict[str, Any] = {
        "softmax_scale": r.choice((None, 0.3)),
        "causal": r.random() < 0.5,
        "window_size": r.choice(((-1, -1), (-1, -1), (4, 0), (3, 2), (-1, 1), (5, -1), (0, 0))),
        "softcap": r.choice((0.0, 0.0, 2.0)),
        "alibi_slopes": r.choice((None, torch.rand(h), torch.rand(b, h))),
    }
    return sizes, options


def tensors(sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    b, nq, nk, h, hk, d = sizes
    shapes = ((b, nq, h, d), (b, nk, hk, d), (b, nk, hk, d))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], leaves: list[Tensor]) -> None:
    """Check out, lse and the gradients through both."""
    for x, y in zip(got, want, strict=True):
        assert_close(x, y)
    dout, dlse = torch.randn_like(want[0]), torch.randn_like(want[1])
    sums = [
        (out * dout).sum() + (lse * dlse).masked_fill(lse.isinf(), 0.0).sum()
        for out, lse in (got, want)
    ]
    each = [torch.autograd.grad(s, leaves, allow_unused=True) for s in sums]
    for x, y in zip(*each, strict=True):
        assert_close(x, torch.zeros_like(x) if y is None else y.nan_to_num(0.0))


@pytest.mark.parametrize("seed", range(40))
def test_dense(seed: int) -> None:
    sizes, options = drawn(seed)
    q, k, v = tensors(sizes)
    out, lse, s_dmask = flash_attn.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    assert lse.dtype == torch.float64
    assert s_dmask.shape == (0,)
    same((out, lse), definition(q, k, v, **options), [q, k, v])
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, **options), out)


@pytest.mark.parametrize("seed", range(40, 50))
def test_packed_tensors(seed: int) -> None:
    (b, n, _, h, hk, d), options = drawn(seed)
    qkv = torch.randn(b, n, 3, h, d, dtype=torch.float64, requires_grad=True)
    out, lse, _ = flash_attn.flash_attn_qkvpacked_func(qkv, **options, return_attn_probs=True)
    same((out, lse), definition(*qkv.unbind(2), **options), [qkv])
    q = torch.randn(b, 5, h, d, dtype=torch.float64, requires_grad=True)
    kv = torch.randn(b, n, 2, hk, d, dtype=torch.float64, requires_grad=True)
    out, lse, _ = flash_attn.flash_attn_kvpacked_func(q, kv, **options, return_attn_probs=True)
    same((out, lse), definition(q, *kv.unbind(2), **options), [q, kv])


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def by_sequence(
    q: Tensor, k: Tensor, v: Tensor, lq: list[int], lk: list[int], **options: Any
) -> tuple[Tensor, Tensor]:
    each = zip(q.split(lq), k.split(lk), v.split(lk), strict=True)
    parts = [definition(*(t[None] for t in one), **options) for one in each]
    return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], -1)


@pytest.mark.parametrize("seed", range(50, 75))
def test_varlen(seed: int) -> None:
    (b, _, _, h, hk, d), options = drawn(seed)
    slopes = options.pop("alibi_slopes")
    slopes = slopes[0] if slopes is not None and slopes.dim() == 2 else slopes
    r = random.Random(seed)
    lq, lk = ([r.randint(0, 12) for _ in range(b)] for _ in "qk")
    q, k, v = (
        torch.randn(sum(n), heads, d, dtype=torch.float64, requires_grad=True)
        for n, heads in ((lq, h), (lk, hk), (lk, hk))
    )
    places = (offsets(lq), offsets(lk), max(lq), max(lk) + 3)
    given = slopes if slopes is None or seed % 2 else slopes.expand(b, h)
    more = {**options, "alibi_slopes": given, "return_attn_probs": True}
    out, lse, s_dmask = flash_attn.flash_attn_varlen_func(q, k, v, *places, **more)
    assert lse.shape == (h, sum(lq))
    assert s_dmask.shape == (0,)
    want = by_sequence(q, k, v, lq, lk, alibi_slopes=slopes, **options)
    same((out, lse), want, [q, k, v])
    kv = torch.stack((k, v), 1).detach().requires_grad_()
    out, lse, _ = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, *places, **more)
    want = by_sequence(q, *kv.unbind(1), lq, lk, alibi_slopes=slopes, **options)
    same((out, lse), want, [q, kv])
    qkv = torch.randn(sum(lq), 3, h, d, dtype=torch.float64, requires_grad=True)
    out, lse, _ = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, places[0], max(lq), **more)
    want = by_sequence(*qkv.unbind(1), lq, lq, alibi_slopes=slopes, **options)
    same((out, lse), want, [qkv])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_error_in_dtype(causal: bool, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"causal": causal, "window_size": (20, 5), "softcap": 4.0}
    options["alibi_slopes"] = torch.rand(4)
    sizes = (2, 40, 50, 4, 2, 16)
    q, k, v = tensors(sizes, dtype)
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    dout = torch.randn_like(out)
    each = []
    for of in (torch.float64, dtype):
        leaves = [t.detach().to(of).requires_grad_() for t in (q, k, v)]
        answer = definition(*leaves, **options)[0]
        each.append((answer, *torch.autograd.grad(answer, leaves, dout.to(of))))
    got = (out, *torch.autograd.grad(out, (q, k, v), dout))
    names = ("out", "dq", "dk", "dv")
    for name, x, ref, std in zip(names, got, *each, strict=True):
        if dtype == torch.float32:  # its rule has a noise that half precision hides
            assert_close(x.double(), ref, rtol=1e-5, atol=1e-5)
            continue
        assert complaint(name, x, ref, std, dtype, 2.0 if name == "out" else 3.0) is None


def test_dropout_drops_and_repeats() -> None:
    q, k, v = tensors((1, 8, 200, 2, 2, 8))
    ones = torch.ones_like(v)
    state = torch.get_rng_state()
    out = flash_attn.flash_attn_func(q, k, ones, 0.5)
    torch.set_rng_state(state)
    assert torch.equal(out, flash_attn.flash_attn_func(q, k, ones, 0.5))
    assert not torch.equal(out, torch.ones_like(out))
    assert abs(out.mean().item() - 1) < 0.1


def test_row_without_keys() -> None:
    q, k, v = tensors((1, 3, 1, 2, 2, 8))
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (out[:, :2] == 0).all()
    assert (lse[..., :2] == -torch.inf).all()


def test_compiles_whole() -> None:
    q, k, v = (t.detach().float() for t in tensors((2, 6, 9, 2, 1, 8)))
    slopes = torch.rand(2, 2)

    def call(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Any:
        more = {"causal": True, "window_size": (4, 0), "alibi_slopes": slopes}
        return flash_attn.flash_attn_func(q, k, v, **more, return_attn_probs=True)[:2]

    whole = torch.compile(call, fullgraph=True, backend="aot_eager")
    for x, y in zip(whole(q, k, v, slopes), call(q, k, v, slopes), strict=True):
        assert_close(x, y)


# --- the cache ---------------------------------------------------------------------------------


def rotated(x: Tensor, cos: Tensor, sin: Tensor, places: Tensor, interleaved: bool) -> Tensor:
    """Return x ``[n, H, D]`` rotated at places ``[n]``, number by number."""
    half, out = cos.shape[1], x.clone()
    for m in range(half):
        a, b = (2 * m, 2 * m + 1) if interleaved else (m, m + half)
        c, s = cos[places, m][:, None], sin[places, m][:, None]
        out[..., a] = x[..., a] * c - x[..., b] * s
        out[..., b] = x[..., a] * s + x[..., b] * c
    return out


@pytest.mark.parametrize("seed", range(100, 140))
def test_kvcache(seed: int) -> None:
    r = random.Random(seed)
    (b, nq, _, h, hk, d), options = drawn(seed)
    rows, size = b + r.choice((0, 2)), 40
    new = nq if r.random() < 0.7 else 0
    used = [r.randint(0, size - new) for _ in range(b)]
    used = [used[0]] * b if r.random() < 0.3 else used
    index = r.sample(range(rows), b) if r.random() < 0.5 else None
    pads = [r.randint(0, n) for n in used] if r.random() < 0.3 else None
    dtype = torch.float64
    q = torch.randn(b, nq, h, d, dtype=dtype)
    k_cache, v_cache = (torch.randn(rows, size, hk, d, dtype=dtype) for _ in "kv")
    k, v = (torch.randn(b, new, hk, d, dtype=dtype) for _ in "kv")
    turn = bool(new) and r.random() < 0.5
    cos, sin = (torch.rand(size, d // 2 - d // 4).to(dtype) for _ in range(2))
    interleaved = r.random() < 0.5
    k_want, v_want = k_cache.clone(), v_cache.clone()
    outs, lses = [], []
    moving = options["causal"] or options["window_size"] != (-1, -1)
    for n in range(b):
        row, start, end = n if index is None else index[n], used[n], used[n] + new
        places = torch.arange(start, end)
        at = places if moving else torch.full_like(places, start)
        q_n = rotated(q[n], cos, sin, at, interleaved) if turn else q[n]
        k_n = rotated(k[n], cos, sin, places, interleaved) if turn else k[n]
        k_want[row, start:end], v_want[row, start:end] = k_n, v[n]
        slopes = options["alibi_slopes"]
        slopes = slopes[n] if slopes is not None and slopes.dim() == 2 else slopes
        keys = (k_want[row : row + 1, :end], v_want[row : row + 1, :end])
        more = options | {"alibi_slopes": slopes, "first": pads[n] if pads else 0}
        for x, found in zip(definition(q_n[None], *keys, **more), (outs, lses), strict=True):
            found.append(x)
    same_length = len(set(used)) == 1 and r.random() < 0.7
    out, lse = flash_attn.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        *((k, v) if new else (None, None)),
        *((cos, sin) if turn else (None, None)),
        cache_seqlens=used[0] if same_length else torch.tensor(used, dtype=torch.int32),
        cache_batch_idx=None if index is None else torch.tensor(index, dtype=torch.int32),
        cache_leftpad=None if pads is None else torch.tensor(pads, dtype=torch.int32),
        rotary_interleaved=interleaved,
        return_softmax_lse=True,
        **options,
    )
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if turn else {}  # rotated in float32
    assert_close(k_cache, k_want, **tolerance)
    assert_close(v_cache, v_want)
    assert_close(out, torch.cat(outs), **tolerance)
    assert_close(lse, torch.cat(lses), **tolerance)


def test_kvcache_without_lengths() -> None:
    q, k, v = (t.detach() for t in tensors((2, 3, 7, 2, 1, 8)))
    got = flash_attn.flash_attn_with_kvcache(q, k, v, causal=True)
    assert_close(got, definition(q, k, v, causal=True)[0])


def test_kvcache_compiles_whole() -> None:
    q, k_cache, v_cache = (t.detach().float() for t in tensors((2, 1, 16, 2, 1, 8)))
    used = torch.tensor([3, 5], dtype=torch.int32)
    other = k_cache.clone(), v_cache.clone()

    def call(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        k = v = q[:, :, :1]
        return flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=used, causal=True
        )

    whole = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_close(whole(q, k_cache, v_cache), call(q, *other))
    assert torch.equal(k_cache, other[0])


# --- mistakes ----------------------------------------------------------------------------------

_DENSE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"return_attn_probs": True, "dropout_p": 0.1}, NotImplementedError, "S_dmask would hold"),
    ({"window_size": 4}, TypeError, "window_size: got 4; want"),
    ({"window_size": (4, None)}, TypeError, "window_size: got"),
    ({"alibi_slopes": [1.0]}, TypeError, "alibi_slopes: got list"),
    ({"alibi_slopes": torch.rand(3)}, ValueError, r"alibi_slopes: got shape \[3\]; want .*\[2\]"),
    ({"alibi_slopes": torch.rand(2, requires_grad=True)}, ValueError, "alibi_slopes: .* gradient"),
    ({"dropout_p": 1.5}, ValueError, "dropout_p: got 1.5"),
]


@pytest.mark.parametrize(("options", "error", "text"), _DENSE, ids=[str(x[2]) for x in _DENSE])
def test_mistakes(options: dict[str, Any], error: type[Exception], text: str) -> None:
    q, k, v = tensors((2, 3, 3, 2, 2, 8))
    with pytest.raises(error, match=text):
        flash_attn.flash_attn_func(q, k, v, **options)


def test_mistakes_of_packed_tensors() -> None:
    qkv = torch.randn(2, 4, 2, 2, 8)
    with pytest.raises(ValueError, match=r"qkv: got shape \[2, 4, 2, 2, 8\]; want \[B, N, 3"):
        flash_attn.flash_attn_qkvpacked_func(qkv)
    with pytest.raises(ValueError, match="kv: got shape"):
        flash_attn.flash_attn_varlen_kvpacked_func(qkv[:, 0], qkv, *[offsets([2])] * 2, 2, 2)


def test_mistakes_of_varlen() -> None:
    q = torch.randn(4, 2, 8)
    places = (offsets([1, 3]), offsets([1, 3]), 3, 3)
    with pytest.raises(NotImplementedError, match=r"slopes \[B, H\] = \[2, 2\] of packed"):
        flash_attn.flash_attn_varlen_func(q, q, q, *places, alibi_slopes=torch.rand(2, 2))
    table: Any = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="block_table: got a table"):
        flash_attn.flash_attn_varlen_func(q, q, q, *places, block_table=table)


_CACHE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_splits": 4}, NotImplementedError, "num_splits: got 4; want 0"),
    ({"block_table": 1}, NotImplementedError, "block_table"),
    ({"k": torch.randn(2, 1, 1, 8)}, ValueError, "want k and v"),
    ({"new": 1}, ValueError, "cache_seqlens: got None with k"),
    ({"new": 1, "cache_seqlens": 9}, ValueError, "cache_seqlens: got 9, and 1 new keys"),
    ({"cache_seqlens": [3, 4]}, TypeError, "cache_seqlens: got list"),
    ({"cache_seqlens": torch.tensor([3])}, ValueError, r"cache_seqlens: got shape \[1\]"),
    ({"rotary_cos": torch.rand(9, 4), "cache_seqlens": 1}, ValueError, "rotary_cos: want"),
]


@pytest.mark.parametrize(("options", "error", "text"), _CACHE, ids=[str(x[2]) for x in _CACHE])
def test_mistakes_of_kvcache(options: dict[str, Any], error: type[Exception], text: str) -> None:
    q, k_cache, v_cache = (t.detach() for t in tensors((2, 1, 9, 2, 1, 8)))
    options = dict(options)
    new = options.pop("new", None)
    if new:
        options |= {"k": q[:, :, :1], "v": q[:, :, :1]}
    with pytest.raises(error, match=text):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, **options)


def test_kvcache_refuses_gradients() -> None:
    q, k_cache, v_cache = tensors((2, 1, 9, 2, 1, 8))
    with pytest.raises(NotImplementedError, match="got q that requires a gradient"):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache)
    with torch.no_grad():
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache)


# --- padding and imports -----------------------------------------------------------------------


def test_unpad_and_pad() -> None:
    x = torch.randn(3, 5, 2, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 0, 1, 1], [0, 0, 0, 0, 0]])
    rows, indices, cu, longest, used = flash_attn.bert_padding.unpad_input(x, mask)
    assert torch.equal(rows, x[mask.bool()])
    assert cu.tolist() == [0, 2, 5, 5]
    assert cu.dtype == used.dtype == torch.int32
    assert (longest, used.tolist()) == (3, [2, 3, 0])
    back = flash_attn.bert_padding.pad_input(rows, indices, 3, 5)
    assert torch.equal(back, x * mask[:, :, None, None])
    (dx,) = torch.autograd.grad((back * x.detach()).sum(), [x])
    assert torch.equal(dx, x.detach() * mask[:, :, None, None])
    unused = torch.zeros_like(mask)
    unused[0, 4] = 1
    rows, _, cu, longest, used = flash_attn.bert_padding.unpad_input(x, mask, unused)
    assert (cu.tolist(), longest, used.tolist()) == ([0, 3, 6, 6], 3, [2, 3, 0])
    assert torch.equal(rows, x[(mask + unused).bool()])


def test_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("", ".flash_attn_interface", ".bert_padding"):
        monkeypatch.delitem(sys.modules, f"flash_attn{name}", raising=False)
        monkeypatch.setitem(sys.modules, f"flash_attn{name}", None)  # restored afterwards
        del sys.modules[f"flash_attn{name}"]
    flash_attn.install()
    flash_attn.install()
    found = importlib.import_module("flash_attn")
    assert found.flash_attn_func is flash_attn.flash_attn_func
    padding = importlib.import_module("flash_attn.bert_padding")
    assert padding.unpad_input is flash_attn.bert_padding.unpad_input
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    assert interface.flash_attn_varlen_func is flash_attn.flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", sys)
    with pytest.raises(RuntimeError, match="imported already"):
        flash_attn.install()
