# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""The benchmark runs upstream and the fork on a tiny model, and its tables say what was forwarded, held and generated."""

import json
import tempfile
import unittest
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from benchmark import prefill
from benchmark.report import group, same_tokens

from .test_long_prompt_beams import HEAD_DIM, KV_HEADS, LAYERS, save_tiny_model


LENGTH, NEW_TOKENS = 40, 3
ROW_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4  # of one token's keys and values


class BenchmarkTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.folder = Path(temporary.name)
        save_tiny_model(cls.folder / "model")
        options = (
            f"--lengths 20 {LENGTH} --sequences 1 4 --new-tokens {NEW_TOKENS} --repeats 2 --max-prompt-tokens 100"
        )
        cls.status, cls.printed = cls.main(
            "--model", str(cls.folder / "model"), "--output", str(cls.folder), *options.split()
        )
        cls.lines = [json.loads(line) for line in (cls.folder / "results.jsonl").read_text().splitlines()]
        cls.cells = group(cls.lines)

    @staticmethod
    def main(*arguments: str) -> tuple[int, str]:
        with redirect_stdout(StringIO()) as printed:
            status = prefill.main(list(arguments))
        return status, printed.getvalue()

    def test_grid(self):
        self.assertEqual(self.status, 0)
        self.assertTrue(all(len(runs) == 2 for runs in self.cells.values()))
        engines = {cell[1:3]: {c[3] for c in self.cells if c[:3] == cell[:3]} for cell in self.cells}
        self.assertEqual(engines[20, 1], {"upstream", "share"})
        self.assertEqual(engines[20, 4], {"upstream", "recompute", "copy", "share"})
        # 4 * 40 prompt tokens are more than --max-prompt-tokens
        self.assertEqual(engines[LENGTH, 4], {"copy", "share"})

    def test_rows_and_flops_of_the_prefill(self):
        for (_, _, count, engine), runs in self.cells.items():
            self.assertEqual(runs[0]["rows"], count if engine in ("upstream", "recompute") else 1)
        upstream, share = (self.cells["beam", 20, 4, engine][0] for engine in ("upstream", "share"))
        self.assertEqual(upstream["prefill_flops"], 4 * share["prefill_flops"])

    def test_bytes_held(self):
        upstream, copy = (self.cells["beam", 20, 4, engine][0]["cache_bytes"] for engine in ("upstream", "copy"))
        # The last token is generated, but not forwarded
        self.assertEqual(upstream, 4 * (20 + NEW_TOKENS - 1) * ROW_BYTES)
        self.assertEqual(copy, upstream)
        share = self.cells["beam", LENGTH, 4, "share"][0]["cache_bytes"]
        self.assertGreaterEqual(share, (LENGTH + 4 * (NEW_TOKENS - 1)) * ROW_BYTES)
        self.assertLess(share, self.cells["beam", LENGTH, 4, "copy"][0]["cache_bytes"] / 2)

    def test_memory_is_measured(self):
        growth = [run["peak_memory_bytes"] for runs in self.cells.values() for run in runs]
        self.assertTrue(all(bytes_ >= 0 for bytes_ in growth))
        self.assertGreater(max(growth), 0)

    def test_tokens_are_compared(self):
        self.assertTrue(same_tokens(self.lines))
        self.cells["beam", 20, 4, "share"][1]["tokens"][0][0] += 1
        try:
            self.assertFalse(same_tokens(self.lines))
        finally:
            self.cells["beam", 20, 4, "share"][1]["tokens"][0][0] -= 1

    def test_tables_and_pictures(self):
        self.assertIn("## beam, L = 20", self.printed)
        pictures = {path.name for path in self.folder.glob("*.png")}
        names = ("time_by_length", "price_by_count", "cache_by_count")
        self.assertEqual(pictures, {f"{mode}_{name}.png" for mode in ("beam", "sample") for name in names})

    def test_drawing_again(self):
        status, printed = self.main("--draw", str(self.folder / "results.jsonl"))
        self.assertEqual(status, 0)
        self.assertEqual(
            (self.folder / "tables.md").read_text(), printed[: printed.index("wrote ")].rstrip("\n") + "\n"
        )
