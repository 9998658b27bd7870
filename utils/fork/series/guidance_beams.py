# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Step 3: the cache of classifier-free guidance follows the beams."""

from ..codemod import AddDefinitions, ReplaceStatement
from .step import Step


DESCRIPTION = """
`UnbatchedClassifierFreeGuidanceLogitsProcessor` keeps the tokens, the mask and the cache of the unconditional prompt for
each row. Beam search reorders the rows after each step, but not what the processor keeps, so that the unconditional scores
of a beam were those of another one. Processors with a method `reorder_cache` are told the new order now.

The test compares with a processor that keeps nothing and forwards the whole unconditional sequence in each step. Before,
tokens differed: `pytest tests/generation/test_utils.py -k guidance_follows_the_beams`
"""

REORDER = '''
def reorder_cache(self, beam_idx: torch.LongTensor):
    """Reorders the unconditional context for beam search, given the selected beam indices."""
    context = self.unconditional_context
    for name in ("input_ids", "attention_mask"):
        if isinstance(value := context[name], torch.Tensor):
            context[name] = value.index_select(0, beam_idx.to(value.device))
    cache = context["cache"]
    if hasattr(cache, "reorder_cache"):
        cache.reorder_cache(beam_idx)
'''

TEST = '''
def test_guidance_follows_the_beams(self):
    """The unconditional scores of a beam must be those of its own tokens, whatever beam was in its row before."""
    set_seed(0)
    config = AutoConfig.for_model("llama", vocab_size=32, hidden_size=32, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_config(config).to(torch_device).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    input_ids = torch.tensor([[5, 6, 7]] * 2, device=torch_device)
    negative_ids = torch.tensor([[8, 9]] * 8, device=torch_device)

    def recompute_guidance(ids, scores):
        unconditional = model(torch.cat([negative_ids, ids[:, input_ids.shape[1] :]], dim=1), use_cache=False)
        unconditional = unconditional.logits[:, -1].log_softmax(dim=-1)
        return 2.0 * (scores.log_softmax(dim=-1) - unconditional) + unconditional

    kwargs = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 8, "eos_token_id": -1}
    kwargs |= {"return_dict_in_generate": True, "output_scores": True}
    expected = model.generate(input_ids, logits_processor=[recompute_guidance], **kwargs)
    for use_cache in (True, False):
        output = model.generate(
            input_ids, guidance_scale=2.0, negative_prompt_ids=negative_ids, use_cache=use_cache, **kwargs
        )
        self.assertListEqual(output.sequences.tolist(), expected.sequences.tolist())
        torch.testing.assert_close(output.sequences_scores, expected.sequences_scores, rtol=1e-4, atol=1e-4)
'''

STEP = Step(
    subject="Generate: let the cache of classifier-free guidance follow the beams",
    description=DESCRIPTION,
    edits=[
        AddDefinitions(
            path="generation/logits_process.py",
            scope="UnbatchedClassifierFreeGuidanceLogitsProcessor",
            after="get_unconditional_logits",
            code=REORDER,
            reason="the context is kept for each row",
        ),
        ReplaceStatement(
            path="generation/utils.py",
            scope="GenerationMixin._beam_search",
            old="cur_len = cur_len + 1",
            new="""
                # Processors may keep a cache of their own
                beam_idx = self._flatten_beam_dim(running_beam_indices[..., cur_len - decoder_prompt_len])
                for processor in logits_processor:
                    if hasattr(processor, "reorder_cache"):
                        processor.reorder_cache(beam_idx)

                cur_len = cur_len + 1
            """,
            reason="what is kept for each row must be in the order of the next step",
        ),
    ],
    test_edits=[
        AddDefinitions(
            path="tests/generation/test_utils.py",
            scope="GenerationIntegrationTests",
            after="test_generation_config_defaults",
            code=TEST,
            reason="the reproducer",
        ),
    ],
)
