"""Options that several commands share, and the values that they stand for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any, TypeVar, get_type_hints

import torch
import typer

from ..call.dispatch import NAMES

DTYPES = ("float32", "float16", "bfloat16", "float64")

Device = Annotated[
    str | None, typer.Option(help="Where to run: cpu, cuda, cuda:1. By default a GPU if any.")
]
Backend = Annotated[
    str | None, typer.Option(help="Force one backend by name instead of the best that can.")
]
Seed = Annotated[int, typer.Option(help="Of every random number.")]

Record = TypeVar("Record")


def find_device(name: str | None) -> torch.device:
    """Return the named device, or the best one of this machine.

    Raises:
        typer.BadParameter: this torch cannot make a tensor on it.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except NotImplementedError:  # its own text lists every dispatch key of torch
        reason = "this build of torch cannot make a tensor there"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
    else:
        return device
    raise typer.BadParameter(f"{name!r}: {reason}", param_hint="--device")


def check_backend(name: str | None) -> str | None:
    """Return the name.

    Raises:
        typer.BadParameter: no backend has it.
    """
    if name is None or name in NAMES:
        return name
    raise typer.BadParameter(f"{name!r}; want one of {', '.join(NAMES)}", param_hint="--backend")


def fields_as_options(
    kind: type[Record],
) -> Callable[[Callable[[Record], None]], Callable[..., None]]:
    """Return a decorator: the command's options are the fields of a dataclass.

    The command itself takes one argument, the dataclass filled in.
    """
    hints = get_type_hints(kind, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(kind)  # pyright: ignore[reportArgumentType]
    ]

    def decorate(command: Callable[[Record], None]) -> Callable[..., None]:
        @wraps(command)
        def run(**options: Any) -> None:
            command(kind(**options))

        run.__signature__ = inspect.Signature(parameters)  # pyright: ignore
        return run

    return decorate
