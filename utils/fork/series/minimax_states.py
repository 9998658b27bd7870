# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Step 2: the recurrent states of MiniMax follow the beams."""

from ..codemod import AddDefinitions
from .step import Step


DESCRIPTION = """
`MiniMaxCache` keeps the states of its linear attention layers beside its layers, and `reorder_cache` left them out: after
the first step of a beam search a beam went on with the states of whatever beam had been in its row.

The test generates with and without the cache. Before, tokens differed:
`pytest tests/models/minimax/test_modeling_minimax.py -k with_and_without_cache`
"""

REORDER = """
def reorder_cache(self, beam_idx: torch.LongTensor):
    super().reorder_cache(beam_idx)
    for layer_idx, states in enumerate(self.linear_cache):
        if len(states) > 0:
            self.linear_cache[layer_idx] = states.index_select(0, beam_idx.to(states.device))
"""

TEST = '''
def test_beam_search_with_and_without_cache(self):
    """Beam search must reorder the states of the linear attention layers too."""
    config, inputs_dict = self.prepare_config_and_inputs_for_generate()
    torch.manual_seed(0)
    model = MiniMaxForCausalLM(config).to(torch_device).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    kwargs = {**inputs_dict, "num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 8}
    kwargs |= {"output_scores": True, "return_dict_in_generate": True}
    outputs = [model.generate(**kwargs, use_cache=use_cache) for use_cache in (False, True)]
    self.assertListEqual(*(output.sequences.tolist() for output in outputs))
    torch.testing.assert_close(*(output.sequences_scores for output in outputs), rtol=1e-4, atol=1e-4)
'''

TEST_FILE = "tests/models/minimax/test_modeling_minimax.py"
STEP = Step(
    subject="MiniMax: reorder the states of linear attention layers in beam search",
    description=DESCRIPTION,
    edits=[
        AddDefinitions(
            path="models/minimax/modeling_minimax.py",
            scope="MiniMaxCache",
            after="batch_select_indices",
            code=REORDER,
            reason="the states beside the layers kept the order of the step before",
        ),
    ],
    test_edits=[
        AddDefinitions(
            path=TEST_FILE,
            scope="MiniMaxModelTest",
            after="test_load_balancing_loss",
            code=TEST,
            reason="the reproducer",
        ),
    ],
)
