"""The CPU backend's own parts: its threads, kinds of machine, memory and cache."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import rowmax
from demo.memory import Memory
from tests import forks

pytest.importorskip("numba")

Folder = Callable[..., str]  # the fixture kernel_folder


def _gradients(q: torch.Tensor, **options: object) -> tuple[torch.Tensor, ...]:
    leaves = [q.detach().requires_grad_() for _ in range(3)]
    out = rowmax.attention(*leaves, backend="cpu", **options)  # pyright: ignore
    assert isinstance(out, torch.Tensor)
    return (out.detach(), *torch.autograd.grad(out.square().sum(), leaves))


def _printed(code: str, **environment: str) -> tuple[str, str]:
    """Return what a child prints to stdout and to stderr.

    It collects no garbage: collections take a sixth of Numba's time to compile.
    """
    code = "import gc\ngc.disable()\n" + textwrap.dedent(code)
    done = forks.run(code, environment=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def _child(code: str, **environment: str) -> str:
    """Return what a child prints to stdout."""
    return _printed(code, **environment)[0]


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_same_bits_every_time(heads: int) -> None:
    q = torch.randn(1, 700, heads, 32)
    first = _gradients(q, causal=True)
    for _ in range(20):
        assert all(
            torch.equal(a, b) for a, b in zip(first, _gradients(q, causal=True), strict=True)
        )


def test_same_bits_from_many_threads_at_once() -> None:
    q = torch.randn(1, 300, 4, 32)
    first = _gradients(q, causal=True)
    with ThreadPoolExecutor(4) as pool:
        for again in pool.map(lambda _: _gradients(q, causal=True), range(24)):
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_the_bits_of_a_head_do_not_depend_on_the_other_heads() -> None:
    q = torch.randn(2, 300, 8, 32)
    whole = rowmax.attention(q, q, q, causal=True, backend="cpu")
    one = q[1:, :, 5:6]
    assert torch.equal(
        whole[1:, :, 5:6], rowmax.attention(one, one, one, causal=True, backend="cpu")
    )


def test_torchs_thread_count_is_used_and_not_changed() -> None:
    q, threads = torch.randn(1, 512, 8, 32), torch.get_num_threads()
    try:
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            out = rowmax.attention(q, q, q, backend="cpu")
            torch.testing.assert_close(out, rowmax.attention(q, q, q, backend="reference"))
            assert torch.get_num_threads() == n
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_in_a_forked_child() -> None:
    """The parent's OpenMP threads are not there; waiting for them would never end."""
    text = """
        import os, torch, rowmax
        q = torch.randn(1, 512, 8, 64)
        want = rowmax.attention(q, q, q, backend="cpu").numpy()
        child = os.fork()
        got = rowmax.attention(q, q, q, backend="cpu").numpy()
        assert (got == want).all()
        if child:
            assert os.waitpid(child, 0)[1] == 0
            print("both")
    """
    assert _child(text) == "both"


MACHINES = {
    "avx2": ("haswell", "+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2", 8),
    "without fma": ("nehalem", "+sse4.2,+popcnt", 4),
}
NAMES_MACHINES = sys.platform == "linux" and os.uname().machine == "x86_64"


def _machine(name: str, cache: str) -> dict[str, str]:
    """Return the environment that compiles for a machine."""
    cpu, features, _ = MACHINES[name]
    return {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": cache}


@pytest.mark.skipif(not NAMES_MACHINES, reason="x86-64 names")
@pytest.mark.parametrize("name", MACHINES)
def test_kernels_are_right_for_lesser_machines(name: str, kernel_folder: Folder) -> None:
    """Kernels compiled for a lesser processor run on this one."""
    _, _, lanes = MACHINES[name]
    text = f"""
        import torch, rowmax
        from rowmax.cpu.vector import W
        assert W == {lanes}, W
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, n, h, 40) for n, h in ((130, 4), (300, 2), (300, 2)))
        bias, sink = torch.randn(4, 130, 300), torch.randn(4)
        leaves = [t.requires_grad_() for t in (q, k, v, bias, sink)]
        answers = []
        for backend in ("cpu", "reference"):
            out = rowmax.attention(
                q, k, v, causal=True, bias=bias, sink=sink, softcap=2.0, dropout_p=0.2, seed=3,
                backend=backend,
            )
            answers.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
        for a, b in zip(*answers):
            assert (a - b).norm() <= 1e-5 * b.norm(), (a - b).norm() / b.norm()
        print("right")
    """
    assert _child(text, **_machine(name, kernel_folder("lesser"))) == "right"


def test_a_process_loads_what_others_compiled_for_different_dtypes(kernel_folder: Folder) -> None:
    """No name in the cache may stand for the code of two dtypes.

    The float32 kernel is the one of ``test_kernels_are_right_for_lesser_machines``, for 16 s less.
    The first two processes compile, or an earlier run's did.
    """
    text = """
        import torch, rowmax
        for name in {names}:
            q = torch.randn(1, 40, 1, 16, dtype=getattr(torch, name))
            out, want = (rowmax.attention(q, q, q, backend=b) for b in ("cpu", "reference"))
            torch.testing.assert_close(out, want)
        print("right")
    """
    folder = kernel_folder("lesser")
    machine = _machine("avx2", folder) if NAMES_MACHINES else {"NUMBA_CACHE_DIR": folder}
    for names in (["float32"], ["float64"], ["float32", "float64"], ["float64", "float32"]):
        child = _child(text.format(names=names), **machine)
        assert child == "right"


_PAIRS = """
    import sys
    from importlib import util
    from pathlib import Path

    from llvmlite import ir

    def as_two_products(builder, vector, words):
        if not isinstance(words.element, ir.IntType):
            return original(builder, vector, words)
        bits, mask = (ir.Constant(words, [x] * words.count) for x in (16, 0xFFFF0000))

        def multiply_add(a, b, c):
            for half in (lambda x: builder.shl(x, bits), lambda x: builder.and_(x, mask)):
                x, y = (builder.bitcast(half(t), vector) for t in (a, b))
                c = builder.fadd(builder.fmul(x, y), c)
            return c

        return multiply_add

    # before other modules read its constants: pairs are of vectors of 16
    file = Path(util.find_spec("rowmax").origin).parent / "cpu" / "vector.py"
    found = util.spec_from_file_location("rowmax.cpu.vector", file)
    vector = sys.modules[found.name] = util.module_from_spec(found)
    found.loader.exec_module(vector)
    sizes = vector.Machine(w=16, mr=8, nv=2, tile_q=64, tile_k=256, pairs=True)
    vector.W, vector.MR, vector.NV, vector.TILE_Q, vector.TILE_K, vector.PAIRS = sizes
    original, vector.multiply_add = vector.multiply_add, as_two_products

    import torch, rowmax
    from rowmax.cpu import amx, call, products
    from tests.partial_sums import check

    assert products.W == 16 and call.PAIRS and products.multiply_add is as_two_products
    amx.ready = lambda: False
    torch.manual_seed(0)
    shapes = (130, 4), (300, 2), (300, 2)
    q, k, v = (torch.randn(2, n, h, 33, dtype=torch.bfloat16) for n, h in shapes)
    bias, sink = torch.randn(4, 130, 300), torch.randn(4)
    leaves = [t.requires_grad_() for t in (q, k, v, bias, sink)]
    terms = {"bias": bias, "sink": sink, "softcap": 2.0, "dropout_p": 0.2, "seed": 3}
    for options in ({"causal": True}, {"mask": rowmax.Window(50, 3)}):
        answers = []
        for backend in ("cpu", "reference"):
            out = rowmax.attention(q, k, v, backend=backend, **terms, **options)
            grads = torch.autograd.grad(out.float().square().sum(), leaves)
            answers.append((out, *grads))
        for a, b in zip(*answers):
            assert (a - b).float().norm() <= 2e-2 * b.float().norm(), (a - b).norm() / b.norm()
    cu = torch.tensor([0, 5, 130, 300])
    q = torch.randn(300, 2, 40, dtype=torch.bfloat16)
    a, b = (
        rowmax.attention_varlen(q, q, q, cu, cu, causal=True, backend=x) for x in ("cpu", "torch")
    )
    torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
    check("cpu", torch.bfloat16)
    print("right")
"""


def test_products_of_pairs_without_their_instruction(kernel_folder: Folder) -> None:
    """Pairs of bfloat16 take a path of their own; here two products stand for vdpbf16ps."""
    assert _child(_PAIRS, NUMBA_CACHE_DIR=kernel_folder("pairs", _PAIRS)) == "right"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_rows_between_a_window_and_a_length_read_nothing(dtype: torch.dtype) -> None:
    """The window begins past the last key, in the middle of a tile of keys.

    Scores that an earlier call left in memory must not come in.
    """
    mask = rowmax.Window(1, 0) & rowmax.PrefixLengths(torch.tensor([154]))
    q, k = torch.randn(1, 64, 2, 16, dtype=dtype), torch.randn(1, 513, 2, 16, dtype=dtype)
    for _ in range(3):
        before = [torch.full_like(t, torch.nan).requires_grad_() for t in (q, k)]
        rowmax.attention(*before, before[1], backend="cpu").sum().backward()  # pyright: ignore
        leaves = [t.clone().requires_grad_() for t in (q, k, k)]
        sink = torch.zeros(2)
        out = rowmax.attention(*leaves, mask=mask, sink=sink, backend="cpu")  # pyright: ignore
        assert isinstance(out, torch.Tensor)
        out.sum().backward()
        assert not out.any()
        assert all(t.grad is not None and not t.grad.any() for t in leaves)


def test_memory_is_linear() -> None:
    """Forward and backward at N 8192: out and gradients are 64 MiB, the scores of a head 256.

    The squares and the gradient of out are 32 MiB. Such calls took 118 to 165 MiB in all, depending
    on the order in which threads free memory, so the bound is 200.
    """
    _gradients(torch.randn(1, 64, 8, 64), causal=True)
    q = torch.randn(1, 8192, 8, 64)
    memory = Memory(torch.device("cpu"))
    kept = _gradients(q, causal=True)
    peak = memory.peak()
    assert peak is not None
    assert len(kept) == 4
    assert peak < 200 * 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_of_many_short_sequences_is_linear(dtype: torch.dtype) -> None:
    """2048 of 16 keys each, 16 MiB of float32: in tiles of 256 their keys would be 256."""
    q, cu = torch.randn(2048 * 16, 4, 32, dtype=dtype), torch.arange(0, 2048 * 16 + 1, 16)

    def run() -> torch.Tensor:
        out = rowmax.attention_varlen(q, q, q, cu, cu, backend="cpu")
        assert isinstance(out, torch.Tensor)
        return out

    want = run()
    memory = Memory(torch.device("cpu"))
    assert torch.equal(run(), want)
    peak = memory.peak()
    assert peak is not None
    assert peak < 100 * 2**20
    apart = rowmax.attention(*(q.view(2048, 16, 4, 32) for _ in "qkv"), backend="torch")
    torch.testing.assert_close(want.view(2048, 16, 4, 32), apart, rtol=1e-2, atol=1e-2)


# --- where compiled kernels are kept -------------------------------------------------------------

_KERNEL = """
from rowmax.cpu.kernel import kept, kernel

def twice(x):
    return 2 * x

compiled = kernel(twice)
assert compiled(21) == compiled(21) == 42
print(kept())
"""


def test_without_a_folder_for_its_cache_it_compiles_and_warns_once() -> None:
    """As in a container whose package and home are read-only."""
    text = "from numba.core.caching import CacheImpl\nCacheImpl._locator_classes = []\n" + _KERNEL
    out, err = _printed(text)
    assert out == "False"
    assert err.count("RuntimeWarning") == 1
    assert "NUMBA_CACHE_DIR" in err
    assert err.count("rowmax: compiling") == 1
    assert "not kept" in err


def test_compiling_is_logged_and_loading_is_not(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(_KERNEL)
    given = {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}
    given["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    out, err = _printed("import own", **given)
    assert out == "True"
    assert err.count("rowmax: compiling twice for this processor") == 1
    assert _printed("import own", **given) == ("True", "")


_PARTS = """
    import numpy as np
    from numba import njit
    from rowmax.cpu import numba_compat
    from rowmax.cpu.functions import array, choice, inner
    from rowmax.cpu.kernel import kernel

    @choice
    def add(x, y):
        return lambda x, y: x + y

    @inner
    def second(address, like):
        return array(address, 2, like)[1]

    @inner
    def twice(address, like):
        return add(second(address, like), second(address, np.float32))

    @kernel
    def total(x):
        return twice(x.ctypes.data, x) + np.float64(array(x.ctypes.data, x.size, x).size)

    x = np.array([3, 5], np.float32)
    assert total(x) == 12
    assert njit(total.py_func)(x) == 12  # no kernel: Numba links a part with all that it calls
    if {parts}:
        (part,) = twice.overloads.values()
        assert part.library.get_pointer_to_function(part.fndesc.llvm_func_name) == 0
    else:
        assert numba_compat.KERNEL == numba_compat.PART == {{}}
        assert numba_compat.array is numba_compat._carray
    print("right")
"""


def test_functions_of_kernels_have_no_machine_code_of_their_own() -> None:
    assert _child(_PARTS.format(parts=True)) == "right"


def test_numba_with_other_private_names(kernel_folder: Folder) -> None:
    """Functions then compile as Numba's own do, and attention is right."""
    folder = Path(kernel_folder("private-names", _PARTS))
    shutil.rmtree(folder / "rowmax", ignore_errors=True)
    kernels = shutil.ignore_patterns("*.nbi", "*.nbc")
    copy = shutil.copytree(Path(rowmax.__file__).parent, folder / "rowmax", ignore=kernels)
    file = copy / "cpu" / "numba_compat.py"
    text = file.read_text()
    for known in ("_DATA = (", "_MEMBERS = {"):
        assert text.count(known) == 1
        text = text.replace(known, f'{known}"absent", ')
    file.write_text(text)
    more = """
    import torch, rowmax
    q = torch.randn(1, 40, 1, 16)
    out, want = (rowmax.attention(q, q, q, backend=b) for b in ("cpu", "reference"))
    torch.testing.assert_close(out, want)
    """
    path = str(folder) + os.pathsep + os.environ.get("PYTHONPATH", "")
    given = {"PYTHONPATH": path, "NUMBA_CACHE_DIR": str(folder / "cache")}
    assert _child(_PARTS.format(parts=False) + more, **given) == "right"


def test_a_numba_that_does_not_load_leaves_the_work_to_torch(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 2.9 or less')")
    text = """
        import torch, rowmax
        q = torch.randn(1, 40, 1, 16)
        out = rowmax.attention(q, q, q)
        torch.testing.assert_close(out, rowmax.attention(q, q, q, backend="reference"))
        rowmax.attention(q[:, :30], q, q)
        print(rowmax.explain(q, q, q))
    """
    path = str(tmp_path) + os.pathsep + os.environ.get("PYTHONPATH", "")
    out, err = _printed(text, PYTHONPATH=path)
    assert "forward   torch" in out
    assert "not cpu: it cannot be loaded: ImportError: Numba needs NumPy 2.9 or less" in out
    assert err.count("the cpu backend is left out") == 1


def test_other_head_terms_are_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops of cpu/heads.py are written for them, and no file of the backend changes."""
    from rowmax.cpu import kernel

    before = kernel._fingerprint.__wrapped__()
    assert kernel._fingerprint.__wrapped__() == before
    monkeypatch.setattr(kernel, "HEAD_TERMS", {})
    assert kernel._fingerprint.__wrapped__() != before
