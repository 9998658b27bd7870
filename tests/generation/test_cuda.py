# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""On a CUDA device: the strategies agree with each other, and attention to segments with its reference."""

import unittest
from itertools import product

import torch
from parameterized import parameterized

from ..sharing.test_attention import Case
from .runs import MODES, forwarded
from .tiny_models import build_inputs, build_model


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEGMENTS = (6, ((2, 130), (6, 5)))


@unittest.skipUnless(torch.cuda.is_available(), "there is no CUDA device")
class CudaTest(unittest.TestCase):
    @parameterized.expand(product(("llama", "gemma3", "gpt2", "bart", "t5"), MODES))
    def test_same_tokens(self, name: str, mode: str):
        model = build_model(name).to("cuda")
        inputs = {key: tensor.to("cuda") for key, tensor in build_inputs(name, 2, 33).items()}
        sequences = {}
        for strategy in ("recompute", "copy", "share"):
            torch.manual_seed(0)
            with forwarded(model) as shapes:
                sequences[strategy] = model.generate(
                    **inputs, **MODES[mode](3), max_new_tokens=8, prompt_expansion=strategy
                )
            self.assertEqual(shapes[0][0], 6 if strategy == "recompute" else 2)
        for strategy in ("copy", "share"):
            self.assertTrue(torch.equal(sequences[strategy], sequences["recompute"]), strategy)

    @parameterized.expand(product(DTYPES, ("none", "bool", "additive"), (1, 3)))
    def test_attention_is_as_exact_as_the_ordinary_one(self, dtype: torch.dtype, mask_kind: str, queries: int):
        """Against a reference in float64 on the CPU, with torch's attention on the device beside it."""
        case = Case(SEGMENTS, queries=queries, dtype=dtype)
        mask = None if mask_kind == "none" else case.mask("bool")
        if mask_kind == "additive":
            mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        exact_mask = mask if mask is None or mask.dtype == torch.bool else mask == 0
        exact = _moved(case, torch.float64, "cpu").reference(exact_mask)
        on_device, mask = _moved(case, dtype, "cuda"), mask if mask is None else mask.to("cuda")
        ours, ordinary = on_device.attend(mask), on_device.reference(mask)
        ours_error, ordinary_error = ((x.cpu().double() - exact).abs().max() for x in (ours, ordinary))
        # Half a unit in the last place of the largest output is what rounding the result alone may cost
        rounding = torch.finfo(dtype).eps * exact.abs().max() / 2
        self.assertLessEqual(ours_error, torch.maximum(ordinary_error, rounding) + 1e-6)


def _moved(case: Case, dtype: torch.dtype, device: str) -> Case:
    """The same inputs in another type, on another device."""
    moved = Case(SEGMENTS, queries=case.queries, dtype=dtype)
    moved.query = case.query.to(device, dtype)
    moved.keys, moved.values = ([part.to(device, dtype) for part in parts] for parts in (case.keys, case.values))
    return moved
