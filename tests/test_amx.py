"""Tile instructions: the product itself, a model of it elsewhere, machine code, and permission."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import rowmax

pytest.importorskip("numba")

from numba import njit

from rowmax.cpu import amx, vector

from .test_cpu import NAMES_MACHINES, Folder, _child, _machine

_MODEL = """
    import torch, rowmax
    from tests.partial_sums import check
    from tests.tile_model import install

    install()
    torch.manual_seed(0)
    shapes = (130, 4, 33), (300, 2, 33), (300, 2, 40)
    q, k, v = (torch.randn(1, n, h, d, dtype=torch.bfloat16) for n, h, d in shapes)
    bias, sink = torch.randn(4, 130, 300), torch.randn(4)
    leaves = [t.requires_grad_() for t in (q, k, v, bias, sink)]
    terms = {"bias": bias, "sink": sink, "softcap": 2.0, "dropout_p": 0.2, "seed": 3}
    for options in (terms | {"causal": True}, {"mask": rowmax.Window(50, 3)}, {}):
        wanted = leaves if "bias" in options else leaves[:3]
        answers = []
        for backend in ("cpu", "reference"):
            out = rowmax.attention(q, k, v, backend=backend, **options)
            grads = torch.autograd.grad(out.float().square().sum(), wanted)
            answers.append((out, *grads))
        for a, b in zip(*answers):
            assert (a - b).float().norm() <= 2e-2 * b.float().norm(), (a - b).norm() / b.norm()
    print("right")
"""


def test_the_tiles_with_a_model_of_the_instruction(kernel_folder: Folder) -> None:
    """Packing, strips, masks and transposed sums, on any processor and in its own vectors."""
    model = Path(__file__).with_name("tile_model.py").read_text()
    folder = kernel_folder("tile-model", _MODEL, model)
    machine = _machine("avx2", folder) if NAMES_MACHINES else {}
    assert _child(_MODEL, **(machine | {"NUMBA_CACHE_DIR": folder})) == "right"


_ASSEMBLY = """
    import sys, torch, rowmax
    from numba import typeof
    from rowmax.cpu import amx
    import numpy as np

    def launch(worker, *arguments, **_):
        kinds = tuple(map(typeof, (*arguments, np.zeros(8, np.int64))))
        worker.compile(kinds)
        print(*worker.inspect_asm(kinds).splitlines(), sep="\\n")
        return True

    sys.modules["rowmax.cpu.forward"].launch, amx.permitted = launch, lambda: True
    q = torch.zeros(1, 300, 1, 64, dtype=torch.bfloat16)
    rowmax.attention(q, q, q, backend="cpu")
"""
_SAPPHIRE = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+avx512f,+avx512dq,+avx512vl,+avx512bw,+avx512bf16"
_SAPPHIRE += ",+amx-tile,+amx-bf16"


@pytest.mark.skipif(not NAMES_MACHINES, reason="x86-64 names")
def test_machine_code_of_the_forward(tmp_path: Path) -> None:
    """It compiles on any x86-64, and keeps its addresses in registers between tile loads."""
    text = _child(
        _ASSEMBLY,
        NUMBA_CPU_NAME="sapphirerapids",
        NUMBA_CPU_FEATURES=_SAPPHIRE,
        NUMBA_CACHE_DIR=str(tmp_path),
    )
    loops = [block for block in re.split(r"^\.L\w+:", text, flags=re.M) if "tdpbf16ps" in block]
    assert len(loops) == 2  # scores, and values
    for block in loops:
        inside = block[block.index("tileloadd") : block.rindex("tdpbf16ps")]
        assert "rsp" not in inside
        assert inside.count("tileloadd") == 4
    assert re.search(r"vscalefps\s.*%zmm", text)
    assert len(re.findall("ldtilecfg", text)) == len(re.findall("tilerelease", text)) == 1


@pytest.mark.skipif(not amx.ready(), reason="needs AMX")
@pytest.mark.parametrize("add", [0, 1])
def test_product(add: int) -> None:
    a, b, c = torch.randn(32, 96).bfloat16(), torch.randn(96, 32).bfloat16(), torch.randn(32, 48)
    pairs = b.view(48, 2, 32).transpose(1, 2).contiguous()
    want = add * c[:, :32] + a.float() @ b.float()

    @njit
    def run(c: int, a: int, pairs: int, add: int) -> int:
        used = amx.configure()
        amx.product(c, 4 * 48, a, 2 * 96, pairs, 128, 3, add)
        amx.release()
        return used

    beyond = c[:, 32:].clone()
    run(c.data_ptr(), a.data_ptr(), pairs.data_ptr(), add)
    torch.testing.assert_close(c[:, :32], want)
    assert torch.equal(c[:, 32:], beyond)


@pytest.fixture
def asked_anew(monkeypatch: pytest.MonkeyPatch):
    """Forget the system's answer before and after."""
    amx.ready.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    amx.ready.cache_clear()


_ALL = {"amx-tile", "amx-bf16", "avx512f", "avx512dq", "avx512bf16"}


@pytest.mark.parametrize("answer", [-1, OSError])
def test_permission_refused(answer: object, asked_anew: pytest.MonkeyPatch) -> None:
    """Old kernels and some sandboxes refuse: the call takes the next best products."""
    asked = []

    def syscall(*numbers: int) -> int:
        asked.append(numbers)
        if answer is OSError:
            raise OSError("no such call")
        return -1

    operands = []

    def launch(*arguments: np.ndarray, **_: float) -> bool:
        operands.append(arguments[-1].dtype)
        return True

    asked_anew.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(syscall=syscall))
    asked_anew.setattr(amx, "FEATURES", _ALL)
    asked_anew.setattr(sys, "platform", "linux")
    asked_anew.setattr(sys.modules["rowmax.cpu.forward"], "launch", launch)
    q = torch.randn(1, 300, 1, 16, dtype=torch.bfloat16)
    for _ in range(2):
        rowmax.attention(q, q, q, backend="cpu")
    assert asked == [(158, 0x1023, 18)]
    assert operands == [np.uint32 if vector.PAIRS else np.float32] * 2


@pytest.mark.parametrize("missing", ["amx-tile", "amx-bf16", "avx512bf16"])
def test_without_a_feature_nothing_is_asked(missing: str, asked_anew: pytest.MonkeyPatch) -> None:
    asked_anew.setattr(amx, "FEATURES", _ALL - {missing})
    asked_anew.setattr(amx, "permitted", lambda: pytest.fail("asked"))
    assert not amx.ready()


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_values_that_are_not_finite(name: str, value: float) -> None:
    """Masked keys may hold anything; elsewhere inf and NaN spread as in float32."""
    torch.manual_seed(0)
    given = {n: torch.randn(1, 70, 2, 32).bfloat16() for n in ("q", "k", "v", "dout")}
    given[name][0, 41, 1, 3] = value
    answers = []
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v, dout = (t.to(dtype) for t in given.values())
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = rowmax.attention(*leaves, causal=True, backend="cpu")  # pyright: ignore
        answers.append((out, *torch.autograd.grad(out, leaves, dout)))  # pyright: ignore
    for a, b in zip(*answers, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=2e-2, atol=2e-2, equal_nan=True)


def test_the_only_key_has_a_weight_of_one() -> None:
    """Its score less the row's maximum may round to just below 0."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 200, 4, 8).bfloat16() for _ in range(3))
    out, lse = rowmax.attention(q, k[:, :1], v[:, :1], scale=1e-3, return_lse=True, backend="cpu")
    scores = torch.einsum("bihd,bjhd->bhi", q.double(), k[:, :1].double()) * 1e-3
    assert torch.equal(out, v[:, :1].expand_as(out))
    assert (lse - scores).abs().max() < 3e-7
