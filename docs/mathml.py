"""A Sphinx extension: formulas as MathML, written when the pages are built.

A browser shows MathML itself, so no page loads a script and none needs a network. The source is
what GitHub shows too: ``$...$`` in a line, ``$$...$$`` on lines of its own.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging

_logger = logging.getLogger(__name__)

#: text of a formula that the converter copied because it does not know it
_COPIED = re.compile(r"\\[A-Za-z]+|&(?!#?\w+;)")
#: the converter knows align*, which stands alone, and not aligned, which is its form in $$; it puts
#: spaces around the name of an operator, and none after log
_SOURCE = {
    r"\{aligned\}": "{align*}",
    r"\\operatorname\{": r"\\mathrm{",
    r"\\log (?=[\w\\])": r"\\log\\,",
}
#: as an operator it has spaces around it, also after a sign
_INFINITY = "<{0}>&#x0221E;</{0}>"


def mathml(tex: str, display: str = "inline") -> str:
    """Return the ``<math>`` element of a formula; display is "inline" or "block".

    Raises:
        ValueError: a command or an environment that the converter does not know.
    """
    for pattern, known in _SOURCE.items():
        tex = re.sub(pattern, known, tex)
    element = convert(tex, display=display)
    copied = _COPIED.search(element)
    if copied is not None:
        raise ValueError(f"formula {tex!r}: {copied[0]!r} has no MathML")
    return element.replace(_INFINITY.format("mo"), _INFINITY.format("mi"))


def _element(self: Any, node: nodes.Node, display: str) -> str:
    """Return the element of a node, or warn and return its source."""
    try:
        return mathml(node.astext(), display)
    except ValueError as error:
        _logger.warning(str(error), location=node)
    return f"<code>{self.encode(node.astext())}</code>"


def _inline(self: Any, node: nodes.Element) -> NoReturn:
    """Write a formula in a line."""
    self.body.append(_element(self, node, "inline"))
    raise nodes.SkipNode


def _block(self: Any, node: nodes.Element) -> NoReturn:
    """Write a formula on lines of its own, in a box that scrolls on a narrow screen."""
    self.body.append(f'<div class="formula">{_element(self, node, "block")}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer; ``html_math_renderer`` of conf.py chooses it."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
