"""Work beside other work: what does not fill the device alone is launched on a second stream.

The last tiles of one kernel leave most processors idle, and the next kernel of a stream waits for
them. One that does not need them starts meanwhile on another stream, which the first then awaits:
to the caller, all is on the current stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

#: one a device
_streams: dict[torch.device, torch.cuda.Stream] = {}


def fork(x: Tensor) -> torch.cuda.Event | None:
    """The point that the current stream of x's device has reached."""
    if not x.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(x.device))
    return event


@contextmanager
def beside(x: Tensor, since: torch.cuda.Event | None) -> Iterator[None]:
    """What is launched within waits for ``since`` alone; what follows waits for it.

    Tensors that outlive it are to be made outside of it: memory belongs to a stream.
    """
    if since is None:
        yield
        return
    stream = _streams.get(x.device)
    if stream is None:
        stream = _streams[x.device] = torch.cuda.Stream(x.device)
    stream.wait_event(since)
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(x.device).wait_stream(stream)
