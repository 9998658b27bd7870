# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""On a CUDA device: the strategies agree with each other, and attention to a shared prefix with its reference."""

import unittest
from itertools import product

import torch
from parameterized import parameterized

from transformers.integrations.shared_prefix_attention import SharedPrefix

from .runs import MODES, forwarded
from .test_shared_prefix_attention import CAUSAL, Case
from .tiny_models import build_inputs, build_model


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
        case = Case(queries=queries, prefix_length=130, dtype=dtype)
        mask = case.mask(mask_kind)
        exact, _ = Case.reference(_to(case, torch.float64, "cpu"), _moved(mask, torch.float64, "cpu"))
        on_device = _to(case, dtype, "cuda")
        ours, _ = on_device.attend(_moved(mask, dtype, "cuda"), CAUSAL)
        ordinary = _ordinary_attention(on_device, _moved(mask, dtype, "cuda"))
        ours_error, ordinary_error = ((x.cpu().double() - exact).abs().max() for x in (ours, ordinary))
        # Half a unit in the last place of the largest output is what rounding the result alone may cost
        rounding = torch.finfo(dtype).eps * exact.abs().max() / 2
        self.assertLessEqual(ours_error, torch.maximum(ordinary_error, rounding) + 1e-6)


def _moved(mask: torch.Tensor | None, dtype: torch.dtype, device: str) -> torch.Tensor | None:
    return mask if mask is None else mask.to(device, mask.dtype if mask.dtype == torch.bool else dtype)


def _to(case: Case, dtype: torch.dtype, device: str) -> Case:
    """The same inputs in another type, on another device."""
    moved = Case(queries=case.queries, prefix_length=case.prefix_length, dtype=dtype)
    for name in ("query", "prefix_keys", "prefix_values", "key", "value"):
        setattr(moved, name, getattr(case, name).to(device, dtype))
    return moved


def _ordinary_attention(case: Case, mask: torch.Tensor | None) -> torch.Tensor:
    prefix: SharedPrefix = case.prefix
    keys = torch.cat([prefix.keys.repeat_interleave(case.repeats, dim=0), case.key], dim=2)
    values = torch.cat([prefix.values.repeat_interleave(case.repeats, dim=0), case.value], dim=2)
    if mask is None:
        mask = case.mask("bool").to(keys.device)
        mask = torch.ones_like(mask).tril(case.length - case.queries)
    output = torch.nn.functional.scaled_dot_product_attention(case.query, keys, values, mask, enable_gqa=True)
    return output.transpose(1, 2)
