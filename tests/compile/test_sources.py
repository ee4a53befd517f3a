"""Sources of kernels as they are read, compared with Triton's own ways."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

if find_spec("triton") is None or sys.platform != "linux":
    pytest.skip("compiling for a GPU needs triton, on Linux", allow_module_level=True)

from triton.experimental import gluon
from triton.runtime import jit

import rowmax.gpu
from rowmax.gpu import source_compat
from rowmax.gpu.source_compat import source_lines


def all_functions() -> list[Any]:
    """Return every jitted function of the package and of Triton, as far as it is imported."""
    for module in pkgutil.walk_packages(rowmax.gpu.__path__, "rowmax.gpu."):
        importlib.import_module(module.name)
    modules = [x for name, x in sys.modules.items() if name.startswith(("rowmax.", "triton"))]
    found = {id(x): x for module in modules for x in list(vars(module).values())}
    return [x for x in found.values() if isinstance(x, jit.JITCallable)]


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
