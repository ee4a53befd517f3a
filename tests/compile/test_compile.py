"""Every kind of kernel compiles for every supported GPU, without a device."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")

#: kernels that spill in a loop and still are faster than every candidate measured that does not:
#: one store a tile, by a fifth; a few loop invariants, by 3 to 7 %
ALLOWED_SPILLS = {
    ("256-causal", "forward_kernel"): 1,
    ("256-long-causal", "forward_kernel"): 1,
    ("128-long-causal", "backward_dkdv_kernel"): 8,
    ("64-mask", "backward_dq_kernel"): 11,  # the loop of partial tiles has a thousand
}

#: loads of loop invariants among a thousand instructions; smaller tiles, without, do more work
ALLOWED_TANGENT_SPILLS = {
    ("128-full", "tangent_kernel"): 1,
    ("128-causal", "tangent_kernel"): 11,
    ("64-terms", "tangent_kernel"): 9,  # a base that moves, and a sink; smaller tiles: not measured
}


#: loads and stores of loop invariants, among 640 instructions
ALLOWED_SHORT_SPILLS = {"64x197": 3}


@lru_cache
def compiler() -> subprocess.Popen[str]:
    """Start the process that compiles, with the imports that all targets need."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    given = environment.get("PYTHONPATH", "")  # it may have another triton than the environment
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), given])
    started = subprocess.Popen(
        [sys.executable, "-m", "tests.compile.compile_kernels"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(started.communicate)  # ends it, and waits for that
    return started


@lru_cache
def compiled(target: str, what: str) -> list[dict[str, Any]]:
    pipes = compiler()
    assert pipes.stdin is not None
    assert pipes.stdout is not None
    pipes.stdin.write(f"{target} {what}\n")
    pipes.stdin.flush()
    found = []
    for line in pipes.stdout:
        found.append(json.loads(line))
        if "error" in found[-1]:
            assert found[-1]["error"] == ""
            return found[:-1]
    raise AssertionError(f"the process that compiles ended: {pipes.wait()}")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "target", [pytest.param(t, marks=pytest.mark.newest if t == "sm_90" else ()) for t in TARGETS]
)
def test_features(target: str) -> None:
    found = compiled(target, "features")
    kernels = {f["kernel"] for f in found}
    shares = target in ("sm_80", "sm_90", "gfx942")  # those with every feature
    assert len(kernels) == 8 + shares, kernels
    assert ("add_parts_kernel" in kernels) == shares
    for fact in found:
        assert fact["binary"] > 0
        assert fact["refused"] == 0, fact
        assert fact["given"] == fact["taken"], fact


@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", ["features", "float32"])
def test_descriptors_are_made_of_their_address(what: str) -> None:
    """Every wgmma descriptor holds the address at which the kernel stored the operand."""
    found = compiled("sm_90", what)
    assert sum(fact["products"] for fact in found) > 0
    for fact in found:
        assert fact["findings"] == fact["stack"] == [], fact
        assert fact["refused"] == 0, fact


@pytest.mark.skipif(
    not version("triton").startswith("3.6."), reason="the table was measured with triton 3.6"
)
@pytest.mark.timeout(900)
def test_tuned_kernels() -> None:
    """No loop over tiles spills, with the tiles of the table.

    The loops that run only after NaN met a mask may spill.
    """
    for fact in compiled("sm_90", "tuned"):
        allowed = ALLOWED_SPILLS.get((fact["case"], fact["kernel"]), 0)
        assert fact["spills"] <= allowed, fact
        assert fact["findings"] == fact["stack"] == [], fact


@pytest.mark.timeout(900)
def test_kernels_of_few_queries() -> None:
    """Keys and values are copied to shared memory ahead of the loop, and no loop spills."""
    found = compiled("sm_90", "few")
    merged = {f["case"] for f in found if f["kernel"] == "merge_kernel"}
    assert merged == {f["case"] for f in found} - {"one-part"}
    for fact in found:
        assert fact["findings"] == fact["stack"] == [], fact
        assert fact["refused"] == 0, fact
        assert fact["given"] == fact["taken"], fact
        assert fact["spills"] == 0, fact
        if fact["kernel"] == "few_kernel":
            assert fact["copies"] > 0, fact
            assert fact["loads"] == 0 or fact["case"] == "mask", fact


@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_few_queries_for_other_targets(target: str) -> None:
    for fact in compiled(target, "few"):
        assert fact["binary"] > 0
        assert fact["given"] == fact["taken"], fact


@pytest.mark.timeout(900)
def test_kernels_of_few_keys() -> None:
    """Queries are copied to shared memory ahead of the loop, and no loop spills."""
    found = [f for f in compiled("sm_90", "short") if f["kernel"] == "short_kernel"]
    assert len({f["case"] for f in found}) == 10
    for fact in found:
        assert fact["findings"] == fact["stack"] == [], fact
        assert fact["refused"] == 0, fact
        assert fact["given"] == fact["taken"], fact
        assert fact["copies"] > 0, fact
        if version("triton").startswith("3.6."):  # by which the tiles were chosen
            assert fact["spills"] <= ALLOWED_SHORT_SPILLS.get(fact["case"], 0), fact


@pytest.mark.timeout(900)
def test_kernels_of_tangents() -> None:
    """No loop over tiles spills; two load loop invariants (``tiles._TANGENTS``)."""
    found = compiled("sm_90", "tangents")
    kernels = {f["kernel"] for f in found if f["kernel"].startswith("tangent")}
    assert len(kernels) == 6, kernels
    for fact in found:
        assert fact["findings"] == fact["stack"] == [], fact
        assert fact["refused"] == 0, fact
        assert fact["given"] == fact["taken"], fact
        if version("triton").startswith("3.6."):  # by which the tiles were chosen
            allowed = ALLOWED_TANGENT_SPILLS.get((fact["case"], fact["kernel"]), 0)
            assert fact["spills"] <= allowed, fact


@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", [t for t in TARGETS if t != "sm_90"])
def test_tangents_for_other_targets(target: str) -> None:
    for fact in compiled(target, "tangents"):
        assert fact["binary"] > 0
        assert fact["given"] == fact["taken"], fact
