"""The check of an installation reports errors."""

from __future__ import annotations

import io

import pytest
import torch

pytest.importorskip("rich")

from rich.console import Console

from rowmax.cli import checks
from rowmax.cli.check_table import check_table
from rowmax.cli.features import FEATURES, Feature
from rowmax.testing import Case, make
from rowmax.tiled import backward as tiled_backward

CPU = torch.device("cpu")
FEW = tuple(f for f in FEATURES if f.name in ("causal", "sinks with gradient", "dropout"))


def test_every_feature_is_right_on_the_torch_backend():
    found = checks.run_checks(CPU, ("torch",))
    assert found.ok, [r.wrong for row in found.rows.values() for r in row.values()]
    assert found.count == (len(FEATURES), len(FEATURES))


def test_the_backends_that_run_here_are_found():
    names, absent = checks.find_backends(CPU)
    assert "torch" in names
    assert {"hopper", "triton"} <= set(absent)
    assert not set(names) & set(absent)


def test_the_features_cover_the_arguments():
    """Each argument of attention that changes the result is in some feature."""
    used = {name for feature in FEATURES for name in make(feature.case).keywords}
    assert used >= {"causal", "mask", "bias", "alibi", "softcap", "sink", "dropout_p", "seed"}


@pytest.mark.parametrize("wrong", ["q", "k", "v", "sink"])
def test_a_wrong_gradient_is_seen(monkeypatch: pytest.MonkeyPatch, wrong: str):
    def off_by_a_little(*arguments):
        gradients = tiled_backward(*arguments)
        grad = getattr(gradients, wrong)
        return gradients if grad is None else gradients._replace(**{wrong: grad * (1 + 1e-4)})

    monkeypatch.setattr("rowmax.tiled.backward", off_by_a_little)
    found = checks.run_checks(CPU, ("torch",), features=FEW)
    assert not found.ok
    assert any(text.startswith(f"d{wrong}:") for text in _errors(found))


def test_a_nan_is_seen(monkeypatch: pytest.MonkeyPatch):
    from rowmax.tiled import forward

    def with_nan(*arguments):
        out, lse = forward(*arguments)
        out[0, 0, 0, 0] = torch.nan
        return out, lse

    monkeypatch.setattr("rowmax.tiled.forward", with_nan)
    found = checks.run_checks(CPU, ("torch",), features=FEW[:1])
    assert any("NaN" in text for text in _errors(found))


def test_a_refusal_is_no_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rowmax.tiled.supports", lambda problem, call: "not today")
    found = checks.run_checks(CPU, ("torch",), features=FEW)
    assert found.ok
    assert found.count == (0, 0)


def test_a_backend_without_backward_is_checked_forward(monkeypatch: pytest.MonkeyPatch):
    def supports(problem, call):
        return None if call == "forward" else "forward only"

    monkeypatch.setattr("rowmax.tiled.supports", supports)
    found = checks.run_checks(CPU, ("torch",), features=FEW)
    assert found.ok
    assert found.count == (len(FEW), len(FEW))
    result = found.rows["causal"]["torch"]
    assert result.forward is not None
    assert result.gradients is None
    assert result.refusal == "forward only"


def test_a_backend_that_breaks_does_not_end_the_check(monkeypatch: pytest.MonkeyPatch):
    def breaks(problem, tensors):
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr("rowmax.tiled.forward", breaks)
    found = checks.run_checks(CPU, ("torch",), features=FEW)
    assert not found.ok
    assert set(_errors(found)) == {"RuntimeError: out of shared memory"}


def test_the_table_shows_what_is_wrong():
    right = checks.Result(1e-7, 2e-7)
    wrong = checks.Result(1e-7, 2e-2, ("dq: max error 0.02",))
    table = checks.Checks("cpu", "float32", ("torch",), {"cpu": "numba is not installed"}, {})
    table.rows.update({"causal": {"torch": right}, "window": {"torch": wrong}})
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(check_table(table))
    text = console.export_text()
    for part in ("window, torch: dq: max error 0.02", "numba is not installed", "1 of 2 right"):
        assert part in text


def test_a_feature_of_the_users_own_can_be_checked():
    own = Feature(Case("wide window", nq=200, left=150, right=150))
    found = checks.run_checks(CPU, ("torch",), features=(own,))
    assert found.count == (1, 1)


def _errors(found: checks.Checks) -> list[str]:
    return [error.partition(": ")[2] for error in found.errors]
