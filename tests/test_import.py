"""``import rowmax`` adds little time to ``import torch``, and no optional library."""

from __future__ import annotations

import gc
import json
import subprocess
import sys

import pytest

from rowmax import imports

ALLOWED = 0.3  # seconds
OPTIONAL = ("triton", "numba", "numpy", "rich", "typer", "click", "matplotlib", "transformers")

_TIMED = """
import json, sys, time
import torch
before, start = set(sys.modules), time.perf_counter()
import rowmax
seconds = time.perf_counter() - start
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""


def _child(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout


def test_import_adds_little_to_that_of_torch():
    seconds, loaded = [], []
    for _ in range(4):  # the best of a few: other work on the machine only adds
        taken, loaded = json.loads(_child(_TIMED))
        seconds.append(taken)
        if taken < ALLOWED:
            break
    assert min(seconds) < ALLOWED
    tops = {name.partition(".")[0] for name in loaded}
    assert sorted(tops & set(OPTIONAL)) == []


def test_import_is_silent():
    command = [sys.executable, "-W", "error", "-c", "import rowmax"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == ""
    assert done.stderr == ""


def test_the_public_names_are_all_there():
    import rowmax

    assert sorted(rowmax.__all__) == rowmax.__all__
    for name in rowmax.__all__:
        assert getattr(rowmax, name).__doc__, f"{name} has no docstring"


@pytest.mark.parametrize("enabled", [True, False])
def test_imports_of_backends_leave_the_collector_as_it_was(enabled):
    def within() -> None:
        with imports.without_collections("a"), imports.without_collections("b"):
            assert not gc.isenabled()
            raise ImportError

    before, frozen = gc.isenabled(), gc.get_freeze_count()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ImportError):
            within()
        assert gc.isenabled() is enabled
        assert gc.get_freeze_count() <= frozen
    finally:
        (gc.enable if before else gc.disable)()


def test_a_module_that_is_imported_costs_no_collection(monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda *_: pytest.fail("collected"))
    with imports.without_collections("rowmax.imports"):
        assert gc.isenabled()


_IMPORTS = """
import gc
from rowmax.imports import without_collections

class Cycle:
    def __init__(self):
        self.me = self
    def __del__(self):
        print("gone")

collections = []
gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
gc.collect()
Cycle()
with without_collections("new"):
    print("begun")
    del collections[:]
    made = [[i] for i in range(300_000)]
    assert collections == []
more = [[i] for i in range(30_000)]
assert 2 not in collections, collections
Cycle()
gc.collect()
gc.freeze()
count = gc.get_freeze_count()
with without_collections("new"):
    pass
assert gc.get_freeze_count() == count
"""


def test_imports_of_backends_begin_no_collection_of_all_objects():
    assert _child(_IMPORTS).split() == ["gone", "begun", "gone"]
