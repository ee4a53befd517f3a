"""The documentation builds without a warning, holds every public name, and its links resolve."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

for library in ("sphinx", "myst_parser", "furo", "latex2mathml"):
    pytest.importorskip(library)

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "rowmax"
#: the modules whose ``__all__`` is public
PUBLIC = [
    PACKAGE / "__init__.py",
    PACKAGE / "distributed" / "__init__.py",
    PACKAGE / "testing" / "__init__.py",
    *sorted((PACKAGE / "integrations").glob("*/__init__.py")),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built pages."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html"]
    done = subprocess.run(
        [*command, "-d", str(out / "trees"), str(ROOT / "docs"), str(out / "html")],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    return out / "html"


def described(site: Path) -> set[str]:
    """Return the names of all objects that the pages describe."""
    text = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    entries = (line.split() for line in zlib.decompress(text).decode().splitlines())
    return {name for name, kind, *_ in entries if kind.startswith("py:") and kind != "py:module"}


def public(file: Path) -> list[str]:
    """Return the qualified names of a module's ``__all__``, without importing it."""
    module = ".".join(file.parent.relative_to(PACKAGE.parent).parts)
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [f"{module}.{name}" for name in ast.literal_eval(node.value)]
    raise AssertionError(f"{file} has no __all__")


@pytest.mark.parametrize("file", PUBLIC, ids=lambda file: file.parent.name)
def test_every_public_name_is_described(site: Path, file: Path):
    names = set(public(file))
    names.discard("rowmax.integrations.flash_attn.bert_padding")  # a module
    assert len(names) >= 4
    assert names - described(site) == set()


def test_the_functions_of_bert_padding_are_described(site: Path):
    text = (PACKAGE / "integrations/flash_attn/bert_padding.py").read_text(encoding="utf-8")
    names = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    module = "rowmax.integrations.flash_attn.bert_padding"
    found = {f"{module}.{name}" for name in names if not name.startswith("_")}
    assert found
    assert found <= described(site)


class Page(HTMLParser):
    """The anchors and the links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            if name in ("href", "src") and value:
                self.links.add(value)


def test_links_between_pages_resolve(site: Path):
    pages = {file: Page(file.read_text(encoding="utf-8")) for file in site.rglob("*.html")}
    wrong = []
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("//"):
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if not target.is_file():
                wrong.append(f"{file.name}: {link}")
                continue
            anchors = {""} | pages[target].anchors if target in pages else {parts.fragment}
            if unquote(parts.fragment) not in anchors:
                wrong.append(f"{file.name}: {link}")
    assert len(pages) > 20
    assert wrong == []


def test_files_of_the_repository_are_links_to_it(site: Path):
    page = Page((site / "integrations" / "pair_bias.html").read_text(encoding="utf-8"))
    assert "https://github.com/rowmax/rowmax/blob/main/examples/pairformer.py" in page.links


def test_an_included_file_has_its_own_links(site: Path):
    page = Page((site / "project" / "contributing.html").read_text(encoding="utf-8"))
    assert "releasing.html" in page.links
    assert "Add a score term" in (site / "project" / "contributing.html").read_text("utf-8")


def test_names_in_docstrings_are_links(site: Path):
    page = Page((site / "reference" / "attention.html").read_text(encoding="utf-8"))
    assert {"masks.html#rowmax.Window", "explain.html#rowmax.explain"} <= page.links
    assert "#rowmax.attention_varlen" in page.links


def test_a_signature_shows_the_keywords(site: Path):
    text = (site / "reference" / "attention.html").read_text(encoding="utf-8")
    assert "softcap" in text
    assert "CallOptions" not in text


def test_the_page_of_rowmax_trace_is_built_and_linked(site: Path):
    page = Page((site / "command_line.html").read_text(encoding="utf-8"))
    assert "_static/trace.html" in page.links
    text = (site / "_static" / "trace.html").read_text(encoding="utf-8")
    assert "<title>Attention, tile by tile</title>" in text
    assert '"masks":[{"name":"none"' in text


def test_formulas_are_mathml(site: Path):
    pages = sorted((site / "derivation").glob("[0-9]*.html"))
    assert len(pages) >= 5
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert text.count("<math ") > 20
        prose = re.sub(r"<(pre|code|script)\b.*?</\1>", "", text, flags=re.S)
        assert "$" not in prose


def test_no_page_loads_a_script_of_the_network(site: Path):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert re.findall(r"<script[^>]*src=\"(?:https?:)?//[^\"]*", text) == []


def test_pictures_have_a_light_and_a_dark_image(site: Path):
    text = (site / "derivation" / "01_memory.html").read_text(encoding="utf-8")
    for mode in ("light", "dark"):
        assert re.search(rf'class="only-{mode}" src="\.\./_images/roofline-{mode}\.svg"', text)
    assert "<picture>" not in text


# --- the extension ---------------------------------------------------------------------------


@pytest.fixture
def mathml(monkeypatch: pytest.MonkeyPatch):
    """Return the function that converts a formula."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    from mathml import mathml as convert

    monkeypatch.delitem(sys.modules, "mathml")
    return convert


def test_a_formula_is_converted(mathml):
    element = mathml(r"\begin{aligned} m &= -\infty \\ l &= \log z \end{aligned}", "block")
    assert element.startswith("<math ")
    assert 'display="block"' in element
    assert element.count("<mtr>") == 2
    assert "<mi>&#x0221E;</mi>" in element
    assert re.search(r'<mi>log</mi><mspace width="[^"]+" /><mi>z</mi>', element)


def test_the_name_of_an_operator_has_no_spaces(mathml):
    assert "<mo>" not in mathml(r"\operatorname{diag}")


@pytest.mark.parametrize("tex", [r"a \nosuch b", r"\begin{nosuch} a & b \end{nosuch}"])
def test_a_formula_that_cannot_be_converted_is_an_error(mathml, tex: str):
    with pytest.raises(ValueError, match="has no MathML"):
        mathml(tex)
