"""The softmax by rows, tile after tile, and its derivative.

``m' = max(m, rowmax S)``, ``alpha = exp(m - m')``, ``P = exp(S - m')``, ``l' = alpha l + rowsum
P``, ``O' = alpha O + P V``; at the end ``out = O / l`` and ``LSE = m + log l``. Backward, with P
recomputed from LSE, ``Delta_i = dO_i . out_i - dLSE_i`` and ``dS = P (dP - Delta)``.

Any finite reference in place of the maximum m gives the same out and LSE: it cancels in ``O / l``
and in ``m + log l``. It only has to keep weights in range. So it may lag (``followed``): the
weights of a tile are made by the reference of the tile before, and no maximum is taken. Their sums,
which l needs anyway, show how far the scores have risen. The reference then follows, before the
next tile. A weight is infinite only where a score exceeds the reference by 128 in base 2 within one
tile. Then l or O is not finite any more, whatever follows, and the row is computed again by
maxima. bfloat16 has the range of float32, and weights of any size have the same relative rounding.

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
log2 = math.log2
#: the sum of weights from which a reference that lags moves
FAR = 2.0**8
#: the sum l from which a row counts as overflowed: up to 2^126, 1 / l is a normal number
FULL = 2.0**100
#: the most by which a reference that lags moves in base 2: the factor of O stays a normal number,
#: also where ``m - m'`` is rounded
MOST = 100.0


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


def followed(m, s):
    """Return the reference, in base 2, after weights with the sum s: ``m + log2 s`` past 2^8.

    The next weights of such scores are then at most 1, or 2^28 after a move by MOST. It moves by
    less than the scores have risen, and by the logarithm of the number of weights. If it moved by
    more than 126, ``2^(m - m')`` would be 0 on a GPU, and the row would lose its sums.
    """
    return where(s > FAR, m + min(log2(where(s > FAR, s, 1.0)), MOST), m)


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
