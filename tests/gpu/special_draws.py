"""Draw special calls for a random search: those that some kernels or paths alone compute."""

from __future__ import annotations

import random
from dataclasses import replace

from rowmax.testing import Case

#: head sizes of halves; those up to 32 come with a bias that sequences or heads share
HALVED_WIDTHS = (64, 64, 96, 96, 32, 32, 24, 40, 48, 56, 88)
SHARED = ("1hqk", "b1qk", "11qk")
#: biases whose gradient is no sum over keys or queries, in which everything may cancel
OF_PAIRS = ("bhqk", "1hqk", "b1qk", "11qk")


def with_halves(rng: random.Random, case: Case) -> Case:
    """Return a case whose backward may compute halves of a step."""
    width = rng.choice(HALVED_WIDTHS)
    sizes = {"d": width, "dv": rng.choice((width, width, width - 8))}
    if width > 32:
        return replace(case, bias=None, **sizes)
    nk = -(-(case.nq if case.nk is None else case.nk) // 8) * 8  # the keys of a bias that is copied
    shared = {"bias": rng.choice(SHARED), "bias_float32": False, "transposed": False}
    return replace(case, nk=nk, sequences=None, documents=None, **sizes, **shared)


def with_lagging(rng: random.Random, case: Case) -> Case:
    """Return a case whose forward may have a reference that lags: without terms, or with pairs."""
    terms = {"softcap": 0.0, "alibi": False, "documents": None, "positions": None}
    case = replace(case, bias=None, **terms)
    if rng.random() < 0.4:
        return case
    sizes = {"d": rng.choice((8, 16, 24, 32)), "dv": rng.choice((8, 16, 24, 32))}
    bands = {"causal": False, "left": None, "right": None, "step": None, "sequences": None}
    nk = -(-(case.nq if case.nk is None else case.nk) // 8) * 8  # the keys of a bias that is copied
    shared = {"bias": rng.choice(SHARED), "bias_float32": rng.random() < 0.4, "transposed": False}
    return replace(case, b=rng.choice((2, 4)), nk=nk, **sizes, **bands, **shared)


def with_packed(rng: random.Random, case: Case) -> Case:
    """Return a packed case under a diagonal, whose last sequences have several runs of tiles."""
    width = rng.choice((16, 64, 96, 128, 128, 128, 256))
    sizes = {"b": 1, "d": width, "dv": rng.choice((width, width, width - 8))}
    pairs = [(rng.randint(0, 700), rng.randint(0, 2500)) for _ in range(rng.randint(1, 5))]
    sequences = tuple(rng.choice((pairs, [(k, k) for _, k in pairs])))
    right = {"causal": False, "right": rng.randint(1, 300), "prefix": None}
    band = rng.choice(({"causal": True}, right))
    others = {"lengths": None, "padding": None, "step": None, "documents": None, "left": None}
    values = sizes | band | others
    return replace(
        case, sequences=sequences, bias=None, positions=None, deterministic=False, **values
    )


def with_groups(rng: random.Random, case: Case) -> Case:
    """Return a case whose query heads share keys, without a bias."""
    hk = rng.choice((1, 1, 2, 3))
    hq = hk * rng.choice((2, 3, 4, 6, 8))
    return replace(case, b=min(case.b, 2), hq=hq, hk=hk, bias=None)


def with_parts(rng: random.Random, case: Case) -> Case:
    """Return a case whose forward may split keys: few queries of many keys, without a bias."""
    nq = rng.choice((1, 16, 130, rng.randint(1, 600)))
    band = rng.choice(({}, {"causal": True}, {"left": rng.randint(1500, 3000), "right": 0}))
    others = {"padding": None, "step": None, "documents": None, "sequences": None, "prefix": None}
    values = {"left": None, "right": None, "causal": False, "align": "keys"} | band | others
    hk = rng.choice((1, 1, 2))
    sizes = {"b": min(case.b, 2), "hk": hk, "hq": hk * rng.choice((1, 2, 3, 4, 8))}
    nk = nq + rng.randint(300, 4000)
    return replace(case, nq=nq, nk=nk, bias=None, dropout=0.0, **sizes, **values)


def with_dropout(rng: random.Random, case: Case) -> Case:
    """Return a case with dropout that Hopper's kernels may compute: its limits of other terms."""
    width = rng.choice((8, 32, 40, 64, 64, 80, 96, 128, 128, 256))
    sizes = {"d": width, "dv": rng.choice((width, width, max(8, width - 8)))}
    others = {"allowed": None, "empty_rows": False, "padding": None, "step": None, "prefix": None}
    values = {"positions": None, "align": "keys", "dropout": rng.choice((0.01, 0.1, 0.5, 0.9))}
    if width > 128 or rng.random() < 0.5:
        values["bias"] = None
    return replace(case, **sizes, **others, **values).with_constant_slopes()


def with_documents(rng: random.Random, case: Case) -> Case:
    """Return a case of documents by ids, of few tiles or of many, often longer than tiles."""
    many = rng.random() < 0.6
    nk = rng.randint(900, 3600) if many else rng.randint(100, 900)
    nq = rng.choice((nk, nk, rng.randint(1, nk), nk + rng.randint(1, 200)))
    band = rng.choice(({}, {"causal": True}, {"causal": True}, {"left": rng.randint(100, 2000)}))
    sizes = {"b": min(case.b, 2), "d": rng.choice((case.d, 64, 96, 128, 256)), "dv": None}
    if many:  # the references hold all scores
        sizes |= {"b": 1, "hk": 1, "hq": rng.choice((1, 2))}
    documents = rng.choice(("sorted", "sorted", "runs", "runs", "batched", "offsets", "unsorted"))
    values = {
        "nq": nq,
        "nk": nk,
        "documents": documents,
        "bias": case.bias if rng.random() < 0.2 else None,
        "padding": case.padding if rng.random() < 0.3 else None,
        "left": None,
        "right": None,
        "causal": False,
        "align": "keys",
    }
    others = {"sequences": None, "step": None, "prefix": None}
    return replace(case, **sizes, **others, **values | band)


def with_windows(rng: random.Random, case: Case) -> Case:
    """Return a case under a window, narrow or wide next to a tile, of few keys or of many."""
    many = rng.random() < 0.5
    nk = rng.randint(900, 3600) if many else rng.randint(100, 900)
    nq = rng.choice((nk, nk, rng.randint(1, nk), nk + rng.randint(1, 200)))
    left = rng.choice((rng.randint(40, 500), rng.randint(40, 500), rng.randint(500, nk + 500)))
    right = rng.choice((0, 0, 0, -rng.randint(1, 40), rng.randint(1, 200), None))
    pairs = [(rng.randint(0, 700), rng.randint(0, 1500)) for _ in range(rng.randint(1, 5))]
    sizes = {"b": min(case.b, 2)}
    if many:  # the references hold all scores
        sizes = {"b": 1, "hk": 1, "hq": rng.choice((1, 2))}
    values = {
        "nq": nq,
        "nk": nk,
        "left": left,
        "right": right,
        "causal": False,
        "sequences": case.sequences and tuple(pairs),
        "documents": case.documents if rng.random() < 0.3 else None,
        "bias": case.bias if rng.random() < 0.3 else None,
    }
    others = {"padding": None, "step": None, "prefix": None, "align": "keys"}
    return replace(case, **sizes, **others, **values)


def with_extremes(rng: random.Random, case: Case) -> Case:
    """Return a case with a bias of each pair, and without what makes other scores large.

    Nor does it have rows of few values, or a sink, whose gradient is a sum.
    """
    terms = {"softcap": 0.0, "alibi": False, "sink": False, "dropout": 0.0}
    case = replace(case, dv=max(16, case.dv or case.d), **terms)
    if case.bias in OF_PAIRS:
        return case
    return replace(case, bias=rng.choice(OF_PAIRS), transposed=False)


#: by the special calls, what draws them
DRAWS = {
    "halves": with_halves,
    "lagging": with_lagging,
    "packed": with_packed,
    "groups": with_groups,
    "parts": with_parts,
    "dropout": with_dropout,
    "windows": with_windows,
    "documents": with_documents,
    "extremes": with_extremes,
}
