"""Named sets of cells, as text."""

from __future__ import annotations

_CPU = "b=1 hq=8 dtype=float32"
_LONG = "n=16384 d=128 hq=32 hk=8"
_CUTS = "73+1980+328+850+361+511+375+1682+219+1580+1174+5864+2613+5035+6306+3817"
_SHORT = "lengths=2048+1500+1100+600"
SETS: dict[str, tuple[str, ...]] = {
    "main": ("d=64|128|256 n=512|1024|2048|4096|8192|16384 causal=0|1",),
    "features": (
        f"{_LONG} causal=1 softcap=0|30",
        f"{_LONG} window=1024",
        "n=16384 d=128 window=1024",
        "n=4096 d=128 causal=1 alibi=1",
        "n=4096 d=128 causal=1 dropout=0.1",
        "n=16384 d=128 causal=1 documents=16",
        f"d=128 causal=1 packed={'+'.join(['2048'] * 16)}|{_CUTS}",
        f"d=128 hq=32 hk=8 causal=1 packed={'+'.join(['2048'] * 8)}|8192+8192",
    ),
    # query heads that share keys: long groups under a diagonal, and few tiles of keys
    "groups": (
        "d=128 hq=32 hk=4|8 n=2048|4096|8192|16384 causal=1",
        "d=128 hq=24 hk=3 n=4096|16384 causal=1",
        "d=128 hq=16 hk=4 b=1 n=2048 causal=1",
        "d=64|128|256 hq=8 hk=1 b=1 n=2048|8192 causal=0|1",
    ),
    # a learned sink a head, with and without a window, as in models of 64 heads on 8
    "sinks": (
        "d=64 hq=64 hk=8 b=1 n=2048|8192|16384 causal=1 sink=1",
        "d=64 hq=64 hk=8 b=1 n=2048|8192|16384 window=127 sink=1",
        "d=128 n=8192 causal=1 sink=1",
        f"d=64 hq=64 hk=8 causal=1 packed={'+'.join(['2048'] * 8)} sink=1",
        f"d=64 hq=64 hk=8 packed={'+'.join(['2048'] * 8)} window=127 sink=1",
    ),
    # a part of a long prompt: more queries than are few, of all keys so far
    "prefill": (
        "d=128 hq=8 hk=1 b=1 nq=256|512|2048 n=8192|65536 causal=1",
        "d=128 hq=32 hk=8 b=1 nq=128|512|2048 n=8192|65536 causal=1",
    ),
    # biases of each pair, shared by sequences, of each key, of each query, with short sequences
    "bias": (
        "n=4096 d=128 b=1 bias=1hqk dbias=0|1",
        "n=4096 d=256 b=1 bias=1hqk dbias=1",
        "n=2048 d=64|128|256 b=4 bias=1hqk dbias=0|1",
        "n=2048 d=128 b=4 bias=b11k|11q1 dbias=1",
        f"n=2048 d=64|128 b=4 bias=1hqk dbias=1 {_SHORT}",
    ),
    # S sequences of S positions that share a bias of each pair, as in models of proteins
    "pair": tuple(
        f"n={n} b={n} hq={hq} d={d} bias=1hqk dbias=1 bias_float32=0|1"
        for n in (256, 384, 512, 768)
        for d, hq in ((32, 4), (64, 4), (32, 8))
        if (d, hq) == (32, 4) or n in (512, 768)
    ),
    "pair-lengths": tuple(
        f"n={n} b={n} hq=4 d=32 bias=1hqk dbias=1 lengths={'+'.join([str(n * 3 // 4)] * n)}"
        for n in (512, 768)
    ),
    "shared-bias": ("n=4096 d=64|128 b=4 bias=1hqk|b1qk dbias=1 causal=0|1",),
    "cpu": (
        f"causal=0|1 d=64|128 n=512|1024|2048|4096|8192 {_CPU}",
        f"causal=0|1 n=2048|4096 d=64 bias=1hqk dbias=1 {_CPU}",
        f"n=2048 d=64 window=256 {_CPU}",
        f"n=4096 d=128 window=256 {_CPU}",
        "causal=0|1 n=2048 d=64 b=1 hq=16 hk=4 dtype=float32",
        "causal=0|1 n=512|2048 d=64 b=1 hq=8",
    ),
    "memory": (
        f"n=8192 d=64 causal=1 {_CPU}",
        f"n=4096 d=64 bias=1hqk dbias=1 {_CPU}",
        "n=65536 d=128 hq=1",
    ),
    "few": ("d=128 hq=32 hk=8 b=1|4|16 n=1024|8192|32768|131072 nq=1|4|16",),
    "few-features": (
        "d=128 hq=32 hk=8 b=1 n=32768 nq=4 causal=1",
        "d=128 hq=32 hk=8 b=1 n=32768 nq=1 softcap=30",
        "d=128 hq=32 hk=8 b=1 n=32768 nq=1 alibi=1",
        "d=128 hq=32 hk=8 b=1 n=32768 nq=1 window=4096",
        "d=128 hq=32 hk=8 b=4 n=32768 nq=1 lengths=32768+8000+1000+20000",
        "d=64|256 hq=32 hk=8 b=1 n=32768 nq=1",
        "d=128 hq=32 hk=32|1 b=1 n=32768 nq=1",
        "d=128 hq=32 hk=8 b=64 n=2048|8192 nq=1",
    ),
    # decoding one token, and many short sequences
    "cpu-few": (
        "dtype=float32|bfloat16|float16 nq=1 n=16|128|1024|4096 b=1|8 hq=8 hk=8 d=64|128",
        "dtype=float32|bfloat16|float16 nq=1 n=16|128|1024|4096 b=1|8 hq=32 hk=8 d=64|128",
    ),
    # several queries of many keys: a draft that is checked, a part of a prompt
    "cpu-few-rows": (
        "dtype=float32|bfloat16|float16 nq=4|8|16|32 n=1024|4096 b=1 hq=8 d=64",
        "dtype=float32|bfloat16|float16 nq=1|4|8|12 n=1024|4096 b=1 hq=32 hk=8 d=128",
    ),
    # the same, of packed sequences
    "cpu-few-packed": (
        "dtype=float32|bfloat16|float16 nq=1 hq=8 hk=8 d=64 packed=16+16+16+16+16+16+16+16",
        "dtype=float32|bfloat16|float16 nq=1 hq=8 hk=8 d=64 packed=512+512+512+512+512+512+512+512",
        "dtype=float32|bfloat16|float16 nq=1 hq=32 hk=8 d=128 packed=4096+1000+2048+7+2500+64",
        "dtype=float32|bfloat16|float16 nq=4 hq=8 hk=8 d=64 causal=1 packed=2048+2048+900+300",
    ),
    "cpu-short": (
        "dtype=float32|bfloat16|float16 n=16|32|49|128|197 b=512 hq=12 d=64",
        "dtype=float32|bfloat16|float16 n=16|32|49|128|197 b=512 hq=8 d=128",
    ),
    # a step of a decoder with positions in a bias, and windows of an image with a shared one
    "cpu-bias": (
        "dtype=float32|bfloat16 nq=1 n=128|1024|4096 b=1 hq=8 d=64 bias=1hqk",
        "dtype=float32|bfloat16 nq=1 n=512 b=8 hq=12 d=64 bias=1hqk",
        "dtype=float32|bfloat16 n=49 b=64|512 hq=8 d=32 bias=1hqk",
    ),
    # one sequence of documents, given by offsets, or by ids
    "cpu-documents": (
        "dtype=float32|bfloat16|float16 n=4096 b=1 hq=8 d=64 causal=1 documents=4|16|64 offsets=1",
        "dtype=float32|bfloat16 n=1024 b=1 hq=32 hk=8 d=128 causal=1 documents=8 offsets=1",
        "dtype=float32 n=1024 b=1 hq=8 d=64 documents=32 offsets=1",
        "dtype=float32|bfloat16 n=4096 b=1 hq=8 d=64 causal=1 documents=4|16|64",
        "dtype=float32|bfloat16 n=1024 b=1 hq=32 hk=8 d=128 causal=1 documents=8",
        "dtype=float32 n=64|1024 b=1 hq=8 d=64 documents=2|32",
    ),
    # a batch that is padded on the left: decoding a token, a draft, and whole prompts
    "cpu-padded": tuple(
        f"dtype=float32|bfloat16 {rows} n={n} b=4 hq=12 d=64 left=1 "
        f"lengths={n}+{3 * n // 4}+{n // 2}+{n // 4}"
        for n, rows in (
            *((n, "nq=1|8") for n in (64, 512, 2048)),
            *((n, "causal=1") for n in (64, 256, 512)),
        )
    ),
    # decoding one token with a cache of fixed size: a prefix of it is in use, by lengths or a mask
    "cpu-cached": tuple(
        f"dtype=float32|bfloat16 nq=1 n={n} {more} boolean=0|1"
        for n in (128, 1024, 4096)
        for more in (
            f"b=1 hq=8 d=64 lengths={n * 3 // 4}",
            f"b=1 hq=32 hk=8 d=128 lengths={n * 3 // 4}",
            f"b=8 hq=12 d=64 lengths={'+'.join(str(n * i // 8) for i in range(1, 9))}",
        )
    )
    + tuple(
        f"dtype=float32|bfloat16 n=49 b=64 hq=8 d=32 lengths={'+'.join([str(n)] * 64)} boolean=1"
        for n in (49, 30)
    ),
    "small": ("n=128 d=64 b=1 hq=4|8 causal=1", "n=512 d=64 b=1 hq=16 causal=1"),
    "training": ("n=8192 d=128 b=2 hq=8 causal=1 layers=12",),
    "matmul": ("n=8192 d=8192 hq=1",),
}
