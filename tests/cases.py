"""The names of ``rowmax.testing`` for tests that still import them from here."""

from rowmax.testing.cases import Call, Case, make
from rowmax.testing.table import CASES

__all__ = ["CASES", "Call", "Case", "make"]
