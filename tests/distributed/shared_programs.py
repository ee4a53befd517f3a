"""The functions that ranks run for the tests of shared memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

import rowmax
from rowmax import distributed as rd
from rowmax.call.dispatch import prepared
from rowmax.call.inputs import Arrivals
from rowmax.distributed import Layout, arrivals, collectives, pulls, shared
from rowmax.distributed.groups import group_of
from rowmax.distributed.strategies import keys as by_keys
from rowmax.rules.arrivals import ALL
from rowmax.testing import Answer

from .programs import copies, heads_apart, own_answer


def shared_answer(rank: int, *given: Any) -> tuple[Answer, int]:
    """Return the answer of a rank's rows with shared memory, and the uses of it."""
    used = 0
    show = shared.Region.show

    def counted(region: shared.Region) -> None:
        nonlocal used
        used += 1
        show(region)

    with copies("shared"), mock.patch.object(shared.Region, "show", counted):
        return own_answer(rank, *given), used


def answer_apart(rank: int, *given: Any) -> tuple[Answer, int]:
    """Return the answer of rows that are shown and gathered in two places, and rows in one."""
    with copies("shared"):
        together, used = own_answer(rank, *given), 0
        real = pulls.PulledRows.begin

        def begun(rows: pulls.PulledRows, stage: int) -> Any:
            nonlocal used
            used += rows.plan.in_place
            return real(rows, stage)

        with mock.patch.object(pulls, "in_place", return_value=False):
            apart = own_answer(rank, *given)
        with mock.patch.object(pulls.PulledRows, "begin", begun):
            again = own_answer(rank, *given)
    for mine in (together, again):
        for (name, a, _), (_, b, _) in zip(apart.items(), mine.items(), strict=True):
            assert torch.equal(a, b), name
    return apart, used


def meetings(rank: int) -> list[tuple[int, int]]:
    """Return for uses of regions which they are, and how often ranks met before they wrote."""
    size = 2 << 20
    with copies("shared"), mock.patch.object(shared, "MOST_IN_TURN", 1 << 20):
        regions, found = shared.Regions(group_of(None), torch.device("cpu")), []
        for region in regions.rows:
            region.open(size)
            region.show()
        uses = regions.rows[0].uses
        for wanted, captured in ((64, False), (64, False), (size, False), (64, False), (64, True)):
            uses.captured |= captured
            for _ in range(2):
                region, meets = regions.turn(wanted)
                assert region.memory is not None
                with mock.patch.object(region.memory, "barrier", mock.Mock()) as barrier:
                    region.open(wanted, meets=meets)
                found.append((regions.rows.index(region), barrier.call_count))
        return found


def memory_of_graphs(rank: int) -> list[int]:
    """Return the first bytes of memory that a graph read, after its region has grown twice."""
    group = group_of(None)
    with copies("shared"):
        region = shared.Region(group, torch.device("cpu"))
        first = region.open(64)
        first.fill_(rank + 1)
        region._captured = True
        for size in (region.size + 1, 2 * region.size + 1):
            region.open(size).fill_(99)
            region.show()
        (kept,) = region._of_graphs
        return [int(t[0]) for t in kept.bytes]


def answer_by_heads(rank: int, *given: Any) -> tuple[Answer, int]:
    """Return the answer of a rank's rows, and how often heads arrived one after the other."""
    used, real = 0, pulls.PulledRows.begin

    def begun(rows: pulls.PulledRows, stage: int) -> Any:
        nonlocal used
        used += rows.plan.gathered[stage].by_heads
        return real(rows, stage)

    with (
        copies("shared"),
        mock.patch.object(by_keys, "arrives", return_value=True),
        heads_apart(),
        mock.patch.object(pulls.PulledRows, "begin", begun),
    ):
        return own_answer(rank, *given), used


class _Early:
    """A prepared call whose forward takes arrivals: all copies are counted before it."""

    def __init__(self, job: Any, seen: list[int]) -> None:
        self.job, self.seen, self.takes_arrivals = job, seen, True

    def forward(
        self, tensors: Any, into: Any, arrivals: Arrivals | None = None, gap: Any = None
    ) -> Any:
        assert gap is None
        if arrivals is not None:
            assert int(arrivals.arrived) == ALL
            self.seen.append(int(arrivals.needed[1:].max()))
        return self.job.forward(tensors, into)

    def backward(self, *given: Any, **more: Any) -> Any:
        return self.job.backward(*given, **more)


def stored(count: Any, number: int) -> None:
    """Store a number at once."""
    count.view(torch.int32).fill_(number)


@contextlib.contextmanager
def _arriving(job: Callable[[Any], Any]) -> Iterator[list[int]]:
    """Let forwards of a job take arrivals; yield the copies of each."""
    groups: list[int] = []
    pull, ready = shared.Region.pull_counted, by_keys.prepared

    def counted_pull(region: shared.Region, steps: Any) -> Any:
        found = pull(region, steps)
        if steps:
            groups.append(steps[-1][0])
            region._store_count(ALL)
        return found

    with (
        copies("shared"),
        mock.patch.object(by_keys, "arrives", return_value=True),
        mock.patch.object(by_keys, "may_count", return_value=True),
        mock.patch.object(shared, "store_on_stream", return_value=stored),
        mock.patch.object(shared.Region, "pull_counted", counted_pull),
        mock.patch.object(by_keys, "prepared", lambda *given: job(ready(*given))),
    ):
        yield groups


def early_answer(rank: int, *given: Any) -> tuple[Answer, list[int], list[int]]:
    """Return the answer of forwards that take arrivals, the copies of each, and those needed."""
    seen: list[int] = []
    with _arriving(lambda job: _Early(job, seen)) as groups:
        return own_answer(rank, *given), groups, seen


class _Joined(_Early):
    """A prepared call whose forward takes a gap: a call of each chunk."""

    def forward(self, tensors: Any, into: Any, arrivals: Any = None, gap: Any = None) -> Any:
        if gap is None:
            return self.job.forward(tensors, into)
        self.seen.append(gap.queries)
        nk, nq = tensors.k.shape[1], tensors.q.shape[1]
        chunks = (
            (slice(0, gap.queries), nk - nq + gap.queries - gap.keys),
            (slice(gap.queries, nq), nk),
        )
        found = []
        for rows, keys in chunks:
            some = tensors._replace(
                q=tensors.q[:, rows], k=tensors.k[:, :keys], v=tensors.v[:, :keys]
            )
            found.append(prepared(some, self.job.options).forward(some))
        return torch.cat([out for out, _ in found], 1), torch.cat([lse for _, lse in found], 2)


def joined_answer(rank: int, counts: bool, *given: Any) -> tuple[Answer, list[int]]:
    """Return the answer of a rank whose chunks are one call of its forward, and their queries.

    ``counts``: False as in a graph, where calls wait for all keys.
    """
    seen: list[int] = []
    with (
        _arriving(lambda job: _Joined(job, seen)),
        mock.patch.object(arrivals, "takes_gap", return_value=True),
        mock.patch.object(arrivals, "arrives", return_value=True),
        mock.patch.object(by_keys, "may_count", return_value=counts),
        mock.patch.object(arrivals, "_known", {}),
    ):
        return own_answer(rank, *given), seen


def joined_without_memory(rank: int, *given: Any) -> tuple[Answer, list[int]]:
    """Return the answer where chunks would be one call, and there is no shared memory for rows."""
    with (
        mock.patch.object(by_keys, "PulledRows", side_effect=MemoryError),
        mock.patch.object(by_keys, "without_regions"),
    ):
        return joined_answer(rank, True, *given)


def one_after_the_other(rank: int, size: int, calls: int) -> float:
    """Return the largest difference of calls with shared memory, of sizes that change.

    A rank begins late, and another reads late. Some rows are too long to take turns.
    """
    worst, pull, pulls_so_far = 0.0, shared.Region.pull, 0

    def late(region: shared.Region, *given: Any) -> Any:
        nonlocal pulls_so_far
        pulls_so_far += 1
        if pulls_so_far % size == rank:
            time.sleep(0.02)
        return pull(region, *given)

    for way in ("shared", "collectives"):
        generator, found = torch.Generator().manual_seed(0), []
        with (
            copies(way),
            mock.patch.object(shared.Region, "pull", late),
            mock.patch.object(shared, "MOST_IN_TURN", 1 << 20),
        ):
            for one in range(calls):
                n = (64, 1024, 192, 256)[one % 4] * size
                layout = Layout.zigzag(n, size)
                q = torch.randn(3, 1, n, 4, 64, generator=generator)[:, :, layout.positions(rank)]
                leaves = [t.clone().requires_grad_() for t in q]
                if rank == one % size:
                    time.sleep(0.02)  # another rank comes late
                out: Any = rd.attention(*leaves, layout=layout, backend="torch", mask=_CAUSAL)
                found += [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]
        if way == "shared":
            first = found
        else:
            pairs = zip(first, found, strict=True)
            worst = max(float((a - b).abs().max()) for a, b in pairs)
    return worst


_CAUSAL = rowmax.Causal()


def shared_or_not(rank: int, trouble: str) -> tuple[bool, bool, str]:
    """Return if memory is shared where rank 1 has a trouble, if the result is right, the error."""
    layout = Layout.zigzag(4096, 2)
    x = torch.randn(1, 4096, 2, 128, generator=torch.Generator().manual_seed(0))
    mine = x[:, layout.positions(rank)]
    want = rowmax.attention(x, x, x, backend="torch")[:, layout.positions(rank)]  # pyright: ignore
    makes = shared._File.__init__

    def failing(self: Any, size: int, group: Any, device: torch.device) -> None:
        if trouble == "at once" or size > 1 << 21:
            collectives.all_objects(("", "no room"), group)
            raise OSError("no room")
        makes(self, size, group, device)

    patches = {
        "host": mock.patch.object(shared, "_host", return_value=f"host {rank}"),
        "word": mock.patch.dict(os.environ, {shared.VARIABLE: "shmem"} if rank else {}),
        "none": contextlib.nullcontext(),
    }
    patch = patches.get(trouble) or mock.patch.object(shared._File, "__init__", failing)
    with copies("shared"), patch:
        try:
            got: Any = rd.attention(mine, mine, mine, layout=layout, backend="torch")
        except ValueError as error:
            return False, False, str(error)
        regions = shared.shares_memory(group_of(None), x.device)
    return regions, torch.allclose(got, want, atol=1e-5), ""
