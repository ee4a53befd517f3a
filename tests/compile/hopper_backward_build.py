"""Compile the Hopper backward for sm_90a with no GPU in sight."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from rowmax.hopper.gradients.kernel import backward
from rowmax.hopper.gradients.tiles import GradientConfig, GradientTile
from rowmax.hopper.gradients.wide_kernel import wide
from rowmax.hopper.tiles import Constants

from .hopper_build import Built, _read

_DTYPES = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}
_INTEGERS = (
    "table", "ends", "counter", "turns", "cu_q", "cu_k", "lengths", "spans", "q_ids", "k_ids",
)  # fmt: skip
_FLOATS = ("inner", "scale", "out_scale")


def config(d: int, dv: int, tile: GradientTile, **features: Any) -> GradientConfig:
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
def build(c: GradientConfig, registers: tuple[int, int], dtype: str = "bf16") -> Built:
    kernel = backward if c.KIND == "all" else wide
    names = kernel.arg_names
    kinds = dict.fromkeys(names, "i32") | _copies(c, dtype)
    kinds |= dict.fromkeys(_INTEGERS, "*i32") | dict.fromkeys(_FLOATS, "fp32")
    kinds |= dict.fromkeys(("dk", "dv", "out"), "*" + dtype) | dict.fromkeys(
        ("rows", "alibi"), "*fp32"
    )
    if c.KIND == "all":
        kinds["rows"] = _copied("fp32", 1, 2, c.BLOCK_Q)
    constants = {"C": Constants(c), "R0": registers[0], "R1": registers[1]}
    source = GluonASTSource(
        kernel,
        {n: "constexpr" if n in constants else kinds[n] for n in names},
        {(names.index(n),): v for n, v in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if kinds[n][:1] == "*"},
    )
    made = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "enable_fp_fusion": True}
    )
    return _read(None, made.asm["cubin"], made.metadata.shared)  # pyright: ignore


def _copies(c: GradientConfig, dtype: str) -> dict[str, str]:
    """The descriptors of both kernels, by the names of their parameters."""
    stays, passes = c.BLOCK_K, c.BLOCK_Q
    found = {"row_tiles": _copied("fp32", 1, 2, passes)}
    for names, rows, width in (
        (("q", "b0"), passes, c.D),
        (("do", "b1"), passes, c.DV),
        (("k", "a0"), stays, c.D),
        (("v", "a1"), stays, c.DV),
    ):
        found |= dict.fromkeys(names, _copied(dtype, 1, rows, 1, width))
    return found | {
        "dq": _copied("fp32", 1, c.DQ_ROWS, c.DQ_COLS),
        "bias": _copied(dtype, 1, 1, passes, stays),
        "dbias": _copied(dtype, 1, 1, passes, c.TOKENS),
    }


def _copied(kind: str, *box: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for(list(box), _DTYPES[kind])
    return f"tensordesc<{kind}[{', '.join(map(str, box))}],{layout!r}>"
