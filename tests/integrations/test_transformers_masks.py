"""Masks of transformers as values: equal to its boolean tensors, without reading a device."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("transformers")

from transformers import masking_utils as theirs

from rowmax.integrations.transformers import (
    MaskValue,
    attention_forward,
    attention_mask,
    skip_full_masks,
)
from rowmax.integrations.transformers.attention import REFUSED

pytestmark = pytest.mark.usefixtures("one_thread")


def padded(draw: random.Random, batch: int, n: int) -> Tensor:
    """Return a mask of padding on the left, on the right or anywhere."""
    mask = torch.ones(batch, n, dtype=torch.bool)
    for row in mask:
        some = draw.randrange(n)
        where = draw.choice(["left", "right", "anywhere", "none"])
        if where == "left":
            row[:some] = False
        elif where == "right":
            row[n - some :] = False
        elif where == "anywhere":
            row[torch.rand(n) < 0.3] = False
    return mask


def packed_positions(draw: random.Random, batch: int, n: int) -> Tensor:
    """Return position_ids ``[B, N]`` of packed sequences."""
    rows = []
    for _ in range(batch):
        row: list[int] = []
        while len(row) < n:
            row += range(draw.randint(1, n))
        rows.append(row[:n])
    return torch.tensor(rows)


def drawn(seed: int) -> dict[str, Any]:
    """Return random arguments of a mask function, of a pattern that is a value."""
    draw = random.Random(seed)
    batch, window = draw.randint(1, 3), draw.randint(1, 12)
    kind = draw.choice(["prefill", "cache", "static", "tensor", "sliding", "packed"])
    nq = 1 if draw.random() < 0.3 else draw.randint(1, 9)
    seen = draw.randint(0, 9)
    found: dict[str, Any] = {"batch_size": batch, "q_length": nq, "kv_length": nq}
    if kind == "cache":
        found |= {"kv_length": nq + seen, "q_offset": seen}
    elif kind in ("static", "tensor"):
        found |= {"kv_length": nq + seen + draw.randint(0, 9), "q_offset": seen}
    elif kind == "sliding":
        kv_offset = draw.randint(0, 5)
        found |= {"kv_length": nq + seen, "q_offset": seen + kv_offset, "kv_offset": kv_offset}
    starts = torch.tensor([draw.randint(0, 3) for _ in range(batch)])
    functions: list[Callable[..., Any]] = [
        theirs.causal_mask_function,
        theirs.sliding_window_causal_mask_function(window),
        theirs.chunked_causal_mask_function(window, starts),
    ]
    if kind in ("prefill", "cache"):
        functions.append(theirs.bidirectional_mask_function)
        functions.append(theirs.sliding_window_bidirectional_mask_function(window))
    function = draw.choice(functions)
    if kind == "packed":
        found["mask_function"] = packed(function, packed_positions(draw, batch, nq))
        return found
    if draw.random() < 0.6:
        reach = found["kv_length"] + found.get("kv_offset", 0)
        found["attention_mask"] = padded(draw, batch, max(reach - draw.choice([0, 0, 2]), 1))
    if kind == "tensor":
        found["q_offset"] = torch.tensor(seen)
    return found | {"mask_function": function}


def packed(function: Callable[..., Any], positions: Tensor) -> Callable[..., Any]:
    """Return the function within packed sequences, as this release of transformers makes it."""
    ids = theirs.find_packed_sequence_indices(positions)
    ids = torch.zeros_like(positions) if ids is None else ids
    if hasattr(theirs, "packed_sequence_compatibility_function"):
        return theirs.packed_sequence_compatibility_function(function, positions, ids)
    return theirs.and_masks(function, theirs.packed_sequence_mask_function(ids))


def dense_of(given: dict[str, Any]) -> Tensor:
    return theirs.sdpa_mask(**given, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)


@pytest.mark.parametrize("seed", range(120))
def test_a_value_allows_the_pairs_of_the_boolean_tensor(seed: int):
    given = drawn(seed)
    found = attention_mask(**given)
    want = dense_of(given)
    assert isinstance(found, MaskValue)
    assert torch.equal(found.dense(), want)
    assert found.shape == want.shape
    assert found.ndim == want.ndim
    q = torch.randn(want.shape[0], 4, want.shape[2], 8)
    k, v = torch.randn(2, want.shape[0], 2, want.shape[3], 8)
    out, _ = attention_forward(torch.nn.Module(), q, k, v, found)
    ref = scaled_dot_product_attention(*(t.double() for t in (q, k, v)), want, enable_gqa=True)
    ref = ref.masked_fill(~want.any(-1, keepdim=True), 0.0).transpose(1, 2)
    torch.testing.assert_close(out, ref.float())


@pytest.mark.parametrize("seed", range(30))
def test_no_value_of_a_device_is_read(seed: int):
    given = drawn(seed)
    if "mask_function" in given and "attention_mask" not in given:
        given["attention_mask"] = torch.ones(given["batch_size"], 30, dtype=torch.bool)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for name in ("attention_mask", "q_offset"):
            if isinstance(given.get(name), Tensor):
                given[name] = mode.from_tensor(given[name])
        assert isinstance(attention_mask(**given), MaskValue)


def test_the_same_pairs_of_a_user_s_function_are_a_value():
    near = theirs.and_masks(
        theirs.causal_mask_function, lambda b, h, q, k: (q - k < 3) & (k + 5 >= q)
    )
    given = {"batch_size": 2, "q_length": 7, "kv_length": 9, "q_offset": 2, "mask_function": near}
    found = attention_mask(**given, use_vmap=True)
    assert isinstance(found, MaskValue)
    assert found.left == 2
    assert torch.equal(found.dense(), dense_of(given))


UNKNOWN = {
    "or": theirs.or_masks(theirs.causal_mask_function, lambda b, h, q, k: k < 2),
    "blocks": theirs.or_masks(
        theirs.causal_mask_function,
        theirs.blockwise_overlay(torch.tensor([[0, 0, 1, 1, -1, -1, -1]] * 2)),
    ),
    "modulo": lambda b, h, q, k: (k - q) % 2 == 0,
    "positions": theirs.remap_positions_for_packed_sequence(
        theirs.causal_mask_function, torch.tensor([[0, 2, 1, 3, 5, 4, 6]] * 2)
    )
    if hasattr(theirs, "remap_positions_for_packed_sequence")
    else (lambda b, h, q, k: k * 2 <= q),
    "torch": lambda b, h, q, k: torch.abs(q - k) < 3,
    "queries": lambda b, h, q, k: torch.ones(2, 7, dtype=torch.bool)[b, q] & (k <= q),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_function_becomes_a_boolean_tensor(name: str):
    given = {"batch_size": 2, "q_length": 7, "kv_length": 7, "mask_function": UNKNOWN[name]}
    given["attention_mask"] = padded(random.Random(0), 2, 7)
    found = attention_mask(**given)
    assert isinstance(found, Tensor)
    assert torch.equal(found, dense_of(given))


def test_a_mask_past_a_static_cache_s_last_query_becomes_a_boolean_tensor():
    given = {"batch_size": 1, "q_length": 3, "kv_length": 9, "q_offset": torch.tensor(2)}
    given["mask_function"] = theirs.sliding_window_bidirectional_mask_function(2)
    found = attention_mask(**given)
    assert isinstance(found, Tensor)
    assert torch.equal(found, dense_of(given))


def test_a_mask_that_a_model_computes_with_is_a_boolean_tensor():
    given: dict[str, Any] = {"batch_size": 1, "q_length": 4, "kv_length": 4}
    assert isinstance(attention_mask(**given, allow_is_causal_skip=False), Tensor)
    given["mask_function"] = theirs.bidirectional_mask_function
    assert isinstance(attention_mask(**given, allow_is_bidirectional_skip=False), Tensor)
    assert attention_mask(**given, allow_is_bidirectional_skip=True) is None


@pytest.fixture
def value() -> MaskValue:
    padding = torch.tensor([[False, True, True, True]] * 2)
    found = attention_mask(2, 4, 4, attention_mask=padding)
    assert isinstance(found, MaskValue)
    return found


def test_code_that_combines_masks_gets_the_boolean_tensor(value: MaskValue):
    want = dense_of(
        {"batch_size": 2, "q_length": 4, "kv_length": 4}
        | {"attention_mask": torch.tensor([[False, True, True, True]] * 2)}
    )
    other = torch.rand(2, 1, 4, 4) < 0.5
    assert torch.equal(value[:, :, 1:], want[:, :, 1:])
    assert torch.equal(value & other, want & other)
    assert torch.equal(other | value, want | other)
    assert torch.equal(~value, ~want)
    assert torch.equal(torch.where(value, 0.0, -1.0), torch.where(want, 0.0, -1.0))
    assert torch.equal(torch.cat([value, other]), torch.cat([want, other]))
    assert torch.equal(value.to(torch.float32), want.float())
    assert value.size(-1) == 4
    assert value.dim() == 4
    assert value.to("cpu") is value is value.contiguous()
    assert "MaskValue" in repr(value)


def test_arithmetic_with_a_mask_raises(value: MaskValue):
    with pytest.raises(TypeError, match="computes with its mask itself"):
        torch.randn(2, 1, 4, 4) + value
    with pytest.raises(TypeError, match="computes with its mask itself"):
        torch.mul(torch.randn(2, 1, 4, 4), value)


def test_a_value_moves_to_another_device(value: MaskValue):
    moved = value.to("meta", non_blocking=True)
    assert moved.device.type == "meta"
    assert all(t.is_meta for pair in moved.ids for t in pair)


def test_a_padding_mask_without_padding_is_dropped_where_it_is_read():
    full, some = (
        torch.ones(2, 4, dtype=torch.bool),
        torch.tensor([[True] * 4, [False] + [True] * 3]),
    )
    assert len(value_of(attention_mask=full).ids) == 0
    assert len(value_of(attention_mask=some).ids) == 1
    later = {"q_length": 1, "kv_length": 3, "q_offset": 3, "kv_offset": 1}
    assert len(value_of(attention_mask=some, **later).ids) == 0
    short = value_of(attention_mask=full, kv_length=9)  # a static cache
    assert torch.equal(short.dense()[0, 0], torch.ones(4, 9, dtype=torch.bool).tril())
    for enabled in (False, True):
        skip_full_masks(enabled)
        assert len(value_of(attention_mask=full.to("meta"), device="meta").ids) == 1
    with pytest.raises(TypeError, match="enabled: got 1; want True or False"):
        skip_full_masks(1)  # pyright: ignore


def value_of(**given: Any) -> MaskValue:
    usual = {"batch_size": 2, "q_length": 4, "kv_length": 4}
    found = attention_mask(**usual | given)
    assert isinstance(found, MaskValue)
    return found


def test_a_value_that_was_made_before_is_used_again(value: MaskValue):
    assert attention_mask(2, 4, 4, attention_mask=value) is value


def heads_first(*sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(2, *sizes) for _ in range(3))  # pyright: ignore


def layer(**attributes: Any) -> torch.nn.Module:
    module = torch.nn.Module()
    vars(module).update(attributes)
    return module


@pytest.mark.parametrize("is_causal", [True, False, None])
@pytest.mark.parametrize("window", [None, 3])
def test_a_layer_without_a_mask_follows_its_flags(is_causal: bool | None, window: int | None):
    q, k, v = heads_first(2, 9, 8)
    out, weights = attention_forward(
        layer(is_causal=False), q, k, v, None, is_causal=is_causal, sliding_window=window
    )
    distance = torch.arange(9)[:, None] - torch.arange(9)
    allowed = distance >= 0 if is_causal else torch.ones(9, 9, dtype=torch.bool)
    if window:
        allowed = allowed & (distance.abs() < window)
    want = scaled_dot_product_attention(q, k, v, allowed).transpose(1, 2)
    assert weights is None
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_of_a_user_is_boolean_or_added(dtype: torch.dtype):
    q, k, v = heads_first(2, 9, 8)
    allowed = (torch.rand(2, 1, 9, 9) < 0.7) | torch.eye(9, dtype=torch.bool)
    want = scaled_dot_product_attention(q, k, v, allowed).transpose(1, 2)
    out, _ = attention_forward(layer(), q, k, v, allowed)
    torch.testing.assert_close(out, want)
    added = torch.zeros(2, 1, 9, 9, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    out, _ = attention_forward(layer(), q, k, v, added)
    torch.testing.assert_close(out, want)
    bias = torch.randn(1, 2, 9, 9)
    want = scaled_dot_product_attention(q, k, v, added.float() + bias).transpose(1, 2)
    out, _ = attention_forward(layer(), q, k, v, added, position_bias=bias)
    torch.testing.assert_close(out, want)


def test_offsets_separate_packed_sequences():
    q, k, v = (t[:1] for t in heads_first(2, 9, 8))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    more = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 5, "max_length_k": 5}
    parts = (slice(0, 4), slice(4, 9))
    want = torch.cat(
        [
            scaled_dot_product_attention(q[..., s, :], k[..., s, :], v[..., s, :], is_causal=True)
            for s in parts
        ],
        2,
    ).transpose(1, 2)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    function = packed(theirs.causal_mask_function, positions)
    for mask in (None, attention_mask(1, 9, 9), attention_mask(1, 9, 9, mask_function=function)):
        out, _ = attention_forward(layer(is_causal=True), q, k, v, mask, **more)
        torch.testing.assert_close(out, want)
    more["max_length_q"] = torch.tensor(5)
    out, _ = attention_forward(layer(is_causal=True), q, k, v, None, **more)
    torch.testing.assert_close(out, want)


CU = torch.tensor([0, 4, 9], dtype=torch.int32)
MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "weights": ({"output_attentions": True}, NotImplementedError, "output_attentions: got True"),
    "pages": ({"cache": object()}, NotImplementedError, "cache: got object; want None, or attn_"),
    "slopes": ({"alibi": torch.ones(2)}, NotImplementedError, "alibi: got a tensor"),
    "indices": ({"indices": torch.ones(2)}, NotImplementedError, "indices: got a tensor"),
    "sinks of queries": ({"sinks": torch.ones(2, 2, 9, 1)}, NotImplementedError, "sinks: got a t"),
    "mask 2-D": ({"attention_mask": torch.ones(2, 9)}, ValueError, r"attention_mask: got shape"),
    "mask int": (
        {"attention_mask": torch.ones(2, 1, 9, 9, dtype=torch.int64)},
        TypeError,
        "attention_mask: got a tensor of torch.int64; want torch.bool",
    ),
    "mask size": ({"attention_mask": attention_mask(2, 9, 8)}, ValueError, "9 queries and 8 keys"),
    "one offset": ({"cu_seq_lens_q": CU}, ValueError, "cu_seq_lens_k: got None"),
    "batch": ({"cu_seq_lens_q": CU, "cu_seq_lens_k": CU}, ValueError, "got a batch of 2"),
    "padding": (
        {"cu_seq_lens_q": CU, "attention_mask": torch.ones(2, 1, 9, 9)},
        ValueError,
        "attention_mask: got Tensor with cu_seq_lens_q",
    ),
    "bias": (
        {"cu_seq_lens_q": CU, "position_bias": torch.ones(1, 2, 9, 9)},
        NotImplementedError,
        "position_bias: got a tensor with cu_seq_lens_q",
    ),
    "sinks": ({"s_aux": torch.ones(3)}, ValueError, "sink: got"),
}


#: names that models pass to the attention function, and those of their own layers
READ = set(signature(attention_forward).parameters) | set(REFUSED) | {"deterministic"}
READ |= {f"{name}_{side}" for name in ("cu_seq_lens", "max_length") for side in "qk"}
UNREAD = {"position_ids"}  # the mask holds packed sequences


def test_every_argument_that_a_model_of_transformers_passes_is_known():
    """A name that a later release adds must not be ignored."""
    found: dict[str, str] = {}
    for path in Path(theirs.__file__).parent.glob("models/*/modeling_*.py"):
        text = path.read_text(encoding="utf-8")
        if "attention_interface(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            name = getattr(node.func, "id", None) if isinstance(node, ast.Call) else None
            if name == "attention_interface":
                assert isinstance(node, ast.Call)
                found |= {x.arg: path.name for x in node.keywords if x.arg}
    assert len(found) > 10
    assert {name: found[name] for name in set(found) - READ - UNREAD} == {}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_a_sentence(name: str):
    given, error, text = MISTAKES[name]
    q, k, v = heads_first(2, 9, 8)
    mask = given.get("attention_mask")
    more = {key: x for key, x in given.items() if key != "attention_mask"}
    with pytest.raises(error, match=text):
        attention_forward(layer(is_causal=True), q, k, v, mask, **more)


def test_a_tensor_without_heads_is_a_sentence():
    q, k, v = heads_first(9, 8)
    with pytest.raises(ValueError, match=r"query: got shape \[2, 9, 8\]; want \[B, H, N, D\]"):
        attention_forward(layer(), q, k, v, None)


def test_a_mask_is_made_within_a_compiled_graph():
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    q, k, v = (t[:1] for t in heads_first(2, 9, 8))

    def masked(function: Callable[..., Any], *qkv: Tensor) -> Tensor:
        mask = attention_mask(1, 9, 9, mask_function=function())
        return attention_forward(layer(), *qkv, mask)[0]

    for function in (
        partial(theirs.sliding_window_causal_mask_function, 3),
        lambda: packed(theirs.causal_mask_function, positions),
        lambda: theirs.chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.int64)),
    ):
        torch.compiler.reset()
        call = partial(masked, function)
        compiled = torch.compile(call, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(q, k, v), call(q, k, v))
