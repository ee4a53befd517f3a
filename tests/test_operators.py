"""PyTorch checks, compiles, exports and differentiates the operators."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import rowmax
from rowmax.operators.library import N_DIFFERENTIABLE
from rowmax.testing import CASES, Case, answer, cotangents, make, tagged

from .small_calls import BACKEND, Layer, attention, inputs, with_lse

pytestmark = [  # torch's own, of torch's own
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.*:FutureWarning"),
]

_CHOSEN = {
    "causal",
    "bias-bias=11qk-nq=90-nk=140",
    "mask-allowed=11qk-empty_rows-sink",
    "documents-queries",
    "lengths",
    "alibi",
    "aligned-causal",
    "prefix-lengths",
    "dropout-half-gqa",
    "strides-layout=strided-hk=2-causal",
    "rows-nq=113-nk=203-causal",
    "empty-keys-sink",
    "packed-unequal-causal",
    "packed-bound",
    "packed-mask",
}
SAMPLE = [case for case in CASES if case.name in _CHOSEN]


def test_sample_is_whole() -> None:
    assert {case.name for case in SAMPLE} == _CHOSEN


# --- opcheck -----------------------------------------------------------------------------------


def _operands(case: Case, grad: bool) -> tuple[Any, ...]:
    """Return a case as the forward operator takes it."""
    tensors, options = make(case).normalized(backend=BACKEND)
    tensors = (
        t.detach().requires_grad_(grad and n < N_DIFFERENTIABLE) if t is not None else None
        for n, t in enumerate(tensors)
    )
    return (*tensors, *options)


BLOCKS = [case for case in tagged("blocks") if case.name in ("block-alibi", "block-dropout-packed")]


@pytest.mark.parametrize("case", SAMPLE + BLOCKS, ids=str)
def test_opcheck_forward(case: Case) -> None:
    torch.library.opcheck(torch.ops.rowmax.forward.default, _operands(case, grad=True))


@pytest.mark.parametrize("case", SAMPLE + BLOCKS, ids=str)
def test_opcheck_backward(case: Case) -> None:
    operands = _operands(case, grad=False)
    out, lse = torch.ops.rowmax.forward(*operands)
    wanted = [operands[n] is not None for n in range(N_DIFFERENTIABLE)]
    arguments = (torch.randn_like(out), torch.randn_like(lse), out, lse, wanted, *operands)
    torch.library.opcheck(torch.ops.rowmax.backward.default, arguments)


def _tangents(operands: tuple[Any, ...], grad: bool = False) -> list[Any]:
    first = operands[:N_DIFFERENTIABLE]
    return [None if t is None else torch.randn_like(t).requires_grad_(grad) for t in first]


@pytest.mark.parametrize("case", SAMPLE + BLOCKS, ids=str)
def test_opcheck_tangent(case: Case) -> None:
    operands = _operands(case, grad=True)
    arguments = (*_tangents(operands, grad=True), *operands)
    torch.library.opcheck(torch.ops.rowmax.tangent.default, arguments)


@pytest.mark.parametrize("case", SAMPLE + BLOCKS, ids=str)
def test_opcheck_tangent_backward(case: Case) -> None:
    operands = _operands(case, grad=False)
    tangents = _tangents(operands)
    results = torch.ops.rowmax.tangent(*tangents, *operands)
    cotangents = [torch.randn_like(t) for t in results]
    wanted = 2 * [t is not None for t in tangents]
    arguments = (*tangents, *results, *cotangents, wanted, *operands)
    torch.library.opcheck(torch.ops.rowmax.tangent_backward.default, arguments)
    arguments = (*tangents, *results, None, None, *cotangents[2:], wanted, *operands)
    torch.library.opcheck(torch.ops.rowmax.tangent_backward.default, arguments)


# --- compile and export ------------------------------------------------------------------------


def _compiled_agrees(case: Case, compiler: str) -> None:
    call = make(case)
    grads = cotangents(call)

    def compiled(*arguments: Any, **keywords: Any) -> Any:
        function = rowmax.attention_varlen if case.packed else rowmax.attention
        return function(*arguments, return_lse=True, backend=BACKEND, **keywords)

    compiled = torch.compile(compiled, backend=compiler, fullgraph=True)
    leaves = {name: t.detach().requires_grad_() for name, t in call.leaves.items()}
    same = call.with_leaves(leaves)
    out, lse = compiled(*same.inputs, **same.keywords)
    got = torch.autograd.grad([out, lse], list(leaves.values()), grads)
    want = answer(call, *grads, backend=BACKEND)
    torch.testing.assert_close(out, want.out)
    torch.testing.assert_close(lse, want.lse)
    for g, (name, w) in zip(got, want.gradients.items(), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_compile(case: Case) -> None:
    torch._dynamo.reset()
    _compiled_agrees(case, "aot_eager")


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_compile_inductor() -> None:
    torch._dynamo.reset()
    _compiled_agrees(next(case for case in SAMPLE if case.bias), "inductor")


def test_compile_dynamic_lengths() -> None:
    """One graph serves every length."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, causal=True, mask=rowmax.Window(5)),
        backend=counter,
        fullgraph=True,
        dynamic=True,
    )
    counts = []
    for nq, nk in ((7, 12), (9, 30), (20, 41)):
        q, k, v = (torch.randn(2, n, 2, 8, requires_grad=True) for n in (nq, nk, nk))
        got = compiled(q, k, v)
        want = attention(q, k, v, causal=True, mask=rowmax.Window(5))
        torch.testing.assert_close(got, want)
        grads = (torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (got, want))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1]


def test_compile_builds_masks_inside() -> None:
    torch._dynamo.reset()

    def masked(q: Tensor, ids: Tensor, lengths: Tensor, cu: Tensor, allowed: Tensor) -> Tensor:
        mask = rowmax.Documents(ids) & rowmax.PrefixLengths(lengths) & rowmax.Window(4, 0)
        mask = allowed & (mask & allowed) & rowmax.Documents(cu_seqlens=cu)
        return attention(q, q, q, mask=mask)

    q, allowed = torch.randn(2, 12, 2, 8), torch.rand(12, 12) < 0.8
    arguments = (q, torch.randint(3, (12,)), torch.tensor([12, 5]), torch.tensor([0, 3, 12]))
    compiled = torch.compile(masked, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments, allowed), masked(*arguments, allowed))
    with pytest.raises(RuntimeError, match="want offsets from 0 to the number of keys"):
        compiled(*arguments[:3], torch.tensor([0, 3, 11]), allowed)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_takes_masks_from_outside_and_limits_as_numbers(dynamic: bool) -> None:
    torch._dynamo.reset()
    outside = rowmax.Window(4, 0) & rowmax.PrefixLengths(torch.tensor([12, 5]))

    def masked(q: Tensor, n: int) -> Tensor:
        return attention(q, q, q, causal=True, mask=outside & rowmax.Window(n, -n))

    q = torch.randn(2, 12, 2, 8)
    compiled = torch.compile(masked, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for n in (3, 1, 2):
        torch.testing.assert_close(compiled(q, n), masked(q, n))


@pytest.mark.parametrize("through", ["compile", "export"])
def test_positions_aligned_to_lengths_are_traced(through: str) -> None:
    """With lengths as an input: one program for every fill of a cache."""
    torch._dynamo.reset()

    class Cached(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, lengths: Tensor) -> Tensor:
            mask = rowmax.Causal() & rowmax.PrefixLengths(lengths, align="lengths")
            return attention(q, k, k, mask=mask)

    q, k = torch.randn(2, 3, 2, 8), torch.randn(2, 12, 2, 8)
    traced: Any = torch.compile(Cached(), backend="aot_eager", fullgraph=True)
    if through == "export":
        traced = torch.export.export(Cached(), (q, k, torch.tensor([5, 9]))).module()
    for lengths in ((5, 9), (2, 12), (0, 13)):
        got = traced(q, k, torch.tensor(lengths))
        for b, n in enumerate(lengths):
            used = k[b : b + 1, :n]
            torch.testing.assert_close(
                got[b : b + 1], attention(q[b : b + 1], used, used, causal=True)
            )


@pytest.mark.parametrize("through", ["compile", "vmap"])
def test_offsets_are_checked_when_their_values_are_there(through: str, backend: str) -> None:
    """Kernels go where they say, out of the tensors if need be."""
    torch._dynamo.reset()
    q, bias = torch.randn(12, 2, 8), torch.zeros(9, 9)

    def packed(cu: Tensor) -> Any:
        return rowmax.attention_varlen(q, q, q, cu, cu, 9, 9, bias=bias, backend=backend)

    traced = {
        "compile": torch.compile(packed, backend="aot_eager", fullgraph=True),
        "vmap": lambda cu: torch.vmap(packed)(cu[None])[0],
    }[through]
    good = torch.tensor([0, 3, 12])
    torch.testing.assert_close(traced(good), packed(good))
    for values, text in (
        ((0, 3, 10**6), "cu_seqlens_q: got last offset 1000000; want the packed length, 12"),
        ((0, 15, 12), "cu_seqlens_q: got 12 after 15"),
        ((2, 3, 12), "cu_seqlens_q: got first offset 2"),
        ((0, 2, 12), "max_seqlen_q: got 9; want at least the longest sequence, 10"),
    ):
        with pytest.raises(ValueError, match=text):
            traced(torch.tensor(values))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode: str) -> None:
    q, cu = torch.randn(12, 2, 8), torch.tensor([0, 3, 12])

    def packed(q: Tensor, cu: Tensor) -> Any:
        return rowmax.attention_varlen(q, q, q, cu, cu, causal=True, backend=BACKEND)

    traced = make_fx(packed, tracing_mode=mode)(q, cu)
    torch.testing.assert_close(traced(q, cu), packed(q, cu))


def test_compile_draws_dropout_anew() -> None:
    torch._dynamo.reset()
    q = torch.randn(1, 32, 2, 8)
    compiled = torch.compile(
        lambda q: attention(q, q, q, dropout_p=0.5), backend="aot_eager", fullgraph=True
    )
    assert not torch.equal(compiled(q), compiled(q))


def test_export() -> None:
    layer, x = Layer(), torch.randn(2, 10, 16)
    dynamic = {"x": {1: torch.export.Dim("n", min=2, max=512)}}
    program = torch.export.export(layer, (x,), dynamic_shapes=dynamic)
    longer = torch.randn(2, 37, 16)
    for module in (program.module(), program.run_decompositions().module()):
        torch.testing.assert_close(module(longer), layer(longer))


def test_meta_and_fake_tensors_have_shapes() -> None:
    q = torch.empty(2, 10, 4, 16, device="meta", dtype=torch.bfloat16)
    out, lse = rowmax.attention(q, q[:, :, :2], q[:, :, :2, :8], return_lse=True)
    assert (out.shape, out.dtype) == ((2, 10, 4, 8), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 4, 10), torch.float32)


# --- autograd ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_redraws_the_same_dropout(reentrant: bool) -> None:
    x = torch.randn(1, 40, 2, 8)

    def gradient(run: Callable[..., Tensor]) -> tuple[Tensor, Tensor | None]:
        torch.manual_seed(3)
        q = x.clone().requires_grad_()
        out = run(lambda q: attention(q, q, q, dropout_p=0.4, causal=True), q)
        out.square().sum().backward()
        return out.detach(), q.grad

    got = gradient(functools.partial(checkpoint, use_reentrant=reentrant))
    want = gradient(lambda f, q: f(q))
    for a, b in zip(got, want, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


def test_autocast() -> None:
    q, k, v = (t.requires_grad_() for t in inputs(1, 20, dtype=torch.float32))
    bias = torch.randn(2, 20, 20, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = attention(q, k, v, bias=bias, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v, bias))
    assert all(g.dtype == torch.float32 and g.abs().sum() > 0 for g in grads)
    want = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), bias=bias)
    assert torch.equal(out, want)
    # a module that holds its bias in the other half, and inputs of several dtypes
    halves = bias.detach().half().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k.bfloat16(), v.half(), bias=halves)
    (dbias,) = torch.autograd.grad(out.float().square().sum(), halves)
    assert (out.dtype, dbias.dtype) == (torch.bfloat16, torch.float16)


def test_saved_tensor_hooks() -> None:
    q, k, v = inputs(1, 12, grad=True)
    want = torch.autograd.grad(attention(q, k, v).square().sum(), (q, k, v))
    packed = []

    def pack(t: Tensor) -> Any:
        packed.append(t.shape)
        return t.detach().numpy().copy()

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        out = attention(q, k, v)
    assert len(packed) == 5  # q, k, v, out, lse and nothing of N x N
    got = torch.autograd.grad(out.square().sum(), (q, k, v))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["expanded", "transposed", "strided"])
def test_non_contiguous_gradients(name: str) -> None:
    q, k, v = inputs(2, 12, grad=True)
    dout = {
        "expanded": torch.randn(1, dtype=q.dtype).expand(2, 12, 2, 8),
        "transposed": torch.randn(2, 2, 12, 8, dtype=q.dtype).transpose(1, 2),
        "strided": torch.randn(2, 12, 2, 16, dtype=q.dtype)[..., ::2],
    }[name]
    out, lse = with_lse(q, k, v)
    dlse = torch.randn(12, 2, 2, dtype=q.dtype).permute(1, 2, 0)
    got = torch.autograd.grad([out, lse], (q, k, v), [dout, dlse], retain_graph=True)
    want = torch.autograd.grad([out, lse], (q, k, v), [dout.contiguous(), dlse.contiguous()])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_lse_alone() -> None:
    q, k, v = inputs(1, 12, grad=True)
    _, lse = with_lse(q, k, v)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v), allow_unused=True)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5
    want = torch.autograd.grad(scores.logsumexp(-1).sum(), (q, k))
    torch.testing.assert_close(dq, want[0])
    torch.testing.assert_close(dk, want[1])
    assert dv is None or not dv.any()


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_gradient_of_one_input(name: str) -> None:
    tensors = dict(zip("qkv", inputs(1, 12), strict=True))
    tensors[name].requires_grad_()
    attention(**tensors).square().sum().backward()
    assert tensors[name].grad is not None
    assert all(t.grad is None for n, t in tensors.items() if n != name)


def test_modes_without_gradients() -> None:
    q, k, v = inputs(1, 12, grad=True)
    want = attention(q, k, v).detach()
    with torch.no_grad():
        out = attention(q, k, v)
    assert not out.requires_grad
    assert torch.equal(out, want)
    with torch.inference_mode():
        out = attention(q, k, v)
    assert out.is_inference()
    assert torch.equal(out, want)


def test_backward_twice_and_changed_inputs() -> None:
    q, k, v = inputs(1, 12, grad=True)
    loss = attention(q, k, v).sum()
    first = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
    again = torch.autograd.grad(loss, (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, (q, k, v))
    changed = q * 1
    loss = attention(changed, k, v).sum()
    changed += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_one_tensor_for_all_three() -> None:
    x = torch.randn(1, 12, 2, 8, dtype=torch.float64, requires_grad=True)
    (got,) = torch.autograd.grad(attention(x, x, x).square().sum(), x)
    leaves = [x.detach().clone().requires_grad_() for _ in range(3)]
    parts = torch.autograd.grad(attention(*leaves).square().sum(), leaves)
    torch.testing.assert_close(got, sum(parts))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_the_backward_compiles_as_it_runs() -> None:
    """One graph for all calls of a shape would not do: the second differs in an option alone."""
    torch._dynamo.reset()
    q, k, v = inputs(2, 12, grad=True)
    for causal in (True, False):
        want = torch.autograd.grad(attention(q, k, v, causal=causal).square().sum(), (q, k, v))
        for x in (q, k, v):
            x.grad = None
        with compiled_autograd._enable(torch.compile(backend="eager")):
            attention(q, k, v, causal=causal).square().sum().backward()
        for x, grad in zip((q, k, v), want, strict=True):
            torch.testing.assert_close(x.grad, grad, rtol=0, atol=0)
    first = torch.autograd.grad(attention(q, k, v).square().sum(), q, create_graph=True)[0]
    with (
        compiled_autograd._enable(torch.compile(backend="eager")),
    ):
        first.sum().backward()
