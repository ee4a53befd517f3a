"""Solutions of chapter 10: barriers, overlap and the shape of tiles."""

from __future__ import annotations


def waits(n: int, stages: int) -> tuple[int, int, int]:
    """Return (buffer, parity for the consumer, parity for the producer) of use n of a ring.

    The consumer waits for the full barrier of the buffer, the producer for the empty one. A wait
    passes if the barrier is in a phase of the other parity. Barriers begin in phase 0.
    """
    turn = n // stages
    return n % stages, turn % 2, (turn + 1) % 2


def finished(steps: int, scores: float, softmax: float, output: float, overlap: bool) -> float:
    """Return the time after the last product of a tile of queries.

    A step has the product of the scores, the softmax, and the product of the output, whose times
    are given. Without overlap they follow each other. With overlap, the product of the output of a
    step runs under the softmax of the next step: after the next scores, before their own output.
    """
    if not overlap:
        return steps * (scores + softmax + output)
    return scores + softmax + (steps - 1) * (scores + max(softmax, output)) + output


def most_keys(d: int, stages: int, registers: int) -> int:
    """Return the most keys of a tile, a multiple of 16 up to 256; 0 if none fits.

    A block has two consumers of 64 rows, one tile of 128 queries, and stages of K and V, in 16
    bits, within 227 KB. A consumer's thread has the output and the scores in float32, the weights
    in 16 bits, and 24 registers for everything else. All head sizes are d.
    """
    for cols in range(256, 0, -16):
        held = 64 * d / 128 + 64 * cols / 128 + 64 * cols / 256 + 24
        if 2 * (128 * d + stages * 2 * cols * d) <= 227 * 1024 and held <= registers:
            return cols
    return 0
