"""The Hopper backward is right on the emulator, and blocks take its tiles in a good order.

The emulator takes the place of Triton, so each test of kernels runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests import forks

ROOT = Path(__file__).parents[2]

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None or sys.platform != "linux", reason="needs triton, on Linux"
)


def run(*arguments: str) -> None:
    """Run a model of this folder; its exit code says whether all cases are right."""
    pytest.importorskip("numpy")
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def run_backward(*arguments: str) -> None:
    """Run the model in a fork of a process that has imported it."""
    pytest.importorskip("numpy")
    code = "import sys; from tests.hopper import backward_model; sys.exit(backward_model.main())"
    variables = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    preload = ("tests.hopper.interpreted",)
    done = forks.run(code, *arguments, limit=600, preload=preload, environment=variables)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_triton
def test_every_length_mask_and_bias_is_right():
    run_backward("--kernels", "--share=0")


@needs_triton
@pytest.mark.gates
@pytest.mark.parametrize("share", [1, 2])
def test_every_length_mask_and_bias_is_right_at_more_sizes(share):
    run_backward("--kernels", f"--share={share}")


@needs_triton
def test_tiles_of_long_sequences_are_right():
    run_backward("--long")


def test_every_order_of_tiles_sums_dq_in_one_order():
    run("tests.hopper.order_model")


@needs_triton
def test_biases_and_sinks_of_any_size_are_right():
    run_backward("--extremes")


@needs_triton
def test_cases_of_the_device_are_right():
    run_backward(
        *("--only", "first-64", "first-lengths", "empty-batch", "past-the-last"),
        *("first-shared-bias", "first-own-bias", "first-row-bias", "first-column-bias"),
        *("block-causal", "block-window", "block-documents", "block-alibi", "block-packed"),
    )


@needs_triton
@pytest.mark.gates
def test_drawn_packed_calls_are_right():
    run_backward("--only", "drawn-packed")


@needs_triton
def test_heads_abreast_have_no_window():
    from rowmax.gpu.hopper.backward_tiles import TILES

    with pytest.raises(ValueError, match="ABREAST: got LEFT"):
        replace(TILES[128, 128][0], ABREAST=True, LEFT=True)


@needs_triton
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "kv_heads", "right", "section"),
    [
        (1, 16384, 16, 16, None, 2),  # FOLLOWERS
        (1, 16384, 16, 16, 0, 2),
        (4, 4096, 16, 16, None, 8),  # fits in the cache
        (1, 4096, 16, 16, None, 8),
        (1, 16384, 32, 8, 0, 2),
        (4, 4096, 32, 8, 0, 2),
    ],
)
def test_sections_of_heads_fit_the_cache_and_tiles_follow_each_other(
    monkeypatch, batch, tokens, heads, kv_heads, right, section
):
    from rowmax.call.problem import Problem
    from rowmax.gpu.hopper import backward_plan
    from rowmax.gpu.hopper.backward_tiles import TILES, config_for

    problem = Problem(
        "cuda", torch.bfloat16, batch, tokens, tokens, heads, kv_heads, 128, 128, 1.0, 0.0, 0.0,
        None, right, False, False, None, None, None, (), False, False, tokens, tokens, True,
    )  # fmt: skip
    config = config_for(problem, TILES[128, 128][0])
    assert config.ABREAST is (right is not None and heads > kv_heads)
    monkeypatch.setattr(backward_plan, "processors", lambda device: 132)
    _, rows, _ = backward_plan.order_for(problem, config, torch.device("cpu"))
    assert rows is not None
    first = rows[:, 0] == rows[0, 0]
    assert len(rows[: int((~first).int().argmax())]) == section
    # a tile of keys comes after the one that it follows
    place = {tuple(row[:3]): n for n, row in enumerate(rows.tolist())}
    step = 128 * config.NEIGHBOUR
    for (token, head, b), n in place.items():
        assert place.get((token + step, head, b), -1) < n


@needs_triton
@pytest.mark.parametrize(
    ("n", "batch", "features", "parts"),
    [
        (256, 256, {}, 8),  # 16 tiles of 128 x 128 for 132 processors
        (384, 384, {}, 3),
        (512, 512, {}, 2),
        (768, 768, {}, 3),  # 144 tiles; 28 MB
        (2048, 8, {}, 1),
        (256, 5, {}, 2),  # a part has two sequences at least
        (256, 1, {}, 1),
        (256, 1, {"lengths": (1.0,)}, 1),
    ],
)
def test_few_tiles_of_a_shared_bias_are_divided_among_blocks(n, batch, features, parts):
    from rowmax.gpu.hopper import backward_plan
    from rowmax.gpu.hopper.backward_tiles import SHARED_BIAS, config_for
    from rowmax.testing import Case, make

    case = Case("shared", b=1, nq=n, nk=n, hq=4, hk=4, d=32, bias="11qk", **features)
    problem, _ = make(case, dtype=torch.bfloat16).problem()
    problem = problem._replace(batch=batch, bias=(1, 4, n, n))
    config = config_for(problem, SHARED_BIAS[64, 64])
    assert backward_plan.parts_of(problem, config, 132) == parts
