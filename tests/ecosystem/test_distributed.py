# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""A model in two processes with gloo: tensor parallelism, FSDP2 and DDP."""

import os
import tempfile
from pathlib import Path

import torch
from parameterized import parameterized
from torch import distributed
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from tests.generation.runs import MODES, oracle
from tests.generation.tiny_models import build_inputs, build_model
from transformers import AutoModelForCausalLM

from .observation import EQUAL_ROWS, SHARED, EcosystemTest, observe


RANKS, BATCH, SEQUENCES = 2, 2, 3


def _tensor_parallel(folder: str):
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    return model, model, type(model.model.layers[0].self_attn.q_proj.weight).__name__


def _fsdp2(folder: str):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    register_fsdp_forward_method(model, "generate")
    return model, model, type(next(model.parameters())).__name__


def _ddp(folder: str):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    wrapper = DistributedDataParallel(model)
    return model, wrapper.module, type(wrapper).__name__


PARALLEL = {"tensor": _tensor_parallel, "fsdp2": _fsdp2, "ddp": _ddp}


def _rank_inputs(rank: int, equal_rows_on_first: bool) -> dict:
    inputs = build_inputs("llama", BATCH)
    if equal_rows_on_first and rank == 0:
        inputs = {name: tensor[:1].repeat(BATCH, 1) for name, tensor in inputs.items()}
    return inputs


def run_rank(rank: int, folder: str, kind: str, mode: str, equal_rows_on_first: bool) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    # Where transformers looks for its device mesh
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    model, generating, sharded = PARALLEL[kind](folder)
    sequences = 1 if equal_rows_on_first else SEQUENCES
    arguments = {**_rank_inputs(rank, equal_rows_on_first), "max_new_tokens": 5}
    arguments |= {"do_sample": True} if equal_rows_on_first else MODES[mode](sequences)
    if kind == "fsdp2":
        arguments["synced_gpus"] = True
    seen = observe(model, lambda: generating.generate(**arguments))
    torch.save(seen | {"sharded": sharded}, Path(folder, f"rank{rank}"))
    distributed.destroy_process_group()


def generate(kind: str, mode: str, equal_rows_on_first: bool = False) -> list[dict]:
    """Returns what each rank has seen."""
    with tempfile.TemporaryDirectory() as folder:
        build_model("llama").save_pretrained(folder)
        torch.multiprocessing.spawn(run_rank, (folder, kind, mode, equal_rows_on_first), nprocs=RANKS)
        return [torch.load(Path(folder, f"rank{rank}")) for rank in range(RANKS)]


class DistributedTest(EcosystemTest):
    @parameterized.expand([(kind, mode) for kind in PARALLEL for mode in ("beam", "sample")])
    def test_ranks(self, kind: str, mode: str):
        ours, theirs = generate(kind, mode), oracle().run(generate, kind, mode)
        for mine, other in zip(ours, theirs):
            self.assertEqual((mine["rows"], other["rows"]), (BATCH, BATCH * SEQUENCES), mine["log"])
            self.assertIn(SHARED, "\n".join(mine["log"]))
            self.assertEqual(mine["sharded"], other["sharded"])
            self.assertEqual(mine["tokens"], other["tokens"])

    def test_equal_rows_on_one_rank_only(self):
        """The ranks forward as often as each other, though not as many rows: else one would wait for ever."""
        case = ("fsdp2", "sample", True)
        ours, theirs = generate(*case), oracle().run(generate, *case)
        self.assertEqual([rank["rows"] for rank in ours], [1, BATCH])
        self.assertEqual([rank["rows"] for rank in theirs], [BATCH, BATCH])
        self.assertIn(EQUAL_ROWS, "\n".join(ours[0]["log"]))
        self.assertEqual([rank["tokens"] for rank in ours], [rank["tokens"] for rank in theirs])
