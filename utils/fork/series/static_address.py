# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Step 5: reordering static layers keeps the address of their buffers."""

from ..codemod import AddDefinitions, ReplaceStatement
from .step import Step


DESCRIPTION = """
Static layers mark their buffers as static addresses, and say that they have to be mutated in place, but `reorder_cache`
replaced them by new tensors. Beam search with a static cache moved them after each step. Where the number of rows stays,
they are reordered in place now.

The test compares addresses, and the contents with the rows that were asked for. What compiled decoding gains by it on a
GPU has not been measured: `pytest tests/utils/test_cache_utils.py -k keeps_its_addresses`
"""

REORDER = '''
def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
    """Reorders this layer's cache for beam search."""
    if self.get_seq_length() > 0:
        beam_idx = beam_idx.to(self.device)
        keys, values = self.keys.index_select(0, beam_idx), self.values.index_select(0, beam_idx)
        if keys.shape == self.keys.shape:
            # Has to be performed in-place, as we have static addresses that we need to keep
            self.keys.copy_(keys)
            self.values.copy_(values)
        else:
            self.keys, self.values = keys, values
'''

TEST = """
def test_reordered_static_cache_keeps_its_addresses(self):
    cache = StaticCache(config=LlamaConfig(num_hidden_layers=1), max_cache_len=4)
    keys, values = torch.rand(2, 3, 32, 2, 128, device=torch_device)
    cache.update(keys, values, 0)
    layer = cache.layers[0]
    addresses = layer.keys.data_ptr(), layer.values.data_ptr()
    beam_idx = torch.tensor([2, 0, 0], device=torch_device)
    cache.reorder_cache(beam_idx)
    self.assertEqual((layer.keys.data_ptr(), layer.values.data_ptr()), addresses)
    torch.testing.assert_close(layer.keys[:, :, :2], keys[beam_idx], rtol=0, atol=0)
    torch.testing.assert_close(layer.values[:, :, :2], values[beam_idx], rtol=0, atol=0)
"""

STEP = Step(
    subject="Cache: keep the address of static layers when they are reordered",
    description=DESCRIPTION,
    edits=[
        AddDefinitions(
            path="cache_utils.py",
            scope="StaticLayer",
            after="get_max_length",
            code=REORDER,
            reason="compiled decoding is tied to the address of the buffers",
        ),
        ReplaceStatement(
            path="cache_utils.py",
            scope="StaticIndexedLayer.reorder_cache",
            old="self.indexer_keys = self.indexer_keys.index_select(0, beam_idx.to(self.indexer_keys.device))",
            new="""
                indexer_keys = self.indexer_keys.index_select(0, beam_idx.to(self.indexer_keys.device))
                if indexer_keys.shape == self.indexer_keys.shape:
                    self.indexer_keys.copy_(indexer_keys)
                else:
                    self.indexer_keys = indexer_keys
            """,
            reason="compiled decoding is tied to the address of the buffers",
        ),
    ],
    test_edits=[
        AddDefinitions(
            path="tests/utils/test_cache_utils.py",
            scope="CacheTest",
            after="test_static_cache_mha_mqa_gqa",
            code=TEST,
            reason="the reproducer",
        ),
    ],
)
