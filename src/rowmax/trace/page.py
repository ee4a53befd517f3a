"""The page of a setting: its parts in one file, with every number inside."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from ..errors import bad
from .record import NUMBER, Pass, defined, record
from .setting import MASKS, Call, Setting, calls

#: bytes of a page
MOST_BYTES = 2_000_000
#: printed digits after the point
DIGITS = 4


def page(setting: Setting, first: str = "causal") -> str:
    """Return the page, which begins with the mask ``first``.

    Raises:
        ValueError: the mask is none of ``MASKS``, or the page would be too large.
    """
    if first not in MASKS:
        raise bad("mask", repr(first), f"one of {', '.join(MASKS)}")
    text = json.dumps(recording(setting, first), separators=(",", ":"), ensure_ascii=False)
    parts = {
        "STYLE": _file("page.css"),
        "SCRIPT": _file("page.js"),
        "RECORDING": text.replace("<", "\\u003c"),  # nothing in it ends the element
    }
    whole = _file("page.html")
    for name, part in parts.items():
        whole = whole.replace("{{" + name + "}}", part)
    size = len(whole.encode())
    if size > MOST_BYTES:
        want = f"at most {MOST_BYTES / 1e6:g} MB: fewer queries or keys, a smaller head_dim"
        raise bad("page", f"{size / 1e6:.1f} MB", f"{want} or larger tiles")
    return whole


def recording(setting: Setting, first: str) -> dict[str, Any]:
    """Return what the page shows: every number is rounded to ``DIGITS``, -inf is None."""
    masks = list(calls(setting))
    shared = masks[0]
    q, k, v = (t[0, :, 0] for t in shared.tensors[:3])
    return {
        "queries": shared.problem.nq,
        "keys": shared.problem.nk,
        "headDim": shared.problem.d,
        "blockQ": setting.block_q,
        "blockK": setting.block_k,
        "scale": round(shared.problem.scale, DIGITS),
        "softcap": shared.problem.softcap,
        "seed": setting.seed,
        "bytes": NUMBER,
        "digits": DIGITS,
        "first": first,
        "q": numbers(q),
        "k": numbers(k),
        "v": numbers(v),
        "dO": numbers(shared.dout[0, :, 0]),
        "masks": [_mask(call) for call in masks],
    }


def numbers(t: Tensor) -> Any:
    """Return nested lists of the rounded numbers of a tensor, None for -inf.

    >>> numbers(torch.tensor([0.00004, -torch.inf, -0.00001, 1.25]))
    [0, None, 0, 1.25]
    """
    return _rounded(t.tolist())


def _rounded(x: Any) -> Any:
    if isinstance(x, list):
        return [_rounded(y) for y in x]
    if x == -torch.inf:
        return None
    x = round(x, DIGITS)
    return int(x) if x == int(x) else x


def _mask(call: Call) -> dict[str, Any]:
    """Return the recording of one mask."""
    return {
        "name": call.name,
        "text": call.text,
        "states": call.states.tolist(),
        "seen": ["".join("01"[x] for x in row) for row in call.seen.tolist()],
        "dense": {name: numbers(t) for name, t in defined(call)._asdict().items()},
        "passes": {name: _pass(one) for name, one in record(call).items()},
    }


def _pass(one: Pass) -> dict[str, Any]:
    steps = [
        {"kind": step.kind, "i": step.i, "j": step.j, "read": step.read, "done": step.done}
        | {name: numbers(t) for name, t in step.values.items()}
        for step in one.steps
    ]
    return {"steps": steps, "unskipped": one.unskipped}


def _file(name: str) -> str:
    return files(__package__ or "rowmax.trace").joinpath(name).read_text(encoding="utf-8")
