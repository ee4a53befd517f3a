"""Compile the Hopper forward for sm_90a without a GPU, and read the machine code."""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import pytest
import torch
from triton.backends.compiler import GPUTarget

from rowmax.gpu.hopper import documents, host, tiles
from rowmax.testing import Case, make

from . import arrivals, sass


class Line(NamedTuple):
    address: int
    text: str


@dataclass(frozen=True, eq=False)
class Built:
    """A compiled kernel."""

    plan: host.Plan
    stack: int  # bytes
    shared: int
    lines: list[Line]
    cubin: bytes

    def count(self, pattern: str) -> int:
        return sum(bool(re.search(pattern, line.text)) for line in self.lines)

    def barriers(self) -> list[str]:
        """Return the addresses of the barriers in shared memory."""
        inits = (re.search(r"SYNCS\.EXCH\.64 URZ, \[([^]]+)\]", line.text) for line in self.lines)
        return [re.sub(r"U?R\d+\+?|URZ\+?", "", found[1]) for found in inits if found]

    def partitions(self) -> list[list[Line]]:
        """Return the code of each partition of a block: all threads meet before and after."""
        found: list[list[Line]] = [[]]
        for line in self.lines:
            found[-1].append(line)
            if re.search(r"\bBAR\.SYNC\S* 0x1\b", line.text):
                found.append([])
        return found

    def too_early(self, consumers: int) -> list[Line]:
        """Return the arrivals of one thread for a warpgroup that may come too early.

        Since the warpgroup last read or wrote shared memory, in the order of addresses, its threads
        have not met: others may not have read yet. Or loads had not arrived when they met.
        """
        parts = [part for part in self.partitions() if count(part, "HGMMA")]
        assert len(parts) == consumers  # the others are warps, whose lanes go together
        late = arrivals.too_early(self.cubin)
        found = [line for part in parts for line in part if line.address in late]
        for part in parts:
            busy = False
            assert count(part, "SYNCS.ARRIVE") > 0
            for line in part:
                if re.search(r"\b(LDS|LDSM|STS|STSM)\b", line.text):
                    busy = True
                elif "BAR.SYNC" in line.text:
                    busy = False
                elif busy and "SYNCS.ARRIVE" in line.text:
                    found.append(line)
        return found

    def loops(self, stores: int = 0) -> list[list[Line]]:
        """Return the loops over key tiles: innermost back branches with products and ``stores``.

        (Waits at a barrier lie out of line and branch back too, around the stores of a finished
        tile among others.)
        """
        bodies = [b for b in self._loops_with_products if count(b, "STG") == stores]
        return [b for b in bodies if not any(_within(other, b) for other in bodies)]

    @cached_property
    def _loops_with_products(self) -> list[list[Line]]:
        spans = []
        for line in self.lines:
            target = "BRA" in line.text and _BACK.search(line.text)
            if target and int(target[1], 16) <= line.address:
                spans.append((int(target[1], 16), line.address))
        bodies = [[x for x in self.lines if a <= x.address <= b] for a, b in spans]
        return [b for b in bodies if any("HGMMA" in x.text for x in b)]


_LABEL = re.compile(r"`\((\.L_x_\d+)\)")
_BACK = re.compile(r"\bBRA (?:\S+, )?(0x[0-9a-f]+)")


def count(body: list[Line], text: str) -> int:
    pattern = re.compile(rf"\b{text}\b")
    lines = (x.text for x in body if text in x.text) if text.isalnum() else (x.text for x in body)
    return sum(pattern.search(x) is not None for x in lines)


def _within(a: list[Line], b: list[Line]) -> bool:
    inside = b[0].address <= a[0].address and a[-1].address <= b[-1].address
    return inside and a is not b


@lru_cache
def build(
    case: Case,
    dtype: torch.dtype = torch.bfloat16,
    clocks: int = 0,
    lags: bool = False,
    mends: bool = False,
    arriving: bool = False,
    parts: int = 1,
) -> Built:
    """Return the kernel of this case on a GPU with as many processors as an H200.

    ``clocks``: the events whose clocks it stores. ``lags``: with a reference that lags, and scores
    added to a bias; ``mends``: the second kernel of that plan. ``arriving``: its keys arrive
    while it runs. ``parts``: those of the keys of a tile.
    """
    problem, tensors = make(case, dtype=dtype).problem()
    out = torch.empty(problem.out_shape, dtype=dtype)
    lse = torch.empty(problem.lse_shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "processors", lambda _: 132)
        patch.setattr(tiles, "ONTO_OPERATIONS", 0.0 if lags else math.inf)
        words = torch.zeros(64, dtype=torch.int32)
        patch.setattr(host.packed, "order", lambda *_: host.packed.Order(*[words] * 5))
        patch.setattr(host, "spans_of", lambda *_: documents.Spans(*[words] * 4))
        plan = host.build_plan(problem, tensors, out, None, parts, CLOCKS=clocks, LAGS=lags)
        t = host.pointers(plan, problem, tensors, out, lse)
        t = t._replace(clocks=words if clocks else None)
        if arriving:
            t = t._replace(arrived=words, needed=words)
    wanted = plan.mends if mends else plan
    assert wanted is not None
    launch = wanted.launch
    args = launch.arguments(t, host.bases(*tensors[:4], out))
    kernel = launch.compile(*args, target=GPUTarget("cuda", 90, 32))
    return _read(plan, kernel.asm["cubin"], kernel.metadata.shared)


def _read(plan: host.Plan, cubin: bytes, shared: int) -> Built:
    code, labels = sass.instructions(cubin)
    address = {label: hex(code[n][0]) for label, n in labels.items() if n < len(code)}
    lines = [
        Line(at, _LABEL.sub(lambda m: address[m[1]], text) if "`" in text else text)
        for at, text in code
    ]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [sass.TOOLS / "cuobjdump", "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        )
    stack = re.search(r"STACK:(\d+)", usage.stdout + usage.stderr)
    assert stack is not None
    return Built(plan, int(stack[1]), shared, lines, cubin)
