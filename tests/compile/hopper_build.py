"""Compile the Hopper kernels for sm_90a with no GPU in sight, and read what came of it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from rowmax.hopper.gradients.kernel import backward
from rowmax.hopper.gradients.tiles import GradientConfig, GradientConstants, GradientTile
from rowmax.hopper.gradients.wide_kernel import wide
from rowmax.hopper.kernel import forward
from rowmax.hopper.tiles import ROWS, Config, Constants, Tile

_DTYPES = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}
_FLOATS = ("lse", "alibi", "sink")
_INTEGERS = (
    "table", "ends", "counter", "cu_q", "cu_k", "lengths", "spans", "q_ids", "k_ids",
    "q_range", "k_range",
)  # fmt: skip
_GRADIENT_INTEGERS = (
    "table", "ends", "counter", "cu_q", "cu_k", "lengths", "spans", "q_ids", "k_ids",
)  # fmt: skip


class Line(NamedTuple):
    address: int
    text: str


class Built(NamedTuple):
    """What the compiler made of a kernel."""

    stack: int  # bytes
    shared: int
    lines: list[Line]

    def count(self, pattern: str) -> int:
        return sum(bool(re.search(pattern, line.text)) for line in self.lines)

    def loops(self) -> list[list[Line]]:
        """The loops over key tiles: of the branches that go back the innermost with products.

        (What waits at a barrier is moved out of line and branches back too, around the stores of
        a finished tile among others.)
        """
        spans = []
        for line in self.lines:
            target = re.search(r"\bBRA (?:\S+, )?(0x[0-9a-f]+)", line.text)
            if target and int(target[1], 16) <= line.address:
                spans.append((int(target[1], 16), line.address))
        bodies = [[x for x in self.lines if a <= x.address <= b] for a, b in spans]
        bodies = [b for b in bodies if any("HGMMA" in x.text for x in b)]
        bodies = [b for b in bodies if not any(re.search(r"\bSTG\b", x.text) for x in b)]
        return [b for b in bodies if not any(_within(other, b) for other in bodies)]


def _within(a: list[Line], b: list[Line]) -> bool:
    inside = b[0].address <= a[0].address and a[-1].address <= b[-1].address
    return inside and a is not b


def config(d: int, dv: int, tile: Tile, **features: Any) -> Config:
    return Config(
        D=d,
        DV=dv,
        DV_OUT=dv,
        BLOCK_K=tile.block_k,
        STAGES=tile.stages,
        Q_STAGES=tile.q_stages,
        WARPGROUPS=tile.warpgroups,
        ROUND_LATE=tile.warpgroups == 3,
        **features,
    )


@lru_cache
def build(c: Config, registers: tuple[int, int], dtype: str = "bf16", bias: str = "bf16") -> Built:
    return _built(forward, _signature(c, dtype, bias), Constants(c), registers)


def gradient_config(d: int, dv: int, tile: GradientTile, **features: Any) -> GradientConfig:
    return GradientConfig(
        D=d,
        DV=dv,
        D_OUT=d,
        DV_OUT=dv,
        BLOCK_Q=tile.block_q,
        Q_STAGES=tile.q_stages,
        DO_STAGES=tile.do_stages,
        HELD=tile.held,
        **features,
    )


@lru_cache
def build_backward(c: GradientConfig, registers: tuple[int, int], dtype: str = "bf16") -> Built:
    kernel, kinds = (
        (backward, _backward_signature(c, dtype))
        if c.KIND == "all"
        else (wide, _wide_signature(c, dtype))
    )
    return _built(kernel, kinds, GradientConstants(c), registers)


def _built(kernel: Any, kinds: dict[str, str], c: Any, registers: tuple[int, int]) -> Built:
    names = kernel.arg_names
    constants = {"C": c, "R0": registers[0], "R1": registers[1]}
    source = GluonASTSource(
        kernel,
        {n: kinds.get(n, "constexpr") for n in names},
        {(names.index(n),): v for n, v in constants.items()},
        {
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(names)
            if kinds.get(n, "")[:1] == "*"
        },
    )
    made = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "enable_fp_fusion": True}
    )
    return _read(made.asm["cubin"], made.metadata.shared)


def copied(kind: str, *box: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for(list(box), _DTYPES[kind])
    return f"tensordesc<{kind}[{', '.join(map(str, box))}],{layout!r}>"


def _backward_signature(c: GradientConfig, dtype: str) -> dict[str, str]:
    k = GradientConstants(c)
    kinds = dict.fromkeys(backward.arg_names, "i32")
    kinds |= {
        "q": copied(dtype, 1, c.BLOCK_Q, 1, c.D),
        "do": copied(dtype, 1, c.BLOCK_Q, 1, c.DV),
        "rows": copied("fp32", 1, 2, c.BLOCK_Q),
        "k": copied(dtype, 1, k.BLOCK_K.value, 1, c.D),
        "v": copied(dtype, 1, k.BLOCK_K.value, 1, c.DV),
        "dq": copied("fp32", 1, k.DQ_ROWS.value, k.DQ_COLS.value),
        "bias": copied(dtype, 1, 1, c.BLOCK_Q, k.BLOCK_K.value),
        "dbias": copied(dtype, 1, 1, c.BLOCK_Q, k.TOKENS.value),
    }
    kinds |= dict.fromkeys(("turns", *_GRADIENT_INTEGERS), "*i32")
    kinds |= {"alibi": "*fp32", "dk": "*" + dtype, "dv": "*" + dtype}
    kinds |= dict.fromkeys(("inner", "scale", "out_scale"), "fp32")
    for name in ("C", "R0", "R1"):
        del kinds[name]
    return kinds


def _wide_signature(c: GradientConfig, dtype: str) -> dict[str, str]:
    k = GradientConstants(c)
    kinds = dict.fromkeys(wide.arg_names, "i32")
    for name, rows in (("a", k.BLOCK_K.value), ("b", c.BLOCK_Q)):
        kinds[name + "0"] = copied(dtype, 1, rows, 1, c.D)
        kinds[name + "1"] = copied(dtype, 1, rows, 1, c.DV)
    kinds["row_tiles"] = copied("fp32", 1, 2, c.BLOCK_Q)
    kinds |= dict.fromkeys(_GRADIENT_INTEGERS, "*i32")
    kinds |= {"out": "*" + dtype, "rows": "*fp32", "alibi": "*fp32"}
    kinds |= dict.fromkeys(("inner", "scale", "out_scale"), "fp32")
    for name in ("C", "R0", "R1"):
        del kinds[name]
    return kinds


def _signature(c: Config, dtype: str, bias: str) -> dict[str, str]:
    k = Constants(c)
    kinds = dict.fromkeys(forward.arg_names, "i32")
    q_box, k_box = (1, ROWS // c.GROUP, 1, c.GROUP), (1, c.BLOCK_K, 1)
    for name, box, width in (("q", q_box, "D"), ("k", k_box, "D"), ("v", k_box, "DV")):
        first, second = (getattr(k, width + part).value for part in "01")
        kinds[name + "0"] = copied(dtype, *box, first)
        kinds[name + "1"] = copied(dtype, *box, second or first)
    kinds["bias_tiles"] = copied(bias, 1, 1, ROWS, c.BLOCK_K) if c.BIAS == "copied" else kinds["q0"]
    kinds |= dict.fromkeys(_FLOATS, "*fp32") | dict.fromkeys(_INTEGERS, "*i32")
    kinds |= {"out": "*" + dtype, "bias": "*" + bias, "scale": "fp32", "inner": "fp32"}
    for name in ("C", "R0", "R1"):
        del kinds[name]
    return kinds


def _read(cubin: bytes, shared: int) -> Built:
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        code, usage = (
            subprocess.run(
                [tools / "cuobjdump", flag, file.name], capture_output=True, text=True, check=True
            )
            for flag in ("-sass", "-res-usage")
        )
    stack = re.search(r"STACK:(\d+)", usage.stdout + usage.stderr)
    assert stack is not None
    found = re.finditer(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", code.stdout)
    return Built(int(stack[1]), shared, [Line(int(m[1], 16), m[2]) for m in found])
