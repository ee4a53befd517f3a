"""Kernels compiled ahead: after warmup the first call compiles none."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import rowmax

CODE = """
import torch
import rowmax
from rowmax.cpu.kernel import _KERNELS

def ready():
    return sum(len(compiled.signatures) for compiled in _KERNELS)

state = torch.get_rng_state()
done = rowmax.warmup(4, 32, kv_heads=2, lengths=(300, (1, 70)), causal=True, bias="1hqk", sink=True)
assert torch.equal(state, torch.get_rng_state())
before = ready()
sink = torch.randn(4, requires_grad=True)
for nq, nk in ((300, 300), (1, 70)):
    q = torch.randn(1, nq, 4, 32, requires_grad=True)
    k, v = (torch.randn(1, nk, 2, 32, requires_grad=True) for _ in range(2))
    bias = torch.randn(1, 4, nq, nk, requires_grad=True)
    rowmax.attention(q, k, v, causal=True, bias=bias, sink=sink).sum().backward()
print(before > 0, ready() - before, {step.backends for step in done.steps})
"""


@pytest.mark.timeout(600)
def test_after_warmup_the_first_call_compiles_and_loads_nothing(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("numba")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True 0 {('cpu',)}"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, torch.dtype]]:
    """Return a list of the calls that reach the torch backend."""
    from rowmax import tiled

    found: list[tuple[str, int, torch.dtype]] = []
    forward, backward = tiled.forward, tiled.backward

    def see_forward(problem, tensors):
        found.append(("forward", problem.nq, problem.dtype))
        return forward(problem, tensors)

    def see_backward(problem, *rest):
        found.append(("backward", problem.nq, problem.dtype))
        return backward(problem, *rest)

    monkeypatch.setattr(tiled, "forward", see_forward)
    monkeypatch.setattr(tiled, "backward", see_backward)
    return found


def test_both_directions_of_every_dtype_run(seen):
    dtypes = (torch.float32, torch.bfloat16)
    steps = []
    done = rowmax.warmup(
        2,
        16,
        dtype=dtypes,
        device="cpu",
        backend="torch",
        alibi=True,
        dropout_p=0.1,
        on_step=lambda n, total, step: steps.append((n, total, step)),
    )
    assert {x[0] for x in seen} == {"forward", "backward"}
    assert {x[2] for x in seen} == set(dtypes)
    assert [n for n, *_ in steps] == [1, 2, 3, 4]
    assert {total for _, total, _ in steps} == {4}
    assert {step for *_, step in steps} == set(done.steps)
    assert all(step.backends == ("torch",) for step in done.steps)
    assert str(done).count("torch") == 4


def test_without_gradients_no_backward_runs(seen):
    done = rowmax.warmup(2, 16, dtype=torch.float32, gradient=False, device="cpu", backend="torch")
    assert [x[0] for x in seen] == ["forward"]
    assert [step.call for step in done.steps] == ["forward"]


def test_a_mask_with_tensors_keeps_its_length(seen):
    mask = rowmax.Documents(torch.arange(300) // 40)
    options = {"dtype": torch.float32, "device": "cpu", "backend": "torch"}
    rowmax.warmup(2, 16, lengths=300, mask=mask, **options)
    assert {n for _, n, _ in seen} == {300}
    seen.clear()
    rowmax.warmup(2, 16, lengths=(90, 300), mask=rowmax.Window(5, 0), **options)
    assert {n for _, n, _ in seen} == {90, 260}  # more tokens take the same kernels


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"heads": 0}, "heads: got 0; want an int of at least 1"),
        ({"kv_heads": 3}, "q: got 4 heads; want a multiple of the 3 heads"),
        ({"lengths": 0}, "lengths: got 0; want an int of at least 1"),
        ({"lengths": ()}, "lengths: got (); want at least one length"),
        ({"lengths": [(1, 2, 3)]}, "lengths: got (1, 2, 3)"),
        ({"lengths": 1.5}, "lengths: got 1.5; want an int, or several"),
        ({"dtype": "float32"}, "dtype: got 'float32'; want a torch.dtype or several"),
        ({"dtype": ()}, "dtype: got (); want a torch.dtype or several"),
        ({"bias": "xyz"}, "bias: got 'xyz'; want four letters of bhqk or 1"),
        ({"sink": torch.zeros(4)}, "sink: got Tensor; want True or False"),
        ({"backend": "cudnn"}, "backend: got 'cudnn'"),
        ({"is_causal": True}, "unexpected keyword argument 'is_causal'; want causal=True"),
        ({"softcap": -1.0}, "softcap"),
    ],
)
def test_bad_arguments_are_named(arguments, wanted: str):
    given = {"heads": 4, "head_dim": 16, "device": "cpu"} | arguments
    with pytest.raises((TypeError, ValueError)) as error:
        rowmax.warmup(**given)
    assert wanted in str(error.value)
