# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Any sequence of operations on a layer that shares its prompt: it stays upstream's layer of the B * N rows."""

import copy
import unittest

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parameterized import parameterized

from transformers.cache_utils import CacheLayerMixin
from transformers.shared_prefix import SharedPrefixLayer

from .test_shared_prefix import shared_and_ordinary, tokens, update


ROWS = st.integers(0, 10**6)
OPERATIONS = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 3)),
    st.tuples(st.just("update"), st.just(1)),
    st.tuples(st.just("update without kwargs"), st.integers(1, 2)),
    st.tuples(st.just("reorder within items"), ROWS),
    st.tuples(st.just("reorder"), ROWS),
    st.tuples(st.just("crop"), st.integers(0, 4)),
    st.tuples(st.just("select"), ROWS),
    st.tuples(st.just("select by mask"), ROWS),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.just("move"), st.none()),
    st.tuples(st.just("copy"), st.none()),
    st.tuples(st.just("materialize"), st.none()),
    st.tuples(st.just("set"), st.none()),
    st.tuples(st.just("reset"), st.none()),
    st.tuples(st.just("record"), st.none()),
)


class RandomOperationsTest(unittest.TestCase):
    """Any sequence of operations, on a shared layer and on upstream's."""

    def assert_alike(self, shared: SharedPrefixLayer, ordinary: CacheLayerMixin) -> None:
        self.assertEqual(shared.get_seq_length(), ordinary.get_seq_length())
        self.assertEqual(shared.get_max_length(), ordinary.get_max_length())
        self.assertEqual(shared.is_initialized, ordinary.is_initialized)
        for query_length in (1, 3):
            self.assertEqual(shared.get_mask_sizes(query_length), ordinary.get_mask_sizes(query_length))
        for layer in (shared, shared.materialize()):
            for ours, theirs in ((layer.keys, ordinary.keys), (layer.values, ordinary.values)):
                self.assert_equal(ours, theirs)

    def assert_equal(self, ours: torch.Tensor | None, theirs: torch.Tensor | None) -> None:
        if ours is None or theirs is None:
            self.assertIs(ours, theirs)
        else:
            self.assertEqual(ours.shape, theirs.shape)
            self.assertTrue(torch.equal(ours, theirs))

    def apply(self, operation: str, argument, shared, ordinary, window: int | str | None):
        """Does the same to both. Returns them: some operations make new ones."""
        rows = None if ordinary.keys is None else ordinary.keys.shape[0]
        generator = torch.Generator().manual_seed(argument or 0)
        if operation.startswith("update"):
            new = tokens(rows or 4, argument, seed=int(ordinary.get_seq_length()))
            seen = update(shared, new) if operation == "update" else shared.update(*new)
            for ours, theirs in zip(seen, ordinary.update(*new), strict=True):
                self.assert_equal(ours, theirs)
        elif operation == "repeat":
            shared.batch_repeat_interleave(argument)
            ordinary.batch_repeat_interleave(argument)
        elif operation == "move":
            shared.offload()
            shared.prefetch()
        elif operation == "copy":
            shared = copy.deepcopy(shared)
        elif operation == "materialize":
            shared._materialize_rows()
        elif operation == "reset":
            shared.reset()
            ordinary.reset()
        elif operation == "record" and isinstance(window, int):
            shared.activate_past_recording()
            ordinary.activate_past_recording()
        elif operation == "crop":
            shared, ordinary = self.crop(argument, shared, ordinary)
        elif rows is None:
            pass
        elif operation == "reorder within items" and shared.prefix[0] is not None:
            items = torch.arange(rows) // shared.repeats * shared.repeats
            index = items + torch.randint(shared.repeats, (rows,), generator=generator)
            shared.reorder_cache(index)
            ordinary.reorder_cache(index)
        elif operation == "reorder":
            index = torch.randint(rows, (rows,), generator=generator)
            shared.reorder_cache(index)
            ordinary.reorder_cache(index)
        elif operation == "select":
            index = torch.randint(rows, (argument % 7 + 1,), generator=generator)
            shared.batch_select_indices(index)
            ordinary.batch_select_indices(index)
        elif operation == "select by mask":
            index = torch.arange(rows) % (argument % 3 + 1) == 0
            shared.batch_select_indices(index)
            ordinary.batch_select_indices(index)
        elif operation == "set":
            shared.keys, shared.values = ordinary.keys.clone(), ordinary.values.clone()
        return shared, ordinary

    def crop(self, count: int, shared, ordinary):
        if ordinary.keys is None or count > min(ordinary.keys.shape[2], ordinary.get_seq_length()):
            return shared, ordinary
        try:
            ordinary.crop(-count)
        except RuntimeError as error:
            with self.assertRaisesRegex(RuntimeError, "activate_past_recording"):
                shared.crop(-count)
            self.assertIn("activate_past_recording", str(error))
        else:
            shared.crop(-count)
        return shared, ordinary

    @parameterized.expand([(None,), (2,), (4,), (9,), ("static",)])
    def test_like_upstream(self, window):
        seen_operations = set()

        @settings(max_examples=150, deadline=None, derandomize=True)
        @given(
            st.integers(1, 3),
            st.integers(1, 4),
            st.integers(1, 9),
            st.integers(0, 6),
            st.lists(OPERATIONS, min_size=1, max_size=12),
        )
        def check(batch, repeats, length, suffix_length, operations):
            shared, ordinary = shared_and_ordinary(window, batch, repeats, length, suffix_length)
            self.assert_alike(shared, ordinary)
            for operation, argument in operations:
                shared, ordinary = self.apply(operation, argument, shared, ordinary, window)
                self.assert_alike(shared, ordinary)
                if shared.prefix[0] is not None:
                    seen_operations.add(operation)

        check()
        # Most operations must have been tried while there was a prefix
        self.assertGreaterEqual(len(seen_operations), 9, seen_operations)
