"""The pages of ``docs`` are right: their examples run, their links lead somewhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests import forks

from .blocks import differences, program_of

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
WITH_CODE = [page for page in PAGES if "```python" in TEXTS[page]]


def run(page: Path) -> subprocess.CompletedProcess[str]:
    """Run the program of a page. A traceback shows the lines of the page."""
    program = program_of(page.read_text(encoding="utf-8"))
    for text in program.skipped:
        print(f"left out: {text}")
    return forks.run(program.code, file=str(page), strict=True, preload=("torch", "numba"))


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_the_examples_of_a_page_run(page: Path):
    done = run(page)
    assert done.returncode == 0, done.stderr
    assert differences(program_of(TEXTS[page]), done.stdout) == []


def test_pages_have_examples():
    assert len(WITH_CODE) >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_links_of_a_page_lead_somewhere(page: Path):
    prose = re.sub(r"^```.*?^```", "", TEXTS[page], flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", prose):
        assert (page.parent / target).exists(), target


# --- the program of a page ---------------------------------------------------------------------

PAGE = """\
# A page

```python
x = 1
```

<!-- needs: cuda, no_such_module -->
```python
x = 2
```

```
x = 3
```

```python
assert x == 1
raise RuntimeError("here")
```
"""


def test_a_block_that_lacks_a_module_is_left_out():
    program = program_of(PAGE)
    assert program.ran == 2
    (skipped,) = program.skipped
    assert skipped.startswith("line 8: needs ")
    assert skipped.endswith("no_such_module")


def test_a_block_whose_needs_are_installed_runs():
    program = program_of(PAGE.replace("cuda, no_such_module", "torch"))
    assert (program.ran, program.skipped) == (3, ())


def test_a_block_is_left_out_for_a_reason():
    program = program_of(PAGE.replace("needs: cuda, no_such_module", "not run: takes an hour"))
    assert program.skipped == ("line 8: takes an hour",)


@pytest.mark.parametrize(
    "marker", ["<!-- needs -->", "<!-- needs: torch -->\n", "<!-- not run -->"]
)
def test_a_marker_in_another_form_is_an_error(marker: str):
    with pytest.raises(ValueError, match="line 7"):
        program_of(PAGE.replace("<!-- needs: cuda, no_such_module -->", marker))


def test_a_page_compiles_its_functions(tmp_path: Path):
    page = tmp_path / "page.md"
    code = "import torch\n\n@torch.compile(backend='eager')\ndef f(x):\n    return torch.sin(x)\n"
    page.write_text(f"```python\n{code}f(torch.ones(3))\n```\n", encoding="utf-8")
    done = run(page)
    assert done.returncode == 0, done.stderr


def test_a_traceback_has_the_line_of_the_page(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    done = run(page)
    assert done.returncode == 1
    assert f'File "{page}", line 18, in <module>' in done.stderr


# --- the output below a block ------------------------------------------------------------------

PRINTED = """\
```python
print("a", 1.5)
```

```text
a 1.5
```

```python
print("took 12 ms")
```

Prose.

```python
for x in "xy":
    print(x)
print("3.1 GB/s")
```
<!-- numbers vary -->
```text
x
y
7e+3 GB/s
```

More prose.

```text
not an output
```
"""


def changed(tmp_path: Path, old: str, new: str) -> list[str]:
    """Return the differences of the page with another text."""
    page = tmp_path / "page.md"
    assert old in PRINTED
    page.write_text(PRINTED.replace(old, new), encoding="utf-8")
    done = run(page)
    assert done.returncode == 0, done.stderr
    return differences(program_of(page.read_text(encoding="utf-8")), done.stdout)


def test_a_text_below_a_block_is_its_output(tmp_path: Path):
    program = program_of(PRINTED)
    assert {end: output.line for end, output in program.outputs.items()} == {3: 5, 19: 21}
    assert changed(tmp_path, "a 1.5\n", "a 1.5\n") == []


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("a 1.5\n", "a 1.6\n", 5),
        ("a 1.5\n", "a 1.5\nb\n", 5),
        ("x\ny\n7e+3 GB/s", "x\n7e+3 GB/s", 21),
        ("7e+3 GB/s", "7e+3 MB/s", 21),
    ],
)
def test_another_output_is_reported(tmp_path: Path, old: str, new: str, line: int):
    (difference,) = changed(tmp_path, old, new)
    assert difference.startswith(f"line {line}: the page has\n")


def test_an_output_of_a_block_that_does_not_run_is_none():
    page = PRINTED.replace('```python\nprint("a', '<!-- not run: a reason -->\n```python\nprint("a')
    assert [output.line for output in program_of(page).outputs.values()] == [22]


def test_an_output_that_was_not_reached_is_reported():
    assert differences(program_of(PRINTED), "a 1.5\n\x00end 3\n") == [
        "line 21: the block above has not run"
    ]


@pytest.mark.parametrize("marker", ["<!-- numbers differ -->", "<!-- numbers vary -->\n\nText."])
def test_a_marker_of_numbers_in_another_form_is_an_error(marker: str):
    with pytest.raises(ValueError, match="line 20"):
        program_of(PRINTED.replace("<!-- numbers vary -->", marker))
