# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
One layer's attention in a decoding step: sharing the prompt's keys and values against copying them, as upstream does.

Copying is two `cat`s of the new token and one attention (cross-attention: the attention alone); a beam search also gathers
all keys and values of all rows, which is timed by itself. Sharing is `attend` with the prompt of one row and the suffix of N
rows. Runs take turns, and the fastest of each counts, since other load only adds.

    python -m benchmark.attention_step --threads 1
"""

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from transformers.prefix_sharing.attention import StepMemo, attend


# H, K, D
SHAPES = {"tiny": (4, 2, 16), "few heads": (9, 3, 64), "many heads": (12, 12, 64)}
KINDS = ("self", "self, mask", "cross")
SUFFIX = 8


def make_step(kind: str, shape: str, length: int, rows: int) -> dict[str, Callable[[], torch.Tensor]]:
    """The three things that are timed, on the same random states."""
    heads, kv_heads, size = SHAPES[shape]
    query = torch.randn(rows, 1, heads, size).transpose(1, 2)
    prefix = [torch.randn(1, kv_heads, length, size) for _ in range(2)]
    suffix = [torch.randn(rows, kv_heads, SUFFIX, size) for _ in range(2)]
    segments = [[states] for states in prefix] if kind == "cross" else list(zip(prefix, suffix))
    rows_of = [torch.cat([part.expand(rows, -1, -1, -1) for part in parts], dim=2) for parts in segments]
    old = rows_of if kind == "cross" else [states[:, :, :-1].contiguous() for states in rows_of]
    mask = None
    if kind == "self, mask":
        mask = torch.ones(rows, 1, 1, length + SUFFIX, dtype=torch.bool)
        mask[..., :2] = False
        query = query.reshape(rows, kv_heads, heads // kv_heads, size)  # as the library packs groups beside a mask
    memo, beams = StepMemo(), torch.arange(rows).flip(0)

    def copy() -> torch.Tensor:
        states = old if kind == "cross" else [torch.cat([a, b[:, :, -1:]], dim=2) for a, b in zip(old, suffix)]
        return F.scaled_dot_product_attention(query, *states, attn_mask=mask, enable_gqa=mask is None)

    def reorder() -> torch.Tensor:
        return [states.index_select(0, beams) for states in old][0]

    def share() -> torch.Tensor:
        return attend(query, *segments, attn_mask=mask, memo=memo)

    torch.testing.assert_close(share(), copy(), rtol=0, atol=1e-5)
    return {"copy": copy, "reorder": reorder, "share": share}


def fastest(steps: dict[str, Callable], seconds: float) -> dict[str, float]:
    """Microseconds of the fastest run of each, in turn for so long, and five times at least."""
    best, end, count = dict.fromkeys(steps, float("inf")), time.perf_counter() + seconds, 0
    while count < 5 or time.perf_counter() < end:
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            best[name] = min(best[name], (time.perf_counter() - start) * 1e6)
        count += 1
    return best


def break_even(lines: list[dict], shape: str, kind: str, rows: int, with_reorder: bool) -> str:
    """The shortest measured L from which sharing takes no longer at any measured length."""
    cells = [line for line in lines if (line["shape"], line["kind"], line["N"]) == (shape, kind, rows)]
    pays = [line["share"] <= line["copy"] + line["reorder"] * with_reorder for line in cells]
    lost = max((i for i, does in enumerate(pays) if not does), default=-1)
    return str(cells[lost + 1]["L"]) if lost + 1 < len(cells) else "-"


def render(lines: list[dict]) -> str:
    rows = sorted({line["N"] for line in lines})
    parts = [
        "| kind | shape | reorder | " + " | ".join(f"N = {n}" for n in rows) + " |",
        "|" + " --- |" * (3 + len(rows)),
    ]
    for kind, shape, with_reorder in itertools.product(KINDS, SHAPES, (False, True)):
        lengths = [break_even(lines, shape, kind, n, with_reorder) for n in rows]
        parts.append(f"| {kind} | {shape} | {'yes' if with_reorder else 'no'} | " + " | ".join(lengths) + " |")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.2, help="time for each cell, at least")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8, 32, 64, 128, 256, 512, 1024, 4096])
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    lines = []
    for kind, shape, rows, length in itertools.product(KINDS, SHAPES, arguments.rows, sorted(arguments.lengths)):
        times = fastest(make_step(kind, shape, length, rows), arguments.seconds)
        cell = {"kind": kind, "shape": shape, "N": rows, "L": length, "threads": arguments.threads}
        lines.append({**cell, **{name: round(time, 1) for name, time in times.items()}, "load": os.getloadavg()[0]})
        print(json.dumps(lines[-1]), flush=True)
    print(render(lines))


if __name__ == "__main__":
    main()
