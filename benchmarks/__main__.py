"""``python -m benchmarks``. In child processes, which import this file too, it does nothing."""

if __name__ == "__main__":
    import sys

    from .command import main

    sys.exit(main())
