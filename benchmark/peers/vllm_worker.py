# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""vllm on the CPU as a peer. Runs in the environment of `vllm.txt`."""

import vllm
from vllm.sampling_params import BeamSearchParams, SamplingParams

from .protocol import Call, Description, Generate, Setup, serve


def load(setup: Setup) -> tuple[Description, Generate]:
    engine = vllm.LLM(
        setup.model,
        dtype="float32",
        max_model_len=setup.context,
        max_num_seqs=setup.num_sequences,
        max_logprobs=2 * setup.num_sequences,  # what its beam search asks for
        enforce_eager=True,
        # Its beam search sends each step as new requests, which find the prompt only in this cache
        enable_prefix_caching=True,
        disable_log_stats=True,
    )

    def generate(call: Call) -> list[list[int]]:
        engine.reset_prefix_cache()  # of the calls before
        prompt = {"prompt_token_ids": call.prompt}
        if call.mode == "beam" and call.num_sequences > 1:
            beams = BeamSearchParams(beam_width=call.num_sequences, max_tokens=call.new_tokens, ignore_eos=True)
            [result] = engine.beam_search([prompt], beams)
            return [sequence.tokens[len(call.prompt) :] for sequence in result.sequences]
        sampling = SamplingParams(
            n=call.num_sequences,
            temperature=0.0 if call.mode == "beam" else 1.0,
            seed=call.seed,
            max_tokens=call.new_tokens,
            ignore_eos=True,
        )
        [result] = engine.generate([prompt], sampling, use_tqdm=False)
        return [list(output.token_ids) for output in result.outputs]

    return Description(vllm.__version__, "float32"), generate


if __name__ == "__main__":
    serve(load)
