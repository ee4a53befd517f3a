"""The calls of the backward, whose records are still tuples, to ``ring`` and ``order``."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import order as orders
from .order import Order, Sequences
from .ring import Mailbox, post_message, read_message

_row_at = orders.row_at


@gluon.jit
def told(C: gl.constexpr, turn, messages, m_full):
    return read_message(Mailbox(messages, m_full, m_full), turn)


@gluon.jit
def post(C: gl.constexpr, tile, live, turn, messages, m_full, m_empty):
    post_message(Mailbox(messages, m_full, m_empty), turn, tile, live)


@gluon.jit
def row_at(C: gl.constexpr, n, order, sizes, seqs):
    table, ends, counter, heads, kv_heads, keys = order
    resident, streamed, batch, rest = seqs
    order = Order(table, ends, counter, heads, kv_heads, keys)
    return _row_at(C, n, order, Sequences(resident, streamed, batch))
