"""Measure attention: cells, providers, timers, workers and runs.

``rowmax bench``, the demo and the repository's ``python -m benchmarks`` measure by this code. It
uses only the public names of rowmax: a run may measure another version of the package.
"""
