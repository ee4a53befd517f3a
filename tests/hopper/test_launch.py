"""The host's side of the Hopper kernels, without the kernels."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import rowmax
from rowmax import reference
from rowmax.call import dispatch as backends
from rowmax.call.check import Arguments
from rowmax.call.inputs import Options, Tensors, Wanted
from rowmax.call.normalize import normalized
from rowmax.call.problem import Problem, problem_of
from rowmax.gpu import hopper
from rowmax.testing import Case, make
from tests import drawn

forward = importlib.import_module("rowmax.gpu.hopper.host")
backward = importlib.import_module("rowmax.gpu.hopper.backward_host")
tiles = importlib.import_module("rowmax.gpu.hopper.backward_tiles")
MOST_WORDS = importlib.import_module("rowmax.gpu.hopper.tiles").LONG_64_SPILLS
tma = importlib.import_module("rowmax.gpu.hopper.lib.tma")
order = importlib.import_module("rowmax.gpu.hopper.lib.order")
biases = importlib.import_module("rowmax.gpu.hopper.backward_bias")


def posed(*, nq: int = 64, nk: int = 256, **options: Any) -> tuple[Problem, Tensors]:
    q, k = (torch.zeros(2, n, 4, 64, dtype=torch.float16) for n in (nq, nk))
    tensors = Tensors(q, k, k)
    return problem_of(tensors, Options(scale=0.125, **options)), tensors


def test_the_text_of_constants_has_what_follows_from_a_tile() -> None:
    """Triton's cache on disk finds a kernel by this text and by its source."""
    constants = importlib.import_module("rowmax.gpu.hopper.tiles").Constants
    long = tiles.LONG[64, 64]
    text = repr(constants(long))
    assert "'KEY_TILES': 3" in text
    assert f"'DS_STAGES': {long.DS_STAGES}" in text
    assert "'HALF': FusedConfig({" in text
    assert text == repr(constants(long))


@pytest.mark.parametrize(
    ("case", "want"),
    [
        ({"nq": 4096}, 3),
        ({"nq": 4096, "causal": True, "softcap": 5.0}, 3),
        ({"nq": 4096, "causal": True, "deterministic": True}, 3),
        ({"nq": 4096, "hq": 8}, 2),  # few tiles
        ({"nq": 2048, "b": 8}, 2),
        ({"nq": 4096, "left": 1024, "causal": True}, 2),
        ({"nq": 4096, "alibi": True}, 2),
        ({"nq": 512, "b": 300, "hq": 4, "d": 32, "bias": "1hqk"}, 4),
        ({"nq": 384, "b": 300, "hq": 4, "d": 32, "bias": "1hqk"}, 2),
        ({"nq": 512, "b": 300, "hq": 4, "d": 32, "bias": "bhqk"}, 2),
        ({"nq": 512, "b": 10, "hq": 4, "d": 32, "bias": "1hqk"}, 2),
    ],
    ids=str,
)
def test_warpgroups_of_a_backward(case: dict[str, Any], want: int) -> None:
    usual: dict[str, Any] = {"b": 4, "hq": 32, "d": 64}
    problem = drawn.problem_of(Case("", **(usual | case)), "bfloat16")
    first = tiles.tiles_of(problem, biases.kind_of(problem) == "tile")[0]
    assert want == first.WARPGROUPS


@pytest.mark.parametrize(
    ("options", "terms", "refused"),
    [
        ({"right": 0}, {}, True),
        ({"left": 9}, {}, True),
        ({}, {"alibi": torch.ones(4)}, True),
        ({}, {}, False),
    ],
)
def test_positions_are_aligned_to_the_keys(
    options: dict[str, Any], terms: dict[str, Any], refused: bool
) -> None:
    """Tile orders are made for one offset. Where nothing reads positions there is none."""
    q, k = (torch.zeros(2, n, 4, 64, dtype=torch.float16) for n in (64, 256))
    lengths = rowmax.PrefixLengths(torch.tensor([256, 100]), align="lengths")
    mask = lengths & rowmax.Mask(**options)
    tensors, found, _ = normalized(Arguments(q, k, k, mask=mask, heads=terms))
    for call in ("forward", "backward"):
        reason = hopper.supports(problem_of(tensors, found), call) or ""
        assert reason.startswith("it aligns positions to the keys") is refused


class Crowded(dict):
    """A cache that drops a plan once it is found, as when other threads make many."""

    def move_to_end(self, key: Any) -> None:
        raise KeyError(key)


@pytest.mark.parametrize("module", [forward, backward])
def test_a_dropped_plan_serves_the_call(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, tensors = posed()
    plan, done = object(), []
    q = tensors.q
    # q, k and v begin on 16 bytes
    assert not any(t.data_ptr() & 15 for t in tensors[:3])
    if module is forward:
        key = forward.key_of(problem, tensors, q)
        monkeypatch.setattr(forward, "pointers", lambda plan, *_: done.append(plan))
        plan = type("Plan", (), {"run": lambda *_: None, "parts": 1})()
    else:
        key = backward.key_of(problem, tensors, q, False)
        monkeypatch.setattr(backward, "launch", lambda plan, *_: done.append(plan))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: q.device.index)
    name = "_PLANS" if module is forward else "PLANS"
    monkeypatch.setattr(module, name, Crowded({key: plan}))
    if module is forward:
        forward.launch(problem, tensors, q, q)
    else:
        wanted = Wanted(True, True, True, False, False)
        backward.backward(problem, tensors, q, q, q, None, wanted)
    assert done == [plan]


def test_no_sequences_are_no_work() -> None:
    """Offsets on a device say so, which the host does not read; there are rows."""
    x, cu = torch.ones(1, 9, 2, 64, dtype=torch.float16), torch.zeros(1, dtype=torch.int32)
    tensors = Tensors(x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu)
    problem = problem_of(tensors, Options(scale=0.125, max_q=9, max_k=9))
    out, lse = forward.forward(problem, tensors)
    assert not out.count_nonzero()
    assert torch.equal(lse, torch.full((1, 2, 9), -torch.inf))
    wanted = Wanted(True, True, True, False, False)
    found = backward.backward(problem, tensors, out, lse, x, None, wanted)
    assert [g is not None and not g.count_nonzero() for g in found] == list(wanted)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("b", "nq", "nk"), [(2, 0, 8), (2, 5, 0), (0, 5, 8), (2, 0, 0)])
def test_calls_without_rows_or_keys(b: int, nq: int, nk: int, wide: bool) -> None:
    """No kernel is there to launch; a sink is still the lse of rows without keys.

    wide: dk and dv are parts of sums, as a rank of several without rows has them.
    """
    q = torch.randn(b, nq, 4, 64).half()
    k, v = torch.randn(b, nk, 2, 64).half(), torch.randn(b, nk, 2, 32).half()
    tensors = Tensors(q, k, v, torch.randn(b, 4, nq, nk).half(), torch.randn(4))
    problem = problem_of(tensors, Options(scale=0.125))._replace(wide=wide)
    out, lse = forward.forward(problem, tensors)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    for wanted in (Wanted(*[True] * 5), Wanted(False, True, False, False, True)):
        given = (problem, tensors, out, lse, dout, dlse, wanted)
        got, want = backward.backward(*given), reference.backward(*given)
        for name, x, y in zip(wanted._fields, got, want, strict=True):
            assert (x is None) == (y is None) == (not getattr(wanted, name))
            if x is not None:
                assert x.dtype == problem.gradient_dtype(name, getattr(tensors, name))
                torch.testing.assert_close(x, y)


def test_the_gradient_of_a_column_needs_all_keys() -> None:
    """Its closed form has the sum of a row's weights, 1 over all keys of its lse."""
    problem = posed()[0]._replace(bias=(1, 1, 64, 1), bias_dtype=torch.float16)
    assert hopper.lacks(problem, "backward") == {}
    assert "part" in hopper.lacks(problem._replace(part=True), "backward")["dbias"]


@pytest.mark.parametrize(
    ("left", "right", "sees"),
    [(None, None, True), (5, 0, True), (0, 0, True), (0, -1, False), (3, -3, True), (2, -3, False)],
)
def test_a_band_may_be_empty(left: int | None, right: int | None, sees: bool) -> None:
    problem, _ = posed(left=left, right=right)
    assert tiles.every_query_sees(problem) is sees


@pytest.mark.parametrize(
    ("shape", "options", "kind", "by"),
    [
        ((2, 4, 64, 256), {}, "tile", "stored"),
        ((2, 4, 64, 256), {"softcap": 2.0}, "tile", "shared"),
        ((1, 4, 64, 256), {}, "tile", "shared"),
        ((2, 1, 1, 256), {}, "row", "row"),
        ((2, 4, 64, 1), {}, "column", "column"),
        ((1, 1, 1, 1), {}, "column", "column"),
    ],
)
def test_what_makes_the_gradient_of_a_bias(
    shape: tuple[int, ...], options: dict[str, Any], kind: str, by: str
) -> None:
    q, k = torch.zeros(2, 64, 4, 64).half(), torch.zeros(2, 256, 2, 64).half()
    bias = torch.zeros(shape, dtype=torch.float16)
    problem = problem_of(Tensors(q, k, k, bias), Options(scale=0.125, **options))
    assert (biases.kind_of(problem), biases.gradient_by(problem)) == (kind, by)
    room = biases.new_dbias(by, problem, bias, torch.empty(0))
    if room is not None:
        assert biases.sum_dbias(room.zero_(), bias).shape == shape


def test_a_bias_of_each_pair_is_copied_or_refused() -> None:
    for bias, d, text in (
        (torch.zeros(1, 1, 64, 104), 128, "torch.float32 for head sizes up to 64, these are 128"),
        (torch.zeros(1, 1, 64, 100), 64, "multiple of 8 keys, these are 100"),
        (torch.zeros(1, 1, 64, 100).half(), 64, "multiple of 8 keys, these are 100"),
    ):
        q, k = torch.zeros(2, 64, 4, d).half(), torch.zeros(2, bias.shape[3], 4, d).half()
        problem = problem_of(Tensors(q, k, k, bias), Options(scale=0.125))
        assert text in (hopper.supports(problem, "backward") or "")


@pytest.mark.parametrize(
    ("shape", "d", "held"), [((2, 4, 64, 104), 64, False), ((1, 4, 64, 104), 32, True)]
)
def test_a_float32_bias_has_buffers_and_a_gradient_of_its_own(
    shape: tuple[int, ...], d: int, held: bool
) -> None:
    q, k = torch.zeros(2, 64, 4, d).half(), torch.zeros(2, 104, 4, d).half()
    problem = problem_of(Tensors(q, k, k, torch.zeros(shape)), Options(scale=0.125))
    assert (biases.kind_of(problem), biases.gradient_by(problem)) == ("tile", "shared")
    (tile,) = tiles.tiles_of(problem, True)
    config: Any = tiles.config_for(problem, tile, BIAS=True)
    assert config.BIAS_FLOAT32
    assert config.HELD is held
    assert config.DS_STAGES == 2
    assert tiles.shared_bias_tile(problem).BIAS_FLOAT32
    assert not tiles.tiles_of(problem, False)[0].BIAS_FLOAT32


def test_sums_are_over_what_shares_a_bias() -> None:
    sums = torch.randn(2, 4, 1, 9)
    made = biases.sum_dbias(sums, torch.zeros(1, 4, 1, 9, dtype=torch.float16))
    assert made.dtype == torch.float16
    torch.testing.assert_close(made, sums.sum(0, keepdim=True).half())


OWN_ROWS = "query heads of a kv head share the row, here 2 have rows of their own"


@pytest.mark.parametrize(
    ("shape", "d", "softcap", "text"),
    [
        ((2, 4, 1, 256), 64, 0.0, OWN_ROWS),
        ((1, 4, 1, 256), 64, 2.0, OWN_ROWS),
        (
            (2, 1, 1, 256),
            256,
            2.0,
            "head sizes up to 128, these are 256 and 256",
        ),
        ((2, 1, 1, 256), 128, 2.0, None),
        ((2, 1, 1, 256), 256, 0.0, None),
        ((2, 4, 64, 1), 256, 2.0, None),
        ((2, 4, 64, 256), 256, 2.0, None),
        (None, 64, 0.0, None),
    ],
)
def test_a_gradient_that_is_lacked_is_another_backends_job(
    shape: tuple[int, ...] | None,
    d: int,
    softcap: float,
    text: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hopper, "_missing", lambda _: None)
    q, k = torch.zeros(2, 64, 4, d).half(), torch.zeros(2, 256, 2, d).half()
    bias = None if shape is None else torch.zeros(shape, dtype=torch.float16)
    tensors = Tensors(q, k, k, bias, torch.zeros(4))
    problem = problem_of(tensors, Options(scale=0.125, softcap=softcap))._replace(device="cuda")
    assert hopper.lacks(problem, "forward") == {}
    everything = ("dq", "dk", "dv", *(("dbias",) if shape else ()), "dsink")
    plan = backends.choose.__wrapped__(problem, "backward")
    if text is None:
        assert plan.jobs == (("backward", everything, "hopper", None),)
        assert plan.whole is hopper
        assert backends.choose.__wrapped__(problem, "backward", "hopper").whole is hopper
        return
    first, second = plan.jobs
    assert first == ("backward", ("dq", "dk", "dv", "dsink"), "hopper", None)
    assert second[:3] == ("backward", ("dbias",), "triton")
    assert second.reason is not None
    assert second.reason.startswith("not hopper: it makes dbias of a row of keys")
    assert second.reason.endswith(text)
    named = backends.choose.__wrapped__(problem, "backward", "hopper")
    assert named.jobs == (first, second._replace(backend=None))
    assert named.whole is None
    backends.check_wanted(named, Wanted(True, True, True, False, True))
    with pytest.raises(ValueError, match=r"^backend: got 'hopper'; it does not make dbias") as e:
        backends.check_wanted(named, Wanted(True, False, False, True, False))
    assert text in str(e.value)
    assert "want None, or no gradient of bias" in str(e.value)


@pytest.mark.parametrize("want_bias", [True, False])
@pytest.mark.parametrize(
    "layout", ["aligned", "offset", "narrowed", "transposed", "expanded", "rows", "columns"]
)
def test_a_bias_comes_as_the_copy_engine_takes_it(
    layout: str, want_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No strides of a bias hand the call to another backend.

    Dimensions that broadcast are not written out, except in a gradient, which has that size itself.
    """
    problem, tensors = posed()
    q, shape = tensors.q, (2, 4, 64, 256)
    strides = {
        "aligned": (65536, 16384, 256, 1),
        "offset": (65536, 16384, 256, 1),
        "narrowed": (4 * 64 * 257, 64 * 257, 257, 1),
        "transposed": (65536, 16384, 1, 64),
        "expanded": (0, 0, 256, 1),
        "rows": (256, 0, 0, 1),
        "columns": (0, 0, 1, 0),
    }[layout]
    numbers = torch.randn(2 * 4 * 64 * 257 + 1).half()
    bias = numbers.as_strided(shape, strides, int(layout == "offset"))
    tensors = tensors._replace(bias=bias)
    problem = problem_of(tensors, Options(scale=0.125))
    seen: list[tuple[Problem, Tensors]] = []
    monkeypatch.setattr(backward, "plan_of", lambda p, t, *_: seen.append((p, t)))
    monkeypatch.setattr(backward, "launch", lambda plan, *_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: q.device.index)
    wanted = Wanted(True, False, False, want_bias, False)
    backward.backward(problem, tensors, q, q, q, None, wanted)
    ((found, given),) = seen
    got = given.bias
    assert got is not None
    assert found.bias == tuple(got.shape)
    assert torch.equal(got.expand(shape), bias)
    kind = biases.kind_of(found)
    assert kind in ("row", "column") or tma.is_aligned(got)
    if layout == "aligned":
        assert got is bias
    if want_bias:
        assert found is problem
        assert got.shape == shape
    elif 0 in bias.stride():
        assert kind == {"expanded": "tile", "rows": "row", "columns": "column"}[layout]
        assert got.numel() <= bias.numel() // 8


@pytest.mark.parametrize("words", [0, MOST_WORDS, MOST_WORDS + 1, None])
def test_three_warpgroups_if_they_keep_to_registers(
    words: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decided by the kernel that was compiled, once for each config; explain says which."""
    problem, tensors = posed(nk=4096)
    launched: list[Any] = []
    monkeypatch.setattr(forward, "processors", lambda _: 4)
    monkeypatch.setattr(forward, "_SPILLED", {})
    monkeypatch.setattr(forward, "_PLANS", forward.Plans(8))
    monkeypatch.setattr(forward.torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(forward.compat, "spills", lambda kernel: words)

    class Stand:
        def arguments(self, *args: Any) -> Any:
            return args

        def loaded(self, *args: Any) -> Any:
            launched.append("loaded")
            return SimpleNamespace(kernel=None)

        def __call__(self, t: Any, bases: Any) -> None:
            launched.append(len(forward._PLANS))

    build_plan = forward.build_plan
    monkeypatch.setattr(
        forward, "build_plan", lambda *args: build_plan(*args)._replace(launch=Stand())
    )
    assert forward.note_of_tile(problem).startswith("three warpgroups, if")
    out = torch.empty(problem.out_shape, dtype=torch.float16)
    lse = torch.empty(problem.lse_shape)
    for _ in range(2):
        forward.launch(problem, tensors, out, lse)
    assert launched == ["loaded", 1, 1]
    (plan,) = forward._PLANS.values()
    spilled = words is None or words > MOST_WORDS
    assert plan.tile.warpgroups == (2 if spilled else 3)
    assert forward.note_of_tile(problem).startswith("two" if spilled else "three warpgroups")


@pytest.mark.parametrize("graphs", [False, True])
def test_plans_are_bounded_and_stay_for_graphs(
    graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay of a CUDA graph reads the tables of the plans that it was captured with."""
    looked: list[int] = []

    def exist() -> bool:
        looked.append(1)
        return graphs

    monkeypatch.setattr(forward.compat, "graphs_exist", exist)
    plans = forward.Plans(8)
    for n in range(40):
        plans.keep(n, n)
        if 0 in plans:
            plans.move_to_end(0)  # in use all the time
    assert 0 in plans
    assert 39 in plans
    assert len(plans) == 40 if graphs else len(plans) <= 8
    assert len(looked) < 15  # not for each plan


@pytest.mark.parametrize(("operations", "noted"), [(0.0, True), (1e9, False)])
def test_a_note_tells_of_scores_added_to_a_bias(monkeypatch, operations, noted):
    case = Case("", b=8, nq=64, nk=64, hq=1, d=32, bias="1hqk")  # 4 M operations
    problem, _ = make(case, dtype=torch.bfloat16).problem()
    monkeypatch.setattr(forward, "processors", lambda _: 1)
    monkeypatch.setattr(forward.tiles, "ONTO_OPERATIONS", operations)
    note = forward.note_of_maxima(problem)
    assert note is None if not noted else note is not None and "no maxima" in note


@pytest.mark.parametrize(
    ("given", "heads"),
    [
        ({"d": 128, "causal": True}, 1),  # key tiles are even
        ({"d": 128, "nk": 5001, "causal": True}, 4),
        ({"d": 128, "left": 960, "right": 0}, 4),
        ({"d": 128, "sequences": ((100, 100), (28, 60))}, 4),
        ({"d": 128, "documents": "sorted"}, 4),
        ({"d": 128, "documents": "sorted", "hk": 8}, 1),
        ({"d": 128, "documents": "sorted", "hq": 6, "hk": 1}, 2),
        ({"d": 128, "documents": "sorted", "hq": 64, "hk": 1}, 8),
        ({"d": 128, "nq": 5, "hq": 64, "hk": 1}, 64),  # few queries
        ({"d": 128, "nq": 40}, 4),  # a tile that one head would leave empty
        ({"d": 64, "causal": True}, 4),  # three warpgroups are taller than a key tile
        ({"d": 96, "nq": 9000, "nk": 9000, "causal": True}, 1),
        ({"d": 128, "nq": 256, "nk": 256, "bias": "bhqk", "right": 3}, 1),
    ],
)
def test_heads_share_tiles_that_are_cut(
    given: dict[str, Any], heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward_tiles = importlib.import_module("rowmax.gpu.hopper.tiles")
    monkeypatch.setattr(forward, "processors", lambda _: 132)
    case = Case("", **{"b": 8, "hq": 8, "hk": 2, "nq": 4096, "nk": 4096} | given)
    problem, tensors = make(case, dtype=torch.bfloat16).problem()
    path = forward.bias_path(problem, tensors.bias)
    tile = forward_tiles.tile_for(problem, path, 132)
    assert forward_tiles.packed_heads(problem, tile, path) == heads
    if problem.bias is None:
        note = forward.note_of_heads(problem)
        assert note is None if heads == 1 else note is not None and f"{heads} query heads" in note


def test_a_block_of_sides_has_four_consumers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a tile of few rows has one warpgroup: the kernel would wait for another."""
    forward_tiles = importlib.import_module("rowmax.gpu.hopper.tiles")
    problem, tensors = make(
        Case("", b=4, hq=2, nq=48, nk=300, d=32, bias="1hqk"), dtype=torch.bfloat16
    ).problem()
    few = forward_tiles.FEW[32, 32]
    assert few.warpgroups == 1
    tile = forward_tiles.strip_for(problem, few, 0)
    assert (tile.sides, tile.warpgroups) == (2, 2)
    monkeypatch.setattr(forward, "processors", lambda _: 132)
    out = torch.empty(problem.out_shape)
    with pytest.raises(ValueError, match=r"^sides=2 of 1 warpgroups: a block has four, give 2$"):
        forward.build_plan(problem, tensors, out, replace(tile, warpgroups=1))
