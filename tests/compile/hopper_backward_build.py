"""Compile the Hopper backward for sm_90a without a GPU."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl

from rowmax.call.problem import Tensors
from rowmax.gpu.hopper.backward_args import Numbers, Pointers
from rowmax.gpu.hopper.backward_host import reads_rows
from rowmax.gpu.hopper.backward_plan import copies_of, kernel_of
from rowmax.gpu.hopper.backward_tiles import (
    HELD_WITH_BIAS,
    Config,
    DkdvConfig,
    DqConfig,
    FusedConfig,
)
from rowmax.gpu.hopper.host import GluonLaunch
from rowmax.gpu.hopper.lib.tma import Descriptors
from rowmax.gpu.hopper.tiles import Constants

from .hopper_build import Built, _read

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def config(tile: Config, **features: Any) -> Config:
    """Return the tile with features, for head sizes that fill it."""
    found = {
        "D_OUT": tile.D,
        "DV_OUT": tile.DV,
        "NATURAL": any(features.get(name) for name in ("BIAS", "ROW", "COLUMN")),
    }
    if isinstance(tile, FusedConfig):
        found["HELD"] = tile.HELD and not (features.get("BIAS") and tile.D > HELD_WITH_BIAS)
    names = {field.name for field in fields(tile)}
    return replace(tile, **{name: x for name, x in (found | features).items() if name in names})


@lru_cache
def build(
    c: Config,
    dtype: str = "bf16",
    shifted: bool = False,
    parts: bool = False,
    wide: bool = False,
    placed: bool = False,
    alone: bool = False,
    shares: bool = False,
) -> Built:
    """Return the kernel.

    ``wide``: dk and dv are parts of sums, ``placed``: at places, ``alone``: some are no parts,
    ``shares``: each is of a share of a group.
    """
    like: dict[str, Any] = dict.fromkeys(Numbers._fields, 1)
    like |= {"inner": 1.0, "scale": 1.0, "out_scale": 1.0, "shift": 1 if shifted else None}
    like |= {"parts": 2 if parts else None, "shares": 2 if shares else None}
    if not c.DROPOUT:
        like |= dict.fromkeys(Numbers._fields[Numbers._fields.index("threshold") :])
    options = {"num_warps": 4, "enable_fp_fusion": True}
    launch = GluonLaunch(kernel_of(type(c)), (1, 1, 1), options)
    made = launch.compile(
        *_copies(c, _DTYPES[dtype]),
        _pointers(c, _DTYPES[dtype], parts, wide or placed or shares, placed, alone),
        Numbers(**like),
        gl.constexpr(Constants(c)),
        target=GPUTarget("cuda", 90, 32),
    )
    return _read(None, made.asm["cubin"], made.metadata.shared)  # pyright: ignore


def _pointers(
    c: Config, dtype: torch.dtype, parts: bool, wide: bool, placed: bool, alone: bool
) -> Pointers:
    """Return one of each pointer that a problem with these features has."""
    words, number = torch.empty(4, dtype=torch.int32), torch.empty(4)
    some = torch.empty(8, dtype=dtype)
    complete = getattr(c, "COMPLETE", False)
    own_bias = isinstance(c, DqConfig) and c.BIAS
    dbias = some if isinstance(c, DqConfig) and c.DBIAS else None
    of_keys = number if wide else some
    places = torch.empty(4, dtype=torch.int64) if placed else None
    return Pointers(
        out=some if isinstance(c, DqConfig) else of_keys,
        dv=of_keys if isinstance(c, (FusedConfig, DkdvConfig)) else None,
        rows=number if reads_rows(c) else None,
        table=words,
        ends=words,
        counter=words if c.DRAWN else None,
        done=words if getattr(c, "ORDERED", False) or complete else None,
        cu_q=words if c.VARLEN else None,
        cu_k=words if c.VARLEN else None,
        lengths=words if c.PREFIX else None,
        spans=words if c.SPANS else None,
        alike=words if c.SPANS else None,
        q_range=words if c.DOCUMENTS and not c.SPANS else None,
        k_range=words if c.DOCUMENTS and not c.SPANS else None,
        q_ids=words if c.DOCUMENTS else None,
        k_ids=words if c.DOCUMENTS else None,
        alibi=number if c.ALIBI else None,
        seed=torch.empty((), dtype=torch.int64) if c.DROPOUT else None,
        bias=some if c.ROW or c.COLUMN or own_bias else None,
        dbias=number if getattr(c, "DROW", False) else dbias,
        parts=number if parts else None,
        sums=number if complete else None,
        dq=some if complete else None,
        dk_rows=places,
        dv_rows=places,
        dk_alone=some if alone else None,
        dv_alone=some if alone else None,
    )


def _copies(c: Config, dtype: torch.dtype) -> Descriptors:
    q, dout, k, v = (torch.empty(1, 256, 1, d, dtype=dtype) for d in (c.D, c.DV) * 2)
    kind = torch.float32 if c.BIAS_FLOAT32 else dtype
    bias = torch.empty(1, 1, 256, 256, dtype=kind) if c.BIAS else None
    return copies_of(c, Tensors(q, k, v, bias), dout, 1, 256)
