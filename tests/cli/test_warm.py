"""``rowmax warm``: its table and its errors."""

from __future__ import annotations

import pytest

pytest.importorskip("typer")

from rowmax.cli.warm import WarmSpec, lengths_of

from .test_app import invoke

SMALL = ("warm", "--device", "cpu", "--backend", "torch", "--heads", "2", "-d", "16")


def test_it_prints_what_is_ready():
    code, text = invoke(*SMALL, "-n", "64,1x300", "--dtype", "float32,bfloat16", "--causal")
    assert code == 0, text
    for part in ("Ready in", "forward", "backward", "float32", "bfloat16", "torch", "any"):
        assert part in text


def test_no_gradient_compiles_no_backward():
    code, text = invoke(*SMALL, "--no-gradient", "--window", "9,0", "--bias", "1hqk", "--sink")
    assert code == 0, text
    assert "forward" in text
    assert "backward" not in text


def test_lengths_are_pairs_of_queries_and_keys():
    assert lengths_of("64, 1x300") == [(64, 64), (1, 300)]
    assert WarmSpec(n="8", device="cpu").arguments()["lengths"] == [(8, 8)]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("-n", "64x"), None),
        (("-n", "x64"), "--lengths: got 'x64'; want integers, such as 1024 or 1x4096"),
        (("-n", "0"), "--lengths: got '0'"),
        (("-n", "1x2x3"), "--lengths: got '1x2x3'"),
        (("--dtype", "float32,int8"), "--dtype: got 'int8'; want some of float32"),
        (("--kv-heads", "3"), "q: got 2 heads; want a multiple of the 3 heads"),
        (("--window", "5"), "--window: got '5'; want left,right"),
        (("--bias", "hqk"), "bias: got 'hqk'; want four letters"),
        (("--backend", "cudnn"), "want one of hopper"),
        (("--device", "nowhere"), "--device"),
    ],
)
def test_bad_options_are_named(options: tuple[str, ...], wanted: str | None):
    code, text = invoke(*SMALL, *options)
    assert code == (2 if wanted else 0)
    assert (wanted or "Ready") in text
    assert "Traceback" not in text
