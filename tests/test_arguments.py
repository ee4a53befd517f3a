"""Bad input: each is named, with what came and what is wanted, before any work."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import rowmax
from rowmax.call import dispatch as backends

nan, inf = float("nan"), float("inf")


def tensors(**changed: Any) -> dict[str, Any]:
    """Return q ``[2, 6, 4, 8]``, k and v ``[2, 9, 2, 8]``; a shape or a tensor replaces any."""
    named = {"q": (2, 6, 4, 8), "k": (2, 9, 2, 8), "v": (2, 9, 2, 8)} | changed
    return {n: torch.randn(x) if isinstance(x, tuple) else x for n, x in named.items()}


def packed(**changed: Any) -> dict[str, Any]:
    cu = {"cu_seqlens_q": torch.tensor([0, 2, 6]), "cu_seqlens_k": torch.tensor([0, 5, 9])}
    return tensors(q=(6, 4, 8), k=(9, 2, 8), v=(9, 2, 8)) | cu | changed


def offsets(*values: int) -> Tensor:
    return torch.tensor(values)


half = torch.float16
#: changed arguments, the error, and how its message starts
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    # rank, type, dtype, device, layout
    ({"q": (6, 4, 8)}, ValueError, r"q: got shape \[6, 4, 8\]; want a 4-D tensor"),
    ({"k": (1, 2, 9, 2, 8)}, ValueError, "k: got shape"),
    ({"v": (2, 9, 8)}, ValueError, "v: got shape"),
    (
        {"q": (6, 4, 8)},
        ValueError,
        r"q: got .*; q\[None\] is a batch of one, attention_varlen takes",
    ),
    ({"q": [1.0]}, TypeError, "q: got list; want a tensor"),
    ({"k": None}, TypeError, "k: got NoneType"),
    ({"v": "v"}, TypeError, "v: got str"),
    ({"q": torch.ones(2, 6, 4, 8, dtype=torch.int64)}, TypeError, "q: got torch.int64; want"),
    ({"q": torch.ones(2, 6, 4, 8, dtype=torch.complex64)}, TypeError, "q: got torch.complex64"),
    ({"k": torch.ones(2, 9, 2, 8, dtype=half)}, TypeError, "k: got torch.float16; want the dtype"),
    ({"v": torch.ones(2, 9, 2, 8, dtype=torch.float64)}, TypeError, "v: got torch.float64"),
    ({"k": torch.ones(2, 9, 2, 8, device="meta")}, ValueError, "k: got a tensor on meta; want"),
    ({"v": torch.ones(2, 9, 2, 8, device="meta")}, ValueError, "v: got a tensor on meta; want"),
    ({"q": torch.ones(2, 6, 4, 8).to_sparse()}, TypeError, "q: got layout torch.sparse_coo"),
    (
        {"q": torch.nested.as_nested_tensor([torch.ones(6, 4, 8)], layout=torch.jagged)},
        TypeError,
        r"k: got a dense tensor \[2, 9, 2, 8\]; want a jagged tensor \[B, j, H, D\], as q is",
    ),
    (
        {"k": torch.nested.as_nested_tensor([torch.ones(6, 2, 8)], layout=torch.jagged)},
        TypeError,
        r"k: got a nested tensor; want a dense .* of jagged q, k and v \[B, j, H, D\]",
    ),
    # sizes
    ({"k": (3, 9, 2, 8)}, ValueError, "k: got batch 3; want the batch of q, 2"),
    ({"k": (2, 9, 2, 7)}, ValueError, "k: got head size 7; want the head size of q, 8"),
    ({"v": (2, 8, 2, 8)}, ValueError, r"v: got shape \[2, 8, 2, 8\]"),
    ({"v": (2, 9, 4, 8)}, ValueError, r"v: got shape \[2, 9, 4, 8\]"),
    ({"q": (2, 6, 3, 8)}, ValueError, "q: got 3 heads; want a multiple of the 2 heads"),
    ({"q": (2, 6, 3, 8)}, ValueError, "q: .* of k and v, at least one$"),  # in no layout
    (
        {"q": (2, 8, 128, 64), "k": (2, 2, 300, 64), "v": (2, 2, 300, 64)},
        ValueError,
        r"q: got 128 heads; want a multiple of the 300 .* \[B, N, H, D\]: pass transpose\(1, 2\)",
    ),
    ({"q": (2, 6, 0, 8)}, ValueError, "q: got 0 heads"),
    ({"k": (2, 9, 0, 8), "v": (2, 9, 0, 8)}, ValueError, "q: got 4 heads; want a multiple"),
    ({"q": (2, 6, 4, 0), "k": (2, 9, 2, 0)}, ValueError, "q: got head size 0; want 1 to 576"),
    ({"q": (2, 6, 4, 577), "k": (2, 9, 2, 577)}, ValueError, "q: got head size 577"),
    ({"v": (2, 9, 2, 600)}, ValueError, "v: got head size 600; want 1 to 576"),
    ({"v": (2, 9, 2, 0)}, ValueError, "v: got head size 0"),
    # numbers
    ({"scale": nan}, ValueError, "scale: got nan; want a finite number"),
    ({"scale": inf}, ValueError, "scale: got inf"),
    ({"scale": -0.5}, ValueError, "scale: got -0.5"),
    ({"scale": 1e39}, ValueError, r"scale: got 1e\+39; want a finite number from 0 to 1e\+30"),
    ({"softcap": 1e300}, ValueError, r"softcap: got 1e\+300; want 0 .* from 1e-30 to 1e\+30"),
    ({"softcap": 1e-45}, ValueError, "softcap: got 1e-45"),
    ({"scale": 10**400}, ValueError, "scale: got inf"),
    ({"scale": "1"}, TypeError, "scale: got str"),
    ({"scale": True}, TypeError, "scale: got bool"),
    (
        {"scale": torch.tensor(1.0)},
        TypeError,
        r"scale: got Tensor; want a Python number \(multiply q by a tensor\)",
    ),
    ({"softcap": -1.0}, ValueError, "softcap: got -1.0"),
    ({"softcap": nan}, ValueError, "softcap: got nan"),
    ({"softcap": inf}, ValueError, "softcap: got inf"),
    ({"softcap": 10**400}, ValueError, "softcap: got inf"),
    ({"softcap": None}, TypeError, "softcap: got NoneType"),
    ({"dropout_p": 1.0}, ValueError, r"dropout_p: got 1.0; want a probability in \[0, 1\)"),
    ({"dropout_p": -0.1}, ValueError, "dropout_p: got -0.1"),
    ({"dropout_p": -(10**400)}, ValueError, "dropout_p: got -inf"),
    ({"dropout_p": nan}, ValueError, "dropout_p: got nan"),
    ({"dropout_p": "0.1"}, TypeError, "dropout_p: got str"),
    ({"seed": 1.5}, TypeError, "seed: got float"),
    ({"seed": True}, TypeError, "seed: got bool"),
    ({"seed": 2**63}, ValueError, "seed: got 9223372036854775808"),
    ({"seed": torch.tensor([1])}, ValueError, r"seed: got torch.int64 \[1\]"),
    ({"seed": torch.tensor(1.0)}, ValueError, "seed: got torch.float32"),
    ({"seed": torch.tensor(1, device="meta"), "dropout_p": 0.5}, ValueError, "seed: got a tensor"),
    # flags and names
    ({"causal": 1}, TypeError, "causal: got 1; want True or False"),
    ({"return_lse": "no"}, TypeError, "return_lse: got 'no'; want True or False"),
    ({"causal": None}, TypeError, "causal: got None"),
    ({"deterministic": "yes"}, TypeError, "deterministic: got 'yes'"),
    ({"backend": "cuda"}, ValueError, "backend: got 'cuda'; want None, or one of"),
    ({"backend": 3}, ValueError, "backend: got 3"),
    # masks
    ({"mask": "causal"}, TypeError, "mask: got str; want a rowmax mask or a boolean tensor"),
    ({"mask": torch.ones(6, 9)}, TypeError, "mask: got a tensor of torch.float32; want torch.bool"),
    ({"mask": [4, 0]}, TypeError, r"mask: got list; .*, such as Window\(4, 0\)"),
    ({"mask": rowmax.Causal}, TypeError, r"mask: got the class Causal; .*, such as Causal\(\)"),
    (
        {"mask": torch.ones(2, 9, dtype=torch.bool)},
        ValueError,
        r"mask: got shape \[2, 9\]; .* KeyPadding\(key_padding_mask\), True at padding",
    ),
    (
        {"mask": torch.ones(6, 8, dtype=torch.bool)},
        ValueError,
        r"mask: got shape \[6, 8\]; want one that broadcasts to .* = \[2, 4, 6, 9\]",
    ),
    ({"mask": torch.ones(2, 2, 6, 9, dtype=torch.bool)}, ValueError, "mask: got shape"),
    ({"mask": torch.ones(1, 2, 4, 6, 9, dtype=torch.bool)}, ValueError, "mask: got shape"),
    (
        {"mask": torch.ones(6, 9, dtype=torch.bool, device="meta")},
        ValueError,
        "mask: got a tensor on meta",
    ),
    (
        {"mask": torch.ones(6, 9, dtype=torch.bool).to_sparse()},
        TypeError,
        "mask: got layout torch.sparse_coo; want a dense",
    ),
    (
        {"mask": rowmax.Documents(cu_seqlens=offsets(0, 5))},
        ValueError,
        r"mask: Documents\(cu_seqlens=\): got last offset 5; want the number of keys, 9",
    ),
    (
        {"mask": rowmax.Documents(cu_seqlens=offsets(0, 2**62))},
        ValueError,
        r"mask: Documents\(cu_seqlens=\): got last offset 4611686018427387904",
    ),
    (
        {"mask": rowmax.Documents(torch.zeros(8, dtype=torch.int64))},
        ValueError,
        r"mask: Documents\(ids=\): got shape \[1, 8\]; want \[9\] or \[2, 9\]",
    ),
    (
        {"mask": rowmax.Documents(torch.zeros(3, 9, dtype=torch.int64))},
        ValueError,
        r"mask: Documents\(ids=\): got shape \[3, 9\]",
    ),
    (
        {"mask": rowmax.Documents(torch.zeros(9, dtype=torch.int64), q_ids=offsets(1, 2))},
        ValueError,
        r"mask: Documents\(q_ids=\): got shape \[1, 2\]",
    ),
    (
        {"q": (2, 10, 4, 8), "mask": rowmax.Documents(torch.zeros(9, dtype=torch.int64))},
        ValueError,
        "mask: got Documents without q_ids, 10 queries, 9 keys",
    ),
    (
        {"mask": rowmax.Documents(offsets(0, 0, 0, 0, 0, 0, 0, 0, 2**32))},
        ValueError,
        r"mask: Documents\(ids=\): got ids from 0 to 4294967296; want ids of 32 bits",
    ),
    (
        {"mask": rowmax.PrefixLengths(offsets(1, 2, 3))},
        ValueError,
        r"mask: PrefixLengths\(lengths=\): got 3 lengths; want one for each of 2",
    ),
    (
        {"mask": rowmax.PrefixLengths(offsets(1, -2))},
        ValueError,
        r"mask: PrefixLengths\(lengths=\): got \[1, -2\]",
    ),
    # names of other libraries
    ({"is_causal": True}, TypeError, r"attention\(\) got .* 'is_causal'; want causal=True"),
    ({"attn_mask": None}, TypeError, r".* 'attn_mask'; want mask= for a boolean tensor, bias="),
    ({"dropout": 0.1}, TypeError, ".* 'dropout'; want dropout_p="),
    ({"softmax_scale": 0.1}, TypeError, ".* 'softmax_scale'; want scale="),
    ({"window_size": (4, 0)}, TypeError, r".* 'window_size'; want mask=Window\(left, right\)"),
    ({"attn_bias": None}, TypeError, r".* 'attn_bias'; want bias= for a tensor .* mask="),
    ({"score_mod": None}, TypeError, ".* 'score_mod'; want bias=, alibi= or softcap="),
    ({"block_mask": None}, TypeError, r".* 'block_mask'; want mask=from_block_mask\(block_mask\)"),
    ({"cache_seqlens": 1}, TypeError, r".* 'cache_seqlens'; want mask=PrefixLengths\(.*align="),
    ({"casual": True}, TypeError, r"attention\(\) got an unexpected keyword argument 'casual'$"),
    (
        {
            "mask": rowmax.Documents(offsets(*range(9)))
            & rowmax.PrefixLengths(offsets(1, 2), align="lengths")
        },
        ValueError,
        r'mask: got Documents without q_ids and PrefixLengths\(align="lengths"\); want q_ids',
    ),
    # score terms
    ({"bias": 1.0}, TypeError, "bias: got float"),
    ({"bias": torch.ones(6, 9, dtype=torch.bool)}, TypeError, "bias: got torch.bool"),
    ({"bias": torch.ones(6, 9, dtype=half)}, TypeError, "bias: got torch.float16; want the dtype"),
    ({"bias": torch.ones(5, 9)}, ValueError, r"bias: got shape \[5, 9\]; want one that broadcasts"),
    ({"bias": torch.ones(2, 3, 6, 9)}, ValueError, "bias: got shape"),
    ({"bias": torch.ones(6, 9, device="meta")}, ValueError, "bias: got a tensor on meta"),
    ({"bias": torch.ones(6, 9).to_sparse()}, TypeError, "bias: got layout torch.sparse_coo"),
    ({"sink": torch.ones(4).to_sparse()}, TypeError, "sink: got layout torch.sparse_coo"),
    ({"alibi": torch.ones(2)}, ValueError, r"alibi: got shape \[2\]; want \[Hq\] = \[4\]"),
    ({"alibi": torch.ones(2, 4)}, ValueError, "alibi: got shape"),
    ({"alibi": torch.ones(4, dtype=torch.int64)}, TypeError, "alibi: got torch.int64"),
    ({"alibi": [1.0] * 4}, TypeError, "alibi: got list"),
    ({"sink": torch.ones(3)}, ValueError, r"sink: got shape \[3\]"),
    ({"sink": 0.0}, TypeError, "sink: got float"),
    ({"sink": torch.ones(4, dtype=torch.bool)}, TypeError, "sink: got torch.bool"),
    ({"sink": torch.ones(4, device="meta")}, ValueError, "sink: got a tensor on meta"),
]

BAD_PACKED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": torch.ones(1, 6, 4, 8)}, ValueError, r"q: got shape .*; want a 3-D tensor \[total, H"),
    ({"k": torch.ones(9, 3, 8)}, ValueError, r"v: got shape \[9, 2, 8\]"),
    ({"cu_seqlens_q": [0, 2, 6]}, TypeError, "cu_seqlens_q: got list"),
    ({"cu_seqlens_q": torch.tensor([0.0, 6.0])}, TypeError, "cu_seqlens_q: got torch.float32"),
    ({"cu_seqlens_k": torch.tensor([[0, 5, 9]])}, ValueError, "cu_seqlens_k: got shape"),
    ({"cu_seqlens_q": torch.tensor([], dtype=torch.int64)}, ValueError, "cu_seqlens_q: got no"),
    ({"cu_seqlens_q": offsets(1, 2, 6)}, ValueError, "cu_seqlens_q: got first offset 1; want 0"),
    ({"cu_seqlens_q": offsets(0, 7, 6)}, ValueError, "cu_seqlens_q: got 6 after 7 at 2"),
    ({"cu_seqlens_q": offsets(0, 2, 5)}, ValueError, "cu_seqlens_q: got last offset 5; want the p"),
    ({"cu_seqlens_k": offsets(0, 5, 12)}, ValueError, "cu_seqlens_k: got last offset 12"),
    ({"cu_seqlens_k": offsets(0, 9)}, ValueError, "cu_seqlens_k: got 2 offsets; want as many"),
    ({"cu_seqlens_k": offsets(0, 9).to("meta")}, ValueError, "cu_seqlens_k: got a tensor on meta"),
    ({"max_seqlen_q": 3}, ValueError, "max_seqlen_q: got 3; want at least the longest seque.* 4"),
    ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k: got -1; want 0 or more"),
    ({"max_seqlen_k": 9.0}, TypeError, "max_seqlen_k: got 9.0; want an int"),
    ({"max_seqlen_q": True}, TypeError, "max_seqlen_q: got True"),
    (
        {"mask": rowmax.Documents(torch.zeros(9, dtype=torch.int64))},
        ValueError,
        "mask: got Documents in a packed call",
    ),
    ({"mask": rowmax.PrefixLengths(offsets(1))}, ValueError, r"mask: PrefixLengths\(lengths=\)"),
    ({"bias": torch.ones(3, 4, 4, 5)}, ValueError, r"bias: .* = \[2, 4, 4, 5\]"),
    ({"mask": torch.ones(6, 9, dtype=torch.bool)}, ValueError, "mask: got shape"),
    ({"softcap": -1}, ValueError, "softcap: got -1.0"),
    ({"causal": "yes"}, TypeError, "causal: got 'yes'"),
]


def _ids(table: list) -> list[str]:
    return [f"{n}-{'-'.join(changed)}" for n, (changed, *_) in enumerate(table)]


@pytest.fixture
def _no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is chosen or computed is a failure."""

    def never(*_: Any) -> None:
        raise AssertionError("work before the arguments were checked")

    monkeypatch.setattr(backends, "choose", never)


@pytest.mark.usefixtures("_no_work")
@pytest.mark.parametrize(("changed", "error", "text"), BAD, ids=_ids(BAD))
def test_attention(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{text}"):
        rowmax.attention(**tensors(**changed))


@pytest.mark.usefixtures("_no_work")
@pytest.mark.parametrize(("changed", "error", "text"), BAD_PACKED, ids=_ids(BAD_PACKED))
def test_attention_varlen(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{text}"):
        rowmax.attention_varlen(**packed(**changed))


#: arguments of the intended sizes, B 2, Hq 4, N 12, for q [2, 4, 12, 8], k and v [2, 2, 12, 8]
HEADS_FIRST: list[tuple[str, Any]] = [
    ("bias", torch.ones(4, 12, 12)),
    ("bias", torch.ones(12, 12)),
    ("mask", torch.ones(2, 1, 12, 12, dtype=torch.bool)),
    ("mask: KeyPadding", rowmax.KeyPadding(torch.zeros(2, 12, dtype=torch.bool))),
    ("mask: Documents(ids=)", rowmax.Documents(torch.zeros(12, dtype=torch.int64))),
    ("sink", torch.ones(4)),
    ("alibi", torch.ones(4)),
]


@pytest.mark.usefixtures("_no_work")
@pytest.mark.parametrize(("name", "given"), HEADS_FIRST, ids=[name for name, _ in HEADS_FIRST])
def test_heads_before_positions(name: str, given: Any) -> None:
    """The error names the layout where the other layout would pass, and nowhere else."""
    argument = name.partition(":")[0]
    other = tensors(q=(2, 4, 12, 8), k=(2, 2, 12, 8), v=(2, 2, 12, 8))
    hint = r"; the layout is \[B, N, H, D\]: pass transpose\(1, 2\) of q, k, v \[B, H, N, D\]$"
    with pytest.raises(ValueError, match=rf"^{re.escape(name)}: got shape .*{hint}"):
        rowmax.attention(**other, **{argument: given})
    wrong = tensors(q=(2, 5, 3, 8), k=(2, 5, 3, 8), v=(2, 5, 3, 8))  # in neither layout
    with pytest.raises(ValueError, match=f"^{re.escape(name)}: ") as raised:
        rowmax.attention(**wrong, **{argument: given})
    assert "transpose" not in str(raised.value)


@pytest.mark.parametrize(("name", "given"), HEADS_FIRST, ids=[name for name, _ in HEADS_FIRST])
def test_the_hint_about_the_layout_is_a_call_that_works(name: str, given: Any) -> None:
    other = tensors(q=(2, 4, 12, 8), k=(2, 2, 12, 8), v=(2, 2, 12, 8))
    q, k, v = (t.transpose(1, 2) for t in other.values())
    assert rowmax.attention(q, k, v, **{name.partition(":")[0]: given}).shape == (2, 12, 4, 8)


@pytest.mark.usefixtures("_no_work")
def test_arguments_by_position() -> None:
    q, k, v = tensors().values()
    for more, text in (
        ((True,), r"got True by position; want it by keyword, such as causal=True$"),
        ((torch.ones(6, 9),), r"got a tensor by position; .* mask= or bias= \(attention_varlen"),
        ((0.5, 1), r"got 0.5 by position; want it by keyword$"),
    ):
        with pytest.raises(TypeError, match=rf"^attention\(\): {text}"):
            rowmax.attention(q, k, v, *more)
    with pytest.raises(TypeError, match=r"^attention_varlen\(\): got False by .* causal=False$"):
        rowmax.attention_varlen(*packed().values(), 4, 5, False)
    with pytest.raises(TypeError, match=r"^attention_varlen\(\) got .*_scale'; want scale="):
        rowmax.attention_varlen(**packed(), softmax_scale=1.0)


@pytest.mark.parametrize("call", [rowmax.attention, rowmax.attention_varlen])
def test_a_signature_has_what_is_taken_alone(call: Any) -> None:
    kinds = {p.kind for p in inspect.signature(call).parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    assert "return_lse" in inspect.signature(call).parameters


def test_the_hints_are_calls_that_work() -> None:
    q, lengths = torch.randn(2, 6, 4, 8), offsets(3, 6)
    want = rowmax.attention(q, q, q, mask=rowmax.PrefixLengths(lengths))
    key_padding_mask = torch.arange(6) >= lengths[:, None]
    got = rowmax.attention(q, q, q, mask=rowmax.KeyPadding(key_padding_mask))
    torch.testing.assert_close(got, want)
    parts = [torch.randn(3, 4, 8), torch.randn(5, 4, 8)]
    nt = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    out = rowmax.attention(nt, nt, nt).values()
    want = torch.cat([rowmax.attention(x[None], x[None], x[None])[0] for x in parts])
    torch.testing.assert_close(out, want)


def test_numbers_of_numpy() -> None:
    """As Python's are, of any width; booleans are refused as Python's are."""
    numpy = pytest.importorskip("numpy")
    given = tensors()
    want = rowmax.attention(**given, scale=0.5, softcap=2.0, dropout_p=0.25, seed=7)
    numbers = {"scale": 0.5, "softcap": 2.0, "dropout_p": 0.25}
    for real in (numpy.float32, numpy.float64, numpy.float16):
        same = {name: real(x) for name, x in numbers.items()}
        for _ in range(2):  # the second finds what the first left
            out = rowmax.attention(**given, **same, seed=numpy.int64(7))
            assert torch.equal(out, want)
    one = rowmax.attention(**given, scale=1)
    assert torch.equal(rowmax.attention(**given, scale=numpy.int64(1)), one)
    for name in ("scale", "softcap", "dropout_p", "seed"):
        with pytest.raises(TypeError, match=f"^{name}: got bool"):
            rowmax.attention(**given, **{name: numpy.bool_(False)})
    longest = {"max_seqlen_q": numpy.int32(4), "max_seqlen_k": numpy.int64(5)}
    whole = packed()
    got = rowmax.attention_varlen(**whole, **longest)
    assert torch.equal(got, rowmax.attention_varlen(**whole, max_seqlen_q=4, max_seqlen_k=5))


@pytest.mark.parametrize(("changed", "error", "text"), BAD)
def test_a_good_call_excuses_none_after_it(
    changed: dict[str, Any], error: type[Exception], text: str
) -> None:
    for options in ({}, {"scale": 1, "softcap": 1, "deterministic": True}, {"dropout_p": 0.5}):
        rowmax.attention(**tensors(), **options)
        with pytest.raises(error, match=f"^{text}"):
            rowmax.attention(**(tensors() | options | tensors(**changed)))


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"scale": 1.0}, {"scale": True}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"dropout_p": 0.0}, {"dropout_p": False}),
        ({"deterministic": True}, {"deterministic": 1}),
        ({"backend": None}, {"backend": []}),
        ({"scale": 1.0}, {"scale": torch.tensor(1.0)}),
    ],
)
def test_an_equal_value_of_another_type_is_refused(good: Any, bad: Any) -> None:
    rowmax.attention(**tensors(), **good)
    with pytest.raises((TypeError, ValueError), match=f"^{next(iter(bad))}: "):
        rowmax.attention(**tensors(), **bad)


def test_every_call_draws_a_seed_of_its_own() -> None:
    good = tensors()
    first, second = (rowmax.attention(**good, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)


def test_a_bad_call_draws_no_seed() -> None:
    good = tensors()
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="softcap"):
        rowmax.attention(**good, dropout_p=0.5, softcap=-1.0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_a_backend_that_cannot_says_why(backend: str) -> None:
    with pytest.raises(ValueError, match=f"backend: got '{backend}'; .*{backend}: it runs on cuda"):
        rowmax.attention(**tensors(), backend=backend)


# --- what is good ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        {"scale": 0},
        {"scale": 1},
        {"softcap": 3},
        {"dropout_p": 0},
        {"seed": -1, "dropout_p": 0.5},
        {"mask": torch.tensor(True)},
        {"mask": torch.ones(9, dtype=torch.bool)},
        {"bias": torch.tensor(1.0)},
        {"bias": torch.ones(4, 1, 1)},
        {"sink": torch.zeros(4, dtype=torch.bfloat16)},
        {"alibi": torch.zeros(4, dtype=torch.float64)},
        {"mask": rowmax.Window(10**9, 10**9)},
        {"mask": rowmax.PrefixLengths(torch.tensor([10**6, 0], dtype=torch.int32))},
        {"mask": rowmax.Documents(torch.tensor([-5, 2**31 - 1, 0, 0, 0, 1, 1, 1, 1]))},
        {"causal": True, "mask": torch.ones(6, 9, dtype=torch.bool)},
    ],
    ids=lambda changed: "-".join(changed),
)
def test_good_input_passes(changed: dict[str, Any]) -> None:
    out = rowmax.attention(**tensors(), **changed, backend="torch")
    assert out.shape == (2, 6, 4, 8)
    assert out.isfinite().all()


def test_lengths_of_64_bits_are_not_cut() -> None:
    given = tensors()
    long = rowmax.attention(**given, mask=rowmax.PrefixLengths(offsets(2**32, 2**40 + 3)))
    torch.testing.assert_close(long, rowmax.attention(**given))


def test_good_packed_input_passes() -> None:
    for changed in (
        {"max_seqlen_q": 4, "max_seqlen_k": 100},
        {"cu_seqlens_q": offsets(0, 0, 6).int()},
        {"mask": rowmax.PrefixLengths(offsets(3, 0)), "bias": torch.ones(2, 1, 4, 5)},
    ):
        out = rowmax.attention_varlen(**packed(**changed), backend="torch")
        assert out.shape == (6, 4, 8)
        assert out.isfinite().all()


# --- merge -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "error", "text"),
    [
        ([], ValueError, "parts: got none"),
        ([torch.ones(1, 2, 3, 4)], TypeError, r"parts\[0\]: got Tensor; want a pair"),
        ([(torch.ones(1, 2, 3, 4), None)], TypeError, r"parts\[0\]: got tuple; .*lse\)$"),
        (
            [[(torch.ones(1, 2, 3, 4), torch.ones(1, 3, 2))] * 2],
            TypeError,
            r"parts\[0\]: got list; .* a list of pairs goes in as merge\(\*parts\)",
        ),
        ([(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3))], ValueError, r"parts\[0\]: got out"),
        ([(torch.ones(4), torch.ones(4))], ValueError, r"parts\[0\]: got out"),
        (
            [
                (torch.ones(1, 2, 3, 4), torch.ones(1, 3, 2)),
                (torch.ones(1, 2, 3, 5), torch.ones(1, 3, 2)),
            ],
            ValueError,
            r"parts\[1\] out: got torch.float32 \[1, 2, 3, 5\]",
        ),
        (
            [
                (torch.ones(1, 2, 3, 4), torch.ones(1, 3, 2)),
                (torch.ones(1, 2, 3, 4), torch.ones(1, 3, 2).double()),
            ],
            ValueError,
            r"parts\[1\] lse: got torch.float64",
        ),
    ],
)
def test_merge(parts: list, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{text}"):
        rowmax.merge(*parts)


def test_the_global_flag_asks_for_determinism(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    choose = backends.choose

    def watched(problem: Any, *rest: Any) -> Any:
        asked.append(problem.deterministic)
        return choose(problem, *rest)

    monkeypatch.setattr(backends, "choose", watched)
    monkeypatch.setattr("rowmax.call.normalize._passed", {})
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for on in (False, True):
            torch.use_deterministic_algorithms(on)
            rowmax.attention(**tensors())
    finally:
        torch.use_deterministic_algorithms(before)
    assert asked == [False, True]


def test_a_size_may_be_symbolic() -> None:
    """The tensor is on the meta device, so it is a plain one."""
    sources = pytest.importorskip("torch._dynamo.source")
    symbolic = pytest.importorskip("torch.fx.experimental.symbolic_shapes")
    env = symbolic.ShapeEnv()
    n = env.create_symintnode(env.create_symbol(8, sources.ConstantSource("n")), hint=8)
    x = torch.empty(2, n, 2, 16, device="meta")
    for _ in range(2):
        assert rowmax.attention(x, x, x, causal=True).shape == (2, 8, 2, 16)
    with pytest.raises(ValueError, match=r"^k: got a tensor on meta"):
        rowmax.attention(torch.randn(2, 8, 2, 16), x, x)
