# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Step 4: the encoder outputs that a caller passes in are not written to."""

from ..codemod import AddDefinitions, ReplaceExpression, ReplaceStatement
from .step import Step


DESCRIPTION = """
With beams or several returned sequences, `generate` expanded the `encoder_outputs` that it was given in place. They could
not be used a second time: the object had B * N rows after the first call. It is copied now (the tensors are not).

The test calls `generate` twice with the same object. Before, the first call left 6 rows in place of 2:
`pytest tests/generation/test_utils.py -k encoder_outputs_of_the_caller`
"""

TEST = """
def test_encoder_outputs_of_the_caller_stay_as_they_are(self):
    config = AutoConfig.for_model("t5", vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    model = AutoModelForSeq2SeqLM.from_config(config).to(torch_device).eval()
    input_ids = torch.tensor([[5, 6, 7], [8, 9, 10]], device=torch_device)
    encoder_outputs = model.get_encoder()(input_ids)
    kwargs = {"num_beams": 3, "max_new_tokens": 3, "decoder_start_token_id": 0, "eos_token_id": -1}
    expected = model.generate(input_ids, **kwargs)
    for _ in range(2):
        output = model.generate(encoder_outputs=encoder_outputs, **kwargs)
        self.assertEqual(encoder_outputs.last_hidden_state.shape[0], 2)
        self.assertListEqual(output.tolist(), expected.tolist())
"""

STEP = Step(
    subject="Generate: do not write to the encoder outputs that are passed in",
    description=DESCRIPTION,
    edits=[
        ReplaceExpression(
            path="generation/utils.py",
            scope="GenerationMixin._expand_inputs_for_generation",
            old='_expand_dict_for_generation(model_kwargs["encoder_outputs"])',
            new='_expand_dict_for_generation(copy.copy(model_kwargs["encoder_outputs"]))',
            reason="the object is the caller's",
        ),
        ReplaceStatement(
            path="generation/utils.py",
            scope="GenerationMixin.generate",
            old="""
                generation_mode_kwargs["prompt_inputs"] = {"input_ids": input_ids} | {
                    key: copy.copy(value) if key == "encoder_outputs" else value for key, value in model_kwargs.items()
                }
            """,
            new='generation_mode_kwargs["prompt_inputs"] = {"input_ids": input_ids, **model_kwargs}',
            reason="no copy is needed any more",
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
