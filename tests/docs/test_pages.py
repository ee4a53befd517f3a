"""The pages of ``docs`` are right: their examples run, their links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .blocks import program_of

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
WITH_CODE = [page for page in PAGES if "```python" in TEXTS[page]]

#: runs the program of standard input in ``__main__``, where a compiler looks for names; a traceback
#: shows the lines of the page
_SYS = "__import__('sys')"
_RUN = f"exec(compile({_SYS}.stdin.read(), {_SYS}.argv[1], 'exec'))"


def run(page: Path) -> subprocess.CompletedProcess[str]:
    program = program_of(page.read_text(encoding="utf-8"))
    for text in program.skipped:
        print(f"left out: {text}")
    # torch's own: forward mode imports scripted functions
    own = "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
    command = [sys.executable, "-W", "error", "-W", own, "-c", _RUN, str(page)]
    return subprocess.run(
        command, input=program.code, capture_output=True, text=True, check=False, timeout=240
    )


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_the_examples_of_a_page_run(page: Path):
    done = run(page)
    assert done.returncode == 0, done.stderr


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
