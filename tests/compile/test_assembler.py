"""The ptxas that assembles kernels for Hopper: how it is chosen, and what each one makes.

``ROWMAX_PTXAS`` names more of them to try, with colons between.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest

if find_spec("triton") is None or sys.platform != "linux":
    pytest.skip("assembling for a GPU needs triton, on Linux", allow_module_level=True)

import torch
from triton import knobs

from rowmax.gpu import assembler, tiles
from rowmax.gpu.assembler import Assembler, Choice, assembling

from . import compile_kernels, sass

PTX = Path(__file__).parent / "wgmma_descriptor.ptx"
#: the release that makes wrong descriptors
WRONG = (12, 8)


# --- what each makes ----------------------------------------------------------------------------


def at_hand() -> list[Assembler]:
    """Return every ptxas on this machine that is known, one of each release."""
    more = filter(None, os.environ.get("ROWMAX_PTXAS", "").split(":"))
    found = map(assembler.release_of, [*assembler._given(), *more])
    return list({one.release: one for one in found if one is not None}.values())


def assembled(tool: Assembler, ptx: str, folder: Path) -> bytes:
    source, cubin = folder / "kernel.ptx", folder / "kernel.cubin"
    source.write_text(ptx)
    subprocess.run(
        [tool.path, "-arch=sm_90a", source, "-o", cubin], check=True, capture_output=True
    )
    return cubin.read_bytes()


def test_sound_assemblers_build_the_descriptors(tmp_path: Path) -> None:
    sound = [one for one in at_hand() if one.release >= assembler.SOUND]
    assert sound, "Triton brings one"
    cubins = [assembled(one, PTX.read_text(), tmp_path) for one in sound]
    for one, cubin in zip(sound, cubins, strict=True):
        report = sass.report(cubin)
        assert report.products == report.known > 0, one
        assert report.findings == report.stack == [], one
        assert sass.differences(cubins[0], cubin) == [], one


def test_ptxas_12_8_builds_a_wrong_descriptor(tmp_path: Path) -> None:
    """The checks of cubins see the fault, where an assembler with it is installed."""
    wrong = [one for one in at_hand() if one.release == WRONG]
    if not wrong:
        pytest.skip("no ptxas 12.8 is at hand; ROWMAX_PTXAS can name one")
    cubin = assembled(wrong[0], PTX.read_text(), tmp_path)
    assert len(sass.findings(cubin)) == 2  # the second and the third of its three products
    assert sass.report(cubin).known == 1


def test_an_older_ptxas_refuses_what_a_swap_compiles(tmp_path: Path) -> None:
    """A kernel of the options that ``assembling`` gives is never assembled by the wrong one."""
    wrong = [one for one in at_hand() if one.release < assembler.SOUND]
    if not wrong:
        pytest.skip("no ptxas older than 12.9 is at hand; ROWMAX_PTXAS can name one")
    version = Assembler("", assembler.SOUND).ptx_version
    ptx = PTX.read_text().replace(".version 8.7", f".version {version // 10}.{version % 10}")
    assert ptx != PTX.read_text()
    for one in wrong:
        with pytest.raises(subprocess.CalledProcessError):
            assembled(one, ptx, tmp_path)


@pytest.mark.parametrize(
    ("release", "ptx"), [((12, 8), 87), ((12, 9), 88), ((13, 0), 90), ((13, 1), 91), ((13, 4), 94)]
)
def test_ptx_version_of_a_release(release: tuple[int, int], ptx: int, tmp_path: Path) -> None:
    """The version is taken, and the next one is not, where that release is installed."""
    assert Assembler("", release).ptx_version == ptx
    for one in at_hand():
        if one.release == release:
            text = PTX.read_text()
            assembled(one, text.replace("8.7", f"{ptx // 10}.{ptx % 10}", 1), tmp_path)
            later = 90 if ptx == 88 else ptx + 1
            with pytest.raises(subprocess.CalledProcessError):
                assembled(one, text.replace("8.7", f"{later // 10}.{later % 10}", 1), tmp_path)


# --- which is taken -----------------------------------------------------------------------------

OLD, SOUND, NEWER = (
    Assembler(f"/stand-in/{name}", release)
    for name, release in (("old", (12, 8)), ("sound", (12, 9)), ("newer", (13, 1)))
)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return ``given(*assemblers, cuda=...)``: these are installed, Triton's own choice first."""

    def only(*tools: Assembler, cuda: str | None = None) -> Choice:
        by_path = {one.path: one for one in tools}

        def paths() -> Iterator[str]:
            now = settings()["ptxas"]  # Triton's choice is what the knob says
            return iter(dict.fromkeys([now, *by_path] if now in by_path else by_path))

        monkeypatch.setattr(assembler, "_given", paths)
        monkeypatch.setattr(assembler, "release_of", by_path.get)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assembler._choice.cache_clear()
        return assembler.choice()

    yield only
    assembler._choice.cache_clear()


def settings() -> dict[str, Any]:
    """Return the knobs that choose an assembler, as they are set (the stand-ins are no files)."""
    return {name: vars(knobs.nvidia).get(name) for name in assembler._KNOBS}


def environment() -> dict[str, str]:
    """Return what the environment of child processes says about an assembler."""
    return {k: v for k, v in os.environ.items() if "PTXAS" in k}


def test_a_sound_one_of_tritons_stays(given: Any) -> None:
    assert given(SOUND, NEWER) == Choice(SOUND, SOUND)
    before = settings()
    with assembling(90) as options:
        assert options == {}
        assert settings() == before


def test_a_sound_one_beside_it_is_taken(given: Any) -> None:
    assert given(OLD, SOUND, NEWER, cuda="12.8") == Choice(SOUND, OLD)
    before, environment_before = settings(), environment()
    with assembling(90) as options:
        assert options == {"ptx_version": 88}
        for name in assembler._KNOBS:
            assert settings()[name] == SOUND.path
        assert environment() == environment_before
    assert settings() == before


@pytest.mark.parametrize("arch", [80, 89, 100, 120, "gfx942", None])
def test_other_architectures_keep_tritons(given: Any, arch: Any) -> None:
    given(OLD, SOUND)
    before = settings()
    with assembling(arch) as options:
        assert options == {}
        assert settings() == before


def test_machine_code_must_be_of_the_drivers_release(given: Any) -> None:
    """A driver for CUDA 12 does not load what ptxas 13 makes."""
    assert given(OLD, NEWER, cuda="12.8") == Choice(None, OLD)
    assert given(OLD, NEWER, cuda="13.0") == Choice(NEWER, OLD)
    assert given(OLD, NEWER, cuda=None) == Choice(NEWER, OLD)  # to compile alone


@pytest.mark.parametrize("tools", [(), (OLD,)])
def test_none_is_at_hand(given: Any, tools: tuple[Assembler, ...]) -> None:
    assert given(*tools).taken is None
    before = settings()
    with assembling(90) as options:
        assert options == {}
        assert settings() == before


def test_the_users_own_ptxas_is_taken_where_it_is_sound(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Triton's own variable names it: which of the two is a matter of its release."""
    own = tmp_path / "ptxas"
    for release, kept in (("12.9", True), ("12.8", False)):
        own.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'")
        own.chmod(0o755)
        for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
            monkeypatch.setenv(name, str(own))
        assembler.release_of.cache_clear()
        assembler._choice.cache_clear()
        chosen = assembler.choice()
        assert chosen.usual is not None
        assert chosen.usual.path == str(own)
        assert (chosen.taken == chosen.usual) is kept
    monkeypatch.undo()
    assembler.release_of.cache_clear()
    assembler._choice.cache_clear()


def test_threads_share_the_swap(given: Any) -> None:
    """The first thread to enter sets the path; the last one to leave puts back what was there."""
    given(OLD, SOUND)
    before = settings()
    entered, leave = threading.Event(), threading.Event()
    seen: list[Any] = []

    def other() -> None:
        with assembling(90) as more:
            entered.set()
            leave.wait(60)
            seen.extend([more, assembler.choice().usual, settings()["ptxas"]])

    thread = threading.Thread(target=other)
    with assembling(90):
        thread.start()
        assert entered.wait(60)
    assert settings()["ptxas"] == SOUND.path  # the other thread is still compiling
    leave.set()
    thread.join()
    assert seen == [{"ptx_version": SOUND.ptx_version}, OLD, SOUND.path]
    assert settings() == before


def test_the_path_is_put_back_after_an_error(given: Any) -> None:
    given(OLD, SOUND)
    before = settings()
    with pytest.raises(ValueError, match="ptxas failed"), assembling(90):
        raise ValueError("ptxas failed")
    assert settings() == before


# --- without a sound one ------------------------------------------------------------------------

SIZES = (16, 32, 64, 128, 256, 512)


@pytest.mark.parametrize("job", tiles._SHAPES)
def test_candidates_make_no_wgmma_without_a_sound_assembler(job: str) -> None:
    limits = tiles.Limits("an H200", 227 << 10, 32, no_wgmma=True, split=True, wgmma=True)
    for d, dv, scored in product(SIZES, SIZES, (False, True)):
        kind = tiles.Kind(job, 4, d, dv, False, scored)
        for one in tiles.candidates(kind, limits):
            assert tiles.allowed(kind, one, limits), one
            assert max(one.block_q, one.block_k) < tiles.WGMMA_ROWS or one.warps % 4, one


def test_float32_kernels_without_wgmma(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward and both gradients of a call that ptxas 12.8.93 makes wrong, with such tiles."""
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("the interpreter compiles nothing")
    limits = tiles.Limits("an H200", 227 << 10, 32, no_wgmma=True, split=True, wgmma=True)
    monkeypatch.setattr(tiles, "limits_of", lambda _: limits)
    launch, kernel_args = compile_kernels.launch, compile_kernels.kernel_args
    on = (compile_kernels.compiled.Launch, "on")
    for where, name in ((launch.Job, "run"), on, (kernel_args, "capability")):
        monkeypatch.setattr(where, name, getattr(where, name))  # put back after the test
    monkeypatch.setattr(launch, "_jobs", {})
    found = compile_kernels.made(compile_kernels.FLOAT32[0], torch.float32, "sm_90")
    codes = {}
    for one in found:
        code = sass.instructions(one.kernel.asm["cubin"])[0]
        codes[one.job.kernel.fn.__name__] = " ".join(text for _, text in code)
    assert len(codes) == 4
    assert not any("HGMMA" in code for code in codes.values())
    assert sum("HMMA" in code for code in codes.values()) == 3  # all but Delta
