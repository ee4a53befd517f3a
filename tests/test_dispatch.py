"""Modes, profilers and other kinds of tensors see a call before its kernel runs.

A call that none of them can observe skips the dispatcher, forward and backward.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import rowmax
from rowmax import torch_compat
from rowmax.operators import autograd
from rowmax.testing import poisoned

from .small_calls import attention, inputs


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [False, True])
def test_a_dispatch_mode_sees_the_operator(grad: bool) -> None:
    """A call that no mode observes skips the dispatcher; its result is the same."""
    q, k, v = inputs(2, 24, grad=grad)
    alone = attention(q, k, v, causal=True)
    with _Seen() as dispatched:
        a = attention(q, k, v, causal=True)
    assert "rowmax.forward.default" in dispatched.names
    with _Functions() as functions:
        b = attention(q, k, v, causal=True)
    assert any("rowmax" in name for name in functions.names)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        c = attention(q, k, v, causal=True)
    assert "rowmax::forward" in {event.name for event in profile.events() or ()}
    for out in (a, b, c):
        assert torch.equal(out, alone)
        assert out.requires_grad == alone.requires_grad == grad


def test_whoever_listens_sees_the_backward() -> None:
    q, k, v = inputs(2, 24, grad=True)
    out = attention(q, k, v, causal=True)
    dout = torch.randn_like(out)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    alone = gradients()
    with _Seen() as dispatched:
        a = gradients()
    assert "rowmax.backward.default" in dispatched.names
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        b = gradients()
    assert "rowmax::backward" in {event.name for event in profile.events() or ()}
    for got in (a, b):
        for x, y in zip(got, alone, strict=True):
            assert torch.equal(x, y)


def test_a_profiler_of_all_threads_sees_the_operators() -> None:
    q, k, v = inputs(2, 24, grad=True)
    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=every
    ) as profile:
        attention(q, k, v).sum().backward()
    names = {event.name for event in profile.events() or ()}
    assert {"rowmax::forward", "rowmax::backward"} <= names


def test_cotangents_in_batches() -> None:
    """By the older ``vmap``, whose tensors look plain."""
    q, k, v = inputs(2, 12, grad=True)
    out = attention(q, k, v, causal=True)
    douts = torch.randn(3, *out.shape, dtype=out.dtype)
    got = torch.autograd.grad(out, (q, k, v), douts, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(out, (q, k, v), d, retain_graph=True) for d in douts]
    for x, *parts in zip(got, *each, strict=True):
        torch.testing.assert_close(x, torch.stack(parts), rtol=0, atol=0)

    def summed(q: Tensor) -> Tensor:
        return attention(q, k, v, causal=True).sum((-1, -2))

    rows, plain = (
        torch.autograd.functional.jacobian(summed, q, vectorize=at_once)
        for at_once in (True, False)
    )
    torch.testing.assert_close(rows, plain, rtol=0, atol=0)


def test_plain_is_what_a_kernel_can_read() -> None:
    x = torch.randn(2, 3)
    with torch.inference_mode():
        inference = torch.randn(3)
    for t in (x, x.t(), x[1:], torch.nn.Parameter(x), inference, x.int()):
        assert torch_compat.is_plain(t)
        assert torch_compat.plain_addresses([None, t]) == [t.data_ptr()]
    for t in (
        torch._efficientzerotensor((2, 3)),
        torch._neg_view(x),
        torch.empty(3, device="meta"),
        x.to_sparse(),
    ):
        assert not torch_compat.is_plain(t)
        assert torch_compat.plain_addresses([x, t]) is None
    assert torch_compat.plain_addresses([x[:0], None]) == [0]


def test_memory_of_a_gpu_is_made_by_public_functions_where_torch_has_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = torch.empty_strided

    def empty_strided(*args: Any, device: str, **more: Any) -> torch.Tensor:
        assert device == "cuda"
        return made(*args, **more)

    monkeypatch.setattr(torch, "empty_strided", empty_strided)
    x = torch_compat._public_empty((2, 3), (1, 2), torch.float16)
    assert (x.shape, x.stride(), x.dtype) == ((2, 3), (1, 2), torch.float16)


@pytest.mark.parametrize("name", ["empty_on_cpu", "filled_on_cpu"])
@pytest.mark.parametrize("inference", [False, True])
def test_memory_of_a_cpu_is_that_of_torch(name: str, inference: bool) -> None:
    """The second function is public, and stands for the first where torch has no other."""
    made = getattr(torch_compat, name)
    with torch.inference_mode(inference):
        x = made((2, 3), (1, 2), torch.float16)
        assert torch_compat.is_plain(x)
    assert (x.shape, x.stride(), x.dtype) == ((2, 3), (1, 2), torch.float16)
    assert (x.device.type, x.requires_grad, x.is_inference()) == ("cpu", False, inference)


def test_repeated_calls_have_results_that_torch_may_fill() -> None:
    """In its deterministic mode, in which a kernel that leaves a number unwritten shows a NaN."""
    q, k, v = torch.randn(1, 1, 2, 16), torch.randn(1, 9, 2, 16), torch.randn(1, 9, 2, 16)
    want, made = rowmax.attention(q, k, v, backend="reference"), []
    usual = torch.empty_strided

    def empty_strided(*args: Any, **more: Any) -> Tensor:
        found = usual(*args, **more)
        made.append(bool(found.isnan().all()))
        return found

    with poisoned(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_strided", empty_strided)
        for _ in range(4):
            made.clear()
            torch.testing.assert_close(rowmax.attention(q, k, v, backend="cpu"), want)
    assert made == [True, True]  # out and lse


def test_a_cotangent_of_zeros_that_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no memory: the dispatcher writes them for the kernel."""
    q, k, v = inputs(2, 12, grad=True)
    out = attention(q, k, v)
    dout = torch._efficientzerotensor(out.shape, dtype=out.dtype)
    direct = []
    is_direct = autograd.is_direct
    monkeypatch.setattr(autograd, "is_direct", lambda x: direct.append(is_direct(x)) or direct[-1])
    for grad in torch.autograd.grad(out, (q, k, v), dout):
        assert not grad.count_nonzero()
    assert direct == [False]


def test_what_was_saved_may_come_back_as_another_kind_of_tensor() -> None:
    class Wrapped(Tensor):
        seen: ClassVar[list[str]] = []
        held: Tensor

        @staticmethod
        def __new__(cls, held: Tensor) -> Wrapped:
            made = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
            made.held = held
            return made

        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            cls.seen.append(str(func))
            plain = [x.held if isinstance(x, Wrapped) else x for x in args]
            out = func(*plain, **(kwargs or {}))
            return cls(out) if func is torch.ops.aten.detach.default else out

    q, k, v = inputs(1, 12, grad=True)
    want = torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
    leaves = {x.data_ptr() for x in (q, k, v)}

    def unpack(t: Tensor) -> Tensor:
        return t if t.data_ptr() in leaves else Wrapped(t)

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        out = attention(q, k, v)
    got = torch.autograd.grad(out.sum(), (q, k, v))
    assert "rowmax.backward.default" in Wrapped.seen
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


def test_a_tensors_subclass_goes_through_the_dispatcher() -> None:
    class Tagged(Tensor):
        seen: ClassVar[list[str]] = []

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            cls.seen.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    q, k, v = inputs(1, 8)
    out = attention(q.as_subclass(Tagged), k, v)
    assert isinstance(out, Tagged)
    assert any("rowmax" in name for name in Tagged.seen)


@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
def test_a_negation_put_off_is_done(name: str, backend: str) -> None:
    """``z.conj().imag`` is a view that says that its numbers must be negated when read."""
    tensors = dict(zip("qkv", inputs(1, 12), strict=True)) | {"bias": torch.randn(12, 12).double()}
    lazy = torch.complex(torch.zeros_like(tensors[name]), -tensors[name]).conj().imag
    assert lazy.is_neg()
    for grad in (False, True):
        given = {**tensors, name: lazy.detach().requires_grad_(grad)}
        out = rowmax.attention(**given, backend=backend)
        want = rowmax.attention(**tensors, backend=backend)
        torch.testing.assert_close(out.detach(), want)
