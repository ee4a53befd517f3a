"""Run Python programs in forks of one process that has imported torch.

A start takes milliseconds in place of the seconds of the import. A program whose test is about
imports, or about what Numba reads of the environment, takes a process of its own.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import itertools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import types
import warnings
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]


class Program(NamedTuple):
    """A program, and the process that it finds."""

    number: int
    code: str
    file: str  # its name in tracebacks
    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    streams: tuple[str, str]  # files for stdout and stderr
    limit: int  # seconds, then the process is killed
    strict: bool  # warnings are errors


def run(
    code: str,
    *arguments: str,
    file: str = "<string>",
    limit: int = 240,
    strict: bool = False,
    preload: tuple[str, ...] = ("torch",),
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program in ``__main__``, with ``sys.argv[1:]``; return its output and exit status."""
    server = _server(preload)
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        streams = f"{folder}/stdout", f"{folder}/stderr"
        given = dict(os.environ) | (environment or {})
        program = Program(
            *(next(_numbers), code, file, arguments, given, os.getcwd(), streams, limit, strict)
        )
        pickle.dump(tuple(program), server.stdin)
        server.stdin.flush()
        number, status = pickle.load(server.stdout)
        while number != program.number:  # the answer to a test that was given up
            number, status = pickle.load(server.stdout)
        out, err = (Path(x).read_text(encoding="utf-8") for x in streams)
    return subprocess.CompletedProcess([file, *arguments], status, out, err)


_numbers = itertools.count()


@lru_cache
def _server(preload: tuple[str, ...]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.forks", *preload]
    started = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(started.communicate)  # ends it, and waits for that
    return started


# --- in the process ------------------------------------------------------------------------------


def _next_program() -> Program | None:
    """Return the next program in a fork of this process, and None here at the end."""
    while True:
        try:
            program = Program(*pickle.load(sys.stdin.buffer))
        except EOFError:
            return None
        child = os.fork()
        if not child:
            return program
        _, status = os.waitpid(child, 0)
        pickle.dump((program.number, os.waitstatus_to_exitcode(status)), sys.stdout.buffer)
        sys.stdout.buffer.flush()


def _prepare(program: Program) -> None:
    """Make this process the one that the program finds."""
    signal.alarm(program.limit)
    for stream, path in enumerate((os.devnull, *program.streams)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(opened, stream)
        os.close(opened)
    os.environ.clear()
    os.environ.update(program.environment)
    os.chdir(program.folder)
    paths = program.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    sys.argv[:] = [program.file, *program.arguments]
    # PyTorch's first tanh of a process is off by 1e-4 in about 1 of 30 processes, where several
    # threads of MKL compute it; not after one of a single thread.
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.tanh(torch.zeros(8))
    if program.strict:
        warnings.simplefilter("error")
        # torch's own: forward mode imports scripted functions
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)


def main() -> None:
    for name in sys.argv[1:]:
        with suppress(ImportError):  # it is not installed
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    program = _next_program()
    if program is None:
        gc.unfreeze()  # Triton prints what the end of a process finds alive
        return
    _prepare(program)
    found: Any = types.ModuleType("__main__")
    found.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = found  # where a compiler looks for names
    exec(compile(program.code, program.file, "exec"), found.__dict__)


if __name__ == "__main__":
    main()
