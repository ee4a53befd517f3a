"""The output of the command line, and its errors."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

pytest.importorskip("typer")

import typer
from typer.testing import CliRunner

import rowmax
from rowmax.cli.app import app
from rowmax.cli.features import FEATURES

COMMANDS = ("check", "explain", "bench", "warm", "trace", "tune")


def invoke(*arguments: str):
    """Return (exit code, output in one line and without boxes)."""
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, re.sub(r"[\s│╭╮╰╯─]+", " ", result.output)


def test_help_names_every_command():
    code, text = invoke("--help")
    assert code == 0
    for name in COMMANDS:
        assert f" {name} " in text
    assert "demo" not in text


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_an_example_and_says_what_options_mean(name: str):
    code, text = invoke(name, "--help")
    assert code == 0
    assert f"Example: rowmax {name} -" in text
    command = typer.main.get_command(app).commands[name]  # pyright: ignore
    assert [p.name for p in command.params if not p.help] == []
    example = command.epilog.split("rowmax ")[1].split()
    context = command.make_context(name, example[1:], resilient_parsing=True)
    assert context.params


def test_without_a_command_it_prints_the_help():
    code, text = invoke()
    assert code in (0, 2)
    assert "Usage" in text
    assert "rowmax check" in text


def test_version():
    code, text = invoke("--version")
    assert code == 0
    assert rowmax.__version__ in text
    assert torch.__version__ in text


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("check", "--device", "nowhere"), "--device"),
        (("check", "--device", "cuda:99"), "cuda:99"),
        (("check", "--backend", "cudnn"), "want one of hopper, triton, cpu, torch, reference"),
        (("explain", "--dtype", "int8"), "want float32, float16, bfloat16, float64"),
        (("explain", "--window", "5"), "want left,right"),
        (("explain", "--window", "5,1.5"), "want left,right"),
        (("explain", "--packed", "4,x"), "want integers"),
        (("explain", "--packed", "4,-9"), "want integers of 0 or more"),
        (("explain", "-n", "-3"), "Invalid value for '--queries'"),
        (("explain", "--heads", "0"), "Invalid value for '--heads'"),
        (("explain", "--bias", "xyz"), "want letters of bhqk or 1"),
        (("explain", "--kv-heads", "3"), "q: got 8 heads; want a multiple of the 3 heads"),
        (("explain", "--lengths", "5,6"), "lengths"),
        (("explain", "--align", "lengths"), "--align: got 'lengths' without --lengths"),
        (("explain", "--lengths", "5", "--align", "end"), "'end'; want keys or lengths"),
        (("frobnicate",), "No such command"),
    ],
)
def test_bad_options_are_named(arguments: tuple[str, ...], wanted: str):
    code, text = invoke(*arguments)
    assert code == 2
    assert wanted in text
    assert "Traceback" not in text


@pytest.mark.parametrize("options", [(), ("--quick",), ("--help",), ("--steps", "30", "x")])
def test_the_demo_is_in_the_repository(options: tuple[str, ...]):
    code, text = invoke("demo", *options)
    assert code == 2
    assert "in the repository" in text
    assert "make demo" in text


def test_check_prints_the_table():
    code, text = invoke("check", "--device", "cpu", "--backend", "torch")
    assert code == 0
    assert "Checks: starting" in text
    assert f"{len(FEATURES)} of {len(FEATURES)} right" in text


def test_a_wrong_backend_is_the_exit_code(monkeypatch: pytest.MonkeyPatch):
    def fail(problem: object, tensors: object) -> None:
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr("rowmax.tiled.forward", fail)
    code, text = invoke("check", "--device", "cpu", "--backend", "torch")
    assert code == 1
    assert "0 of" in text


def test_a_device_that_torch_lacks_is_refused_in_a_line():
    code, text = invoke(
        "explain", "--device", "mps" if not torch.backends.mps.is_available() else "hpu"
    )
    assert code == 2
    assert "this build of torch cannot make a tensor there" in text
    assert len(text) < 300


def test_a_window_may_have_negative_limits():
    code, text = invoke("explain", "--device", "cpu", "-n", "512", "--window", "5,-1")
    assert code == 0
    assert "window (left 5, right -1)" in text


def test_explain_prints_what_the_function_returns():
    code, text = invoke(
        *("explain", "--device", "cpu", "-b", "2", "-n", "300", "--heads", "4", "--kv-heads", "2"),
        *("-d", "32", "--window", "64,0", "--bias", "1hqk", "--sink", "--dropout", "0.1"),
    )
    assert code == 0
    q, k = torch.zeros(2, 300, 4, 32), torch.zeros(2, 300, 2, 32)
    wanted = rowmax.explain(
        *(q, k, k),
        mask=rowmax.Window(64, 0),
        bias=torch.zeros(1, 4, 300, 300),
        sink=torch.zeros(4),
        dropout_p=0.1,
    )
    assert text.split() == str(wanted).split()


def test_explain_takes_a_call_that_would_not_fit_in_memory():
    code, text = invoke("explain", "--device", "cpu", "-n", "1000000", "--causal", "-d", "128")
    assert code == 0
    assert "1000000" in text.replace(",", "")


def test_explain_of_masks_and_packed_sequences():
    code, text = invoke(
        *("explain", "--device", "cpu", "-b", "2", "-n", "512", "--documents", "4"),
        *("--lengths", "100,512", "--mask", "11qk", "--alibi", "--softcap", "30"),
    )
    assert code == 0
    for feature in ("documents", "prefix lengths", "boolean mask", "alibi", "softcap 30"):
        assert feature in text
    code, text = invoke("explain", "--device", "cpu", "--packed", "100,250", "--bias", "b1qk")
    assert code == 0
    assert "2 packed sequences" in text


def test_explain_of_queries_aligned_to_lengths():
    code, text = invoke(
        *("explain", "--device", "cpu", "-b", "2", "-n", "9", "--keys", "300", "--causal"),
        *("--lengths", "50,300", "--align", "lengths"),
    )
    assert code == 0
    q, k = torch.zeros(2, 9, 8, 64), torch.zeros(2, 300, 8, 64)
    mask = rowmax.PrefixLengths(torch.tensor([50, 300]), align="lengths")
    assert text.split() == str(rowmax.explain(q, k, k, causal=True, mask=mask)).split()
    assert "aligned to them" in text


def test_without_its_libraries_it_names_the_extra():
    code = (
        "import sys; sys.modules['typer'] = None; "
        "from rowmax.cli import main; sys.argv = ['rowmax', 'check']; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 2
    assert 'pip install "rowmax[cli]"' in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_it_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "rowmax.cli", "--version"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert rowmax.__version__ in done.stdout
