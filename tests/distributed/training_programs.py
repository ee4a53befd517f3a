"""The functions that ranks run for the tests of training."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rowmax
from demo.gpt import GPT, Size, rotary
from rowmax import distributed as rd

from .context_programs import caught
from .programs import mesh_of

SIZE = Size(layers=2, heads=2, width=16, context=64)
ROWS, STEPS = 4, 3


# --- the GPT of the demo -----------------------------------------------------------------------


def gpt(layout: rd.Layout | None = None, rank: int = 0) -> GPT:
    """Return the GPT, with the angles of own rows if there is a layout."""
    torch.manual_seed(0)
    model = GPT(SIZE, partial(rowmax.attention, causal=True, backend="torch"))
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    if layout is not None:
        model.angles = rotary(SIZE)[layout.positions(rank)]
    return model.double()


def batch() -> tuple[Tensor, Tensor]:
    """Return the same inputs and next bytes on every rank."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(256, (ROWS, SIZE.context + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def trained(
    model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor], total: Callable[[Tensor], Tensor]
) -> list[float]:
    """Return the losses of some steps.

    Args:
        loss_of: returns the loss of which a rank computes the backward.
        total: returns the loss of the whole batch from it.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)  # reads the scale of gradients
    losses = []
    for _ in range(STEPS):
        loss = loss_of(*batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(total(loss.detach())))
    return losses


def one_process() -> list[float]:
    """Return the losses of one process with the whole batch."""
    model = gpt()
    mean = lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten())  # noqa: E731
    return trained(model, mean, lambda loss: loss)


def parallel(rank: int, shape: tuple[int, ...], kind: str, compiled: bool = False) -> list[float]:
    """Return the losses of a mesh dp x cp: data parallelism, and sequences across ranks.

    Of a mesh dp x keys x heads, cp is the last two dimensions.
    """
    inner, cp = shape[1:], None
    if len(inner) == 2:
        cp = mesh_of(*shape)["keys", "heads"]
        shape = shape[0], inner[0] * inner[1]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
    rank_of_cp, dp = mesh["cp"].get_local_rank(), mesh["dp"]
    cp = mesh["cp"] if cp is None else cp
    layout = rd.Layout.zigzag(SIZE.context, shape[1])
    model: Any = gpt(layout, rank_of_cp)
    if compiled:
        torch.compiler.reset()
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    model = _wrapped(model, mesh, kind)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        x, y = (t.chunk(shape[0])[dp.get_local_rank()] for t in (x, y))
        x, y = (rd.shard(t, layout, cp) for t in (x, y))
        with rd.context_parallel(cp, layout):
            logits = model(x)
        own = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")
        # the sum over cp is the loss of a part of the batch, and the wrapper's mean is over all
        return own / (x.shape[0] * layout.n) * shape[1]

    def total(loss: Tensor) -> Tensor:
        dist.all_reduce(loss)
        return loss / (shape[0] * shape[1])

    with warnings.catch_warnings():  # Dynamo reads .grad of tensors that are no leaves
        warnings.simplefilter("ignore", UserWarning)
        return trained(model, loss_of, total)


def _wrapped(model: Any, mesh: DeviceMesh, kind: str) -> Any:
    if kind == "ddp":
        with warnings.catch_warnings():  # torch 2.13 warns of it, and has no other name yet
            warnings.simplefilter("ignore", FutureWarning)
            # not the buffers of the first rank: the angles are those of own rows
            return DistributedDataParallel(model, broadcast_buffers=False)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    return model


# --- a model of transformers -------------------------------------------------------------------


@cache
def llama(kind: str = "Llama") -> Any:
    """Return a tiny model with random weights."""
    import transformers

    import rowmax.integrations.transformers  # noqa: F401

    torch.manual_seed(0)
    more = {"sliding_window": 20} if kind == "Mistral" else {}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation="rowmax", **more,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForCausalLM")(config).double()


def text(n: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(64, (batch, n + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_and_gradients(model: Any, x: Tensor, y: Tensor, count: int, **more: Any) -> list[Tensor]:
    """Return the loss of these tokens and the gradients of all weights."""
    logits = model(input_ids=x, **more).logits
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / count
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def same_as_one_process(
    rank: int, size: int, kind: str, case: str, layout_kind: str = "zigzag", shape: Any = None
) -> None:
    """Compare loss and gradients of a model of transformers, whose sequence is distributed."""
    n, rows = 96, 1 if case == "packed row" else 2
    x, y = text(n, rows)
    layout = getattr(rd.Layout, layout_kind)(n, size)
    whole: dict[str, Any] = {}
    positions = torch.arange(n)[None]
    if case.startswith("packed"):  # documents that begin within chunks, and where chunks do
        positions = torch.cat([torch.arange(k) for k in (24, 30, 18, 24)])[None]
        whole["use_cache"] = False
    if case == "padding":
        whole["attention_mask"] = torch.ones(rows, n, dtype=torch.long)
        whole["attention_mask"][1, :40] = 0
    if case == "no cache":
        whole["use_cache"] = False
    whole["position_ids"] = positions
    model = llama(kind)
    own = {k: rd.shard(t, layout) if isinstance(t, Tensor) else t for k, t in whole.items()}
    if case == "checkpoints":
        more = {"use_reentrant": False, "context_fn": rd.checkpoint_contexts}
        with warnings.catch_warnings():  # transformers 5.17 has no newer name
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=more)
        model.train()
    want = loss_and_gradients(model, x, y, rows * n, **whole)
    with rd.context_parallel(None if shape is None else mesh_of(*shape), layout):
        found = loss_and_gradients(model, *(rd.shard(t, layout) for t in (x, y)), rows * n, **own)
    if case == "checkpoints":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_disable()
    for got, one in zip(found, want, strict=True):
        dist.all_reduce(got.data)
        torch.testing.assert_close(got, one)


def refused_models(rank: int) -> dict[str, str]:
    """Return the errors of models whose masks or positions are those of own rows."""
    n = 96
    layout = rd.Layout.zigzag(n, 2)
    model = llama()
    x = rd.shard(text(n)[0], layout)
    positions = layout.positions(rank)[None]
    documents = rowmax.Documents(cu_seqlens=torch.tensor([0, 48, 96]))
    short = x[:, :20]
    dense = torch.ones(1, 1, 48, 48, dtype=torch.bool).tril()
    restart = torch.arange(48)[None]
    calls: dict[str, Any] = {
        "no position ids": lambda: model(x, use_cache=False),
        "own position ids": lambda: model(x, position_ids=restart),
        "packed with a cache": lambda: model(x, position_ids=rd.shard(
            torch.arange(n)[None] % 32, layout)),
        "a jump": lambda: model(x, use_cache=False, position_ids=positions + 5 * (positions > 30)),
        "a dense mask": lambda: model(x, attention_mask=dense, position_ids=positions),
        "other rows": lambda: model(short, position_ids=positions[:, :20]),
        "a rule of its own": lambda: _own_rule(x, positions),
        "compiled": lambda: _compiled(model, x, positions),
    }  # fmt: skip
    found = {}
    with rd.context_parallel(None, layout):
        for name, call in calls.items():
            found[name] = caught(call)
        found["generate"] = caught(lambda: model.generate(x, max_new_tokens=2, do_sample=False))
    with rd.context_parallel(None, layout, mask=documents):  # then position ids are not read
        found["documents of the context"] = caught(calls["own position ids"])
    return found


def _own_rule(x: Tensor, positions: Tensor) -> None:
    from rowmax.integrations.transformers import attention_mask

    table = torch.arange(48) % 2 == 0

    def rule(b: Any, h: Any, i: Any, j: Any) -> Any:
        return table[j] & (i >= j)

    attention_mask(1, 48, 48, mask_function=rule)


def _compiled(model: Any, x: Tensor, positions: Tensor) -> None:
    torch.compiler.reset()
    with warnings.catch_warnings():  # Dynamo reads .grad of tensors that are no leaves
        warnings.simplefilter("ignore", UserWarning)
        given = {"position_ids": positions, "use_cache": False}
        with torch.no_grad():
            out = torch.compile(model, backend="eager")(x, **given).logits
            torch.testing.assert_close(out, model(x, **given).logits)
