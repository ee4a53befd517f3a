"""The benchmark of transformers' models on the CPU: tiny models, no time asserted."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks.transformers_models import PARTS, main

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("part", PARTS)
def test_each_part_writes_its_rows(part: str, tmp_path: Path):
    only = {"equality": ("llama", "t5"), "generation": ("rowmax-unread", "sdpa")}
    only["training"] = ("rowmax", "sdpa", "flash_attention_2")
    options = ("--part", part, "--quick", "--out", str(tmp_path), "--device", "cpu")
    assert main([*options, "--only", *only[part]]) == 0
    with (tmp_path / f"transformers_{part}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    column = "model" if part == "equality" else "attention"
    assert {row[column] for row in rows} == set(only[part])
    for row in rows:
        assert row["transformers"]
        assert row["note"] or row.get("max_error") or float(row["tokens_per_second"]) > 0
