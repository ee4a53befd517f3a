"""What launches keep of kernels: compiled once, and whole before another thread finds them."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

compiled = importlib.import_module("rowmax.triton.compiled")
tl = importlib.import_module("triton.language")


class KERNEL:
    arg_names = ("t", "n", "C")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options of every kernel that is compiled, in place of the compiler and a device."""
    found: list[Any] = []

    def compile(launch: Any, *args: Any) -> Any:
        found.append(launch.options)
        return SimpleNamespace(src=SimpleNamespace(signature=launch.signature(*args).types))

    monkeypatch.setattr(compiled.Launch, "compile", compile)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(compiled, "_kernels", {})
    return found


def test_a_kernel_that_is_found_takes_what_launches_give(
    made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kernels(dict):
        def __setitem__(self, key: Any, kernel: Any) -> None:
            # from here on another thread may have its launcher made
            assert list(kernel.src.signature.values()) == ["*fp32", "i32"]
            super().__setitem__(key, kernel)

    monkeypatch.setattr(compiled, "_kernels", Kernels())
    launch = compiled.Launch(KERNEL, (1, 1, 1), {"num_warps": 4})
    args = ((torch.zeros(4), None), (3,), tl.constexpr(5))
    assert launch.loaded(*args) is launch.loaded(*args)
    assert len(made) == 1


def test_options_of_equal_values_are_not_the_same(made: list[Any]) -> None:
    for options in ({"num_warps": 4, "num_stages": 1}, {"num_warps": 4, "launch_pdl": True}):
        launch = compiled.Launch(KERNEL, (1, 1, 1), options)
        launch.loaded((torch.zeros(4),), (3,), tl.constexpr(5))
        assert made[-1] is options
