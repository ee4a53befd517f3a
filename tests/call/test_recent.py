"""Calls that are found by one check in C: the same results, and nothing else is taken for them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import rowmax
from rowmax import torch_compat
from rowmax.call import dispatch, normalize, recent
from rowmax.mask_algebra import Ids


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the arguments of calls that took the usual way; nothing is remembered before."""
    found: list[Any] = []
    usual = normalize.normalized

    def normalized(a: Any) -> Any:
        found.append(a)
        return usual(a)

    monkeypatch.setattr(recent.calls, "_kinds", {})
    monkeypatch.setattr(recent.packed_calls, "_kinds", {})
    # the function has the name of its module
    monkeypatch.setattr(sys.modules["rowmax.attention"], "normalized", normalized)
    return found


def qkv(n: int = 8, dtype: torch.dtype = torch.float32, **more: Any) -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, n, 2, 16, dtype=dtype, **more) for _ in range(3))


def attend(*tensors: Tensor, **more: Any) -> Tensor:
    return rowmax.attention(*tensors, **({"causal": True, "backend": "torch"} | more))  # pyright: ignore


@pytest.mark.skipif(torch_compat.TensorGuards is None, reason="torch has no such check")
def test_a_call_like_the_last_one_is_found(calls: list[Any]) -> None:
    for _ in range(3):
        q, k, v = qkv()
        want = rowmax.attention(q, k, v, causal=True, backend="reference")
        calls.clear()
        assert torch.allclose(attend(q, k, v), want, atol=1e-5)
    assert not calls
    out, lse = attend(*qkv(), return_lse=True)
    assert out.shape == (2, 8, 2, 16)
    assert lse.shape == (2, 2, 8)
    assert not calls


CHANGES: dict[str, Callable[[], Any]] = {
    "size": lambda: attend(*qkv(9)),
    "dtype": lambda: attend(*qkv(dtype=torch.float64)),
    "strides": lambda: attend(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv())),
    "gradient": lambda: attend(*qkv(requires_grad=True)),
    "one tensor": lambda: attend(*qkv()[:1] * 3),
    "alignment": lambda: attend(
        *(torch.randn(2 * 8 * 32 + 1)[1:].view(2, 8, 2, 16) for _ in "qkv")
    ),
    "causal": lambda: attend(*qkv(), causal=False),
    "scale": lambda: attend(*qkv(), scale=0.5),
    "softcap": lambda: attend(*qkv(), softcap=2.0),
    "deterministic": lambda: attend(*qkv(), deterministic=True),
    "mask": lambda: attend(*qkv(), mask=rowmax.Window(2, 0)),
    "bias": lambda: attend(*qkv(), bias=torch.zeros(8, 8)),
    "dropout": lambda: attend(*qkv(), dropout_p=0.5),
    "subclass": lambda: attend(*(t.as_subclass(Other) for t in qkv())),
    "vmap": lambda: torch.vmap(attend)(*(t[None] for t in qkv())),
}


class Other(torch.Tensor):
    """A subclass."""


@pytest.mark.parametrize("name", CHANGES)
def test_another_call_takes_the_usual_way(name: str, calls: list[Any]) -> None:
    attend(*qkv())
    calls.clear()
    CHANGES[name]()
    assert calls


def boolean(*shape: int) -> dict[str, Tensor]:
    """Return a boolean mask of a shape, in which every query sees a key."""
    mask = torch.rand(shape) < 0.5
    mask[..., 0] = True
    return {"mask": mask}


def with_terms(
    *shape: int, dtype: torch.dtype = torch.float32, sink: torch.dtype | None = torch.float32
) -> dict[str, Tensor]:
    """Return a bias of a shape, and a sink."""
    found = {"bias": torch.randn(shape or (1, 2, 8, 8), dtype=dtype, requires_grad=True)}
    if sink is not None:
        found["sink"] = torch.randn(2).to(sink).requires_grad_()
    return found


@pytest.mark.skipif(torch_compat.TensorGuards is None, reason="torch has no such check")
@pytest.mark.parametrize("backend", ["torch", None])
@pytest.mark.parametrize("sink", [torch.float32, None])
def test_a_call_with_terms_is_found(
    sink: torch.dtype | None, backend: str | None, calls: list[Any]
) -> None:
    for n in range(5):
        q, k, v = qkv(requires_grad=True)
        terms = with_terms(sink=sink)
        calls.clear()
        out = attend(q, k, v, backend=backend, **terms)
        assert bool(calls) == (n == 0)
        leaves = (q, k, v, *terms.values())
        want = rowmax.attention(q, k, v, causal=True, backend="reference", **terms)
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
        grads = [torch.autograd.grad(t.square().sum(), leaves) for t in (out, want)]
        torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(torch_compat.TensorGuards is None, reason="torch has no such check")
@pytest.mark.parametrize("backend", ["torch", None])
@pytest.mark.parametrize("terms", [dict, with_terms], ids=["alone", "with-terms"])
def test_a_call_with_a_boolean_mask_is_found(
    terms: Callable[[], dict[str, Tensor]], backend: str | None, calls: list[Any]
) -> None:
    """Each call has the pairs of its own mask."""
    for n in range(5):
        q, k, v = qkv(requires_grad=True)
        given = {**terms(), **boolean(2, 1, 8, 8)}
        calls.clear()
        out = attend(q, k, v, backend=backend, **given)
        assert bool(calls) == (n == 0)
        want = rowmax.attention(q, k, v, causal=True, backend="reference", **given)
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
        grads = [torch.autograd.grad(t.square().sum(), (q, k, v)) for t in (out, want)]
        torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(torch_compat.TensorGuards is None, reason="torch has no such check")
@pytest.mark.parametrize("backend", ["torch", None])
@pytest.mark.parametrize("terms", [dict, with_terms], ids=["alone", "with-terms"])
@pytest.mark.parametrize("half", [False, True])
def test_a_call_with_slopes_is_found(
    half: bool, terms: Callable[[], dict[str, Tensor]], backend: str | None, calls: list[Any]
) -> None:
    """Each call has its own slopes; those of 16 bits are converted, in the usual way."""
    for n in range(5):
        q, k, v = qkv(requires_grad=True)
        slopes = torch.rand(2).to(torch.bfloat16 if half else torch.float32).requires_grad_()
        given = {**terms(), "alibi": slopes}
        calls.clear()
        out = attend(q, k, v, backend=backend, **given)
        assert bool(calls) == (n == 0 or half)
        want = rowmax.attention(q, k, v, causal=True, backend="reference", **given)
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
        grads = [torch.autograd.grad(t.square().sum(), (q, k, v, slopes)) for t in (out, want)]
        tolerance = 2**-7 if half else 1e-4  # a gradient of bfloat16 has 8 bits
        torch.testing.assert_close(*grads, atol=tolerance, rtol=tolerance)


BANDS = {"none": {}, "causal": {"right": 0}, "window": {"left": 3, "right": 1}}


@pytest.mark.skipif(torch_compat.TensorGuards is None, reason="torch has no such check")
@pytest.mark.parametrize("backend", ["torch", None])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("align", ["keys", "lengths"])
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("nq", [1, 8])
def test_a_call_with_lengths_is_found(
    nq: int, band: str, align: str, kind: torch.dtype, backend: str | None, calls: list[Any]
) -> None:
    """Each call has the keys of its own lengths, longer ones than the keys too."""
    for n, values in enumerate(((3, 8), (8, 1), (100, 5), (0, 7), (6, 6))):
        q, k, v = qkv(requires_grad=True)
        q = q[:, :nq].detach().requires_grad_()
        lengths = torch.tensor(values, dtype=kind)
        mask = rowmax.Mask(**BANDS[band], lengths=lengths, align=align)
        calls.clear()
        out = attend(q, k, v, mask=mask, causal=False, backend=backend)
        assert bool(calls) == (n == 0)
        want = attend(q, k, v, mask=mask, causal=False, backend="reference")
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
        grads = [torch.autograd.grad(t.square().sum(), (q, k, v)) for t in (out, want)]
        torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)
        calls.clear()
    with pytest.raises(ValueError, match="lengths"):
        attend(q, k, v, mask=rowmax.PrefixLengths(torch.tensor([3, -1], dtype=kind)), causal=False)


OTHER_MASKS: dict[str, Callable[[], Any]] = {
    "no lengths": lambda: rowmax.Causal(),
    "other limits": lambda: rowmax.Window(3, 1) & of_lengths(),
    "other alignment": lambda: rowmax.Causal() & of_lengths(align="lengths"),
    "documents": lambda: rowmax.Causal() & of_lengths() & rowmax.Documents(torch.zeros(8).long()),
    "prefix": lambda: rowmax.Prefix(torch.tensor([2, 3])) & of_lengths(),
    "a boolean mask": lambda: rowmax.Causal() & of_lengths() & torch.ones(8, 8).bool(),
    "more lengths": lambda: rowmax.Causal() & of_lengths(3),
}


def of_lengths(size: int = 2, **more: Any) -> rowmax.Mask:
    return rowmax.PrefixLengths(torch.arange(size) + 2, **more)


@pytest.mark.parametrize("name", OTHER_MASKS)
def test_other_masks_take_the_usual_way(name: str, calls: list[Any]) -> None:
    q, k, v = qkv()
    for _ in range(2):
        attend(q, k, v, mask=rowmax.Causal() & of_lengths(), causal=False)
    calls.clear()
    mask = OTHER_MASKS[name]()
    if name == "more lengths":
        with pytest.raises(ValueError, match="lengths"):
            attend(q, k, v, mask=mask, causal=False)
        return
    out = attend(q, k, v, mask=mask, causal=False)
    assert calls
    want = attend(q, k, v, mask=mask, causal=False, backend="reference")
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


OTHER_TERMS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "no sink": lambda: with_terms(sink=None),
    "sizes": lambda: with_terms(2, 1, 8, 8),
    "axes": lambda: with_terms(8, 8),
    "strides": lambda: with_terms() | {"bias": torch.randn(1, 2, 8, 8).transpose(2, 3)},
    "dtype of the sink": lambda: with_terms(sink=torch.bfloat16),
    "a sink alone": lambda: {"sink": torch.randn(2)},
    "alibi": lambda: with_terms() | {"alibi": torch.rand(2)},
    "alibi alone": lambda: {"alibi": torch.rand(2)},
    "a mask": lambda: with_terms() | boolean(1, 1, 8, 8),
    "a mask of fewer axes": lambda: with_terms() | boolean(8, 8),
}


@pytest.mark.parametrize("name", OTHER_TERMS)
def test_other_terms_take_the_usual_way(name: str, calls: list[Any]) -> None:
    q, k, v = qkv()
    for _ in range(2):
        attend(q, k, v, **with_terms())
    calls.clear()
    terms = OTHER_TERMS[name]()
    out = attend(q, k, v, **terms)
    assert calls
    want = rowmax.attention(q, k, v, causal=True, backend="reference", **terms)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


def test_terms_of_a_wrong_shape_are_refused_after_right_ones() -> None:
    q, k, v = qkv()
    for _ in range(2):
        attend(q, k, v, **with_terms())
    attend(q, k, v, alibi=torch.zeros(2))
    with pytest.raises(ValueError, match="alibi"):
        attend(q, k, v, alibi=torch.zeros(3))
    with pytest.raises(ValueError, match="bias"):
        attend(q, k, v, bias=torch.zeros(1, 3, 8, 8), sink=torch.zeros(2))
    with pytest.raises(ValueError, match="sink"):
        attend(q, k, v, bias=torch.zeros(1, 2, 8, 8), sink=torch.zeros(3))
    for _ in range(2):
        attend(q, k, v, **boolean(1, 1, 8, 8))
    with pytest.raises(ValueError, match="mask"):
        attend(q, k, v, **boolean(1, 3, 8, 8))
    with pytest.raises(TypeError, match="mask"):
        attend(q, k, v, mask=torch.ones(1, 1, 8, 8))


NOT_STRIDED: dict[str, Callable[[], Any]] = {
    "nested": lambda: torch.nested.nested_tensor([torch.randn(8, 2, 16)] * 2),
    "jagged": lambda: torch.nested.nested_tensor([torch.randn(8, 2, 16)] * 2, layout=torch.jagged),
    "sparse": lambda: torch.randn(2, 8, 2, 16).to_sparse(),
    "no tensor": lambda: [1.0],
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", NOT_STRIDED)
def test_other_tensors_are_not_compared(name: str, calls: list[Any]) -> None:
    """torch's check ends the process where it reads sizes of a nested tensor."""
    attend(*qkv())
    other = NOT_STRIDED[name]()
    key = recent.key_of(True, None, 0.0, 0.0, "torch", False)
    assert key in recent.calls._kinds
    for place in range(3):
        tensors: list[Any] = [*qkv()]
        tensors[place] = other
        assert recent.calls.recall(key, *tensors) is None


def test_a_call_that_something_observes_takes_the_usual_way(calls: list[Any]) -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    attend(*qkv())
    for context in (Mode(), torch.autocast("cpu", torch.bfloat16), torch.inference_mode()):
        tensors = qkv()
        calls.clear()
        with context:
            attend(*tensors)
        assert calls, context


@pytest.mark.parametrize(
    "wrong", [{"causal": 1}, {"softcap": True}, {"scale": True}, {"dropout_p": False}]
)
def test_wrong_arguments_that_equal_right_ones_raise(wrong: dict[str, Any]) -> None:
    attend(*qkv(), causal=True, softcap=1.0, scale=1.0)
    with pytest.raises(TypeError, match=next(iter(wrong))):
        attend(*qkv(), **({"causal": True, "softcap": 1.0, "scale": 1.0} | wrong))


def test_gradients_are_those_of_the_usual_way(calls: list[Any]) -> None:
    attend(*qkv(requires_grad=True))
    tensors = qkv(requires_grad=True)
    calls.clear()
    got = torch.autograd.grad(attend(*tensors).square().sum(), tensors)
    want = torch.autograd.grad(attend(*tensors, backend="reference").square().sum(), tensors)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


def test_without_the_check_every_call_takes_the_usual_way(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_compat, "TensorGuards", None)
    for _ in range(2):
        calls.clear()
        attend(*qkv())
        assert calls


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent.Recent, "MOST_KEYS", 4)
    for n in range(20):
        attend(*qkv(n + 1), softcap=float(n % 5))
        attend(*qkv(n + 1))
    kept = recent.calls._kinds
    assert len(kept) <= 4
    assert all(len(kinds) <= recent.Recent.MOST_KINDS for kinds in kept.values())


# --- lengths, whose values are read each time --------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_call_with_lengths_reads_their_values(
    dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other checks pass once; values may change, and so may what they align."""
    if backend == "cpu":
        pytest.importorskip("numba")
    monkeypatch.setattr(normalize, "_passed", {})
    for n in range(8):
        q, k, v = qkv(requires_grad=True)
        lengths = torch.tensor([(3 + n) % 9, 40], dtype=dtype)  # 40 is past the end
        mask = rowmax.PrefixLengths(lengths, align="lengths" if n % 3 == 2 else "keys")
        found = []
        for name in (backend, "reference"):
            out = attend(q, k, v, mask=mask, backend=name)
            found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert normalize._passed
    with pytest.raises(ValueError, match=r"PrefixLengths\(lengths=\): got \[3, -1\]"):
        attend(q, k, v, mask=rowmax.PrefixLengths(torch.tensor([3, -1], dtype=dtype)))
    with pytest.raises(ValueError, match="got 3 lengths"):
        attend(q, k, v, mask=rowmax.PrefixLengths(torch.ones(3, dtype=dtype)))


# --- packed sequences --------------------------------------------------------------------------


def packed(
    *lengths: int, kind: torch.dtype = torch.int32, **more: Any
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return q, k and v of 16 rows, and offsets of sequences of these lengths."""
    rows = tuple(torch.randn(16, 2, 16, **more) for _ in "qkv")
    return rows, torch.tensor([0, *lengths], dtype=kind).cumsum(0).to(kind)


def attend_packed(rows: tuple[Tensor, ...], *offsets: Tensor, **more: Any) -> Any:
    offsets = offsets if len(offsets) > 1 else 2 * offsets
    usual = {"causal": True, "max_seqlen_q": 16, "max_seqlen_k": 16, "backend": "torch"}
    return rowmax.attention_varlen(*rows, *offsets, **(usual | more))  # pyright: ignore


@pytest.mark.skipif(torch_compat.TensorGuards is None, reason="torch has no such check")
@pytest.mark.parametrize("backend", ["torch", None])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("twice", [True, False])
def test_a_packed_call_is_found(
    twice: bool, kind: torch.dtype, backend: str | None, calls: list[Any]
) -> None:
    """Each call has the sequences of its own offsets."""
    for n, lengths in enumerate(((8, 8), (3, 13), (16, 0), (1, 15), (9, 7))):
        rows, cu = packed(*lengths, kind=kind, requires_grad=True)
        offsets = (cu, cu) if twice else (cu, cu.clone())
        calls.clear()
        out, lse = attend_packed(rows, *offsets, backend=backend, return_lse=True)
        assert bool(calls) == (n == 0)
        want, _ = attend_packed(rows, *offsets, backend="reference", return_lse=True)
        assert lse.shape == (2, 16)
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
        grads = [torch.autograd.grad(t.square().sum(), rows) for t in (out, want)]
        torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


PACKED_TERMS: dict[str, Callable[[int], dict[str, Any]]] = {
    "bias": lambda n: {"bias": torch.randn(2, 2, 16, 16)},
    "sink": lambda n: {"sink": torch.randn(2)},
    "alibi": lambda n: {"alibi": torch.rand(2)},
    "lengths": lambda n: {"mask": rowmax.PrefixLengths(torch.tensor([n % 5, 40]).int())},
    "all": lambda n: {
        "bias": torch.randn(1, 1, 16, 16),
        "sink": torch.randn(2),
        "alibi": torch.rand(2),
        "mask": rowmax.PrefixLengths(torch.tensor([n % 5, 6])) & rowmax.Window(4, 1),
    },
}


@pytest.mark.skipif(torch_compat.TensorGuards is None, reason="torch has no such check")
@pytest.mark.parametrize("backend", ["torch", None])
@pytest.mark.parametrize("twice", [True, False])
@pytest.mark.parametrize("name", PACKED_TERMS)
def test_a_packed_call_with_terms_is_found(
    name: str, twice: bool, backend: str | None, calls: list[Any]
) -> None:
    """Each call has its own terms, and another one with the same offsets has none."""
    for n, lengths in enumerate(((8, 8), (3, 13), (16, 0), (1, 15), (9, 7))):
        rows, cu = packed(*lengths, requires_grad=True)
        offsets = (cu, cu) if twice else (cu, cu.clone())
        more = PACKED_TERMS[name](n)
        leaves = (*rows, *(t.requires_grad_() for t in more.values() if isinstance(t, Tensor)))
        calls.clear()
        out = attend_packed(rows, *offsets, backend=backend, **more)
        assert bool(calls) == (n == 0)
        want = attend_packed(rows, *offsets, backend="reference", **more)
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
        grads = [torch.autograd.grad(t.square().sum(), leaves) for t in (out, want)]
        torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)
        plain = attend_packed(rows, *offsets, backend=backend)
        want = attend_packed(rows, *offsets, backend="reference")
        torch.testing.assert_close(plain, want, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="lengths"):
        attend_packed(rows, cu, mask=rowmax.PrefixLengths(torch.tensor([3, -1])))


OTHER_PACKED: dict[str, Callable[[tuple[Tensor, ...], Tensor], Any]] = {
    "more sequences": lambda rows, _: attend_packed(rows, packed(4, 4, 8)[1]),
    "longest": lambda rows, cu: attend_packed(rows, cu, max_seqlen_k=15),
    "longest unknown": lambda rows, cu: attend_packed(rows, cu, max_seqlen_q=None),
    "two tensors": lambda rows, cu: attend_packed(rows, cu, cu.clone()),
    "dtype of offsets": lambda rows, cu: attend_packed(rows, cu.long()),
    "full": lambda rows, cu: attend_packed(rows, cu, causal=False),
    "window": lambda rows, cu: attend_packed(rows, cu, mask=rowmax.Window(3, 0)),
    "lengths": lambda rows, cu: attend_packed(
        rows, cu, mask=rowmax.PrefixLengths(torch.tensor([3, 9]))
    ),
    "sink": lambda rows, cu: attend_packed(rows, cu, sink=torch.zeros(2)),
    "bias": lambda rows, cu: attend_packed(rows, cu, bias=torch.zeros(16, 16)),
    "alibi": lambda rows, cu: attend_packed(rows, cu, alibi=torch.ones(2)),
    "dropout": lambda rows, cu: attend_packed(rows, cu, dropout_p=0.5),
    "strides": lambda rows, cu: attend_packed(
        tuple(t.transpose(0, 1).contiguous().transpose(0, 1) for t in rows), cu
    ),
    "one tensor": lambda rows, cu: attend_packed(3 * rows[:1], cu),
}


@pytest.mark.parametrize("name", OTHER_PACKED)
def test_another_packed_call_takes_the_usual_way(name: str, calls: list[Any]) -> None:
    rows, cu = packed(3, 13)
    attend_packed(rows, cu)
    calls.clear()
    attend_packed(rows, cu)
    assert not calls or torch_compat.TensorGuards is None
    OTHER_PACKED[name](rows, cu)
    assert calls


WRONG: dict[str, tuple[list[int], dict[str, int]]] = {
    "first offset": ([1, 3, 16], {}),
    "fall": ([0, 17, 16], {}),
    "last offset": ([0, 3, 15], {}),
    "longest sequence": ([0, 3, 16], {"max_seqlen_q": 12, "max_seqlen_k": 13}),
}


@pytest.mark.parametrize("name", WRONG)
def test_offsets_are_checked_in_each_call(name: str) -> None:
    rows, _ = packed()
    offsets, more = WRONG[name]
    right = torch.tensor([0, 8, 16], dtype=torch.int32)
    for _ in range(2):
        attend_packed(rows, right, **more)
    with pytest.raises(ValueError, match=name):
        attend_packed(rows, torch.tensor(offsets, dtype=torch.int32), **more)


def test_a_packed_call_under_autocast_has_its_dtype() -> None:
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert attend_packed(*packed(3, 13)).dtype == torch.bfloat16
        assert attend_packed(*packed(3, 13)).dtype == torch.float32


def test_repeated_calls_of_plain_operations_have_every_derivative() -> None:
    """Autograd sees every step of the reference: no call of it is found by one check."""
    recent.calls._kinds.clear()
    for _ in range(3):
        q, k, v = (torch.randn(1, 5, 2, 4, dtype=torch.float64, requires_grad=True) for _ in "qkv")
        found = rowmax.attention(q, k, v, backend="reference")
        for _ in range(3):
            (found,) = torch.autograd.grad(found.square().sum(), q, create_graph=True)
        assert found.isfinite().all()
    assert not recent.calls._kinds


TERMS: dict[str, Callable[[int], dict[str, Any]]] = {
    "none": lambda n: {},
    "bias": lambda n: {"bias": torch.randn(2, 8, 8)},
    "sink": lambda n: {"sink": torch.randn(2)},
    "alibi": lambda n: {"alibi": torch.rand(2)},
    "mask": lambda n: {"mask": torch.randn(8, 8) > 0},
    "lengths": lambda n: {"mask": rowmax.PrefixLengths(torch.tensor([n % 9, 8]).int())},
    "bias and window": lambda n: {"bias": torch.randn(8, 8), "mask": rowmax.Window(3, 2)},
}


@pytest.mark.skipif(torch_compat.TensorGuards is None, reason="torch has no such check")
@pytest.mark.parametrize("name", TERMS)
def test_the_backward_of_a_call_with_terms_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors are others in each call, and so are their values."""
    pytest.importorskip("numba")
    real, found = dispatch.Prepared.repeated_backward, []

    def repeated(*given: Any) -> Any:
        gradients = real(*given)
        found.append(gradients is not None)
        return gradients

    monkeypatch.setattr(dispatch.Prepared, "repeated_backward", repeated)
    for n in range(8):
        tensors = qkv(requires_grad=True)
        more = {"causal": False, **TERMS[name](n)}
        grads = [
            torch.autograd.grad(attend(*tensors, backend=one, **more).square().sum(), tensors)
            for one in ("cpu", "reference")
        ]
        for x, y in zip(*grads, strict=True):
            torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)
    assert found[-3:] == [True] * 3


def on_gpu(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Return a tensor that says it is on a GPU, and has no values."""
    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype, device="cuda")


def test_documents_of_a_gpu_are_tensors_of_the_call() -> None:
    ids, cu = on_gpu(8), on_gpu(4)
    assert recent.documents_of(rowmax.Documents(ids)) is ids
    assert recent.documents_of(rowmax.Documents(cu_seqlens=cu) & rowmax.Causal()) is cu
    by_ids, by_offsets = (rowmax.Documents(ids), rowmax.Documents(cu_seqlens=cu))
    keys = [recent.limits_of(mask, ids) for mask in (rowmax.Causal(), by_ids, by_offsets)]
    assert len(set(keys)) == 3
    assert recent.limits_of(by_ids) is None


def test_other_documents_take_the_usual_way() -> None:
    ids, cu = on_gpu(8), on_gpu(4)
    for mask in (
        None,
        rowmax.Causal(),
        torch.ones(8, 8, dtype=torch.bool),
        rowmax.Documents(torch.zeros(8, dtype=torch.int32)),
        rowmax.Documents(cu_seqlens=torch.tensor([0, 8])),
        rowmax.Documents(ids, q_ids=ids),
        rowmax.Documents(cu_seqlens=cu, q_ids=ids),
        rowmax.Documents(ids) & rowmax.Documents(cu_seqlens=cu),
        rowmax.Mask(documents=(Ids(cu_seqlens=cu, q_id=1),)),
        rowmax.LeftPadding(ids),
        rowmax.Dilated(2),
    ):
        assert recent.documents_of(mask) is None
    allowed = rowmax.Documents(ids) & torch.ones(8, 8, dtype=torch.bool)
    assert recent.limits_of(allowed, recent.documents_of(allowed)) is None
