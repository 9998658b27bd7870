# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Step 6: a cached prefix with one row per prompt can be continued by several beams or sequences."""

from ..codemod import AddDefinitions, AddImport, ReplaceExpression, ReplaceStatement
from .step import Step


DESCRIPTION = """
A prefix that prompts have in common (a system prompt, a document) can be computed beforehand and passed to `generate` as
`cache`. With several beams or returned sequences, that cache had to hold B * N rows: one with a row per prompt failed in
the first forward. If it is a plain `DynamicCache` of keys and values, the rest of the prompt is now prefilled on B rows as
well, and the cache is expanded afterwards. A cache with B * N rows, and any other, is continued as before. An empty
`DynamicCache` that is passed in counts as a new one. The object that is passed in ends with B * N rows, as it always did.

The test compares with the whole prompt, and with a cache of B * N rows. Before, the cache with B rows raised an error:
`pytest tests/generation/test_utils.py -k prefix_cache_with_one_row_per_prompt`
"""

CAN_PREFILL_ONCE = {"path": "generation/utils.py", "scope": "GenerationMixin._can_prefill_once"}

TEST = """
def test_prefix_cache_with_one_row_per_prompt(self):
    set_seed(0)
    config = AutoConfig.for_model("llama", vocab_size=32, hidden_size=32, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_config(config).to(torch_device).eval()
    input_ids = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 10, 11]], device=torch_device)
    kwargs = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 4, "eos_token_id": -1}
    expected = model.generate(input_ids, **kwargs)
    rows = []
    model.register_forward_hook(lambda module, args, output: rows.append(output.logits.shape[0]))
    for repeats in (1, 3):
        cache = DynamicCache(config=config)
        prefix = input_ids[:, :3].repeat_interleave(repeats, dim=0)
        with torch.no_grad():
            model.model(prefix, cache=cache, use_cache=True)
        output = model.generate(input_ids, cache=cache, **kwargs)
        self.assertListEqual(output.tolist(), expected.tolist())
        self.assertEqual(rows[-4:], [2 * repeats, 6, 6, 6])
        self.assertEqual(cache.layers[0].keys.shape[0], 6)
"""

STEP = Step(
    subject="Generate: continue a cached prefix of one row per prompt with several sequences",
    description=DESCRIPTION,
    edits=[
        AddImport(
            path="generation/utils.py",
            after="..cache_utils",
            statement="from ..cache_utils import DynamicLayer",
            reason="rows can be told from keys and values",
        ),
        ReplaceStatement(
            **CAN_PREFILL_ONCE,
            old="""
                has_new_cache = not getattr(cache, "_is_user_defined", False) and all(
                    type(part) is DynamicCache and not part.offloading for part in caches
                )
            """,
            new="""
                # Of a cache that is passed in, only keys and values tell for how many rows it was made
                takes_prompts = all(type(part) is DynamicCache and not part.offloading for part in caches) and (
                    not getattr(cache, "_is_user_defined", False)
                    or all(
                        isinstance(layer, DynamicLayer)
                        and (layer.get_seq_length() == 0 or layer.keys.shape[0] == prompt_inputs["input_ids"].shape[0])
                        for part in caches
                        if part is not None
                        for layer in part.layers
                    )
                )
            """,
            reason="a cache that is passed in may have one row per prompt",
        ),
        ReplaceStatement(
            **CAN_PREFILL_ONCE,
            old="""
                inputs = {**prompt_inputs, **(prompt_inputs.get("encoder_outputs") or {}), "encoder_outputs": None}
            """,
            new="""
                inputs = {**prompt_inputs, **(prompt_inputs.get("encoder_outputs") or {})}
                inputs |= {"encoder_outputs": None, "cache": None}
            """,
            reason="a cache that is passed in is looked at apart",
        ),
        ReplaceExpression(
            **CAN_PREFILL_ONCE,
            old='"its cache is not a new `DynamicCache`"',
            new='"its cache is not a `DynamicCache` with a row per prompt"',
            reason="the reason that is logged",
        ),
        ReplaceExpression(
            **CAN_PREFILL_ONCE,
            old="not has_new_cache",
            new="not takes_prompts",
            reason="a cache that is passed in may have one row per prompt",
        ),
    ],
    test_edits=[
        ReplaceStatement(
            path="tests/generation/test_utils.py",
            scope="GenerationIntegrationTests.test_prefill_once_only_where_copies_are_equal",
            old="self.assertEqual(count_rows_of_prefill(cache=DynamicCache(config=config)), 3)",
            new="self.assertEqual(count_rows_of_prefill(cache=DynamicCache(config=config)), 1)",
            reason="a cache that is passed in can be prefilled once now",
        ),
        AddDefinitions(
            path="tests/generation/test_utils.py",
            scope="GenerationIntegrationTests",
            after="test_generation_config_defaults",
            code=TEST,
            reason="what didn't work",
        ),
    ],
)
