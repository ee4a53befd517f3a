"""Cases with few queries and as many keys as before, or more."""

from __future__ import annotations

from dataclasses import replace

from rowmax.testing import Case

MOST = 5  # queries of a sequence


def with_few_queries(case: Case, times: int = 1) -> Case:
    """Return the forward of a case with few queries, and ``times`` as many keys."""
    sequences = case.sequences and tuple((min(i, MOST), times * j) for i, j in case.sequences)
    nk = case.nq if case.nk is None else case.nk
    return replace(
        case, nq=min(case.nq, MOST), nk=times * nk, sequences=sequences, grads=(), dlse=False
    )
