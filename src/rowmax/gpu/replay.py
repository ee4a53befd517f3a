"""The launches of a call, recorded once and repeated for calls like it.

A call makes tensors, and launches kernels that read and write them. Sizes, strides, dtypes and
options decide which. A later call like it needs neither plans nor keys: it makes tensors of the
same sizes, and launches the same kernels at the new addresses. Zeros, sums and copies by torch are
repeated between them. A call with another operation is not recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, count
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..torch_compat import DispatchMode, empty_on_gpu
from . import compat
from .compiled import Launch, Span, recorded_by
from .kept import Plans

#: function of the tensors of a call, and of memory for its first result -> its results, or None
#: where it is no longer kept
Again = Callable[..., Any]
#: where an operand begins: (number of its tensor, bytes from the start)
Place = tuple[int, int]

#: by number; what a CUDA graph may replay stays
_RECORDS = Plans(1024)
_numbers = count()

aten = torch.ops.aten
#: operations that make a tensor without values
EMPTY = frozenset({
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
    aten.new_empty.default, aten.new_empty_strided.default,
})  # fmt: skip
#: operations that look at the memory of their first argument
VIEWS = frozenset({
    aten.alias.default, aten.detach.default, aten.expand.default, aten.permute.default,
    aten.select.int, aten.slice.Tensor, aten.squeeze.dim, aten.t.default, aten.transpose.int,
    aten.unsqueeze.default, aten.view.default,
})  # fmt: skip


def _sum(made: Tensor, x: Tensor, dims: Any, keepdim: bool = False, *, dtype: Any = None) -> None:
    torch.sum(x, dims, keepdim, dtype=dtype, out=made)


def _copy(made: Tensor, x: Tensor, **_: Any) -> None:
    made.copy_(x)


def _zeros(made: Tensor, *_: Any, **__: Any) -> None:
    made.zero_()


#: by operation: the function that writes its result for the other arguments
WRITERS: dict[Any, Callable[..., None]] = {
    aten.sum.dim_IntList: _sum, aten.clone.default: _copy, aten._to_copy.default: _copy,
    aten.new_zeros.default: _zeros, aten.zeros_like.default: _zeros,
}  # fmt: skip


class _Watch(DispatchMode):
    """The tensors that a call makes, and whether it does anything that cannot be repeated.

    Operations come between the launches.
    """

    def __init__(self, launches: list[Any]) -> None:
        super().__init__()
        self.launches = launches
        self.made: list[Tensor] = []
        self.views: list[tuple[Tensor, Tensor]] = []  # each with its source
        self.complete = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in EMPTY:
            self.made.append(result)
        elif func in VIEWS:
            self.views.append((result, args[0]))
        elif func in WRITERS and result.device == args[0].device:
            self.made.append(result)
            self.launches.append(Operation(func, result, args, kwargs or {}))
        else:
            self.complete = False
        return result


class Step(NamedTuple):
    """One launch, and where its operands begin: places, or functions from all addresses.

    An operation of torch is a launch whose operands are tensors.
    """

    launch: Callable[[tuple[Any, ...], tuple[Any, ...]], None]
    pointers: Any
    bases: Any

    def at_numbers(self, n: int, within: dict[Place, int]) -> Step:
        """Return the step with functions of the addresses of n tensors, then of those within."""
        found = [
            _picked([n + within[place] if place[1] else place[0] for place in places])
            for places in (self.pointers, self.bases)
        ]
        return Step(self.launch, *found)


def _picked(numbers: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """Return the function that picks the members with these numbers of a list."""
    if len(numbers) < 2:  # itemgetter would return no tuple
        return lambda at: tuple(at[n] for n in numbers)
    return itemgetter(*numbers)


class _Places:
    """The numbers of tensors: the given ones, those made, then those that stay (plans' tables)."""

    def __init__(self, known: list[Tensor], views: list[tuple[Tensor, Tensor]]) -> None:
        self.tensors = list(known)
        self.sources = {id(x): source for x, source in views}

    def of(self, x: Any) -> Place:
        if isinstance(x, Span):
            n, offset = self.of(x.tensor)
            return n, offset + x.offset
        for n, tensor in enumerate(self.tensors):
            if tensor is x:
                return n, 0
        source = self.sources.get(id(x))
        if source is not None:
            n, offset = self.of(source)
            return n, offset + x.data_ptr() - source.data_ptr()
        self.tensors.append(x)
        return len(self.tensors) - 1, 0


class Operation(NamedTuple):
    """An operation of torch, and the tensor that it made."""

    func: Any
    made: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def step(self, places: _Places) -> OperationStep:
        """Return the step that repeats it."""
        x, *more = self.args
        numbers, write, kwargs = [places.of(self.made)[0]], WRITERS[self.func], self.kwargs
        if write is _zeros:
            return OperationStep(lambda tensors, _: _zeros(*tensors), numbers)
        number, start = places.of(x)
        begin, sizes, strides = start // x.element_size(), x.shape, x.stride()

        def repeat(tensors: tuple[Any, ...], _: Any) -> None:
            made, base = tensors
            # no gradient: a given tensor may want one
            x = base.detach().as_strided(sizes, strides, base.storage_offset() + begin)
            write(made, x, *more, **kwargs)

        return OperationStep(repeat, [*numbers, number])


class OperationStep(NamedTuple):
    """An operation, and the numbers of its tensors: the one that it writes, then what it reads."""

    repeat: Callable[[tuple[Any, ...], Any], None]
    tensors: list[int]

    def at_numbers(self, n: int, within: dict[Place, int]) -> Step:
        """Return the step with functions of the addresses, to which n tensors are appended."""
        first = n + len(within)
        return Step(self.repeat, _picked([first + x for x in self.tensors]), _picked([]))


class Record:
    """The launches and operations of a call. It keeps only the tensors that stay."""

    def __init__(
        self,
        given: list[Any],
        watch: _Watch,
        results: tuple[Any, ...],
        launches: list[tuple[Launch, Any, tuple[Any, ...]] | Operation],
    ) -> None:
        self.device = given[0].device.index
        self.given = [n for n, x in enumerate(given) if x is not None]
        first = len(self.given)
        places = _Places([given[n] for n in self.given] + watch.made, watch.views)
        #: (sizes, strides, dtype)
        self.made = [(tuple(x.shape), x.stride(), x.dtype) for x in watch.made]
        self.type = type(results)
        of_result = [None if x is None else places.of(x) for x in results]
        past = first + len(watch.made)
        self.complete = all(x is None or first <= x[0] < past for x in of_result)
        self.results = [None if x is None else x[0] for x in of_result]
        #: by number of a result that is a part of its tensor: how to look at it
        self.views = {
            n: (x.shape, x.stride(), place[1] // x.element_size())
            for n, (x, place) in enumerate(zip(results, of_result, strict=True))
            if place is not None and not any(x is y for y in watch.made)
        }
        steps: list[Step | OperationStep] = []
        within: dict[Place, int] = {}  # places inside of tensors, by their order
        for noted in launches:
            if isinstance(noted, Operation):
                steps.append(noted.step(places))
                continue
            launch, t, bases = noted
            addressed = launch.addressed(t, bases)
            if addressed is None:
                self.complete = False
                continue
            copied = zip(launch.copies, bases, strict=True)
            of_step = (
                [places.of(x) for x in t if x is not None],
                [places.of(x) for copy, x in copied if copy is not None],
            )
            for place in chain(*of_step):
                if place[1]:
                    within.setdefault(place, len(within))
            steps.append(Step(addressed, *of_step))
        n = len(places.tensors)
        self.steps = [x.at_numbers(n, within) for x in steps]
        self.operates = any(isinstance(x, OperationStep) for x in steps)
        self.within = list(within)
        self.stay = places.tensors[past:]
        self.addresses = [x.data_ptr() for x in self.stay]

    def __call__(self, given: Sequence[Any], into: Tensor | None = None) -> tuple[Any, ...]:
        """Return the results of a call with these tensors.

        ``into`` is memory for the first result; it is not used if kernels cannot write it.
        """
        if compat.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self(given, into)
        tensors = [given[n] for n in self.given]
        if into is None:
            tensors += [empty_on_gpu(*like) for like in self.made]
        else:
            replaced = self._replaced(into)
            for n, like in enumerate(self.made):
                tensors.append(into if n == replaced else empty_on_gpu(*like))
        at: list[Any] = [x.data_ptr() for x in tensors]
        at += self.addresses
        at += [at[n] + offset for n, offset in self.within]
        if self.operates:
            at += tensors
            at += self.stay
        for launch, pointers, bases in self.steps:
            launch(pointers(at), bases(at))
        results = [None if n is None else tensors[n] for n in self.results]
        for n, view in self.views.items():
            results[n] = results[n].as_strided(*view)  # pyright: ignore
        return tuple(results) if self.type is tuple else self.type(*results)

    def _replaced(self, into: Tensor) -> int:
        """Return which of the tensors that a call makes may be ``into``, -1 if none may."""
        if self.results[0] is None or 0 in self.views:
            return -1
        made = self.results[0] - len(self.given)
        same = (into.shape, into.stride(), into.dtype) == self.made[made]
        return made if same and not into.data_ptr() & 15 else -1


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which the device of a call is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _is_recordable(device: torch.device) -> bool:
    """Return True on a CUDA device, unless it captures a graph: tensors have no values then."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def record(
    run: Callable[[Sequence[Any]], tuple[Any, ...]], given: Sequence[Any]
) -> tuple[tuple[Any, ...], Again | bool | None]:
    """Return (results of the call, the function that repeats it).

    Instead of the function: False if such calls cannot be recorded, None if this one could not.

    ``run`` computes the results of the tensors ``given``; it has run for others like these. The
    function repeats the launches for others again, and returns None once they are dropped.
    """
    if not _is_recordable(given[0].device):
        return run(given), None
    # objects of their own: q and k may be one tensor here, and two in a call like it
    aliases = [None if x is None else x.detach() for x in given]
    with recorded_by() as launches, _Watch(launches) as watch:
        results = run(type(given)(*aliases) if hasattr(given, "_fields") else aliases)
    if not watch.complete or not launches:
        return results, False
    with _current(given[0].device):  # kernels are those of the tensors' device
        found = Record(aliases, watch, results, launches)
    if not found.complete:
        return results, False
    _RECORDS.keep(next(_numbers), found)
    kept = weakref.ref(found)  # weak: the cache knows how many tables may stay
    del found

    def again(given: Sequence[Any], into: Tensor | None = None) -> Any:
        record = kept()
        return None if record is None else record(given, into)

    return results, again
