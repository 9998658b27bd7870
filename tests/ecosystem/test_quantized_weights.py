# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Weights of few bits, by torchao and by quanto."""

import torch
from optimum import quanto
from parameterized import parameterized
from torchao import quantization as torchao

from tests.generation.runs import MODES
from tests.generation.tiny_models import build_inputs, build_model

from .observation import EcosystemTest, observe


BATCH, SEQUENCES = 2, 3


def _quanto(model: torch.nn.Module, weights: quanto.qtype) -> None:
    quanto.quantize(model, weights=weights, exclude="lm_head")
    quanto.freeze(model)


QUANTIZERS = {
    "torchao_int8": lambda model: torchao.quantize_(model, torchao.Int8WeightOnlyConfig()),
    "torchao_int4": lambda model: torchao.quantize_(
        model, torchao.IntxWeightOnlyConfig(torch.int4, torchao.PerGroup(32))
    ),
    "quanto_int8": lambda model: _quanto(model, quanto.qint8),
    "quanto_int4": lambda model: _quanto(model, quanto.qint4),
    "torchao_int8_activations": lambda model: torchao.quantize_(
        model, torchao.Int8DynamicActivationInt8WeightConfig()
    ),
}


def generate(quantizer: str, mode: str, prompt_expansion: str | None = None) -> dict:
    model = build_model("llama").requires_grad_(False)
    QUANTIZERS[quantizer](model)
    arguments = {**build_inputs("llama", BATCH), **MODES[mode](SEQUENCES), "max_new_tokens": 6}
    if prompt_expansion is not None:
        arguments["prompt_expansion"] = prompt_expansion
    kind = type(model.model.layers[0].self_attn.q_proj.weight).__name__
    return observe(model, lambda: model.generate(**arguments)) | {"weights": kind}


class QuantizedWeightsTest(EcosystemTest):
    @parameterized.expand([(name, mode) for name in QUANTIZERS for mode in ("beam", "sample")])
    def test_weights(self, quantizer: str, mode: str):
        ours, _ = self.assert_prefilled_once(
            (BATCH, BATCH * SEQUENCES), "prompt_expansion=", generate, quantizer, mode
        )
        self.assertNotEqual(ours["weights"], "Parameter")
