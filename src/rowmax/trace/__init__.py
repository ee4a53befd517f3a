"""A page that shows a small attention problem being computed tile by tile.

``setting.py`` has the problem and its bounds, ``record.py`` the recurrence with every number that
it passes through, ``page.py`` the page: ``page.html`` with its style, its program and the numbers.
"""

from .page import page
from .setting import MASKS, Setting

__all__ = ["MASKS", "Setting", "page"]
