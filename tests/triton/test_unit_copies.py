"""The kernel that copies rows to multiples of 16 bytes, in Triton's interpreter, and its record."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from rowmax.call.inputs import Tensors
from rowmax.gpu import compiled, kernel_args, replay, unit_copies
from rowmax.gpu.compat import is_compiled

pytestmark = pytest.mark.skipif(
    is_compiled(unit_copies.copy_in_units_kernel), reason="needs TRITON_INTERPRET=1"
)

DTYPES = (torch.bool, torch.bfloat16, torch.float16, torch.float32, torch.float64)


def drawn(draw: random.Random, dtype: torch.dtype) -> Tensor:
    """Return a tensor of four axes with drawn sizes and strides, some of them 0."""
    sizes = [draw.choice((1, 1, 2, 3, 5)) for _ in range(3)] + [draw.choice((1, 7, 33, 130))]
    axes = list(range(4))
    if draw.random() < 0.5:
        draw.shuffle(axes)
    whole = torch.randn([sizes[axis] + draw.randrange(2) for axis in axes]).gt(0)
    if dtype != torch.bool:
        whole = torch.randn(whole.shape, dtype=torch.float32).to(dtype)
    x = whole.permute([axes.index(axis) for axis in range(4)])
    x = x[tuple(slice(x.shape[n] - size, None) for n, size in enumerate(sizes))]
    repeated = [n if draw.random() < 0.2 else 0 for n in (4, 3, 2, 0)]
    return x[tuple(slice(0, 1) if n else slice(None) for n in repeated)].expand(
        [n or size for n, size in zip(repeated, x.shape, strict=True)]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_copies_are_equal_and_begin_at_units(
    seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(f"{seed} {dtype}")
    torch.manual_seed(seed)
    monkeypatch.setattr(unit_copies, "_MOST_COLUMNS", draw.choice((16, 1024)))
    monkeypatch.setattr(unit_copies, "_BLOCK", draw.choice((1024, 4096)))
    unit_copies._launch.cache_clear()
    for _ in range(4):
        x = drawn(draw, dtype)
        found = unit_copies.copied_in_units(x)
        assert torch.equal(found, x)
        assert kernel_args.in_units(found)
        rows = [s for s, n in zip(found.stride()[:3], found.shape, strict=False) if n > 1]
        assert all(s * x.element_size() % 16 == 0 for s in rows)
    unit_copies._launch.cache_clear()
    assert unit_copies.copied_in_units(torch.empty(2, 0, 3, 5)).shape == (2, 0, 3, 5)


def test_a_call_with_a_copied_mask_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask whose rows have 13 bytes: the copy is a launch from the mask of the repeated call."""
    repeated: list[tuple[int, ...]] = []

    def noted(self: Any, like: Tensor, t: Any) -> None:
        compiled._note_launch(self, t, ())

    def addressed(self: Any, t: Any, bases: Any) -> Any:
        return lambda pointers, _: repeated.append(pointers)

    monkeypatch.setattr(compiled.Launch, "on", noted)
    monkeypatch.setattr(compiled.Launch, "addressed", addressed)
    monkeypatch.setattr(replay, "_is_recordable", lambda device: True)
    monkeypatch.setattr(replay.compat, "current_device", lambda: None)
    monkeypatch.setattr(
        replay, "empty_on_gpu", lambda sizes, strides, dtype: torch.empty_strided(
            sizes, strides, dtype=dtype
        )
    )  # fmt: skip

    def inputs() -> Tensors:
        q, k, v = (torch.randn(2, 13, 2, 8) for _ in range(3))
        allowed = torch.randn(1, 1, 13, 13).gt(0).expand(2, 2, 13, 13)
        return Tensors(q, k, v, allowed=allowed)

    def run(given: Tensors) -> tuple[Tensor]:
        ready = kernel_args.prepared(given)
        assert ready.allowed is not None
        assert ready.allowed.stride() == (0, 0, 16, 1)
        return (given.q.new_empty(3),)

    _, again = replay.record(run, inputs())
    assert callable(again)
    given = inputs()
    again(given)
    assert given.allowed is not None
    assert len(repeated) == 1
    assert repeated[0][0] == given.allowed.data_ptr()
    replay._RECORDS.clear()
