"""The errors of providers against the definition in float64, as shares of what is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..bench.cells import Cell
from ..bench.providers import arguments
from ..bench.run import Run
from ..bench.worker import Task, Worker
from ..testing import Call, Case, expected
from .checks import Values, judge

#: scores that the definition may hold, about a dozen times in float64
MOST = {"cuda": 2**27, "cpu": 2**23}


def error_rows(cell: Cell, run: Run) -> Iterator[dict[str, Any]]:
    """Yield a row for each provider: the largest error of out or of a gradient.

    One sequence and the query heads of one key head are compared, because the definition holds
    matrices.
    """
    device = run.pace.device
    small = replace(cell, b=1, hq=cell.hq // cell.hk, hk=1)
    if small.hq * small.n**2 > MOST[device]:
        run.say(f"{cell.name} error: too long for the dense definition, not compared")
        return
    worker = Worker(run.pace)
    x = worker.inputs_for(small)
    options = {key: y for key, y in arguments(small, x).items() if y is not None}
    want = expected(Call(Case(cell.name), (x.q, x.k, x.v), options), x.dout, None)
    for name in run.providers:
        if name == "none" or (cell.dropout and not name.startswith("rowmax")):
            continue  # a peer draws weights of its own
        try:
            result = judge(_values(worker, small, name), want)
        except Exception as error:
            run.say(f"{cell.name} error: {name}: {type(error).__name__}: {str(error)[:200]}")
            continue
        share = max(x for x in result.shares if x is not None)
        run.failed += [f"{cell.name}: {name}: {text}" for text in result.wrong]
        row = {key: getattr(cell, key) for key in ("dtype", "b", "n", "hq", "hk", "d")}
        yield row | run.facts | {
            "cell": cell.name, "pass": "error", "provider": name, "error_share": f"{share:.3f}",
        }  # fmt: skip
    worker.release()


def _values(worker: Worker, cell: Cell, name: str) -> Values:
    """Return out and the gradients that a provider computes."""
    (out,) = worker.made(Task(cell, "forward", name)).results()
    gradients: list[Tensor] = worker.made(Task(cell, "both", name)).results()
    names = ("dq", "dk", "dv", "dbias")
    return {"out": out.detach()} | dict(zip(names, gradients, strict=False))
