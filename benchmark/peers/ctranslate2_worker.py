# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""CTranslate2 as a peer. Runs in the environment of `ctranslate2.txt`."""

import json
from pathlib import Path

import ctranslate2

from .protocol import Call, Description, Generate, Setup, serve


def convert(model: str, folder: Path) -> Path:
    """Returns the folder of the converted model, which is made once."""
    if not (folder / "model.bin").exists():
        from ctranslate2.converters import TransformersConverter

        TransformersConverter(model).convert(str(folder), quantization="float32", force=True)
    return folder


def load(setup: Setup) -> tuple[Description, Generate]:
    folder = convert(setup.model, Path(setup.cache) / "model")
    generator = ctranslate2.Generator(
        str(folder), device="cpu", compute_type="float32", inter_threads=1, intra_threads=setup.threads
    )
    # In the order of the ids
    names = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))

    def generate(call: Call) -> list[list[int]]:
        ctranslate2.set_random_seed(call.seed)
        if call.mode == "beam":
            search = {"beam_size": call.num_sequences}
        else:
            search = {"beam_size": 1, "sampling_topk": 0, "sampling_temperature": 1.0}
        [result] = generator.generate_batch(
            [[names[token] for token in call.prompt]],
            num_hypotheses=call.num_sequences,
            max_length=call.new_tokens,
            min_length=call.new_tokens,
            include_prompt_in_result=False,
            **search,
        )
        return result.sequences_ids

    return Description(ctranslate2.__version__, generator.compute_type), generate


if __name__ == "__main__":
    serve(load)
