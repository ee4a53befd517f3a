"""Dispatch: compose a call of jobs, each computed by the first backend that can.

A backend is imported only for a problem on a kind of device that it runs on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from importlib import import_module
from itertools import islice
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ..imports import without_collections
from ..torch_compat import constant_in_graphs
from .inputs import (
    HEAD_TERMS,
    Arrivals,
    Cotangents,
    Gap,
    Gradients,
    Options,
    Places,
    Results,
    Tangents,
    Tensors,
    Wanted,
    WantedSecond,
)
from .problem import Problem, problem_of
from .recent import Recent

Call = Literal["forward", "backward", "tangent", "tangent_backward"]
#: calls that a backend may be without, and that one backend computes whole
SECOND_ORDER = ("tangent", "tangent_backward")

#: every backend, the most specialised first
NAMES = ("hopper", "triton", "cpu", "torch", "reference")

#: the module of each backend, and the devices that it runs on
_MODULES = {
    "hopper": "rowmax.gpu.hopper",
    "triton": "rowmax.gpu.triton",
    "cpu": "rowmax.cpu",
    "torch": "rowmax.tiled",
    "reference": "rowmax.reference",
}
_DEVICES = {"hopper": ("cuda",), "triton": ("cuda", "xpu"), "cpu": ("cpu",)}
#: the extra that installs the libraries of a backend
_EXTRAS = {"cpu": "cpu"}
#: used only by name: it allocates the whole score matrix
_BY_NAME_ONLY = ("reference",)
#: compute packed sequences one after the other
_ONE_BY_ONE = ("torch", "reference")
#: head sizes that every backend takes
NARROW = 512
#: consists of differentiable operations: autograd differentiates it to any order
PLAIN_OPERATIONS = ("reference",)


class Backend(Protocol):
    """The functions that the module of a backend has.

    It may have those of ``SecondOrder``, and four more. ``lacks(problem, call) -> dict[str, str]``
    names the results that it does not compute of a call that ``supports`` accepts, each with the
    reason.
    ``defers(problem, call) -> str | None`` returns why the next backend that can takes a call that
    ``supports`` accepts, unless this one is named: another computes it faster.
    ``notes(problem, call) -> list[str]`` returns sentences that ``explain`` prints below a job.
    ``record(run, given)`` returns the results of ``run(given)``, and a function that repeats its
    launches for tensors like these or returns None. In its place it returns False if such calls
    cannot be recorded, None if a later one may be.
    ``compile_ahead(problem, tensors, backward, wanted)`` returns a context for a first forward.
    Meanwhile and after, threads compile the kernels of ``backward(out, lse, dout)``.
    """

    def supports(self, problem: Problem, call: Call) -> str | None:
        """Return None, or the reason why the backend does not compute the call, a sentence."""
        ...

    def forward(self, problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Return (out ``[B, Nq, Hq, Dv]``, lse ``[B, Hq, Nq]``), contiguous."""
        ...

    def backward(
        self,
        problem: Problem,
        tensors: Tensors,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> Gradients:
        """Return the wanted gradients, contiguous, each of its input's shape.

        Their dtypes are those of ``problem.gradient_dtype``. A backend whose stores round dk and dv
        returns these in their inputs' dtype.
        """
        ...


class SecondOrder(Protocol):
    """The functions of a backend that also computes tangents. ``lacks`` is not read of them."""

    def tangent(self, problem: Problem, tensors: Tensors, tangents: Tangents) -> Results:
        """Return the results and their tangents, in one pass."""
        ...

    def tangent_backward(
        self,
        problem: Problem,
        tensors: Tensors,
        tangents: Tangents,
        results: Results,
        cotangents: Cotangents,
        wanted: WantedSecond,
    ) -> tuple[Gradients, Gradients]:
        """Return the wanted gradients of the inputs and of the tangents, as a backward does."""
        ...


class Limit(NamedTuple):
    """A limit of a backend, and the sentence about a problem past it."""

    keeps: Callable[[Problem], bool]
    sentence: str  # ``{0.d}`` stands for the head size of the problem, and so on


#: the limit of backends that make draws of dropout for 64 keys at a time (``rules/dropout.py``)
WHOLE_DRAWS = Limit(
    lambda p: p.positions is None or p.positions.key % 64 == 0,
    "it draws dropout for 64 keys at a time: it takes no block that begins at key "
    "{0.positions.key}",
)


def beyond(limits: Iterable[Limit], problem: Problem) -> str | None:
    """Return the sentence of the first limit that a problem does not keep, or None."""
    for limit in limits:
        if not limit.keeps(problem):
            return limit.sentence.format(problem)
    return None


def supports_all_but_bent_tangents(problem: Problem, call: str) -> str | None:
    """Return None for every call, except tangents of terms that bend scores."""
    bending = [name for name in problem.heads if not HEAD_TERMS[name].added]
    if call not in SECOND_ORDER or not bending:
        return None
    return f"it has no tangent of {', '.join(bending)}"


class Job(NamedTuple):
    """Results of a call that one backend computes together."""

    call: Call
    #: out and lse; or some of dq, dk, dv, dbias, dsink, dheads. Of tangents: tout, tlse; dtq, ...
    results: tuple[str, ...]
    backend: str | None  # None: the backend that was named does not compute them
    reason: str | None = None  # why no backend before it computes them


class Plan(NamedTuple):
    """The jobs of a call, in the order of ``NAMES``, and their backends."""

    jobs: tuple[Job, ...]
    backends: tuple[Backend | None, ...]
    first: Backend
    whole: Backend | None  # the backend that computes all results, if one does

    def computes(self, wanted: Wanted) -> Backend | None:
        """Return the backend that computes all wanted gradients, if one does."""
        if self.whole is not None or _part(self.jobs[0], wanted) == wanted:
            return self.first
        return None


_PLAIN = 3  # tensors of a plain call: q, k and v
_NO_TERMS = (None,) * (len(Tensors._fields) - _PLAIN)
_NUMBERS_OF_INPUTS = _PLAIN, len(Tensors._fields)
_MOST_KINDS = 64  # kinds of backward of one kind of call: by strides and wanted gradients


class Prepared:
    """The calls of one kind: the same sizes, strides, dtypes, device and options.

    The second call of a kind is recorded where its backend can; later ones repeat its launches.
    """

    __slots__ = ("_again", "_backwards", "_takes_arrivals", "options", "problem")

    def __init__(self, options: Options, problem: Problem) -> None:
        self.options = options
        self.problem = problem
        #: by the gradients that are wanted, and which inputs there are: how to repeat a backward
        self._backwards: Recent[Callable[..., Any]] = Recent()
        #: by direction, and what the tensors of a backward are like; None after the first call,
        #: False where calls cannot be recorded
        self._again: dict[Any, Callable[..., Any] | bool | None] = {}
        self._takes_arrivals: bool | None = None

    @property
    def has_run(self) -> bool:
        """True after a forward of this kind: its backward needs no compiling ahead."""
        return "forward" in self._again

    @property
    def takes_arrivals(self) -> bool:
        """True if the forward can begin before its keys and values have arrived."""
        if self._takes_arrivals is None:
            self._takes_arrivals = takes_arrivals(self.problem, self.options.backend)
        return self._takes_arrivals

    def forward(
        self,
        tensors: Tensors,
        into: Tensor | None = None,
        wanted: Wanted | None = None,
        arrivals: Arrivals | None = None,
        gap: Gap | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse).

        Args:
            into: memory for out, which may be it.
            wanted: the gradients that a backward will compute.
            arrivals: keys and values arrive meanwhile; for ``takes_arrivals`` alone.
            gap: positions that queries skip; for ``takes_gap`` alone.
        """
        key: Any = "forward" if gap is None else ("forward", gap)
        given: tuple[Any, ...] = tensors
        problem = self.problem if gap is None else self.problem._replace(gap=gap)
        if arrivals is not None:
            key, given = ("arriving", gap), (*tensors, *arrivals)
        again = self._again.get(key)
        found = again(given, into) if callable(again) else None
        if found is not None:
            return found
        backend: Any = choose(self.problem, "forward", self.options.backend).first
        run = partial(backend.forward, problem)
        if arrivals is not None:
            both = Tensors, Arrivals
            return self._run(key, backend, lambda flat: run(*_grouped(flat, *both)), given)
        if wanted is None or self.has_run:
            return self._run(key, backend, run, given)
        with self._compile_ahead(tensors, wanted):
            return self._run(key, backend, run, given)

    def repeated(self, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor] | None:
        """Return (out, lse) of a forward like one before, or None if none is repeated.

        ``tensors`` are all inputs, or the first of them if no other is given.
        """
        again = self._again.get("forward")
        return again(tensors) if callable(again) else None

    def _compile_ahead(self, tensors: Tensors, wanted: Wanted) -> AbstractContextManager[None]:
        """Return a context in which the backward's kernels begin to compile, if its backend can."""
        try:
            plan = choose(self.problem, "backward", self.options.backend)
        except ValueError:  # the backward will raise it
            return nullcontext()
        compile_ahead = getattr(plan.first, "compile_ahead", None)
        if compile_ahead is None:
            return nullcontext()

        def backward(out: Tensor, lse: Tensor, dout: Tensor) -> Gradients:
            return run_backward(plan, self.problem, tensors, out, lse, dout, None, wanted)

        return compile_ahead(self.problem, tensors, backward, wanted)

    def backward(
        self,
        tensors: Tensors,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted,
        wide: bool = False,
        part: bool = False,
        into: Tensor | None = None,
        places: Places | None = None,
    ) -> Gradients:
        """Return the wanted gradients.

        Args:
            wide: dk and dv as parts of sums (``Problem.wide``).
            part: out and lse are of more keys than these (``Problem.part``).
            into: memory for the gradient of q, which may be it.
            places: memory for dk and dv, both wanted, if the backend can write there: then they
                are None. They are wide.
        """
        given = (*tensors, out, lse, dout, dlse)
        # a hook on saved tensors may return others than the forward had
        key = (wanted, wide, part, *_placed(given))
        if places is not None:
            key, given = (*key, "places", places.dk_alone is None), (*given, *places)
        again: Any = self._again.get(key)
        found: Any = again(given, into) if callable(again) else None
        if found is not None:
            if not (wide or part) and dlse is None:
                key, rows = _by_one_check(tensors, (out, lse, dout), wanted)
                self._backwards.remember(key, again, *rows)
            return found
        problem = self.problem
        if wide or part:
            problem = problem._replace(wide=wide, part=part)
        plan = choose(problem, "backward", self.options.backend)
        backend = plan.computes(wanted)
        if places is not None and not _takes("places", backend, problem):
            return self.backward(tensors, out, lse, dout, dlse, wanted, wide, part, into)
        inputs, rows = len(Tensors._fields), 4

        def run(given: tuple[Any, ...]) -> Gradients:
            at = Places(*given[inputs + rows :]) if places is not None else None
            out, lse, dout, dlse = given[inputs : inputs + rows]
            t = Tensors(*given[:inputs])
            return run_backward(plan, problem, t, out, lse, dout, dlse, wanted, at)

        return self._run(key, backend, run, given)

    def repeated_backward(
        self, rows: tuple[Any, ...], wanted: tuple[bool, ...]
    ) -> Gradients | None:
        """Return the gradients of a call like one before, if there was: by one check (``recent``).

        ``rows`` are q, k and v or all inputs, then out, lse and the gradient of out. ``wanted`` is
        for each of the inputs.
        """
        inputs, of_out = rows[:-3], rows[-3:]
        if of_out[2] is None or len(inputs) not in _NUMBERS_OF_INPUTS:
            return None
        key, given = _by_one_check(inputs, of_out, wanted)
        again = self._backwards.recall(key, *given)
        if again is None:
            return None
        if len(inputs) == _PLAIN:
            inputs = (*inputs, *_NO_TERMS)
        return again((*inputs, *of_out, None))

    def tangent(self, tensors: Tensors, tangents: Tangents) -> tuple[Tensor, ...]:
        """Return (out, lse, tout, tlse)."""
        backend: Any = choose(self.problem, "tangent", self.options.backend).first

        def run(given: tuple[Any, ...]) -> tuple[Tensor, ...]:
            return backend.tangent(self.problem, *_grouped(given, Tensors, Tangents))

        return self._again_or_run(("tangent",), backend, run, (*tensors, *tangents))

    def tangent_backward(
        self,
        tensors: Tensors,
        tangents: Tangents,
        results: Iterable[Tensor],
        cotangents: Cotangents,
        wanted: WantedSecond,
    ) -> tuple[Gradients, Gradients]:
        """Return the wanted gradients, from the results of ``tangent``."""
        backend: Any = choose(self.problem, "tangent_backward", self.options.backend).first

        def run(given: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
            records = _grouped(given, Tensors, Tangents, Results, Cotangents)
            found = backend.tangent_backward(self.problem, *records, wanted)
            return (*found[0], *found[1])

        key = ("tangent_backward", wanted)
        given = (*tensors, *tangents, *results, *cotangents)
        flat = self._again_or_run(key, backend, run, given)
        half = len(Gradients._fields)
        return Gradients(*flat[:half]), Gradients(*flat[half:])

    def _again_or_run(
        self, kind: tuple[Any, ...], backend: Backend, run: Callable[[Any], Any], given: Any
    ) -> Any:
        """Return the results of a call of second order: repeated, or computed by ``run``."""
        key = (*kind, *_placed(given))
        again = self._again.get(key)
        found = again(given) if callable(again) else None
        return self._run(key, backend, run, given) if found is None else found

    def _run(self, key: Any, backend: Backend | None, run: Callable[[Any], Any], given: Any) -> Any:
        record = getattr(backend, "record", None)
        if record is None or key not in self._again:
            if len(self._again) >= _MOST_KINDS:
                self._again.clear()
            self._again[key] = None
            return run(given)
        if self._again[key] is False:
            return run(given)
        results, self._again[key] = record(run, given)
        return results


def _by_one_check(
    inputs: tuple[Any, ...], of_out: tuple[Any, ...], wanted: tuple[bool, ...]
) -> tuple[Any, tuple[Tensor, ...]]:
    """Return the key of a backward, of q, k and v or of all inputs, and its different tensors.

    The check takes no tensor twice. Offsets of queries and of keys may be one tensor.
    """
    if len(inputs) == _PLAIN or all(x is None for x in inputs[_PLAIN:]):
        return wanted[:_PLAIN], (*inputs[:_PLAIN], *of_out)
    numbers: dict[int, int] = {}
    given, each = [], []
    for x in inputs:
        number = -1 if x is None else numbers.setdefault(id(x), len(given))
        each.append(number)
        if number == len(given):
            given.append(x)
    return (wanted[: len(Wanted._fields)], *each), (*given, *of_out)


def _grouped(given: Iterable[Any], *kinds: Any) -> list[Any]:
    """Return the members of ``given``, one after the other, as records of these kinds."""
    rest = iter(given)
    return [kind(*islice(rest, len(kind._fields))) for kind in kinds]


def _placed(given: Iterable[Tensor | None]) -> list[Any]:
    """Return the dtype and strides of each tensor, and where it begins past 16 bytes."""
    return [None if x is None else (x.dtype, x.data_ptr() & 15, x.stride()) for x in given]


_prepared: dict[Any, Prepared] = {}
_LIMIT = 4096


def prepared(tensors: Tensors, options: Options) -> Prepared:
    """Return what calls like this one have prepared. No size may be symbolic."""
    try:
        alike = [
            None if x is None else (x.dtype, x.size(), x.stride(), x.data_ptr() & 15)
            for x in tensors
        ]
    except RuntimeError:  # a tensor of ``torch.func`` has no address
        return Prepared(options, problem_of(tensors, options))
    key = (options, tensors.q.device, *alike)
    found = _prepared.get(key)
    if found is None:
        if len(_prepared) >= _LIMIT:
            _prepared.clear()
        found = _prepared[key] = Prepared(options, problem_of(tensors, options))
    return found


_IN_WORDS = {"tangent": "tangent (forward mode)", "tangent_backward": "second derivative"}


@lru_cache(maxsize=512)
def choose(problem: Problem, call: Call, name: str | None = None) -> Plan:
    """Return the plan of a call: each result from backend ``name``, or from the first that can.

    Raises:
        ValueError: the named backend, or every one, refuses the call, with the reasons.
    """
    refusals: dict[str, str] = {}
    jobs: list[Job] = []
    missing = dict.fromkeys(_results(problem, call), "")  # result -> why none computes it
    for candidate in NAMES if name is None else (name,):
        if not missing or (name is None and candidate in _BY_NAME_ONLY):
            continue
        reason = refusal(candidate, problem, call)
        if reason is None and name is None:
            reason = deferral(candidate, problem, call)
        if reason is not None:
            refusals[candidate] = reason
            continue
        lacking = {} if call in SECOND_ORDER else lacks(candidate, problem, call)
        made = tuple(result for result in missing if result not in lacking)
        if made:
            jobs.append(Job(call, made, candidate, _joined(missing, made)))
        missing = {
            result: f"{before}, {text}" if before else text
            for result, before in missing.items()
            if result in lacking
            for text in [f"not {candidate}: {lacking[result]}"]
        }
    if not jobs:
        refusals.update({result: reason for result, reason in missing.items() if reason})
        reasons = "; ".join(f"{n}: {r}" for n, r in refusals.items())
        what = _IN_WORDS.get(call, call)
        raise ValueError(f"backend: got {name!r}; it cannot take this {what}: {reasons}")
    loaded = [_load(job.backend) for job in jobs if job.backend is not None]
    if missing:
        jobs.append(Job(call, tuple(missing), None, _joined(missing, tuple(missing))))
    whole = loaded[0] if len(jobs) == 1 else None
    backends = (*loaded, *([None] if missing else []))
    return Plan(tuple(jobs), backends, loaded[0], whole)


def takes_places(problem: Problem, name: str | None) -> bool:
    """Return True if the backend of a backward can write dk and dv to places (``Places``)."""
    problem = problem._replace(wide=True)
    try:
        backend = choose(problem, "backward", name).whole
    except ValueError:
        return False
    return backend is not None and _takes("places", backend, problem)


def takes_arrivals(problem: Problem, name: str | None) -> bool:
    """Return True if the backend of a forward can begin before its keys have arrived."""
    try:
        backend = choose(problem, "forward", name).first
    except ValueError:
        return False
    return _takes("arrivals", backend, problem)


def takes_gap(problem: Problem, name: str | None) -> bool:
    """Return True if the backend of a forward takes the gap of a problem (``Gap``)."""
    try:
        backend = choose(problem._replace(gap=None), "forward", name).first
    except ValueError:
        return False
    return _takes("gap", backend, problem)


def _takes(what: str, backend: Any, problem: Problem) -> bool:
    takes = getattr(backend, f"takes_{what}", None)
    return takes is not None and takes(problem)


def check_wanted(plan: Plan, wanted: Wanted) -> None:
    """Raise if no backend of the plan computes a gradient that is wanted."""
    if plan.whole is not None:
        return
    for job in plan.jobs:
        part = _part(job, wanted)
        asked = [name for name, w in zip(part._fields, part, strict=True) if w]
        if job.backend is None and asked:
            names = ", ".join(f"d{name}" for name in asked)
            inputs = ", ".join(name if name != "heads" else "heads' parameters" for name in asked)
            raise ValueError(
                f"backend: got {plan.jobs[0].backend!r}; it does not make {names} of this call "
                f"({job.reason}); want None, or no gradient of {inputs}"
            )


def check_named(problem: Problem, name: str, wanted: Wanted) -> None:
    """Raise if the named backend refuses the forward, or the backward of wanted gradients."""
    if not any(wanted):
        choose(problem, "forward", name)
        return
    try:
        plan = choose(problem, "backward", name)
    except ValueError:
        choose(problem, "forward", name)  # its own refusal comes first
        raise
    check_wanted(plan, wanted)


def run_backward(
    plan: Plan,
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
    places: Places | None = None,
) -> Gradients:
    """Return the wanted gradients, each from the backend of its job."""
    whole: Any = plan.computes(wanted)
    if places is not None:  # the plan has one backend, which takes them
        return whole.backward(problem, tensors, out, lse, dout, dlse, wanted, places)
    if whole is not None:
        return whole.backward(problem, tensors, out, lse, dout, dlse, wanted)
    check_wanted(plan, wanted)
    found = Gradients()
    for job, backend in zip(plan.jobs, plan.backends, strict=True):
        part = _part(job, wanted)
        if backend is not None and any(part):
            made = backend.backward(problem, tensors, out, lse, dout, dlse, part)
            both = zip(found, made, part, strict=True)
            found = Gradients(*(new if want else old for old, new, want in both))
    return found


_NO_SECOND_ORDER = (
    "it computes neither tangents (forward mode) nor second derivatives; without a name, a backend "
    "that does is chosen"
)


def refusal(name: str, problem: Problem, call: Call) -> str | None:
    """Return why the backend cannot take the call, or None."""
    devices = _DEVICES.get(name)
    if devices is not None and problem.device not in devices:
        return f"it runs on {' or '.join(devices)}, the tensors are on {problem.device}"
    absent = absence(name)
    if absent is not None:
        return absent
    backend = _load(name)
    if getattr(backend, call, None) is None:
        return _NO_SECOND_ORDER
    return backend.supports(problem, call)


@constant_in_graphs
def packs(name: str | None, device: torch.device, dtype: torch.dtype, d: int) -> bool:
    """Return True if a backend computes packed sequences of head size d all at once.

    That is backend ``name``, or the first that takes them. The call has no further term. In a graph
    no argument may be symbolic.
    """
    return _packs(name, device, dtype, d)


@lru_cache(maxsize=256)
def _packs(name: str | None, device: torch.device, dtype: torch.dtype, d: int) -> bool:
    q = torch.empty(1, 1, 1, d, dtype=dtype, device="meta")
    cu = torch.empty(2, dtype=torch.int32, device="meta")
    tensors = Tensors(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu)
    problem = problem_of(tensors, Options(scale=1.0, max_q=1, max_k=1))
    problem = problem._replace(device=device.type, device_index=device.index)
    names = NAMES if name is None else (name,)
    first = next((n for n in names if refusal(n, problem, "forward") is None), "reference")
    return first not in _ONE_BY_ONE


@constant_in_graphs
def absence(name: str) -> str | None:
    """Return why a backend cannot be loaded, or None."""
    try:
        _load(name)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(name)
        hint = f': pip install "rowmax[{extra}]", in a checkout ".[{extra}]"' if extra else ""
        return f"{error.name} is not installed{hint}"
    except (ImportError, OSError, RuntimeError) as error:
        return _broken(name, f"it cannot be loaded: {type(error).__name__}: {error}")
    return None


def deferral(name: str, problem: Problem, call: Call) -> str | None:
    """Return why a backend leaves a call that it can compute to the next one, or None.

    The next one has to take the call: those after it are not faster.
    """
    found = getattr(_load(name), "defers", None)
    reason = None if found is None else found(problem, call)
    if reason is None or refusal(NAMES[NAMES.index(name) + 1], problem, call) is not None:
        return None
    return reason


@lru_cache(maxsize=16)  # the warning comes once
def _broken(name: str, reason: str) -> str:
    """Warn that an installed backend does not work; return the reason."""
    warnings.warn(f"rowmax: the {name} backend is left out: {reason}", RuntimeWarning, stacklevel=3)
    return reason


def lacks(name: str, problem: Problem, call: Call) -> Mapping[str, str]:
    """Return the results of a call that the backend does not compute, each with the reason."""
    found = getattr(_load(name), "lacks", None)
    return {} if found is None else found(problem, call)


def notes(problem: Problem, job: Job) -> tuple[str, ...]:
    """Return the sentences that the backend of a job adds to an explanation."""
    found = None if job.backend is None else getattr(_load(job.backend), "notes", None)
    return () if found is None else tuple(found(problem, job.call))


def _results(problem: Problem, call: Call) -> tuple[str, ...]:
    """Return the names of all results that a call can have."""
    if call == "forward":
        return "out", "lse"
    if call == "tangent":
        return "out", "lse", "tout", "tlse"
    present = {"bias": problem.bias is not None, "sink": problem.sink, "heads": problem.heads}
    names = ["q", "k", "v", *(name for name, there in present.items() if there)]
    kinds = ("d", "dt") if call == "tangent_backward" else ("d",)
    return tuple(kind + name for kind in kinds for name in names)


def _part(job: Job, wanted: Wanted) -> Wanted:
    """Return which gradients of a job are wanted."""
    return Wanted(
        *(w and f"d{n}" in job.results for n, w in zip(wanted._fields, wanted, strict=True))
    )


def _joined(reasons: Mapping[str, str], results: tuple[str, ...]) -> str | None:
    """Return the reasons of these results, each once."""
    return (
        "; ".join(dict.fromkeys(reasons[result] for result in results if reasons[result])) or None
    )


def _load(name: str) -> Backend:
    module = _MODULES[name]
    with without_collections(module):
        return import_module(module)  # pyright: ignore
