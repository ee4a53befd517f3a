"""Cases of every feature, and the rule by which an answer is right, for tests of any backend.

>>> from rowmax.testing import CASES, answer, complaints, cotangents, expected, make
>>> call = make(CASES[0], "cpu")
>>> grads = cotangents(call)
>>> complaints(answer(call, *grads, backend="torch"), expected(call, *grads))
[]
"""

from .cases import LEAVES, Call, Case, field_of, make
from .second_order import (
    Directions,
    SecondAnswer,
    SecondExpected,
    directions,
    second_answer,
    second_complaints,
    second_definition,
    second_expected,
)
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
    "CASES", "COVERING", "LEAVES", "Answer", "Call", "Case", "Directions", "Expected",
    "SecondAnswer", "SecondExpected", "answer", "complaint", "complaints", "cotangents",
    "definition", "directions", "expected", "field_of", "make", "poisoned", "refusal",
    "second_answer", "second_complaints", "second_definition", "second_expected", "tagged",
]  # fmt: skip
