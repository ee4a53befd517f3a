"""What PyTorch sees: two operators, their fake kernels and their autograd.

The autograd kernels are our own. ``torch.library.register_autograd`` would make ones that lose
tangents (forward mode would silently give zero) and that fail under ``torch.func`` while
compiling; these refuse what they cannot do, wherever they run: eager, traced or exported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKeySet
from torch._functorch.utils import enable_single_level_autograd_function
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..call import flops
from ..call.check import check_packed_values
from ..call.dispatch import PLAIN_OPERATIONS, check_wanted, choose, run_backward
from ..call.inputs import DIFFERENTIABLE, Options, Tensors, Wanted, schema
from ..call.problem import Problem, known_problem, problem_of
from ..torch_compat import PLAIN, is_batched
from . import vmap as batching

_INPUTS = schema()
_TENSORS = len(Tensors._fields)
_DIFFERENTIABLE = len(DIFFERENTIABLE)  # the first inputs

_library = torch.library.Library("rowmax", "DEF")
_library.define(f"forward({_INPUTS}) -> (Tensor out, Tensor lse)")
_library.define(
    "backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool[] wanted, "
    f"{_INPUTS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)"
)


def attend(tensors: Tensors, options: Options, problem: Problem | None) -> tuple[Tensor, Tensor]:
    """(out, lse) of checked arguments, differentiable."""
    if options.backend in PLAIN_OPERATIONS and _values_are_there(tensors):
        out, lse = _computed(tensors, options, problem)  # autograd sees every step of it
        return _connected(out, tensors), _connected(lse, tensors)
    if not torch.compiler.is_compiling():
        if _alone(tensors):
            if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
                return _Attention.apply(None, *tensors, *options)  # pyright: ignore
            return _computed(tensors, options, problem)
        _tell_flop_counter()
    return torch.ops.rowmax.forward(*tensors, *options)


def _alone(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether nobody is between this call and its kernel: no tracer, transform, mode or profiler
    (an execution trace's observer, which cannot be seen from here, misses the call), and no tensor
    but plain ones. The dispatcher would then change nothing, and take a third of a small call's
    time.
    """
    if (
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._get_tracing_state()
        or torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
        or torch.autograd.profiler._is_profiler_enabled  # one of all threads
        or forward_ad._current_level >= 0
    ):
        return False
    return not [t for t in tensors if t is not None and not _is_plain(t)]


def _values_are_there(tensors: Tensors) -> bool:
    """True where a backend of plain operations can run as it is: no tracer is on, no tensor is
    fake, and packed offsets are not a batch of ``vmap``, whose slices have shapes of their own.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state()
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
        or any(isinstance(t, FakeTensor) or t.is_meta for t in tensors if t is not None)
        or is_batched(tensors.cu_seqlens_q)
        or is_batched(tensors.cu_seqlens_k)
    )


#: dispatch keys of tensors that are numbers on a device and nothing else
_plain_keys: set[int] = set()


def _is_plain(t: Tensor) -> bool:
    """Whether it is numbers on a device: no subclass, no batch of ``vmap`` old or new, no zeros or
    negation still to be written, no meta tensor."""
    if type(t) not in PLAIN:
        return False
    keys = torch._C._dispatch_keys(t).raw_repr()
    if keys not in _plain_keys and not t.is_meta:
        for inference in (False, True):
            with torch.inference_mode(inference):
                plain = torch.empty(0, device=t.device)
            _plain_keys.add(torch._C._dispatch_keys(plain).raw_repr())
    return keys in _plain_keys


def _split(inputs: tuple[Any, ...]) -> tuple[Tensors, Options]:
    return Tensors(*inputs[:_TENSORS]), Options(*inputs[_TENSORS:])


def _connected(x: Tensor, tensors: Tensors) -> Tensor:
    """Return x with every input in its graph, as an output of the operators has.

    Of plain operations lse does not use v, and nothing is used where no sequence is packed;
    gradients of the one by the other alone would raise an error instead of being zero.
    """
    if not torch.is_grad_enabled():
        return x
    inputs = (t for t in tensors[:_DIFFERENTIABLE] if t is not None)
    return x + sum(t[:0].sum() for t in inputs)  # of no elements, which is 0 beside a NaN as well


# --- the operators' kernels --------------------------------------------------------------------


def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    tensors, options = _split(inputs)
    check_packed_values(tensors, options)
    return _computed(tensors, options)


def _computed(
    tensors: Tensors, options: Options, problem: Problem | None = None
) -> tuple[Tensor, Tensor]:
    problem = problem or known_problem(tensors, options)
    return choose(problem, "forward", options.backend).first.forward(problem, tensors)


def _backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, wanted: list[bool], *inputs: Any
) -> tuple[Tensor, ...]:
    tensors, options = _split(inputs)
    problem = known_problem(tensors, options)
    plan = choose(problem, "backward", options.backend)
    gradients = run_backward(plan, problem, tensors, out, lse, dout, dlse, Wanted(*wanted))
    return tuple(dout.new_empty(0) if g is None else g for g in gradients)


_library.impl("forward", _forward, "CompositeExplicitAutograd")
_library.impl("backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("rowmax::forward")
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    tensors, options = _split(inputs)
    problem: Problem = problem_of(tensors, options)
    out = tensors.q.new_empty(problem.out_shape)
    return out, tensors.q.new_empty(problem.lse_shape, dtype=problem.accumulator)


@torch.library.register_fake("rowmax::backward")
def _(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, wanted: list[bool], *inputs: Any
) -> tuple[Tensor, ...]:
    return tuple(
        x.new_empty(x.shape) if want else dout.new_empty(0)
        for want, x in zip(wanted, inputs, strict=False)
    )


torch.library.register_vmap("rowmax::forward", batching.forward, lib=_library)
torch.library.register_vmap("rowmax::backward", batching.backward, lib=_library)


# --- work ---------------------------------------------------------------------------------------


def _tell_flop_counter() -> None:
    """Tell torch's counter of operations what ours are worth, once it is imported.

    Not before: importing it imports Triton. A counter copies the registry when it is made, which
    may be before our first call: those that are counting now are told as well.
    """
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    counting = (getattr(mode, "counter", mode) for mode in _get_current_dispatch_mode_stack())
    for counter in (module, *counting):
        registry = getattr(counter, "flop_registry", None)
        if registry is not None:
            registry.setdefault(torch.ops.rowmax.forward, _forward_flops)
            registry.setdefault(torch.ops.rowmax.backward, _backward_flops)


def _forward_flops(*inputs: Any, out_val: Any = None) -> int:
    return flops.forward_flops(*_measured(inputs))


def _backward_flops(
    dout: Tensor, dlse: Any, out: Any, lse: Any, wanted: Any, *inputs: Any, out_val: Any = None
) -> int:
    return flops.backward_flops(*_measured(inputs))


def _measured(inputs: tuple[Any, ...]) -> tuple[Problem, flops.Lengths | None]:
    """The problem and, packed, the lengths, where there are values to read them from."""
    tensors, options = _split(inputs)
    problem = problem_of(tensors, options)
    cu = [t for t in (tensors.cu_seqlens_q, tensors.cu_seqlens_k) if t is not None]
    if not cu or any(isinstance(t, FakeTensor) or t.is_meta for t in cu):
        return problem, None
    return problem, list(zip(*(t.diff().tolist() for t in cu), strict=True))


# --- autograd ----------------------------------------------------------------------------------

_WAY_OUT = (
    'backend="reference", neither compiled nor traced (it is dense: memory for Nq x Nk scores), or '
    "torch's own scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)"
)
_NO_TANGENT = (
    "rowmax: forward-mode derivatives (jvp, dual tensors) are not supported here; use reverse mode "
    f"(backward, torch.func.grad or vjp), {_WAY_OUT}"
)
_NO_SECOND = (
    "rowmax: second derivatives (create_graph=True followed by a backward, hessian) are not "
    f"supported here; use {_WAY_OUT}"
)


class _Function(_SingleLevelFunction):
    """What both have in common."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(_NO_TANGENT)

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int, ...]:
        """As of ``torch.autograd.Function``, for whoever compiles the backward as it runs. (What
        else the backward depends on, dynamo guards.)"""
        return (ctx._autograd_function_id,)


def _check_backward(problem: Problem, name: str, wanted: tuple[bool, ...]) -> None:
    """Raise now if the backend that is named will refuse the backward."""
    try:
        plan = choose(problem, "backward", name)
    except ValueError:
        choose(problem, "forward", name)  # its own refusal comes first
        raise
    if plan.whole is None:
        check_wanted(plan, Wanted(*wanted))


class _Attention(_Function):
    """The forward operator between autograd and the kernels below it."""

    @staticmethod
    def forward(ctx: Any, below: DispatchKeySet | None, *inputs: Any) -> tuple[Tensor, Tensor]:
        if below is None:  # called past the dispatcher
            tensors, options = _split(inputs)
            problem = known_problem(tensors, options)
            if options.backend is not None:
                wanted = ctx.needs_input_grad[1 : 1 + _DIFFERENTIABLE]
                _check_backward(problem, options.backend, wanted)
            out, lse = _computed(tensors, options, problem)
        else:
            # Left to its backward to check: the problem of a traced or transformed call may not be
            # the one that runs.
            out, lse = _redispatch(_forward_operator, below, inputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:_TENSORS], out, lse)
        ctx.options = inputs[_TENSORS:]
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        dout, dlse = grads
        nothing = (None,) * (1 + _TENSORS + len(ctx.options))
        if dout is None and dlse is None:
            return nothing
        saved = ctx.saved_tensors
        tensors, (out, lse) = saved[:_TENSORS], saved[_TENSORS:]
        wanted = list(ctx.needs_input_grad[1 : 1 + _DIFFERENTIABLE])
        dout = torch.zeros_like(out) if dout is None else dout
        given = (dout, dlse, out, lse, wanted, *tensors, *ctx.options)
        listened = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if not listened and _alone((*saved, dout, dlse)):
            gradients = _backward(*given)
        else:
            gradients = torch.ops.rowmax.backward(*given)
        kept = (g if want else None for g, want in zip(gradients, wanted, strict=True))
        return (None, *kept, *nothing[1 + _DIFFERENTIABLE :])


class _AttentionBackward(_Function):
    """The backward operator, likewise; its own derivative is not there yet."""

    @staticmethod
    def forward(ctx: Any, below: DispatchKeySet, *inputs: Any) -> tuple[Tensor, ...]:
        return _redispatch(_backward_operator, below, inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        raise NotImplementedError(_NO_SECOND)


def _redispatch(operator: Any, below: DispatchKeySet, inputs: tuple[Any, ...]) -> Any:
    """What lies under this level's autograd: the kernel or, in a ``grad(grad)``, the next level.

    A Function's forward runs with gradients off. That is meant for its own level, not the next.
    """
    if not torch._C._are_functorch_transforms_active():
        return operator.redispatch(below, *inputs)
    with torch.enable_grad(), _set_fwd_grad_enabled(True):
        return operator.redispatch(below, *inputs)


def _autograd(operator: Any, function: type[_SingleLevelFunction]) -> Callable[..., Any]:
    """An autograd kernel that records ``function``, at the level that is being differentiated.

    Under ``torch.func`` the dispatcher calls it once for each level, which is what a
    single-level function is for.
    """

    def kernel(keys: DispatchKeySet, *inputs: Any) -> Any:
        _tell_flop_counter()
        below = keys & torch._C._after_autograd_keyset
        reverse = torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)
        if not reverse and forward_ad._current_level < 0:
            return operator.redispatch(below, *inputs)
        with enable_single_level_autograd_function():
            return function.apply(below, *inputs)  # pyright: ignore

    return kernel


_forward_operator = torch.ops.rowmax.forward.default
_backward_operator = torch.ops.rowmax.backward.default
_library.impl("forward", _autograd(_forward_operator, _Attention), "Autograd", with_keyset=True)
_library.impl(
    "backward", _autograd(_backward_operator, _AttentionBackward), "Autograd", with_keyset=True
)
