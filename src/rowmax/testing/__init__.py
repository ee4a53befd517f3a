"""Cases of every feature, and the rule by which an answer is right, for tests of any backend.

>>> from rowmax.testing import CASES, answer, complaints, cotangents, expected, make
>>> call = make(CASES[0], "cpu")
>>> grads = cotangents(call)
>>> complaints(answer(call, *grads, backend="torch"), expected(call, *grads))
[]
"""

from .cases import LEAVES, Call, Case, field_of, make
from .table import CASES, COVERING, tagged
from .tolerance import (
    Answer,
    Expected,
    answer,
    complaint,
    complaints,
    cotangents,
    definition,
    expected,
    poisoned,
    refusal,
)

__all__ = [
    "CASES",
    "COVERING",
    "LEAVES",
    "Answer",
    "Call",
    "Case",
    "Expected",
    "answer",
    "complaint",
    "complaints",
    "cotangents",
    "definition",
    "expected",
    "field_of",
    "make",
    "poisoned",
    "refusal",
    "tagged",
]
