# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""OpenVINO GenAI as a peer. Runs in the environment of `openvino.txt`."""

from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from .protocol import Call, Description, Generate, Setup, serve


# It knows only GGUF files whose weights are of 16 bits or fewer
PRECISION = "float16 weights, computed in float32"


def load(setup: Setup) -> tuple[Description, Generate]:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # across calls; the sequences of one call share the prompt's blocks
    scheduler.max_num_batched_tokens = setup.context  # the whole prompt at once
    scheduler.cache_size = 2  # GiB
    pipeline = openvino_genai.LLMPipeline(
        str(Path(setup.model) / "model-f16.gguf"),
        "CPU",
        scheduler_config=scheduler,
        ATTENTION_BACKEND="PA",
        INFERENCE_PRECISION_HINT="f32",
        KV_CACHE_PRECISION="f32",
        DYNAMIC_QUANTIZATION_GROUP_SIZE=0,
        INFERENCE_NUM_THREADS=setup.threads,
    )

    def generate(call: Call) -> list[list[int]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = call.new_tokens
        config.ignore_eos = True
        config.num_return_sequences = call.num_sequences
        if call.mode == "beam":
            config.num_beams = call.num_sequences
        else:
            config.do_sample, config.temperature, config.top_p = True, 1.0, 1.0
            config.rng_seed = call.seed
        prompt = np.array([call.prompt], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(prompt), openvino.Tensor(np.ones_like(prompt)))
        return pipeline.generate(inputs, config).tokens

    return Description(openvino_genai.__version__.split("-")[0], PRECISION), generate


if __name__ == "__main__":
    serve(load)
