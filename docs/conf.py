"""Settings of the documentation: ``make docs`` builds it from the repository alone.

The pages are Markdown (MyST) that GitHub shows as well. Those of ``reference`` hold directives of
autodoc, which reads docstrings. It imports rowmax with torch, and neither Triton nor transformers.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.pycode import ModuleAnalyzer

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import rowmax  # noqa: E402

project = "rowmax"
author = "The rowmax authors"
copyright = "2026, The rowmax authors"
version = release = rowmax.__version__
repository = "https://github.com/rowmax/rowmax"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
extensions += ["links", "mathml", "themes", "trace_page"]  # next to this file
nitpicky = True
#: Other documentation cannot be read without a network. The last names are records of the package
#: that no user makes.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|transformers|types|collections\.abc)\..*|Tensor|'\w+'"),
    ("py:.*", r"DeviceMesh|ProcessGroup"),
    (
        "py:.*",
        r"(rowmax\..*\.)?((Call|Warmup)?Options|Problem|Job|Ids|Sizes|Wanted|Tensors|Cotangents|Noise)",
    ),
]

myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath", "html_image"]
#: "$5 and $7" is no formula
myst_dmath_allow_space = False
html_math_renderer = "mathml"

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_mock_imports = ["transformers"]
python_maximum_signature_line_length = 80
python_display_short_literal_types = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"rowmax {version}"
html_static_path = ["_static"]
html_css_files = ["rowmax.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "source_repository": repository,
    "source_branch": "main",
    "source_directory": "docs/",
}

# One signature is enough to read, and the overloads by return_lse hide the keywords. Sphinx keeps
# one analyzer of a module, so that autodoc reads this one.
_analyzer = ModuleAnalyzer.for_module("rowmax.attention")
_analyzer.analyze()
_analyzer.overloads.clear()
