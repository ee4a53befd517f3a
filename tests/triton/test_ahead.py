"""Kernels that threads compile before a call needs them."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import rowmax
from rowmax import tiled
from rowmax.call.inputs import Wanted

compat = importlib.import_module("rowmax.gpu.compat")
compiled = importlib.import_module("rowmax.gpu.compiled")
threads = importlib.import_module("rowmax.gpu.threads")
tl = importlib.import_module("triton.language")

LIMIT = 240  # seconds: machines are loaded


class Kernel:
    """A stand-in for a kernel of Triton's."""

    arg_names = ("t", "n", "C")


ARGS = (torch.zeros(4),), (3,), tl.constexpr(5)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = threads.Threads()
    monkeypatch.setattr(threads, "THREADS", found)
    yield found
    found.stop()


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the threads that compile, without the compiler and a device."""
    found: list[str] = []

    def compile(launch: Any, signature: Any, target: Any) -> Any:
        found.append(threading.current_thread().name)
        source = SimpleNamespace(signature=signature.types)
        return SimpleNamespace(src=source, metadata=SimpleNamespace())

    driver = SimpleNamespace(get_current_target=lambda: None)
    monkeypatch.setattr(compiled.Launch, "_compiled", compile)
    monkeypatch.setattr(compiled.triton.runtime, "driver", SimpleNamespace(active=driver))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(compiled, "_kernels", OrderedDict())
    return found


def launch_of(**options: Any) -> Any:
    return compiled.Launch(Kernel, (1, 1, 1), options)


def test_a_kernel_compiled_ahead_is_not_compiled_again(pool, compiles):
    job = launch_of().pending(*ARGS)
    pool.submit([job])
    pool.wait()
    kept = launch_of().loaded(*ARGS)
    assert compiles == ["rowmax-compile"]
    assert launch_of().loaded(*ARGS) is kept
    assert launch_of().pending(*ARGS) is None
    launch_of(num_warps=8).loaded(*ARGS)  # another kernel
    assert len(compiles) == 2


def test_a_call_waits_for_a_kernel_that_a_thread_compiles(pool, compiles, monkeypatch):
    begun, go, compile = threading.Event(), threading.Event(), compiled.Launch._compiled

    def slow(*args: Any) -> Any:
        begun.set()
        assert go.wait(LIMIT)
        return compile(*args)

    monkeypatch.setattr(compiled.Launch, "_compiled", slow)
    pool.submit([launch_of().pending(*ARGS)])
    assert begun.wait(LIMIT)
    assert launch_of().pending(*ARGS) is None
    threading.Timer(0.2, go.set).start()
    launch_of().loaded(*ARGS)
    assert compiles == ["rowmax-compile"]
    assert not compiled._compiling


@pytest.mark.parametrize("waits", [False, True])
def test_an_error_surfaces_in_the_call_that_needs_the_kernel(pool, compiles, monkeypatch, waits):
    begun, go = threading.Event(), threading.Event()

    def fail(*args: Any) -> Any:
        begun.set()
        assert go.wait(LIMIT)
        raise OSError("no space")

    monkeypatch.setattr(compiled.Launch, "_compiled", fail)
    pool.submit([launch_of().pending(*ARGS)])
    assert begun.wait(LIMIT)
    if waits:
        threading.Timer(0.2, go.set).start()
    else:
        go.set()
        pool.wait()
    with pytest.raises(OSError, match="no space"):
        launch_of().loaded(*ARGS)
    monkeypatch.undo()
    assert not compiled._compiling  # the next call tries again


def test_a_job_holds_no_tensor(pool, compiles):
    released = threading.Event()
    x = torch.zeros(4)
    weakref.finalize(x, released.set)
    job = launch_of().pending((x,), (3,), tl.constexpr(5))
    del x
    assert released.is_set()
    job()


class Source:
    """A stand-in for Triton's class of sources."""

    def make_ir(self, *args: Any) -> tuple[Any, ...]:
        if not args:
            raise ValueError("an error of a kernel")
        return args


def test_a_source_that_is_read_calls_once():
    calls: list[int] = []
    source = compiled._announced(Source)()
    assert source.make_ir(1, 2) == (1, 2)
    with compiled.once_read(lambda: calls.append(1)):
        assert calls == []
        with pytest.raises(ValueError, match="an error of a kernel"):
            source.make_ir()
        assert calls == []
        thread = threading.Thread(target=source.make_ir, args=(1,))
        thread.start()
        thread.join()
        assert calls == []  # that of another thread
        source.make_ir(1)
        source.make_ir(1)
        assert calls == [1]
    with compiled.once_read(lambda: calls.append(2)):
        pass  # all kernels are there
    source.make_ir(1)
    assert calls == [1]


MODES = """
import sys
import torch
from rowmax.gpu import ahead, replay

x = torch.zeros(3)
with replay._Watch([]) as watch, ahead._Pretended("cpu"):
    x.new_empty(3).sum()
assert not {"torch._dynamo", "sympy"} & set(sys.modules)
import torch._dynamo

with replay._Watch([]) as disabled:
    x.new_empty(3).sum()
assert isinstance(disabled, replay._Watch) and type(disabled) is not type(watch)
assert len(disabled.made) == 1 and not disabled.complete
"""


def test_modes_import_no_compiler_of_torch_and_are_left_alone_by_it():
    subprocess.run([sys.executable, "-c", MODES], timeout=LIMIT, check=True)


def test_threads_end_when_no_job_is_left(pool):
    pool.submit([threading.Event().set] * 20)
    pool.wait()
    assert not pool._running
    assert "rowmax-compile" not in [x.name for x in threading.enumerate()]


EXIT = """
import time
from rowmax.gpu.threads import THREADS

def job():
    time.sleep(1.0)
    print("ended", flush=True)

THREADS.submit([job] * 50)
time.sleep(0.2)
"""


def test_jobs_that_wait_do_not_delay_the_end_of_the_interpreter():
    """Those that run end first: a thread in C++ would abort the process."""
    done = subprocess.run(
        [sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("ended") == threads.MOST


FORK = """
import os, time
from rowmax.gpu.threads import THREADS

THREADS.submit([lambda: time.sleep(1.0)] * 5)
child = os.fork()
THREADS.stop()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_fork_has_no_jobs():
    subprocess.run([sys.executable, "-c", FORK], timeout=LIMIT, check=True)


@pytest.mark.parametrize(("value", "on"), [(None, True), ("1", True), ("0", False)])
def test_the_environment_switches_it(monkeypatch, value, on):
    monkeypatch.delenv(threads.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(threads.VARIABLE, value)
    assert threads.enabled() is on


def test_another_value_of_the_switch_is_an_error(monkeypatch):
    monkeypatch.setenv(threads.VARIABLE, "no")
    with pytest.raises(ValueError, match="ROWMAX_COMPILE_AHEAD: got 'no'; want 1"):
        threads.enabled()


# --- which calls compile ahead ------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Wanted]:
    """Return the gradients of the backwards that first forwards compile ahead."""
    found: list[Wanted] = []

    def compile_ahead(problem: Any, tensors: Any, backward: Any, wanted: Wanted) -> Any:
        found.append(wanted)
        return nullcontext()

    monkeypatch.setattr(tiled, "compile_ahead", compile_ahead, raising=False)
    monkeypatch.setattr("rowmax.call.dispatch._prepared", {})
    monkeypatch.setattr("rowmax.call.normalize._passed", {})
    return found


def test_the_first_forward_with_gradients_begins_once(asked):
    q, k, v = (torch.randn(1, 24, 2, 8) for _ in range(3))
    rowmax.attention(q, k, v, backend="torch")
    assert asked == []
    q, k, v = (torch.randn(1, 32, 2, 8, requires_grad=n != 1) for n in range(3))
    for _ in range(3):
        rowmax.attention(q, k, v, backend="torch").sum().backward()
    assert [[name for name, want in x._asdict().items() if want] for x in asked] == [["q", "v"]]
    q = torch.randn(1, 40, 2, 8, requires_grad=True)
    with torch.no_grad():
        rowmax.attention(q, q, q, backend="torch")
    assert len(asked) == 1


def test_a_backend_that_compiles_nothing_is_left_out(asked):
    q = torch.randn(1, 25, 2, 8, requires_grad=True)
    rowmax.attention(q, q, q, backend="reference").sum().backward()
    assert asked == []


def test_launchers_of_another_driver_are_left_to_the_first_launch(monkeypatch):
    driver = SimpleNamespace(active=SimpleNamespace())
    monkeypatch.setattr(compat.triton.runtime, "driver", driver)
    compat.build_launcher(SimpleNamespace(src=None, metadata=None))
    made = []
    driver.active.launcher_cls = lambda *given: made.append(given)
    compat.build_launcher(SimpleNamespace(src="src", metadata="metadata"))
    assert made == [("src", "metadata")]


# --- the key of Triton's release ----------------------------------------------------------------


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the keys that Triton computes, of stand-ins for its files."""
    from triton.runtime import cache

    found: list[str] = []

    def triton_key() -> str:
        found.append(f"key {len(found)}")
        return found[-1]

    monkeypatch.setattr(cache, "triton_key", triton_key)
    return found


def key_of(folder: Path, monkeypatch: pytest.MonkeyPatch, compute: Any) -> str:
    """Return the key that a new process would use."""
    from triton.runtime import cache

    monkeypatch.setattr(cache, "triton_key", compute)
    compat.remember_key(folder)
    compat.remember_key(folder)  # once is enough
    return cache.triton_key()


def test_the_key_is_computed_once_while_the_files_stay(computed, monkeypatch, tmp_path):
    from triton.runtime import cache

    compute, folder = cache.triton_key, tmp_path / "new"
    root = tmp_path / "triton"
    for name in ("runtime/cache.py", "_C/libtriton.so", "compiler/code.py", "language/core.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("1")
    monkeypatch.setattr(cache, "__file__", str(root / "runtime" / "cache.py"))
    assert [key_of(folder, monkeypatch, compute) for _ in range(3)] == ["key 0"] * 3
    (root / "_C" / "libtriton.so").write_text("12")
    assert [key_of(folder, monkeypatch, compute) for _ in range(2)] == ["key 1"] * 2
    os.utime(root / "language" / "core.py", (1, 1))
    assert key_of(folder, monkeypatch, compute) == "key 2"
    (root / "compiler" / "more.py").write_text("")
    assert key_of(folder, monkeypatch, compute) == "key 3"
    for text in ("", "[]", "{}", '{"stamp": 1, "key": 2}'):
        (folder / "triton_key.json").write_text(text)
        assert key_of(folder, monkeypatch, compute) == computed[-1]
    assert len(computed) == 8
    assert key_of(folder, monkeypatch, compute) == "key 7"
    assert [x.name for x in folder.iterdir()] == ["triton_key.json"]


def test_a_folder_that_cannot_be_written_changes_nothing(computed, monkeypatch, tmp_path):
    from triton.runtime import cache

    (tmp_path / "file").write_text("")
    compute = cache.triton_key
    assert key_of(tmp_path / "file", monkeypatch, compute) == "key 0"
    assert key_of(tmp_path / "file", monkeypatch, compute) == "key 1"


def test_another_release_without_the_function_is_left_alone(monkeypatch, tmp_path):
    from triton.runtime import cache

    monkeypatch.delattr(cache, "triton_key")
    compat.remember_key(tmp_path)
    assert list(tmp_path.iterdir()) == []


KEY = """
from pathlib import Path
import sys
from triton.runtime import cache
from rowmax.gpu import compat

compute = cache.triton_key
compat.remember_key(Path(sys.argv[1]))
compat.remember_key(Path(sys.argv[1]))
assert cache.triton_key is not compute
assert cache.get_cache_key.__globals__["triton_key"] is cache.triton_key  # what a compile calls
print(cache.triton_key() == compute())
"""


def test_the_kept_key_is_that_of_triton(tmp_path):
    for _ in range(2):  # the second reads the file
        command = [sys.executable, "-c", KEY, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
        assert done.stdout.strip() == "True"
