"""Calls that several backends make together, and what a backend that is named refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import rowmax
from rowmax import tiled
from rowmax.call import dispatch as backends
from rowmax.call.problem import Wanted

WITHOUT = "it makes none today"
Named = dict[str, Tensor]


def inputs(*grads: str) -> Named:
    """Return inputs of which these have gradients."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"q": (2, 9, 2, 8), "k": (2, 7, 2, 8), "v": (2, 7, 2, 8), "bias": (2, 9, 7)}
    found = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    found["sink"] = torch.randn(2, generator=generator)
    return {name: t.requires_grad_(name in grads) for name, t in found.items()}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Wanted]]]:
    """Record what is wanted of the cpu backend, without its dbias, and of the torch backend."""
    cpu = pytest.importorskip("rowmax.cpu")
    found: list[tuple[str, Wanted]] = []

    def watched(name: str, module: Any) -> Any:
        backward = module.backward

        def run(*args: Any) -> Any:
            found.append((name, args[-1]))
            return backward(*args)

        return run

    def lacks(problem: Any, call: str) -> dict[str, str]:
        return {"dbias": WITHOUT} if call == "backward" and problem.bias is not None else {}

    monkeypatch.setattr(cpu, "lacks", lacks, raising=False)
    monkeypatch.setattr(cpu, "backward", watched("cpu", cpu))
    monkeypatch.setattr(tiled, "backward", watched("torch", tiled))
    backends.choose.cache_clear()
    yield found
    backends.choose.cache_clear()


def gradients(t: Named, **options: Any) -> Named:
    out = rowmax.attention(**t, **options)
    leaves = {name: x for name, x in t.items() if x.requires_grad}
    grads = torch.autograd.grad(out.square().sum(), list(leaves.values()))
    return dict(zip(leaves, grads, strict=True))


@pytest.mark.parametrize(
    ("grads", "parts"),
    [
        ("q k v bias sink", {"cpu": (1, 1, 1, 0, 1, 0), "torch": (0, 0, 0, 1, 0, 0)}),
        ("k bias", {"cpu": (0, 1, 0, 0, 0, 0), "torch": (0, 0, 0, 1, 0, 0)}),
        ("bias", {"torch": (0, 0, 0, 1, 0, 0)}),
        ("q sink", {"cpu": (1, 0, 0, 0, 1, 0)}),
    ],
)
def test_each_gradient_comes_from_the_backend_of_its_job(
    grads: str, parts: dict[str, tuple[int, ...]], asked: list[tuple[str, Wanted]]
) -> None:
    t = inputs(*grads.split())
    got, want = gradients(t), gradients(t, backend="reference")
    assert dict(asked) == parts
    assert got.keys() == want.keys()
    for name, x in got.items():
        torch.testing.assert_close(x, want[name])


def test_a_warm_call_finds_its_plan(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    gradients(inputs("q", "bias"))

    def never(*_: Any) -> None:
        raise AssertionError("a plan is made again")

    monkeypatch.setattr(backends, "refusal", never)
    monkeypatch.setattr(backends, "lacks", never)
    gradients(inputs("q", "bias"))
    gradients(inputs("bias"))
    assert len(asked) == 5


def test_a_named_backend_refuses_before_it_computes(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("computed before it was refused")

    text = rf"^backend: got 'cpu'; it does not make dbias of this call \(not cpu: {WITHOUT}\)"
    with monkeypatch.context() as patch:
        patch.setattr("rowmax.cpu.forward", never)
        for grads in (("bias",), ("q", "bias")):
            with pytest.raises(ValueError, match=text):
                rowmax.attention(**inputs(*grads), backend="cpu")
    rowmax.attention(**inputs(), backend="cpu")
    with torch.no_grad():
        rowmax.attention(**inputs("bias"), backend="cpu")
    assert gradients(inputs("q", "sink"), backend="cpu").keys() == {"q", "sink"}
    assert asked == [("cpu", Wanted(True, False, False, False, True))]


def test_a_transformed_call_is_refused_in_its_backward(asked: list[Any]) -> None:
    t = inputs()

    def loss(bias: Tensor) -> Tensor:
        return rowmax.attention(**{**t, "bias": bias}, backend="cpu").sum()  # pyright: ignore

    with pytest.raises(ValueError, match="it does not make dbias"):
        torch.func.grad(loss)(t["bias"])
    assert not asked


def test_a_named_backend_that_refuses_every_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def supports(problem: Any, call: str) -> str | None:
        return None if call == "forward" else "forward only"

    monkeypatch.setattr(tiled, "supports", supports)
    backends.choose.cache_clear()
    try:
        with pytest.raises(ValueError, match="cannot take this backward: torch: forward only"):
            rowmax.attention(**inputs("q"), backend="torch")
        rowmax.attention(**inputs(), backend="torch")
    finally:
        backends.choose.cache_clear()
    # the reason for the forward comes first
    with pytest.raises(ValueError, match="cannot take this forward: triton: it runs on"):
        rowmax.attention(**inputs("q"), backend="triton")
