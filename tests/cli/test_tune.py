"""``rowmax tune`` with simulated times: its output and its file."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from rich.console import Console

from rowmax.cli import tune
from rowmax.gpu import tiles
from rowmax.gpu.triton import tuning

SHAPES = [tiles.Tiles(64, 64, 4, stages) for stages in (2, 3, 4)]
CPU = torch.device("cpu")


def refused() -> None:
    raise RuntimeError("too large")


def kinds() -> list[tiles.Kind]:
    jobs = ("forward", "dq")
    return [tiles.Kind(job, 2, 64, 64, masked=False, scored=False) for job in jobs]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Return the list of calls, of two kinds with three candidates each; the last cannot run."""
    called: list[Any] = []

    def trials(d: int, dtype: torch.dtype, causal: bool, device: str) -> list[Any]:
        def call(kind: tiles.Kind, shape: tiles.Tiles) -> Callable[[], Any]:
            return refused if shape.stages == 4 else lambda: called.append((kind, shape))

        return [(kind, shape, call(kind, shape)) for kind in kinds() for shape in SHAPES]

    def bench(call: Callable[[], Any], **_: Any) -> float:
        return 1.0 / len(called)  # the later the faster

    monkeypatch.setenv("ROWMAX_CACHE", str(tmp_path))
    monkeypatch.setattr(tuning, "trials", trials)
    monkeypatch.setattr(tuning.triton.testing, "do_bench", bench)
    tiles.user_tiles.cache_clear()
    return called


def test_the_fastest_is_printed_and_kept(calls: list[Any]) -> None:
    output = io.StringIO()
    path = tune.tune_tiles(Console(file=output), (64,), torch.bfloat16, CPU)
    assert path is not None
    kept = tiles.user_tiles("cpu")
    assert kept == {str(kind): SHAPES[1] for kind in kinds()}
    text = output.getvalue()
    assert text.count("64 x 64, 4 warps, 3 stages, one loop") == 4, text  # full and causal
    assert str(path) in text
    tiles.user_tiles.cache_clear()


def test_a_stop_loses_only_what_is_under_way(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measure = tuning.measure

    def stopped(kind: tiles.Kind, *more: Any) -> tuning.Trial:
        if kind == kinds()[1]:
            raise KeyboardInterrupt
        return measure(kind, *more)

    monkeypatch.setattr(tuning, "measure", stopped)
    with pytest.raises(KeyboardInterrupt):
        tune.tune_tiles(Console(file=io.StringIO()), (64,), torch.bfloat16, CPU)
    assert list(json.loads((tmp_path / "tiles.json").read_text())["cpu"]) == [str(kinds()[0])]


def test_nothing_runs(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tuning, "measure", lambda kind, shape, call: tuning.Trial(kind, shape, None)
    )
    assert tune.tune_tiles(Console(file=io.StringIO()), (64,), torch.bfloat16, CPU) is None


def test_a_mistake_is_no_refusal() -> None:
    def wrong() -> None:
        raise TypeError("a mistake")

    assert list(tuning.compiled([refused], CPU)) == [None]
    with pytest.raises(TypeError):
        list(tuning.compiled([refused, wrong], CPU))


def test_a_file_that_cannot_be_written_is_refused_before_any_measurement(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROWMAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"tuned tiles cannot be kept: .*set ROWMAX_CACHE"):
        tune.tune_tiles(Console(file=io.StringIO()), (64,), torch.bfloat16, CPU)
    assert calls == []


def test_a_user_without_a_home_has_no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("ROWMAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tiles.Path, "home", nowhere)
    tiles.user_tiles.cache_clear()
    assert tiles.user_tiles("cpu") == {}
    with pytest.raises(OSError, match=r"home directory.*set ROWMAX_CACHE"):
        tiles.keep("cpu", {})
    tiles.user_tiles.cache_clear()
