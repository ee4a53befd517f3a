"""A backward writes dk and dv to places where its backend can, and else returns them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rowmax import tiled
from rowmax.call import dispatch
from rowmax.call.dispatch import Prepared, choose, prepared
from rowmax.call.inputs import Gradients, Options, Places, Tensors, Wanted
from rowmax.call.problem import problem_of


def test_gradients_of_keys_go_to_places_where_a_backend_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else they are returned; the fields of the places arrive in their order."""
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    tensors, options = Tensors(q, k, v), Options(0.3, backend="torch")
    out, lse = prepared(tensors, options).forward(tensors)
    given = (tensors, out, lse, torch.randn_like(out), None)
    wanted = Wanted(True, True, True, False, False)
    memory = [torch.full((10, 16), float("nan")) for _ in range(2)]
    rows = [torch.tensor(some) for some in ([4, 0, 9, 2, 7], [1, 3, 5, 6, 8])]
    places = Places(*memory, *(4 * some for some in rows))
    want = prepared(tensors, options).backward(*given, wanted, wide=True, places=places)
    assert want.k is not None
    assert want.v is not None
    assert all(t.isnan().all() for t in memory)

    def backward(*arguments: Any) -> Gradients:
        *call, to = arguments
        found = tiled.backward(*call)
        for name in "kv":
            at = getattr(to, f"d{name}_rows") // 4
            getattr(to, f"d{name}")[at] = getattr(found, name).view(5, 16)
        return found._replace(k=None, v=None)

    backend = SimpleNamespace(backward=backward, takes_places=lambda p: p.wide)
    plan = choose(problem_of(tensors, options)._replace(wide=True), "backward", "torch")
    plan = plan._replace(first=backend, whole=backend)
    monkeypatch.setattr(dispatch, "choose", lambda *_: plan)
    got = Prepared(options, problem_of(tensors, options)).backward(
        *given, wanted, wide=True, places=places
    )
    assert (got.k, got.v) == (None, None)
    assert torch.equal(got.q, want.q)  # pyright: ignore
    for to, at, t in zip(memory, rows, (want.k, want.v), strict=True):
        assert torch.equal(to[at], t.view(5, 16))
