"""Compile kernels without their GPUs, and print facts about the machine code.

Run by ``test_compile.py`` in a process without the interpreter. The arguments are a target and
"features", "tuned", "float32", "tangents", "few" or "short"; each line is JSON. Without arguments
each line of the input has the two: a fork of this process answers, after the imports that all need.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import traceback
import warnings
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.errors import OutOfResources

from rowmax.call.inputs import Cotangents, Tangents, WantedSecond
from rowmax.call.problem import Wanted
from rowmax.testing import Case, make
from tests.compile import sass
from tests.garbage import collect_less

short = importlib.import_module("rowmax.gpu.triton.short")
short_keys = importlib.import_module("rowmax.gpu.short_keys")
few = importlib.import_module("rowmax.gpu.triton.few")
forward = importlib.import_module("rowmax.gpu.triton.forward")
backward = importlib.import_module("rowmax.gpu.triton.backward")
tangent = importlib.import_module("rowmax.gpu.triton.tangent")
tangent_backward = importlib.import_module("rowmax.gpu.triton.tangent_backward")
compiled = importlib.import_module("rowmax.gpu.compiled")
kernel_args = importlib.import_module("rowmax.gpu.kernel_args")
launch = importlib.import_module("rowmax.gpu.launch")
tiles = importlib.import_module("rowmax.gpu.tiles")

#: (target, shared memory of a program)
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 << 10),
    "sm_89": (GPUTarget("cuda", 89, 32), 99 << 10),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 << 10),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 << 10),
    "sm_120": (GPUTarget("cuda", 120, 32), 99 << 10),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 << 10),
    "gfx950": (GPUTarget("hip", "gfx950", 64), 160 << 10),
}

FEATURES = [
    Case("causal", b=1, nq=256, hq=2, d=128, causal=True),
    Case("terms", b=2, nq=200, hq=4, hk=2, d=64, documents="sorted", bias="1hqk", alibi=True),
    Case(
        "extras",
        b=2,
        nq=256,
        hq=2,
        d=64,
        causal=True,
        softcap=2.0,
        sink=True,
        dropout=0.1,
        lengths=(0.5,),
        align="lengths",
    ),
    Case("packed", hq=2, hk=1, d=80, sequences=((100, 100), (28, 60)), causal=True),
    Case("wide", b=1, nq=128, hq=1, d=512),
    Case("block", nq=128, d=64, dropout=0.1, alibi=True, positions=(5, 6, 64, 7, 8)),
    Case(
        "prefix",
        b=2,
        nq=200,
        hq=4,
        hk=2,
        d=64,
        prefix=(0.5,),
        left=90,
        bias="1hqk",
        allowed="11qk",
    ),
    Case("shares", b=1, nq=1024, hq=4, hk=1, d=64, causal=True),
]

#: tangents and second derivatives of these: the entries of the table, and every kernel once
TANGENTS = [
    *((Case(f"{d}-full", b=1, nq=512, hq=1, d=d), torch.bfloat16) for d in (64, 128)),
    *((Case(f"{d}-causal", nq=512, hq=1, d=d, causal=True), torch.bfloat16) for d in (64, 128)),
    (Case("64-float32", b=1, nq=512, hq=1, d=64), torch.float32),
    (Case("64-terms", nq=200, hq=2, d=64, bias="1hqk", alibi=True, sink=True), torch.bfloat16),
    # tangents of some inputs, and no cotangent of out, as in the backward of a backward
    (Case("64-of-q", nq=200, hq=2, d=64, alibi=True, grads=("q",)), torch.bfloat16),
    (Case("64-of-v", nq=200, hq=2, d=64, bias="1hqk", grads=("v",)), torch.bfloat16),
]

#: calls with kernels that ptxas 12.8.93 assembles wrong: three of those that failed on an H200
FLOAT32 = [
    Case("40x16", b=1, nq=64, hq=4, hk=1, d=40, dv=16),
    Case("8x24-causal", b=2, nq=64, hq=8, hk=2, d=8, dv=24, causal=True),
    Case("8x128-softcap", b=2, nq=257, nk=130, hq=8, hk=2, d=8, dv=128, softcap=5.0),
]

#: few queries of many keys: every entry of the table, and what a decode has
_DECODE: dict[str, Any] = {"b": 1, "nq": 1, "nk": 4096, "hq": 32, "hk": 8, "d": 128}
FEW = [
    *(Case(f"{d}", **_DECODE | {"d": d}) for d in (64, 128, 256)),
    Case("ragged", **_DECODE | {"nk": 4095}),
    Case("rows", **_DECODE | {"nq": 16, "causal": True}),
    Case("one-part", **_DECODE | {"b": 128}),
    Case("packed", hq=32, hk=8, d=128, sequences=((1, 3000), (4, 2500)), causal=True),
    Case("terms", **_DECODE | {"causal": True, "alibi": True, "sink": True, "softcap": 10.0,
                               "lengths": (0.5,), "align": "lengths"}),
    Case("mask", **_DECODE | {"allowed": "b11k", "dropout": 0.1}),
]  # fmt: skip

#: backwards of few keys: every entry of the table, and what the calls of one kernel share
_SHORT: dict[str, Any] = {"b": 64, "nq": 128, "hq": 8, "d": 64, "grads": ("q", "k", "v")}
SHORT = [
    *(Case(f"{d}x{n}", **_SHORT | {"d": d, "nq": n})
      for d, n in ((64, 64), (64, 128), (64, 256), (64, 197), (128, 128))),
    *(Case(f"{d}x{n}-causal", **_SHORT | {"d": d, "nq": n, "causal": True})
      for d, n in ((64, 50), (64, 77), (128, 77))),
    Case("parts", **_SHORT | {"b": 2, "nq": 4096, "nk": 77, "d": 40}),
    Case("terms", **_SHORT | {"hk": 2, "alibi": True, "softcap": 10.0, "lengths": (0.5,),
                              "align": "lengths", "dropout": 0.1, "left": 40, "sink": True}),
]  # fmt: skip

#: every feature for one target of each compiler back end; the others need only be reached
THOROUGH = ("sm_80", "sm_90", "gfx942")


def features(name: str) -> list[tuple[Case, torch.dtype]]:
    """Return the cases of a target, the widest head where shared memory is scarcest."""
    some = [(FEATURES[0], torch.bfloat16), (FEATURES[1], torch.bfloat16)]
    if name in THOROUGH:
        some += [(case, torch.bfloat16) for case in (*FEATURES[2:4], *FEATURES[5:])]
        some.append((FEATURES[0], torch.float32))
    if name == "sm_89":
        some.append((FEATURES[4], torch.bfloat16))
    return some


def tangent_cases(name: str) -> list[tuple[Case, torch.dtype]]:
    """Return the cases of tangents of a target: all of Hopper, each compiler's main ones."""
    if name == "sm_90":
        return TANGENTS
    some = ("128-causal", "64-terms", "64-of-q", *["64-float32"] * (name in THOROUGH))
    return [given for given in TANGENTS if given[0].name in some]


def few_cases(name: str) -> list[tuple[Case, torch.dtype]]:
    """Return the cases of few queries of a target: all of Hopper, each compiler's main ones."""
    some = FEW if name == "sm_90" else [x for x in FEW if x.name in ("128", "packed")]
    return [*((case, torch.bfloat16) for case in some), (FEW[1], torch.float32)]


class Made(NamedTuple):
    """A launch that was skipped, and its compiled kernel."""

    job: Any
    pointers: Any
    kernel: Any
    refused: int  # larger tiles before these, which did not fit shared memory


def made(case: Case, dtype: torch.dtype, name: str, what: str = "features") -> list[Made]:
    """Return the launches of a call and its backward, compiled for a target.

    Of "tangents", those of its tangent and of the backward of the tangent; of "few", the forward;
    of "short", the backward.
    """
    target, limit = TARGETS[name]
    found: list[Made] = []
    refused = 0

    def run(job: Any, t: Any) -> None:
        nonlocal refused
        kernel = job.compile(t, target)
        if kernel.metadata.shared > limit:
            refused += 1
            raise OutOfResources(kernel.metadata.shared, limit, "shared memory")
        found.append(Made(job, t, kernel, refused))
        refused = 0

    launch.Job.run = run
    compiled.Launch.on = lambda one, like, t: None  # a copy of a tensor, other than the jobs
    launch._jobs.clear()
    kernel_args.capability = lambda _: None if target.backend == "hip" else divmod(target.arch, 10)
    problem, tensors = make(case, dtype=dtype).problem()
    wanted = Wanted(*(getattr(tensors, name) is not None for name in Wanted._fields))
    if what == "few":
        few.forward(problem, tensors)
        return found
    if what == "tangents":
        some = case.grads or Tangents._fields
        along = Tangents(
            **{name: getattr(tensors, name) for name in Tangents._fields if name in some}
        )
        results = tangent.tangent(problem, tensors, along)
        cotangents = Cotangents(*results)
        if case.grads is not None:
            cotangents = cotangents._replace(out=None, lse=None)
        given = problem, tensors, along, results, cotangents
        tangent_backward.tangent_backward(*given, WantedSecond(wanted, wanted))
        return found
    dout = torch.zeros(problem.out_shape, dtype=dtype)
    if what == "short":
        torch.cuda.is_available, short_keys.limits_of = (lambda: True), tiles.limits_of
        wanted = Wanted(True, True, True, False, False, False)
        shape = short_keys.tiles_of(problem._replace(device="cuda"), wanted)
        shape = shape or tiles.Tiles(32, short_keys.held_keys(problem), 8, 3, parts=1)
        lse = torch.zeros(problem.lse_shape)
        short.backward(problem, tensors, dout, lse, dout, lse, wanted, shape)
        return found
    out, lse = forward.forward(problem, tensors)
    backward.backward(problem, tensors, out, lse, dout, torch.zeros_like(lse), wanted)
    return found


def tuned() -> list[Case]:
    """Return cases that use every entry of the table."""
    more: dict[str, Any] = {"b": 1, "nq": 512, "hq": 1}
    return [
        Case(f"{d}-{name}", **{"d": d, **more, **options})
        for d in (64, 128, 256)
        for name, options in (
            ("full", {}),
            ("causal", {"causal": True}),
            ("bias", {"bias": "bhqk"}),
            ("mask", {"allowed": "11qk"}),
            ("long-causal", {"causal": True, "nq": 4096}),
        )
    ]


def loops_with_products(cubin: bytes) -> list[str]:
    """Return the machine code of each loop with a matrix product."""
    code, labels = sass.instructions(cubin)
    loops = []
    for n, (_, text) in enumerate(code):
        back = re.search(r"BRA.*?`\((\.L_x_\d+)\)", text)
        if back and labels.get(back[1], n + 1) <= n:
            body = "\n".join(x for _, x in code[labels[back[1]] : n + 1])
            if re.search(r"\b(HGMMA|HMMA)\b", body):
                loops.append(body)
    return loops


def width(taken: str) -> str:
    """Return the PTX type of a kernel's parameter of a Triton type."""
    if taken.startswith("*"):
        return "u64"
    return {"i32": "u32", "i64": "u64", "fp32": "f32"}[taken]


def facts(made: Made, name: str, what: str) -> dict[str, Any]:
    """Return what the tests read: spills, which take a disassembly, of tuned kernels alone."""
    job, t, kernel, refused = made
    found: dict[str, Any] = {
        "kernel": job.kernel.fn.__name__,
        "tiles": str(job.tiles),
        "refused": refused,
        "binary": len(kernel.asm.get("cubin") or kernel.asm["hsaco"]),
        "given": [width(x) for x in job.launch.signature(*job.launch.arguments(t)).flat()],
    }
    found["taken"] = found["given"]
    if "cubin" in kernel.asm:
        taken = re.findall(r"\.param \.(?:align \d+ \.)?(\w+)", kernel.asm["ptx"])
        found["taken"] = taken[: len(found["given"])]  # Triton adds parameters behind these
    if what == "tuned" or (what in ("tangents", "few", "short") and name == "sm_90"):
        loops = loops_with_products(kernel.asm["cubin"])
        found["parts"] = job.numbers.parts
        found["copies"], found["loads"] = (
            sum(len(re.findall(rf"\b{x}\b", loop)) for loop in loops) for x in ("LDGSTS", "LDG")
        )
        found["spills"] = max(
            (len(re.findall(r"\b(LDL|STL)\b", loop)) for loop in loops), default=0
        )
    if name == "sm_90":
        found.update(sass.report(kernel.asm["cubin"])._asdict())
    return found


def report(name: str, what: str) -> None:
    """Print the facts of each kernel of a target."""
    _, shared = TARGETS[name]
    measured = what == "tuned" or (what in ("tangents", "few", "short") and name == "sm_90")
    device = "NVIDIA H200" if measured else name
    amd = name.startswith("gfx")
    limits = tiles.Limits(device, shared, 64 if amd else 32, split=not amd, wgmma=name == "sm_90")
    tiles.limits_of = lambda _: limits
    cases = {
        "features": features(name),
        "tuned": [(case, torch.bfloat16) for case in tuned()],
        "float32": [(case, torch.float32) for case in FLOAT32],
        "tangents": tangent_cases(name),
        "few": few_cases(name),
        "short": [(case, torch.bfloat16) for case in SHORT],
    }
    for case, dtype in cases[what]:
        for one in made(case, dtype, name, what):
            print(json.dumps({"case": case.name, **facts(one, name, what)}), flush=True)


def answer(name: str, what: str) -> None:
    """Print what ``report`` prints in a fork, then a line with the text of its error, or none."""
    read, write = os.pipe()
    if os.fork() == 0:
        status = 1
        try:
            report(name, what)
            status = 0
        except BaseException:
            os.write(write, traceback.format_exc()[-3000:].encode())
        finally:
            sys.stdout.flush()
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.wait()
    error = text or (f"it ended with status {status}" if status else "")
    print(json.dumps({"error": error}), flush=True)


def main() -> None:
    warnings.simplefilter("ignore")
    collect_less()
    if sys.argv[1:]:
        report(*sys.argv[1:])
        return
    for line in sys.stdin:
        answer(*line.split())


if __name__ == "__main__":
    main()
