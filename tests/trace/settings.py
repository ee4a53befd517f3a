"""Settings of the tests: ragged tiles, other lengths of queries and keys, rows that see nothing."""

from __future__ import annotations

from rowmax.trace import Setting

SETTINGS = {
    "default": Setting(),
    "ragged": Setting(
        queries=11, keys=17, head_dim=3, block_q=4, block_k=5, window=(4, 1), documents=3, seed=1
    ),
    "more queries": Setting(queries=18, keys=7, head_dim=2, block_q=5, block_k=3, softcap=2.0),
    "strictly causal": Setting(queries=8, block_q=3, block_k=8, window=(2, -1), prefix=0),
    "one pair": Setting(queries=1, head_dim=1),
}
