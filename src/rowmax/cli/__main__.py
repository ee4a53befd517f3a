"""Run ``python -m rowmax.cli`` where no script is installed."""

from . import main

if __name__ == "__main__":
    main()
