"""rowmax.explain: it says what a call would do, and makes none."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import rowmax
from rowmax.call import dispatch as backends
from rowmax.call.normalize import keys_of
from rowmax.explain import TILE
from rowmax.rules import mask as rules
from rowmax.testing import CASES, make


def tensors(b=1, nq=300, nk=400, hq=4, hk=2, d=16, dv=8, dtype=torch.float32):
    return (
        torch.randn(b, nq, hq, d, dtype=dtype),
        torch.randn(b, nk, hk, d, dtype=dtype),
        torch.randn(b, nk, hk, dv, dtype=dtype),
    )


@pytest.mark.parametrize("call", [rowmax.attention, rowmax.attention_varlen])
def test_takes_the_arguments_of_the_call(call):
    ours = inspect.signature(rowmax.explain).parameters
    theirs = inspect.signature(call).parameters
    assert set(theirs) <= set(ours)
    for name, parameter in theirs.items():
        if parameter.kind == inspect.Parameter.KEYWORD_ONLY:
            assert ours[name] == parameter
    positional = [n for n, p in theirs.items() if p.kind != inspect.Parameter.KEYWORD_ONLY]
    assert positional == list(ours)[: len(positional)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tiles_are_those_of_the_mask(case):
    """Counted against the dense mask: nothing allowed is skipped, nothing full is masked."""
    call = make(case)
    keywords = {name: value for name, value in call.keywords.items() if name != "return_lse"}
    found = rowmax.explain(*call.inputs, **keywords)
    whole, inputs = call.problem()
    keys = keys_of(call.keywords.get("mask"), *call.inputs[:2], None)
    seen_by_backends = whole
    if keys is not None:  # padding of few queries is a boolean mask
        seen_by_backends = whole._replace(documents=False, allowed=tuple(keys.shape))
    assert found.problem == seen_by_backends
    parts = [(whole, inputs)]
    if whole.varlen:
        parts = [(p, t) for _, _, p, t in rowmax.call.problem.each_sequence(whole, inputs)]
    tiles, pairs, dense, full, some = 0, 0, 0, 0, 0
    for problem, t in parts:
        shape = (problem.batch, problem.hq, problem.nq, problem.nk)
        seen = rules.dense(problem, t).expand(shape)
        dense += seen.numel()
        for i in range(0, problem.nq, TILE):
            for j in range(0, problem.nk, TILE):
                tile = seen[:, :, i : i + TILE, j : j + TILE].flatten(2)
                any_seen = tile.any(-1)
                tiles += any_seen.numel()
                some += int(any_seen.sum())
                full += int(tile.all(-1).sum())
                pairs += int(any_seen.sum()) * tile.shape[2]
    assert sum(found.tiles[:3]) == tiles
    assert found.tiles.skipped <= tiles - some
    assert found.tiles.full <= full
    assert found.tiles.pairs >= pairs
    if not case.documents and not case.step:  # by documents a tile may be visited without need
        inexact = case.allowed or case.lengths or (case.prefix and case.left is not None)
        assert found.tiles.skipped == tiles - some or inexact
        assert found.tiles.pairs == pairs or inexact
    assert found.dense_bytes == dense * whole.dtype.itemsize


@given(nq=st.integers(0, 400), nk=st.integers(0, 400), causal=st.booleans())
def test_work_and_memory(nq, nk, causal):
    q, k, v = tensors(b=2, nq=nq, nk=nk, dtype=torch.bfloat16)
    found = rowmax.explain(q, k, v, causal=causal)
    pairs = found.tiles.pairs
    if not causal:
        assert pairs == 2 * 4 * nq * nk
    assert found.forward_flops == 2 * pairs * (16 + 8)
    assert found.backward_flops == 2 * pairs * (3 * 16 + 2 * 8)
    out, lse = rowmax.attention(q, k, v, causal=causal, return_lse=True)
    assert found.output_bytes == out.nbytes + lse.nbytes
    assert found.dense_bytes == 2 * 4 * nq * nk * 2
    assert str(found)


def test_the_backend_is_the_one_that_is_chosen():
    q, k, v = tensors()
    found = rowmax.explain(q, k, v, causal=True)
    for call, choice in (("forward", found.forward), ("backward", found.backward)):
        plan = backends.choose(found.problem, call)
        assert choice.jobs == plan.jobs
        assert choice.backend is not None
        assert backends._load(choice.backend) is plan.whole
        assert set(choice.others) == set(backends.NAMES) - {choice.backend}
        assert "the tensors are on cpu" in choice.others["triton"]
        assert "score matrix" in choice.others["reference"]


@pytest.mark.parametrize("name", ["torch", "reference"])
def test_a_backend_that_is_named(name):
    found = rowmax.explain(*tensors(), backend=name)
    assert found.forward.backend == found.backward.backend == name
    assert found.tangent.backend == found.tangent_backward.backend == name


def test_the_backend_of_tangents():
    found = rowmax.explain(*tensors(), backend="torch")
    assert found.tangent.jobs == (("tangent", ("out", "lse", "tout", "tlse"), "torch", None),)
    names = ("dq", "dk", "dv", "dtq", "dtk", "dtv")
    assert found.tangent_backward.jobs == (("tangent_backward", names, "torch", None),)
    line = "tangent   torch (forward mode and second derivatives)"
    assert line in str(found).splitlines()
    first = rowmax.explain(*tensors()).tangent.backend
    assert first == ("torch" if find_spec("numba") is None else "cpu")
    assert "tangent   no backend: the call" in str(rowmax.explain(*tensors(), backend="triton"))


def test_a_named_backend_that_refuses_is_explained():
    found = rowmax.explain(*tensors(), backend="triton")
    assert found.forward.backend is None
    assert "the tensors are on cpu" in found.forward.others["triton"]
    assert "the call would raise" in str(found)
    with pytest.raises(ValueError, match="the tensors are on cpu"):
        rowmax.attention(*tensors(), backend="triton")


def test_the_text():
    q, k, v = tensors(b=2)
    text = str(
        rowmax.explain(
            q,
            k,
            v,
            mask=rowmax.Window(64, 0) & rowmax.PrefixLengths(torch.tensor([9, 400])),
            bias=torch.zeros(4, 1, 400),
            sink=torch.zeros(4),
            dropout_p=0.25,
            backend="torch",
        )
    )
    for words in (
        "call      cpu, float32, q [2, 300, 4, 16], k [2, 400, 2, 16], v [2, 400, 2, 8]",
        "window (left 64, right 0), prefix lengths, sink, bias [1, 4, 1, 400] float32, "
        "dropout 0.25, 2 query heads a kv head",
        "forward   torch",
        "backward  torch",
        "not triton: it runs on cuda or xpu, the tensors are on cpu",
        "tiles     of 128 x 128: ",
        "a dense score matrix would be 3.66 MiB",
    ):
        assert words in text


def test_positions_aligned_to_lengths():
    q, k, v = tensors(b=2)
    mask = rowmax.PrefixLengths(torch.tensor([9, 400]), align="lengths")
    text = str(rowmax.explain(q, k, v, causal=True, mask=mask))
    assert "causal, prefix lengths, aligned to them, 2 query heads" in text
    assert "aligned" not in str(rowmax.explain(q, k, v, mask=mask))  # which nothing reads
    found = rowmax.explain(q, k, v, causal=True, mask=mask).tiles
    apart = [rowmax.explain(q[1:], k[1:, :n], v[1:, :n], causal=True).tiles for n in (9, 400)]
    assert found.partial + found.full == sum(t.partial + t.full for t in apart)


def test_packed():
    q, k, v = (t[0] for t in tensors(nq=300, nk=400))
    cu_q, cu_k = torch.tensor([0, 100, 100, 300]), torch.tensor([0, 0, 150, 400])
    found = rowmax.explain(q, k, v, cu_q, cu_k)
    assert found.tiles == (0, 0, 4 * 2 * 2, 4 * 200 * 250)
    assert found.dense_bytes == 4 * 4 * 200 * 250
    out, lse = rowmax.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True)
    assert found.output_bytes == out.nbytes + lse.nbytes
    assert "3 packed sequences of at most 200 queries and 250 keys" in str(found)
    with pytest.raises(TypeError, match="cu_seqlens_k: got None"):
        rowmax.explain(q, k, v, cu_q)


def test_computes_nothing_and_draws_nothing():
    q, k, v = tensors()
    state = torch.get_rng_state()
    with FlopCounterMode(display=False) as counter:
        found = rowmax.explain(q, k, v, dropout_p=0.5, backend="torch")
    assert counter.get_total_flops() == 0
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.forward_flops = 0  # pyright: ignore


def test_errors_are_those_of_the_call():
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"dropout_p: got 1\.0"):
        rowmax.explain(q, k, v, dropout_p=1.0)
    with pytest.raises(TypeError, match="causal: got 1"):
        rowmax.explain(q, k, v, causal=1)  # pyright: ignore


@pytest.mark.parametrize("missing", ["numba", "numpy"])
def test_a_missing_library_comes_with_what_installs_it(missing, monkeypatch):
    loaded = [n for n in sys.modules if n == "rowmax.cpu" or n.startswith("rowmax.cpu.")]
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    backends.choose.cache_clear()
    try:
        reason = rowmax.explain(*tensors()).forward.others["cpu"]
    finally:
        backends.choose.cache_clear()
    assert reason.startswith(f"{missing} is not installed: ")
    assert 'pip install "rowmax[cpu]"' in reason


WITHOUT = "it makes no dbias today"


@pytest.fixture
def _no_dbias(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the cpu backend leave dbias to another, and add a note."""
    cpu = pytest.importorskip("rowmax.cpu")

    def lacks(problem, call):
        return {"dbias": WITHOUT} if call == "backward" and problem.bias is not None else {}

    monkeypatch.setattr(cpu, "lacks", lacks, raising=False)
    monkeypatch.setattr(cpu, "notes", lambda p, call: [f"makes a {call}"], raising=False)
    backends.choose.cache_clear()
    yield
    backends.choose.cache_clear()


@pytest.mark.usefixtures("_no_dbias")
def test_a_call_of_several_backends():
    q, k, v = tensors()
    found = rowmax.explain(q, k, v, bias=torch.zeros(300, 400), sink=torch.zeros(4))
    assert found.forward.jobs == (("forward", ("out", "lse"), "cpu", None),)
    assert found.backward.jobs == (
        ("backward", ("dq", "dk", "dv", "dsink"), "cpu", None),
        ("backward", ("dbias",), "torch", f"not cpu: {WITHOUT}"),
    )
    assert found.backward.backend == "cpu"
    assert set(found.backward.others) == {"hopper", "triton", "reference"}
    assert found.backward.notes == (("makes a backward",), ())
    lines = str(found).splitlines()
    at = lines.index(f"backward  cpu (dq, dk, dv, dsink), torch (dbias: not cpu: {WITHOUT})")
    assert lines[at + 1].strip() == "makes a backward"
    assert "forward   cpu" in lines
    plain = rowmax.explain(q, k, v)
    assert "backward  cpu" in str(plain).splitlines()


@pytest.mark.usefixtures("_no_dbias")
def test_a_named_backend_that_lacks_a_gradient_is_explained():
    q, k, v = tensors()
    found = rowmax.explain(q, k, v, bias=torch.zeros(300, 400), backend="cpu")
    assert [job.backend for job in found.backward.jobs] == ["cpu", None]
    assert found.backward.others["torch"] == "able, but backend='cpu' is asked for"
    assert (
        f"backward  cpu (dq, dk, dv), no backend (dbias: not cpu: {WITHOUT}; "
        "the call raises if it is wanted)"
    ) in str(found)
