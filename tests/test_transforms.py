"""torch.func over the operators: grad, jvp, vmap and each over the others; refusals."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import rowmax

from .small_calls import BACKEND, Layer, attention, inputs, with_lse

pytestmark = [  # torch's own, of torch's own
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),
]

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
    """Return a call for each slice, stacked, as vmap defines it."""
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


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (0, 0, None)])
def test_vmap(in_dims: tuple, batch: int) -> None:
    tensors = inputs(3, batch, 10)
    arguments = [t if d == 0 else t[0] for t, d in zip(tensors, in_dims, strict=True)]
    _vmap_agrees(functools.partial(with_lse, causal=True), in_dims, *arguments)
    gradient = torch.func.grad(
        lambda q, k, v: attention(q, k, v, causal=True).square().sum(), argnums=(0, 1, 2)
    )
    _vmap_agrees(gradient, in_dims, *arguments)


def test_vmap_other_dimensions() -> None:
    q, k, v = inputs(3, 2, 10)
    moved = (q.movedim(0, 2), k.movedim(0, 4), v.movedim(0, 1))
    _vmap_agrees(with_lse, (2, 4, 1), *moved)


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
    "lengths-aligned": (
        lambda t: {"mask": rowmax.PrefixLengths(t, align="lengths"), "causal": True},
        lambda: torch.tensor([[3, 10], [0, 5], [11, 1]]),
    ),
    "prefix": (
        lambda t: {"mask": rowmax.Prefix(t)},
        lambda: torch.tensor([[3, 10], [0, 5], [11, 1]]),
    ),
    "padding": (lambda t: {"mask": rowmax.KeyPadding(t)}, lambda: torch.rand(3, 2, 10) < 0.5),
    "documents": (lambda t: {"mask": rowmax.Documents(t)}, lambda: torch.randint(3, (3, 10))),
    "documents-batched": (
        lambda t: {"mask": rowmax.Documents(t)},
        lambda: torch.randint(3, (3, 2, 10)),
    ),
    "documents-offsets": (
        lambda t: {"mask": rowmax.Documents(cu_seqlens=t)},
        lambda: torch.tensor([[0, 3, 10], [0, 0, 10], [0, 9, 10]]),
    ),
    "documents-both": (
        lambda t: {"mask": rowmax.Documents(t) & rowmax.Documents(t.flip(-1))},
        lambda: torch.randint(3, (3, 10)),
    ),
}
#: for two sequences
_BATCHED = ("bias", "lengths", "lengths-aligned", "prefix", "padding", "documents-batched")


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("term", _TERMS)
def test_vmap_of_terms(term: str, batch: int, shared: bool) -> None:
    keywords, draw = _TERMS[term]
    q, k, v = inputs(3, batch, 10)
    extra = draw()
    if term in _BATCHED:
        extra = extra[:, :batch]
    extra = extra[0] if shared else extra
    in_dims = (0, 0, 0, None if shared else 0)

    def call(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Any:
        return with_lse(q, k, v, **keywords(t))

    _vmap_agrees(call, in_dims, q, k, v, extra)
    floating = term in ("bias", "bias-heads", "sink", "alibi")
    gradient = torch.func.grad(
        lambda *a: call(*a)[0].square().sum() + call(*a)[1].clamp(-9).sum(),
        argnums=(0, 1, 2, 3) if floating else (0, 1, 2),
    )
    _vmap_agrees(gradient, in_dims, q, k, v, extra)


def test_vmap_nested_and_empty() -> None:
    q, k, v = inputs(3, 4, 1, 10)
    got = torch.vmap(torch.vmap(with_lse, (1, 1, None)), (0, 0, None))(
        q.transpose(1, 2).unsqueeze(3).squeeze(3).movedim(2, 2), k.movedim(1, 2), v[0, 0]
    )
    for i in range(3):
        for j in range(4):
            want = with_lse(q[i, j], k[i, j], v[0, 0])
            torch.testing.assert_close(got[0][i, j], want[0])
            torch.testing.assert_close(got[1][i, j], want[1])
    out, lse = torch.vmap(with_lse)(*inputs(3, 0, 10))
    assert out.shape == (3, 0, 10, 2, 8)
    assert lse.shape == (3, 0, 2, 10)
    for keywords in ({}, {"dropout_p": 0.5, "seed": 1}):
        out, lse = torch.vmap(functools.partial(with_lse, **keywords))(*inputs(0, 3, 10))
        assert out.shape == (0, 3, 10, 2, 8)
        assert lse.shape == (0, 3, 2, 10)


def test_vmap_keeps_dropout() -> None:
    """Each slice keeps what a call of its own would keep."""
    q, k, v = inputs(3, 2, 20)
    dropped = functools.partial(with_lse, dropout_p=0.5, seed=7)
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
    layer, x = Layer().double(), torch.randn(4, 9, 16, dtype=torch.float64)
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


# --- forward mode and second derivatives -------------------------------------------------------


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


#: ways to tangents and second derivatives; each a function of q and, maybe, a compiler
_WAYS: dict[str, Callable[[Tensor, Callable], Any]] = {
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


#: compilers that torch itself refuses, by the way
_NOT_COMPILED = {
    "jvp-of-compiled": ("eager", "aot_eager"),  # transform inside the compiled function instead
    "linearize": ("eager", "aot_eager"),
    "double-backward": ("aot_eager",),  # torch.func.grad twice is compiled
}


@pytest.mark.parametrize("compiler", [None, "eager", "aot_eager"])
@pytest.mark.parametrize("way", _WAYS)
def test_derivatives(way: str, compiler: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's own composed attention gives them, or an error: never a silent zero."""
    torch._dynamo.reset()
    q = torch.randn(1, 6, 2, 8, dtype=torch.float64)
    if compiler in _NOT_COMPILED.get(way, ()):
        errors = (RuntimeError, torch._dynamo.exc.TorchDynamoException)
        with pytest.raises(errors):
            _WAYS[way](q, functools.partial(torch.compile, backend=compiler, fullgraph=True))
        return
    compiled = functools.partial(torch.compile, backend=compiler, fullgraph=True)
    got = _WAYS[way](q, compiled if compiler else lambda f: f)
    _as_composed(way, q, got, monkeypatch)


def _as_composed(way: str, q: Tensor, got: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "attention", _composed)
    want = _WAYS[way](q, lambda f: f)
    if way == "linearize":  # (out, its tangent as a function)
        got, want = ((out, tangent(q)) for out, tangent in (got, want))
    torch.testing.assert_close(got, want)
    assert all(t.abs().max() > 1e-3 for t in pytree.tree_leaves(got))


@pytest.mark.parametrize("way", _WAYS)
def test_the_reference_has_every_derivative(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 6, 2, 8, dtype=torch.float64)
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "attention", functools.partial(rowmax.attention, backend="reference"))
    _as_composed(way, q, _WAYS[way](q, lambda f: f), monkeypatch)


#: a third derivative, and forward mode twice
_THIRD: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "jacfwd-of-jacfwd": lambda f, q: torch.func.jacfwd(torch.func.jacfwd(f))(q),
    "grad-of-hessian": lambda f, q: torch.func.grad(lambda q: torch.func.hessian(f)(q).sum())(q),
    "jacrev-thrice": lambda f, q: torch.func.jacrev(torch.func.jacrev(torch.func.jacrev(f)))(q),
    "jvp-of-grad-of-jvp": lambda f, q: torch.func.jvp(
        torch.func.grad(lambda q: torch.func.jvp(f, (q,), (q,))[1]), (q,), (q,)
    ),
    "dual-of-double-backward": lambda f, q: _dual(lambda q: _second(f, q)[0], q),
}


@pytest.mark.parametrize("way", _THIRD)
def test_third_derivatives_are_refused(way: str) -> None:
    q = torch.randn(1, 3, 1, 2, dtype=torch.float64)

    def total(q: Tensor, backend: str = BACKEND) -> Tensor:
        return rowmax.attention(q, q, q, causal=True, backend=backend).square().sum()

    text = r"rowmax: third derivatives, and forward mode twice .* jacfwd\(jacrev\(f\)\) .* use back"
    with pytest.raises(NotImplementedError, match=text):
        _THIRD[way](total, q)
    assert _THIRD[way](functools.partial(total, backend="reference"), q) is not None


def test_forward_over_reverse_and_reverse_over_forward_without_transforms() -> None:
    """At one level of ``forward_ad``, in tensors that also require gradients."""
    q, t = (torch.randn(1, 6, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def both(attention: Callable[..., Tensor]) -> list[Any]:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(q, t)
            out = attention(dual, dual, dual, causal=True)
            (dq,) = torch.autograd.grad(out.square().sum(), q, retain_graph=True)
            primal, tangent = forward_ad.unpack_dual(out)
            found = torch.autograd.grad(tangent.square().sum() + primal.sin().sum(), (q, t))
            return [*forward_ad.unpack_dual(dq), *found]

    dense = functools.partial(rowmax.attention, backend="reference")
    for got, want in zip(both(attention), both(dense), strict=True):
        torch.testing.assert_close(got, want)


def test_compiled_jvp_of_any_length() -> None:
    """One graph serves every length."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def along(q: Tensor, t: Tensor) -> Any:
        return torch.func.jvp(lambda q: attention(q, q, q, causal=True), (q,), (t,))

    compiled = torch.compile(along, backend=counter, fullgraph=True, dynamic=True)
    counts = []
    for n in (7, 12, 20):
        q, t, _ = inputs(2, n)  # views of one tensor have offsets, which torch cannot trace
        torch.testing.assert_close(compiled(q, t), along(q, t))
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1]


def test_compiled_loss_with_a_jvp_in_it() -> None:
    """A graph whose backward is ``tangent_backward``."""
    torch._dynamo.reset()
    x, t = torch.randn(2, 9, 16, dtype=torch.float64), torch.randn(2, 9, 16, dtype=torch.float64)
    weight = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)

    def layer(x: Tensor) -> Tensor:  # not of nn.Linear, whose tangent torch fails to compile
        q, k, v = (x * w for w in weight)
        return attention(*(y.unflatten(-1, (2, 8)) for y in (q, k, v)), causal=True)

    def loss() -> Tensor:
        return torch.func.jvp(layer, (x,), (t,))[1].square().sum()

    want = torch.autograd.grad(loss(), weight)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(), weight), want)


_VMAPPED = ["hessian", "jacfwd", "jvp", "jvp-of-grad", "grad-of-jvp", "jacrev-of-grad"]


def _derivative(transform: str, function: Callable[[Tensor], Tensor], q: Tensor) -> Any:
    along = torch.ones_like(q)
    if transform == "jvp":
        return torch.func.jvp(function, (q,), (along,))
    if transform == "jvp-of-grad":
        return torch.func.jvp(torch.func.grad(function), (q,), (along,))
    if transform == "grad-of-jvp":
        return torch.func.grad(lambda q: torch.func.jvp(function, (q,), (along,))[1])(q)
    if transform == "jacrev-of-grad":
        return torch.func.jacrev(torch.func.grad(function))(q)
    return getattr(torch.func, transform)(function)(q)


@pytest.mark.parametrize("transform", _VMAPPED)
@pytest.mark.parametrize("term", [None, *_TERMS])
def test_vmap_of_derivatives(term: str | None, transform: str) -> None:
    """Folded into the batch or one by one: as the dense definition gives them."""
    keywords, draw = _TERMS[term] if term else (lambda t: {}, lambda: torch.zeros(3))
    q, extra = torch.randn(3, 1, 10, 2, 2, dtype=torch.float64), draw()
    if term in _BATCHED:
        extra = extra[:, :1]
    k, v = torch.randn(2, 1, 10, 2, 2, dtype=torch.float64)

    def derivative(q: Tensor, t: Tensor, backend: str = BACKEND) -> Any:
        def loss(q: Tensor) -> Tensor:
            out, lse = rowmax.attention(q, k, v, **keywords(t), return_lse=True, backend=backend)
            return out.square().sum() + lse.clamp(-9).square().sum()

        return _derivative(transform, loss, q)

    got = torch.vmap(derivative)(q, extra)
    want = torch.vmap(functools.partial(derivative, backend="reference"))(q, extra)
    torch.testing.assert_close(got, want)


class _Calls(TorchDispatchMode):
    """The names of rowmax's operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "rowmax" in str(func):
            self.names.append(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_jacobian_is_one_call(with_bias: bool) -> None:
    q, k, v = inputs(2, 4)
    b = torch.randn(4, 4) if with_bias else None

    def call(q: Tensor) -> Tensor:
        return attention(q, k, v, bias=b).square().sum((1, 2, 3))

    with _Calls() as calls:
        torch.func.jacfwd(call)(q)
    assert calls.names == ["tangent"]
    with _Calls() as calls:
        torch.func.hessian(call)(q)
    assert set(calls.names) == {"tangent", "tangent_backward"}
    assert len(calls.names) == 2


@pytest.mark.parametrize("name", ["q", "bias", "bias-shared", "sink", "alibi", "packed"])
def test_jacobians_by_each_input(name: str) -> None:
    """In a Jacobian by columns the tangents have a vmapped dimension that their inputs lack."""
    q, k, v = torch.randn(3, 2, 4, 2, 2, dtype=torch.float64)
    terms = {
        "bias": torch.randn(2, 1, 4, 1, dtype=torch.float64),
        "bias-shared": torch.randn(4, 4, dtype=torch.float64),
        "sink": torch.randn(2, dtype=torch.float64),
        "alibi": torch.rand(2, dtype=torch.float64),
    }
    x = terms.get(name, q)
    cu = torch.tensor([0, 3, 8])

    def call(x: Tensor, backend: str = BACKEND) -> Tensor:
        if name == "packed":
            rows = (t.flatten(0, 1) for t in (x, k, v))
            return rowmax.attention_varlen(*rows, cu, cu, causal=True, backend=backend)
        given = {} if name == "q" else {name.removesuffix("-shared"): x}
        return rowmax.attention(x if name == "q" else q, k, v, **given, backend=backend)

    dense = functools.partial(call, backend="reference")
    torch.testing.assert_close(torch.func.jacfwd(call)(x), torch.func.jacrev(dense)(x))

    def total(x: Tensor, call: Callable[[Tensor], Tensor] = call) -> Tensor:
        return call(x).sin().sum()

    want = torch.func.hessian(functools.partial(total, call=dense))(x)
    torch.testing.assert_close(torch.func.hessian(total)(x), want)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacrev(total))(x), want)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacfwd(total))(x), want)


def _composed(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    heads = (t.transpose(1, 2) for t in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(*heads, is_causal=causal).transpose(1, 2)


@pytest.mark.parametrize("transform", ["hessian", "jacfwd", "jacrev", "jvp", "grad"])
@pytest.mark.parametrize("term", [None, *_TERMS])
def test_vmap_of_the_references_derivatives(term: str | None, transform: str) -> None:
    keywords, draw = _TERMS[term] if term else (lambda t: {}, lambda: torch.zeros(3))
    q, extra = torch.randn(3, 1, 10, 2, 2, dtype=torch.float64), draw()
    if term in _BATCHED:
        extra = extra[:, :1]
    k, v = torch.randn(2, 1, 10, 2, 2, dtype=torch.float64)

    def derivative(q: Tensor, t: Tensor) -> Any:
        def loss(q: Tensor) -> Tensor:
            out, lse = rowmax.attention(
                q, k, v, **keywords(t), return_lse=True, backend="reference"
            )
            return out.square().sum() + lse.clamp(-9).square().sum()

        if transform == "jvp":
            return torch.func.jvp(loss, (q,), (torch.ones_like(q),))
        return getattr(torch.func, transform)(loss)(q)

    _vmap_agrees(derivative, (0, 0), q, extra)


def test_vmap_of_the_references_dropout_and_packed_sequences() -> None:
    q = torch.randn(3, 6, 2, 2, dtype=torch.float64)
    seeds, cu = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 1, 6])

    def derivative(q: Tensor, seed: Tensor) -> Tensor:
        def loss(q: Tensor) -> Tensor:
            return rowmax.attention_varlen(
                q, q, q, cu, cu, dropout_p=0.5, seed=seed, backend="reference"
            ).square().sum()  # fmt: skip

        return torch.func.hessian(loss)(q)

    _vmap_agrees(derivative, (0, 0), q, seeds)


def test_tangents_of_other_tensors_pass() -> None:
    """A level of forward mode that attention has no part in raises no error."""
    q, k, v = inputs(1, 6)
    x = torch.ones(6, dtype=q.dtype)
    value, tangent = torch.func.jvp(
        lambda x: attention(q, k, v).sum() * x.sum(), (x,), (torch.ones_like(x),)
    )
    torch.testing.assert_close(tangent * 6, value * 6)
