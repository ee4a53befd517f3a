"""A Sphinx extension: pictures in the colors of the theme.

A page has GitHub's form, a ``<picture>`` whose ``<source>`` is dark. The built pages show each of
the two images in one mode of the theme: a reader may choose a mode that the system does not have.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

_PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">'
    r'\s*<img alt="(?P<alt>[^"]+)" src="(?P<light>[^"]+)">\s*</picture>'
)


def _image(file: str, alt: str, mode: str) -> str:
    """Return the image of one mode; ``only-light`` and ``only-dark`` are classes of furo."""
    return f'<img src="{file}" alt="{alt}" class="only-{mode}">'


def _split(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace each picture of a page by two images, in a box that scrolls (``rowmax.css``)."""

    def box(found: re.Match[str]) -> str:
        images = (_image(found[mode], found["alt"], mode) for mode in ("light", "dark"))
        return "\n\n".join(('<div class="picture">', *images, "</div>"))

    source[0] = _PICTURE.sub(box, source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect it."""
    app.connect("source-read", _split)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
