"""Compiles kernels for GPUs that need not be there, and prints what the compilers made of them.

Run by ``test_compile.py`` in a process without the interpreter: the arguments are a target and
"features" or "tuned"; each line is JSON.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from rowmax.problem import Wanted
from tests.cases import Case, make

forward = importlib.import_module("rowmax.triton.forward")
backward = importlib.import_module("rowmax.triton.backward")
launch = importlib.import_module("rowmax.triton.launch")
tiles = importlib.import_module("rowmax.triton.tiles")

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
]


#: every feature for one target of each compiler back end; the others need only be reached
THOROUGH = ("sm_80", "sm_90", "gfx942")


def features(name: str) -> list[tuple[Case, torch.dtype]]:
    """What to compile for a target; the widest head where shared memory is scarcest."""
    some = [(FEATURES[0], torch.bfloat16), (FEATURES[1], torch.bfloat16)]
    if name in THOROUGH:
        some += [(case, torch.bfloat16) for case in FEATURES[2:4]]
        some.append((FEATURES[0], torch.float32))
    if name == "sm_89":
        some.append((FEATURES[4], torch.bfloat16))
    return some


def recorded(case: Case, dtype: torch.dtype) -> list[tuple[Any, Any]]:
    """The launches of a call and its backward, which do not happen."""
    jobs: list[tuple[Any, Any]] = []
    launch.Job.run = lambda job, t: jobs.append((job, t))
    launch._jobs.clear()
    problem, tensors = make(case, dtype=dtype).problem()
    out, lse = forward.forward(problem, tensors)
    wanted = Wanted(True, True, True, tensors.bias is not None, tensors.sink is not None)
    dout = torch.zeros(problem.out_shape, dtype=dtype)
    backward.backward(problem, tensors, out, lse, dout, torch.zeros_like(lse), wanted)
    return jobs


def tuned() -> list[Case]:
    """Calls that meet every entry of the table."""
    more: dict[str, Any] = {"b": 1, "nq": 512, "hq": 1}
    return [
        Case(f"{d}-{name}", **{"d": d, **more, **options})
        for d in (64, 128, 256)
        for name, options in (
            ("full", {}),
            ("causal", {"causal": True}),
            ("bias", {"bias": "bhqk"}),
            ("long-causal", {"causal": True, "nq": 4096}),
        )
    ]


def loops_with_products(cubin: bytes) -> list[str]:
    """The machine code of each loop that holds a matrix product."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [tools / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True
        )
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in done.stdout.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(instruction[1])
    loops = []
    for n, text in enumerate(code):
        back = re.search(r"BRA.*?`\((\.L_x_\d+)\)", text)
        if back and labels.get(back[1], n + 1) <= n:
            body = "\n".join(code[labels[back[1]] : n + 1])
            if re.search(r"\b(HGMMA|HMMA)\b", body):
                loops.append(body)
    return loops


def width(taken: str) -> str:
    """A type of Triton's, as PTX has it among a kernel's parameters."""
    if taken.startswith("*"):
        return "u64"
    return {"i32": "u32", "i64": "u64", "fp32": "f32"}[taken]


def facts(job: Any, t: Any, name: str) -> dict[str, Any]:
    target, limit = TARGETS[name]
    kernel = job.compile(t, target)
    found: dict[str, Any] = {
        "kernel": job.kernel.fn.__name__,
        "tiles": str(job.tiles),
        "shared": kernel.metadata.shared,
        "limit": limit,
        "binary": len(kernel.asm.get("cubin") or kernel.asm["hsaco"]),
        "spills": 0,
        "given": [width(x) for x in job.launch.signature(t, job.n, job.c).taken()],
    }
    found["taken"] = found["given"]
    if "cubin" in kernel.asm:
        taken = re.findall(r"\.param \.(?:align \d+ \.)?(\w+)", kernel.asm["ptx"])
        found["taken"] = taken[: len(found["given"])]  # what follows is Triton's own
        loops = loops_with_products(kernel.asm["cubin"])
        found["spills"] = max(
            (len(re.findall(r"\b(LDL|STL)\b", loop)) for loop in loops), default=0
        )
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    name, what = sys.argv[1:]
    _, shared = TARGETS[name]
    device = "NVIDIA H200" if what == "tuned" else name
    lanes = 64 if name.startswith("gfx") else 32
    tiles.limits_of = lambda _: tiles.Limits(device, shared, lanes)
    table = [(case, torch.bfloat16) for case in tuned()]
    for case, dtype in table if what == "tuned" else features(name):
        for job, t in recorded(case, dtype):
            print(json.dumps({"case": case.name, **facts(job, t, name)}), flush=True)


if __name__ == "__main__":
    main()
