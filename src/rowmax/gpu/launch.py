"""Declare, build, keep and launch the jobs in plain Triton.

A job is a kernel with all of its arguments but the pointers. It is built once and kept.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

from torch import Tensor
from triton.runtime.errors import OutOfResources

from ..call.problem import Problem, Tensors
from . import kernel_args
from .compiled import Launch, runs
from .kernel_args import Config, Numbers, Pointers, constant, prepared, strided
from .parts import parts_of
from .shares import possible_shares, shares_of
from .tile_lists import tile_lists_kernel
from .tile_maps import list_sizes, listed, tile_pointers, tile_strides
from .tiles import Tiles, columns, kind_of, smaller, tiles_for

#: jobs kept, by everything that they depend on
_jobs: dict[Any, Job] = {}
_LIMIT = 4096
#: the numbers and constants, and the pointers, that lists of tiles depend on
_OF_LISTS = frozenset((
    *("batch", "longest_q", "longest_k", "left", "right", "order", "allowed", "q_ids", "k_ids"),
    *("GROUP", "BLOCK_Q", "BLOCK_K", "PACKED", "RAGGED_Q", "RAGGED_K", "TO_LENGTHS"),
))  # fmt: skip
_READ_BY_LISTS = ("allowed", "q_ids", "k_ids", "lengths", "prefix", "order", "counts")
#: bytes that heads whose tiles alternate may stream together
TOGETHER_BYTES = 8 << 20


class JobSpec(NamedTuple):
    """A kind of job: a kernel, and how its arguments and its grid follow from a problem."""

    name: str
    kernel: Any
    #: a program's tile: "queries" or "keys" of a sequence, "groups" of the rows of a kv head,
    #: "rows" of all packed sequences as one, "bias". Or "heads": all keys of a kv head
    resident: str
    #: tensors that are read or written, other than q, k and v
    matrices: tuple[str, ...] = ()
    #: heads alternate tile by tile
    alternate: bool = False
    #: it visits only the tiles that a mask of documents or booleans leaves
    lists: bool = True
    #: tiles of a program
    together: int = 1
    #: programs may share the query heads of a tile of keys
    shared: bool = False
    #: columns of out that a program stores, programs along axis 1 share a row; 0: all
    columns: int = 0


class Job:
    """A kernel with its numbers, constants and grid of ``programs``, along one or two axes."""

    def __init__(
        self,
        kernel: Any,
        numbers: Numbers,
        config: Config,
        tiles: Tiles,
        programs: int | tuple[int, int],
        more: tuple[Any, ...] = (),
        lists: Job | None = None,
    ) -> None:
        self.kernel = kernel
        self.lists = lists  # a job that makes the lists of tiles, before
        self.numbers = numbers
        self.config = config
        self.grid = (*programs, 1) if isinstance(programs, tuple) else (programs, 1, 1)
        self.tiles = tiles
        self.options = {
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
            "enable_fp_fusion": True,  # the default up to triton 3.9; 3.10 has it off
        }
        self.launch = Launch(kernel, self.grid, self.options, (numbers, config, *more))

    def run(self, ptr: Pointers) -> None:
        """Launch on the current stream of the pointers' device."""
        self.launch.on(ptr.q, ptr)

    def compile(self, ptr: Pointers, target: Any) -> Any:
        """Return the kernel for these pointers and another target."""
        return self.launch.compile(*self.launch.arguments(ptr), target=target)


def build_job(
    spec: JobSpec, problem: Problem, tensors: Tensors, tiles: Tiles, given: dict[str, Tensor]
) -> Job:
    """Return the job for tensors with these strides; ``given`` is of ``kernel_args.strided``."""
    resident = spec.resident
    count, heads = grid_of(problem, tiles, resident)
    together = heads_together(problem, resident) if spec.alternate else 1
    shares = tiles.parts or (parts_of(problem) if resident == "groups" else None)
    if spec.shared:
        several = tiles.parts or shares_of(problem, tiles.block_k)
        assert several in possible_shares(problem)
        shares = several if several > 1 else None
    terms, bias_batch, constants = kernel_args.pair_strides(tensors, given.get("tbias")), None, {}
    if resident == "rows":
        constants["PACKED"] = False
    elif spec.lists and listed(problem):
        terms |= tile_strides(problem, tensors, tiles, resident)
    if resident == "bias":
        assert problem.bias is not None
        bias_batch, bias_heads = problem.bias[:2]
        width = columns(kind_of(spec.name, problem))
        parts = -(-max(problem.d, problem.dv) // width)
        constants |= {"SHARING": problem.hq // bias_heads, "WIDTH": width, "PARTS": parts}
    numbers = Numbers(
        **kernel_args.sizes_and_scalars(problem),
        tiles=count,
        together=together,
        bias_batch=bias_batch,
        parts=shares,
        **kernel_args.matrices(problem, tensors, spec.matrices, given),
        **terms,
    )
    precision = kernel_args.precision_of(tensors)
    config = kernel_args.config(problem, tiles, precision, **constants)
    divided = spec.shared or resident in ("groups", "heads")
    programs = count * heads * (shares or 1 if divided else 1)
    programs, lists = -(-programs // spec.together), None
    if numbers.order is not None:
        of_lists = list_sizes(problem, tensors, tiles, resident)
        lists = list_job(numbers, config, prod(of_lists[:3]), resident == "keys")
    grid = (programs, -(-problem.dv // spec.columns)) if spec.columns else programs
    return Job(spec.kernel, numbers, config, tiles, grid, lists=lists)


def list_job(numbers: Numbers, config: Config, lists: int, keys: bool) -> Job:
    """Return the job that makes the lists of a job: one kernel for jobs whose tiles are alike."""
    numbers = Numbers(*(x if name in _OF_LISTS else None for name, x in numbers._asdict().items()))
    config = Config(*(x if name in _OF_LISTS else None for name, x in config._asdict().items()))
    tiles = Tiles(config.BLOCK_Q.value, config.BLOCK_K.value, 8, 2)
    return Job(tile_lists_kernel, numbers, config, tiles, lists, (constant(keys),))


def of_lists(ptr: Pointers) -> Pointers:
    """Return the pointers of the job that makes the lists of a job with these."""
    named = ptr._asdict()
    return Pointers(ptr.q, **{name: named[name] for name in _READ_BY_LISTS})


def grid_of(problem: Problem, tiles: Tiles, resident: str) -> tuple[int, int]:
    """Return (resident tiles of a head, heads).

    Packed sequences share the tiles of a head; each may begin one, and so may the rows past them.
    """
    if resident == "bias":
        assert problem.bias is not None
        b, h, i, j = problem.bias
        return -(-i // tiles.block_q) * -(-j // tiles.block_k), b * h
    if resident == "heads":
        return 1, problem.batch * problem.hk
    batch = 1 if problem.varlen else problem.batch
    block, total, heads = tiles.block_q, problem.total_q, problem.hq
    if resident == "keys":
        block, total, heads = tiles.block_k, problem.total_k, problem.hk
    if resident == "groups":
        total, heads = total * problem.group, problem.hk
    if problem.varlen and resident != "rows":
        return total // block + problem.batch + 1, heads * batch
    return -(-total // block), heads * batch


def heads_together(problem: Problem, resident: str) -> int:
    """Return the number of heads whose tiles alternate, the longest first.

    Causal tiles differ in length. Head by head the longest tiles of the last heads would start
    late, and most of the device would wait for them; alternating, short ones come last. L2 holds
    what these heads stream.
    """
    if problem.varlen or problem.right is None or problem.left is not None:
        return 1
    rows = problem.nq * problem.group if resident == "keys" else problem.nk
    streamed = rows * (problem.d + problem.dv) * problem.dtype.itemsize
    return max(1, TOGETHER_BYTES // max(streamed, 1))


def launch(
    spec: JobSpec,
    problem: Problem,
    tensors: Tensors,
    tiles: Tiles | None,
    made: dict[str, Any],
    more: Callable[[Job], dict[str, Any]] | None = None,
) -> Pointers:
    """Launch a job, with smaller tiles if it does not fit; return the pointers of the kernel.

    ``made`` holds the tensors other than inputs, by their names among ``Pointers``; ``more``
    returns those that depend on the job. ``tiles`` overrides the tables.
    """
    given = strided(made)
    key = _key(spec, problem, tensors, tiles, given)
    job = _jobs.get(key)
    q, k, v, allowed = *tensors[:3], tensors.allowed
    unlike = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
    if job is None or unlike or not (allowed is None or kernel_args.in_units(allowed)):
        # strides of a kept job are such as ``prepared`` leaves alone
        tensors = prepared(tensors)
        key = _key(spec, problem, tensors, tiles, given)
        job = _jobs.get(key)
    if job is not None:
        return _run(job, spec, problem, tensors, made, more)
    chosen = tiles or tiles_for(spec.name, problem, q.device)
    while True:
        job = build_job(spec, problem, tensors, chosen, given)
        try:
            ptr = _run(job, spec, problem, tensors, made, more)
        except OutOfResources:
            less = None if tiles else smaller(chosen)
            if less is None:
                raise
            chosen = less
            continue
        if runs():  # else it may not fit
            if len(_jobs) >= _LIMIT:
                _jobs.clear()
            _jobs[key] = job
        return ptr


def _run(
    job: Job,
    spec: JobSpec,
    problem: Problem,
    tensors: Tensors,
    made: dict[str, Any],
    more: Callable[[Job], dict[str, Any]] | None,
) -> Pointers:
    rows = spec.resident == "rows"
    if more is not None:
        made = made | more(job)
    if not rows and spec.lists and listed(problem):
        made = made | tile_pointers(problem, tensors, job.tiles, spec.resident)
    ptr = Pointers(tensors.q, **made) if rows else Pointers(*tensors, **made)
    if job.lists is not None:
        job.lists.run(of_lists(ptr))
    job.run(ptr)
    return ptr


def _key(
    spec: JobSpec,
    problem: Problem,
    tensors: Tensors,
    tiles: Tiles | None,
    given: dict[str, Tensor],
) -> tuple[Any, ...]:
    """Return all that a job depends on. The problem says which tensors there are."""
    strides = [x.stride() for x in tensors if x is not None]
    batches = ()
    if problem.documents:
        batches = [x.shape[0] for x in (tensors.q_ids, tensors.k_ids) if x is not None]
    return (
        spec.name,
        problem,
        tensors.q.get_device(),
        tiles,
        *strides,
        *[(name, x.stride()) for name, x in given.items()],
        *batches,
    )
