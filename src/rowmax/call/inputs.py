"""The inputs of a call, declared once.

``Tensors`` and ``Options`` are the declaration. The operators' schema, the gradients, ``vmap`` and
the slices of a call are derived from it. An axis is named by a letter: b sequence, h query head,
g kv head, i query, j key, d head size of q and k, e of v, t parameter of a head term. ``?`` marks
an axis that may be 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from torch import SymInt, Tensor


class Input(NamedTuple):
    """The axes of an input, and its part in the derivatives."""

    axes: str  # a letter for each axis, followed by "?" where it may be 1
    gradient: bool = False

    @property
    def letters(self) -> list[str]:
        return [axis for axis in self.axes if axis != "?"]

    def may_be_one(self, axis: str) -> bool:
        return f"{axis}?" in self.axes


class Tensors(NamedTuple):
    """The inputs of one call, always with a batch dimension.

    A call over packed sequences has ``q [1, total_q, Hq, D]`` and carries ``cu_seqlens``.
    """

    q: Annotated[Tensor, Input("bihd", gradient=True)]  # [B, Nq, Hq, D]
    k: Annotated[Tensor, Input("bjgd", gradient=True)]  # [B, Nk, Hk, D]
    v: Annotated[Tensor, Input("bjge", gradient=True)]  # [B, Nk, Hk, Dv]
    bias: Annotated[Tensor | None, Input("b?h?i?j?", gradient=True)] = None
    sink: Annotated[Tensor | None, Input("h", gradient=True)] = None  # [Hq]
    heads: Annotated[Tensor | None, Input("th", gradient=True)] = None  # a row each parameter
    allowed: Annotated[Tensor | None, Input("b?h?i?j?")] = None  # bool, True may attend
    q_ids: Annotated[Tensor | None, Input("b?i")] = None  # int32, the document of each query
    k_ids: Annotated[Tensor | None, Input("b?j")] = None  # int32, the document of each key
    lengths: Annotated[Tensor | None, Input("b")] = None  # int32, keys at or past it are masked
    cu_seqlens_q: Annotated[Tensor | None, Input("c")] = None  # int32 [B + 1], first queries
    cu_seqlens_k: Annotated[Tensor | None, Input("c")] = None
    seed: Annotated[Tensor | None, Input("")] = None  # int64 [], the key of the dropout generator
    prefix: Annotated[Tensor | None, Input("b")] = None  # int32, ``right`` limits no key before it


class Options(NamedTuple):
    """The numbers of a call that are not tensors, as the operators carry them."""

    scale: float
    softcap: float = 0.0
    dropout_p: float = 0.0
    left: Annotated[int | None, SymInt] = None
    right: Annotated[int | None, SymInt] = None
    align: str = "keys"  # positions are aligned to "keys" or to "lengths"
    max_q: Annotated[int, SymInt] = 0  # longest sequence of a packed call, or a bound; 0 otherwise
    max_k: Annotated[int, SymInt] = 0
    deterministic: bool = False
    head_terms: str = ""  # the names of the head terms, joined by commas
    backend: str | None = None
    # the fields of ``Positions``: numbers at run time, symbolic where a call is traced
    shift: Annotated[int, SymInt] = 0
    query: Annotated[int, SymInt] = 0
    key: Annotated[int, SymInt] = 0
    head: Annotated[int, SymInt] = 0
    sequence: Annotated[int, SymInt] = 0

    @property
    def positions(self) -> Positions:
        return Positions(self.shift, self.query, self.key, self.head, self.sequence)


class Positions(NamedTuple):
    """The place of a call within a longer one, of which it is a block. A whole call has zeros.

    Query i stands ``shift`` keys beyond the place that its alignment gives it: bands and ALiBi
    read this. Dropout reads the rest: the numbers, within the longer call, of the block's first
    query, key, query head and sequence.
    """

    shift: int = 0
    query: int = 0
    key: int = 0
    head: int = 0
    sequence: int = 0


class HeadTerm(NamedTuple):
    """A term of the score whose parameters are one number a query head, with a gradient."""

    parameters: tuple[str, ...]  # fields of ``rules.score.ScoreTerms``
    #: it is added to the score and linear in its parameters, which carry the unit of the scores;
    #: else it is a function of the scaled product, in natural units, before the bias
    added: bool = True
    distance: bool = False  # it reads ``|i + offset - j|``


#: by the name of the public argument
HEAD_TERMS = {"alibi": HeadTerm(("slope",), distance=True)}


def parameters_of(terms: Iterable[str] = HEAD_TERMS) -> tuple[str, ...]:
    """Return the parameters of these head terms: the rows of ``Tensors.heads``, in their order."""
    return tuple(name for term in terms for name in HEAD_TERMS[term].parameters)


class Gradients(NamedTuple):
    """The results of a backward. A gradient that is not wanted is None."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    bias: Tensor | None = None
    sink: Tensor | None = None
    heads: Tensor | None = None


class Wanted(NamedTuple):
    """True for each gradient that a backward computes."""

    q: bool
    k: bool
    v: bool
    bias: bool
    sink: bool
    heads: bool = False


class Places(NamedTuple):
    """Memory for dk and dv of a backward, float32, of any rows that the device reaches.

    Row r of ``[B Nk, Hk, D]`` begins ``4 dk_rows[r]`` numbers after the first one of ``dk``. If
    ``dk_rows[r]`` is below 0, no other call adds to the row: it is rounded to the dtype of
    ``dk_alone``, and begins ``4 (-1 - dk_rows[r])`` numbers after the first one there.
    """

    dk: Tensor  # float32
    dv: Tensor
    dk_rows: Tensor  # int64 [B Nk]
    dv_rows: Tensor
    dk_alone: Tensor | None = None
    dv_alone: Tensor | None = None


class Arrivals(NamedTuple):
    """Keys and values of a forward that copies still write (``rules/arrivals.py``)."""

    arrived: Tensor  # int32 [1], the copies that are done
    needed: Tensor  # int32, those that each tile of keys waits for


class Gap(NamedTuple):
    """Positions that the queries of a forward skip: two chunks of a longer call are one call.

    The last queries are aligned to the keys. The first ``queries`` of them stand ``keys`` earlier
    than the last ones say.
    """

    queries: int
    keys: int


class Tangents(NamedTuple):
    """The tangents of the inputs, each of its input's shape and dtype. None is zero."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    bias: Tensor | None = None
    sink: Tensor | None = None
    heads: Tensor | None = None


class Results(NamedTuple):
    """The results of a forward, and their tangents."""

    out: Tensor
    lse: Tensor
    tout: Tensor
    tlse: Tensor


class Cotangents(NamedTuple):
    """The gradients of the results of a tangent. None is zero."""

    out: Tensor | None = None  # e of the formulas, like out
    lse: Tensor | None = None  # a, like lse
    tout: Tensor | None = None  # g, like out
    tlse: Tensor | None = None  # a', like lse


class WantedSecond(NamedTuple):
    """The gradients that a ``tangent_backward`` computes.

    The gradient of a tangent may be wanted where the tangent is None.
    """

    inputs: Wanted
    tangents: Wanted


def _hints(record: type) -> dict[str, Any]:
    return get_type_hints(record, include_extras=True)


#: by name, in the order of ``Tensors``
INPUTS: dict[str, Input] = {name: get_args(hint)[1] for name, hint in _hints(Tensors).items()}
#: the inputs with gradients: the first fields of ``Tensors``, the fields of ``Gradients``
DIFFERENTIABLE = tuple(name for name, one in INPUTS.items() if one.gradient)


def schema() -> str:
    """Return the arguments of an operator that takes ``(*Tensors, *Options)``.

    Positions have a default, and come last: calls and exported graphs without them mean 0.
    """
    return ", ".join(
        f"{_schema_type(hint)} {name}" + "=0" * (name in Positions._fields)
        for record in (Tensors, Options)
        for name, hint in _hints(record).items()
    )


def _schema_type(hint: Any) -> str:
    extras = getattr(hint, "__metadata__", ())
    plain = get_args(hint)[0] if extras else hint
    optional = type(None) in get_args(plain)
    kind = next((t for t in get_args(plain) if t is not type(None)), plain)
    name = "SymInt" if SymInt in extras else kind.__name__
    return name + "?" * optional


def part_of(name: str, t: Tensor | None, **ranges: slice) -> Tensor | None:
    """Return the view of an input within a range of each named axis: ``part_of("q", q, i=rows)``.

    An axis of size 1 that may broadcast stays whole.
    """
    if t is None:
        return None
    one = INPUTS[name]
    index = tuple(
        slice(None) if axis not in ranges or (one.may_be_one(axis) and size == 1) else ranges[axis]
        for axis, size in zip(one.letters, t.shape, strict=True)
    )
    return t[index]
