"""``enable`` and ``disable``: the modules of torch compute with rowmax, and stop doing so."""

from __future__ import annotations

import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.backends import mha
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import attention as torch_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from rowmax.integrations import sdpa
from rowmax.integrations.sdpa import dense

from .sdpa_cases import Block, counted

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*prototype stage:UserWarning"),  # torch's nested tensors
    pytest.mark.filterwarnings("ignore:.*Online softmax is disabled:UserWarning"),
]

theirs = F.scaled_dot_product_attention
their_mha = F.multi_head_attention_forward


@pytest.fixture(autouse=True)
def _is_restored() -> Iterator[None]:
    """Check that a test leaves torch as it was."""
    yield
    left_on = sdpa.is_enabled()
    sdpa.disable()
    assert not left_on
    assert F.scaled_dot_product_attention is theirs
    assert F.multi_head_attention_forward is their_mha
    assert mha.get_fastpath_enabled()


def qkv(*sizes: int) -> list[Tensor]:
    return [torch.randn(*(sizes or (2, 3, 5, 16))) for _ in range(3)]


def number_of_calls() -> int:
    """Return how often rowmax computes one call of torch's function."""
    with counted() as calls:
        F.scaled_dot_product_attention(*qkv())
    return len(calls)


# --- the switch ----------------------------------------------------------------------------------


def test_enable_and_disable() -> None:
    assert number_of_calls() == 0
    sdpa.enable()
    assert sdpa.is_enabled()
    assert number_of_calls() == 1
    sdpa.disable()
    assert not sdpa.is_enabled()
    assert number_of_calls() == 0
    sdpa.disable()  # nothing to do


def test_switches_nest() -> None:
    with sdpa.enable() as outer:
        with sdpa.enable():
            assert number_of_calls() == 1
        assert number_of_calls() == 1
        outer.remove()
        assert number_of_calls() == 0
    first, second = sdpa.enable(), sdpa.enable()
    first.remove()
    first.remove()
    assert number_of_calls() == 1
    second.remove()
    assert number_of_calls() == 0
    with pytest.raises(RuntimeError, match="is off"), second:
        pass
    sdpa.enable()
    sdpa.enable()
    sdpa.disable()
    assert number_of_calls() == 0


def test_an_error_inside_turns_it_off() -> None:
    with pytest.raises(KeyError), sdpa.enable():
        raise KeyError
    assert not sdpa.is_enabled()


def test_threads_share_the_switch() -> None:
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with sdpa.enable():
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(30)
    with sdpa.enable():
        leave.set()
        thread.join()
        assert number_of_calls() == 1
    assert number_of_calls() == 0

    def toggle() -> None:
        for _ in range(200):
            with sdpa.enable():
                assert sdpa.is_enabled()

    threads = [threading.Thread(target=toggle) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert F.scaled_dot_product_attention is theirs


def test_another_replacement_is_respected() -> None:
    """One that stands before is where refused calls go; one that comes after stays."""
    calls = []

    def logged(*args: Any, **keywords: Any) -> Tensor:
        calls.append(1)
        return theirs(*args, **keywords)

    q = torch.randn(1, 1, 3, 577)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", logged)
        with sdpa.enable():
            F.scaled_dot_product_attention(*qkv())
            assert not calls
            F.scaled_dot_product_attention(q, q, q)
            assert len(calls) == 1
        assert F.scaled_dot_product_attention is logged
    with sdpa.enable():
        replacement = F.scaled_dot_product_attention

        def after(*args: Any, **keywords: Any) -> Tensor:
            return replacement(*args, **keywords)

        F.scaled_dot_product_attention = after
        assert number_of_calls() == 1
    assert F.scaled_dot_product_attention is after
    assert number_of_calls() == 0  # a replacement that is off calls torch
    F.scaled_dot_product_attention = theirs


def test_names_that_modules_imported_before() -> None:
    module = ModuleType("model")
    module.attend = theirs  # type: ignore[attr-defined]  # as of "import ... as attend"
    with sdpa.enable(module):
        with counted() as calls:
            module.attend(*qkv())
        assert len(calls) == 1
        later = F.scaled_dot_product_attention  # imported while rowmax computes
    assert module.attend is theirs
    with counted() as calls:
        later(*qkv())
    assert not calls
    with pytest.raises(TypeError, match="modules: got str"):
        sdpa.enable("model")  # pyright: ignore


def test_the_name_in_torchs_registry() -> None:
    assert "rowmax" in torch_attention.list_flash_attention_impls()
    torch_attention.activate_flash_attention_impl("rowmax")
    assert torch_attention.current_flash_attention_impl() == "rowmax"
    assert number_of_calls() == 1
    torch_attention.restore_flash_attention_impl()
    assert number_of_calls() == 0
    assert not sdpa.is_enabled()


def test_the_fast_path_stays_off_where_it_was() -> None:
    with sdpa.enable():
        assert not mha.get_fastpath_enabled()
    assert mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    with sdpa.enable():
        pass
    assert not mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(True)


def test_import_of_rowmax_brings_no_integration() -> None:
    import subprocess

    code = (
        "import sys, rowmax; assert not any('integrations' in m for m in sys.modules);"
        "import rowmax.integrations.sdpa; assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_function_modes_see_the_call() -> None:
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    q, k, v = qkv()
    with sdpa.enable(), Mode(), counted() as calls:
        F.scaled_dot_product_attention(q, k, v)
        assert seen[0] is F.scaled_dot_product_attention
    assert len(seen) == len(calls) == 1


def test_nested_tensors_go_to_torch() -> None:
    parts = [torch.randn(n, 2, 8) for n in (3, 5)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    want = F.scaled_dot_product_attention(jagged, jagged, jagged)
    with sdpa.enable():
        got = F.scaled_dot_product_attention(jagged, jagged, jagged)
    assert type(got) is type(want)
    torch.testing.assert_close(got.values(), want.values())


# --- torch's modules -----------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("masked", ["", "padding", "mask", "causal", "both"])
def test_multihead_attention(batch_first: bool, train: bool, masked: str) -> None:
    layer = nn.MultiheadAttention(32, 4, batch_first=batch_first).train(train)
    x = torch.randn(2, 7, 32) if batch_first else torch.randn(7, 2, 32)
    keywords: dict[str, Any] = {}
    hidden = nn.Transformer.generate_square_subsequent_mask(7)
    if masked in ("padding", "both"):
        keywords["key_padding_mask"] = torch.arange(7) >= torch.tensor([[5], [7]])
    if masked in ("mask", "both"):
        keywords["attn_mask"] = hidden == -torch.inf if masked == "mask" else hidden != 0
    if masked == "causal":
        keywords |= {"attn_mask": hidden, "is_causal": True}
    for need_weights in (False, True):

        def run(needed: bool = need_weights) -> list[Tensor]:
            given = x.clone().requires_grad_()
            layer.zero_grad()
            out, _ = layer(given, given, given, need_weights=needed, **keywords)
            out.square().sum().backward()
            with torch.no_grad():  # the fast path of evaluation
                again, _ = layer(x, x, x, need_weights=needed, **keywords)
            return [out, again, given.grad, *(p.grad.clone() for p in layer.parameters())]  # pyright: ignore

        want = run()
        with sdpa.enable(), counted() as calls:
            got = run()
        # with need_weights torch does not call the function
        assert calls == ([] if need_weights else ["forward", "backward", "forward"])
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("train", [True, False])
def test_transformer_encoder(train: bool) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(train)
    x, causal = torch.randn(2, 7, 32), nn.Transformer.generate_square_subsequent_mask(7)
    with torch.set_grad_enabled(train):
        want = encoder(x, mask=causal, is_causal=True)
        with sdpa.enable(), counted() as calls:
            got = encoder(x, mask=causal, is_causal=True)
    assert calls == ["forward"] * 2
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_checkpoint_repeats_the_dropout() -> None:
    q = torch.randn(2, 3, 8, 16, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5).square().sum()

    with sdpa.enable():
        torch.manual_seed(1)
        (want,) = torch.autograd.grad(run(q), q)
        for reentrant in (True, False):
            torch.manual_seed(1)
            leaf = q.detach().requires_grad_()
            checkpoint(run, leaf, use_reentrant=reentrant).backward()  # pyright: ignore
            assert leaf.grad is not None
            assert leaf.grad.equal(want)


def test_distributed_data_parallel(tmp_path: Any) -> None:
    x, block = torch.randn(2, 6, 32), Block()
    want = torch.autograd.grad(block(x).square().sum(), list(block.parameters()))
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        with sdpa.enable(), counted() as calls:
            nn.parallel.DistributedDataParallel(block)(x).square().sum().backward()
        sharded = torch.distributed.tensor.distribute_tensor(
            torch.randn(1, 2, 4, 8), torch.distributed.init_device_mesh("cpu", (1,))
        )
        assert "DTensor" in (sdpa.explain(sharded, sharded, sharded).reason or "")
    finally:
        torch.distributed.destroy_process_group()
    assert len(calls) == 3  # two forwards, and a backward: x has no gradient
    torch.testing.assert_close([p.grad for p in block.parameters()], list(want))


# --- torch.compile -------------------------------------------------------------------------------


COMPILERS = ["eager", "aot_eager", "inductor"]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled_graphs_follow_the_switch(compiler: str) -> None:
    """Torch's cache on disk holds graphs without rowmax: they must not be used."""
    if compiler == "inductor" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler")
    block, x = Block(), torch.randn(2, 6, 32, requires_grad=True)
    bias = torch.randn(6, 6, requires_grad=True)
    masks = (None, bias) if compiler == "aot_eager" else (None,)
    for mask in masks:
        torch._dynamo.reset()
        compiled = torch.compile(block, backend=compiler, fullgraph=True)
        leaves = [x, *block.parameters(), *([] if mask is None else [mask])]
        want = torch.autograd.grad(block(x, mask).square().sum(), leaves)
        for n, on in enumerate((False, True, False, True)):
            if n >= 2:
                torch._dynamo.reset()  # from now on the cache alone could return a graph
            if on:
                sdpa.enable()
            with counted() as calls:
                out = compiled(x, mask)
                got = torch.autograd.grad(out.square().sum(), leaves)
            sdpa.disable()
            assert len(calls) == 4 * on
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_compiled_dynamic_lengths_have_one_graph() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def attend(q: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, is_causal=True)

    compiled = torch.compile(attend, backend=counter, fullgraph=True, dynamic=True)
    with sdpa.enable():
        counts = []
        for nq, nk in ((4, 9), (7, 5), (6, 11)):
            q, k = torch.randn(2, 3, nq, 16), torch.randn(2, 3, nk, 16)
            torch.testing.assert_close(compiled(q, k), theirs(q, k, k, is_causal=True))
            counts.append(counter.frame_count)
    assert counts[0] == counts[-1]


def test_math_alone_inside_a_compiled_function() -> None:
    torch._dynamo.reset()

    def attend(q: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, q, q)

    q = qkv()[0]
    with sdpa.enable(), counted() as calls:
        got = torch.compile(attend, backend="eager", fullgraph=True)(q)
    assert not calls
    torch.testing.assert_close(got, theirs(q, q, q))


# --- without a GPU -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensors_of_a_gpu_without_values(dtype: torch.dtype) -> None:
    """The way of a call on a GPU, and the result that the compiler is promised.

    No gradients: autograd ends the process where torch has no CUDA.
    """
    with FakeTensorMode(), sdpa.enable():
        q = torch.empty(2, 4, 5, 64, device="cuda", dtype=dtype)
        k = torch.empty(2, 2, 9, 64, device="cuda", dtype=dtype)
        mask = torch.empty(1, 1, 5, 9, device="cuda", dtype=dtype)
        seen = torch.empty(2, 1, 1, 9, device="cuda", dtype=torch.bool)
        for given in ({"attn_mask": mask}, {"attn_mask": seen}, {}, {"is_causal": True}):
            assert dense.refusal(dense.Call(q, k, k, enable_gqa=True, **given)) is None
            if given.get("attn_mask") is not None:
                continue  # indexing needs CUDA, even without values
            out = F.scaled_dot_product_attention(q, k, k, enable_gqa=True, **given)
            assert (out.shape, out.dtype, out.device.type) == (q.shape, dtype, "cuda")
            assert out.transpose(1, 2).is_contiguous()


def test_a_traced_call_holds_the_operators() -> None:
    def gradient(q: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return torch.autograd.grad(out.sum(), q)[0]

    with sdpa.enable():
        graph = make_fx(gradient, tracing_mode="fake")(qkv()[0].requires_grad_())
    names = [str(node.target) for node in graph.graph.nodes]
    assert "rowmax.forward.default" in names
    assert "rowmax.backward.default" in names
    assert not any("scaled_dot_product" in name for name in names)


def test_the_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "integrations" / "sdpa.md"
    names: dict[str, Any] = {}
    for example in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(example, str(page), "exec"), names)
    assert "features  causal" in capsys.readouterr().out
