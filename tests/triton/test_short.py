"""Few keys: one program a kv head computes all gradients (``gpu/triton/short.py``)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import rowmax
from rowmax.call import dispatch as backends
from rowmax.call.problem import Problem, Wanted
from rowmax.gpu import hopper, replay, short_keys
from rowmax.testing import COVERING, Case, answer, complaints, cotangents, expected, make, poisoned
from tests.drawn import drawn, wrong
from tests.triton.test_interpreter import _watched, interpreter  # noqa: F401  (a fixture)

forward = importlib.import_module("rowmax.gpu.triton.forward")
short = importlib.import_module("rowmax.gpu.triton.short")
launch = importlib.import_module("rowmax.gpu.launch")
tiles = importlib.import_module("rowmax.gpu.tiles")

pytestmark = pytest.mark.filterwarnings("ignore")  # the interpreter's own, of numpy
interpreted = pytest.mark.skipif(
    not isinstance(forward.forward_kernel, interpreter.InterpretedFunction),
    reason="the kernels were imported without TRITON_INTERPRET=1",
)

Forced = Callable[..., list[int]]
#: cases whose backward can be one of few keys
TAKEN = [case for case in COVERING if case.sequences is None and case.nk != 0 and case.nq != 0]


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Forced:
    """Return a function that sends backwards to the kernel; its list counts the launches."""

    def forced(parts: int = 1, block_q: int = 64) -> list[int]:
        count = [0]

        def tiles_of(problem: Problem, wanted: Wanted | None = None) -> Any:
            if problem.varlen or not problem.nk or wanted is None or any(wanted[3:]):
                return None
            count[0] += 1
            return tiles.Tiles(block_q, tiles.padded(problem.nk), 4, 2, parts=parts)

        launch._jobs.clear()
        monkeypatch.setattr(short_keys, "tiles_of", tiles_of)
        return count

    return forced


def check(case: Case, dtype: torch.dtype, taken: list[int]) -> None:
    call = make(replace(case, grads=("q", "k", "v")), dtype=dtype)
    grads = cotangents(call)
    want = expected(call, *grads)
    with poisoned():
        got = answer(call, *grads, backend="triton")
    found = complaints(got, want)
    assert not found, "\n".join(found)
    assert taken[0] > 0


@interpreted
@pytest.mark.parametrize("case", TAKEN[::2], ids=str)
def test_float32(case: Case, forced: Forced) -> None:
    check(case, torch.float32, forced())


@interpreted
@pytest.mark.parametrize("case", TAKEN[1::4], ids=str)
def test_float16(case: Case, forced: Forced) -> None:
    check(case, torch.float16, forced(block_q=32))


@interpreted
@pytest.mark.parametrize("case", TAKEN[3::4], ids=str)
def test_parts(case: Case, forced: Forced) -> None:
    check(case, torch.float32, forced(parts=3, block_q=16))


@interpreted
@pytest.mark.parametrize("seed", range(6))
def test_drawn_calls(seed: int, forced: Forced) -> None:
    taken = forced(parts=1 + seed % 3, block_q=(16, 32, 64)[seed % 3])
    one = drawn(seed, "float32", 1200)
    one = replace(one, case=replace(one.case, sequences=None, grads=("q", "k", "v")))
    texts = wrong(one, "triton")
    assert not texts, "\n".join([*texts, one.snippet("triton", "cpu")])
    assert taken[0] > 0


@interpreted
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("parts", [1, 2])
def test_numbers_that_are_not_seen_do_not_matter(
    name: str, bad: float, parts: int, forced: Forced
) -> None:
    """Keys from 44 on are masked, and queries before 10 see no key."""
    forced(parts, block_q=16)
    case = Case("", b=1, nq=50, nk=60, hq=4, hk=2, d=16)
    call = make(case)
    q, k, v = (x.detach() for x in call.inputs)
    row, col = torch.arange(50)[:, None], torch.arange(60)[None]
    mask = (row >= 10) & (col < 44)
    dout = torch.randn(1, 50, 4, 16)

    def gradients(name: str | None) -> tuple[torch.Tensor, ...]:
        given = {"q": q, "k": k, "v": v, "dout": dout}
        if name is not None:
            given[name] = given[name].clone()
            given[name][:, slice(44, None) if name in "kv" else slice(10)] = bad
        leaves = [given[n].clone().requires_grad_() for n in "qkv"]
        out = rowmax.attention(*leaves, mask=mask, backend="triton")
        return torch.autograd.grad(out, leaves, given["dout"])

    for x, want in zip(gradients(name), gradients(None), strict=True):
        torch.testing.assert_close(x, want)
    assert gradients(None)[0][:, :10].abs().max() == 0.0


@interpreted
def test_repeats_and_batches_have_the_same_bits(forced: Forced) -> None:
    forced(2, block_q=16)
    call = make(Case("", b=3, nq=90, nk=33, hq=4, hk=2, d=16, causal=True, alibi=True,
                     grads=("q", "k", "v")))  # fmt: skip
    grads = cotangents(call)
    first, again = (answer(call, *grads, backend="triton") for _ in range(2))
    for (name, x, _), (_, y, _) in zip(first.items(), again.items(), strict=True):
        assert torch.equal(x, y), name


# --- the plan ----------------------------------------------------------------------------------


def problem(**more: Any) -> Problem:
    """Return 64 sequences of 197 positions, 12 heads of 64, without their tensors."""
    batch = more.pop("b", 64)
    given = make(Case("", **{"b": 1, "nq": 197, "hq": 12, "d": 64, **more}), dtype=torch.bfloat16)
    return given.problem()[0]._replace(batch=batch, device="cuda")


@pytest.fixture
def hopper_device(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = tiles.Limits("NVIDIA H200", 227 << 10, 32, split=True, wgmma=True)
    monkeypatch.setattr(short_keys, "limits_of", lambda device: limits)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("hopper_device")
@pytest.mark.parametrize(
    ("more", "keys"),
    [
        ({}, 256),
        ({"nq": 77, "causal": True}, 128),
        ({"nq": 128, "d": 128, "hk": 4}, 128),
        ({"nq": 1}, 64),
        ({"sink": True, "grads": ("q",)}, 256),
        ({"nq": 257}, None),
        ({"nq": 129, "d": 128}, None),
        ({"nq": 64, "d": 136}, None),
        ({"sink": True}, None),
        ({"sequences": ((77, 77), (50, 50))}, None),
        # not measured, or slower
        ({"nq": 64, "d": 128}, None),
        ({"causal": True}, None),
        ({"bias": "1hqk", "grads": ("q",)}, None),
        ({"alibi": True, "grads": ("q", "k", "v")}, None),
    ],
)
def test_calls_of_few_keys(more: dict[str, Any], keys: int | None) -> None:
    case = Case("", **{"b": 1, "nq": 197, "hq": 12, "d": 64, **more})
    found = short_keys.tiles_of(problem(**more), make(case).wanted)
    assert (None if found is None else found.block_k) == keys


@pytest.mark.usefixtures("hopper_device")
def test_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wanted gradients all are; other devices have no tiles."""
    assert short_keys.tiles_of(problem()) is not None
    assert short_keys.tiles_of(problem(sink=True)) is None
    assert short_keys.tiles_of(problem()._replace(dtype=torch.float32)) is None
    assert short_keys.tiles_of(problem()._replace(nk=0)) is None
    other = tiles.Limits("NVIDIA A100", 163 << 10, 32)
    monkeypatch.setattr(short_keys, "limits_of", lambda device: other)
    assert short_keys.tiles_of(problem()) is None
    assert short_keys.forward_tiles(problem()) is None


@pytest.mark.parametrize(
    ("b", "hq", "nq", "count"),
    [(64, 12, 197, 1), (1, 2, 197, 1), (2, 8, 4096, 16), (8, 8, 4096, 4), (64, 8, 4096, 1)],
)
def test_number_of_parts(b: int, hq: int, nq: int, count: int) -> None:
    assert short_keys.parts_of(problem(b=b, hq=hq, nq=nq, nk=77)) == count


@pytest.mark.parametrize(
    ("parts", "launches"), [(1, ["short_kernel"]), (3, ["short_kernel", "add_parts_kernel"])]
)
def test_a_replay_can_repeat_the_launches(
    parts: int, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward makes dq, dk, dv, and memory for parts if there are some; nothing else runs."""
    ran: list[Any] = []
    monkeypatch.setattr(launch.Job, "run", lambda job, ptr: ran.append(job))
    launch._jobs.clear()
    case = Case("", b=2, nq=100, nk=60, hq=4, hk=2, d=16)
    given, tensors = make(case, dtype=torch.float16).problem()
    out, lse = torch.zeros(given.out_shape, dtype=torch.float16), torch.zeros(given.lse_shape)
    dout = torch.zeros_like(out)
    shape = tiles.Tiles(32, 64, 4, 2, parts=parts)
    wanted = Wanted(True, True, True, False, False, False)
    with replay._Watch([]) as watch:
        short.backward(given, tensors, out, lse, dout, None, wanted, shape)
    assert watch.complete
    assert len(watch.made) == 3 + (parts > 1)
    assert [job.kernel.fn.__name__ for job in ran] == launches
    assert ran[0].grid == (2 * 2 * parts, 1, 1)
    launch._jobs.clear()


SMALL: dict[str, Any] = {"b": 8, "nq": 128, "hq": 16}
CROSS: dict[str, Any] = {"b": 8, "nq": 4096, "nk": 77, "hq": 8, "d": 40}


@pytest.mark.parametrize(
    ("more", "of_forward", "of_backward"),
    [
        (SMALL, True, True),
        ({**SMALL, "causal": True}, True, True),
        (CROSS, True, True),
        ({**CROSS, "b": 2}, True, True),
        ({"b": 512, "nq": 64, "hq": 16}, True, True),
        ({"b": 64, "nq": 128, "hq": 16, "hk": 4}, False, True),
        ({}, True, False),  # 64 x 197
        ({"nq": 256, "hq": 16}, False, False),
        ({"b": 256, "nq": 77, "causal": True}, False, False),
        ({**SMALL, "d": 128}, False, False),
        ({**SMALL, "nq": 1}, False, True),
        ({**SMALL, "sink": True}, True, False),  # its gradient may be wanted
    ],
)
def test_hopper_defers_to_triton(
    more: dict[str, Any],
    of_forward: bool,
    of_backward: bool,
    hopper_device: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Leave those calls where Triton's kernels of few keys were faster."""
    loaded = {"hopper": hopper, "triton": importlib.import_module("rowmax.gpu.triton")}
    monkeypatch.setattr(hopper, "_missing", lambda index: None)
    monkeypatch.setattr(backends, "_load", loaded.__getitem__)
    monkeypatch.setattr(loaded["triton"], "_has_capability", lambda *_: True)

    def chosen(call: Any, given: Problem, name: str | None = None) -> str | None:
        return backends.choose.__wrapped__(given, call, name).jobs[0].backend

    for call, deferred in (("forward", of_forward), ("backward", of_backward)):
        assert chosen(call, problem(**more)) == ("triton" if deferred else "hopper"), call
        assert chosen(call, problem(**more), "hopper") == "hopper"


def test_sentences_of_explain(hopper_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    triton_backend = importlib.import_module("rowmax.gpu.triton")
    monkeypatch.setattr(triton_backend.assembler, "note", lambda index: None)
    text = "few keys: triton computes all gradients in one launch"
    assert hopper.defers(problem(**SMALL), "backward") == text
    assert hopper.defers(problem(**SMALL), "forward") == "few keys: triton's tiles are smaller"
    note = "few keys: one program a kv head"
    assert triton_backend.notes(problem(**SMALL), "backward") == [note]
    parts = f"{note}, in 4 parts that a second launch adds"
    assert triton_backend.notes(problem(**CROSS), "backward") == [parts]
    few = problem(b=1, nq=2048, hq=8, hk=1)._replace(device="cpu")
    note = "8 query heads of a kv head in 8 shares, parts that a launch adds"
    assert triton_backend.notes(few, "backward") == [note]
    assert triton_backend.notes(few, "forward") == []
