"""``scaled_dot_product_attention`` with torch's arguments, against torch's MATH in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import rowmax
from rowmax.integrations import sdpa
from rowmax.integrations.sdpa import dense
from rowmax.torch_compat import allows_fused_attention, stands_for_numbers

from .sdpa_cases import counted, draw, make, wrong

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*prototype stage:UserWarning"),  # torch's nested tensors
    pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning"),
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ours = sdpa.scaled_dot_product_attention
theirs = F.scaled_dot_product_attention


def tensors(*shapes: tuple[int, ...], grad: bool = False) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=grad) for shape in shapes]


def test_random_calls() -> None:
    failures = []
    for seed in range(250):
        drawn = draw(seed, DTYPES, longest=40, most_d=80)
        call = make(drawn, "cpu")
        assert dense.refusal(call) is None, drawn
        found = wrong(call, ours)
        failures += [(drawn, found)] if found else []
    assert not failures


def test_the_result_has_torchs_shape_dtype_and_usual_strides() -> None:
    for seed in range(60):
        call = make(draw(seed, DTYPES, longest=9, most_d=8), "cpu", grad=False)
        got = ours(*call)
        with sdpa_kernel(SDPBackend.MATH):  # takes masks of one axis, too
            want = theirs(*call[:6], scale=call.scale, enable_gqa=call.enable_gqa)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        if got.dim() == 4:
            assert got.transpose(1, 2).is_contiguous()
        elif got.dim() < 4 and not dense._shares_keys(call):
            assert got.is_contiguous()


@pytest.mark.parametrize(("nq", "nk"), [(5, 5), (3, 7), (7, 3), (1, 6), (6, 1)])
def test_causal_is_aligned_top_left(nq: int, nk: int) -> None:
    q, k, v = tensors((2, 3, nq, 16), (2, 3, nk, 16), (2, 3, nk, 16))
    torch.testing.assert_close(ours(q, k, v, is_causal=True), theirs(q, k, v, is_causal=True))


def test_a_causal_mask_is_no_tensor() -> None:
    q, k = tensors((1, 2, 3, 16), (1, 2, 9, 16))
    for keys in (q, k):
        given = dense.arguments(dense.Call(q, keys, keys, is_causal=True))
        assert "bias" not in given
        assert "mask" not in given or given["mask"].allowed is None


def test_arguments_are_views() -> None:
    for axes in (2, 3, 4, 5):
        (q,) = tensors((2, 3, 2, 5, 8)[5 - axes :])
        given = dense.arguments(dense.Call(q, q, q))
        assert all(given[name].data_ptr() == q.data_ptr() for name in "qkv")


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_rows_without_keys_are_zero_with_gradient_zero(kind: torch.dtype) -> None:
    q, k, v = tensors((1, 2, 4, 16), (1, 2, 6, 16), (1, 2, 6, 16), grad=True)
    seen = torch.ones(4, 6, dtype=torch.bool)
    seen[1] = False
    mask = seen if kind == torch.bool else torch.zeros(4, 6).masked_fill(~seen, -torch.inf)
    out = ours(q, k, v, mask)
    assert out[:, :, 1].eq(0).all()
    out.sum().backward()
    assert q.grad is not None
    assert q.grad[:, :, 1].eq(0).all()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (k, v))
    torch.testing.assert_close(out[:, :, 2:], theirs(q, k, v, mask)[:, :, 2:])


def test_empty_sizes() -> None:
    for shape in ((0, 2, 3, 8), (1, 2, 0, 8)):
        q, k = tensors(shape, (shape[0], 2, 4, 8))
        assert ours(q, k, k).shape == shape
    q, k = tensors((1, 2, 3, 8), (1, 2, 0, 8))
    assert ours(q, k, k).eq(0).all()


# --- dropout -----------------------------------------------------------------------------------


def test_dropout_keeps_the_share_and_the_mean() -> None:
    q, k = torch.zeros(2, 4, 32, 16), torch.zeros(2, 4, 64, 16)
    v = torch.eye(64).expand(2, 4, 64, 64)  # out is the weights
    weights = ours(q, k, v, dropout_p=0.25) * 64
    kept = weights != 0
    torch.testing.assert_close(weights[kept], torch.full_like(weights[kept], 1 / 0.75))
    assert abs(kept.double().mean().item() - 0.75) < 5 * (0.25 * 0.75 / kept.numel()) ** 0.5
    torch.manual_seed(3)
    one = ours(q, k, v, dropout_p=0.25)
    torch.manual_seed(3)
    assert ours(q, k, v, dropout_p=0.25).equal(one)
    assert not ours(q, k, v, dropout_p=0.25).equal(one)


def test_dropout_is_that_of_rowmax() -> None:
    q, k, v = tensors(*[(2, 3, 8, 16)] * 3)
    torch.manual_seed(5)
    got = ours(q, k, v, dropout_p=0.5, is_causal=True)
    torch.manual_seed(5)
    seen = (t.transpose(1, 2) for t in (q, k, v))
    assert got.equal(rowmax.attention(*seen, dropout_p=0.5, causal=True).transpose(1, 2))


# --- what goes to torch --------------------------------------------------------------------------


class Subclass(torch.Tensor):
    pass


REFUSED = (
    "nested", "subclass", "batch", "heads", "head size", "dropout", "scale", "meta",
    "mask subclass",
)  # fmt: skip


def _refused() -> dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Return by name: a part of the reason, arguments and keywords that torch computes."""
    q = torch.randn(2, 4, 5, 16)
    nested = torch.nested.nested_tensor([torch.randn(4, 3, 16), torch.randn(4, 5, 16)])
    wide = torch.randn(1, 1, 3, 577)
    one = torch.randn(1, 4, 5, 16)
    return {
        "nested": ("nested", (nested,) * 3, {}),
        "subclass": ("Subclass", (q.as_subclass(Subclass), q, q), {}),
        "batch": ("broadcasts", (q, one, one), {}),
        "heads": ("heads", (q, q[:, :1], q[:, :1]), {}),
        "head size": ("577", (wide,) * 3, {}),
        "dropout": ("dropout_p", (q, q, q), {"dropout_p": 1.0}),
        "scale": ("scale", (q, q, q), {"scale": -1.0}),
        "meta": ("meta", (q.to("meta"),) * 3, {}),
        "mask subclass": ("Subclass", (q, q, q, torch.zeros(5, 5).as_subclass(Subclass)), {}),
    }


@pytest.mark.parametrize("name", REFUSED)
def test_torch_computes_what_rowmax_does_not_take(name: str) -> None:
    reason, arguments, keywords = _refused()[name]
    route = sdpa.explain(*arguments, **keywords)
    assert route.by == "torch"
    assert reason in (route.reason or "")
    with counted() as calls:
        got = ours(*arguments, **keywords)
    assert not calls
    want = theirs(*arguments, **keywords)
    assert type(got) is type(want)
    if name not in ("nested", "meta", "dropout"):
        torch.testing.assert_close(got, want)


def test_wrong_arguments_raise_torchs_errors() -> None:
    q, k = tensors((2, 4, 5, 16), (2, 4, 5, 8))
    with pytest.raises(RuntimeError):
        ours(q, k, k)
    with pytest.raises(RuntimeError, match="broadcast"):
        ours(q[:1], q[:1], q[:1], torch.zeros(2, 4, 5, 5))
    assert "is_causal" in (sdpa.explain(q, q, q, torch.zeros(5, 5), is_causal=True).reason or "")
    with pytest.raises(RuntimeError, match="dtype"):
        ours(q, q.double(), q)
    with pytest.raises(TypeError):
        ours(q, q.numpy(), q)  # pyright: ignore
    for p in (-0.5, 1.5):
        assert sdpa.explain(q, q, q, dropout_p=p).by == "torch"


def test_math_alone_goes_to_torch_for_second_derivatives() -> None:
    (q,) = tensors((1, 2, 3, 8), grad=True)
    with sdpa_kernel(SDPBackend.MATH):
        assert not allows_fused_attention()
        assert "MATH" in (sdpa.explain(q, q, q).reason or "")
        (dq,) = torch.autograd.grad(ours(q, q, q).square().sum(), q, create_graph=True)
        (second,) = torch.autograd.grad(dq.sum(), q)
    assert second.isfinite().all()
    assert allows_fused_attention()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert sdpa.explain(q, q, q).by == "rowmax"


def test_forward_mode_is_computed_once() -> None:
    q, tangent = tensors((1, 2, 3, 8), (1, 2, 3, 8))

    def both(attention: Callable[..., Tensor]) -> Tensor:
        with forward_ad.dual_level():
            out = attention(*[forward_ad.make_dual(q, tangent)] * 3)
            return forward_ad.unpack_dual(out).tangent

    with sdpa_kernel(SDPBackend.MATH):
        want = both(theirs)
    torch.testing.assert_close(both(ours), want)
    with forward_ad.dual_level():
        assert sdpa.explain(q, q, q).by == "rowmax"


def test_nested_forward_mode_goes_to_torch() -> None:
    q, tangent = tensors((1, 2, 3, 8), (1, 2, 3, 8))
    reasons = []

    def energy(x: Tensor) -> Tensor:
        reasons.append(sdpa.explain(x, x, x).reason)
        return ours(x, x, x).square().sum()

    def slope(x: Tensor) -> Tensor:
        return torch.func.jvp(energy, (x,), (tangent,))[1]

    with sdpa_kernel(SDPBackend.MATH):
        assert torch.func.jvp(slope, (q,), (tangent,))[1].isfinite()
    with pytest.raises(NotImplementedError, match="forward AD with _scaled_dot_product"):
        torch.func.jvp(slope, (q,), (tangent,))
    assert "nested" in reasons[-1]


def test_causal_bias() -> None:
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    q, k, v = tensors((2, 3, 4, 16), (2, 3, 9, 16), (2, 3, 9, 16))
    for make_bias in (causal_lower_right, causal_upper_left):
        bias = make_bias(4, 9)
        with counted() as calls:
            got = ours(q, k, v, bias)
        assert calls == ["forward"]
        torch.testing.assert_close(got, theirs(q, k, v, attn_mask=bias._materialize()))
        assert "577" not in str(sdpa.explain(q, k, v, bias))
        wide = torch.randn(1, 1, 4, 577), torch.randn(1, 1, 9, 577)
        with counted() as calls:
            got = ours(wide[0], wide[1], wide[1], bias)
        assert not calls
        want = theirs(wide[0], wide[1], wide[1], attn_mask=bias._materialize())
        torch.testing.assert_close(got, want)
    assert sdpa.explain(q, k, v, causal_lower_right(5, 9)).by == "torch"


def test_which_tensors_stand_for_numbers() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert stands_for_numbers(torch.empty(2))
    assert stands_for_numbers(torch.nn.Parameter(torch.empty(2)))
    assert not stands_for_numbers(torch.empty(2).as_subclass(Subclass))


def test_compiled_code_may_read_what_torch_allows() -> None:
    """Dynamo takes the answer as a constant, as of ``torch.compiler.assume_constant_result``."""
    torch._dynamo.reset()

    def twice(x: Tensor) -> Tensor:
        return x * (2 if allows_fused_attention() else 3)

    compiled = torch.compile(twice, backend="eager", fullgraph=True)
    assert compiled(torch.ones(1)).item() == 2


# --- autocast, transforms, export ----------------------------------------------------------------


def test_autocast() -> None:
    q, k, v = tensors(*[(2, 3, 5, 16)] * 3)
    mask = torch.randn(5, 5)
    with torch.autocast("cpu", torch.bfloat16):
        for m in (None, mask, mask.bfloat16()):
            assert sdpa.explain(q, k.bfloat16(), v, m).by == "rowmax"
            got, want = ours(q, k.bfloat16(), v, m), theirs(q, k.bfloat16(), v, m)
            assert got.dtype == want.dtype == torch.bfloat16
            torch.testing.assert_close(got, want, atol=0.02, rtol=0.02)
    assert sdpa.explain(q, k.bfloat16(), v).by == "torch"


@pytest.mark.filterwarnings("ignore:.*performance drop:UserWarning")  # torch's, of torch's own
def test_func_transforms() -> None:
    q, k, v = tensors(*[(3, 2, 2, 5, 8)] * 3)

    def loss(function: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function(q, k, v, is_causal=True).square().sum()

    for transform in (
        lambda f: torch.vmap(f),
        lambda f: torch.func.grad(lambda *x: torch.vmap(f)(*x).sum()),
        lambda f: torch.vmap(torch.func.grad(f)),
    ):
        got = transform(lambda *x: loss(ours, *x))(q, k, v)
        want = transform(lambda *x: loss(theirs, *x))(q, k, v)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("strict", [True, False])
def test_export_holds_the_operator(strict: bool) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return ours(q, k, k, is_causal=True)

    q, k = tensors((2, 3, 4, 16), (2, 3, 9, 16))
    n = torch.export.Dim("n", min=2, max=64)
    exported = torch.export.export(Layer(), (q, k), dynamic_shapes=({}, {2: n}), strict=strict)
    assert "rowmax.forward" in exported.graph_module.code
    (longer,) = tensors((2, 3, 12, 16))
    got = exported.module()(q, longer)
    torch.testing.assert_close(got, theirs(q, longer, longer, is_causal=True))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_fx_and_jit_trace() -> None:
    (q,) = tensors((2, 3, 4, 16))
    traced = torch.fx.symbolic_trace(lambda q: ours(q, q, q))
    torch.testing.assert_close(traced(q), theirs(q, q, q))
    with torch.no_grad():
        jitted = torch.jit.trace(lambda q: ours(q, q, q), (q,))
    torch.testing.assert_close(jitted(q), theirs(q, q, q))


# --- explain -------------------------------------------------------------------------------------


def test_explain_names_the_way_and_the_call() -> None:
    q, k = tensors((2, 4, 5, 16), (2, 2, 7, 16))
    route = sdpa.explain(q, k, k, is_causal=True, enable_gqa=True, scale=0.5)
    assert route.by == "rowmax"
    assert route.call is not None
    assert "by        rowmax\n" in str(route)
    assert "window (left None, right -2)" in str(route)
    assert "disabled" in str(route)
    refused = sdpa.explain(q, k, k)
    assert str(refused).startswith("by        torch: query has 4 heads, key 2")
    assert refused.call is None
