"""The switch between torch's functions and rowmax's."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import mha
from torch.nn.attention import register_flash_attention_impl
from torch.overrides import handle_torch_function, has_torch_function

from ...errors import wrong_type
from ...torch_compat import stands_for_numbers
from . import dense, varlen
from .dense import Call

#: the name in torch's registry of implementations
NAME = "rowmax"

_lock = threading.RLock()
#: True while a switch is on. A replacement reads it: modules may have imported one by name
_on = False
_switches: set[Enabled] = set()
#: (module, name, the replacement, what stood there before)
_replaced: list[tuple[Any, str, Any, Any]] = []
_mha_forward: Any = F.multi_head_attention_forward
_restores_fastpath = False


class Enabled:
    """A switch that is on. ``remove()``, or the end of its ``with`` block, turns it off."""

    def remove(self) -> None:
        """Turn this switch off. With the last one, torch's own functions return."""
        with _lock:
            _switches.discard(self)
            if not _switches:
                _restore()

    def __enter__(self) -> Enabled:
        if self not in _switches:
            raise RuntimeError("sdpa: this switch is off; want a new one, of enable()")
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def enable(*modules: ModuleType) -> Enabled:
    """Let torch's attention functions compute with rowmax, in every thread of the process.

    Replaces ``torch.nn.functional.scaled_dot_product_attention`` and
    ``torch.nn.attention.varlen.varlen_attn``. Turns off the fast path of ``torch.backends.mha``,
    whose C++ code calls neither. Graphs that ``torch.compile`` has made compile again.

    Args:
        modules: modules that imported one of the functions by name before this call. Their names
            are replaced as well.

    Returns:
        A switch. The end of a ``with`` block, or ``remove()``, turns it off. Switches nest: rowmax
        computes until all are off. ``disable()`` turns all of them off.

    Raises:
        TypeError: an argument that is not a module.

    >>> import torch
    >>> from rowmax.integrations import sdpa
    >>> layer, x = torch.nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(1, 5, 16)
    >>> with sdpa.enable():
    ...     out, _ = layer(x, x, x, need_weights=False)
    """
    for module in modules:
        if not isinstance(module, ModuleType):
            raise wrong_type("modules", type(module).__name__, "modules, such as my_package.model")
    import torch.nn.attention.varlen as packed  # imports torch's compiler, which takes a second

    switch = Enabled()
    with _lock:
        _switches.add(switch)
        if not _on:
            _turn_on(packed)
        for module in modules:
            for name, value in list(vars(module).items()):
                if value is dense.fallback:
                    _replace(module, name, _sdpa)
                elif value is varlen.fallback:
                    _replace(module, name, _varlen)
    return switch


def disable() -> None:
    """Turn every switch off: torch's own functions return. Without a switch, do nothing."""
    with _lock:
        _switches.clear()
        _restore()


def is_enabled() -> bool:
    """Return True while a switch is on.

    >>> from rowmax.integrations import sdpa
    >>> with sdpa.enable():
    ...     sdpa.is_enabled()
    True
    >>> sdpa.is_enabled()
    False
    """
    return _on


# --- what is replaced --------------------------------------------------------------------------


def _turn_on(packed: ModuleType) -> None:
    global _on, _mha_forward, _restores_fastpath
    dense.fallback = _replace(F, "scaled_dot_product_attention", _sdpa)
    varlen.fallback = _replace(packed, "varlen_attn", _varlen)
    torch.compiler.allow_in_graph(_mha)
    _mha_forward = _replace(F, "multi_head_attention_forward", _mha)
    _restores_fastpath = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    _on = True


def _replace(module: Any, name: str, by: Any) -> Any:
    """Put a replacement into a module; return what stood there before."""
    before = getattr(module, name)
    setattr(module, name, by)
    _replaced.append((module, name, by, before))
    return before


def _restore() -> None:
    """Put back what still is a replacement: others may have replaced it in turn."""
    global _on, _restores_fastpath
    _on = False
    while _replaced:
        module, name, by, before = _replaced.pop()
        if getattr(module, name, None) is by:
            setattr(module, name, before)
    if _restores_fastpath:
        _restores_fastpath = False
        mha.set_fastpath_enabled(True)


# --- the replacements --------------------------------------------------------------------------


def _sdpa(*args: Any, **keywords: Any) -> Tensor:
    call = Call(*args, **keywords)
    if not _on:
        return dense.by_torch(call)
    if has_torch_function(call[:1]) and stands_for_numbers(call.query):  # a mode is active
        return handle_torch_function(_sdpa, call[:3], *call)
    return dense.compute(call)


def _varlen(*args: Any, **keywords: Any) -> Any:
    if not _on:
        return varlen.fallback(*args, **keywords)
    return varlen.varlen_attn(*args, **keywords)


def _mha(*args: Any, **keywords: Any) -> Any:
    """Compute ``torch.nn.functional.multi_head_attention_forward``, which calls ``_sdpa``.

    It is one operation of Dynamo's graphs. torch's own would give the same graph as without
    rowmax, no guard would see the difference, and torch's cache on disk would mix up both.
    """
    return _mha_forward(*args, **keywords)


# others patch a function by its name
_sdpa.__name__ = _sdpa.__qualname__ = "scaled_dot_product_attention"
_sdpa.__doc__ = dense.scaled_dot_product_attention.__doc__
_mha.__name__ = _mha.__qualname__ = "multi_head_attention_forward"
_varlen.__name__ = _varlen.__qualname__ = "varlen_attn"
_varlen.__doc__ = varlen.varlen_attn.__doc__

register_flash_attention_impl(NAME, register_fn=enable)
