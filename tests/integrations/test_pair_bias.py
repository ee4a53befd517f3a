"""Attention with a pair bias, compared with the formulas of the libraries it stands for."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from rowmax.integrations.pair_bias import (
    DS4Sci_EvoformerAttention,
    attention_pair_bias,
    mask_to_kv_lengths,
    rows,
    triangle_attention,
)
from rowmax.testing import complaint

pytestmark = pytest.mark.usefixtures("one_thread")


def definition(
    q: Tensor, k: Tensor, v: Tensor, biases: list[Tensor], hidden: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of ``[..., S, D]`` with biases added; hidden keys have weight 0."""
    s = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    for bias in biases:
        s = s + bias
    s = s.masked_fill(hidden, -torch.inf)
    lse = s.logsumexp(-1)
    return (s - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp() @ v, lse


def same(got: list[Tensor], want: list[Tensor], leaves: list[Tensor]) -> None:
    """Check results and the gradients through all of them."""
    for x, y in zip(got, want, strict=True):
        assert_close(x, y)
    dout = [torch.randn_like(t) for t in want]
    sums = [
        sum((x * g).masked_fill(~x.isfinite(), 0.0).sum() for x, g in zip(each, dout, strict=True))
        for each in (got, want)
    ]
    gradients = [torch.autograd.grad(s, leaves) for s in sums]  # pyright: ignore
    for x, y in zip(*gradients, strict=True):
        assert_close(x, y.nan_to_num(0.0))


def inputs(
    b: int, n: int, h: int, nq: int, nk: int, d: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Return q, k, v and the bias, as cuEquivariance lays them out."""
    shapes = ((b, n, h, nq, d), (b, n, h, nk, d), (b, n, h, nk, d), (b, 1, h, nq, nk))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def drawn(seed: int) -> tuple[list[int], float | None]:
    r = random.Random(seed)
    sizes = [r.choice((1, 1, 2, 3)), r.choice((1, 2, 4)), r.choice((1, 2, 4))]
    return [*sizes, r.randint(1, 14), r.randint(1, 14), r.choice((4, 8, 12))], r.choice((None, 0.2))


# --- triangle attention ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_triangle_attention(seed: int) -> None:
    sizes, scale = drawn(seed)
    b, n, _, _, nk, _ = sizes
    q, k, v, bias = inputs(*sizes)
    lengths = torch.randint(0, nk + 3, (b, n, 1, 1, 1), dtype=torch.int32)
    prefix = torch.arange(nk) < lengths
    given: tuple[dict[str, Any], Tensor] = (
        ({}, torch.ones_like(prefix)),
        ({"kv_lengths": lengths}, prefix),
        ({"mask": prefix}, prefix),
        ({"mask": (torch.rand(b, n, 1, 1, nk) < 0.6).float()}, torch.empty(0)),  # any pattern
    )[seed % 4]  # pyright: ignore
    keywords, seen = given
    seen = keywords["mask"].bool() if seed % 4 == 3 else seen
    out, lse, largest = triangle_attention(q, k, v, bias, scale=scale, return_aux=True, **keywords)
    assert largest is None
    assert out.transpose(2, 3).is_contiguous()
    want = definition(q, k, v, [bias], ~seen, scale)
    same([out, lse], list(want), [q, k, v, bias])
    assert torch.equal(triangle_attention(q, k, v, bias, scale=scale, **keywords), out)


def test_triangle_attention_of_one_structure() -> None:
    q, k, v, bias = inputs(1, 3, 2, 5, 5, 8)
    mask = torch.rand(1, 3, 1, 1, 5) < 0.7
    five = triangle_attention(q, k, v, bias, mask)
    four = triangle_attention(q[0], k[0], v[0], bias[0], mask[0])
    assert torch.equal(five, four)  # with all five axes, as cuEquivariance returns


@pytest.mark.parametrize("of_bias", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_triangle_attention_in_bfloat16(masked: bool, of_bias: torch.dtype) -> None:
    q, k, v, bias = (t.detach() for t in inputs(1, 6, 4, 40, 40, 16))
    seen = (torch.rand(1, 6, 1, 1, 40) < 0.7) | torch.tensor(not masked)
    leaves = [t.bfloat16().requires_grad_() for t in (q, k, v)]
    leaves.append(bias.bfloat16().to(of_bias).requires_grad_())
    out = triangle_attention(*leaves, seen)
    dout = torch.randn_like(out)
    got = (out, *torch.autograd.grad(out, leaves, dout))
    assert [t.dtype for t in got] == [torch.bfloat16] * 4 + [of_bias]
    each = []
    for dtype in (torch.float64, torch.bfloat16):
        xs = [t.detach().to(dtype).requires_grad_() for t in leaves]
        answer = definition(*xs[:3], xs[3:], ~seen, None)[0]
        each.append((answer, *torch.autograd.grad(answer, xs, dout.to(dtype))))
    for name, x, ref, std in zip(("out", "dq", "dk", "dv", "dbias"), got, *each, strict=True):
        text = complaint(name, x, ref, std, torch.bfloat16, 2.0 if name == "out" else 3.0)
        assert text is None, text


def test_bias_of_another_dtype() -> None:
    q, k, v, bias = (t.detach().float() for t in inputs(1, 3, 2, 5, 5, 8))
    bias = bias.bfloat16().requires_grad_()
    out = triangle_attention(q, k, v, bias)
    assert_close(out, triangle_attention(q, k, v, bias.float()))
    (dbias,) = torch.autograd.grad(out.sum(), [bias])
    assert dbias.dtype == torch.bfloat16


def test_bias_of_any_strides() -> None:
    """A projection [B, S, S, H] of the pairs, with its heads moved to the front."""
    q, k, v, _ = inputs(2, 3, 2, 5, 5, 8)
    pairs = torch.randn(2, 5, 5, 2, dtype=torch.float64, requires_grad=True)
    bias = pairs.permute(0, 3, 1, 2)[:, None]
    out = triangle_attention(q, k, v, bias)
    hidden = torch.zeros(1, dtype=torch.bool)
    same([out], [definition(q, k, v, [bias], hidden, None)[0]], [q, k, v, pairs])


def test_autocast() -> None:
    """The results are those of inputs in autocast's dtype, also of the bias of keys."""
    q, k, v, bias = (t.detach().float() for t in inputs(1, 3, 2, 5, 5, 8))
    of_keys = torch.randn(1, 3, 1, 1, 5)
    half = [t.bfloat16() for t in (q, k, v, bias)]
    wide, narrow = ([t.transpose(2, 3) for t in ts[:3]] for ts in ([q, k, v], half))
    with torch.autocast("cpu", torch.bfloat16):
        got = triangle_attention(q, k, v, bias.bfloat16())
        evoformer = DS4Sci_EvoformerAttention(*wide, [of_keys, bias])
    assert torch.equal(got, triangle_attention(*half))
    assert torch.equal(evoformer, DS4Sci_EvoformerAttention(*narrow, [of_keys, bias]))


@pytest.mark.parametrize(("b", "n", "calls"), [(1, 4, 1), (3, 1, 1), (3, 2, 3)])
def test_calls(b: int, n: int, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Structures are calls of their own only where rows share a bias that differs by structure."""
    shapes = []
    monkeypatch.setattr(
        rows, "attention", lambda q, *_, **__: (shapes.append(q.shape), torch.zeros_like(q))[1]
    )
    triangle_attention(*inputs(b, n, 2, 5, 5, 8))
    assert len(shapes) == calls


class _Largest(TorchDispatchMode):
    """Record the largest number of elements of a result."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, Tensor):
                self.found = max(self.found, t.untyped_storage().nbytes() // t.element_size())
        return out


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("kind", ["triangle", "evoformer"])
def test_no_tensor_has_a_score_of_each_row(kind: str, b: int) -> None:
    n, h, s, d = 12, 2, 48, 8
    q, k, v, bias = inputs(b, n, h, s, s, d, torch.float32)
    with _Largest() as largest:
        if kind == "triangle":
            out = triangle_attention(q, k, v, bias, torch.rand(b, n, 1, 1, s) < 0.5)
        else:
            of_keys = torch.randn(b, n, 1, 1, s, requires_grad=True)
            qkv = [t.detach().transpose(2, 3).contiguous() for t in (q, k, v)]
            out = DS4Sci_EvoformerAttention(*qkv, [of_keys, bias])
        out.sum().backward()
    assert bias.grad is not None
    assert largest.found <= b * n * h * s * (d + 8)
    assert largest.found < b * n * h * s * s / 2


def test_triangle_attention_compiles_whole() -> None:
    q, k, v, bias = (t.detach().float() for t in inputs(2, 3, 2, 5, 6, 8))
    mask = torch.rand(2, 3, 1, 1, 6) < 0.7
    lengths = torch.randint(0, 7, (2, 3, 1, 1, 1), dtype=torch.int32)

    def call(*t: Tensor) -> Tensor:
        return triangle_attention(*t, mask) + triangle_attention(*t, kv_lengths=lengths)

    whole = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_close(whole(q, k, v, bias), call(q, k, v, bias))


def test_mask_to_kv_lengths() -> None:
    lengths = torch.tensor([0, 3, 5, 2], dtype=torch.int32).view(2, 2, 1, 1, 1)
    assert torch.equal(mask_to_kv_lengths(torch.arange(5) < lengths), lengths)
    with pytest.raises(ValueError, match="a hidden key before one"):
        mask_to_kv_lengths(torch.tensor([True, False, True]).expand(2, 1, 1, 3))


# --- DeepSpeed's -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_evoformer(seed: int) -> None:
    (b, n, h, s, _, d), _ = drawn(seed)
    leaves = [torch.randn(b, n, s, h, d, dtype=torch.float64, requires_grad=True) for _ in "qkv"]
    of_keys = torch.randn(b, n, 1, 1, s, dtype=torch.float64, requires_grad=True)
    of_pairs = torch.randn(b, 1, h, s, s, dtype=torch.float64, requires_grad=True)
    biases = ([of_keys, of_pairs], [of_keys], [None, of_pairs], [])[seed % 4]
    given = [t for t in biases if t is not None]
    out = DS4Sci_EvoformerAttention(*leaves, biases)
    assert len(biases) == (2, 1, 2, 0)[seed % 4]  # the list stays as it is
    q, k, v = (t.transpose(2, 3) for t in leaves)
    hidden = torch.zeros(1, dtype=torch.bool)
    want = definition(q, k, v, given, hidden, None)[0].transpose(2, 3)
    same([out], [want], [*leaves, *given])


def test_evoformer_without_biases_takes_other_axes() -> None:
    q = torch.randn(5, 2, 8, dtype=torch.float64)
    want = DS4Sci_EvoformerAttention(*[q[None, None]] * 3, [])
    assert torch.equal(DS4Sci_EvoformerAttention(q, q, q, []), want[0, 0])
    many = q.expand(2, 3, 1, 5, 2, 8)
    assert_close(DS4Sci_EvoformerAttention(many, many, many, []), want[:, None].expand_as(many))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inf", [1e4, 1e9, torch.inf])
def test_evoformer_with_a_mask_as_a_bias(inf: float, dtype: torch.dtype) -> None:
    """The penalties of callers hide keys, in any dtype; a boolean mask is the same."""
    b, n, s, h, d = 1, 3, 20, 2, 8
    leaves = [torch.randn(b, n, s, h, d, dtype=dtype, requires_grad=True) for _ in "qkv"]
    seen = torch.rand(b, n, 1, 1, s) < 0.6
    seen[..., 0] = True
    of_pairs = torch.randn(b, 1, h, s, s, dtype=dtype, requires_grad=True)
    of_keys = torch.zeros(seen.shape).masked_fill(~seen, -inf).to(dtype)
    outs = [DS4Sci_EvoformerAttention(*leaves, [x, of_pairs]) for x in (of_keys, seen)]
    q, k, v = (t.double().transpose(2, 3) for t in leaves)
    want = definition(q, k, v, [of_pairs.double()], ~seen, None)[0].transpose(2, 3)
    dout = torch.randn_like(outs[0])
    grads = [
        torch.autograd.grad(out, [*leaves, of_pairs], dout.to(out.dtype)) for out in (*outs, want)
    ]
    close = {"rtol": 0.02, "atol": 0.02 if dtype == torch.bfloat16 else 0.003}
    for out, found in zip(outs, grads, strict=False):
        assert_close(out, want.to(dtype), **close)
        for x, y in zip(found, grads[-1], strict=True):
            assert_close(x, y, **close)


def test_bias_of_keys_has_its_gradient_in_half_precision() -> None:
    b, n, s, h, d = 1, 2, 30, 4, 12  # 1/sqrt(12) is no power of two
    leaves = [torch.randn(b, n, s, h, d).bfloat16().requires_grad_() for _ in "qkv"]
    of_keys = (4 * torch.randn(b, n, 1, 1, s)).bfloat16().requires_grad_()
    out = DS4Sci_EvoformerAttention(*leaves, [of_keys])
    dout = torch.randn_like(out)
    got = (out, *torch.autograd.grad(out, [*leaves, of_keys], dout))
    each = []
    for dtype in (torch.float64, torch.bfloat16):
        xs = [t.detach().to(dtype).requires_grad_() for t in (*leaves, of_keys)]
        q, k, v = (t.transpose(2, 3) for t in xs[:3])
        hidden = torch.zeros(1, dtype=torch.bool)
        answer = definition(q, k, v, xs[3:], hidden, None)[0].transpose(2, 3)
        each.append((answer, *torch.autograd.grad(answer, xs, dout.to(dtype))))
    for name, x, ref, std in zip(("out", "dq", "dk", "dv", "dbias"), got, *each, strict=True):
        text = complaint(name, x, ref, std, torch.bfloat16, 2.0 if name == "out" else 3.0)
        assert text is None, text


def test_large_bias_of_keys_is_kept_to_24_bits() -> None:
    q, k, v = (torch.randn(1, 2, 30, 4, 12).bfloat16() for _ in range(3))
    of_keys = 50 + torch.randn(1, 2, 1, 1, 30)  # bfloat16 would round it by up to 0.125
    out = DS4Sci_EvoformerAttention(q, k, v, [of_keys])
    hidden = torch.zeros(1, dtype=torch.bool)
    wide = [t.double().transpose(2, 3) for t in (q, k, v)]
    want = definition(wide[0], wide[1], wide[2], [of_keys.double()], hidden, None)[0]
    assert_close(out.double(), want.transpose(2, 3), rtol=0.01, atol=0.005)


# --- single attention --------------------------------------------------------------------------


def weights(c: int, z: int, h: int, d: int, r: random.Random) -> dict[str, Any]:
    """Return weights of ``attention_pair_bias``, some of the optional ones."""
    shapes = {
        "w_ln_a": (c,),
        "w_proj_q": (h * d, c),
        "w_proj_k": (h * d, c),
        "w_proj_v": (h * d, c),
        "w_proj_g": (h * d, c),
        "w_proj_o": (c, h * d),
        "w_proj_z": (h, z),
    }
    optional = {"b_ln_a": (c,), "b_proj_q": (h * d,), "b_proj_o": (c,), "b_proj_z": (h,)}
    optional |= {"w_ln_z": (z,), "b_ln_z": (z,), "b_proj_k": (h * d,), "b_proj_v": (h * d,)}
    optional |= {"w_ln_q": (h * d,), "b_ln_q": (h * d,), "w_ln_k": (h * d,), "b_proj_g": (h * d,)}
    found: dict[str, Any] = dict.fromkeys(("b_ln_a", "b_proj_q"))
    for name, shape in (shapes | {n: s for n, s in optional.items() if r.random() < 0.5}).items():
        found[name] = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    return found


def single_definition(
    a: Tensor, z: Tensor, seen: Tensor, h: int, w: dict[str, Any], rms: bool
) -> tuple[Tensor, Tensor]:
    def norm(x: Tensor, name: str) -> Tensor:
        if rms:
            return rms_norm(x, x.shape[-1:], w.get(f"w_{name}"), 1e-5)
        return layer_norm(x, x.shape[-1:], w.get(f"w_{name}"), w.get(f"b_{name}"), 1e-5)

    def project(x: Tensor, name: str) -> Tensor:
        bias = w.get(f"b_proj_{name}")
        return x @ w[f"w_proj_{name}"].T + (0 if bias is None else bias)

    a = norm(a, "ln_a")
    q, k, v = (project(a, name) for name in "qkv")
    for name in "qk":
        if w.get(f"w_ln_{name}") is not None or w.get(f"b_ln_{name}") is not None:
            q, k = (norm(q, "ln_q"), k) if name == "q" else (q, norm(k, "ln_k"))
    q, k, v = (t.unflatten(-1, (h, -1)).transpose(1, 2) for t in (q, k, v))
    bias = project(norm(z, "ln_z"), "z").permute(0, 3, 1, 2)
    every = bias.repeat_interleave(a.shape[0] // z.shape[0], 0)
    out, _ = definition(q, k, v, [every], ~seen[:, None, None], None)
    return project(project(a, "g").sigmoid() * out.transpose(1, 2).flatten(2), "o"), bias


@pytest.mark.parametrize("seed", range(24))
def test_attention_pair_bias(seed: int) -> None:
    r = random.Random(seed)
    b, m, n, c, z, h, d = r.choice((1, 2)), r.choice((1, 3)), r.randint(1, 9), 6, 5, 2, 4
    w = weights(c, z, h, d, r)
    rms = r.random() < 0.3
    if rms:
        w |= dict.fromkeys(name for name in w if name.startswith("b_ln"))
    a = torch.randn(b * m, n, c, dtype=torch.float64, requires_grad=True)
    pair = torch.randn(b, n, n, z, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(r.choice((b, b * m)), n) < 0.7
    mask[:, 0] = True
    seen = mask if len(mask) == b * m else mask.repeat_interleave(m, 0)
    more = {**w, "norm_kind": "rms_norm"} if rms else w
    out, bias = attention_pair_bias(a, pair, mask.double(), h, **more, return_z_proj=True)
    want = single_definition(a, pair, seen, h, w, rms)
    leaves = [a, pair, *(t for t in w.values() if t is not None)]
    assert bias is not None
    assert bias.is_contiguous()
    same([out, bias], list(want), leaves)
    names = {"w_proj_z", "b_proj_z", "w_ln_z", "b_ln_z"}
    cached = {name: t for name, t in more.items() if name not in names}
    again = attention_pair_bias(a, bias, mask, h, **cached, is_cached_z_proj=True)
    assert_close(again[0], out)
    assert again[1] is None
    alone = attention_pair_bias(a, pair, None, h, **more)[0]
    assert_close(alone, single_definition(a, pair, torch.ones_like(seen), h, w, rms)[0])


# --- mistakes ----------------------------------------------------------------------------------


def test_mistakes_of_triangle_attention() -> None:
    q, k, v, bias = inputs(2, 3, 2, 5, 6, 8)
    mask, lengths = torch.ones(2, 3, 1, 1, 6), torch.ones(2, 3, 1, 1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="got a mask and kv_lengths; want one"):
        triangle_attention(q, k, v, bias, mask, kv_lengths=lengths)
    with pytest.raises(ValueError, match=r"bias: got shape .*; want \[B, 1, H, Q, K\] = \[2, 1, 2"):
        triangle_attention(q, k, v, bias.transpose(3, 4))
    with pytest.raises(ValueError, match="k: got shape"):
        triangle_attention(q, k.transpose(2, 3), v, bias)
    with pytest.raises(ValueError, match=r"mask: got shape \[2, 3, 1, 6, 1\]; want"):
        triangle_attention(q, k, v, bias, mask.transpose(3, 4))
    with pytest.raises(ValueError, match="kv_lengths: got shape"):
        triangle_attention(q, k, v, bias, kv_lengths=lengths[:1])
    with pytest.raises(TypeError, match="bias: got NoneType; want a tensor"):
        triangle_attention(q, k, v, None)  # pyright: ignore


def test_mistakes_of_evoformer() -> None:
    q = torch.randn(2, 3, 5, 2, 8)
    with pytest.raises(ValueError, match="biases: got 3; want at most two"):
        DS4Sci_EvoformerAttention(q, q, q, [None] * 3)
    with pytest.raises(ValueError, match=r"biases\[0\]: got shape"):
        DS4Sci_EvoformerAttention(q, q, q, [torch.zeros(2, 1, 1, 1, 5)])
    with pytest.raises(ValueError, match=r"biases\[1\]: got shape"):
        DS4Sci_EvoformerAttention(q, q, q, [None, torch.zeros(2, 3, 2, 5, 5)])
    with pytest.raises(ValueError, match=r"K: got shape .* the shape of Q"):
        DS4Sci_EvoformerAttention(q, q[:, :1], q, [])
    with pytest.raises(ValueError, match=r"Q: got \[5, 2\]; want a tensor"):
        DS4Sci_EvoformerAttention(q[0, 0, :, :, 0], q, q, [])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"single_repr": torch.randn(3, 4, 6)}, "single_repr: got 3 rows; want a multiple of B"),
        ({"pair_repr": torch.randn(2, 4, 5, 5)}, "pair_repr: got shape"),
        ({"mask": torch.ones(3, 4)}, r"mask: got shape \[3, 4\]; want \[2, 4\] or \[2, 4\]"),
        ({"inf": 10.0}, "inf: got 10.0; want 10000 or more"),
        ({"norm_kind": "batch"}, "norm_kind: got 'batch'"),
        ({"norm_kind": "rms_norm", "b_ln_a": torch.ones(6)}, "norm_kind: got 'rms_norm' with"),
        ({"w_proj_z": None}, "w_proj_z: got None"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_mistakes_of_attention_pair_bias(change: dict[str, Any], text: str) -> None:
    w = weights(6, 5, 2, 4, random.Random(0)) | {"b_ln_a": None}
    w = {name: t if t is None else t.detach().float() for name, t in w.items()}
    given: dict[str, Any] = {"single_repr": torch.randn(2, 4, 6), "mask": torch.ones(2, 4)}
    given |= {"pair_repr": torch.randn(2, 4, 4, 5), "num_heads": 2, **w, **change}
    with pytest.raises(ValueError, match=text):
        attention_pair_bias(**given)
