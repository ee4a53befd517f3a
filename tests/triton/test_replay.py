"""Calls that are recorded, and repeated with other tensors."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from rowmax.call import dispatch
from rowmax.call.inputs import (
    Cotangents,
    Gradients,
    Options,
    Tangents,
    Tensors,
    Wanted,
    WantedSecond,
)

pytest.importorskip("triton")

compiled = importlib.import_module("rowmax.gpu.compiled")
replay = importlib.import_module("rowmax.gpu.replay")


class Launch:
    """A launch that notes the addresses that it is repeated with."""

    def __init__(self, copies: tuple[Any, ...] = (), private: bool = True) -> None:
        self.copies, self.private = copies, private
        self.repeated: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def __call__(self, t: Any, bases: tuple[Any, ...] = ()) -> None:
        compiled._note_launch(self, t, bases)

    def addressed(self, t: Any, bases: Any) -> Any:
        return (lambda *found: self.repeated.append(found)) if self.private else None


def _empty(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(replay, "_is_recordable", lambda device: True)
    monkeypatch.setattr(replay.compat, "current_device", lambda: None)
    monkeypatch.setattr(replay, "empty_on_gpu", _empty)
    yield
    replay._RECORDS.clear()


def inputs(*, one: bool = False) -> Tensors:
    q, k, v = (torch.randn(2, 4, 2, 8) for _ in range(3))
    return Tensors(q, q, q) if one else Tensors(q, k, v)


def test_launches_are_repeated_at_the_addresses_of_other_tensors() -> None:
    table, launch = torch.arange(8), Launch(("copy", None, "copy"))

    def run(given: Tensors) -> tuple[Tensor, Tensor]:
        q, k, v = given[:3]
        out, words = q.new_empty(q.shape), q.new_empty(30)
        lse = out[0, :, 0].new_empty(3, dtype=torch.float64)
        launch((out, None, table, lse, compiled.Span(words, 8), k[:, 1:], q), (v, None, words))
        return out, lse

    # q, k and v are one tensor in the call that is recorded
    results, again = replay.record(run, inputs(one=True))
    assert [x.dtype for x in results] == [torch.float32, torch.float64]
    for alone in (False, True):  # q, k and v alone stand for all inputs
        given = inputs()
        out, lse = again(given[:3] if alone else given)
        assert out.shape == given.q.shape
        assert (lse.shape, lse.dtype) == ((3,), torch.float64)
        pointers, bases = launch.repeated[-1]
        words = bases[1]
        row = given.k.stride(1) * 4
        want = [out, table, lse, words + 8, given.k.data_ptr() + row, given.q]
        assert list(pointers) == [x if isinstance(x, int) else x.data_ptr() for x in want]
        assert bases[0] == given.v.data_ptr()
        assert words not in {x.data_ptr() for x in (out, lse, *given[:3])}


def test_the_first_result_has_the_memory_that_is_given() -> None:
    launch = Launch()

    def run(given: Tensors) -> tuple[Tensor, Tensor]:
        words, out = given.q.new_empty(3), given.q.new_empty(given.q.shape)
        lse = given.q.new_empty(5)
        launch((words, out, lse))
        return out, lse

    _, again = replay.record(run, inputs())
    memory = torch.empty(3, *inputs().q.shape)
    out, lse = again(inputs(), memory[1])
    assert out.data_ptr() == memory[1].data_ptr()
    pointers, _ = launch.repeated[-1]
    assert pointers[1:] == (memory[1].data_ptr(), lse.data_ptr())
    shape = memory[1].shape
    for other in (
        memory[1].transpose(1, 2).contiguous().transpose(1, 2),  # strides
        memory[1, :1],  # a shape
        memory[1].double(),  # a dtype
        torch.empty(memory[1].numel() + 1)[1:].view(shape),  # an address of no 16 bytes
    ):
        out, _ = again(inputs(), other)
        assert out.data_ptr() != other.data_ptr()
        assert (out.shape, out.dtype) == (shape, torch.float32)
        assert launch.repeated[-1][0][1] == out.data_ptr()


def test_a_first_result_that_is_not_made_needs_no_memory() -> None:
    launch = Launch()

    def run(given: tuple[Any, ...]) -> Gradients:
        dk = given[0].new_empty(given[0].shape)
        launch((dk,))
        return Gradients(None, dk)

    _, again = replay.record(run, (torch.empty(4), torch.empty(4)))
    memory = torch.empty(4)
    found = again((torch.empty(4), torch.empty(4)), memory)
    assert found.q is None
    assert found.k.data_ptr() != memory.data_ptr()


def test_kernels_are_those_of_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    current = ["cuda:0"]

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(str(device))
        yield
        current.pop()

    class OnDevice(Launch):
        def addressed(self, t: Any, bases: Any) -> Any:
            found.append(current[-1])
            return super().addressed(t, bases)

    found: list[str] = []
    launch = OnDevice()
    monkeypatch.setattr(replay, "_current", on)

    def run(given: Tensors) -> tuple[Tensor]:
        out = given.q.new_empty(given.q.shape)
        launch((out,))
        return (out,)

    given = inputs()
    replay.record(run, given)
    assert found == [str(given.q.device)]


def test_results_keep_their_type_and_strides() -> None:
    launch = Launch()

    def run(given: tuple[Any, ...]) -> Gradients:
        q = given[0]
        dq = q.new_empty_strided(q.shape, (1, 2, 8, 16))
        launch((dq, q))
        return Gradients(dq)

    _, again = replay.record(run, (inputs().q, None))
    found = again((inputs().q, None))
    assert isinstance(found, Gradients)
    assert found.q is not None
    assert found.q.stride() == (1, 2, 8, 16)
    assert found.k is None


def test_sums_zeros_and_copies_are_repeated_between_launches() -> None:
    """Operations read what a launch wrote, given tensors that want gradients, and kept tables."""
    table = torch.arange(8.0)

    class Fill(Launch):
        """Write the numbers 0, 1, ... to a tensor; repeated, twice as many."""

        def __call__(self, t: Any, bases: tuple[Any, ...] = ()) -> None:
            super().__call__(t, bases)
            self.write(t[0].data_ptr(), 1)

        def addressed(self, t: Any, bases: Any) -> Any:
            return lambda pointers, bases: self.write(pointers[0], 2)

        def write(self, address: int, step: int) -> None:
            numbers = (ctypes.c_float * 30)(*range(0, 30 * step, step))
            ctypes.memmove(address, numbers, ctypes.sizeof(numbers))

    fill, last = Fill(), Launch()

    def run(given: Tensors) -> tuple[Tensor, ...]:
        parts = given.q.new_empty(2, 3, 5)
        fill((parts,))
        zeros = parts.new_zeros(3, 2)
        total = parts.view(2, 3, 5)[:, 1:].sum((0, 2)).to(torch.float64)
        kept = parts.sum([0], keepdim=True)
        columns = parts[1].transpose(0, 1)[1:].contiguous()
        copy, row = given.k.transpose(1, 2).contiguous(), table[2:].to(torch.float64)
        last((zeros, total, columns))
        return zeros, total, kept, columns, copy, row

    given = inputs()
    _, again = replay.record(run, given)
    assert callable(again)
    given = inputs()
    given = given._replace(k=given.k.requires_grad_())
    zeros, total, kept, columns, copy, row = again(given)
    parts = 2 * torch.arange(30.0).view(2, 3, 5)
    assert torch.equal(zeros, torch.zeros(3, 2))
    assert torch.equal(total, parts[:, 1:].sum((0, 2)).double())
    assert torch.equal(kept, parts.sum(0, keepdim=True))
    assert torch.equal(columns, parts[1].T[1:])
    assert torch.equal(copy, given.k.transpose(1, 2))
    assert not copy.requires_grad
    assert torch.equal(row, table[2:].double())
    assert last.repeated[-1][0] == tuple(x.data_ptr() for x in (zeros, total, columns))


@pytest.mark.parametrize("which", [slice(1, None), slice(0, 1)])
def test_a_result_may_be_a_view(which: slice) -> None:
    launch = Launch()

    def run(given: Tensors) -> tuple[Tensor, Tensor]:
        out = given.q.new_empty(given.q.shape)
        launch((out,))
        return out[which].transpose(1, 2), out

    (want, _), again = replay.record(run, inputs())
    memory = torch.empty(inputs().q.shape)
    view, out = again(inputs(), memory)
    assert (view.shape, view.stride(), view.storage_offset()) == (
        want.shape,
        want.stride(),
        want.storage_offset(),
    )
    assert view.untyped_storage().data_ptr() == out.data_ptr() != memory.data_ptr()


@pytest.mark.parametrize("what", ["a product", "a sum", "a given tensor", "a public launch"])
def test_other_calls_are_not_recorded(what: str) -> None:
    launch = Launch(private=what != "a public launch")

    def run(given: Tensors) -> tuple[Tensor]:
        out = given.q.new_empty(given.q.shape)
        launch((out,))
        if what == "a product":
            launch((2 * out,))
        return (out.sum() if what == "a sum" else given.k if "given" in what else out,)

    results, again = replay.record(run, inputs())
    assert again is False
    assert isinstance(results[0], Tensor)


@pytest.mark.parametrize("kind", ["tangent", "tangent_backward"])
def test_second_order_is_repeated(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tangents and cotangents are tensors of a record, as the inputs are."""
    launch, runs = Launch(), []

    class Backend:
        record = staticmethod(replay.record)

        @staticmethod
        def tangent(problem: Any, tensors: Tensors, tangents: Tangents) -> tuple[Tensor, ...]:
            runs.append(kind)
            made = tuple(tensors.q.new_empty(n + 1) for n in range(4))
            launch((*made, tensors.q, tangents.k))
            return made

        @staticmethod
        def tangent_backward(*given: Any) -> tuple[Gradients, Gradients]:
            _, tensors, tangents, (out, _, _, tlse), cotangents, _ = given
            runs.append(kind)
            dq, dtv = (x.new_empty(x.shape) for x in (tensors.q, tangents.v))
            launch((dq, dtv, tensors.q, tangents.k, out, tlse, cotangents.tout))
            return Gradients(q=dq), Gradients(v=dtv)

    class Plan:
        first = Backend

    monkeypatch.setattr(dispatch, "choose", lambda *_: Plan)
    call = dispatch.Prepared(Options(1.0), None)  # pyright: ignore
    every = Wanted(*(True,) * 6)

    def once(gap: int = 0) -> None:
        tensors = inputs()
        tangents = Tangents(k=torch.randn(2, 4, 2, 8 + gap)[..., :8], v=torch.randn(2, 4, 2, 8))
        rows = [torch.randn(n + 1) for n in range(4)]
        read = [tensors.q, tangents.k]
        if kind == "tangent":
            found: Any = call.tangent(tensors, tangents)
            made = list(found)
        else:
            cotangents = Cotangents(tout=torch.randn(5))
            wanted = WantedSecond(every, every)
            found = call.tangent_backward(tensors, tangents, rows, cotangents, wanted)
            made, read = [found[0].q, found[1].v], [*read, rows[0], rows[3], cotangents.tout]
            assert found[1].q is None
        if launch.repeated:
            assert list(launch.repeated[-1][0]) == [x.data_ptr() for x in (*made, *read)]

    for _ in range(4):
        once()
    assert (len(runs), len(launch.repeated)) == (2, 2)  # run, run and recorded, repeated twice
    launch.repeated.clear()
    once(gap=8)  # other strides are another call
    assert (len(runs), len(launch.repeated)) == (3, 0)


class _Other(Tensor):
    """A subclass."""


class _Backward:
    """A backend whose backward launches one kernel."""

    record = staticmethod(replay.record)

    def __init__(self) -> None:
        self.launch, self.runs = Launch(), 0

    def backward(self, *given: Any) -> Gradients:
        _, tensors, out, lse, dout, _, _ = given
        self.runs += 1
        made = [x.new_empty(x.shape) for x in tensors[:3]]
        self.launch((*made, *tensors[:3], out, lse, dout))
        return Gradients(*made)


def call_of_one_backend(monkeypatch: pytest.MonkeyPatch) -> tuple[_Backward, dispatch.Prepared]:
    """Return a backend, and a call whose gradients it computes."""
    backend = _Backward()

    class Plan:
        first = whole = backend

        @staticmethod
        def computes(wanted: Wanted) -> _Backward:
            return backend

    monkeypatch.setattr(dispatch, "choose", lambda *_: Plan)
    return backend, dispatch.Prepared(Options(1.0), None)  # pyright: ignore


def plain_rows() -> tuple[Tensor, ...]:
    """Return q, k, v, out, lse and the gradient of out."""
    q, k, v, out, dout = (torch.randn(2, 4, 2, 8) for _ in range(5))
    return q, k, v, out, torch.randn(2, 2, 4), dout


def test_the_backward_of_a_plain_call_is_found_by_one_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, call = call_of_one_backend(monkeypatch)
    every = Wanted(True, True, True, False, False, False)

    def usual(*rows: Tensor) -> Gradients:
        q, k, v, out, lse, dout = rows
        return call.backward(Tensors(q, k, v), out, lse, dout, None, every)

    for _ in range(3):
        assert call.repeated_backward(plain_rows(), every[:3]) is None
        usual(*plain_rows())
    rows = plain_rows()
    found = call.repeated_backward(rows, every[:3])
    assert backend.runs == 2
    assert found is not None
    want = [x.data_ptr() for x in (*found[:3], *rows)]  # pyright: ignore
    assert list(backend.launch.repeated[-1][0]) == want
    others = {
        "strides": (*rows[:5], rows[5].transpose(1, 2).contiguous().transpose(1, 2)),
        "a term": (*rows[:3], torch.randn(4, 4), *rows[3:]),
        "no gradient of out": (*rows[:5], None),
        "a subclass": (*rows[:5], rows[5].as_subclass(_Other)),
    }
    for name, other in others.items():
        assert call.repeated_backward(other, every[:3]) is None, name  # pyright: ignore
    assert call.repeated_backward(rows, (True, True, False)) is None
    with torch.enable_grad(), torch.autograd.profiler.profile():
        assert call.repeated_backward(rows, every[:3]) is None  # a profiler sees the operator
    replay._RECORDS.clear()
    assert call.repeated_backward(rows, every[:3]) is None


def test_the_backward_of_a_call_with_terms_is_found_by_one_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keep apart which terms there are, and offsets that are one tensor or two."""
    backend, call = call_of_one_backend(monkeypatch)
    every = Wanted(True, True, True, True, False, False)
    wanted = (*every, *(False,) * (len(Tensors._fields) - len(every)))

    def rows(*, same: bool = False, bias: bool = True) -> tuple[Any, ...]:
        q, k, v, *rest = plain_rows()
        cu_q, cu_k = torch.arange(3), torch.arange(3)
        inputs = Tensors(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_q if same else cu_k)
        return (*(inputs._replace(bias=torch.randn(4, 4)) if bias else inputs), *rest)

    def usual(given: tuple[Any, ...]) -> Gradients:
        *inputs, out, lse, dout = given
        return call.backward(Tensors(*inputs), out, lse, dout, None, every)

    for same, times in ((False, 3), (True, 1)):  # the second kind has the record of the first
        for _ in range(times):
            assert call.repeated_backward(rows(same=same), wanted) is None
            usual(rows(same=same))
        given = rows(same=same)
        found = call.repeated_backward(given, wanted)
        assert found is not None
        want = [*found[:3], *given[:3], *given[-3:]]
        assert list(backend.launch.repeated[-1][0]) == [x.data_ptr() for x in want]
    assert call.repeated_backward(rows(bias=False), wanted) is None
    assert call.repeated_backward((*rows()[:-1], None), wanted) is None
    assert call.repeated_backward(rows(), (False, *wanted[1:])) is None


def test_a_record_that_was_dropped_repeats_nothing() -> None:
    launch = Launch()

    def run(given: Tensors) -> tuple[Tensor]:
        out = given.q.new_empty(3)
        launch((out,))
        return (out,)

    _, again = replay.record(run, inputs())
    assert again(inputs())[0].shape == (3,)
    replay._RECORDS.clear()
    assert again(inputs()) is None


def test_launches_of_other_threads_are_not_gathered() -> None:
    import threading

    with compiled.recorded_by() as found:
        other = threading.Thread(target=Launch(), args=((1,),))
        other.start()
        other.join()
        Launch()((2,))
    assert [t for _, t, _ in found] == [(2,)]
