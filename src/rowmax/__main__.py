"""Run ``python -m rowmax``: the command ``rowmax``."""

from .cli import main

if __name__ == "__main__":
    main()
