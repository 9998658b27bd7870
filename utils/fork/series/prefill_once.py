# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Step 1: prompts are prefilled once where decoding needs nothing of them but logits and a plain dynamic cache."""

from ..codemod import AddDefinitions, AddParameter, AddToDocstring, RedirectCall, ReplaceStatement
from .step import Step


DESCRIPTION = """
With `num_beams` or `num_return_sequences`, `generate` repeats each of B prompts N times and forwards B * N rows, though
the N rows of a prompt are equal until the first token is chosen. Where that is safe, sampling and beam search now forward
B rows, and repeat the last logits and the cache for the N copies. Part of #27449.

`generate` keeps the inputs that it had before the expansion and hands them, as `prompt_inputs`, to decoding methods that
have such a parameter, as it does with `inputs_tensor`. Custom decoding loops, overridden `_sample` and `_beam_search`, and
whoever calls them without `prompt_inputs`, get what they always got. `_prefill` stays as it is.

Copies are forwarded as before, and the log says why at level info, unless: the cache is a new `DynamicCache` (or two in an
`EncoderDecoderCache`); the model is the library's own, in evaluation mode, with the methods of `GenerationMixin` and
without hooks in its modules; the prompt is text, and each input has one row per prompt; no attentions or hidden states are
returned. Static, quantized and offloaded caches, images and sound are left to other changes.

What is gained, in seconds of CPU time on one core of an AMD EPYC (float32, 2,048 tokens, random weights in the size of
SmolLM2-135M, medians of 3 interleaved runs; no GPU has been measured):

| beams | before | after |
|---|---|---|
| 1 | 7.7 | 7.6 |
| 6 | 47.1 | 12.5 |

```python
import time
import torch
from transformers import AutoConfig, AutoModelForCausalLM

config = AutoConfig.for_model("llama", vocab_size=49152, hidden_size=576, intermediate_size=1536,
                              num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3)
model = AutoModelForCausalLM.from_config(config).eval()
prompt = torch.randint(3, 49152, (1, 2048))
for num_beams in (1, 6):
    start = time.process_time()
    model.generate(prompt, num_beams=num_beams, max_new_tokens=15, min_new_tokens=15, do_sample=False)
    print(num_beams, "beams:", round(time.process_time() - start, 1), "s of CPU time", flush=True)
```

Tests: `GenerationTesterMixin.test_prefill_once` compares every model with itself, all copies forwarded; a second test has
the cases that must fall back. Beyond these, sampling, beam search and beam sampling were compared with the release, for
all architectures of the auto mappings that could be built tiny (443 cases of text, images and sound, 1,325 runs): the same
tokens in all of them, and scores within 1e-5; 903 runs forwarded each prompt once. Rounding may differ in the last digits,
as for any other batch size.
"""

PARAMETER_DOC = """
    prompt_inputs (`dict`, *optional*):
        The inputs as they were before `generate` expanded them, so that each prompt can be prefilled once.
"""

METHODS = '''
def _prefill_once(
    self: "GenerativePreTrainedModel",
    input_ids: torch.LongTensor,
    generation_config: GenerationConfig,
    model_kwargs: dict,
    prompt_inputs: dict | None,
    is_first_iteration: bool = True,
):
    """
    Perform the prefill stage on one row per prompt, and repeat its logits and its cache for the copies of the prompt
    in `input_ids`. Without `prompt_inputs`, what `generate` has expanded, or where something stands in the way, the
    copies are forwarded instead.
    """
    if prompt_inputs is None or not self._can_prefill_once(generation_config, model_kwargs, prompt_inputs):
        return self._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=is_first_iteration)

    prompt_kwargs = {**model_kwargs, **prompt_inputs}
    prompt_ids = prompt_kwargs.pop("input_ids")
    outputs = self._prefill(prompt_ids, generation_config, prompt_kwargs, is_first_iteration=is_first_iteration)
    # Not every model returns the cache that it fills
    cache = outputs.get("cache", model_kwargs["cache"])
    expand_size = input_ids.shape[0] // prompt_ids.shape[0]
    outputs.logits = outputs.logits[:, -1:].repeat_interleave(expand_size, dim=0)
    cache.reorder_cache(torch.arange(input_ids.shape[0], device=input_ids.device) // expand_size)
    return outputs

def _can_prefill_once(
    self: "GenerativePreTrainedModel", generation_config: GenerationConfig, model_kwargs: dict, prompt_inputs: dict
) -> bool:
    """Return whether the copies of a prompt are equal and need of its prefill only the last logits and the cache."""
    cache = model_kwargs.get("cache")
    caches = [cache]
    if type(cache) is EncoderDecoderCache:
        caches = [cache.self_attention_cache, cache.cross_attention_cache]
    has_new_cache = not getattr(cache, "_is_user_defined", False) and all(
        type(part) is DynamicCache and not part.offloading for part in caches
    )
    # A model with its own version of one of these may read, or keep for decoding, something else
    methods = ("generate", "_prefill", "_reorder_cache", "_setup_cache", "_prepare_cache_for_generation")
    methods += ("_expand_inputs_for_generation", "_update_model_kwargs_for_generation")
    has_own_method = any(
        vars(self).get(name, getattr(type(self), name, None)) is not getattr(GenerationMixin, name, None)
        for name in methods
    )
    modules = list(self.modules())
    hooks = [hook for m in modules[1:] for hook in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())]
    expert_capacity = getattr(self.config, "moe_eval_capacity_token_fraction", 1)
    batch_size = prompt_inputs["input_ids"].shape[0]
    inputs = {**prompt_inputs, **(prompt_inputs.get("encoder_outputs") or {}), "encoder_outputs": None}
    mm_inputs = [inputs.get(key) for key in MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL]

    def has_row_per_prompt(name, value):
        if isinstance(value, torch.Tensor):
            batch_dim = 1 if name == "position_ids" and value.ndim == 3 else 0
            return value.ndim > batch_dim and value.shape[batch_dim] == batch_size
        return not value or isinstance(value, (bool, int, float, str))

    obstacles = {
        "its cache is not a new `DynamicCache`": not has_new_cache,
        "it does not take a cache": "cache" not in inspect.signature(self.forward).parameters,
        "it has generation methods of its own": has_own_method or self.is_custom_code(),
        "its modules have hooks": any(not str(hook.__module__).startswith("transformers.") for hook in hooks),
        "it is in training mode": any(module.training for module in modules),
        "the capacity of its experts depends on the batch": expert_capacity < 1,
        "it reads more than text": any(isinstance(value, torch.Tensor) or value for value in mm_inputs),
        "inputs have other rows than prompts": not all(has_row_per_prompt(*item) for item in inputs.items()),
        "token healing may change each copy": generation_config.token_healing,
        "attentions are returned": generation_config.output_attentions,
        "hidden states are returned": generation_config.output_hidden_states,
    }
    obstacle = next((obstacle for obstacle, is_there in obstacles.items() if is_there), None)
    if obstacle is not None:
        logger.info_once(f"{type(self).__name__} forwards every copy of a prompt, because {obstacle}.")
    return obstacle is None
'''


def decode_after_prefill_once(method: str) -> list:
    """The edits of a decoding method."""
    scope = {"path": "generation/utils.py", "scope": f"GenerationMixin.{method}"}
    return [
        AddParameter(
            **scope,
            parameter="prompt_inputs: dict | None = None",
            reason="`generate` tells which rows are copies; whoever else calls the method has rows of its own",
        ),
        AddToDocstring(
            **scope, before="model_kwargs:", text=PARAMETER_DOC, is_entry=False, reason="a parameter is documented"
        ),
        RedirectCall(
            **scope,
            call="self._prefill",
            to="self._prefill_once",
            arguments={"prompt_inputs": "prompt_inputs"},
            reason="the prompt is forwarded once",
        ),
    ]


EDITS = [
    ReplaceStatement(
        path="generation/utils.py",
        scope="GenerationMixin.generate",
        old="""
            input_ids, model_kwargs = self._expand_inputs_for_generation(
                input_ids=input_ids,
                expand_size=max(generation_config.num_beams, generation_config.num_return_sequences),
                is_encoder_decoder=self.config.is_encoder_decoder,
                **model_kwargs,
            )
        """,
        new="""
            # Decoding methods that prefill each prompt once also need the inputs that aren't expanded
            expand_size = max(generation_config.num_beams, generation_config.num_return_sequences)
            if expand_size > 1 and "prompt_inputs" in inspect.signature(decoding_method).parameters.keys():
                # The expansion writes to the outputs of the encoder
                generation_mode_kwargs["prompt_inputs"] = {"input_ids": input_ids} | {
                    key: copy.copy(value) if key == "encoder_outputs" else value for key, value in model_kwargs.items()
                }
            input_ids, model_kwargs = self._expand_inputs_for_generation(
                input_ids=input_ids,
                expand_size=expand_size,
                is_encoder_decoder=self.config.is_encoder_decoder,
                **model_kwargs,
            )
        """,
        reason="which rows are copies of one prompt is known here, and nowhere else",
    ),
    *decode_after_prefill_once("_sample"),
    *decode_after_prefill_once("_beam_search"),
    AddDefinitions(
        path="generation/utils.py",
        scope="GenerationMixin",
        after="_prefill",
        code=METHODS,
        reason="the prefill of prompts, and the decision on it",
    ),
]

MIXIN_TEST = """
@pytest.mark.generate
def test_prefill_once(self):
    for model_class in self.all_generative_model_classes:
        config, inputs_dict = self.prepare_config_and_inputs_for_generate()
        set_config_for_less_flaky_test(config)
        model = model_class(config).to(torch_device).eval()
        set_model_for_less_flaky_test(model)
        rows = []
        model.register_forward_hook(lambda module, args, output: rows.append(output.logits.shape[0]))
        for generate, kwargs in (
            (self._sample_generate, {"num_return_sequences": 3}),
            (self._beam_search_generate, {"beam_kwargs": {"num_beams": 3}}),
            (self._beam_sample_generate, {"beam_kwargs": {"num_beams": 3}}),
        ):
            kwargs.update(output_scores=True, return_dict_in_generate=True)
            with patch.object(model_class, "_can_prefill_once", return_value=False):
                expected_output = generate(model, inputs_dict, **kwargs)
            expected_rows, rows[:] = rows.copy(), []
            assert_similar_generate_outputs(expected_output, generate(model, inputs_dict, **kwargs))
            output_rows, rows[:] = rows.copy(), []
            self.assertEqual(output_rows[1:], expected_rows[1:])
            if output_rows[:1] == expected_rows[:1]:
                break  # the model forwards every copy, and may not support beams
            self.assertEqual(3 * output_rows[0], expected_rows[0])
"""

FALLBACK_TEST = """
def test_prefill_once_only_where_copies_are_equal(self):
    config = AutoConfig.for_model("llama", vocab_size=32, hidden_size=32, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_config(config).to(torch_device).eval()
    rows = []
    model.register_forward_hook(lambda module, args, output: rows.append(output.logits.shape[0]))

    def count_rows_of_prefill(**kwargs):
        model.generate(torch.tensor([[5, 6]], device=torch_device), num_beams=3, max_new_tokens=2, **kwargs)
        return rows[-2]

    self.assertEqual(count_rows_of_prefill(), 1)
    self.assertEqual(count_rows_of_prefill(cache=DynamicCache(config=config)), 3)
    for kwargs in ({"use_cache": False}, {"cache_implementation": "static"}, {"output_attentions": True}):
        self.assertEqual(count_rows_of_prefill(**kwargs), 3)
    with patch.object(model, "_update_model_kwargs_for_generation", model._update_model_kwargs_for_generation):
        self.assertEqual(count_rows_of_prefill(), 3)
    model.model.train()
    self.assertEqual(count_rows_of_prefill(), 3)
    model.eval().model.register_forward_hook(lambda module, args, output: None)
    self.assertEqual(count_rows_of_prefill(), 3)
"""


STEP = Step(
    subject="Generate: prefill each prompt once for all of its beams and sequences",
    description=DESCRIPTION,
    edits=EDITS,
    test_edits=[
        AddDefinitions(
            path="tests/generation/test_utils.py",
            scope="GenerationTesterMixin",
            after="test_sample_generate_dict_output",
            code=MIXIN_TEST,
            reason="every model is compared with itself, and every model that comes",
        ),
        AddDefinitions(
            path="tests/generation/test_utils.py",
            scope="GenerationIntegrationTests",
            after="test_generation_config_defaults",
            code=FALLBACK_TEST,
            reason="what is expected to be prefilled once is, and what isn't is not",
        ),
    ],
)
