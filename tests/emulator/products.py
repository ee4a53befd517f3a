"""Products of a warpgroup (wgmma): asynchronous, from shared memory.

A product is computed at some time between its issue and the wait for it, from what its operands
hold then. Its result raises when it is used before that wait.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from .memory import Shared
from .threads import at_end, here
from .values import Tensor, cast

_FLOAT32 = np.dtype(np.float32)


class Product:
    """The accumulator of a product that is not waited for yet."""

    def __init__(self, a: Any, b: Any, acc: Any, use_acc: Any) -> None:
        self.operands = a, b, acc, bool(use_acc)
        self.result: Tensor | None = None

    def compute(self) -> Tensor:
        if self.result is None:
            a, b, acc, use_acc = self.operands
            if isinstance(acc, Product):
                acc = acc.compute()
            x = cast(a.a, _FLOAT32) @ cast(b.a, _FLOAT32)
            self.result = Tensor(x + acc.a if use_acc else x)
        return self.result


def warpgroup_mma(a: Any, b: Shared, acc: Any, use_acc: Any = True, is_async: bool = False) -> Any:
    """Issue ``a @ b``, or ``acc + a @ b``."""
    assert is_async, "only asynchronous products are modelled"
    product = Product(a, b, acc, use_acc)
    here.thread.products.append(product)
    if random.random() < 0.5:
        for one in here.thread.products:
            one.compute()
    return product


def warpgroup_mma_wait(n: int, deps: list[Any]) -> Any:
    """Wait until at most n products are in flight; return ``deps`` with their results."""
    while len(here.thread.products) > n:
        here.thread.products.pop(0).compute()
    found = []
    for x in deps:
        if isinstance(x, Product):
            assert x not in here.thread.products, "a product is used before it was waited for"
            x = x.result
        found.append(x)
    return found[0] if len(found) == 1 else tuple(found)


def _finish() -> None:
    assert not here.thread.products, "a product was never waited for"


at_end.append(_finish)
