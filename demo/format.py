"""Numbers and texts as the report shows them."""

from __future__ import annotations


def size(n: int | None) -> str:
    """Return a number of bytes in a fitting unit.

    >>> size(34_359_738_368), size(5_000), size(None)
    ('32.0 GiB', '4.9 KiB', 'not known here')
    """
    if n is None:
        return "not known here"
    value, unit = float(n), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{n} B" if unit == "B" else f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """Return seconds in a fitting unit.

    >>> duration(0.0123), duration(4.56), duration(130.2)
    ('12.3 ms', '4.56 s', '2 min 10 s')
    """
    if seconds < 1:
        return f"{1e3 * seconds:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def count(n: int) -> str:
    """Return a number in thousands or millions.

    >>> count(853_120), count(12_345_678)
    ('853 thousand', '12.3 million')
    """
    return f"{n / 1e6:.1f} million" if n >= 1e6 else f"{n / 1e3:.0f} thousand"


def times(ratio: float) -> str:
    """Return a ratio as a multiple.

    >>> times(1.234), times(0.05)
    ('1.23 ×', '0.05 ×')
    """
    return f"{ratio:.2f} \N{MULTIPLICATION SIGN}"
