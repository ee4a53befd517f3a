"""``varlen_attn`` with torch's arguments, against each sequence alone in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen as torch_varlen

from rowmax.integrations import sdpa

from .sdpa_cases import counted, wrong_varlen

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("seed", range(24))
def test_random_calls(seed: int) -> None:
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    assert not wrong_varlen(seed, dtype, "cpu", sdpa.varlen_attn)


def small() -> tuple[Tensor, Tensor]:
    return torch.randn(10, 2, 16), torch.tensor([0, 3, 10], dtype=torch.int32)


def test_torchs_name_while_enabled() -> None:
    theirs = torch_varlen.varlen_attn
    q, cu = small()
    with sdpa.enable(), counted() as calls:
        later = torch_varlen.varlen_attn
        got = later(q, q, q, cu, cu, 7, 7, window_size=(-1, 0))
        assert calls == ["forward"]
    assert got.shape == q.shape
    assert torch_varlen.varlen_attn is theirs
    with counted() as calls, pytest.raises(NotImplementedError, match="CPU"):
        later(q, q, q, cu, cu, 7, 7)  # torch's has no kernel on a CPU
    assert not calls


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_splits": 1}, "num_splits is 1"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, "block_table"),
        ({"scale": -1.0}, "scale is -1.0"),
        ({"window_size": (-2, 0)}, "window_size"),
        ({"cu_seq_k": None}, "cu_seq_k is a NoneType"),
        ({"cu_seq_k": torch.zeros(2, dtype=torch.int32)}, "cu_seq_q has 3 offsets, cu_seq_k 2"),
        ({"seqused_k": torch.zeros(3, dtype=torch.int32)}, "seqused_k 3"),
        ({"cu_seq_q": torch.zeros(3)}, "torch.float32"),
        ({"max_q": 7.0}, "max_q is 7.0"),
        ({"key": torch.randn(10, 1, 16), "value": torch.randn(10, 1, 16)}, "2 heads, key 1"),
        ({"value": torch.randn(9, 2, 16)}, "fit together"),
        ({"query": torch.randn(1, 10, 2, 16)}, "not [total, heads, head size]"),
    ],
)
def test_what_goes_to_torch(change: dict[str, Any], reason: str) -> None:
    q, cu = small()
    names = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k")
    given = dict(zip(names, (q, q, q, cu, cu, 7, 7), strict=True)) | change
    route = sdpa.explain_varlen(**given)
    assert route.by == "torch"
    assert reason in (route.reason or "")
    with counted() as calls, pytest.raises((RuntimeError, ValueError, TypeError, IndexError)):
        sdpa.varlen_attn(**given)
    assert not calls


def test_torch_gets_only_the_keywords_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions of torch do not know the rest."""
    from rowmax.integrations.sdpa import varlen

    given: dict[str, Any] = {}
    monkeypatch.setattr(varlen, "fallback", lambda *_, **keywords: given.update(keywords))
    q, cu = small()
    sdpa.varlen_attn(q, q, q, cu, cu, 7, 7, scale=-1.0, enable_gqa=False)
    assert given == {"scale": -1.0}


def test_explain_says_how_rowmax_computes() -> None:
    q, cu = small()
    lengths = torch.tensor([2, 5], dtype=torch.int32)
    route = sdpa.explain_varlen(q, q, q, cu, cu, 7, 7, window_size=(4, 0), seqused_k=lengths)
    assert route.by == "rowmax"
    assert "prefix lengths, aligned to them" in str(route)
    with pytest.raises(TypeError):
        sdpa.explain_varlen(q, q, q, cu, cu, 7, 7, causal=True)


def test_compile() -> None:
    torch._dynamo.reset()
    q, cu = small()
    q.requires_grad_()

    def attend(q: Tensor) -> Tensor:
        return torch_varlen.varlen_attn(q, q, q, cu, cu, 7, 7, window_size=(-1, 0))

    with sdpa.enable():
        got = torch.compile(attend, backend="aot_eager", fullgraph=True)(q)
        want = attend(q)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), q) for x in (got, want)))
