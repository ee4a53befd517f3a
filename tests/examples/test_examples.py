"""Every example runs at a small size, learns, and computes what dense attention computes."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import rowmax
from examples import context_parallel, fsdp_compile, long_context, relative_bias, train_gpt
from tests import forks

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
#: the next operation of a compiled block reads .grad of a tensor that is no leaf
GRAD = "ignore:The .grad attribute of a Tensor that is not a leaf"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep float32 where a GPU is, and its tolerance."""
    for example in (context_parallel, fsdp_compile, long_context, relative_bias, train_gpt):
        monkeypatch.setattr(example, "DEVICE", "cpu")


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function after which examples compute by the dense definition."""
    call = functools.partial(rowmax.attention, backend="reference")
    return lambda: monkeypatch.setattr(rowmax, "attention", call)


def test_train_gpt(dense: Any) -> None:
    losses = train_gpt.main(steps=30, width=32, context=48, rows=4)
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5
    dense()
    want = train_gpt.main(steps=3, width=32, context=48, rows=4)
    torch.testing.assert_close(losses[:3], want, rtol=1e-4, atol=0)


@pytest.mark.parametrize("window", [None, 40])
def test_long_context(window: int | None, dense: Any, capsys: pytest.CaptureFixture[str]) -> None:
    losses, dsink = long_context.main(tokens=400, width=64, window=window, steps=3)
    assert losses[2] < losses[0]
    text = capsys.readouterr().out
    assert re.search(r"^step 2: 400 tokens, [\d,]+ a second, loss ", text, flags=re.M)
    assert re.search(r"^peak of memory: \d+\.\d\d GiB$", text, flags=re.M)
    assert "the scores of 8 heads alone would take 0.0047684 GiB (computed)" in text
    dense()
    want, want_dsink = long_context.main(tokens=400, width=64, window=window, steps=3)
    torch.testing.assert_close(losses, want, rtol=1e-4, atol=0)
    assert (dsink is None) == (window is None)
    if dsink is not None:
        torch.testing.assert_close(dsink, want_dsink, rtol=1e-3, atol=1e-7)
        assert dsink.abs().max() > 0


def test_relative_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss falls well below chance, and torch's dense attention has the same gradient."""
    losses, _ = relative_bias.main(steps=60)
    assert losses[-1] < 0.5 < losses[0]
    _, model = relative_bias.main(steps=0)
    x = torch.randint(16, (2, 40))
    model(x).square().mean().backward()
    found = model.relative.table.weight.grad

    def standard(q: Any, k: Any, v: Any, bias: Any) -> Any:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        bias = bias.expand(len(q), -1, -1, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)

    monkeypatch.setattr(rowmax, "attention", standard)
    model.zero_grad()
    model(x).square().mean().backward()
    assert found is not None
    assert found.abs().max() > 0
    torch.testing.assert_close(found, model.relative.table.weight.grad, rtol=1e-4, atol=1e-7)


def test_the_buckets_of_the_relative_bias() -> None:
    """Those of the formula of T5, bidirectional, 8 buckets up to a distance of 16."""
    bias = relative_bias.RelativeBias(1, buckets=8, farthest=16)
    distances = torch.tensor([-20, -8, -6, -5, -3, -2, -1, 0, 1, 2, 5, 6, 20])
    want = [3, 3, 3, 2, 2, 2, 1, 0, 5, 6, 6, 7, 7]
    assert bias.bucket(distances).tolist() == want


def test_switch_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from examples import switch_transformers

    monkeypatch.setattr(switch_transformers, "DEVICE", "cpu")
    results = switch_transformers.main(steps=4, size=32)
    losses, tokens = results["rowmax"]
    assert losses[-1] < losses[0]
    torch.testing.assert_close(losses, results["sdpa"][0], rtol=1e-4, atol=0)
    assert tokens.shape == (4, 24)
    assert torch.equal(tokens, results["sdpa"][1])


#: runs an example in two processes, with the variables that torchrun sets
TWO_PROCESSES = """
import os, runpy, signal, socket, sys

path, *sys.argv[1:] = sys.argv[1:]
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
child = os.fork()
signal.alarm(200)
os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(int(child == 0))
runpy.run_path(path, run_name="__main__")
sys.stdout.flush()
# Without the end of Python, in which a thread of Gloo may drop a tensor: its destructor needs the
# interpreter's lock (torch 2.13, seen in a core; 1 of 40 under load).
if child:
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status))
os._exit(0)
"""


def losses_of_two_processes(example: str, *arguments: str) -> list[float]:
    """Return the losses that an example prints in two processes."""
    done = forks.run(
        TWO_PROCESSES,
        example,
        *arguments,
        preload=("torch", "torch._dynamo", "torch.distributed.fsdp", "rowmax"),
        environment={"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    return [float(x) for x in re.findall(r"^step \d: loss (\S+)$", done.stdout, flags=re.M)]


@pytest.mark.filterwarnings(GRAD)
def test_fsdp_compile() -> None:
    """Two processes have the losses of one."""
    want = fsdp_compile.main(steps=3, size=32, width=32, compiler="aot_eager")
    assert want[-1] < want[0]
    sizes = ("--steps", "3", "--size", "32", "--width", "32")
    found = losses_of_two_processes("examples/fsdp_compile.py", "--compiler", "aot_eager", *sizes)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=2e-6)


def test_context_parallel() -> None:
    """Two processes, each with half of each sequence, have the losses of one."""
    want = context_parallel.main(steps=3, size=64, width=32)
    assert want[-1] < want[0]
    sizes = ("--steps", "3", "--size", "64", "--width", "32")
    found = losses_of_two_processes("examples/context_parallel.py", *sizes)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_an_example_names_its_command_and_is_listed(file: Path) -> None:
    text, table = (x.read_text(encoding="utf-8") for x in (file, file.parent / "README.md"))
    assert f"\n    python examples/{file.name}" in text
    assert f"[{file.name}]({file.name})" in table
    if file.name != "pairformer.py":
        assert len(text.splitlines()) < 80
