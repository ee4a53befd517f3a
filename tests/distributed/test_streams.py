"""Streams wait for the copies and calls that they follow; the order of waits, without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rowmax.distributed import abreast
from rowmax.distributed.abreast import Abreast
from rowmax.distributed.layout import Layout
from rowmax.distributed.pieces import Sight
from rowmax.distributed.pulls import LEAST_OWN, gains_by_two_streams
from rowmax.distributed.routes import route
from rowmax.distributed.shared import Pull
from rowmax.distributed.streams import OnStream


class Stream:
    """A stream that notes what it waits for."""

    def __init__(self, name: str) -> None:
        self.name, self.device, self.waits = name, torch.device("cpu"), []

    def wait_event(self, event: Any) -> None:
        self.waits.append(event)

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other.name)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """Return the streams that were entered; the last one is current."""
    streams = [Stream("first")]

    @contextlib.contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        streams.append(stream)
        yield
        streams.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: streams[-1])
    monkeypatch.setattr(abreast, "OnStream", entered)
    return streams


@pytest.mark.parametrize("device", [0, 1])
def test_a_stream_is_current_within(device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another device than the current one, torch's context changes that as well."""
    seen: list[Any] = []

    @contextlib.contextmanager
    def of_torch(stream: Any) -> Iterator[None]:
        seen.append(("enter", stream.name))
        yield
        seen.append("exit")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: f"before on {index}")
    monkeypatch.setattr(torch.cuda, "set_stream", lambda x: seen.append(getattr(x, "name", x)))
    monkeypatch.setattr(torch.cuda, "stream", of_torch)
    stream: Any = Stream("other")
    stream.device_index = device

    def within() -> None:
        with OnStream(stream):
            seen.append("within")
            raise ValueError("of the body")

    with pytest.raises(ValueError, match="of the body"):
        within()
    want = ["other", "within", "before on 0"]
    assert seen == (want if device == 0 else [("enter", "other"), "within"])


def test_one_stream_waits_for_copies_once(current: list[Stream]) -> None:
    pull = Pull("done", torch.device("cpu"))
    for _ in range(2):
        pull.wait()
    assert current[0].waits == ["done"]


def test_nothing_is_waited_for_where_copies_were_made_at_once(current: list[Stream]) -> None:
    Pull(None, torch.device("cpu")).wait()
    assert current[0].waits == []


def test_calls_abreast_begin_after_the_stream_before_and_end_before_the_next(
    current: list[Stream],
) -> None:
    first, ran = current[0], []
    second: Any = Stream("second")

    def calls() -> None:
        with Abreast(second) as streams:
            assert second.waits == ["first"]
            for _ in range(3):
                with streams.call():
                    ran.append(current[-1].name)
            assert first.waits == []
            raise ValueError("of a call")

    with pytest.raises(ValueError, match="of a call"):
        calls()
    assert ran == ["first", "second", "second"]
    assert first.waits == ["second"]


def test_one_stream_has_all_calls_if_no_other_is_given(current: list[Stream]) -> None:
    with Abreast(None) as streams:
        for _ in range(2):
            with streams.call():
                assert current[-1].name == "first"
    assert current[0].waits == []


def test_calls_that_all_wait_for_keys_have_one_stream() -> None:
    """Under a window most queries of a rank see own keys alone, under a diagonal few."""
    window, diagonal = Sight(1024, 0), Sight(None, 0)
    documents = Sight(None, 0, "0,5000,16384")
    even, zigzag = Layout.contiguous(16384, 4), Layout.zigzag(16384, 4)
    for rank in range(4):
        parts = route(even, even, window, rank).parts
        assert len(parts) == 1 + (rank > 0)
        assert gains_by_two_streams(parts, 0) == (rank > 0)
        parts = route(zigzag, zigzag, diagonal, rank).parts
        assert len(parts) == (1 if rank == 3 else 2)  # the last chunks of rank 3 are neighbours
        assert gains_by_two_streams(parts, LEAST_OWN) == (rank == 3)
        (part,) = route(even, even, documents, rank).parts
        assert gains_by_two_streams([part], LEAST_OWN)
        assert not gains_by_two_streams([part], LEAST_OWN - 1)
    assert not gains_by_two_streams([], 0)
