"""What PyTorch does with the operators: checks, compile, export, autograd, modes, work."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import rowmax

from .cases import CASES, Case, make
from .plain import BACKEND, Layer, attention, inputs, with_lse
from .tolerance import answer, cotangents

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


@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
def test_a_negation_put_off_is_done(name: str, backend: str) -> None:
    """``z.conj().imag`` is a view that says that its numbers are to be negated when read."""
    tensors = dict(zip("qkv", inputs(1, 12), strict=True)) | {"bias": torch.randn(12, 12).double()}
    lazy = torch.complex(torch.zeros_like(tensors[name]), -tensors[name]).conj().imag
    assert lazy.is_neg()
    for grad in (False, True):
        given = {**tensors, name: lazy.detach().requires_grad_(grad)}
        out = rowmax.attention(**given, backend=backend)
        want = rowmax.attention(**tensors, backend=backend)
        torch.testing.assert_close(out.detach(), want)


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


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [False, True])
def test_whoever_listens_sees_the_operator(grad: bool) -> None:
    """A call that nobody listens to goes past the dispatcher; its answer is the same."""
    q, k, v = inputs(2, 24, grad=grad)
    alone = attention(q, k, v, causal=True)
    with _Seen() as dispatched:
        a = attention(q, k, v, causal=True)
    assert "rowmax.forward.default" in dispatched.names
    with _Functions() as functions:
        b = attention(q, k, v, causal=True)
    assert any("rowmax" in name for name in functions.names)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        c = attention(q, k, v, causal=True)
    assert "rowmax::forward" in {event.name for event in profile.events() or ()}
    for out in (a, b, c):
        assert torch.equal(out, alone)
        assert out.requires_grad == alone.requires_grad == grad


def test_whoever_listens_sees_the_backward() -> None:
    q, k, v = inputs(2, 24, grad=True)
    out = attention(q, k, v, causal=True)
    dout = torch.randn_like(out)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    alone = gradients()
    with _Seen() as dispatched:
        a = gradients()
    assert "rowmax.backward.default" in dispatched.names
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        b = gradients()
    assert "rowmax::backward" in {event.name for event in profile.events() or ()}
    for got in (a, b):
        for x, y in zip(got, alone, strict=True):
            assert torch.equal(x, y)


def test_a_profiler_of_all_threads_sees_the_operators() -> None:
    q, k, v = inputs(2, 24, grad=True)
    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=every
    ) as profile:
        attention(q, k, v).sum().backward()
    names = {event.name for event in profile.events() or ()}
    assert {"rowmax::forward", "rowmax::backward"} <= names


def test_cotangents_in_batches() -> None:
    """By the older ``vmap``, whose tensors look plain."""
    q, k, v = inputs(2, 12, grad=True)
    out = attention(q, k, v, causal=True)
    douts = torch.randn(3, *out.shape, dtype=out.dtype)
    got = torch.autograd.grad(out, (q, k, v), douts, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(out, (q, k, v), d, retain_graph=True) for d in douts]
    for x, *parts in zip(got, *each, strict=True):
        torch.testing.assert_close(x, torch.stack(parts), rtol=0, atol=0)

    def summed(q: Tensor) -> Tensor:
        return attention(q, k, v, causal=True).sum((-1, -2))

    rows, plain = (
        torch.autograd.functional.jacobian(summed, q, vectorize=v) for v in (True, False)
    )
    torch.testing.assert_close(rows, plain, rtol=0, atol=0)


def test_a_cotangent_of_zeros_that_are_not_written() -> None:
    q, k, v = inputs(2, 12, grad=True)
    out = attention(q, k, v)
    dout = torch._efficientzerotensor(out.shape, dtype=out.dtype)
    for grad in torch.autograd.grad(out, (q, k, v), dout):
        assert not grad.count_nonzero()


def test_what_was_saved_may_come_back_as_another_kind_of_tensor() -> None:
    class Wrapped(Tensor):
        seen: ClassVar[list[str]] = []
        held: Tensor

        @staticmethod
        def __new__(cls, held: Tensor) -> Wrapped:
            made = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
            made.held = held
            return made

        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            cls.seen.append(str(func))
            plain = [x.held if isinstance(x, Wrapped) else x for x in args]
            out = func(*plain, **(kwargs or {}))
            return cls(out) if func is torch.ops.aten.detach.default else out

    q, k, v = inputs(1, 12, grad=True)
    want = torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
    leaves = {x.data_ptr() for x in (q, k, v)}

    def unpack(t: Tensor) -> Tensor:
        return t if t.data_ptr() in leaves else Wrapped(t)

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        out = attention(q, k, v)
    got = torch.autograd.grad(out.sum(), (q, k, v))
    assert "rowmax.backward.default" in Wrapped.seen
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


def test_a_tensors_subclass_goes_through_the_dispatcher() -> None:
    class Tagged(Tensor):
        seen: ClassVar[list[str]] = []

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            cls.seen.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    q, k, v = inputs(1, 8)
    out = attention(q.as_subclass(Tagged), k, v)
    assert isinstance(out, Tagged)
    assert any("rowmax" in name for name in Tagged.seen)


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
        pytest.raises(NotImplementedError, match="second derivatives"),
    ):
        first.sum().backward()


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


_FIRST = """
import sys, torch, rowmax
from contextlib import nullcontext
from torch.utils.flop_counter import FlopCounterMode
what = sys.argv[1]
q, k, v = (torch.randn(1, 10, 2, 8, requires_grad=True) for _ in range(3))
counter = FlopCounterMode(display=False)
with counter if what != "backward" else nullcontext(), torch.inference_mode(what == "inference"):
    out = rowmax.attention(q, k, v)
if what == "backward":
    with counter:
        out.sum().backward()
print(counter.get_total_flops())
"""


@pytest.mark.parametrize(("what", "products"), [("forward", 2), ("inference", 2), ("backward", 5)])
def test_flops_of_the_first_call_are_counted(what: str, products: int) -> None:
    """A counter keeps a copy of the registry, made before our operators were told to it."""
    command = [sys.executable, "-c", _FIRST, what]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) == products * 2 * 2 * 10 * 10 * 8


@pytest.mark.parametrize("nq", [0, 1, 7, 12])
@pytest.mark.parametrize("nk", [0, 1, 4, 11])
@pytest.mark.parametrize("band", [(None, None), (None, 0), (2, 0), (0, 3), (20, 30), (5, None)])
def test_flops_count_the_band(nq: int, nk: int, band: tuple[int | None, int | None]) -> None:
    call = make(Case("band", b=2, nq=nq, nk=nk, hq=3, d=5, dv=4, left=band[0], right=band[1]))
    problem, tensors = call.problem()
    pairs = int(rowmax.mask.dense(problem, tensors).sum()) * 2 * 3
    assert rowmax.flops.forward_flops(problem) == 2 * pairs * (5 + 4)
    assert rowmax.flops.backward_flops(problem) == 2 * pairs * (3 * 5 + 2 * 4)
