"""Read and hash the sources of jitted functions faster than Triton does.

Triton's ways remain where a source or a release has another form. Tried with triton 3.6.0 and
3.9.0.
"""

from __future__ import annotations

import hashlib
import inspect
import linecache
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

# --- source lines ------------------------------------------------------------------------------

_QUOTES = re.compile(r'"""|\'\'\'')
_getsourcelines = inspect.getsourcelines


def _folders() -> tuple[str, ...]:
    """Return the folders of the packages whose sources are read here."""
    found = None
    with suppress(ImportError, ValueError):  # a stand-in for triton has no spec
        found = find_spec("triton")
    places = list(found.submodule_search_locations or ()) if found else []
    return tuple(os.path.join(x, "") for x in (*places, Path(__file__).parents[1]))


_FOLDERS = _folders()


def source_lines(function: Any) -> tuple[list[str], int]:
    """Return (lines, number of the first), equal to those of ``inspect.getsourcelines``.

    inspect finds the end by Python's tokenizer: 0.4 ms for each of the 300 functions that a first
    call imports. Here the end is the last line with code, then lines that are indented deeper than
    the head. Inspect reads a source in which that may be wrong, and those of other packages.
    """
    if type(function) is FunctionType and not hasattr(function, "__wrapped__"):
        code = function.__code__
        file, first = code.co_filename, code.co_firstlineno - 1
        if file.startswith(_FOLDERS):
            linecache.checkcache(file)
            lines = linecache.getlines(file)
            end = _end(lines, first, max(_numbers(code)))
            if end is not None:
                return lines[first:end], first + 1
    return _getsourcelines(function)


def _numbers(code: CodeType) -> Iterator[int]:
    """Yield the numbers of the lines of a code, and of those within it."""
    yield code.co_firstlineno
    for _, _, line in code.co_lines():
        if line is not None:
            yield line
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield from _numbers(x)


def _end(lines: list[str], first: int, last: int) -> int | None:
    """Return the end of the function at the line ``first``, or None if it is uncertain.

    ``last`` is the number of the last line that has code.
    """
    if last > len(lines) or not lines[first].lstrip().startswith(("def ", "@")):
        return None
    head = _indent(lines[first])
    end, comment = last, False
    for n in range(last, len(lines)):
        text = lines[n].strip()
        indent = _indent(lines[n])
        if not text:
            continue
        if text[0] == "#":
            comment |= indent > head
        elif indent > head or text[0] in ")]}":
            end, comment = n + 1, False
        else:
            break
    if comment:  # inspect keeps it if it is as deep as the body
        return None
    tail = lines[last - 1 : end]
    if tail[-1].endswith("\\\n") or len(_QUOTES.findall("".join(tail))) % 2:
        return None
    return end


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


@contextmanager
def _quick_inspect() -> Iterator[None]:
    """Let inspect read by ``source_lines`` in this context."""
    inspect.getsourcelines = source_lines
    try:
        yield
    finally:
        if inspect.getsourcelines is source_lines:
            inspect.getsourcelines = _getsourcelines


class _Inspect(ModuleType):
    """The module inspect, with a faster ``getsourcelines``."""

    getsourcelines = staticmethod(source_lines)

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)


with _quick_inspect():  # Triton reads 48 functions of its own as it is imported: 16 ms
    import triton
    from triton.runtime import jit

if getattr(jit, "inspect", None) is inspect:
    jit.inspect = _Inspect("inspect")  # pyright: ignore


# --- hashes ------------------------------------------------------------------------------------

_WORDS = re.compile(r"[^\W\d]\w*")
_ATTRIBUTES = re.compile(r"\.\s*([^\W\d]\w*)")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
#: modules whose functions the language gives: Triton's own key has them
_LANGUAGE = ("triton.language", "triton.experimental.gluon.language", "copy", "math")


def source_hash(kernel: Any) -> str | None:
    """Return a hash of all sources that a kernel consists of, None if Triton has another form.

    Triton's ``cache_key`` visits the syntax trees of all functions that a kernel calls: 45 ms for
    a forward. Here a function depends on every global and every nonlocal variable whose name is a
    word of its source. They are more than it reads. A changed source, constant, class or function
    changes the hash.
    """
    try:
        return _Sources(kernel).hash
    except Exception:
        return None


class _Sources:
    """The functions that a kernel may call, numbered in the order in which they are found."""

    def __init__(self, kernel: Any) -> None:
        self.functions: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._add(kernel)
        digest = hashlib.sha256(triton.__version__.encode())
        for function in self.functions:  # it grows
            digest.update("\n".join(self._text(function)).encode())
        self.hash = digest.hexdigest()

    def _add(self, function: Any) -> int:
        number = self._numbers.get(id(function))
        if number is None:
            number = self._numbers[id(function)] = len(self.functions)
            self.functions.append(function)
        return number

    def _text(self, function: Any) -> Iterator[str]:
        """Yield the source of a function, and a text for each variable that it may read."""
        source, of = function.src, function.fn
        yield f"{type(function).__name__} {of.__module__}.{of.__qualname__}"
        yield f"{function.starting_line_number} {getattr(function, 'noinline', False)}"
        yield source
        words, attributes = set(_WORDS.findall(source)), set(_ATTRIBUTES.findall(source))
        cells = zip(of.__code__.co_freevars, of.__closure__ or (), strict=True)
        scopes = {name: cell.cell_contents for name, cell in cells}, of.__globals__
        for scope in scopes:
            for name in sorted(words & scope.keys()):
                yield f"{name} = {self._value(scope[name], attributes, ())}"

    def _value(self, x: Any, attributes: set[str], within: tuple[Any, ...]) -> str:
        """Return a text that changes with a value, and with attributes of these names."""
        kind = type(x)
        if kind in _PLAIN:
            return f"{kind.__name__} {x!r}"
        if isinstance(x, jit.JITCallable):
            return f"function {self._add(x)}"
        if getattr(x, "__triton_builtin__", False) or kind is FunctionType:
            return f"builtin {x.__module__}.{x.__qualname__}"
        if any(x is y for y in within):
            return "within"
        within = (*within, x)
        if kind is triton.language.constexpr:
            return f"constexpr {self._value(x.value, attributes, within)}"
        if isinstance(x, tuple | list):
            return f"{kind.__qualname__} {[self._value(y, attributes, within) for y in x]}"
        if kind is ModuleType and x.__name__ in _LANGUAGE:
            return f"module {x.__name__}"
        found = [f"{kind.__qualname__} {_name(x)}"]
        if getattr(x, "__triton_aggregate__", False):
            members = [self._value(y, attributes, within) for y in x.hash_attrs]
            found.append(f"{x.__annotations__} {members}")
        for name in sorted(attributes):
            y = getattr(x, name, None)
            if y is not None:
                found.append(f"{name}: {self._value(y, attributes, within)}")
        return f"({', '.join(found)})"


def _name(x: Any) -> str:
    """Return the name of a module or a class, with its fields; the text of another value."""
    if isinstance(x, ModuleType):
        return x.__name__
    if isinstance(x, type):
        fields = getattr(x, "_fields", ()), getattr(x, "_field_defaults", {})
        return f"{x.__module__}.{x.__qualname__} {fields}"
    text = repr(x)
    return "" if " at 0x" in text else text


def quick_source(source: Any) -> Any:
    """Return a class of sources for ``triton.compile``, whose hash has that of ``source_hash``."""

    class Source(source):
        def hash(self) -> str:
            found = source_hash(self.fn)
            if found is None:
                return super().hash()
            kernel, self.fn = self.fn, _Hashed(found)
            try:
                return super().hash()
            except AttributeError:  # a release that reads more of it
                self.fn = kernel
                return super().hash()
            finally:
                self.fn = kernel

    return Source


class _Hashed:
    """A kernel's key, in place of the kernel."""

    def __init__(self, key: str) -> None:
        self.cache_key = key
