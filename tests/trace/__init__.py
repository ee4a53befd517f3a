"""The page of ``rowmax trace``: its numbers, its bounds, and the page in a browser."""
