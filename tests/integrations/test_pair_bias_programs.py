"""The example and the benchmark of attention with a pair bias: tiny runs, no time asserted."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import pair_bias
from examples import pairformer

pytestmark = pytest.mark.usefixtures("one_thread")


def eager(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    s = q @ k.mT * q.shape[-1] ** -0.5 + bias
    return s.masked_fill(~mask, -torch.inf).softmax(-1) @ v


def test_pairformer_learns() -> None:
    losses = pairformer.train(90)
    assert sum(losses[-20:]) / 20 < 0.75


def test_pairformer_learns_as_with_dense_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    got = pairformer.train(4, b=2)
    kept = pairformer.PairformerBlock

    def dense(cs: int, c: int, heads: int) -> pairformer.PairformerBlock:
        return kept(cs, c, heads, attend=eager)

    monkeypatch.setattr(pairformer, "PairformerBlock", dense)
    assert got == pytest.approx(pairformer.train(4, b=2), rel=1e-3)


@pytest.mark.filterwarnings("ignore")  # from torch, on kernels that it does not choose
def test_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    given = ["--quick", "--device", "cpu", "--out", str(path), "--sizes", "16", "--turns", "1"]
    assert pair_bias.main(given) == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    attention = [row for row in rows if row["what"] == "attention"]
    assert {"rowmax", "rowmax-lengths", "sdpa"} <= {row["provider"] for row in attention}
    assert len({(row["bias"], row["mask"], row["pass"]) for row in attention}) == 4
    assert not any(row["error"] for row in rows)
    assert all(float(row["ms"]) > 0 for row in rows)
    assert all(float(row["difference"]) < 1e-5 for row in attention)
    block = {row["provider"]: row for row in rows if row["what"].startswith("block")}
    assert float(block["none"]["attention_share"]) == 0
    assert float(block["rowmax"]["ms_48"]) == pytest.approx(48 * float(block["rowmax"]["ms"]))
    assert "rowmax" in capsys.readouterr().out
