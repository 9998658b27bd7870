# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""accelerate's offloading of weights, caches that are quantized or offloaded, and threads."""

import tempfile
from concurrent.futures import ThreadPoolExecutor

import accelerate
import torch
from parameterized import parameterized

from tests.generation.runs import MODES, forwarded, oracle
from tests.generation.tiny_models import build_inputs, build_model

from .observation import COPIED, SHARED, EcosystemTest, observe


BATCH, SEQUENCES = 2, 3
QUANTO = {"backend": "quanto", "nbits": 4, "residual_length": 4, "q_group_size": 8}


def generate_offloaded(place: str, mode: str) -> dict:
    model = build_model("llama")
    arguments = {**build_inputs("llama", BATCH), **MODES[mode](SEQUENCES), "max_new_tokens": 6}
    with tempfile.TemporaryDirectory() as folder:
        if place == "cpu":
            model = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        else:
            model = accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))
        seen = observe(model, lambda: model.generate(**arguments))
    return seen | {"weights": next(model.parameters()).device.type}


def generate_with_cache(implementation: str, cache_config: dict | None, mode: str) -> dict:
    model = build_model("llama")
    # One prompt: padding is quantized as well, and its numbers are no one's
    arguments = {**build_inputs("llama", 1), **MODES[mode](SEQUENCES), "max_new_tokens": 6}
    if cache_config is not None:
        arguments["cache_config"] = cache_config
    return observe(model, lambda: model.generate(**arguments, cache_implementation=implementation))


def generate_in_threads(mode: str, count: int) -> dict:
    """One model in several threads. Beams draw nothing, so that the order of the threads doesn't matter."""
    model = build_model("llama")

    def generate(batch_size: int) -> list:
        arguments = {**build_inputs("llama", batch_size), **MODES[mode](SEQUENCES), "max_new_tokens": 6}
        return model.generate(**arguments).tolist()

    with forwarded(model) as shapes, ThreadPoolExecutor(count) as pool:
        tokens = list(pool.map(generate, range(1, count + 1)))
    return {"tokens": tokens, "rows": sorted(rows for rows, length in shapes if length > 1)}


class OffloadingTest(EcosystemTest):
    @parameterized.expand([(place, mode) for place in ("cpu", "disk") for mode in ("beam", "sample")])
    def test_weights(self, place: str, mode: str):
        ours, _ = self.assert_prefilled_once((BATCH, BATCH * SEQUENCES), SHARED, generate_offloaded, place, mode)
        self.assertEqual(ours["weights"], "meta")

    @parameterized.expand(
        [
            ("quantized", "quantized", QUANTO, "beam"),
            ("quantized_sample", "quantized", QUANTO, "sample"),
            ("static", "static", None, "beam"),
        ]
    )
    def test_cache(self, _, implementation: str, cache_config: dict | None, mode: str):
        case = (generate_with_cache, implementation, cache_config, mode)
        self.assert_prefilled_once((1, SEQUENCES), COPIED, *case)


class ThreadsTest(EcosystemTest):
    def test_beams(self):
        ours, theirs = generate_in_threads("beam", 4), oracle().run(generate_in_threads, "beam", 4)
        self.assertEqual((ours["rows"], theirs["rows"]), ([1, 2, 3, 4], [3, 6, 9, 12]))
        self.assertEqual(ours["tokens"], theirs["tokens"])
