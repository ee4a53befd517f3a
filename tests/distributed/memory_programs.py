"""The functions that ranks run for the tests of memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rowmax
from rowmax import distributed as rd
from rowmax.call.inputs import Gradients
from rowmax.distributed import operators
from rowmax.distributed.attention import normalized_rows
from rowmax.distributed.groups import group_of
from rowmax.distributed.shared import Region, regions_of
from rowmax.distributed.strategies import heads as by_heads
from rowmax.distributed.strategies import keys as by_keys
from rowmax.distributed.strategies import queries as by_queries

from .programs import copies, even, in_stages, mesh_of

#: gloo's threads may drop a tensor after the collective has returned, which only adds to a peak
TRIES = 4


class Live(TorchDispatchMode):
    """The bytes of tensors that are made within it and still live, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.live = self.peak = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _is(t)}
        found = func(*args, **(kwargs or {}))
        for key in [key for key, (ref, _) in self.known.items() if ref.expired()]:
            self.live -= self.known.pop(key)[1]
        for t in tree_leaves(found):
            storage = t.untyped_storage() if _is(t) else None
            if storage is None or storage._cdata in self.known or storage._cdata in before:
                continue
            self.known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self.live += storage.nbytes()
            self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return found


def _is(t: Any) -> bool:
    return isinstance(t, Tensor)


class _Empty:
    """A call that computes nothing: memory is that of rows, of results and of their sums."""

    def __init__(self, tensors: Any, options: Any) -> None:
        pass

    def forward(
        self, tensors: Any, into: Tensor | None = None, gap: None = None
    ) -> tuple[Tensor, Tensor]:
        q, v = tensors.q, tensors.v
        b, n, h, _ = q.shape
        out = q.new_empty((b, n, h, v.shape[3])) if into is None else into
        return out, q.new_empty((b, h, n), dtype=torch.float32)

    def backward(
        self,
        tensors: Any,
        *given: Any,
        wide: bool = False,
        part: bool = False,
        into: Tensor | None = None,
        places: None = None,
    ) -> Gradients:
        q, k, v = tensors[:3]
        wide = wide or any(x is True for x in given)
        parts = (t.new_empty(t.shape, dtype=torch.float32 if wide else t.dtype) for t in (k, v))
        return Gradients(q.new_empty(q.shape) if into is None else into, *parts)


@contextlib.contextmanager
def _computing(real: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in () if real else (by_keys, by_heads, by_queries):
            stack.enter_context(mock.patch.object(module, "prepared", _Empty))
        yield


def memory(
    rank: int, strategy: str, stages: int, shape: tuple[int, ...], way: str, n: int, real: bool
) -> list[dict[str, int]]:
    """Return the bytes of a forward and of its backward: measured, and by the formula."""
    layout = rd.Layout.zigzag(n, 4)
    own = layout.lengths[rank]
    q, k, v = (torch.randn(1, own, h, 32).bfloat16() for h in (8, 4, 4))
    mesh: Any = mesh_of(*shape) if shape else None
    options: dict[str, Any] = {"mask": rowmax.Causal(), "backend": "torch"}
    found = []
    with copies(way), in_stages(stages), _computing(real):
        flags = (strategy, False, True)
        place, tensors, rest = normalized_rows(
            (q, k, v), group_of(mesh), (layout, None), flags, options
        )
        given = (*place, *tensors, *rest)
        out, lse = operators._forward_kernel(*given)  # ranks agree, and shared memory grows
        wanted = [True, True, True, False, False, False]
        back = (torch.zeros_like(out), None, out, lse, wanted, *given)
        operators._backward_kernel(*back)
        with mock.patch("rowmax.distributed.explain.stages_of", even(stages)):
            plan = rd.explain(q, k, v, mesh=mesh, layout=layout, strategy=strategy, **options)
        for kernel, inputs, one in (
            (operators._forward_kernel, given, plan.forward),
            (operators._backward_kernel, back, plan.backward),
        ):
            live, results, shared = min((_run(kernel, inputs) for _ in range(TRIES)), key=_peak)
            found.append({
                "peak": live.peak,
                "shared": shared,
                "largest": live.largest,
                "formula": one.memory,
                "results": results,
                "own": k.nbytes + v.nbytes,
                "q": q.nbytes,
            })  # fmt: skip
    return found


def _run(kernel: Any, inputs: Any) -> tuple[Live, int, int]:
    """Return what lived while the kernel ran, and the bytes of its results and of files."""
    asked, opened = [], Region.open

    def count(region: Region, size: int, **more: bool) -> Tensor:
        regions = regions_of(group_of(None), torch.device("cpu"))
        assert regions is not None
        asked.append(2 * size if region in regions.rows else size)  # they take turns
        return opened(region, size, **more)

    with mock.patch.object(Region, "open", count), Live() as live:
        results = kernel(*inputs)
    return live, sum(t.nbytes for t in results), sum(asked)


def _peak(run: tuple[Live, int, int]) -> int:
    return run[0].peak
