# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Attention to a shared prefix is compared with the dullest code: every row gets its copy of the prefix. What the fast code
may not do on the way, to copy the prefix or to make anything of size N * L, is seen by watching the operators.
"""

import unittest
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from unittest import mock

import torch
from parameterized import parameterized
from torch.utils._python_dispatch import TorchDispatchMode

from transformers.integrations import shared_prefix_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.integrations.shared_prefix_attention import (
    SharedPrefix,
    reference_attention,
    share_prefix_in_eager,
    shared_prefix_attention_forward,
    takes_shared_prefix,
)


FUSED_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
CAUSAL, BIDIRECTIONAL = SimpleNamespace(is_causal=True), SimpleNamespace(is_causal=False)


class Operators(TorchDispatchMode):
    """Notes the operators that run, and the largest number of elements, or of floats, that one of them newly allocates."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()
        self.largest = self.largest_float = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.names.add(function.overloadpacket.__name__)
        given = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, tensor.numel())
                if tensor.is_floating_point():
                    self.largest_float = max(self.largest_float, tensor.numel())
        return result


@dataclass
class Case:
    """Random inputs. B batch items, N rows per item, H heads, K key/value heads, Q queries, L prefix, S suffix."""

    batch: int = 2
    repeats: int = 3
    heads: int = 4
    kv_heads: int = 2
    queries: int = 1
    prefix_length: int = 17
    suffix_length: int = 5
    head_dim: int = 8
    value_dim: int = 8
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self):
        self.generator = torch.Generator().manual_seed(self.seed)
        rows, (b, k, l) = self.rows, (self.batch, self.kv_heads, self.prefix_length)
        self.query = self.random(rows, self.heads, self.queries, self.head_dim)
        self.prefix_keys, self.prefix_values = (
            self.random(b, k, l, self.head_dim),
            self.random(b, k, l, self.value_dim),
        )
        self.key = self.random(rows, k, self.suffix_length, self.head_dim)
        self.value = self.random(rows, k, self.suffix_length, self.value_dim)

    @property
    def rows(self) -> int:
        return self.batch * self.repeats

    @property
    def length(self) -> int:
        return self.prefix_length + self.suffix_length

    @property
    def prefix(self) -> SharedPrefix:
        return SharedPrefix(self.prefix_keys, self.prefix_values, self.repeats)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def mask(self, kind: str) -> torch.Tensor | None:
        """Left padding, of another length for each item, and causal for several queries."""
        if kind == "none":
            return None
        visible = torch.ones(self.queries, self.length).tril(self.length - self.queries).bool()
        visible = visible.expand(self.rows, 1, -1, -1).clone()
        for item in range(self.batch):
            visible[item * self.repeats : (item + 1) * self.repeats, :, :, : 2 + 3 * item] = False
        if kind == "bool":
            return visible
        additive = torch.zeros(visible.shape, dtype=self.dtype).masked_fill(~visible, torch.finfo(self.dtype).min)
        return additive.expand(-1, self.heads, -1, -1) if kind == "additive per head" else additive

    def attend(self, mask=None, module=CAUSAL, **arguments):
        return shared_prefix_attention_forward(
            module, self.query, self.key, self.value, mask, shared_prefix=self.prefix, **arguments
        )

    def reference(self, mask=None, **arguments):
        return reference_attention(self.query, self.key, self.value, mask, self.prefix, **arguments)


class SharedPrefixAttentionTest(unittest.TestCase):
    def assert_close(self, ours: torch.Tensor, reference: torch.Tensor) -> None:
        self.assertEqual(ours.shape, reference.shape)
        difference = (ours - reference).abs()
        self.assertLess(difference.max().item(), 1e-5, f"the mean difference is {difference.mean().item()}")

    @parameterized.expand(
        product(
            [(1, 1), (1, 4), (3, 2)],
            [(4, 4), (4, 2), (6, 1)],
            [(1, 1, 1), (1, 17, 5), (3, 17, 5), (4, 8, 4)],
            ["none", "bool", "additive", "additive per head"],
        )
    )
    def test_same_as_reference(self, batch, heads, lengths, mask):
        (items, repeats), (heads, kv_heads), (queries, prefix_length, suffix_length) = batch, heads, lengths
        case = Case(items, repeats, heads, kv_heads, queries, prefix_length, suffix_length)
        mask = case.mask(mask) if prefix_length > 2 + 3 * items else None
        output, weights = case.attend(mask)
        self.assertEqual(output.shape, (items * repeats, queries, heads, 8))
        self.assertIsNone(weights)
        self.assert_close(output, case.reference(mask)[0])

    @parameterized.expand(product([1, 3], ["none", "bool", "additive"], [False, True]))
    def test_extra_arguments_same_as_reference(self, queries, mask, return_weights):
        case = Case(queries=queries)
        mask = case.mask(mask)
        rows_differ, rows_alike = case.random(case.rows, 4, queries, 22), case.random(1, 4, queries, 22)
        for arguments in (
            {"scaling": 0.7},
            {"softcap": 0.5},
            {"s_aux": case.random(4)},
            {"position_bias": rows_alike},
            {"position_bias": rows_differ},
            {"scaling": 1.0, "softcap": 2.0, "s_aux": case.random(4), "position_bias": rows_differ},
        ):
            with self.subTest(arguments=list(arguments)):
                expected, expected_weights = case.reference(mask, **arguments)
                changed = (expected - case.reference(mask)[0]).abs().max()
                self.assertGreater(changed.item(), 1e-3)
                output, weights = case.attend(mask, return_weights=return_weights, **arguments)
                self.assert_close(output, expected)
                if return_weights:
                    self.assert_close(weights, expected_weights)

    @parameterized.expand(product([1, 3], ["none", "bool", "additive"], [0, 5]))
    def test_weights_same_as_reference(self, queries, mask, suffix_length):
        case = Case(queries=queries, suffix_length=suffix_length)
        if suffix_length == 0 and queries > 1 and mask == "none":
            mask = "bool"
        output, weights = case.attend(case.mask(mask), return_weights=True)
        expected, expected_weights = case.reference(case.mask(mask))
        self.assert_close(output, expected)
        self.assert_close(weights, expected_weights)

    def test_values_of_another_size(self):
        case = Case(value_dim=5)
        self.assert_close(case.attend()[0], case.reference()[0])

    def test_bidirectional(self):
        case = Case(queries=3)
        expected = case.reference(is_causal=False)[0]
        self.assertGreater((expected - case.reference()[0]).abs().max().item(), 1e-2)
        self.assert_close(case.attend(module=BIDIRECTIONAL)[0], expected)
        self.assert_close(case.attend(is_causal=False)[0], expected)

    @parameterized.expand(product(["bool", "additive"], [1, 2]))
    def test_prefix_out_of_sight(self, mask, queries):
        """A chunk or a window may hide the whole prefix."""
        case = Case(queries=queries)
        mask = case.mask(mask)
        hidden = False if mask.dtype == torch.bool else -torch.inf
        mask[: case.repeats, :, :, : case.prefix_length] = hidden
        output, weights = case.attend(mask, return_weights=True)
        self.assertEqual(weights[: case.repeats, ..., : case.prefix_length].abs().max().item(), 0)
        self.assert_close(output, case.reference(mask)[0])
        self.assert_close(case.attend(mask)[0], case.reference(mask)[0])

    @parameterized.expand(product([1, 3], ["rows", "items", "one"], ["bool", "additive"]))
    def test_cross_attention(self, queries, mask_rows, mask):
        """The keys have B rows, the queries B * N, and there is no suffix."""
        case = Case(queries=queries, suffix_length=0)
        mask = case.mask(mask)
        if mask_rows == "one":
            mask[:] = mask[:1]
        expected = case.reference(mask)[0]
        mask = {"rows": mask, "items": mask[:: case.repeats], "one": mask[:1]}[mask_rows]
        arguments = (BIDIRECTIONAL, case.query, case.prefix_keys, case.prefix_values, mask)
        self.assert_close(shared_prefix_attention_forward(*arguments)[0], expected)
        self.assert_close(sdpa_attention_forward(*arguments)[0], expected)

    def test_rows_of_an_item_share_their_part_of_the_mask(self):
        """It is read from the first of them: the others are never looked at, and no copy of them is made."""
        case = Case(prefix_length=50, repeats=8)
        mask = case.mask("bool")
        changed = mask.clone()
        changed[1 : case.repeats, :, :, : case.prefix_length] = False
        self.assert_close(case.attend(changed)[0], case.reference(mask)[0])
        self.assertTrue(changed[case.repeats - 1, :, :, : case.prefix_length].logical_not().all())

    @parameterized.expand([("none",), ("bool",), ("additive",)])
    def test_nothing_of_size_n_times_l(self, mask):
        case = Case(batch=2, repeats=16, prefix_length=300)
        mask = case.mask(mask)
        with Operators() as operators:
            case.attend(mask)
        self.assertIn(FUSED_KERNEL, operators.names)
        self.assertLess(operators.largest, case.prefix_keys.numel())
        self.assertLess(operators.largest, case.rows * case.prefix_length)
        with Operators() as operators:
            case.reference(mask)
        self.assertGreaterEqual(operators.largest, case.repeats * case.prefix_keys.numel())

    @parameterized.expand(product([1, 3], ["none", "bool", "additive"]))
    def test_without_the_fused_kernel(self, queries, mask):
        """Two matrix products, on every device: no copy of the prefix, and scores of size N * (L + S) at most."""
        case = Case(queries=queries, prefix_length=100, head_dim=32, value_dim=32)
        mask = case.mask(mask)
        with mock.patch.object(shared_prefix_attention, "_can_fuse", return_value=False), Operators() as operators:
            output, _ = case.attend(mask)
        self.assertNotIn(FUSED_KERNEL, operators.names)
        length = case.prefix_length + case.key.shape[2]
        self.assertLessEqual(operators.largest, case.rows * case.heads * queries * length)
        self.assert_close(output, case.reference(mask)[0])

    @parameterized.expand(
        product([torch.bfloat16, torch.float16], [(20, 20), (100, 8), (700, 3)], ["none", "additive"])
    )
    def test_error_in_16_bits(self, dtype, lengths, mask):
        """Against float64: at most that of torch's attention, which upstream calls, on copied keys and values."""
        for seed in range(3):
            case = Case(4, 4, 4, 2, 1, *lengths, head_dim=64, value_dim=64, dtype=dtype, seed=seed)
            mask_tensor = case.mask(mask)
            copied = [
                torch.cat([prefix.repeat_interleave(case.repeats, dim=0), suffix], dim=2)
                for prefix, suffix in ((case.prefix_keys, case.key), (case.prefix_values, case.value))
            ]
            module = SimpleNamespace(is_causal=True, num_key_value_groups=2)
            upstream, _ = sdpa_attention_forward(module, case.query, *copied, mask_tensor)
            ours, _ = case.attend(mask_tensor)
            self.assertEqual(ours.dtype, dtype)
            exact_mask = None if mask_tensor is None else mask_tensor == 0
            exact, _ = reference_attention(
                case.query.double(),
                case.key.double(),
                case.value.double(),
                exact_mask,
                SharedPrefix(case.prefix_keys.double(), case.prefix_values.double(), case.repeats),
            )
            our_error, upstream_error = ((output.double() - exact).abs() for output in (ours, upstream))
            self.assertLessEqual(our_error.max().item(), upstream_error.max().item())
            self.assertLessEqual(our_error.mean().item(), upstream_error.mean().item())

    def test_under_autocast(self):
        """As in the type of the inputs: what a module hands over was cast by its projections."""
        case = Case(dtype=torch.bfloat16)
        expected, _ = case.attend()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output, _ = case.attend()
        self.assertTrue(torch.equal(output, expected))

    def test_gradients(self):
        case = Case(dtype=torch.float64)
        inputs = [case.query, case.key, case.value, case.prefix_keys, case.prefix_values]
        gradients = []
        for attend in (case.attend, case.reference):
            for tensor in inputs:
                tensor.requires_grad_().grad = None
            attend()[0].square().sum().backward()
            gradients.append([tensor.grad.clone() for tensor in inputs])
        for ours, reference in zip(*gradients, strict=True):
            self.assert_close(ours, reference)

    def test_wrong_arguments(self):
        case = Case()
        with self.assertRaisesRegex(ValueError, "`dropout` must be 0 .* but is 0.1"):
            case.attend(dropout=0.1)
        with self.assertRaisesRegex(ValueError, "`attention_mask` must have 22 columns, .* but has 5"):
            case.attend(case.mask("bool")[..., case.prefix_length :])
        case.query = case.query[:5]
        with self.assertRaisesRegex(ValueError, r"`query` must have 2 \* 3 rows, .* but has 5"):
            case.attend()


class ChunksTest(SharedPrefixAttentionTest):
    """All of that, where the fused kernel reads the prefix in chunks, as it does for long prompts and many threads."""

    def setUp(self):
        for target, name, value in (
            (shared_prefix_attention, "MINIMAL_CHUNK", 4),
            (shared_prefix_attention.torch, "get_num_threads", lambda: 12),
        ):
            patch = mock.patch.object(target, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def test_chunks_are_views(self):
        """Of equal length, and one more with what is left over."""
        case, calls = Case(batch=2, prefix_length=17), []
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

        def record(query, key, value, **arguments):
            calls.append((key.shape, key.untyped_storage().data_ptr()))
            return kernel(query, key, value, **arguments)

        with mock.patch.object(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", record):
            output, _ = case.attend(case.mask("bool"))
        heads, size = case.prefix_keys.shape[1], case.prefix_keys.shape[3]
        storage = case.prefix_keys.untyped_storage().data_ptr()
        self.assertEqual(calls, [((2 * heads, 4, 4, size), storage), ((2 * heads, 1, 1, size), storage)])
        self.assert_close(output, case.reference(case.mask("bool"))[0])

    def test_number_of_chunks(self):
        """Two tasks for each thread, of 4 tokens at least."""
        count = shared_prefix_attention._count_chunks
        self.assertEqual([count(3, 100), count(24, 100), count(25, 100), count(3, 11), count(3, 3)], [8, 1, 1, 2, 1])


class DispatchTest(unittest.TestCase):
    """The attention functions that models call find the prefix, and do what they always did without one."""

    def test_sdpa(self):
        case = Case()
        mask, prefix = case.mask("bool"), case.prefix
        arguments = {"scaling": 0.5, "shared_prefix": prefix, "sliding_window": None}
        output, weights = sdpa_attention_forward(CAUSAL, case.query, case.key, case.value, mask, **arguments)
        self.assertTrue(prefix.is_read)
        self.assertIsNone(weights)
        self.assertLess((output - case.reference(mask, scaling=0.5)[0]).abs().max().item(), 1e-5)

    def test_eager(self):
        case = Case()
        mask, prefix = case.mask("additive"), case.prefix
        eager = mock.Mock()
        attention = share_prefix_in_eager(eager)
        output, weights = attention(
            CAUSAL,
            case.query,
            case.key,
            case.value,
            attention_mask=mask,
            dropout=0.0,
            scaling=0.5,
            shared_prefix=prefix,
        )
        eager.assert_not_called()
        self.assertTrue(prefix.is_read)
        expected, expected_weights = case.reference(mask, scaling=0.5)
        self.assertLess((output - expected).abs().max().item(), 1e-5)
        self.assertLess((weights - expected_weights).abs().max().item(), 1e-5)
        attention(CAUSAL, case.query, case.key, case.value, mask, dropout=0.0, scaling=0.5)
        eager.assert_called_once_with(CAUSAL, case.query, case.key, case.value, mask, dropout=0.0, scaling=0.5)

    def test_what_is_no_case_for_it(self):
        case = Case(suffix_length=0, queries=2)
        query, key, mask = case.query, case.prefix_keys, case.mask("bool")
        self.assertTrue(takes_shared_prefix(BIDIRECTIONAL, query, key, None, {}))
        self.assertTrue(takes_shared_prefix(CAUSAL, query, key, mask, {}))
        self.assertTrue(takes_shared_prefix(CAUSAL, query[:, :, :1], key, None, {}))
        self.assertFalse(
            takes_shared_prefix(CAUSAL, query, key, None, {}), "torch's causal mask starts at the first key"
        )
        self.assertFalse(takes_shared_prefix(BIDIRECTIONAL, query, key, None, {}, dropout=0.1), "training")
        self.assertFalse(takes_shared_prefix(BIDIRECTIONAL, query[:2], key, None, {}), "as many rows")
        self.assertFalse(takes_shared_prefix(BIDIRECTIONAL, query[:1], key, None, {}), "learned queries")
        self.assertFalse(takes_shared_prefix(BIDIRECTIONAL, query[:5], key, None, {}), "no multiple")
