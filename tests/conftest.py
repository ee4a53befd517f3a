"""Give every test the same random numbers, and the backends of a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
import torch
from hypothesis import settings

from .compile_once import compile_once
from .garbage import collect_less
from .kept_kernels import kept_folder

# The first example may compile kernels, and a busy machine is no failure.
settings.register_profile("rowmax", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("rowmax")


def pytest_collection_finish() -> None:
    """Collect less garbage, once all is imported, and share what Numba compiles."""
    compile_once()
    collect_less()


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Seed torch, so that a test has the same numbers whichever tests run before."""
    state = torch.get_rng_state()
    # torch.manual_seed formats a stack for each kind of device that is not in use: 3 ms
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    yield
    torch.set_rng_state(state)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Give torch one thread, in child processes as well.

    Operations on small tensors are no slower for it, and five times as fast where other programs
    use the cores: torch's threads wait for each other after every operation.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)


@pytest.fixture
def kernel_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., str]:
    """Return a function that names a folder for compiled kernels, which later runs load."""

    def folder(name: str, *texts: str) -> str:
        kept = kept_folder(request.config, name, *texts)
        return str(kept or tmp_path_factory.mktemp(name))

    return folder


@pytest.fixture(scope="session", params=["reference", "torch", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    """Return the name of each backend that runs on a CPU."""
    if request.param == "cpu" and find_spec("numba") is None:
        pytest.skip("the cpu backend needs numba, an extra")
    return request.param
