# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Compiled forwards: the same tokens, and at most one graph more than upstream compiles."""

import torch
from parameterized import parameterized
from torch._dynamo.utils import counters

from tests.generation.runs import MODES
from tests.generation.tiny_models import build_inputs, build_model

from .observation import EcosystemTest, observe


BATCH, SEQUENCES, NEW_TOKENS = 1, 3, 8
# How graphs are made is looked at, not what is made of them
BACKEND = "eager"


def _replace_forward(model, **options) -> None:
    model.forward = torch.compile(model.forward, backend=BACKEND, **options)


def _compile_layers(model) -> None:
    for layer in model.model.layers:
        layer.compile(backend=BACKEND)


COMPILERS = {
    "default": _replace_forward,
    "fullgraph": lambda model: _replace_forward(model, fullgraph=True),
    "dynamic": lambda model: _replace_forward(model, dynamic=True),
    "in_place": lambda model: model.compile(backend=BACKEND),
    "layers": _compile_layers,
}


def generate(compiler: str, mode: str, cache_implementation: str | None) -> dict:
    torch.compiler.reset()
    counters.clear()
    model = build_model("llama")
    COMPILERS[compiler](model)
    arguments = {**build_inputs("llama", BATCH), **MODES[mode](SEQUENCES), "max_new_tokens": NEW_TOKENS}
    arguments["cache_implementation"] = cache_implementation
    seen = observe(model, lambda: model.generate(**arguments))
    return seen | {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


class CompiledForwardsTest(EcosystemTest):
    @parameterized.expand(
        [(compiler, "beam", None) for compiler in COMPILERS]
        + [("default", "sample", None), ("default", "beam", "static"), ("fullgraph", "beam", "static")]
    )
    def test_graphs(self, compiler: str, mode: str, cache_implementation: str | None):
        ours, theirs = self.assert_prefilled_once(
            (BATCH, BATCH * SEQUENCES), "prompt_expansion=", generate, compiler, mode, cache_implementation
        )
        self.assertGreater(theirs["graphs"], 0)
        self.assertLessEqual(ours["graphs"], theirs["graphs"] + 1)
        self.assertLessEqual(ours["breaks"], theirs["breaks"])
