"""A Sphinx extension: the built pages hold an example of ``rowmax trace`` and a link to it.

The repository has no copy, so the link stands where GitHub shows nothing: in a comment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

FILE = "_static/trace.html"
COMMENT = "<!-- built: the example page -->"
LINK = f'<p><a href="{FILE}">Open an example of the page.</a></p>'


def _link(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace the comment by the link."""
    if app.builder.format == "html":
        source[0] = source[0].replace(COMMENT, LINK)


def _write(app: Sphinx, error: Exception | None) -> None:
    """Write the page of the default setting."""
    if error is None and app.builder.format == "html":
        from rowmax.trace import Setting, page

        path = Path(app.outdir, FILE)
        path.parent.mkdir(exist_ok=True)
        path.write_text(page(Setting()), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect both."""
    app.connect("source-read", _link)
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
