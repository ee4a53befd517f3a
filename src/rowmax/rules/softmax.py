"""The softmax by rows, tile after tile, and its derivative.

``m' = max(m, rowmax S)``, ``alpha = exp(m - m')``, ``P = exp(S - m')``, ``l' = alpha l + rowsum
P``, ``O' = alpha O + P V``; at the end ``out = O / l`` and ``LSE = m + log l``. Backward, with P
recomputed from LSE, ``Delta_i = dO_i . out_i - dLSE_i`` and ``dS = P (dP - Delta)``.

Exponentials are of two. Scores in natural units enter them times ``LOG2E``, and only as a
difference from the row's maximum or lse: a bias may be the largest number of its dtype, and times
log2(e) it would overflow.
"""

from __future__ import annotations

import math
from typing import Any

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
inf = math.inf


def where(condition: Any, x: Any, y: Any) -> Any:
    """Return x where the condition holds, else y."""
    return x if condition else y


def exp2(x: Any) -> Any:
    """Return ``2^x``."""
    return 2.0**x


def moved(m, peak):
    """Return (m', base): the new maximum, and the number that is subtracted from scores.

    ``base`` is m', but 0 for a row that has seen nothing: -inf less -inf would be NaN.
    """
    m = max(m, peak)
    return m, where(m == -inf, 0.0, m)


def with_sink(m, l, sink):
    """Return (m', l', alpha) with the sink as one more score, m in natural units.

    A sink may be the largest number of its dtype, which fits only in natural units.
    """
    m_new = max(m, sink)
    base = where(m_new == -inf, 0.0, m_new)
    alpha = exp2((m - base) * LOG2E)
    return m_new, l * alpha + exp2((sink - base) * LOG2E), alpha


def headroom(keys, dropout_p):
    """Return a power of two c for which the sums of c v cannot overflow.

    Before it is divided, ``O = sum_j P_j R_j v_j`` has up to ``keys / (1 - p)`` times the greatest
    |v|: each weight is at most 1, and its R at most ``1 / (1 - p)``. So c is less than half the
    inverse. Times c a v is exact, unless it falls below the least normal number.
    """
    return 2.0 ** -(math.frexp(keys / (1.0 - dropout_p))[1] + 1)


def score_gradient(p, dp, delta):
    """Return ``dS = P (dP - Delta)``."""
    return p * (dp - delta)
