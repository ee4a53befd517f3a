"""The functions that ranks run for the tests of stages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import rowmax
from rowmax import distributed as rd
from rowmax.distributed import Layout, collectives, exchange
from rowmax.distributed.strategies import keys as by_keys

from .programs import errors_of, in_stages


class Events:
    """The order in which copies begin, are waited for, and calls run."""

    def __init__(self, fail: int | None = None) -> None:
        self.seen: list[str] = []
        self.calls = 0
        self.fail = fail  # the number of the call that raises

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the events of calls by keys."""
        wait, ready = collectives.Copy.wait, by_keys.prepared

        def begun(name: str) -> Any:
            real = getattr(exchange, name)

            def begin(*given: Any) -> Any:
                copy = real(*given)
                self.seen.append(f"begin {id(copy)}")
                return copy

            return mock.patch.object(exchange, name, begin)

        def waited(copy: collectives.Copy) -> list[Tensor]:
            self.seen.append(f"wait {id(copy)}")
            return wait(copy)

        def called(*given: Any) -> Any:
            self.calls += 1
            self.seen.append("call")
            if self.calls == self.fail:
                raise ValueError("a call that fails")
            return ready(*given)

        with (
            begun("begin_all_gather"),
            begun("begin_all_to_all"),
            mock.patch.object(collectives.Copy, "wait", waited),
            mock.patch.object(by_keys, "prepared", called),
        ):
            yield

    def numbered(self) -> list[str]:
        """Return the events, with a number for each copy in the order that they begin."""
        begun = [x.split()[1] for x in self.seen if x.startswith("begin")]
        assert len(set(begun)) == len(begun)
        number = {name: str(n) for n, name in enumerate(begun)}
        return [" ".join(number.get(word, word) for word in x.split()) for x in self.seen]


def staged(rank: int, stages: int, fail: int | None = None) -> tuple[list[str], list[str], str]:
    """Return the events of a forward and of its backward, two calls a stage, and the errors."""
    layout = Layout((((0, 64), (128, 192)), ((64, 128), (192, 256))))
    # full masks gather all rows: there are copies of both kinds
    q = torch.randn(1, 128, 8, 16).requires_grad_()
    k = torch.randn(1, 128, 4, 16).requires_grad_()

    def f() -> Any:
        return rd.attention(q, k, k, layout=layout, backend="torch")

    with in_stages(stages):
        out = f()
        events, texts = (Events(fail), Events(fail)), []
        for one, function in zip(events, (f, lambda: out.sum().backward()), strict=True):
            with one.recorded():
                texts += errors_of([function])
    return events[0].numbered(), events[1].numbered(), ", ".join(texts)


def equal_to_one_device(rank: int) -> float:
    """Return the share of dk and dv in bfloat16, of many chunks, with the bits of one device."""
    n = 16
    owned = [[(32 * c, 32 * c + 32) for c in range(r, n, 2)] for r in range(2)]
    layout = Layout(tuple(map(tuple, owned)))
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 32 * n, 2, 16, generator=generator).bfloat16() for _ in "qkvo")
    i = layout.positions(rank)
    found = []
    for rows, function, more in (
        (slice(None), rowmax.attention, {}),
        (i, rd.attention, {"layout": layout}),
    ):
        leaves = [t[:, rows].clone().requires_grad_() for t in (k, v)]
        out: Any = function(q[:, rows], *leaves, backend="torch", **more)
        found.append(torch.autograd.grad(out, leaves, dout[:, rows]))
    same = [(a[:, i] == b).double().mean() for a, b in zip(*found, strict=True)]
    return float(min(same))


def fails_alone(rank: int) -> str:
    """Return the error of a rank while the call of another one fails between its stages."""
    layout = Layout.zigzag(256, 3)
    x = torch.randn(1, layout.lengths[rank], 4, 16)
    events = Events(fail=1 if rank == 1 else None)
    with in_stages(4):
        rd.attention(x, x, x, layout=layout, backend="torch")
        with events.recorded():
            try:
                rd.attention(x, x, x, layout=layout, backend="torch")
            except (RuntimeError, ValueError) as error:
                waits = sum(e.startswith("wait") for e in events.seen)
                begins = sum(e.startswith("begin") for e in events.seen)
                assert waits >= begins
                return str(error)
    return "no error"
