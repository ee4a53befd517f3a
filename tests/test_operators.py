"""What PyTorch does with the operators: checks, tracing, transforms, checkpoints, modes."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import rowmax

from .cases import CASES, Case, make
from .tolerance import answer, cotangents

pytestmark = [  # torch's own, of torch's own
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.*:FutureWarning"),
]

BACKEND = "torch"  # the one that is always there; what is tested here lies above it
attention = functools.partial(rowmax.attention, backend=BACKEND)

_CHOSEN = {
    "causal",
    "bias-bias=11qk-nq=90-nk=140",
    "mask-allowed=11qk-empty_rows-sink",
    "documents-queries",
    "lengths",
    "alibi",
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


def inputs(*sizes: int, grad: bool = False, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k and v ``[..., N, 2, 8]`` of any leading sizes."""
    return [torch.randn(*sizes, 2, 8, dtype=dtype, requires_grad=grad) for _ in range(3)]


# --- opcheck -----------------------------------------------------------------------------------


def _operands(case: Case, grad: bool) -> tuple[Any, ...]:
    """A case as the forward operator takes it."""
    problem, tensors = make(case).problem()
    tensors = (
        t.detach().requires_grad_(grad and n < 5) if t is not None else None
        for n, t in enumerate(tensors)
    )
    numbers = (problem.scale, problem.softcap, problem.dropout_p, problem.left, problem.right)
    longest = (problem.nq, problem.nk) if problem.varlen else (0, 0)
    return (*tensors, *numbers, *longest, False, BACKEND)


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_opcheck_forward(case: Case) -> None:
    torch.library.opcheck(torch.ops.rowmax.forward.default, _operands(case, grad=True))


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_opcheck_backward(case: Case) -> None:
    operands = _operands(case, grad=False)
    out, lse = torch.ops.rowmax.forward(*operands)
    wanted = [operands[n] is not None for n in range(5)]
    arguments = (torch.randn_like(out), torch.randn_like(lse), out, lse, wanted, *operands)
    torch.library.opcheck(torch.ops.rowmax.backward.default, arguments)


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

    def masked(q: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        mask = rowmax.Documents(ids) & rowmax.PrefixLengths(lengths) & rowmax.Window(4, 0)
        return attention(q, q, q, mask=mask)

    q = torch.randn(2, 12, 2, 8)
    arguments = (q, torch.randint(3, (12,)), torch.tensor([12, 5]))
    compiled = torch.compile(masked, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), masked(*arguments))


def test_compile_draws_dropout_anew() -> None:
    torch._dynamo.reset()
    q = torch.randn(1, 32, 2, 8)
    compiled = torch.compile(
        lambda q: attention(q, q, q, dropout_p=0.5), backend="aot_eager", fullgraph=True
    )
    assert not torch.equal(compiled(q), compiled(q))


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(2)
        return attention(q, k, v, causal=True).flatten(2)


def test_export() -> None:
    layer, x = _Layer(), torch.randn(2, 10, 16)
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


# --- torch.func --------------------------------------------------------------------------------


def test_func_grad() -> None:
    q, k, v = inputs(2, 10)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = attention(q, k, v, causal=True, return_lse=True)
        return out.square().sum() + lse.sin().sum()

    got = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    want = torch.autograd.grad(loss(*leaves), leaves)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    _, pull = torch.func.vjp(loss, q, k, v)
    for a, b in zip(pull(torch.tensor(1.0, dtype=q.dtype)), want, strict=True):
        torch.testing.assert_close(a, b)


def test_compiled_func_grad() -> None:
    torch._dynamo.reset()
    q, k, v = inputs(1, 9)
    gradient = torch.func.grad(lambda q: attention(q, k, v, causal=True).square().sum())
    compiled = torch.compile(gradient, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), gradient(q))


def test_compiled_vmap() -> None:
    torch._dynamo.reset()
    (q, _, _) = inputs(3, 2, 9)
    gradient = torch.func.grad(lambda q: attention(q, q, q, causal=True).square().sum())
    for function in (torch.vmap(_self), torch.vmap(gradient)):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(q), function(q))


def test_jacrev() -> None:
    q, k, v = inputs(1, 3)
    jacobian = torch.func.jacrev(lambda q: attention(q, k, v))(q)
    want = torch.autograd.functional.jacobian(lambda q: attention(q, k, v), q)
    torch.testing.assert_close(jacobian, want)


def _slices(function: Callable[..., Any], in_dims: tuple[int | None, ...], *arguments: Tensor):
    """What vmap means: a call for each slice, stacked."""
    size = next(t.shape[d] for t, d in zip(arguments, in_dims, strict=True) if d is not None)
    results = []
    for n in range(size):
        picked = [
            t if d is None else t.select(d, n) for t, d in zip(arguments, in_dims, strict=True)
        ]
        result = function(*picked)
        results.append(result if isinstance(result, tuple) else (result,))
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True))


def _vmap_agrees(function: Callable[..., Any], in_dims: tuple, *arguments: Tensor) -> None:
    got = torch.vmap(function, in_dims)(*arguments)
    got = got if isinstance(got, tuple) else (got,)
    for a, b in zip(got, _slices(function, in_dims, *arguments), strict=True):
        torch.testing.assert_close(a, b)


def _with_lse(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
    return attention(q, k, v, return_lse=True, **keywords)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (0, 0, None)])
def test_vmap(in_dims: tuple, batch: int) -> None:
    tensors = inputs(3, batch, 10)
    arguments = [t if d == 0 else t[0] for t, d in zip(tensors, in_dims, strict=True)]
    _vmap_agrees(functools.partial(_with_lse, causal=True), in_dims, *arguments)
    gradient = torch.func.grad(
        lambda q, k, v: attention(q, k, v, causal=True).square().sum(), argnums=(0, 1, 2)
    )
    _vmap_agrees(gradient, in_dims, *arguments)


def test_vmap_other_dimensions() -> None:
    q, k, v = inputs(3, 2, 10)
    moved = (q.movedim(0, 2), k.movedim(0, 4), v.movedim(0, 1))
    _vmap_agrees(_with_lse, (2, 4, 1), *moved)


_TERMS: dict[str, tuple[Callable[..., dict[str, Any]], Callable[[], Tensor]]] = {
    "bias": (lambda t: {"bias": t}, lambda: torch.randn(3, 2, 2, 10, 10, dtype=torch.float64)),
    "bias-heads": (lambda t: {"bias": t}, lambda: torch.randn(3, 2, 1, 1, dtype=torch.float64)),
    "sink": (lambda t: {"sink": t}, lambda: torch.randn(3, 2, dtype=torch.float64)),
    "alibi": (lambda t: {"alibi": t}, lambda: torch.rand(3, 2, dtype=torch.float64)),
    "mask": (lambda t: {"mask": t}, lambda: torch.rand(3, 1, 1, 10, 10) < 0.5),
    "lengths": (
        lambda t: {"mask": rowmax.PrefixLengths(t)},
        lambda: torch.tensor([[3, 10], [0, 5], [10, 1]]),
    ),
    "documents": (lambda t: {"mask": rowmax.Documents(t)}, lambda: torch.randint(3, (3, 10))),
    "documents-batched": (
        lambda t: {"mask": rowmax.Documents(t)},
        lambda: torch.randint(3, (3, 2, 10)),
    ),
}


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("term", _TERMS)
def test_vmap_of_terms(term: str, batch: int, shared: bool) -> None:
    keywords, draw = _TERMS[term]
    q, k, v = inputs(3, batch, 10)
    extra = draw()
    if term in ("bias", "lengths", "documents-batched"):
        extra = extra[:, :batch]
    extra = extra[0] if shared else extra
    in_dims = (0, 0, 0, None if shared else 0)

    def call(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Any:
        return _with_lse(q, k, v, **keywords(t))

    _vmap_agrees(call, in_dims, q, k, v, extra)
    floating = term in ("bias", "bias-heads", "sink")
    gradient = torch.func.grad(
        lambda *a: call(*a)[0].square().sum() + call(*a)[1].clamp(-9).sum(),
        argnums=(0, 1, 2, 3) if floating else (0, 1, 2),
    )
    _vmap_agrees(gradient, in_dims, q, k, v, extra)


def test_vmap_nested_and_empty() -> None:
    q, k, v = inputs(3, 4, 1, 10)
    got = torch.vmap(torch.vmap(_with_lse, (1, 1, None)), (0, 0, None))(
        q.transpose(1, 2).unsqueeze(3).squeeze(3).movedim(2, 2), k.movedim(1, 2), v[0, 0]
    )
    for i in range(3):
        for j in range(4):
            want = _with_lse(q[i, j], k[i, j], v[0, 0])
            torch.testing.assert_close(got[0][i, j], want[0])
            torch.testing.assert_close(got[1][i, j], want[1])
    out, lse = torch.vmap(_with_lse)(*inputs(3, 0, 10))
    assert out.shape == (3, 0, 10, 2, 8)
    assert lse.shape == (3, 0, 2, 10)
    for keywords in ({}, {"dropout_p": 0.5, "seed": 1}):
        out, lse = torch.vmap(functools.partial(_with_lse, **keywords))(*inputs(0, 3, 10))
        assert out.shape == (0, 3, 10, 2, 8)
        assert lse.shape == (0, 3, 2, 10)


def test_vmap_keeps_dropout() -> None:
    """Each slice keeps what a call of its own would keep."""
    q, k, v = inputs(3, 2, 20)
    dropped = functools.partial(_with_lse, dropout_p=0.5, seed=7)
    _vmap_agrees(dropped, (0, 0, 0), q, k, v)
    seeds = torch.tensor([1, 2, 3])
    _vmap_agrees(lambda q, s: attention(q, q, q, dropout_p=0.5, seed=s), (0, 0), q, seeds)
    same = q[:1].expand(3, -1, -1, -1, -1)
    drawn = functools.partial(attention, k=k[0], v=v[0], dropout_p=0.5)
    one, two, _ = torch.vmap(drawn, randomness="same")(same)
    assert torch.equal(one, two)
    one, two, _ = torch.vmap(drawn, randomness="different")(same)
    assert not torch.equal(one, two)


def test_vmap_packed() -> None:
    q, k, v = (torch.randn(3, 12, 2, 8, dtype=torch.float64) for _ in range(3))
    cu = torch.tensor([0, 5, 5, 12])

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rowmax.attention_varlen(q, k, v, cu, cu, causal=True, backend=BACKEND)

    _vmap_agrees(call, (0, 0, 0), q, k, v)
    _vmap_agrees(torch.func.grad(lambda *a: call(*a).square().sum(), (0, 1, 2)), (0, 0, 0), q, k, v)


def test_grad_of_vmap() -> None:
    q, k, v = inputs(3, 2, 10)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.vmap(attention, (0, 0, None))(q, k, v).square().sum()

    got = torch.func.grad(loss, (0, 1, 2))(q, k, v[0])
    leaves = [t.clone().requires_grad_() for t in (q, k, v[0])]
    out = torch.stack([attention(a, b, leaves[2]) for a, b in zip(*leaves[:2], strict=True)])
    want = torch.autograd.grad(out.square().sum(), leaves)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_per_sample_gradients() -> None:
    layer, x = _Layer().double(), torch.randn(4, 9, 16, dtype=torch.float64)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        out = torch.func.functional_call(layer, parameters, (sample[None],))
        return out.square().sum()

    got = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for n in range(4):
        layer.zero_grad()
        layer(x[n : n + 1]).square().sum().backward()
        for name, p in layer.named_parameters():
            torch.testing.assert_close(got[name][n], p.grad)


# --- what is refused ---------------------------------------------------------------------------


def _self(q: Tensor) -> Tensor:
    return attention(q, q, q, causal=True)


def _dual(function: Callable[[Tensor], Tensor], q: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(q, torch.ones_like(q))))


def _second(function: Callable[[Tensor], Tensor], q: Tensor) -> Any:
    q = q.clone().requires_grad_()
    (dq,) = torch.autograd.grad(function(q).square().sum(), q, create_graph=True)
    return torch.autograd.grad(dq.square().sum(), q)


def _total(q: Tensor) -> Tensor:
    return _self(q).sum()


def _jvp(q: Tensor) -> Any:
    return torch.func.jvp(_self, (q,), (torch.ones_like(q),))


#: ways to ask for what is not there yet; each a function of q and, maybe, a compiler
_REFUSED: dict[str, Callable[[Tensor, Callable], Any]] = {
    "jvp": lambda q, c: c(_jvp)(q),
    "jvp-of-compiled": lambda q, c: torch.func.jvp(c(_self), (q,), (torch.ones_like(q),)),
    "dual": lambda q, c: _dual(c(_self), q),
    "dual-inside": lambda q, c: c(functools.partial(_dual, _self))(q),
    "jacfwd": lambda q, c: c(torch.func.jacfwd(_self))(q),
    "linearize": lambda q, c: torch.func.linearize(c(_self), q),
    "double-backward": lambda q, c: _second(c(_self), q),
    "grad-of-grad": lambda q, c: c(
        torch.func.grad(lambda q: torch.func.grad(_total)(q).square().sum())
    )(q),
    "hessian": lambda q, c: c(torch.func.hessian(_total))(q),
    "jacrev-of-grad": lambda q, c: c(torch.func.jacrev(torch.func.grad(_total)))(q),
    "vmap-of-jvp": lambda q, c: c(torch.vmap(_jvp))(q[None]),
}


@pytest.mark.parametrize("compiler", [None, "eager", "aot_eager"])
@pytest.mark.parametrize("way", _REFUSED)
def test_no_silent_zero(way: str, compiler: str | None) -> None:
    """Forward mode and second derivatives raise, however they are asked for."""
    torch._dynamo.reset()
    q = torch.randn(1, 6, 2, 8)
    if compiler is None:
        with pytest.raises(NotImplementedError, match=r"rowmax: (forward-mode|second) derivatives"):
            _REFUSED[way](q, lambda f: f)
        return
    # a graph that cannot be traced raises torch's error around ours
    errors = (NotImplementedError, RuntimeError, torch._dynamo.exc.TorchDynamoException)
    with pytest.raises(errors):
        _REFUSED[way](q, functools.partial(torch.compile, backend=compiler, fullgraph=True))


def test_tangents_of_other_tensors_pass() -> None:
    """A level of forward mode that attention has no part in is nobody's error."""
    q, k, v = inputs(1, 6)
    x = torch.ones(6, dtype=q.dtype)
    value, tangent = torch.func.jvp(
        lambda x: attention(q, k, v).sum() * x.sum(), (x,), (torch.ones_like(x),)
    )
    torch.testing.assert_close(tangent * 6, value * 6)


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
    out, lse = _with_lse(q, k, v)
    dlse = torch.randn(12, 2, 2, dtype=q.dtype).permute(1, 2, 0)
    got = torch.autograd.grad([out, lse], (q, k, v), [dout, dlse], retain_graph=True)
    want = torch.autograd.grad([out, lse], (q, k, v), [dout.contiguous(), dlse.contiguous()])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_lse_alone() -> None:
    q, k, v = inputs(1, 12, grad=True)
    _, lse = _with_lse(q, k, v)
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


# --- work --------------------------------------------------------------------------------------


def test_flops_are_counted() -> None:
    q, k, v = inputs(2, 10, grad=True)
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v).sum().backward()
    product = 2 * 2 * 2 * 10 * 10 * 8
    assert counter.get_total_flops() == 7 * product
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v, causal=True)
    assert counter.get_total_flops() == 2 * product * 55 // 100
    cu = torch.tensor([0, 3, 10])
    with FlopCounterMode(display=False) as counter:
        rowmax.attention_varlen(q[0], k[0], v[0], cu, cu, backend=BACKEND)
    assert counter.get_total_flops() == 2 * 2 * 2 * (9 + 49) * 8


@pytest.mark.parametrize("nq", [0, 1, 7, 12])
@pytest.mark.parametrize("nk", [0, 1, 4, 11])
@pytest.mark.parametrize("band", [(None, None), (None, 0), (2, 0), (0, 3), (20, 30), (5, None)])
def test_flops_count_the_band(nq: int, nk: int, band: tuple[int | None, int | None]) -> None:
    call = make(Case("band", b=2, nq=nq, nk=nk, hq=3, d=5, dv=4, left=band[0], right=band[1]))
    problem, tensors = call.problem()
    pairs = int(rowmax.mask.dense(problem, tensors).sum()) * 2 * 3
    assert rowmax.flops.forward_flops(problem) == 2 * pairs * (5 + 4)
    assert rowmax.flops.backward_flops(problem) == 2 * pairs * (3 * 5 + 2 * 4)
