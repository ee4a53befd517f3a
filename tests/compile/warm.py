"""Compile a kernel, or load it from the cache without a process and without Triton's hash of it.

Run by ``test_sources.py`` with "cold", then with "warm".
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from rowmax.gpu.compiled import Launch
from rowmax.gpu.hopper.backward_args import PartNumbers, PartPointers
from rowmax.gpu.hopper.part_sums import sum_parts


def refuse(*args: Any, **options: Any) -> Any:
    raise AssertionError(f"a process starts: {args}")


def main() -> None:
    warm = sys.argv[1] == "warm"
    hits: list[bool] = []
    knobs.compilation.listener = lambda cache_hit, **_: hits.append(cache_hit)  # pyright: ignore
    launch = Launch(
        sum_parts, (1, 1, 1), {"num_warps": 4}, (PartNumbers(64, 2), triton.language.constexpr(64))
    )
    pointers = PartPointers(torch.zeros(128), torch.zeros(64))
    with mock.patch.object(subprocess, "Popen", refuse if warm else subprocess.Popen):
        launch.compile(pointers, *launch.last, target=GPUTarget("cuda", 90, 32))
    assert hits == [warm]
    arguments = pointers, *launch.last
    assert launch._key(0, arguments) in {launch._key(0, arguments)}
    assert sum_parts.hash is None
    print(sys.argv[1])


if __name__ == "__main__":
    main()
