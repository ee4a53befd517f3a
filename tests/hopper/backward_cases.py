"""What ``backward_model.py`` runs: every length, mask and mode, at sizes for a machine of numpy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Case:
    name: str
    nq: int = 64
    nk: int = 128
    b: int = 1
    hq: int = 1
    hk: int = 1
    d: int = 16
    dv: int = 16
    left: int | None = None
    right: int | None = None
    softcap: float = 0.0
    alibi: bool = False
    bias: tuple[int, int] | None = None  # its sequences and heads, 1 where it is one for all
    row: bool = False  # it is one row for all queries
    lengths: tuple[int, ...] | None = None
    documents: str = ""  # sorted, unsorted
    sequences: tuple[tuple[int, int], ...] | None = None
    block_q: int = 64
    stages: tuple[int, int] = (3, 2)
    blocks: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = "all"  # or what a launch for wide heads makes


def cases() -> list[Case]:
    lengths = ((1, 1), (3, 3), (64, 1), (239, 1), (399, 3), (1, 300), (113, 203), (108, 256),
               (255, 256), (256, 255), (64, 128), (192, 384))  # fmt: skip
    found = []
    for ordered in (False, True):
        o = {"ORDERED": ordered}
        tag = "-ordered" * ordered
        found += [
            Case(f"{n}-{m}{'-causal' * (right == 0)}{tag}", n, m, right=right, options=o)
            for n, m in lengths
            for right in (None, 0)
        ]
        found += [
            Case(f"heads{tag}", 130, 260, b=2, hq=4, hk=2, right=0, blocks=3, options=o),
            Case(f"many-blocks{tag}", 200, 520, hq=2, hk=2, blocks=7, options=o),
            Case(f"one-block{tag}", 200, 520, hq=2, hk=1, blocks=1, options=o),
            Case(f"window{tag}", 300, 400, left=70, right=30, options=o, blocks=3),
            Case(f"window-left{tag}", 300, 300, left=100, options=o, blocks=3),
            Case(f"window-narrow{tag}", 400, 400, left=0, right=0, options=o, blocks=3),
            Case(f"window-longer-keys{tag}", 70, 500, left=40, right=0, options=o, blocks=3),
            Case(f"window-longer-queries{tag}", 500, 130, left=40, right=3, options=o, blocks=3),
            Case(f"lengths{tag}", 100, 300, b=4, lengths=(300, 0, 130, 1), right=0, options=o),
            Case(
                f"documents{tag}", 300, 500, b=2, hq=2, hk=2, documents="sorted", right=0,
                blocks=3, options=o,
            ),
            Case(f"documents-full{tag}", 500, 300, documents="sorted", blocks=3, options=o),
            Case(f"documents-any{tag}", 300, 300, documents="unsorted", left=90, options=o),
            Case(f"softcap{tag}", 130, 200, softcap=1.5, right=0, options=o),
            Case(f"alibi{tag}", 130, 200, hq=2, hk=1, alibi=True, right=0, options=o),
            Case(f"bias{tag}", 130, 200, b=2, hq=2, hk=1, bias=(2, 2), options=o | {"DBIAS": True}),
            Case(f"bias-1h{tag}", 200, 304, b=2, hq=2, hk=2, bias=(1, 2), right=0, options=o),
            Case(f"bias-b1{tag}", 300, 200, b=2, hq=2, hk=2, bias=(2, 1), blocks=1, options=o),
            Case(
                f"bias-causal{tag}", 300, 300, hq=2, hk=2, bias=(1, 2), right=0,
                options=o | {"DBIAS": True},
            ),
            Case(
                f"row{tag}", 300, 333, b=2, hq=4, hk=2, bias=(2, 1), row=True, right=0,
                options=o | {"DROW": True},
            ),
            Case(
                f"row-1h{tag}", 130, 260, b=2, hq=2, hk=2, bias=(1, 2), row=True, softcap=1.5,
                lengths=(260, 77), options=o | {"DROW": True},
            ),
            Case(f"row-heads{tag}", 130, 260, hq=4, hk=2, bias=(1, 4), row=True, options=o),
            Case(f"held{tag}", 300, 300, hq=2, right=0, options=o | {"HELD": True}),
            Case(f"fresh{tag}", 300, 400, hq=2, right=0, options=o | {"FRESH": ordered}),
            Case(f"fresh-full{tag}", 200, 700, b=2, blocks=3, options=o | {"FRESH": ordered}),
            Case(
                f"fresh-window{tag}", 500, 600, hq=2, left=70, right=0, blocks=5,
                options=o | {"FRESH": ordered},
            ),
            Case(
                f"abreast{tag}", 300, 500, b=2, hq=6, hk=2, right=0, blocks=3,
                options=o | {"ABREAST": True, "FRESH": ordered},
            ),
            Case(
                f"abreast-longer-queries{tag}", 500, 300, hq=4, hk=2, right=0, alibi=True,
                blocks=5, options=o | {"ABREAST": True},
            ),
            Case(
                f"abreast-bias{tag}", 300, 300, hq=4, hk=2, bias=(1, 4), right=0, blocks=3,
                options=o | {"ABREAST": True, "DBIAS": True},
            ),
            Case(
                f"abreast-documents{tag}", 300, 500, hq=2, hk=1, documents="sorted", right=0,
                blocks=3, options=o | {"ABREAST": True},
            ),
            Case(
                f"abreast-lengths{tag}", 100, 300, b=4, hq=2, lengths=(300, 0, 130, 1), right=0,
                options=o | {"ABREAST": True},
            ),
            Case(
                f"abreast-packed{tag}", hq=4, hk=2, right=0, blocks=3,
                options=o | {"ABREAST": True},
                sequences=((5, 90), (0, 17), (150, 270), (33, 0), (1, 40), (200, 200)),
            ),
            Case(f"followers{tag}", 400, 1500, right=700, blocks=9, options=o),
            Case(f"stages{tag}", 300, 300, stages=(3, 1), options=o),
            Case(f"stages-four{tag}", 300, 300, stages=(4, 3), right=5, options=o),
            Case(
                f"packed{tag}", hq=4, hk=2, right=0, blocks=3, options=o,
                sequences=((5, 90), (0, 17), (150, 270), (33, 0), (1, 40), (200, 200)),
            ),
            Case(
                f"packed-window{tag}", hq=2, hk=2, left=40, right=10, blocks=2, options=o,
                sequences=((130, 130), (64, 128), (1, 1), (0, 0), (129, 257)),
            ),
        ]  # fmt: skip
    no_dq = {"DBIAS": True, "DQ": False, "ORDERED": False}
    found.append(Case("no-dq", 300, 330, hq=2, hk=1, bias=(1, 2), right=0, options=no_dq))
    found += [
        replace(
            c,
            name=f"two-{c.name}",
            options=c.options
            | {"KV_STAGES": 2, "HELD": not c.bias, "AHEAD": True, "DQ_STAGES": 2, "EVERY": 1},
        )
        for c in found
    ]
    own = ("DBIAS", "DQ", "AHEAD", "ABREAST")
    plain = [c for c in found if not c.options["ORDERED"] and c.block_q == 64]
    plain += [
        Case("bias-lengths", 100, 304, b=3, hq=2, bias=(3, 1), lengths=(304, 0, 130)),
        Case("bias-window", 300, 400, hq=4, hk=2, bias=(1, 4), left=70, right=30, blocks=3),
    ]
    found += [
        replace(
            c,
            name=f"{name}-{c.name}",
            kind=kind,
            stages=stages,
            options=c.options
            | more
            | {"DROW": bool(kind == "pair" and c.options.get("DROW") and not c.softcap)},
        )
        for c in plain
        if c.stages == (3, 2) and not c.options.keys() & own
        for name, kind, stages, more in (
            ("dq", "dq", (2, 1), {}),
            ("pair", "pair", (2, 2), {"HELD_0": 8, "HELD_1": 16}),
            ("pair-held", "pair", (3, 2), {"HELD_0": 16, "HELD_1": 16}),
            ("pair-alone", "pair", (3, 2), {"HELD_0": 8, "HELD_1": 8, "ALONE": True}),
        )
    ]
    more = {"b": 2, "hq": 2, "bias": (2, 2), "stages": (2, 1), "options": {"DBIAS": True}}
    for n, (left, right) in enumerate(((None, None), (None, 0), (40, 90))):
        found.append(Case(f"dq-dbias-{n}", 300, 304, left=left, right=right, kind="dq", **more))
    return found
