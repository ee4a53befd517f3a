"""Streams wait for the copies and calls that they follow; the order of waits, without a GPU."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rowmax.distributed.abreast import Abreast
from rowmax.distributed.shared import Pull


class Stream:
    """A stream that notes what it waits for. As in torch, ``stream != None`` is False."""

    def __init__(self, name: str) -> None:
        self.name, self.device, self.waits = name, torch.device("cpu"), []

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return other is not None and self is not other

    __hash__ = None  # pyright: ignore

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
    monkeypatch.setattr(torch.cuda, "stream", entered)
    return streams


def test_a_fake_stream_compares_as_one_of_torch() -> None:
    for stream in (Stream("one"), torch.Stream(device="cpu")):
        assert not operator.ne(stream, None)
        assert operator.eq(stream, stream)


def test_every_stream_waits_once_for_copies(current: list[Stream]) -> None:
    pull, second = Pull("done", torch.device("cpu")), Stream("second")
    for _ in range(2):
        pull.wait()
    current.append(second)
    pull.wait()
    current.pop()
    assert current[0].waits == ["done"]
    assert second.waits == ["done"]


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
