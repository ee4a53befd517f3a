"""The recording is the recurrence: its states and its results are those of the dense definition."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rowmax.rules.mask import FULL, PARTIAL, SKIP
from rowmax.trace import MASKS, Setting
from rowmax.trace.page import numbers
from rowmax.trace.record import Pass, defined, record
from rowmax.trace.setting import Call, calls

from .settings import SETTINGS

Recorded = tuple[Call, dict[str, Pass]]


@pytest.fixture(scope="module")
def recorded() -> dict[tuple[str, str], Recorded]:
    return {
        (name, call.name): (call, record(call))
        for name, setting in SETTINGS.items()
        for call in calls(setting)
    }


@pytest.fixture(params=[(name, mask) for name in SETTINGS for mask in MASKS], ids="-".join)
def one(request: pytest.FixtureRequest, recorded: dict[tuple[str, str], Recorded]) -> Recorded:
    return recorded[request.param]


def ends(passed: Pass, name: str) -> Tensor:
    """Return a result of all resident tiles."""
    return torch.cat([step.values[name] for step in passed.steps if step.kind == "end"])


def scores(call: Call) -> Tensor:
    """Return the scores by their definition, -inf where the definition has no weight."""
    q, k = call.tensors.q[0, :, 0], call.tensors.k[0, :, 0]
    s = call.problem.scale * q @ k.T
    if call.problem.softcap:
        s = call.problem.softcap * torch.tanh(s / call.problem.softcap)
    return s.masked_fill(defined(call).P == 0, -torch.inf)


def same(x: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(x, wanted, atol=1e-12, rtol=1e-12)
    assert numbers(x) == numbers(wanted)  # the printed digits


def test_results_are_those_of_the_definition(one: Recorded):
    call, found = one
    wanted = defined(call)
    same(ends(found["forward"], "out"), wanted.out)
    same(ends(found["forward"], "lse"), wanted.lse)
    same(ends(found["dq"], "dq"), wanted.dq)
    same(ends(found["dkdv"], "dk"), wanted.dk)
    same(ends(found["dkdv"], "dv"), wanted.dv)


def passed_keys(call: Call, found: Pass) -> Iterator[tuple[dict[str, Tensor], Tensor, Tensor]]:
    """Yield (values, scores of the rows with -inf at keys to come, values of v) of each step."""
    S, v = scores(call), call.tensors.v[0, :, 0]
    seen: list[int] = []
    for step in found.steps:
        if step.kind == "end":
            seen = []
            continue
        assert step.i is not None
        assert step.j is not None
        cols = call.key_tiles[step.j]
        seen += range(cols.start, cols.stop)
        yield step.values, S[call.query_tiles[step.i]][:, seen], v[seen]


def test_the_state_after_each_tile_is_attention_over_the_keys_so_far(one: Recorded):
    call, found = one
    count = 0
    for values, S, v in passed_keys(call, found["forward"]):
        m = S.amax(1)
        weights = torch.exp(S - m.clamp(min=-1e9)[:, None])
        same(values["m"], m)
        same(values["l"], weights.sum(1))
        same(values["O"], weights @ v)
        softmax = torch.softmax(S, 1).nan_to_num(0.0)
        same(values["running"], softmax)
        same(values["now"], softmax @ v)
        count += 1
    assert count == int((call.states != SKIP).sum())


def test_a_step_is_the_update_of_the_one_before(one: Recorded):
    _, found = one
    m = l = O = None
    for step in found["forward"].steps:
        x = step.values
        if step.kind == "end":
            m = l = O = None
            continue
        if m is None or l is None or O is None:
            m, l, O = torch.full_like(x["m"], -torch.inf), 0.0 * x["l"], 0.0 * x["O"]
        same(x["m"], torch.maximum(m, x["peak"]))
        same(x["alpha"], torch.exp(m - x["m"]).nan_to_num(0.0))
        same(x["added"], x["P"].sum(1))
        same(x["l"], x["alpha"] * l + x["added"])
        same(x["O"], x["alpha"][:, None] * O + x["part"])
        m, l, O = x["m"], x["l"], x["O"]


@pytest.mark.parametrize("name", ["dq", "dkdv"])
def test_a_backward_recomputes_the_weights(one: Recorded, name: str):
    call, found = one
    wanted = defined(call)
    v, dout = call.tensors.v[0, :, 0], call.dout[0, :, 0]
    first, *steps = found[name].steps
    delta = (dout * wanted.out).sum(1)
    assert first.kind == "delta"
    same(first.values["delta"], delta)
    sums: dict[tuple[str, int], Tensor] = {}
    for step in steps:
        if step.kind == "end":
            continue
        assert step.i is not None
        assert step.j is not None
        rows, cols = call.query_tiles[step.i], call.key_tiles[step.j]
        dP = dout[rows] @ v[cols].T
        same(step.values["P"], wanted.P[rows, cols])
        same(step.values["dP"], dP)
        same(step.values["dS"], wanted.P[rows, cols] * (dP - delta[rows, None]))
        place = step.i if name == "dq" else step.j
        for part, total in (("part", "sum"), ("part_v", "dv"))[: 1 if name == "dq" else 2]:
            before = sums.get((total, place), torch.zeros_like(step.values[part]))
            same(step.values[total], before + step.values[part])
            sums[total, place] = step.values[total]
        same(step.values["now"], call.problem.scale * step.values["sum"])


def test_the_tiles_of_a_pass_are_those_that_are_not_skipped(one: Recorded):
    call, found = one
    visited = [(i, j) for i, j in (call.states != SKIP).nonzero().tolist()]
    orders = {"forward": visited, "dq": visited, "dkdv": sorted(visited, key=lambda x: x[::-1])}
    for name, order in orders.items():
        steps = [step for step in found[name].steps if step.kind == "tile"]
        assert [(step.i, step.j) for step in steps] == order
        full, partial = (int((call.states == kind).sum()) for kind in (FULL, PARTIAL))
        assert found[name].steps[-1].done == (full, partial)


def test_the_states_of_tiles_are_right(one: Recorded):
    call, _ = one
    seen = defined(call).P > 0
    assert torch.equal(call.seen, seen)
    for i, rows in enumerate(call.query_tiles):
        for j, cols in enumerate(call.key_tiles):
            pairs = seen[rows, cols]
            state = int(call.states[i, j])
            assert state != SKIP or not pairs.any()
            assert (state == FULL) == bool(pairs.all())


def test_masks_have_tiles_of_every_kind():
    found = {call.name: set(call.states.flatten().tolist()) for call in calls(Setting())}
    assert found.pop("none") == {FULL}
    assert all(kinds == {SKIP, PARTIAL, FULL} for kinds in found.values())


def test_masks_are_those_of_their_texts():
    for call in calls(SETTINGS["ragged"]):
        i, j = torch.arange(11)[:, None], torch.arange(17)
        texts = {
            "none": ("every pair", torch.ones(11, 17, dtype=torch.bool)),
            "causal": ("j ≤ i + 6", j <= i + 6),
            "window": ("i + 2 ≤ j ≤ i + 7", (i + 2 <= j) & (j <= i + 7)),
            "documents": (
                "query and key in the same of 3 documents", (i + 6) * 3 // 17 == j * 3 // 17
            ),
            "prefix": ("j < 5 or j ≤ i + 6", (j < 5) | (j <= i + 6)),
        }  # fmt: skip
        text, seen = texts[call.name]
        assert call.text == text
        assert torch.equal(call.seen, seen)


def test_bytes_are_those_of_the_tiles_that_are_read():
    setting = Setting(queries=4, keys=6, head_dim=2, block_q=2, block_k=3)
    call = next(x for x in calls(setting) if x.name == "causal")
    assert call.states.tolist() == [[FULL, PARTIAL], [FULL, PARTIAL]]
    found = record(call)
    tile_q, tile_kv, rows = 2 * 2 * 4, 2 * 3 * 2 * 4, 2 * 2 * 4
    assert [step.read for step in found["forward"].steps] == [
        tile_q + tile_kv, tile_q + 2 * tile_kv, tile_q + 2 * tile_kv,
        2 * tile_q + 3 * tile_kv, 2 * tile_q + 4 * tile_kv, 2 * tile_q + 4 * tile_kv,
    ]  # fmt: skip
    delta = 2 * 4 * 2 * 4
    assert found["dq"].steps[-1].read == delta + 2 * (2 * tile_q + rows) + 4 * tile_kv
    assert found["dkdv"].steps[-1].read == delta + 2 * tile_kv + 4 * (2 * tile_q + rows)


def test_without_skipped_tiles_nothing_more_would_be_read(recorded: dict):
    for (_, mask), (_, found) in recorded.items():
        for one_pass in found.values():
            read = one_pass.steps[-1].read
            assert read == one_pass.unskipped if mask == "none" else read <= one_pass.unskipped
