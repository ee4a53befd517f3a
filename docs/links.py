"""A Sphinx extension: links that neither Markdown nor a docstring has to write.

- A link to a file outside ``docs`` leads to the repository, where the file is shown.
- A page that only includes a file of the repository has the links of that file.
- A literal that names something public, such as ``Window(left, right)``, leads to its description.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.nodes import make_refnode

#: a relative link of Markdown
_LINK = re.compile(r"\]\((?P<path>(?![a-z]+:|#)[^)\s#]+)(?P<anchor>#[^)\s]+)?\)")
#: a page that is another file
_INCLUDE = re.compile(r"\s*```\{include\} (?P<path>\S+)\s+```\s*")
#: a name, perhaps called
_NAME = re.compile(r"(?P<name>[A-Za-z_][\w.]*)(?:\(.*\))?")


def _link_files(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace links that leave the folder of the pages, also those of an included file."""
    pages = Path(app.srcdir)
    here = folder = (pages / page).parent
    included = _INCLUDE.fullmatch(source[0])
    if included is not None:
        file = (here / included["path"]).resolve()
        app.env.note_dependency(file)
        source[0], folder = file.read_text(encoding="utf-8"), file.parent

    def followed(link: re.Match[str]) -> str:
        target, anchor = (folder / link["path"]).resolve(), link["anchor"] or ""
        if target.is_relative_to(pages):
            return f"]({os.path.relpath(target, here)}{anchor})"
        if not target.is_relative_to(pages.parent):
            return link[0]
        kind = "tree" if target.is_dir() else "blob"
        path = target.relative_to(pages.parent)
        return f"]({app.config.repository}/{kind}/main/{path}{anchor})"

    source[0] = _LINK.sub(followed, source[0])


def _link_names(app: Sphinx, page: nodes.document, docname: str) -> None:
    """Wrap each literal that names a described object in a reference."""
    described: Any = app.env.domains["py"]
    for literal in list(page.findall(nodes.literal)):
        found = _NAME.fullmatch(literal.astext())
        if found is None or isinstance(literal.parent, nodes.reference):
            continue
        around = [desc for desc in _ancestors(literal) if isinstance(desc, addnodes.desc)]
        heads = [desc[0] for desc in around]
        modules = [head["module"] for head in heads if head.get("module")]
        names = [*(f"{module}.{found['name']}" for module in (*modules, "rowmax")), found["name"]]
        name = next((name for name in names if name in described.objects), None)
        if name is None or any(name in head["ids"] for head in heads):
            continue
        entry = described.objects[name]
        if entry.objtype == "module":
            continue
        literal.replace_self(
            make_refnode(app.builder, docname, entry.docname, entry.node_id, literal.deepcopy())
        )


def _ancestors(node: nodes.Node) -> list[nodes.Node]:
    """Return the nodes around a node, the nearest first."""
    found = []
    while node.parent is not None:
        node = node.parent
        found.append(node)
    return found


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect both."""
    app.add_config_value("repository", "", "env", [str])
    app.connect("source-read", _link_files)
    app.connect("doctree-resolved", _link_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
