# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
`synced_gpus`, for models whose layers are spread over processes: a forward pass of one rank waits for the others, so that
all ranks must run as many, whether their own sequences are finished or not. The prefill is one pass on every rank.
"""

import tempfile
import unittest
from pathlib import Path

import torch
from parameterized import parameterized

from .runs import MODES, forwarded
from .tiny_models import build_inputs, build_model


NEW_TOKENS = (3, 7)  # of each rank


def generate(rank: int, mode: str, synced_gpus: bool) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Returns the sequences of a rank and the (rows, query length) of its forward passes."""
    model = build_model("llama")
    inputs = build_inputs("llama", batch_size=2)
    torch.manual_seed(rank)
    with forwarded(model) as shapes:
        sequences = model.generate(
            **inputs,
            **MODES[mode](3),
            max_new_tokens=NEW_TOKENS[rank],
            min_new_tokens=NEW_TOKENS[rank],
            synced_gpus=synced_gpus,
        )
    return sequences, shapes


def run_rank(rank: int, directory: str, mode: str) -> None:
    """What each process does: it leaves its result in `directory`."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=len(NEW_TOKENS)
    )
    torch.save(generate(rank, mode, synced_gpus=True), Path(directory, str(rank)))
    torch.distributed.destroy_process_group()


class SyncedGpusTest(unittest.TestCase):
    @parameterized.expand(MODES)
    def test_ranks_run_as_many_forwards(self, mode: str):
        with tempfile.TemporaryDirectory() as directory:
            torch.multiprocessing.spawn(run_rank, (directory, mode), nprocs=len(NEW_TOKENS))
            results = [torch.load(Path(directory, str(rank))) for rank in range(len(NEW_TOKENS))]
        for rank, (sequences, shapes) in enumerate(results):
            alone, shapes_alone = generate(rank, mode, synced_gpus=False)
            self.assertEqual([rows for rows, _ in shapes_alone], [2] + [6] * (NEW_TOKENS[rank] - 1))
            self.assertEqual(shapes[: len(shapes_alone)], shapes_alone)
            self.assertTrue(torch.equal(sequences, alone))
        counts = [len(shapes) for _, shapes in results]
        self.assertEqual(counts[0], counts[1])
        self.assertGreaterEqual(counts[0], max(NEW_TOKENS))
