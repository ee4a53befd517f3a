"""rowmax.softmax and rowmax.logsumexp: the definition, every derivative, every edge."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import rowmax
from rowmax.reference.online import block_softmax

# torch's own decompositions for forward mode are still scripted
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FUNCTIONS = {
    "softmax": partial(rowmax.softmax, dim=1, block=3),
    "logsumexp": partial(rowmax.logsumexp, dim=1, block=3),
    "logsumexp keepdim": partial(rowmax.logsumexp, dim=-2, keepdim=True, block=2),
}
functions = pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS.keys())
inf, nan = torch.inf, torch.nan


def numbers(*shape: int, dtype: torch.dtype = torch.float64, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (spread * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)


def square_sum(f, x):
    return f(x).square().sum()


@given(
    rows=st.integers(0, 4),
    n=st.integers(0, 40),
    block=st.integers(1, 50),
    hidden=st.floats(0, 1),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**30),
)
@settings(max_examples=200)
def test_any_block_gives_the_definition(rows, n, block, hidden, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x = 10 * torch.randn(rows, n, generator=generator, dtype=torch.float64)
    x = x.masked_fill(torch.rand(rows, n, generator=generator) < hidden, -inf).to(dtype)
    wide = x.double()
    e = torch.logsumexp(wide, 1)
    y = torch.exp(wide - e.masked_fill(e == -inf, 0.0)[:, None])

    got_y, got_e = rowmax.softmax(x, block=block), rowmax.logsumexp(x, block=block)
    assert got_y.dtype == got_e.dtype == dtype
    # sums of n terms, each exact to a few ulp, in the accumulator; then one rounding
    sums = 1e-14 if dtype == torch.float64 else 1e-5
    close = partial(torch.testing.assert_close, rtol=torch.finfo(dtype).eps + sums, atol=sums)
    close(got_y.double(), y)
    close(got_e.double(), e)
    assert (got_y[e == -inf] == 0).all()


def test_blocks_are_those_of_the_recurrence():
    x = numbers(6, 23)
    x[1] = -inf
    x[2, :9] = -inf
    torch.testing.assert_close(rowmax.softmax(x, block=4), block_softmax(x, 4))


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_dimensions(dim):
    x = numbers(5, 7, 3).transpose(0, 2)
    torch.testing.assert_close(rowmax.softmax(x, dim, block=2), torch.softmax(x, dim))
    torch.testing.assert_close(rowmax.logsumexp(x, dim, block=2), torch.logsumexp(x, dim))
    kept = rowmax.logsumexp(x, dim, keepdim=True, block=2)
    torch.testing.assert_close(kept, torch.logsumexp(x, dim, keepdim=True))


def test_no_dimension_and_empty_ones():
    for got, want in (
        (rowmax.softmax(torch.tensor(3.0), 0), torch.tensor(1.0)),
        (rowmax.logsumexp(torch.tensor(3.0)), torch.tensor(3.0)),
        (rowmax.softmax(torch.zeros(2, 0)), torch.zeros(2, 0)),
        (rowmax.softmax(torch.zeros(0, 2)), torch.zeros(0, 2)),
        (rowmax.logsumexp(torch.zeros(2, 0)), torch.full((2,), -inf)),
        (rowmax.logsumexp(torch.zeros(0, 2)), torch.zeros(0)),
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    x = torch.zeros(2, 0, requires_grad=True)
    (rowmax.softmax(x).sum() + rowmax.logsumexp(x).exp().sum()).backward()
    assert x.grad is not None
    assert x.grad.shape == (2, 0)


def test_infinite_rows():
    x = torch.tensor([[-inf, -inf], [inf, 0.0], [nan, 0.0], [-inf, 1.0]], requires_grad=True)
    y, e = rowmax.softmax(x, block=1), rowmax.logsumexp(x, block=1)
    want = torch.tensor([[0.0, 0.0], [nan, nan], [nan, nan], [0.0, 1.0]])
    torch.testing.assert_close(y, want, equal_nan=True)
    torch.testing.assert_close(e, torch.tensor([-inf, inf, nan, 1.0]), equal_nan=True)
    weights = numbers(2, dtype=torch.float32)
    rows = torch.tensor([0, 3])
    (dx,) = torch.autograd.grad((y[rows] * weights).sum() + e[rows].sum(), x)
    assert (dx[0] == 0).all()
    assert torch.isfinite(dx[3]).all()


def test_far_from_zero():
    """x - m is exact where x - lse is not: no accuracy is lost to a large common part."""
    x = numbers(3, 50, dtype=torch.float32, spread=1.0)
    for far in (x + 4096.0, x - 4096.0):
        want = torch.softmax(far.double(), 1)
        torch.testing.assert_close(rowmax.softmax(far).double(), want, rtol=1e-6, atol=0)
        dx = grad(lambda x: rowmax.logsumexp(x).sum())(far)
        torch.testing.assert_close(dx.double(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_sums_in_float32(dtype):
    """5000 ones: a running sum in half precision would stop growing."""
    x = torch.zeros(2, 5000, dtype=dtype, requires_grad=True)
    e = rowmax.logsumexp(x, block=64)
    torch.testing.assert_close(e, torch.logsumexp(x.detach().float(), 1).to(dtype))
    e.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full_like(x, 1 / 5000))


@functions
def test_derivatives_of_both_modes_and_orders(f):
    x = numbers(4, 7, 2).requires_grad_()
    assert gradcheck(
        f, x, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert gradgradcheck(f, x, check_fwd_over_rev=True, check_batched_grad=True)


@functions
def test_hessians_agree_whatever_the_modes(f):
    """Forward over forward among them, where torch's own functions give 0 without a word."""
    x = numbers(3, 4, 2)
    want = hessian(partial(square_sum, torch_twin(f)))(x)
    for outer in (jacfwd, jacrev):
        for inner in (jacfwd, jacrev):
            got = outer(inner(partial(square_sum, f)))(x)
            torch.testing.assert_close(got, want)


@functions
def test_second_derivative_of_a_masked_row_is_zero(f):
    x = numbers(2, 5, 2)
    x[0, :, 0] = -inf
    x[1, 2] = -inf

    def finite(x):
        y = f(x)
        return torch.where(y == -inf, 0.0, y).square().sum()

    got = hessian(finite)(x)
    assert torch.isfinite(got).all()
    assert (got[0, :, 0] == 0).all()


@functions
def test_vmap(f):
    x = numbers(3, 4, 7, 2)
    torch.testing.assert_close(vmap(f)(x), torch.stack([f(part) for part in x]))
    gradient = grad(partial(square_sum, f))
    torch.testing.assert_close(vmap(gradient)(x), torch.stack([gradient(part) for part in x]))


@functions
def test_compile_without_a_break(f):
    x = numbers(4, 7, 2).requires_grad_()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), f(x))
    loss = partial(square_sum, f)
    (got,) = torch.autograd.grad(square_sum(compiled, x), x)
    (want,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(got, want)

    inside = torch.compile(vmap(grad(loss)), fullgraph=True, backend="aot_eager")
    many = numbers(3, 4, 7, 2)
    torch.testing.assert_close(inside(many), vmap(grad(loss))(many))
    tangent = torch.compile(lambda x, t: jvp(f, (x,), (t,))[1], fullgraph=True, backend="aot_eager")
    x, t = numbers(4, 7, 2), numbers(2, 7, 4).reshape(4, 7, 2)
    torch.testing.assert_close(tangent(x, t), jvp(f, (x,), (t,))[1])


def test_compiled_edges():
    x = torch.tensor([[-inf, -inf], [inf, 0.0], [-inf, 1.0]], dtype=torch.float64)
    for f in (rowmax.softmax, rowmax.logsumexp):
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), f(x), equal_nan=True)
        gradient = torch.compile(
            grad(lambda x, f=f: f(x[::2]).exp().sum()), fullgraph=True, backend="aot_eager"
        )(x)
        assert (gradient[0] == 0).all()


@functions
@pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        ({"x": [1.0]}, TypeError, "x: got list"),
        ({"x": torch.zeros(2, 2, dtype=torch.int64)}, TypeError, "x: got torch.int64"),
        ({"x": torch.eye(2).to_sparse()}, TypeError, "x: got layout"),
        (
            {"x": torch.nested.as_nested_tensor([torch.ones(2)], layout=torch.jagged)},
            TypeError,
            "x: got a nested tensor",
        ),
        ({"dim": 2}, ValueError, "dim: got 2; want -2 to 1"),
        ({"dim": (0, 1)}, TypeError, "dim: got"),
        ({"dim": True}, TypeError, "dim: got True"),
        ({"block": 0}, ValueError, "block: got 0"),
        ({"block": 2.5}, TypeError, "block: got 2.5"),
    ],
)
def test_errors_name_the_argument(f, keywords, error, words):
    arguments = {"x": torch.zeros(2, 2), **keywords}
    with pytest.raises(error, match=words.replace("(", r"\(")):
        f.func(**arguments)


def test_keepdim_is_a_flag():
    with pytest.raises(TypeError, match="keepdim: got 1"):
        rowmax.logsumexp(torch.zeros(2), keepdim=1)  # pyright: ignore


def torch_twin(f):
    """Return torch's function of the same name and arguments."""
    keywords = {name: value for name, value in f.keywords.items() if name != "block"}
    return partial(getattr(torch, f.func.__name__), **keywords)
