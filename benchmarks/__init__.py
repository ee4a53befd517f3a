"""Time attention: ``python -m benchmarks --help``."""
