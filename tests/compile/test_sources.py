"""Sources of kernels as they are read and hashed, compared with Triton's own ways."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pkgutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

if find_spec("triton") is None or sys.platform != "linux":
    pytest.skip("compiling for a GPU needs triton, on Linux", allow_module_level=True)

import triton
from triton.experimental import gluon
from triton.runtime import jit

import rowmax.gpu
from rowmax.gpu import source_compat
from rowmax.gpu.source_compat import source_hash, source_lines

pytestmark = pytest.mark.newest


def all_functions() -> list[Any]:
    """Return every jitted function of the package and of Triton, as far as it is imported."""
    for module in pkgutil.walk_packages(rowmax.gpu.__path__, "rowmax.gpu."):
        importlib.import_module(module.name)
    modules = [x for name, x in sys.modules.items() if name.startswith(("rowmax.", "triton"))]
    found = {id(x): x for module in modules for x in list(vars(module).values())}
    return [x for x in found.values() if isinstance(x, jit.JITCallable)]


def kernels() -> list[Any]:
    """Return the jitted functions without a result that others call: the kernels."""
    names = ("forward", "prepare", "finish", "backward_dkdv", "backward_wide", "forward_wide")
    return [x for x in all_functions() if x.fn.__name__ in names]


# --- source lines ------------------------------------------------------------------------------


def test_lines_are_those_of_inspect(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = all_functions()
    assert len(functions) > 300
    wanted = [inspect.getsourcelines(x.fn) for x in functions]
    monkeypatch.setattr(source_compat, "_getsourcelines", None)  # none is left to inspect
    assert [source_lines(x.fn) for x in functions] == wanted


def test_functions_are_those_that_triton_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for module in (jit.inspect, inspect):  # pyright: ignore
        monkeypatch.setattr(jit, "inspect", module)
        functions = [gluon.jit(x.fn) for x in all_functions() if isinstance(x, jit.JITFunction)]
        made.append([(x.raw_src, x.src, x.starting_line_number) for x in functions])
    assert made[0] == made[1]


def test_other_modules_see_their_own_inspect() -> None:
    assert inspect.getsourcelines is source_compat._getsourcelines
    assert jit.inspect is not inspect  # pyright: ignore
    assert jit.inspect.signature is inspect.signature  # pyright: ignore


#: sources with unusual ends; the function is "f", or "f()" returns it
ENDS = {
    "comment": "def f(x):\n    return x\n\n    # of the body\n\n# of the module\n\ny = 1\n",
    "low comment": "def f(x):\n    if x:\n# low\n        return 1\n    return x\n# end\n",
    "between": "def f(x):\n    return x\n  # between\n\ny = 1\n",
    "deep body": "def f(x):\n        return x\n    # lower than the body\n",
    "bracket": "def f(x):\n    return max(\n        x,\n        1,\n)\ny = 1\n",
    "head": "def f(\n    x,\n    y=(\n        1\n    ),\n) -> int:\n    pass\ny = 1\n",
    "docstring": 'def f(x):\n    """Text."""\ny = 1\n',
    "long docstring": 'def f(x):\n    """Text.\n\nlow\n    """\ny = 1\n',
    "long string": 'def f(x):\n    return x + """\nlow\n"""\ny = 1\n',
    "continued": "def f(x):\n    return x + \\\n1\ny = 1\n",
    "no end": "def f(x):\n    return x",
    "one line": "def f(x): return x\ny = 1\n",
    "nested": "def f():\n    def g(x):\n        return x\n\n    return g\n",
    "nested last": "def f(x):\n    def g(y):\n        return y\n\n    y = 1\n",
    "no code": "def f(x):\n    return x\n    if 0:\n        y = (\n            1\n        )\n",
    "decorated": "def d(*a):\n    return a[0]\n@d\n@d\n# of f\ndef f(x):\n    return x\n",
    "lambda": "f = lambda x: (\n    x\n)\ny = 1\n",
    "tabs": "def f(x):\n\tif x:\n\t\treturn 1\n\treturn x\ny = 1\n",
}


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_a_function(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_compat, "_FOLDERS", (str(tmp_path),))
    module = module_of(tmp_path, ENDS[name])
    functions = [module.f] if name != "nested" else [module.f, module.f()]
    for f in functions:
        assert source_lines(f) == inspect.getsourcelines(f)


def module_of(folder: Path, text: str) -> ModuleType:
    """Return the module of a text, of a name that none had before."""
    path = folder / f"module_{len(list(folder.iterdir()))}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- hashes ------------------------------------------------------------------------------------

SOURCE = """
from typing import NamedTuple
from types import SimpleNamespace
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

DEEP = tl.constexpr(3)
OTHER = tl.constexpr(4)
unused = 5


class Pair(NamedTuple):
    a: int
    b: int = 1


class Space:
    pass


@gluon.jit
def deep(x):
    return x + DEEP


@gluon.jit
def callee(x):
    return deep(x)


@gluon.jit
def of_space(x):
    return x


Space.method = of_space


def closed():
    inner = tl.constexpr(6)

    @gluon.jit
    def closure(x):
        return x + inner

    return closure


closure = closed()


@gluon.jit
def kernel(x, n: gl.constexpr = OTHER):
    y = Pair(callee(x), closure(x))
    return Space.method(y.a) + tl.maximum(n, 1)
"""
#: (a text of the source, another in its place)
CHANGES = [
    ("DEEP = tl.constexpr(3)", "DEEP = tl.constexpr(2)"),
    ("DEEP = tl.constexpr(3)", "DEEP = tl.constexpr(3.0)"),
    ("OTHER = tl.constexpr(4)", "OTHER = tl.constexpr(5)"),
    ("inner = tl.constexpr(6)", "inner = tl.constexpr(7)"),
    ("return x + DEEP", "return x - DEEP"),
    ("return deep(x)", "return deep(x) + 1"),
    ("b: int = 1", "b: int = 2"),
    ("    a: int\n    b: int = 1", "    b: int\n    a: int = 1"),
    ("def of_space(x):\n    return x", "def of_space(x):\n    return -x"),
    ("@gluon.jit\ndef deep", "@gluon.jit(noinline=True)\ndef deep"),
    ("@gluon.jit\ndef deep", "@triton.jit\ndef deep"),
    ("\n\n@gluon.jit\ndef deep", "\n@gluon.jit\ndef deep"),  # line numbers are part of a kernel
    ("x + inner", "x * inner"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_source_changes_the_hash(change: tuple[str, str], tmp_path: Path) -> None:
    first = source_hash(module_of(tmp_path, SOURCE).kernel)
    assert first is not None
    assert source_hash(module_of(tmp_path, SOURCE).kernel) == first
    assert change[0] in SOURCE
    assert source_hash(module_of(tmp_path, SOURCE.replace(*change)).kernel) != first


def test_a_change_in_the_process_changes_the_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(tmp_path, SOURCE)
    first = source_hash(module.kernel)
    for name, new in (
        ("DEEP", triton.language.constexpr(9)),
        ("callee", module.deep),
        ("Pair", tuple),
        ("tl", module),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, new)
            assert source_hash(module.kernel) != first
    monkeypatch.setattr(module, "unused", 6)
    monkeypatch.setattr(triton, "__version__", triton.__version__)
    assert source_hash(module.kernel) == first
    monkeypatch.setattr(triton, "__version__", "0")
    assert source_hash(module.kernel) != first


def test_the_hash_covers_all_that_triton_finds() -> None:
    functions = all_functions()
    for kernel in kernels():
        for x in functions:
            x.hash = None
        assert kernel.cache_key
        reached = [x for x in functions if x.hash is not None]
        found = source_compat._Sources(kernel)
        assert {id(x) for x in reached} <= {id(x) for x in found.functions}
        assert len(reached) > 1
        texts = "\n".join(text for x in found.functions for text in found._text(x))
        for name, _ in kernel.used_global_vals:
            assert f"{name} = " in texts


def test_a_kernel_of_another_form_has_the_hash_of_triton(tmp_path: Path) -> None:
    module = module_of(tmp_path, SOURCE)
    assert source_hash(object()) is None

    class Source:
        def __init__(self, fn: Any) -> None:
            self.fn = fn

        def hash(self) -> str:
            return f"{self.fn.cache_key} {self.fn.other}"

    module.kernel.other = "more"
    source = source_compat.quick_source(Source)(module.kernel)
    assert source.hash() == f"{module.kernel.cache_key} more"
    assert source.fn is module.kernel


def test_hashes_are_those_of_another_process() -> None:
    text = (
        "from rowmax.gpu.hopper.forward_kernel import forward\n"
        "from rowmax.gpu.hopper.backward_fused import backward\n"
        "from rowmax.gpu.source_compat import source_hash\n"
        "print(source_hash(forward), source_hash(backward))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", text],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
    assert "None" not in found.pop()


# --- a warm call -------------------------------------------------------------------------------


def test_a_kernel_in_the_cache_takes_no_hash_of_triton_and_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ROWMAX_CACHE", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for how in ("cold", "warm"):
        command = [sys.executable, "-m", "tests.compile.warm", how]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{how}\n"
