"""Few queries: heads share a tile, and programs share its keys (``gpu/triton/few.py``)."""

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
from rowmax.call.problem import Problem
from rowmax.gpu import hopper, parts, replay
from rowmax.testing import COVERING, Case, answer, complaints, cotangents, expected, make, poisoned
from tests.drawn import drawn, wrong
from tests.few_queries import with_few_queries
from tests.triton.test_interpreter import _watched, interpreter  # noqa: F401  (a fixture)

forward = importlib.import_module("rowmax.gpu.triton.forward")
few = importlib.import_module("rowmax.gpu.triton.few")
compiled = importlib.import_module("rowmax.gpu.compiled")
launch = importlib.import_module("rowmax.gpu.launch")
tiles = importlib.import_module("rowmax.gpu.tiles")

pytestmark = pytest.mark.filterwarnings("ignore")  # the interpreter's own, of numpy
interpreted = pytest.mark.skipif(
    not isinstance(forward.forward_kernel, interpreter.InterpretedFunction),
    reason="the kernels were imported without TRITON_INTERPRET=1",
)

Split = Callable[..., None]


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> Split:
    """Return a function that makes every forward one of few queries, with these tiles."""
    usual = launch.tiles_for

    def split(count: int, block_q: int = 16, block_k: int = 32) -> None:
        chosen = tiles.Tiles(block_q, block_k, 4, 2, parts=count)
        launch._jobs.clear()
        monkeypatch.setattr(parts, "splits", lambda problem: True)
        monkeypatch.setattr(
            launch, "tiles_for", lambda job, *more: chosen if job == "few" else usual(job, *more)
        )

    return split


def check(case: Case, dtype: torch.dtype) -> None:
    call = make(case, dtype=dtype)
    grads = cotangents(call)
    want = expected(call, *grads)
    with poisoned():
        got = answer(call, *grads, backend="triton")
    found = complaints(got, want)
    assert not found, "\n".join(found)


@interpreted
@pytest.mark.parametrize("case", COVERING[::3], ids=str)
def test_float32(case: Case, split: Split) -> None:
    split(3)
    check(with_few_queries(case), torch.float32)


@interpreted
@pytest.mark.parametrize("count", [2, 70])
def test_programs_that_merge_share_wide_rows(count: int, split: Split) -> None:
    """Each stores some columns; of many parts it reads some at once."""
    split(count, block_k=16)
    case = Case("wide", b=2, nq=3, nk=90, hq=4, hk=2, d=16, dv=300, sink=True, causal=True)
    check(case, torch.float32)


@interpreted
@pytest.mark.parametrize("case", COVERING[1::6], ids=str)
def test_float16(case: Case, split: Split) -> None:
    split(2, block_k=16)
    check(with_few_queries(case), torch.float16)


@interpreted
@pytest.mark.parametrize("case", COVERING[2::12], ids=str)
def test_one_part(case: Case, split: Split) -> None:
    split(1)
    check(with_few_queries(case), torch.float32)


#: more parts than tiles of keys, groups of 3, 5 and 24 heads over tiles of 16 rows, and more parts
#: than the second kernel reads at once
SHAPES = {
    "parts": (Case("", b=1, nq=2, nk=40, hq=2, hk=1, d=16, causal=True), 9, 32),
    "group-3": (Case("", b=2, nq=11, nk=70, hq=6, hk=2, d=16, alibi=True, dropout=0.3), 2, 32),
    "group-5": (Case("", b=1, nq=7, nk=70, hq=10, hk=2, d=16, bias="1hqk", causal=True), 3, 16),
    "group-24": (Case("", b=2, nq=2, nk=50, hq=24, hk=1, d=16, sink=True, left=30), 2, 16),
    "packed": (Case("", hq=10, hk=2, d=16, sequences=((7, 40), (0, 9), (2, 0), (5, 77))), 3, 16),
    "many-parts": (Case("", b=1, nq=1, nk=1100, hq=1, d=16), 68, 16),
}


@interpreted
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str, split: Split) -> None:
    case, count, block_k = SHAPES[name]
    split(count, block_k=block_k)
    check(replace(case, grads=()), torch.float32)


@interpreted
@pytest.mark.parametrize("seed", range(6))
def test_drawn_calls(seed: int, split: Split) -> None:
    split(3)
    one = drawn(seed, "float32", 1200)
    texts = wrong(one, "triton")
    assert not texts, "\n".join([*texts, one.snippet("triton", "cpu")])


@interpreted
@pytest.mark.parametrize("sink", [False, True])
def test_biases_as_small_as_they_go(sink: bool, split: Split) -> None:
    """All biases are ``finfo.min``: out is the mean of v, though parts differ in length.

    Next to such a maximum the logarithm of a part's sum is rounded away.
    """
    split(2, block_k=16)
    least = torch.finfo(torch.float32).min
    q, k, v = (torch.randn(1, n, 1, 16) for n in (1, 40, 40))
    bias = torch.full((1, 1, 1, 40), least)
    given = {"sink": torch.full((1,), least)} if sink else {}
    out, lse = rowmax.attention(
        q, k, v, bias=bias, scale=1e-3, return_lse=True, backend="triton", **given
    )
    want = v.sum(1, keepdim=True) / (41 if sink else 40)
    torch.testing.assert_close(out, want)
    assert lse.item() == least


@interpreted
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["k", "v"])
def test_numbers_of_unseen_keys_do_not_matter(name: str, bad: float, split: Split) -> None:
    """Each part leaves out its own; keys past the length are not read at all."""
    split(3)
    case = Case("", b=2, nq=2, nk=90, hq=2, hk=1, d=16, causal=True, lengths=(0.5, 0.9),
                align="lengths", grads=())  # fmt: skip
    call = make(case)
    clean = call(backend="triton")
    index = "qkv".index(name)
    x = call.inputs[index].clone()
    x[0, 44:] = bad  # the first query sees 44 keys, the last 45
    x[1, 81:] = bad
    inputs = list(call.inputs)
    inputs[index] = x
    out, lse = replace(call, inputs=tuple(inputs))(backend="triton")
    torch.testing.assert_close(out[:, 0], clean[0][:, 0])
    torch.testing.assert_close(lse[:, :, 0], clean[1][:, :, 0])
    assert not out[0, 1].isfinite().any()
    assert torch.equal(out[1], clean[0][1])


@interpreted
def test_repeats_and_batches_have_the_same_bits(split: Split) -> None:
    split(3)
    call = make(Case("", b=3, nq=2, nk=100, hq=4, hk=2, d=16, causal=True, alibi=True, grads=()))
    out, lse = call(backend="triton")
    again = call(backend="triton")
    assert torch.equal(out, again[0])
    assert torch.equal(lse, again[1])
    one = replace(call, inputs=tuple(x[1:2] for x in call.inputs))(backend="triton")
    assert torch.equal(out[1:2], one[0])
    assert torch.equal(lse[1:2], one[1])


@interpreted
def test_a_sink_with_gaps(split: Split) -> None:
    """The second kernel reads the sink as the first reads its inputs."""
    split(2)
    call = make(Case("", b=1, nq=1, nk=64, hq=4, hk=2, d=16, sink=True, grads=()))
    out, lse = call(backend="triton")
    wide = torch.full((8,), 100.0)
    wide[::2] = call.keywords["sink"]
    again = call(backend="triton", sink=wide[::2])
    assert torch.equal(out, again[0])
    assert torch.equal(lse, again[1])


# --- the plan ----------------------------------------------------------------------------------


def problem(b: int = 1, nq: int = 1, nk: int = 8192, **more: Any) -> Problem:
    """Return a decode of 32 heads of 128, in groups of four, without its tensors."""
    case = Case("", **{"b": 1, "nq": 1, "nk": 8, "hq": 32, "hk": 8, "d": 128, **more})
    return (
        make(case, dtype=torch.bfloat16)
        .problem()[0]
        ._replace(batch=b, nq=nq, nk=nk, total_q=nq, total_k=nk)
    )


@pytest.mark.parametrize(
    ("b", "nq", "nk", "count"),
    [
        (1, 1, 1024, 1),
        (1, 1, 2048, 32),  # one tile of keys each
        (1, 1, 8192, 32),
        (1, 1, 131072, 32),
        (1, 16, 8192, 32),
        (1, 16, 2048, 16),  # more rows write more sums
        (4, 1, 8192, 8),
        (16, 1, 8192, 2),
        (17, 1, 8192, 8),
        (17, 1, 2048, 4),
        (64, 1, 8192, 2),
        (128, 1, 8192, 1),
    ],
)
def test_number_of_parts(b: int, nq: int, nk: int, count: int) -> None:
    given = problem(b, nq, nk)
    assert parts.parts_of(given) == count
    assert parts.splits(given)


def test_parts_of_a_band_and_of_one_head() -> None:
    assert parts.visible_keys(problem(nq=2)._replace(left=1023, right=0)) == 1025
    assert parts.parts_of(problem()._replace(left=2047, right=0)) == 32
    assert parts.parts_of(problem()._replace(left=64, right=0)) == 1
    assert not parts.splits(problem()._replace(left=64, right=0))
    assert parts.visible_keys(problem()._replace(right=-8000)) == 192
    assert parts.parts_of(problem(nk=1 << 20)._replace(hk=1, hq=1)) == parts.MOST_PARTS


def test_calls_that_are_not_split() -> None:
    assert not parts.splits(problem(nk=255))
    assert not parts.splits(problem(nq=33))
    assert not parts.splits(problem(nq=0))
    assert not parts.splits(problem(b=1024)._replace(hk=32))  # no group, and enough programs
    assert parts.splits(problem(b=1024))  # a group reads its keys once


@pytest.mark.parametrize("nk", [2096, 2100])
@pytest.mark.parametrize("more", [{}, {"documents": "sorted"}, {"allowed": "b11k", "sink": True}])
def test_a_replay_can_repeat_the_launches(
    more: dict[str, Any], nk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward makes empty tensors and launches two kernels, with masks as well.

    A third one copies a boolean mask whose rows are no multiple of 16 bytes.
    """
    monkeypatch.setattr(compiled.Launch, "on", lambda launch, like, ptr: ran.append(launch))
    ran: list[Any] = []
    case = Case("", b=2, nq=2, nk=nk, hq=4, hk=2, d=16, **more)
    given, tensors = make(case, dtype=torch.float16).problem()
    assert parts.parts_of(given) == 32
    with replay._Watch([]) as watch:
        few.forward(given, tensors)
    assert watch.complete
    copies = [1] if nk == 2100 and "allowed" in more else []
    assert [one.grid[0] for one in ran] == [*copies, 4 * 32, 16]


@pytest.mark.parametrize("name", ["backward_dbias.DBIAS", "forward.FORWARD"])
def test_other_jobs_have_no_parts(name: str) -> None:
    """Each number more would be an argument more of their kernels."""
    module, spec = name.split(".")
    found = importlib.import_module(f"rowmax.gpu.triton.{module}")
    given, tensors = make(Case("", b=2, nq=64, hq=2, d=32, bias="1hqk")).problem()
    job = launch.build_job(getattr(found, spec), given, tensors, tiles.Tiles(32, 32, 4, 2), {})
    assert job.numbers.parts is None


# --- the choice --------------------------------------------------------------------------------


def test_hopper_defers_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is named, or the keys are in one part."""
    loaded = {"hopper": hopper, "triton": importlib.import_module("rowmax.gpu.triton")}
    monkeypatch.setattr(hopper, "_missing", lambda index: None)
    monkeypatch.setattr(backends, "_load", loaded.__getitem__)
    monkeypatch.setattr(loaded["triton"], "_has_capability", lambda *_: True)
    given = problem()._replace(device="cuda")

    def chosen(call: Any, given: Problem, name: str | None = None) -> list[str | None]:
        return [job.backend for job in backends.choose.__wrapped__(given, call, name).jobs]

    assert chosen("forward", given) == ["triton"]
    assert chosen("forward", given, "hopper") == ["hopper"]
    assert chosen("forward", given._replace(d=576, dv=512)) == ["hopper"]  # too wide for triton
    assert chosen("forward", given._replace(batch=128)) == ["hopper"]
    assert chosen("backward", given) == ["hopper"]
    text = backends.deferral("hopper", given, "forward")
    assert text == "few queries: triton reads their keys in 32 parts"
    (job,) = backends.choose.__wrapped__(given, "forward", None).jobs
    note = backends.notes(given._replace(device="cpu"), job)
    assert note[0] == "few queries: their keys in 32 parts, which a second kernel merges"
