"""The declaration of the inputs: what is derived from it, and that real calls are as it says."""

from __future__ import annotations

import pytest
import torch

import rowmax
from rowmax.call.inputs import (
    DIFFERENTIABLE,
    INPUTS,
    Gradients,
    Options,
    Positions,
    Tangents,
    Tensors,
    Wanted,
    parameters_of,
    part_of,
    schema,
)
from rowmax.rules.score import ScoreTerms
from rowmax.testing import CASES, Case, make


def test_records_have_the_fields_of_the_declaration() -> None:
    assert Gradients._fields == Tangents._fields == Wanted._fields == DIFFERENTIABLE
    assert Tensors._fields[: len(DIFFERENTIABLE)] == DIFFERENTIABLE


def test_the_schema_is_that_of_the_operators() -> None:
    names = [one.split()[-1].removesuffix("=0") for one in schema().split(", ")]
    assert names == [*Tensors._fields, *Options._fields]
    registered = torch.ops.rowmax.forward.default._schema
    assert [one.name for one in registered.arguments] == names
    assert tuple(names[-5:]) == Positions._fields
    assert {one.name for one in registered.arguments if one.has_default_value()} == set(names[-5:])
    optional = {one.name for one in registered.arguments if one.type.kind() == "OptionalType"}
    given = {name for name in names if name in Tensors._field_defaults}
    assert optional == given | {"left", "right", "backend"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_inputs_have_the_declared_axes(case: Case) -> None:
    problem, tensors = make(case).problem()
    sizes = {
        "b": 1 if problem.varlen else problem.batch,
        "i": problem.total_q,
        "j": problem.total_k,
        "h": problem.hq,
        "g": problem.hk,
        "d": problem.d,
        "e": problem.dv,
        "c": problem.batch + 1,
        "t": len(parameters_of(problem.heads)),
    }
    for name, t in tensors._asdict().items():
        if t is None:
            continue
        one = INPUTS[name]
        of_sequences = problem.varlen and name in ("bias", "allowed", "lengths", "prefix")
        if of_sequences:  # they have an axis for each sequence, and rows of the longest
            sizes = sizes | {"b": problem.batch, "i": problem.nq, "j": problem.nk}
        assert t.dim() == len(one.letters), name
        for axis, size in zip(one.letters, t.shape, strict=True):
            assert size == sizes[axis] or (size == 1 and one.may_be_one(axis)), (name, axis)


def test_part_of_cuts_the_named_axes() -> None:
    q, bias = torch.randn(2, 7, 3, 4), torch.randn(1, 3, 7, 1)
    rows, heads = slice(2, 5), slice(1, 2)
    assert torch.equal(part_of("q", q, i=rows, h=heads), q[:, rows, heads])
    assert torch.equal(part_of("bias", bias, b=heads, i=rows, j=rows), bias[:, :, rows])
    assert part_of("bias", None, i=rows) is None


def test_a_part_of_the_queries_is_that_part_of_the_result() -> None:
    q, k = torch.randn(1, 6, 2, 8), torch.randn(1, 9, 2, 8)
    whole = rowmax.attention(q, k, k)
    some = slice(1, 4)
    part = rowmax.attention(part_of("q", q, i=some), k, k)
    torch.testing.assert_close(part, part_of("q", whole, i=some))


def test_the_parameters_of_heads_are_the_last_terms_of_a_score() -> None:
    """Kernels fill these fields by their place."""
    assert ScoreTerms._fields[-len(parameters_of()) :] == parameters_of()
