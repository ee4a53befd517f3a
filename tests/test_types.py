"""A type checker sees the installed package as typed, and each call's own result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rowmax

pytest.importorskip("pyright")

#: a user's file; the line of each error that is wanted names its rule
USER = """
import torch
from torch import Tensor

import rowmax
from rowmax import (
    Causal, Documents, Explanation, Mask, PrefixLengths, Window,
    attention, attention_varlen, explain, logsumexp, merge, softmax,
)
from rowmax.attention import as_mask  # reportPrivateImportUsage

q = torch.randn(1, 8, 2, 16)
cu = torch.tensor([0, 8])
mask: Mask = Causal() & Window(4, -1) & PrefixLengths(torch.tensor([8])) & torch.ones(8, 8).bool()
mask = Documents(torch.zeros(8, dtype=torch.int64)) & Documents(cu_seqlens=cu) & mask
total: Tensor = attention(q, q, q, causal=True, mask=mask, bias=q[0, :, 0, :8], scale=0.5).sum()
plain: Tensor = attention(q, q, q, return_lse=False, seed=3, dropout_p=0.5, softcap=30.0)
out, lse = attention(q, q, q, return_lse=True, sink=torch.zeros(2), alibi=torch.ones(2))
pair: tuple[Tensor, Tensor] = merge((out, lse), attention(q, q, q, return_lse=True))
packed: Tensor = attention_varlen(q[0], q[0], q[0], cu, cu, causal=True, backend="torch").sum()
both: tuple[Tensor, Tensor] = attention_varlen(q[0], q[0], q[0], cu, cu, 8, 8, return_lse=True)
found: Explanation = explain(q, q, q, causal=True, deterministic=True)
rows: Tensor = softmax(q, -1) + logsumexp(q, -1, keepdim=True)
print(rowmax.__version__, found.forward.backend, mask.left, total, plain, pair, packed, both, rows)


def either(flag: bool) -> Tensor | tuple[Tensor, Tensor]:
    return attention(q, q, q, return_lse=flag)


either(True).sum()  # reportAttributeAccessIssue
attention(q, q, q, return_lse=True).sum()  # reportAttributeAccessIssue
attention(q, q, q, is_causal=True)  # reportCallIssue
attention(q, q, q, causal="yes")  # reportArgumentType
attention(q, q, q, True)  # reportCallIssue
"""


def test_a_users_file(tmp_path: Path) -> None:
    """Checked against the package as pip installs it: in site-packages, next to torch."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = tmp_path / "venv" / "lib" / version / "site-packages"
    site.mkdir(parents=True)
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    (site / "rowmax").symlink_to(Path(rowmax.__file__).parent)
    (site / "torch.pth").write_text(str(Path(torch.__file__).parents[1]), encoding="utf-8")
    (tmp_path / "user.py").write_text(USER, encoding="utf-8")
    settings = {"include": ["user.py"], "venvPath": ".", "venv": "venv"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--project", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    report = json.loads(done.stdout[done.stdout.index("{") :])
    found = {
        (d["range"]["start"]["line"], d.get("rule", d["message"]))
        for d in report["generalDiagnostics"]
        if d["severity"] == "error"
    }
    lines = enumerate(USER.splitlines())
    wanted = {(n, line.partition("  # ")[2]) for n, line in lines if "  # report" in line}
    assert found == wanted
