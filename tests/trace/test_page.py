"""The page is one file with every number, within its bounds."""

from __future__ import annotations

import json
import re

import pytest

from rowmax.trace import MASKS, Setting, page
from rowmax.trace.page import DIGITS, MOST_BYTES, numbers
from rowmax.trace.record import defined
from rowmax.trace.setting import calls

from .settings import SETTINGS


def recording_of(text: str) -> dict:
    found = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


@pytest.mark.parametrize("name", SETTINGS)
def test_the_page_holds_every_mask_and_pass(name: str):
    setting = SETTINGS[name]
    found = recording_of(page(setting, "window"))
    assert found["first"] == "window"
    assert [one["name"] for one in found["masks"]] == list(MASKS)
    for one, call in zip(found["masks"], calls(setting), strict=True):
        assert list(one["passes"]) == ["forward", "dq", "dkdv"]
        ends = [step for step in one["passes"]["forward"]["steps"] if step["kind"] == "end"]
        out = [row for step in ends for row in step["out"]]
        assert out == one["dense"]["out"] == numbers(defined(call).out)


def test_the_page_needs_no_other_file():
    text = page(Setting())
    assert "{{" not in text
    assert text.count("</script>") == 2
    assert not re.search(r"https?://|\bsrc=|<link|@import|fetch\(|import\(|url\((?!#)", text)
    assert len(text.encode()) < MOST_BYTES / 4


def test_the_same_seed_makes_the_same_page():
    setting = Setting(queries=8)
    assert page(setting) == page(setting)
    assert page(setting) != page(Setting(queries=8, seed=1))


def test_a_page_that_is_too_large_is_refused():
    with pytest.raises(ValueError, match=r"page: got \d\.\d MB; want at most 2 MB: fewer queries"):
        page(Setting(queries=64, head_dim=16, block_q=8, block_k=8))


def test_numbers_are_rounded_to_the_printed_digits():
    x = defined(next(calls(Setting()))).out
    flat = [n for row in numbers(x) for n in row]
    assert flat == [round(n, DIGITS) for n in x.flatten().tolist()]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"queries": 0}, "queries: got 0; want 1 to 64"),
        ({"keys": 65}, "keys: got 65; want 1 to 64"),
        ({"head_dim": 17}, "head_dim: got 17; want 1 to 16"),
        ({"block_q": 0}, "block_q: got 0; want 1 to 64"),
        ({"block_k": 65}, "block_k: got 65; want 1 to 64"),
        ({"block_q": 1, "block_k": 1}, "block_q, block_k: got 1 by 1, which makes 576 tiles"),
        ({"documents": 0}, "documents: got 0; want 1 to 64"),
        ({"prefix": 25}, "prefix: got 25; want 0 to 24"),
        ({"softcap": -1.0}, "softcap: got -1.0; want 0 (none) or a positive number"),
        ({"softcap": float("nan")}, "softcap: got nan"),
        ({"seed": 2**63}, "seed: got 9223372036854775808; want an integer of 64 bits"),
    ],
)
def test_bounds_are_named(options: dict, wanted: str):
    with pytest.raises(ValueError, match=re.escape(wanted)):
        Setting(**options)


def test_a_mask_that_it_does_not_know_is_named():
    with pytest.raises(ValueError, match="mask: got 'sparse'; want one of none, causal, window"):
        page(Setting(), "sparse")
