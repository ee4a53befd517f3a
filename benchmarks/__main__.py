"""``python -m benchmarks``. Children import this file too: nothing else is imported by it there."""

if __name__ == "__main__":
    import sys

    from .command import main

    sys.exit(main())
