# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""What a step allocates while a prompt is shared, and static caches that share theirs."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from unittest import mock

import torch
from parameterized import parameterized
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from transformers.generation import prefill

from .runs import ALL_OUTPUTS, MODES, assert_same, forwarded, run_both
from .test_prompt_expansion import ExpansionTestCase, generate
from .tiny_models import build_inputs, build_model


class LargestFloats(TorchDispatchMode):
    """Notes the largest number of floats that an operator newly allocates."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, tensor.numel() if tensor.is_floating_point() else 0)
        return result


class PromptSharingTest(ExpansionTestCase):
    @parameterized.expand(product(("llama", "gemma3"), MODES))
    def test_no_step_makes_more_than_a_mask_of_all_rows_and_tokens(self, name: str, mode: str):
        """What has N rows of L columns in a step are tokens and masks alone, and the bias that is made of a mask."""
        repeats, length = 8, 600
        inputs = build_inputs(name, 2, length=length)
        arguments = {**MODES[mode](repeats), "max_new_tokens": 5, "eos_token_id": None}
        largest = {}
        for strategy in ("share", "copy"):
            model = build_model(name)
            with LargestFloats() as floats, forwarded(model) as shapes:

                def start_again(*_):
                    if len(shapes) < 3:  # up to the first step, the prefill and its expansion are done
                        floats.largest = 0

                model.register_forward_pre_hook(start_again)
                model.generate(**inputs, **arguments, prompt_expansion=strategy)
            largest[strategy] = floats.largest
        self.assertLessEqual(largest["share"], 2 * repeats * (length + 5))
        self.assertGreater(largest["copy"], 4 * repeats * length)

    @parameterized.expand(product(("llama", "gemma3", "bart", "t5"), MODES))
    def test_static_cache(self, name: str, mode: str):
        """Shared if asked for: layers of full attention and of cross-attention. The returned cache is upstream's."""
        arguments = {**MODES[mode](3), **ALL_OUTPUTS, "max_new_tokens": 6, "cache_implementation": "static"}
        with self.shared_layers() as shared:
            ours, theirs = run_both(name, 2, arguments, fork_arguments={"prompt_expansion": "share"})
        self.assertEqual(ours["rows"], 2)
        self.assertEqual(shared, [{"bart": 4, "t5": 4, "gemma3": 1}.get(name, 2)])
        self.assertIn("cache.0.0", "".join(ours))
        assert_same(ours, theirs)

    @staticmethod
    @contextmanager
    def shared_layers() -> Iterator[list[int]]:
        """Collects how many layers each call of `generate` shares."""
        counts, share = [], prefill.share_cache
        with mock.patch.object(prefill, "share_cache", lambda *args: counts.append(share(*args))):
            yield counts

    def test_static_cache_keeps_its_shape_by_default(self):
        model = build_model("llama")
        arguments = {**build_inputs("llama", 2), "num_beams": 3, "max_new_tokens": 2, "cache_implementation": "static"}
        _, shapes = generate(model, arguments)
        self.assertEqual(shapes[0][0], 2)
        (reason,) = self.reasons(model, arguments)
        self.assertRegex(reason, "prompt_expansion='copy' .*compiled for the length of each prompt")

    def test_shared_prompts_of_other_lengths(self):
        """
        Another length of the prompt compiles once more, then for any length; the first that leaves more room for the
        suffix, since the cache stays as long as the longest needed, too. No later one does.
        """
        torch._dynamo.reset()
        self.addCleanup(torch._dynamo.reset)
        model = build_model("llama")
        counter, eager = CompileCounter(), model.forward
        compiled = torch.compile(eager, backend=counter)
        self.addCleanup(setattr, model, "forward", eager)

        @functools.wraps(eager)
        def compile_steps(input_ids, **kwargs):
            return (compiled if input_ids.shape[1] == 1 else eager)(input_ids=input_ids, **kwargs)

        graphs = []
        for length in (9, 9, 12, 14, 11, 13, 10):
            prompt = torch.arange(2 * length).view(2, length) % 20 + 3
            arguments = {"num_beams": 3, "max_new_tokens": 6, "eos_token_id": None}
            model.forward = eager
            expected = model.generate(prompt, **arguments)
            model.forward = compile_steps
            static = {"cache_implementation": "static", "prompt_expansion": "share"}
            self.assertTrue(torch.equal(model.generate(prompt, **arguments, **static), expected))
            graphs.append(counter.frame_count)
        self.assertEqual(graphs[:2], [1, 1])
        self.assertLessEqual(graphs[4], 3)
        self.assertEqual(graphs[4:], [graphs[4]] * 3)
