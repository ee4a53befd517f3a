"""Pages assert, their tables name real arguments, figures are in CSVs, the picture is current.

``tests/test_readme.py`` runs the blocks and follows the links.
"""

from __future__ import annotations

import csv
import inspect
import math
import re
import sys
from pathlib import Path

import pytest
import torch

import rowmax
from tests.test_readme import blocks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("coming_from.md", "recipes.md")]
PICTURES = ROOT / "docs" / "pictures"


@pytest.fixture(scope="module", params=PAGES, ids=lambda page: page.name)
def text(request: pytest.FixtureRequest) -> str:
    return request.param.read_text(encoding="utf-8")


def test_each_block_compares_something(text: str) -> None:
    """The first block makes the tensors of the others."""
    found = re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
    assert len(found) >= 7
    for code in found[1:]:
        assert "assert" in code, code


def test_the_arguments_of_the_tables_exist() -> None:
    """``bias=`` and ``mask=Window(...)`` in the last column are arguments and masks of rowmax."""
    rows = re.findall(r"^\|.*$", PAGES[0].read_text(encoding="utf-8"), flags=re.M)
    ours = "\n".join(row.rpartition(" | ")[2] for row in rows)
    used, masks = (re.findall(form, ours) for form in (r"`(\w+)=", r"mask=~?([A-Z]\w+)\("))
    assert len(used) > 20
    assert set(used) <= set(inspect.signature(rowmax.attention).parameters)
    assert len(masks) > 5
    assert set(masks) <= set(rowmax.__all__)


def test_every_library_of_the_page_has_a_section() -> None:
    page = PAGES[0].read_text(encoding="utf-8")
    for library in ("scaled_dot_product_attention", "nn.MultiheadAttention", "flash-attn",
                    "FlexAttention", "xformers", "cuEquivariance"):  # fmt: skip
        assert re.search(rf"^## .*{re.escape(library)}$", page, flags=re.M), library


def test_a_signature_in_a_table_is_that_of_the_installed_torch() -> None:
    """The arguments of torch that the page names."""
    from torch import nn
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    forward = inspect.signature(nn.MultiheadAttention.forward).parameters
    assert {"key_padding_mask", "attn_mask", "is_causal", "need_weights"} <= set(forward)
    flex = inspect.signature(flex_attention).parameters
    assert {"score_mod", "block_mask", "scale", "enable_gqa", "return_aux"} <= set(flex)
    assert "lse" in inspect.signature(AuxRequest).parameters


def test_the_picture_is_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script writes the committed files: it has the tiles of the masks as they are."""
    monkeypatch.syspath_prepend(PICTURES)
    import tiles

    monkeypatch.delitem(sys.modules, "tiles")
    tiles.main(tmp_path)
    written = sorted(tmp_path.iterdir())
    assert [file.name for file in written] == ["tiles-dark.svg", "tiles-light.svg"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for file in written:
        assert file.read_text() == (PICTURES / file.name).read_text()
        assert f'"docs/pictures/{file.name}"' in readme


def test_the_picture_of_layouts_is_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tiles have one owner each, and a rank computes those of its rows."""
    monkeypatch.syspath_prepend(PICTURES)
    import layouts
    import tiles

    for module in (layouts, tiles):
        monkeypatch.delitem(sys.modules, module.__name__)
    layouts.main(tmp_path)
    written = sorted(tmp_path.iterdir())
    assert [file.name for file in written] == ["layouts-dark.svg", "layouts-light.svg"]
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    for file in written:
        assert file.read_text() == (PICTURES / file.name).read_text()
        assert f'"pictures/{file.name}"' in page
    assert [layouts.owners(panel.layout) for panel in layouts.PANELS[:2]] == [
        [0, 0, 1, 1, 2, 2, 3, 3],
        [0, 1, 2, 3, 3, 2, 1, 0],
    ]


def test_the_tiles_of_the_picture_are_those_of_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tiles are skipped, partial and full as in a call of eight tiles a side."""
    monkeypatch.syspath_prepend(PICTURES)
    import tiles

    monkeypatch.delitem(sys.modules, "tiles")
    shares = torch.tensor(tiles.seen_share(rowmax.Causal())).flatten()
    q = torch.empty(1, 8 * 128, 1, 16)
    want = rowmax.explain(q, q, q, causal=True).tiles
    found = [int(((shares > 0) & (shares < 1)).sum()), int((shares == 1).sum())]
    assert [int((shares == 0).sum()), *found] == list(want[:3])


@pytest.mark.parametrize("code", blocks("python"))
def test_the_example_of_the_readme_is_ten_lines(code: str) -> None:
    lines = [line for line in code.splitlines() if line and not line.startswith(("import", "#"))]
    assert len(lines) <= 10


# --- the figures of README ---------------------------------------------------------------------

README = (ROOT / "README.md").read_text(encoding="utf-8")


def results(name: str) -> list[dict[str, str]]:
    with (ROOT / "benchmarks/results" / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def row_of(first: str) -> list[str]:
    """Return the cells of the table row that begins with this cell, without it."""
    row = re.findall(rf"^\| {re.escape(first)} \| (.*) \|$", README, flags=re.M)[0]
    return row.split(" | ")


Figures = dict[tuple[str, str], str]  # TFLOP/s by (cell, provider)


def speeds(name: str, what: str, date: str = "") -> Figures:
    """Return the figures of rowmax and its peers of a pass, those of a date if one is given."""
    return {
        (row["cell"], row["provider"]): row["tflops"]
        for row in results(name)
        if row["pass"] == what and not row["version"] and date in row["date"]
    }


def mean_and_least(tflops: Figures) -> tuple[float, float]:
    """Return the geometric mean of rowmax over the better peer in the 36 cells, and the least."""
    cells = sorted({cell for cell, _ in tflops})
    shares = [
        float(tflops[cell, "rowmax"]) / max(float(tflops[cell, by]) for by in ("fa4", "cudnn"))
        for cell in cells
        if re.fullmatch(r"D(64|128|256) N\d+ (full|causal)", cell)
    ]
    assert len(shares) == 36
    return math.exp(sum(map(math.log, shares)) / 36), min(shares)


@pytest.mark.parametrize("what", ["forward", "backward"])
def test_figures_of_the_gpu_are_those_of_the_results(what: str) -> None:
    text = README.replace("\n", " ")
    (date,) = re.findall(r"in the same run, on H200s on ([\d-]+);", text)
    tflops = speeds(f"hopper_peers_{what}.csv", what, date)
    for d in (64, 128, 256):
        cells = (f"D{d} N16384 {kind}" for kind in ("full", "causal"))
        want = [tflops[cell, by] for cell in cells for by in ("rowmax", "fa4", "cudnn")]
        assert row_of(f"{what}, D {d}") == want
    mean, least = mean_and_least(tflops)
    assert re.search(rf"at {mean:.2f} (of the better|\().*?least {least:.3f}", text)
    mean, least = mean_and_least(speeds("hopper_peers.csv", what))
    assert re.search(rf"On an H100 .*?{mean:.2f} \(least {least:.3f}\)", text)


def test_figures_of_few_kv_heads_are_those_of_the_results() -> None:
    tflops = speeds("group_shares.csv", "backward")
    text = " ".join(README.split())
    for cell, words in (
        ("D128 N16384 causal, H32, kv heads 4", "32 heads on 4, N 16384,"),
        ("D128 N2048 causal, H8, kv heads 1", "8 heads on 1, one sequence of 2048,"),
    ):
        ours, *peers = (round(float(tflops[cell, by])) for by in ("rowmax", "fa4", "cudnn"))
        assert f"{words} {ours} ({', '.join(map(str, peers))})" in text


@pytest.mark.parametrize("d", [64, 128])
def test_figures_of_the_cpu_are_those_of_the_results(d: int) -> None:
    ratios = {
        (row["case"], row["n"]): row["ratio"]
        for row in results("cpu.csv")
        if (row["dtype"], row["direction"]) == ("float32", "forward + backward")
        and row["d"] == str(d)
    }
    found = row_of(f"forward + backward, D {d}")
    assert found == [ratios["dense", n] for n in ("512", "2048", "8192")]
    assert (
        f"| {' | '.join(found)} |\n| the same, causal | "
        + " | ".join(ratios["causal", n] for n in ("512", "2048", "8192"))
        in README
    )


def test_memory_is_that_of_the_results() -> None:
    plain, bias = (row for row in results("cpu.csv") if row["rowmax_mib"])
    text = " ".join(README.split())
    assert f"{plain['rowmax_mib']} MiB for N 8192 causal" in text
    assert f"float32; PyTorch {plain['torch_mib']})" in text
    assert f"it is {bias['rowmax_mib']} MiB" in text
    assert f"is 512 (PyTorch {bias['torch_mib']})" in text
    assert f"8192 tokens in 8 heads add {plain['rowmax_mib']} MiB" in text
