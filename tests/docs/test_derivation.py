"""The book: its exercises can be solved and failed, and its symbols are listed before their use."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import forks

from .fill import filled
from .symbols import listed, missing, mistakes

ROOT = Path(__file__).parents[2]
BOOK = ROOT / "docs" / "derivation"
PICTURES = ROOT / "docs" / "pictures"
EXERCISES, SOLUTIONS = BOOK / "exercises", BOOK / "solutions"
CHAPTERS = {int(page.name[:2]): page for page in sorted(BOOK.glob("[0-9][0-9]_*.md"))}
SYMBOLS = listed((BOOK / "index.md").read_text(encoding="utf-8"))

#: a mistake in each function of the solutions, which the checks must find: (right, wrong)
MISTAKES = {
    1: [
        ("total = n * n + n + n", "total = n * n + n"),
        ("math.ceil(n / rows)", "n // rows"),
        (">= ridge", "> 2 * ridge"),
    ],
    2: [
        ("l = math.exp(m - base) * l", "l = l"),
        ("delta * total + weight * row", "total + weight * row"),
        ("rest * math.exp(m - m_before)", "rest * math.exp(m_before - m)"),
    ],
    3: [
        ("return m, math.exp(a[0] - base) * a[1]", "return m, a[1]"),
        ("y[:, :j] *= delta * z / divisor", "y[:, :j] *= delta"),
        ("return share_a[:, None] * o_a + share_b[:, None] * o_b", "return (o_a + o_b) / 2"),
    ],
    4: [
        ("+= left @ right", "= left @ right"),
        ("total = delta * total + P", "total = total / delta + P"),
        ("3 * n * d + 4 * n", "2 * n * d + 4 * n"),
    ],
    5: [
        ("dp - (p * dp).sum(1, keepdim=True)", "dp"),
        ("(dout * out).sum(1) - dlse", "(dout * out).sum(1)"),
        ("dq[i : i + rows] += call.scale * dS", "dq[i : i + rows] += dS"),
    ],
    6: [
        ("max(i1 + offset + right, prefix - 1)", "i1 + offset + right"),
        ("torch.exp(lse - base)[:, None] * out", "out"),
        ("(column, i, 0, 0)", "(column, 0, 0, 0)"),
    ],
    7: [
        ("return p * (tx - tlse), tlse", "return p * tx, tlse"),
        ("tl=state.tl + (state.mu - mu) * state.l", "tl=state.tl"),
        ("(tS - tlse) * dtS - P", "tS * dtS - P"),
    ],
    8: [
        ("torch.exp2((products - peak) * factor)", "torch.exp2(products * factor - peak * factor)"),
        ("torch.exp(near - rest)", "torch.exp(near)"),
        ("if peak > m + 8:", "if peak > m:"),
    ],
    9: [
        ("x + i * x_row + j * x_col", "x + i * cols + j"),
        ("l = l * tl.exp(m - base) +", "l = l +"),
        ("tl.maximum(i0 + offset - limits[0], 0) // BLOCK_K * BLOCK_K", "0"),
    ],
    10: [
        ("(turn + 1) % 2", "turn % 2"),
        ("max(softmax, output)", "softmax"),
        ("stages * 2 * cols * d", "stages * cols * d"),
    ],
    11: [
        ("chunks[2 * devices - 1 - d]", "chunks[d + devices]"),
        ("torch.logaddexp(total, sink)", "torch.logaddexp(total, sink + math.log(len(parts)))"),
        ("max(forward, backward)", "min(forward, backward)"),
    ],
}


def outcomes(answers: Path) -> dict[str, set[str]]:
    """Return the outcomes of each check, "passed" or an error, of these answers."""
    options = ("-p", "no:cacheprovider", "-rA", "--tb=line", "-q")
    program = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    done = forks.run(program, *options, str(EXERCISES), "--answers", str(answers))
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, set[str]] = {}
    lines = re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) \S+::(\w+)\S*", done.stdout, re.M)
    for outcome, name in lines:
        found.setdefault(name, set()).add(outcome)
    return found


def checks() -> set[str]:
    """Return the names of all checks."""
    files = [EXERCISES / f"test_chapter{n}.py" for n in CHAPTERS if can_be_checked(n)]
    texts = (file.read_text(encoding="utf-8") for file in files)
    return {name for text in texts for name in re.findall(r"^def (test_\w+)", text, re.M)}


def can_be_checked(chapter: int) -> bool:
    """Return False for the chapter whose checks need Triton, where it is not installed."""
    return chapter != 9 or find_spec("triton") is not None


def test_the_solutions_pass():
    assert outcomes(SOLUTIONS) == {name: {"PASSED"} for name in checks()}


def test_the_skeletons_fail():
    assert outcomes(EXERCISES) == {name: {"FAILED"} for name in checks()}


def test_a_mistake_in_any_function_fails(tmp_path: Path):
    functions = set()
    for chapter, changes in MISTAKES.items():
        text = (SOLUTIONS / f"chapter{chapter}.py").read_text(encoding="utf-8")
        if can_be_checked(chapter):
            functions |= {f"test_{name}" for name in re.findall(r"^def (\w+)", text, re.M)}
        for right, wrong in changes:
            assert text.count(right) == 1, right
            text = text.replace(right, wrong)
        (tmp_path / f"chapter{chapter}.py").write_text(text, encoding="utf-8")
    found = outcomes(tmp_path)
    assert {name for name in functions if "FAILED" not in found[name]} == set()


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_has_exercises(chapter: int):
    exercise, solution = (folder / f"chapter{chapter}.py" for folder in (EXERCISES, SOLUTIONS))
    heads = [
        re.findall(r'^def .*?(?:"""\n|.""")', file.read_text(encoding="utf-8"), re.M | re.S)
        for file in (exercise, solution)
    ]
    assert heads[0] == heads[1]  # signatures and docstrings
    assert exercise.read_text(encoding="utf-8").count("raise NotImplementedError") == len(heads[0])
    assert chapter in MISTAKES
    page = CHAPTERS[chapter].read_text(encoding="utf-8")
    for head in heads[0]:
        assert f"`{head[4 : head.index('(')]}`" in page
    assert f"exercises/chapter{chapter}.py" in page
    assert f"test_chapter{chapter}.py" in page


# --- symbols -----------------------------------------------------------------------------------


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_symbols_of_a_chapter_are_listed(chapter: int):
    page = CHAPTERS[chapter].read_text(encoding="utf-8")
    assert mistakes(page, chapter, SYMBOLS) == []
    assert missing(page, chapter, SYMBOLS) == []


def test_the_list_of_symbols_names_chapters_that_exist():
    assert len(SYMBOLS) > 50
    assert set(SYMBOLS.values()) <= set(CHAPTERS)
    assert mistakes((BOOK / "index.md").read_text(encoding="utf-8"), max(CHAPTERS), SYMBOLS) == []


LIST = """\
| symbol | shape | meaning | chapter |
|---|---|---|---|
| $N$, $B_r$ | number | one, two | [1](01_one.md) |
| $\\tilde{O}$ | $N$ | three | [2](02_two.md) |
| $dQ$, $\\mathrm{LSE}$, $\\odot$ | $N$ | four | [2](02_two.md) |
"""


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ("$N$ and $B_r$ cost `$x$`, $5.", []),
        ("$N$\n\n$$\n\\frac{\\tilde{O}}{N}\n$$\n", ["line 4: \\tilde{O} is defined in chapter 2"]),
        ("$O$", ["line 1: O is not in the list of symbols"]),
        ("$B_c$", [f"line 1: {s} is not in the list of symbols" for s in "Bc"]),
        ("$N_k$", ["line 1: k is not in the list of symbols"]),
        ("$\\mathrm{LSE}_r$", ["line 1: \\mathrm{LSE} is defined in chapter 2",
                               "line 1: r is not in the list of symbols"]),
        ("$\\operatorname{d}(N)$", ["line 1: \\operatorname{d} is not in the list of symbols"]),
        ("$dQ$", ["line 1: dQ is defined in chapter 2"]),
        ("$N \\odot N \\text{ is } N$", ["line 1: \\odot is defined in chapter 2"]),
        ("```python\nx = '$y$'\n```\n$\\Delta$", ["line 4: \\Delta is not in the list of symbols"]),
    ],
)  # fmt: skip
def test_symbols_that_are_not_defined_are_found(page: str, found: list[str]):
    assert mistakes(page, 1, listed(LIST)) == found


def test_a_symbol_that_its_chapter_does_not_use_is_found():
    assert missing("$N$", 1, listed(LIST)) == ["B_r"]


def test_a_symbol_is_listed_once():
    with pytest.raises(ValueError, match="N is listed twice"):
        listed(LIST + "| $N$ | number | again | [2](02_two.md) |\n")


# --- outputs -----------------------------------------------------------------------------------


def test_outputs_are_written_into_a_page(tmp_path: Path):
    page = tmp_path / "page.md"
    before = "```python\nprint('a')\nprint(1)\n```\n```text\nold\n```\n\n```python\nprint(2)\n```\n"
    page.write_text(before + "\n```text\n```\nEnd.\n", encoding="utf-8")
    assert filled(page) == before.replace("old", "a\n1") + "\n```text\n2\n```\nEnd.\n"


# --- pictures ----------------------------------------------------------------------------------


def test_the_pictures_are_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(PICTURES)
    import derivation
    import schedules
    import tiles

    for module in (derivation, schedules, tiles):
        monkeypatch.delitem(sys.modules, module.__name__)
    derivation.main(tmp_path)
    schedules.main(tmp_path)
    written = sorted(tmp_path.iterdir())
    assert len(written) == 4 + 2 * len(schedules.PICTURES)
    pages = "".join(page.read_text(encoding="utf-8") for page in CHAPTERS.values())
    for file in written:
        assert file.read_text() == (PICTURES / file.name).read_text()
        assert f'"../pictures/{file.name}"' in pages


def test_the_picture_of_a_step_has_every_call(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(PICTURES)
    import schedules

    for name in ("derivation", "schedules", "tiles"):
        monkeypatch.delitem(sys.modules, name)
    order = schedules.order_of_step(schedules.KERNEL.read_text(encoding="utf-8"))
    assert sorted(order) == sorted(schedules.CALLS)
    # the words of chapter 10: its numbers are places in this order
    assert order.index("issue_output") < order.index("wait_scores")
    between = order[order.index("ring.release(shared.k)") : order.index("wait_output")]
    assert between == ["ring.release(shared.k)", "softmax_step", "ring.wait_full(shared.k)"]
    assert order[-2:] == ["ring.release(shared.v)", "scaled_rows"]


def test_the_measured_rates_are_those_of_the_results(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(PICTURES)
    import derivation

    for name in ("derivation", "tiles"):
        monkeypatch.delitem(sys.modules, name)
    results = (ROOT / "benchmarks/results/hopper_forward.csv").read_text(encoding="utf-8")
    for d, tflops in derivation.MEASURED.items():
        assert f"D{d} N16384 full,rowmax,{tflops}," in results
    assert derivation.MEASURED == {64: 534, 128: 684, 256: 798}  # the words of chapter 1
    page = CHAPTERS[1].read_text(encoding="utf-8")
    assert "534, 684 and 798 TFLOP/s" in page
