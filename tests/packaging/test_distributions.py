"""The wheel and the sdist: contents, metadata, and a wheel that works alone in an environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

for library in ("build", "hatchling", "hatch_fancy_pypi_readme"):
    pytest.importorskip(library)

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "rowmax"
HOME = "https://github.com/rowmax/rowmax"
EXTRAS = {"bench", "cli", "cpu", "dev", "docs", "hf"}


class Built(NamedTuple):
    """The files of a build, and what they say."""

    wheel: Path
    sdist: Path
    metadata: Message
    readme: str


def run(
    *command: str | Path, code: int = 0, **settings: object
) -> subprocess.CompletedProcess[str]:
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        **{"env": {**environment, "OMP_NUM_THREADS": "1"}, "timeout": 120, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build the sdist, and the wheel from the sdist, without a network."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    return Built(wheel, sdist, metadata, str(metadata.get_payload()))


# --- contents ----------------------------------------------------------------------------------


def test_the_wheel_holds_the_package_alone(built: Built):
    with zipfile.ZipFile(built.wheel) as archive:
        names = set(archive.namelist())
    wanted = {str(f.relative_to(PACKAGE.parent)) for f in PACKAGE.rglob("*.py")}
    found = {name for name in names if ".dist-info/" not in name}
    page = {f"rowmax/trace/page.{kind}" for kind in ("html", "css", "js")}
    assert found == wanted | page | {"rowmax/py.typed"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert built.wheel.name.endswith("-py3-none-any.whl")


def test_the_sdist_holds_sources_tests_and_pages(built: Built):
    with tarfile.open(built.sdist) as archive:
        files = [m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()]
    top = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "Makefile", "README.md", "pyproject.toml"}
    wanted = top | {"src/rowmax/py.typed", "tests/conftest.py", "docs/conf.py", "docs/index.md"}
    assert wanted <= set(files)
    wrong = r"__pycache__|\.py[co]$|\.nb[ci]$|^benchmarks/results/|^\.venv/|^build/|^dist/"
    assert [name for name in files if re.search(wrong, name)] == []
    assert built.sdist.stat().st_size < 2_000_000


# --- metadata ----------------------------------------------------------------------------------


def test_the_version_stands_once():
    import rowmax

    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {rowmax.__version__}\n" in citation
    assert 'dynamic = ["readme", "version"]' in (ROOT / "pyproject.toml").read_text("utf-8")


def test_the_metadata(built: Built):
    import rowmax

    data = built.metadata
    assert (data["Name"], data["Version"]) == ("rowmax", rowmax.__version__)
    assert data["License-Expression"] == "MIT"
    assert data["Author"] == "The rowmax authors"
    assert data["Requires-Python"] == ">=3.10"
    classifiers = data.get_all("Classifier", [])
    assert "Typing :: Typed" in classifiers
    assert "Programming Language :: Python :: 3.10" in classifiers
    urls = dict(url.split(", ") for url in data.get_all("Project-URL", []))
    assert set(urls) == {"Homepage", "Documentation", "Changelog", "Issues", "Source"}
    assert all(url.startswith(HOME) for url in urls.values())
    assert set(data.get_all("Provides-Extra", [])) == EXTRAS


def test_the_package_alone_requires_torch_and_triton(built: Built):
    required = built.metadata.get_all("Requires-Dist", [])
    names = {re.split(r"[^\w-]", r)[0] for r in required if "extra ==" not in r}
    assert names == {"torch", "triton"}


def test_messages_name_extras_that_exist():
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    named = re.findall(r"pip install \"(?:rowmax|\.)\[([\w,]+)\]", text)
    assert len(named) >= 3
    assert {extra for names in named for extra in names.split(",")} <= EXTRAS


def test_links_of_the_readme_are_absolute(built: Built):
    text = re.sub(r"^```.*?^```", "", built.readme, flags=re.M | re.S)
    targets = re.findall(r"\]\(([^)\s]+)", text) + re.findall(
        r"(?:src|srcset|href)=\"([^\"]+)", text
    )
    assert len(targets) > 20
    assert [t for t in targets if not t.startswith(("https://", "#"))] == []


def test_links_of_the_readme_lead_to_files(built: Built):
    version = built.metadata["Version"]
    raw = "https://raw.githubusercontent.com/rowmax/rowmax"
    found = re.findall(rf"(?:{raw}|{HOME}/blob)/v{re.escape(version)}/([^)#\"\s]+)", built.readme)
    assert "docs/positions.md" in found
    assert [path for path in found if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("[a](docs/a.md#b)", "blob/v1.0/docs/a.md#b"),
        ("![a](docs/a.svg)", "raw/v1.0/docs/a.svg"),
        ('<img alt="a" src="docs/a.svg">', "raw/v1.0/docs/a.svg"),
        ('<source media="(x)" srcset="docs/a.svg">', "raw/v1.0/docs/a.svg"),
        ('<a href="docs/a.md">a</a>', "blob/v1.0/docs/a.md"),
        ("[![a](b.svg)](c.md)", "raw/v1.0/b.svg"),
        ("[![a](b.svg)](c.md)", "blob/v1.0/c.md"),
    ],
)
def test_forms_of_links(text: str, target: str):
    assert target in _substituted(text)


@pytest.mark.parametrize("text", ["[a](#b)", "[a](https://b.c/d)", "![a](https://b.c/d)"])
def test_links_that_stay(text: str):
    assert _substituted(text) == text


def _substituted(text: str) -> str:
    """Return a text as the build changes it, with short names of the repository's addresses."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    hook = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    for one in hook["substitutions"]:
        text = re.sub(one["pattern"], one["replacement"].replace("$HFPR_VERSION", "1.0"), text)
    return text.replace(f"{HOME}/blob", "blob").replace(
        "https://raw.githubusercontent.com/rowmax/rowmax", "raw"
    )


# --- the wheel in an environment of its own ----------------------------------------------------

#: modules that a plain installation lacks
_PLAIN = "import sys; sys.modules.update(dict.fromkeys(['numba', 'typer', 'rich', 'transformers']))"


@pytest.fixture(scope="module")
def site(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment that holds the wheel, and torch by a path."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--no-index", "--no-deps", "--quiet", built.wheel, cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "torch.pth").write_text(str(Path(torch.__file__).parents[1]), encoding="utf-8")
    return folder


def test_a_call_of_the_installed_wheel(site: Path):
    code = f"""{_PLAIN}
import torch, rowmax
q = torch.randn(1, 64, 2, 16, requires_grad=True)
rowmax.attention(q, q, q, causal=True).sum().backward()
assert q.grad.isfinite().all()
print(rowmax.__file__, *rowmax.explain(q, q, q).forward.others.items(), sep='\\n')
"""
    done = run(site / "bin" / "python", "-W", "error", "-c", code, cwd=site)
    file, *others = done.stdout.splitlines()
    assert file.startswith(str(site))
    install = """pip install "rowmax[cpu]", in a checkout ".[cpu]\""""
    assert str(("cpu", f"numba is not installed: {install}")) in others


@pytest.mark.parametrize("command", [("bin/rowmax",), ("bin/python", "-m", "rowmax")])
def test_the_command_line_of_the_installed_wheel(site: Path, command: tuple[str, ...]):
    pytest.importorskip("typer")
    program = [site / command[0], *command[1:]]
    shown = run(*program, "explain", "-n", "256", "--causal", "--device", "cpu", cwd=site).stdout
    assert "causal" in shown


def test_the_page_of_the_installed_wheel(site: Path):
    code = f"{_PLAIN}\nfrom rowmax.trace import Setting, page; print(page(Setting(queries=8)))"
    done = run(site / "bin" / "python", "-W", "error", "-c", code, cwd=site)
    assert done.stdout.startswith("<!doctype html>")
    assert "{{" not in done.stdout


def test_the_command_line_without_its_extra(site: Path):
    code = f"{_PLAIN}\nimport runpy; runpy.run_module('rowmax', run_name='__main__')"
    done = run(site / "bin" / "python", "-c", code, cwd=site, code=2)
    assert 'pip install "rowmax[cli]"' in done.stderr


def test_a_type_checker_reads_the_installed_wheel(site: Path):
    pytest.importorskip("pyright")
    (site / "user.py").write_text(
        "import rowmax, torch\n"
        "q = torch.randn(1, 8, 2, 16)\n"
        "reveal_type(rowmax.attention(q, q, q, mask=rowmax.Causal()))\n"
        "rowmax.attention(q, q, q, causal='yes')\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", site / "bin/python"]
    report = json.loads(run(*command, "user.py", cwd=site, code=1).stdout)
    found = [(d["severity"], d["range"]["start"]["line"]) for d in report["generalDiagnostics"]]
    assert found == [("information", 2), ("error", 3)]
    assert '"Tensor"' in report["generalDiagnostics"][0]["message"]
