"""The demo: checks the installation, trains a small GPT, runs a long sequence, writes a report.

Run it by ``make demo``, or by ``python -m demo`` in the repository.
"""
