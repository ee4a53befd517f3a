"""A host with two kinds of GPU, by what torch would say of it: nothing comes from the current one.

``tests/gpu/two_devices.py`` is the same with devices.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rowmax.call import dispatch as backends
from rowmax.call.problem import Options, Problem, Tensors, problem_of

pytest.importorskip("triton.experimental.gluon")

tiles = importlib.import_module("rowmax.gpu.tiles")
kernel_args = importlib.import_module("rowmax.gpu.kernel_args")
KINDS = {0: ("NVIDIA A100", (8, 0), 163 << 10), 1: ("NVIDIA H100", (9, 0), 227 << 10)}
KINDS[2] = ("Tesla T4", (7, 5), 64 << 10)


@pytest.fixture(autouse=True)
def current(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Return the current device, which a test may change."""
    now = {"device": 0}

    def kind(device: Any) -> tuple[str, tuple[int, int], int]:
        index = device.index if isinstance(device, torch.device) else device
        return KINDS[now["device"] if index is None else index]

    def properties(device: Any = None) -> Any:
        name, _, shared = kind(device)
        return SimpleNamespace(name=name, shared_memory_per_block_optin=shared, warp_size=32)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now["device"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d=None: kind(d)[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    backends.choose.cache_clear()
    tiles._limits.cache_clear()
    yield now
    backends.choose.cache_clear()
    tiles._limits.cache_clear()


def posed(index: int | None, dtype: torch.dtype = torch.float16) -> Problem:
    q = torch.zeros(1, 1024, 2, 64, dtype=dtype)  # few keys have a kernel of their own
    problem = problem_of(Tensors(q, q, q), Options(scale=1.0))
    return problem._replace(device="cuda", device_index=index)


@pytest.mark.parametrize("call", ["forward", "backward"])
@pytest.mark.parametrize("now", [0, 1, 2])
def test_the_backend_is_that_of_the_tensors_device(
    call: backends.Call, now: int, current: dict[str, int]
) -> None:
    current["device"] = now
    for _ in range(2):
        found = [backends.choose(posed(n), call).jobs[0].backend for n in KINDS]
        assert found == ["triton", "hopper", "triton"]
    bfloats = [backends.choose(posed(n, torch.bfloat16), call).jobs[0].backend for n in KINDS]
    assert bfloats == ["triton", "hopper", "torch"]
    assert "compute capability 9.0" in (backends.refusal("hopper", posed(0), call) or "")
    assert backends.refusal("hopper", posed(1), call) is None


def test_a_problem_knows_its_device() -> None:
    q = torch.empty(1, 8, 2, 64, device="meta")
    assert problem_of(Tensors(q, q, q), Options(scale=1.0)).device_index == q.device.index

    class On1:
        def __init__(self, t: torch.Tensor) -> None:
            self.t = t

        def __getattr__(self, name: str) -> Any:
            return torch.device("cuda", 1) if name == "device" else getattr(self.t, name)

    on_1: Any = On1(torch.zeros(1, 8, 2, 64))
    found = problem_of(Tensors(on_1, on_1, on_1), Options(scale=1.0))
    assert (found.device, found.device_index) == ("cuda", 1)


def test_tiles_are_those_of_the_device(current: dict[str, int]) -> None:
    for now in KINDS:
        current["device"] = now
        for n, (name, version, shared) in KINDS.items():
            found = tiles.limits_of(torch.device("cuda", n))
            assert (found.name, found.shared, found.lanes) == (name, shared, 32)
            assert (found.split, found.wgmma) == (version >= (8, 0), version == (9, 0))
        assert tiles.limits_of(torch.device("cuda")).name == KINDS[now][0]  # the current one


def test_products_are_those_of_the_device(current: dict[str, int]) -> None:
    for now in KINDS:
        current["device"] = now
        found = []
        for n in KINDS:
            q = SimpleNamespace(dtype=torch.float32, is_cuda=True, device=torch.device("cuda", n))
            found.append(kernel_args.precision_of(SimpleNamespace(q=q)))
        assert found == ["tf32x3", "tf32x3", "ieee"]
