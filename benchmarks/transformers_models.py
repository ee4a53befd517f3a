"""Compare and time models of transformers with rowmax and with its peers.

    python -m benchmarks.transformers_models --out results
    python -m benchmarks.transformers_models --part equality --out results
    python -m benchmarks.transformers_models --quick --out results     # small, also on a CPU

Parts: ``equality`` compares each family of model_families.py in bfloat16 with eager attention in
float32: rowmax's error may be at most twice that of eager attention in bfloat16 (gradients three
times). ``generation`` measures generated tokens a second. ``training`` measures tokens a second
and peak memory of a training step. Contestants take turns, in an order that changes from turn to
turn; results are medians. Each part writes ``OUT/transformers_PART.csv``. No network is used.

``rowmax-unread`` is rowmax that reads no padding masks (``skip_full_masks(False)``). The exit
status is 1 if rowmax's error is too large.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from rowmax.bench.timing import facts, wait
from rowmax.integrations.transformers import skip_full_masks
from rowmax.reference.tolerance import GRADIENT, OUTPUT, complaint, relative_error

from .model_families import FAMILIES, Sizes, inputs_of, model_of, padding_of, result_of

PARTS = ("equality", "generation", "training")
Row = dict[str, Any]


def arguments(given: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.transformers_models",
        None,
        __doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, gpu = parser.add_argument, torch.cuda.is_available()
    add("--part", nargs="+", choices=PARTS, default=list(PARTS))
    add("--out", type=Path, required=True, help="a folder for the CSV files")
    add("--device", choices=("cuda", "cpu"), default="cuda" if gpu else "cpu")
    add("--only", nargs="+", help="families (equality), or kinds of attention")
    add("--turns", type=int, default=5)
    add("--caches", nargs="+", choices=("dynamic", "static"), default=["dynamic"])
    add("--batches", nargs="+", type=int, default=[1, 16], help="of generation")
    add("--seconds", type=float, default=float("inf"), help="begin no row after as long")
    add("--quick", action="store_true", help="tiny models, two turns")
    options = parser.parse_args(given)
    options.turns = 2 if options.quick else options.turns
    return options


def chosen(options: argparse.Namespace, names: Any) -> list[str]:
    """Return the names in --only, or all without it."""
    return [name for name in names if not options.only or name in options.only]


# --- equality ----------------------------------------------------------------------------------


def equality(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each family, side of padding, and outputs or gradients."""
    sizes = Sizes() if options.quick else Sizes(head=64, tokens=257, decoded=65, window=40)
    for name in chosen(options, FAMILIES):
        for side in ("none", "left", "right"):
            given = inputs_of(name, sizes)
            if side != "none":
                if "input_ids" not in given:
                    continue
                given["attention_mask"] = padding_of(side, sizes)
            given = {key: t.to(options.device) for key, t in given.items()}
            # the weights are rounded first: then only arithmetic differs
            model = model_of(name, sizes).to(options.device, torch.bfloat16)
            std = result_of(model, "eager", torch.bfloat16, given)
            got = result_of(model, "rowmax", torch.bfloat16, given)
            ref = result_of(model, "eager", torch.float32, given)
            for what, factor in (("outputs", OUTPUT), ("gradients", GRADIENT)):
                x, y, z = (flat(getattr(part, what)) for part in (got, ref, std))
                wrong = complaint(x, y, z, torch.bfloat16, factor)
                yield {
                    "model": name,
                    "padding": side,
                    "what": what,
                    "max_error": f"{(x - y).abs().max().item():.3g}",
                    "eager_max_error": f"{(z - y).abs().max().item():.3g}",
                    "relative_error": f"{relative_error(x, y):.3g}",
                    "eager_relative_error": f"{relative_error(z, y):.3g}",
                    "note": f"WRONG: {wrong}" if wrong else "",
                }


def flat(tensors: dict[str, Tensor]) -> Tensor:
    """Return all elements in one vector, in float32."""
    return torch.cat([t.float().flatten() for t in tensors.values()])


# --- turns -------------------------------------------------------------------------------------


def medians(
    calls: dict[str, Callable[[], Any]], turns: int
) -> tuple[dict[str, float], dict[str, float], dict[str, str]]:
    """Return (seconds, MiB at the peak, failures) by kind; contestants take turns."""
    seconds: dict[str, list[float]] = {kind: [] for kind in calls}
    peaks: dict[str, float] = {}
    failures: dict[str, str] = {}
    for turn in range(turns + 1):  # the first warms up
        kinds = list(calls)
        first = turn % len(kinds)
        for kind in kinds[first:] + kinds[:first]:
            if kind in failures:
                continue
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            wait()
            start = time.perf_counter()
            try:
                calls[kind]()
                wait()
            except (ImportError, NotImplementedError, RuntimeError, ValueError) as error:
                failures[kind] = str(error).strip().splitlines()[0][:200]
                continue
            if turn:
                seconds[kind].append(time.perf_counter() - start)
            if torch.cuda.is_available():
                peaks[kind] = torch.cuda.max_memory_allocated() / 2**20
    return {k: statistics.median(x) for k, x in seconds.items() if x}, peaks, failures


def use(model: Any, kind: str) -> None:
    """Switch a model to a kind of attention."""
    skip_full_masks(kind != "rowmax-unread")
    model.set_attn_implementation(kind.removesuffix("-unread"))


def llama(options: argparse.Namespace, **sizes: int) -> Any:
    """Return a Llama with random weights in bfloat16 (float32 on a CPU)."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, pad_token_id=0)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    with torch.device(options.device):
        return transformers.LlamaForCausalLM(config).to(dtype)


def rows_of(
    calls: dict[str, Callable[[], Any]], turns: int, tokens: int, facts_of_cell: Row
) -> Iterator[Row]:
    """Yield a row for each kind of attention: tokens a second, and MiB."""
    seconds, peaks, failures = medians(calls, turns)
    for kind in calls:
        row = {**facts_of_cell, "attention": kind, "note": failures.get(kind, "")}
        if kind in seconds:
            row |= {"ms": f"{1e3 * seconds[kind]:.2f}", "turns": turns}
            row["tokens_per_second"] = f"{tokens / seconds[kind]:.0f}"
            row["peak_mib"] = f"{peaks[kind]:.0f}" if kind in peaks else ""
        yield row


# --- generation --------------------------------------------------------------------------------


def generation(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each batch, cache and kind of attention."""
    heads, layers, prompt, new = (4, 2, 32, 4) if options.quick else (32, 16, 1024, 128)
    model = llama(
        options,
        hidden_size=64 * heads,
        intermediate_size=256 * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        vocab_size=1000 if options.quick else 32000,
    ).eval()
    limits: Row = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    kinds = chosen(options, ("rowmax", "rowmax-unread", "sdpa", "eager"))
    for batch in options.batches:
        ids = torch.randint(3, 1000, (batch, prompt), device=options.device)
        for cache in options.caches:
            more = {} if cache == "dynamic" else {"cache_implementation": "static"}

            def call(kind: str, ids: Tensor = ids, more: Row = more) -> None:
                use(model, kind)
                mask = torch.ones_like(ids)
                model.generate(ids, attention_mask=mask, **limits, **more)

            calls = {kind: lambda kind=kind, call=call: call(kind) for kind in kinds}
            cell = {"batch": batch, "prompt": prompt, "new": new, "cache": cache}
            yield from rows_of(calls, options.turns, batch * new, cell)


# --- training ----------------------------------------------------------------------------------


def training(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each length and kind of attention."""
    heads, layers, lengths = (4, 2, (64,)) if options.quick else (16, 12, (4096, 8192))
    batch = 2 if options.quick else 4
    model = llama(
        options,
        hidden_size=64 * heads,
        intermediate_size=176 * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=1000 if options.quick else 32000,
        max_position_embeddings=max(lengths),
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=options.device == "cuda")
    kinds = chosen(options, ("rowmax", "sdpa", "flex_attention", "flash_attention_2"))
    for n in lengths:
        ids = torch.randint(3, 1000, (batch, n), device=options.device)

        def step(kind: str, ids: Tensor = ids) -> None:
            optimizer.zero_grad(set_to_none=True)
            use(model, kind)
            model(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()

        calls = {kind: lambda kind=kind, step=step: step(kind) for kind in kinds}
        cell = {"batch": batch, "n": n, "layers": layers, "heads": heads}
        yield from rows_of(calls, options.turns, batch * n, cell)


def main(given: list[str] | None = None) -> int:
    """Run the parts, print and store; return 1 if a result is wrong."""
    options, start = arguments(given), time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    known = facts(options.device) | {"transformers": transformers.__version__}
    print(", ".join(f"{key} {x}" for key, x in known.items() if x), flush=True)
    wrong = 0
    for part in options.part:
        rows: list[Row] = []
        for row in globals()[part](options):
            rows.append(row)
            wrong += str(row["note"]).startswith("WRONG")
            print(part, *(f"{key} {x}" for key, x in row.items() if x != ""), flush=True)
            if time.perf_counter() - start > options.seconds:
                print(f"stopped after {options.seconds:.0f} s")
                break
        columns = list(dict.fromkeys(key for row in rows for key in row)) + list(known)
        with (options.out / f"transformers_{part}.csv").open("w", newline="") as file:
            table = csv.DictWriter(file, columns, restval="")
            table.writeheader()
            table.writerows(row | known for row in rows)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
