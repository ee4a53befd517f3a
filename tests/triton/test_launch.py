"""Kernels that launches keep: compiled once, and complete before another thread finds them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
from collections import OrderedDict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch

from rowmax.call.problem import Tensors
from rowmax.testing import Case, make

pytest.importorskip("triton")

compat = importlib.import_module("rowmax.gpu.compat")
compiled = importlib.import_module("rowmax.gpu.compiled")
jobs = importlib.import_module("rowmax.gpu.launch")
kernel_args = importlib.import_module("rowmax.gpu.kernel_args")
forward = importlib.import_module("rowmax.gpu.triton.forward")
tiles = importlib.import_module("rowmax.gpu.tiles")
tl = importlib.import_module("triton.language")


class Compiled:
    """A compiled kernel, and a driver that records its arguments."""

    unloaded: ClassVar[list[Compiled]] = []
    function, packed_metadata, metadata = "function", "metadata", None

    def __init__(self, src: Any = None) -> None:
        self.src = src
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args: self.launches.append(("hooked", grid, args))

    def run(self, gridX, gridY, gridZ, stream, function, *args) -> None:
        self.launches.append((gridX, gridY, gridZ, stream, function, *args))

    def __del__(self) -> None:
        self.unloaded.append(self)


class KERNEL:
    """A stand-in for a kernel of Triton's, which records public launches."""

    arg_names = ("t", "n", "C")
    launches: ClassVar[list[Any]] = []

    @classmethod
    def __class_getitem__(cls, grid: Any) -> Any:
        return lambda *args, **options: cls.launches.append((grid, args, options))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the options of every kernel compiled, without the compiler and a device."""
    found: list[Any] = []

    def compile(launch: Any, *args: Any) -> Any:
        found.append(launch.options)
        return Compiled(SimpleNamespace(signature=launch.signature(*args).types))

    monkeypatch.setattr(compiled.Launch, "compile", compile)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(compat, "current_device", lambda: torch.cuda.current_device())
    monkeypatch.setattr(compiled, "_kernels", OrderedDict())
    return found


def test_a_kernel_that_is_found_takes_what_launches_give(
    made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kernels(OrderedDict):
        def __setitem__(self, key: Any, kept: Any) -> None:
            # from here on another thread may build its launcher
            assert list(kept.kernel.src.signature.values()) == ["*fp32", "i32"]
            super().__setitem__(key, kept)

    monkeypatch.setattr(compiled, "_kernels", Kernels())
    launch = compiled.Launch(KERNEL, (1, 1, 1), {"num_warps": 4})
    args = ((torch.zeros(4), None), (3,), tl.constexpr(5))
    assert launch.loaded(*args) is launch.loaded(*args)
    assert len(made) == 1


def test_options_of_equal_values_are_not_the_same(made: list[Any]) -> None:
    for options in ({"num_warps": 4, "num_stages": 1}, {"num_warps": 4, "launch_pdl": True}):
        launch = compiled.Launch(KERNEL, (1, 1, 1), options)
        launch.loaded((torch.zeros(4),), (3,), tl.constexpr(5))
        assert made[-1] is options


ARGS = ((torch.zeros(4),), (3,), tl.constexpr(5))


def launched(n: int) -> Any:
    """Return a launch of a separate kernel."""
    launch = compiled.Launch(KERNEL, (1, 1, 1), {"num_warps": n})
    launch.loaded(*ARGS)
    return launch


@pytest.fixture
def _few(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep at most three kernels, on devices that can be synchronized."""
    monkeypatch.setattr(compiled, "_MOST_KERNELS", 3)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    Compiled.unloaded.clear()


def kept() -> list[int]:
    return [dict(x for x in key if isinstance(x, tuple) and len(x) == 2)["num_warps"]
            for key in compiled._kernels]  # fmt: skip


@pytest.mark.usefixtures("_few")
def test_kernels_without_a_launch_are_unloaded_past_the_bound() -> None:
    for n in range(10):
        launched(n)
    gc.collect()
    assert kept() == [7, 8, 9]
    assert len(Compiled.unloaded) == 7
    launched(7)  # is found, and so is the last one used
    launched(10)
    assert kept() == [9, 7, 10]


@pytest.mark.usefixtures("_few")
def test_a_kernel_that_a_launch_uses_stays() -> None:
    used = [launched(n) for n in range(5)]
    for n in range(5, 10):
        launched(n)
    gc.collect()
    assert kept() == [0, 1, 2, 3, 4, 9]  # a launch never evicts its own kernel
    assert len(Compiled.unloaded) == 4
    del used
    gc.collect()
    launched(10)
    assert kept() == [4, 9, 10]


@pytest.mark.usefixtures("_few")
def test_nothing_is_unloaded_while_there_is_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    graph = Graph()
    for n in range(5):
        launched(n)
    assert kept() == [0, 1, 2, 3, 4]
    del graph
    launched(5)
    assert kept() == [3, 4, 5]


def test_what_a_launch_keeps_is_bounded() -> None:
    launch = compiled.Launch(KERNEL, (1, 1, 1), {})
    x = torch.zeros(8)
    for n in range(200):
        t = [x[1:] if n >> bit & 1 else x for bit in range(8)]
        launch(t)
    assert 0 < len(launch._ready) <= compiled._MOST_READY


# --- how it is launched -------------------------------------------------------------------------


@pytest.fixture
def launch(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a launch of a kernel that counts as one to compile."""
    monkeypatch.setattr(compat, "is_compiled", lambda kernel: True)
    monkeypatch.setattr(compat, "current_stream", lambda device: f"stream of {device}")
    KERNEL.launches.clear()
    return compiled.Launch(KERNEL, (7, 1, 1), {"num_warps": 4, "enable_fp_fusion": True}, LAST)


def driver_of(launch: Any) -> Compiled:
    ((kept),) = compiled._kernels.values()
    return kept.kernel


is_compiled = compat.is_compiled
X = torch.zeros(4)
LAST = ((3, 0.5), tl.constexpr(5))


def test_a_launch_goes_to_the_driver(launch: Any) -> None:
    for _ in range(2):
        launch((X, None))
    place = (7, 1, 1, "stream of 0", "function", "metadata", None, None, None)
    assert driver_of(launch).launches == [(*place, X.data_ptr(), 3, 0.5)] * 2
    assert not KERNEL.launches


def test_each_device_has_its_kernel(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that no plan of one device holds goes to the kernel of the current device."""
    for device in (0, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        launch((X, None))
    of_device = {key[1]: kept.kernel for key, kept in compiled._kernels.items()}
    streams = {n: [x[3] for x in kernel.launches] for n, kernel in of_device.items()}
    assert streams == {0: ["stream of 0"] * 2, 1: ["stream of 1"]}


def test_each_dtype_has_its_kernel(launch: Any) -> None:
    """A launch that is kept by sizes alone serves tensors of several dtypes."""
    given = [torch.zeros(4, dtype=x) for x in (torch.bfloat16, torch.float16, torch.float64)]
    for x in (*given, given[0]):
        launch((x, None))
    launches = [kept.kernel.launches for kept in compiled._kernels.values()]
    pointers = [[one[-3] for one in each] for each in launches]
    assert sorted(map(len, pointers)) == [1, 1, 2]
    of_first = next(each for each in pointers if len(each) == 2)
    assert of_first == [given[0].data_ptr()] * 2


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("chain", [False, True])
def test_a_launch_hook_is_called(
    launch: Any, name: str, chain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one installed later, alone (as before triton 3.6) or in a chain."""
    launch((X, None))
    hook = SimpleNamespace(calls=[print]) if chain else print
    monkeypatch.setattr(compat.knobs, "runtime", SimpleNamespace(**dict.fromkeys(
        ("launch_enter_hook", "launch_exit_hook")) | {name: hook}))  # fmt: skip
    launch = compiled.Launch(KERNEL, (7, 1, 1), launch.options, LAST)
    launch((X, None))
    assert driver_of(launch).launches[1:] == [("hooked", (7, 1, 1), (X.data_ptr(), 3, 0.5))]


class CudaLauncher:
    """A launcher like that of triton 3.6, which adds two flags and scratch memory."""

    def __init__(self, scratch: int) -> None:
        self.global_scratch_size, self.profile_scratch_size = scratch, 0
        self.launch_cooperative_grid, self.launch_pdl = "cooperative", "pdl"
        self.launches: list[tuple[Any, ...]] = []
        self.called = 0

    def launch(self, *args: Any) -> None:
        self.launches.append(args)

    def __call__(self, gridX, gridY, gridZ, stream, function, *args) -> None:
        self.called += 1
        place = (gridX, gridY, gridZ, stream, function, "cooperative", "pdl")
        self.launch(*place, self.global_scratch_size or None, None, *args)


@pytest.mark.parametrize("scratch", [0, 64])
def test_a_thin_launcher_is_skipped(launch: Any, scratch: int, monkeypatch: Any) -> None:
    """Its flags and the memory that no kernel here needs are passed on as it would."""
    run = CudaLauncher(scratch)
    monkeypatch.setattr(Compiled, "run", run)
    launch((X, None))
    place = (7, 1, 1, "stream of 0", "function", "cooperative", "pdl", scratch or None, None)
    assert run.launches == [(*place, "metadata", None, None, None, X.data_ptr(), 3, 0.5)]
    assert run.called == (scratch > 0)


class Metadata(NamedTuple):
    tensordesc_meta: Any


def test_the_parts_of_descriptors_are_made_once(
    made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each address of a tensor; the launcher is made for the parts."""
    made_parts: list[Any] = []

    def parts(descriptor: Any, metadata: Any) -> list[Any]:
        made_parts.append((descriptor.base.data_ptr(), metadata))
        return [f"map of {metadata}", 8, 1]

    driver = importlib.import_module("triton.backends.nvidia.driver")
    monkeypatch.setattr(driver, "make_tensordesc_arg", parts)
    monkeypatch.setattr(compat, "is_compiled", lambda kernel: True)
    monkeypatch.setattr(compat, "current_stream", lambda device: "stream")
    monkeypatch.setattr(Compiled, "metadata", Metadata(["first", "second"]))
    monkeypatch.setattr(KERNEL, "arg_names", ("a", "b", "c", "t", "n", "C"))

    class Descriptor:
        block_shape, layout, base = [4, 4], "layout", X

    copies = (Descriptor(), None, Descriptor())
    launch = compiled.Launch(KERNEL, (7, 1, 1), {}, LAST, copies)
    x, y = torch.zeros(4), torch.zeros(4)
    for bases in ((x, None, y), (x, None, y), (y, None, y)):
        launch((X, None), bases)
    assert made_parts == [
        (x.data_ptr(), "first"),
        (y.data_ptr(), "second"),
        (y.data_ptr(), "first"),
    ]
    driver = driver_of(launch)
    of_copy = ["nvTmaDesc", "i32", "i32", "i64", "i64"]
    assert list(driver.src.signature.values()) == [*of_copy, *of_copy, "*fp32", "i32", "fp32"]
    assert driver.metadata.tensordesc_meta is None
    last = driver.launches[-1][9:]
    assert last == ("map of first", 8, 1, "map of second", 8, 1, X.data_ptr(), 3, 0.5)


def test_the_parts_of_descriptors_are_those_that_triton_makes() -> None:
    """A launcher for the parts is the launcher that Triton makes for whole descriptors."""
    driver = importlib.import_module("triton.backends.nvidia.driver")
    box = "NVMMASharedLayout(swizzle=[1], rank=4)"
    types = [f"tensordesc<bf16[1, 64, 1, 64],{box}>", "*fp32", f"tensordesc<fp32[1, 2],{box}>"]
    parts = [part for x in types for part in compat._types_of_parts(x)]
    described = [{"swizzle": 3}, {"swizzle": 2}]
    expand = getattr(driver, "expand_signature", None)
    if expand is not None:
        named = ("nvTmaDesc",) * (len(inspect.signature(expand).parameters) - 2)  # from 3.8 on
        assert expand(parts, None, *named) == expand(types, described, *named)
    else:  # triton 3.6 writes a launcher in C
        whole = driver.make_launcher({}, dict(enumerate(types)), described)
        assert driver.make_launcher({}, dict(enumerate(parts)), None) == whole


def of_another_driver(self: Any, *args: Any, **options: Any) -> None:
    raise AssertionError("launched past the public interface")


def with_more(self: Any, gridX, gridY, gridZ, stream, function, cluster, *args: Any) -> None:
    raise AssertionError("launched past the public interface")


@pytest.mark.parametrize("run", [of_another_driver, with_more])
def test_another_driver_is_launched_in_public(
    launch: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Compiled, "run", run)
    for _ in range(2):
        launch((X, None))
    want = ((7, 1, 1), ((X, None), *LAST), {"num_warps": 4, "enable_fp_fusion": True})
    assert KERNEL.launches == [want] * 2


def test_a_kernel_of_the_interpreter_is_launched_in_public(
    launch: Any, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on tensors of a GPU, which ``Launch`` launches."""
    monkeypatch.setattr(compat, "is_compiled", is_compiled)
    launch((X, None))
    assert [args for _, args, _ in KERNEL.launches] == [((X, None), *LAST)]
    assert not made


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_the_drivers_of_this_triton_are_known(vendor: str) -> None:
    module = importlib.import_module(f"triton.backends.{vendor}.driver")
    launcher = {"nvidia": "CudaLauncher", "amd": "HIPLauncher"}[vendor]
    kind = getattr(module, launcher)
    assert compat.is_known(kind.__new__(kind))


def test_pointers_begin_with_the_inputs() -> None:
    names = [name.replace("cu_seqlens", "cu") for name in Tensors._fields]
    assert list(kernel_args.Pointers._fields[: len(names)]) == names


def test_every_job_has_the_same_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on the CPU and other GPUs: rounding does not depend on the way of launching."""
    KERNEL.launches.clear()
    tiles = importlib.import_module("rowmax.gpu.tiles").Tiles(16, 16, 4, 2)
    job = jobs.Job(KERNEL, SimpleNamespace(tiles=2), (), tiles, 6)
    entered: list[Any] = []

    class Module:
        @staticmethod
        @contextlib.contextmanager
        def device(device: Any) -> Iterator[None]:
            entered.append(device)
            yield

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    for kind in ("cpu", "xpu"):
        device = SimpleNamespace(type=kind, index=1)
        job.run(SimpleNamespace(q=SimpleNamespace(is_cuda=False, device=device)))
    assert [device.type for device in entered] == ["xpu"]
    want = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
    assert [options for _, _, options in KERNEL.launches] == [want] * 2
    assert job.launch.options == want


# --- positions of a block ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "features", [{"alibi": True}, {"dropout": 0.1}, {"alibi": True, "dropout": 0.1}, {}], ids=str
)
def test_a_kernel_is_compiled_for_no_positions_and_for_any(features: dict[str, Any]) -> None:
    """Positions are numbers at run time. Where all are 0, or are not read, there are none."""

    def signature(*positions: int) -> Any:
        case = Case("", b=1, nq=64, hq=1, causal=True, positions=positions or None, **features)
        problem, tensors = make(case).problem()
        chosen = tiles.Tiles(64, 64, 4, 2, False)
        job = jobs.build_job(forward.FORWARD, problem, tensors, chosen, {})
        pointers = kernel_args.Pointers(*tensors, out=tensors.q, lse=torch.zeros(1, 1, 64))
        return job.launch.signature(pointers, job.numbers, job.config)

    whole = signature()
    assert signature(0, 0, 0, 0, 0) == whole
    placed = signature(5, 6, 64, 7, 8)
    assert (placed == whole) is (not features)
    assert signature(5, 0, 0, 0, 0) == (placed if features.get("alibi") else whole)
    assert signature(0, 0, 0, 0, 1) == (placed if features.get("dropout") else whole)
    assert signature(-9, 2**20, 2**20, 0, 1) == placed
