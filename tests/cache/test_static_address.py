# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Compiled decoding finds static buffers where they were: across expansion, beams, and calls of `generate`."""

import unittest
from collections.abc import Callable
from typing import Any

import torch
from parameterized import parameterized
from torch._dynamo.testing import CompileCounter

from transformers import CompileConfig

from .fillings import FILLINGS, LINEAR_FILLINGS, STATIC_FILLINGS, TextFilling, states
from .test_batch_expansion import BEAMS, ONE_EACH, THREE_EACH


def static_buffers(cache: Any) -> dict[str, torch.Tensor]:
    """The tensors whose address compiled code may rely on."""
    return {
        name: value
        for name, value in states(cache)
        if isinstance(value, torch.Tensor) and hasattr(value, "_dynamo_static_input_type")
    }


class StaticAddressTest(unittest.TestCase):
    @parameterized.expand([*STATIC_FILLINGS, *LINEAR_FILLINGS, "encoder_decoder_mixed"])
    def test_marks_and_addresses(self, name: str):
        cache = FILLINGS[name]().fill(ONE_EACH)
        marked = static_buffers(cache)
        self.assertGreater(len(marked), 0)

        cache.batch_repeat_interleave(3)
        expanded = static_buffers(cache)
        self.assertEqual(expanded.keys(), marked.keys())
        self.assertIn(6, {buffer.shape[0] for buffer in expanded.values() if buffer.dim() > 0})

        contents = {buffer: expanded[buffer].clone() for buffer in expanded}
        cache.reorder_cache(torch.tensor(BEAMS))
        reordered = static_buffers(cache)
        self.assertEqual(reordered.keys(), marked.keys())
        for buffer, tensor in reordered.items():
            self.assertIs(tensor, expanded[buffer], buffer)
        if name != "static_early_initialized":
            # The beams did change something
            self.assertTrue(any(not torch.equal(reordered[buffer], contents[buffer]) for buffer in contents))

    def test_states_of_a_recorded_past_are_not_static(self):
        cache = FILLINGS["conv_recorded_past"]().fill(ONE_EACH)
        cache.batch_repeat_interleave(3)
        cache.reorder_cache(torch.tensor(BEAMS))
        self.assertEqual([name for name in static_buffers(cache) if "conv_states" in name], [])

    def test_views_of_one_buffer(self):
        layer = FILLINGS["static_unlimited_ocr"]().fill(ONE_EACH).layers[0]
        layer.batch_repeat_interleave(3)
        layer.reorder_cache(torch.tensor(BEAMS))
        for whole, prompt, window in (
            (layer.all_keys, layer.prefill_keys, layer.keys),
            (layer.all_values, layer.prefill_values, layer.values),
        ):
            self.assertEqual(prompt.data_ptr(), whole.data_ptr())
            self.assertEqual({part.untyped_storage().data_ptr() for part in (prompt, window)}, {whole.data_ptr()})
            self.assertTrue(torch.equal(torch.cat([prompt, window], dim=-2), whole))


class CompiledDecodingTest(unittest.TestCase):
    def setUp(self):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        self.addCleanup(torch._dynamo.reset)

    @parameterized.expand(["static", "static_sliding_not_full", "static_hybrid", "mamba", "static_minimax_m3_vl"])
    def test_beams_and_second_cache_do_not_recompile(self, name: str):
        filling = FILLINGS[name]()
        self.assertIsInstance(filling, TextFilling)
        counter = CompileCounter()
        decode = torch.compile(filling.model.forward, backend=counter)

        def decode_beams() -> list[int]:
            """Compares compiled steps with eager ones. Returns the number of graphs after each of them."""
            cache, reference = filling.fill(ONE_EACH), filling.fill(ONE_EACH)
            cache.batch_repeat_interleave(3)
            rows, graphs = THREE_EACH, []
            for _ in range(3):
                with torch.no_grad():
                    logits = decode(filling.token[rows], cache=cache, use_cache=True).logits[:, -1]
                graphs.append(counter.frame_count)
                torch.testing.assert_close(logits, filling.next(reference, ONE_EACH)[rows], atol=1e-5, rtol=1e-5)
                cache.reorder_cache(torch.tensor(BEAMS))
                rows = [rows[beam] for beam in BEAMS]
            return graphs

        graphs = decode_beams()
        self.assertGreater(graphs[0], 0)
        if "sliding" not in name:
            self.assertEqual(graphs, [graphs[0]] * 3)
        # Sliding layers count their tokens in Python: the first change of that number compiles once more
        self.assertEqual(decode_beams(), [graphs[-1]] * 3)

    @parameterized.expand([("whole", None), ("chunks", 4)])
    def test_second_sampling_does_not_recompile(self, _: str, prefill_chunk_size: int | None):
        compile_config = CompileConfig(backend="eager", fullgraph=False, mode=None)
        # Otherwise only accelerators compile by themselves
        compile_config._compile_all_devices = True
        self.assert_second_generate_does_not_recompile(
            lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"],
            {"do_sample": True, "num_return_sequences": 3, "prefill_chunk_size": prefill_chunk_size},
            {"cache_implementation": "static", "compile_config": compile_config},
        )

    def test_second_beam_search_does_not_recompile(self):
        model = FILLINGS["static"]().model
        counter = CompileCounter()
        compiled = torch.compile(model.forward, backend=counter)
        eager = model.forward
        self.addCleanup(setattr, model, "forward", eager)
        self.assert_second_generate_does_not_recompile(
            lambda: counter.frame_count,
            {"num_beams": 3, "num_return_sequences": 3},
            {"cache_implementation": "static"},
            forwards=(compiled, eager),
        )

    def assert_second_generate_does_not_recompile(
        self,
        count_graphs: Callable[[], int],
        arguments: dict[str, Any],
        static: dict[str, Any],
        forwards: tuple[Callable, Callable] | None = None,
    ) -> None:
        filling = FILLINGS["static"]()
        model, arguments = filling.model, {**arguments, "max_new_tokens": 6, "eos_token_id": None}
        prompts = (filling.prompt, filling.prompt.flip(1))
        compiled, eager = forwards or (model.forward, model.forward)

        model.forward = compiled
        model.generate(prompts[0], **arguments, **static)
        graphs = count_graphs()
        self.assertGreater(graphs, 0)
        torch.manual_seed(1)
        again = model.generate(prompts[1], **arguments, **static)
        self.assertEqual(count_graphs(), graphs)

        model.forward = eager
        torch.manual_seed(1)
        self.assertTrue(torch.equal(again, model.generate(prompts[1], **arguments)))
