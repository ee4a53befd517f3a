"""Contexts in which the calls of a model are distributed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..call import around
from ..call.check import check_longest
from ..errors import bad, check_flag, check_integers, wrong_type
from ..masks import Mask, as_mask
from .agreement import refuse_together
from .attention import attention, check_layouts
from .groups import Group, group_of
from .layout import Layout
from .sharding import shard, unshard
from .strategies import chosen
from .varlen import attention_varlen

_OTHERS = (
    "for cross attention want rowmax.distributed.attention with k_layout=; for a part of the model "
    "whose rows every rank has, want it in context_parallel(mesh, None)"
)


@dataclass(frozen=True)
class Context:
    """The result of ``context_parallel``: enter it with ``with``, as often as needed.

    Attributes:
        mesh: the group of ranks.
        layout: the rows of q of each rank; None computes on this device.
        k_layout: those of k and v.
        mask: of every call, in addition to its own.
        strategy: of every call.
        reduce_replicated: of every call.
    """

    mesh: DeviceMesh | ProcessGroup | None
    layout: Layout | None
    k_layout: Layout | None = None
    mask: Mask | None = None
    strategy: str = "auto"
    reduce_replicated: bool = False

    def __enter__(self) -> Context:
        around.enter(self)
        return self

    def __exit__(self, *_: object) -> None:
        around.leave()

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """The layouts of q, and of k and v."""
        assert self.layout is not None
        return self.layout, self.layout if self.k_layout is None else self.k_layout

    @property
    def group(self) -> Group:
        return group_of(self.mesh)

    @property
    def positions(self) -> Tensor:
        """The positions of own queries, which rotary embeddings read, as int64 on the CPU."""
        return self.layouts[0].positions(self.group.rank)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return own rows of a tensor that all ranks hold, in the layout of q."""
        return shard(x, self.layouts[0], self.mesh, dim)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return the whole tensor, on every rank, of own rows in the layout of q."""
        return unshard(x, self.layouts[0], self.mesh, dim)

    def is_local(self) -> bool:
        """Return True if calls in this context are those of one device."""
        return self.layout is None

    def differs(self) -> bool:
        """Return True if calls in this context have other results than on this device alone."""
        return self.layout is not None and (self.mask is not None or self.group.size > 1)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """Compute a call of ``rowmax.attention`` in this context."""
        self._check("attention", 4, q, k, v)
        return attention(q, k, v, **self._place(options))

    def attention_varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *cu: Tensor,
        max_seqlens: tuple[int | None, int | None],
        **options: Any,
    ) -> Any:
        """Compute a call of ``rowmax.attention_varlen`` in this context.

        The longest lengths are checked. Documents, by which it is computed, need no bounds.
        """
        self._check("attention_varlen", 3, q, k, v)
        try:
            for name, t in zip(("cu_seqlens_q", "cu_seqlens_k"), cu, strict=True):
                check_integers(name, t, (1,))
            check_longest(max_seqlens, (cu[0], cu[1]))
        except (TypeError, ValueError) as error:
            self.refuse(error)
        return attention_varlen(q, k, v, *cu, **self._place(options))

    def refuse(self, error: Exception) -> None:
        """Raise an error of this rank's arguments on all ranks."""
        refuse_together(self.group, error)

    def _place(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a call with those of the context."""
        if self.mask is not None:
            given = options["mask"]
            options["mask"] = self.mask if given is None else as_mask(given) & self.mask
        queries, keys = self.layouts
        return {
            **options,
            "mesh": self.mesh,
            "layout": queries,
            "k_layout": keys,
            "strategy": self.strategy,
            "reduce_replicated": self.reduce_replicated,
        }

    def _check(self, name: str, axes: int, *tensors: Tensor) -> None:
        """Refuse rows that are not own ones; ``distributed.attention`` checks the rest."""
        queries, keys = self.layouts
        rank = self.group.rank
        for letter, t, layout in zip("qkv", tensors, (queries, keys, keys), strict=True):
            if not isinstance(t, Tensor):
                continue
            want = layout.lengths[rank]
            if t.is_nested:
                got = f"a nested tensor in context_parallel, by {name}"
                self.refuse(bad(letter, got, "own rows, with Documents(cu_seqlens=...) as mask"))
            elif t.dim() == axes and t.shape[axes - 3] != want:
                got = f"{t.shape[axes - 3]} rows on rank {rank} in context_parallel, by {name}"
                self.refuse(bad(letter, got, f"own rows, {want}; {_OTHERS}"))


def context_parallel(
    mesh: DeviceMesh | ProcessGroup | None,
    layout: Layout | None,
    *,
    k_layout: Layout | None = None,
    mask: Mask | Tensor | None = None,
    strategy: str = "auto",
    reduce_replicated: bool = False,
) -> Context:
    """Return a context in which ``rowmax.attention`` is ``rowmax.distributed.attention``.

    In it a model runs on own rows: ``rowmax.attention`` and ``rowmax.attention_varlen`` read q, k
    and v as own rows, and masks and offsets as those of the whole sequence. Cut inputs, labels and
    position ids with ``shard``. A backward may run after the context, in any thread. torch's own
    attention functions are not changed, except while ``rowmax.integrations.sdpa`` replaces them.

    Contexts nest, and belong to a thread. Activation checkpointing needs ``checkpoint_contexts``.

    Args:
        mesh: as ``attention`` takes it.
        layout: the rows of each rank. None computes on this device, within another context.
        k_layout: those of k and v; None is ``layout``.
        mask: of every call in addition to its own, such as ``Documents`` of a batch.
        strategy: as ``attention`` takes it.
        reduce_replicated: as ``attention`` takes it.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it accepts.

    >>> import rowmax, torch
    >>> import torch.distributed as dist
    >>> from rowmax import distributed as rd
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> x = torch.randn(1, 8, 2, 16)
    >>> with rd.context_parallel(None, rd.Layout.zigzag(8, 1)) as context:
    ...     rowmax.attention(x, x, x, causal=True).shape, context.positions
    (torch.Size([1, 8, 2, 16]), tensor([0, 1, 2, 3, 4, 5, 6, 7]))
    >>> dist.destroy_process_group()
    """
    check_flag("reduce_replicated", reduce_replicated)
    chosen(strategy)
    given = None if mask is None else as_mask(mask)
    if layout is not None:
        check_layouts(layout, k_layout, group_of(mesh))
    elif k_layout is not None or given is not None:
        name = "mask" if k_layout is None else "k_layout"
        raise wrong_type(name, "a value with a layout of None", "None, or a layout")
    return Context(mesh, layout, k_layout, given, strategy, reduce_replicated)


def current_context() -> Context | None:
    """Return the context of this thread that distributes its calls, or None.

    >>> from rowmax import distributed as rd
    >>> rd.current_context() is None
    True
    """
    found = around.current()
    return found if isinstance(found, Context) else None


_HERE = Context(None, None)


def checkpoint_contexts() -> tuple[Context, Context]:
    """Return the contexts of a checkpoint: it recomputes in that of its forward.

    It is the argument ``context_fn`` of ``torch.utils.checkpoint.checkpoint``, which recomputes
    within the backward: later, and for a GPU in another thread. Without it a recomputation outside
    of its context raises.

    >>> import torch
    >>> from torch.utils.checkpoint import checkpoint
    >>> from rowmax import distributed as rd
    >>> x = torch.ones(3, requires_grad=True)
    >>> more = {"use_reentrant": False, "context_fn": rd.checkpoint_contexts}
    >>> checkpoint(torch.exp, x, **more).sum().backward()
    """
    context = around.here.context
    found = context if isinstance(context, Context) else _HERE
    return found, found
