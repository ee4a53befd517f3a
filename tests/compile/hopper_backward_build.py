"""Compile the Hopper backward for sm_90a with no GPU in sight."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl

from rowmax.call.problem import Tensors
from rowmax.gpu.hopper.gradients.bundles import Numbers, Pointers
from rowmax.gpu.hopper.gradients.kernel import backward
from rowmax.gpu.hopper.gradients.plans import copies_of
from rowmax.gpu.hopper.gradients.shared_bias import shared_bias
from rowmax.gpu.hopper.gradients.tiles import GradientConfig, GradientTile
from rowmax.gpu.hopper.gradients.wide_kernel import wide
from rowmax.gpu.hopper.host import GluonLaunch
from rowmax.gpu.hopper.lib.tma import Descriptors as Copies
from rowmax.gpu.hopper.tiles import Constants

from .hopper_build import Built, _read

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def config(d: int, dv: int, tile: GradientTile, **features: Any) -> GradientConfig:
    return GradientConfig(
        D=d,
        DV=dv,
        D_OUT=d,
        DV_OUT=dv,
        BLOCK_Q=tile.block_q,
        Q_STAGES=tile.q_stages,
        DO_STAGES=tile.do_stages,
        HELD=tile.held and not features.get("BIAS"),
        HELD_0=tile.held_0,
        HELD_1=tile.held_1,
        ALONE=tile.alone,
        KV_STAGES=tile.kv_stages,
        AHEAD=tile.ahead,
        DQ_STAGES=tile.dq_stages,
        NATURAL=any(features.get(name) for name in ("BIAS", "ROW", "COLUMN")),
        **features,
    )


@lru_cache
def build(c: GradientConfig, registers: tuple[int, int], dtype: str = "bf16") -> Built:
    like = dict.fromkeys(Numbers._fields, 1) | {"inner": 1.0, "scale": 1.0, "out_scale": 1.0}
    launch = GluonLaunch(
        {"all": backward, "dbias": shared_bias}.get(c.KIND, wide),
        (1, 1, 1),
        {"num_warps": 4, "enable_fp_fusion": True},
    )
    made = launch.compile(
        *_copies(c, _DTYPES[dtype]),
        _pointers(c, _DTYPES[dtype]),
        Numbers(**like),
        *(gl.constexpr(x) for x in (Constants(c), *registers)),
        target=GPUTarget("cuda", 90, 32),
    )
    return _read(None, made.asm["cubin"], made.metadata.shared)  # pyright: ignore


def _pointers(c: GradientConfig, dtype: torch.dtype) -> Pointers:
    """One of each that a problem with these features has."""
    words, number = torch.empty(4, dtype=torch.int32), torch.empty(4)
    return Pointers(
        out=torch.empty(8, dtype=dtype),
        dv=torch.empty(8, dtype=dtype) if c.KIND in ("all", "pair") else None,
        rows=number if c.KIND == "dq" else None,
        table=words,
        ends=words,
        counter=words if c.DRAWN else None,
        turns=words if c.ORDERED else None,
        cu_q=words if c.VARLEN else None,
        cu_k=words if c.VARLEN else None,
        lengths=words if c.PREFIX else None,
        spans=words if c.DOCUMENTS else None,
        q_ids=words if c.DOCUMENTS else None,
        k_ids=words if c.DOCUMENTS else None,
        alibi=number if c.ALIBI else None,
        bias=torch.empty(8, dtype=dtype)
        if c.ROW or c.COLUMN or (c.BIAS and c.KIND == "dq")
        else None,
        dbias=_dbias(c, dtype),
    )


def _dbias(c: GradientConfig, dtype: torch.dtype) -> torch.Tensor | None:
    if c.DROW:
        return torch.empty(4)
    return torch.empty(8, dtype=dtype) if c.DBIAS and c.KIND == "dq" else None


def _copies(c: GradientConfig, dtype: torch.dtype) -> Copies:
    q, dout, k, v = (torch.empty(1, 256, 1, d, dtype=dtype) for d in (c.D, c.DV) * 2)
    bias = torch.empty(1, 1, 256, 256, dtype=dtype) if c.BIAS else None
    return copies_of(c, Tensors(q, k, v, bias), dout, 1, 256)
