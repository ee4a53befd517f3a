"""The answers that the checks of the exercises read.

python -m pytest docs/derivation/exercises
python -m pytest docs/derivation/exercises --answers docs/derivation/solutions
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
#: before chapter 9 imports triton: its kernels run without a GPU
os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the folder of the answers."""
    parser.addoption(
        "--answers", type=Path, default=HERE, help="folder of chapter1.py and the others"
    )


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> ModuleType:
    """Return the answers to a chapter: ``chapter2.py`` for ``test_chapter2.py``."""
    name = Path(request.path).stem.removeprefix("test_")
    file = request.config.getoption("answers") / f"{name}.py"
    if not file.is_file():
        raise pytest.UsageError(f"--answers: {file} does not exist")
    spec = importlib.util.spec_from_file_location(f"answers_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
