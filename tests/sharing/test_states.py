# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""States of segments against the tensor of all rows: what is computed on segments, what needs all rows, and what is written."""

import copy
import gc
import io
import operator
import pickle
import threading
import unittest
import weakref
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from parameterized import parameterized

from transformers.prefix_sharing import SegmentedStates, map_segments, private_index
from transformers.prefix_sharing.attention import StepMemo
from transformers.prefix_sharing.states import BeamMemo, Origin

from .test_attention import Operators


HEADS, SIZE = 2, 4
# R, and (R_i, L_i) of each segment
SEGMENTS = {
    "a prompt per item": (6, ((2, 5),)),
    "one row for the batch": (6, ((1, 5),)),
    "prompts and suffixes": (6, ((2, 5), (6, 3))),
    "a common prefix, prompts and suffixes": (12, ((1, 4), (3, 2), (12, 3))),
}
TOLERANCE = {"atol": 1e-5, "rtol": 0}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_states(kind: str = "prompts and suffixes", seed: int = 0) -> tuple[SegmentedStates, torch.Tensor]:
    """States, and the tensor that they stand for: joined by hand, in a memory of its own."""
    rows, segments = SEGMENTS[kind]
    tensors = [random(held, HEADS, length, SIZE, seed=seed + i) for i, (held, length) in enumerate(segments)]
    states = SegmentedStates(tensors, rows, Origin(StepMemo(), BeamMemo()))
    return states, torch.cat([tensor[torch.arange(rows) * len(tensor) // rows] for tensor in tensors], dim=2)


def joined(value: Any) -> Any:
    """The tensor of all rows. Asks for it without a trace, so that what a test looks at next stays as it is."""
    if isinstance(value, SegmentedStates):
        settled = value.settle()
        return settled.joined() if isinstance(settled, SegmentedStates) else settled
    return [joined(item) for item in value] if isinstance(value, (list, tuple)) else value


def repeat_kv(x: Any) -> Any:
    rows, heads, length, size = x.shape
    return x[:, :, None, :, :].expand(rows, heads, 3, length, size).reshape(rows, heads * 3, length, size)


def merge_heads(x: Any) -> Any:
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


VIEWS: dict[str, Callable[[Any], Any]] = {
    "transpose": lambda x: x.transpose(1, 2),
    "transpose of the last": lambda x: x.transpose(-2, -1),
    "transpose of rows": lambda x: torch.transpose(x, 0, 1),
    "swapaxes": lambda x: torch.swapaxes(x, 1, 3),
    "swapdims": lambda x: x.swapdims(2, 1),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "permute by a tuple": lambda x: torch.permute(x, (0, -1, 1, 2)),
    "unsqueeze": lambda x: x.unsqueeze(2),
    "unsqueeze the last": lambda x: x.unsqueeze(-1),
    "unsqueeze the first": lambda x: x.unsqueeze(0),
    "expand": lambda x: x.unsqueeze(2).expand(-1, -1, 3, -1, -1),
    "expand by a size": lambda x: x[:, :1].expand(x.shape[0], 3, x.shape[2], SIZE),
    "view": lambda x: x.view(x.shape[0], HEADS, -1, 2, SIZE // 2),
    "reshape": lambda x: x.transpose(1, 2).reshape(x.shape[0], -1, HEADS * SIZE),
    "reshape by a tuple": lambda x: torch.reshape(x, (-1, x.shape[2], SIZE)),
    "merged heads": lambda x: merge_heads(x),
    "heads merged and divided": lambda x: merge_heads(x).view(x.shape[0], HEADS, x.shape[2], SIZE),
    "merged heads, transposed": lambda x: merge_heads(x).transpose(1, 2),
    "flatten": lambda x: x.flatten(0, 1),
    "flatten the last": lambda x: x.transpose(1, 2).flatten(start_dim=2),
    "unflatten": lambda x: x.unflatten(-1, (2, -1)),
    "repeated heads": repeat_kv,
    "repeated heads, transposed": lambda x: repeat_kv(x).transpose(2, 3),
    "slice": lambda x: x[:, :, 1:-1],
    "slice of a prompt": lambda x: x[:, :, :4],
    "slice of the last": lambda x: x[..., 1:3],
    "slice of what isn't there": lambda x: x[:, :, 90:],
    "a head": lambda x: x[:, 1],
    "a head from behind": lambda x: x[:, -1, 1:],
    "None": lambda x: x[:, None, :, :, None],
    "slice of heads": lambda x: x[:, 1:],
    "all": lambda x: x[:],
    "detach": lambda x: x.detach(),
    "chunk": lambda x: x.chunk(2, dim=-1),
    "split": lambda x: torch.split(x, 3, dim=3),
    "split by sizes": lambda x: x.split([1, 3], dim=-1),
    "split_with_sizes": lambda x: torch.split_with_sizes(x, [1, 3], dim=-1),
    "tensor_split": lambda x: x.tensor_split(2, dim=1),
    "contiguous": lambda x: x.contiguous(),
}
ALIKE: dict[str, Callable[[Any], Any]] = {
    "float": lambda x: x.double().float(),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "to": lambda x: x.to(torch.float64),
    "to by a keyword": lambda x: x.to(dtype=torch.float64, device="cpu"),
    "type": lambda x: x.type(torch.float64),
    "type_as": lambda x: x.type_as(torch.zeros(1, dtype=torch.float64)),
    "clone": lambda x: torch.clone(x),
    **{
        name: partial(lambda name, x: getattr(torch, name)(x), name)
        for name in ("neg", "exp", "abs", "tanh", "relu", "sigmoid", "square")
    },
    **{name: partial(lambda name, x: getattr(F, name)(x), name) for name in ("silu", "gelu", "softplus")},
    "sqrt": lambda x: x.abs().sqrt(),
    "rsqrt": lambda x: (x * x).add(1).rsqrt(),
    "pow": lambda x: x.pow(2) + x**3,
    "clamp": lambda x: x.clamp(min=0, max=1),
    "numbers": lambda x: 3 - (2 * x + 1 - x / 4) * 2 + (1 + x),
    "negative": lambda x: -x,
    "vector": lambda x: x * random(SIZE) + random(SIZE, seed=1),
    "vector on the left": lambda x: random(SIZE) * x - random(SIZE, seed=1) - x,
    "heads": lambda x: x.mul(random(1, HEADS, 1, 1)),
    "with itself": lambda x: torch.add(x, x * 2, alpha=3).div(2),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "functions": lambda x: torch.subtract(torch.multiply(x, 2), torch.divide(x, 3)).true_divide(7),
    "linear": lambda x: F.linear(x, random(7, SIZE)),
    "linear with a bias": lambda x: F.linear(x.transpose(1, 2), random(3, SIZE), bias=random(3)),
    "repeat": lambda x: x.repeat(1, 3, 1, 1),
    "repeat of the last": lambda x: x.repeat((1, 1, 1, 2)),
    "repeat_interleave of heads": lambda x: x.repeat_interleave(3, dim=1),
    "cat of the last": lambda x: torch.cat([x, -x], dim=-1),
    "concat of heads": lambda x: torch.concat((x[:, :1], x), dim=1),
    "stack": lambda x: torch.stack([x, x * 2], dim=-1),
    "rotated": lambda x: torch.cat((-x[..., SIZE // 2 :], x[..., : SIZE // 2]), dim=-1),
    "map_segments": lambda x: map_segments(lambda a, b: (a @ random(SIZE, 3), b), x, x),
}
ROWS_AND_TOKENS: dict[str, Callable[[Any], Any]] = {
    "cat": lambda x: torch.cat([x, random(x.shape[0], HEADS, 2, SIZE, seed=8)], dim=2),
    "cat twice": lambda x: torch.cat(
        [torch.cat((x, random(x.shape[0], HEADS, 1, SIZE, seed=s)), dim=-2) for s in (8,)]
        + [random(x.shape[0], HEADS, 1, SIZE, seed=9)],
        dim=-2,
    ),
    "cat to nothing": lambda x: torch.cat([torch.tensor([]), x], dim=2),
    "cat of itself": lambda x: torch.concatenate([x, x], dim=2),
    "cat of states in front": lambda x: torch.cat([random(x.shape[0], HEADS, 2, SIZE), x], dim=2),
    "cat transposed": lambda x: torch.cat([x.transpose(2, 3), random(x.shape[0], HEADS, SIZE, 2)], dim=-1),
    "cat merged": lambda x: torch.cat([merge_heads(x), random(x.shape[0] * HEADS, 2, SIZE)], dim=1),
    "within items": lambda x: x.index_select(0, within_items(x.shape[0])),
    "across items": lambda x: x.index_select(0, torch.arange(x.shape[0] - 1, -1, -1) * 5 % x.shape[0]),
    "rows in brackets": lambda x: x[within_items(x.shape[0])],
    "rows in a list": lambda x: x[[0, 1, 1], ...],
    "rows by a mask": lambda x: x[torch.arange(x.shape[0]) % 2 == 0],
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=0),
    "repeated rows, reordered": lambda x: x.repeat_interleave(2, dim=0).index_select(0, within_items(2 * x.shape[0])),
}


def within_items(rows: int) -> torch.Tensor:
    """Beam indices of items of three rows."""
    return torch.arange(rows) // 3 * 3 + torch.arange(rows) ** 2 % 3


def queries(x: Any, heads: int = HEADS) -> torch.Tensor:
    return random(x.shape[0], heads, 3, SIZE, seed=5)


def weights(x: Any, heads: int = HEADS) -> torch.Tensor:
    return random(x.shape[0], heads, 3, x.shape[2], seed=6).softmax(-1)


def mask(x: Any) -> torch.Tensor:
    return torch.rand(x.shape[0], 1, 3, x.shape[2], generator=torch.Generator().manual_seed(7)) > 0.3


PRODUCTS: dict[str, Callable[[Any], torch.Tensor]] = {
    "scores": lambda x: torch.matmul(queries(x), x.transpose(2, 3)),
    "scores by an operator": lambda x: queries(x) @ x.transpose(-1, -2),
    "weights": lambda x: torch.matmul(weights(x), x),
    "method": lambda x: weights(x).matmul(x),
    "repeated heads": lambda x: torch.matmul(queries(x, 6), repeat_kv(x).transpose(2, 3)),
    "weights of repeated heads": lambda x: weights(x, 6) @ repeat_kv(x),
    "bmm": lambda x: torch.bmm(merge_heads(queries(x)), merge_heads(x).transpose(1, 2)),
    "bmm of weights": lambda x: merge_heads(weights(x)).bmm(merge_heads(x)),
    "baddbmm": lambda x: torch.baddbmm(
        merge_heads(weights(x)), merge_heads(queries(x)), merge_heads(x).transpose(1, 2), beta=0.5, alpha=2
    ),
    "method baddbmm": lambda x: merge_heads(weights(x)).baddbmm(
        batch1=merge_heads(queries(x)), batch2=merge_heads(x).transpose(1, 2)
    ),
    "einsum of scores": lambda x: torch.einsum("bhqd,bhkd->bhqk", queries(x), x),
    "einsum of weights": lambda x: torch.einsum("bhqk,bhkd->bhqd", weights(x), x),
    "einsum of a list": lambda x: torch.einsum("b h q d, b h d k -> b h q k", [queries(x), x.transpose(2, 3)]),
    "attention": lambda x: F.scaled_dot_product_attention(queries(x), x, x * 2),
    "attention with a mask": lambda x: F.scaled_dot_product_attention(queries(x), x, -x, attn_mask=mask(x), scale=0.7),
    "attention with is_causal": lambda x: F.scaled_dot_product_attention(queries(x), x, x, is_causal=True),
    "attention with repeated heads": lambda x: F.scaled_dot_product_attention(
        queries(x, 6), repeat_kv(x), repeat_kv(x), mask(x)
    ),
    "attention with grouped heads": lambda x: F.scaled_dot_product_attention(queries(x, 6), x, x, enable_gqa=True),
    "attention to one head": lambda x: F.scaled_dot_product_attention(queries(x), x[:, :1], x[:, 1:]),
    "attention by keywords": lambda x: F.scaled_dot_product_attention(query=queries(x), key=x, value=x),
}
# Operations that get all rows, with the name that they are known by
UNHANDLED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "sum": (lambda x: x.sum(), "sum"),
    "softmax": (lambda x: x.softmax(-1), "softmax"),
    "mean by a keyword": (lambda x: torch.mean(input=x, dim=1), "mean"),
    "sort": (lambda x: list(torch.sort(x, dim=2)), "sort"),
    "cat of rows": (lambda x: torch.cat([x, x]), "cat"),
    "cat of other types": (lambda x: torch.cat([x, x.new_ones(x.shape).double()], dim=2), "new_ones"),
    "nested": (lambda x: torch.block_diag(*[x[:, 0, 0] + 0]), "__getitem__"),
    "einsum": (lambda x: torch.einsum("bhkd->bh", x), "einsum"),
    "left of a product": (lambda x: x @ random(SIZE, 3), "__matmul__"),
    "an item": (lambda x: x[0], "__getitem__"),
    "every other token": (lambda x: x[:, :, ::2], "__getitem__"),
    "by a mask of elements": (lambda x: x[x.detach() > 0], "__gt__"),
    "tokens and heads mixed": (lambda x: x.flatten(1, 2), "flatten"),
    "bits": (lambda x: x.view(torch.int32), "view"),
    "where": (lambda x: torch.where(torch.tensor(True), x, 0), "where"),
    "masked_fill": (lambda x: x.masked_fill(torch.ones(1, dtype=torch.bool), 3.0), "masked_fill"),
    "pad": (lambda x: F.pad(x, (1, 1)), "pad"),
    "tensor of all rows": (lambda x: x + random(*x.shape), "__add__"),
    "vector of tokens": (lambda x: x * random(x.shape[2], 1), "__mul__"),
    "dropout": (lambda x: torch.manual_seed(0) and F.dropout(x, 0.5), "dropout"),
    "dropout in attention": (
        lambda x: torch.manual_seed(0) and F.scaled_dot_product_attention(queries(x), x, x, dropout_p=0.5),
        "scaled_dot_product_attention",
    ),
    "comparison": (lambda x: x == x.detach(), "__eq__"),
    "property": (lambda x: x.mT, "mT"),
    "numbers": (lambda x: x.tolist(), "tolist"),
    "numpy": (lambda x: torch.from_numpy(x.numpy().copy()), "numpy"),
    "iteration": (lambda x: list(x), "__iter__"),
    "floor division": (lambda x: x // 2, "__floordiv__"),
    "cumsum": (lambda x: torch.cumsum(x, 2), "cumsum"),
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "item": lambda x: operator.setitem(x, (0, 1, 2), 7.0),
    "tokens": lambda x: operator.setitem(x, (slice(None), slice(None), slice(1, 3)), 7.0),
    "item through a view": lambda x: operator.setitem(x.transpose(1, 2), (slice(None), 2), 7.0),
    "mul_": lambda x: x.mul_(2),
    "zero_": lambda x: x.zero_(),
    "copy_": lambda x: x.copy_(random(*x.shape, seed=9)),
    "out": lambda x: torch.mul(random(*x.shape, seed=9), 2, out=x),
    "through a view": lambda x: x[:, :, 1:3].mul_(2),
    "through a transpose": lambda x: x.transpose(2, 3).add_(random(*x.transpose(2, 3).shape)),
    "through a view of a view": lambda x: x.transpose(1, 2)[:, 1:].unsqueeze(1).detach().fill_(7),
    "through a part": lambda x: x.chunk(2, dim=-1)[1].mul_(2),
    "through merged heads": lambda x: merge_heads(x).neg_(),
    "index_copy_": lambda x: x.index_copy_(1, torch.tensor([1]), random(x.shape[0], 1, x.shape[2], SIZE)),
    "relu, in place": lambda x: F.relu(x, inplace=True),
}
# What writes to a tensor that was made of the states, which stay as they are
COPIES: dict[str, Callable[[Any], Any]] = {
    "clone": lambda x: x.clone().zero_(),
    "cast": lambda x: x.double().zero_(),
    "contiguous": lambda x: x.transpose(1, 2).contiguous().zero_(),
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=1).zero_(),
    "rows": lambda x: x.index_select(0, within_items(x.shape[0])).zero_(),
    "computed": lambda x: (x + 1).transpose(1, 2).zero_(),
    "reshape that copies": lambda x: x.transpose(1, 2).reshape(x.shape[0], -1, HEADS * SIZE).zero_(),
}


class StatesTestCase(unittest.TestCase):
    def assert_same(self, ours: Any, theirs: Any, exact: bool = True) -> None:
        ours, theirs = joined(ours), joined(theirs)
        if isinstance(theirs, list) and theirs and isinstance(theirs[0], torch.Tensor):
            self.assertEqual(len(ours), len(theirs))
            for our, their in zip(ours, theirs, strict=True):
                self.assert_same(our, their, exact)
        elif isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours, theirs, **({"atol": 0, "rtol": 0} if exact else TOLERANCE))
        else:
            self.assertEqual(ours, theirs)

    def assert_shared(self, value: Any) -> None:
        for states in value if isinstance(value, (list, tuple)) else [value]:
            self.assertIsInstance(states, SegmentedStates)
            self.assertIsNone(states.dense)
            self.assertEqual(states.shape, joined(states).shape)


class OperationsTest(StatesTestCase):
    @parameterized.expand(product(SEGMENTS, VIEWS))
    def test_view(self, kind: str, name: str):
        """No view computes anything. One that leaves the suffix alone may be the suffix itself."""
        (states, tensor), view = make_states(kind), VIEWS[name]
        with Operators() as operators:
            ours = view(states)
        if name not in ("reshape", "flatten the last"):
            self.assertEqual(operators.computing, [])
        self.assertIsNone(states.origin.expanded_by)
        if name != "slice of what isn't there":
            self.assert_shared(ours)
        self.assert_same(ours, view(tensor))
        self.assert_same(states, tensor)

    @parameterized.expand(product(SEGMENTS, ALIKE))
    def test_each_row_and_token_alike(self, kind: str, name: str):
        (states, tensor), function = make_states(kind), ALIKE[name]
        ours = function(states)
        self.assertIsNone(states.origin.expanded_by)
        self.assert_shared(ours)
        self.assertEqual([s.repeats for s in (ours if isinstance(ours, tuple) else [ours])][0], states.repeats)
        self.assert_same(ours, function(tensor), exact=False)

    @parameterized.expand(product(SEGMENTS, ROWS_AND_TOKENS))
    def test_rows_and_tokens(self, kind: str, name: str):
        (states, tensor), function = make_states(kind), ROWS_AND_TOKENS[name]
        ours = function(states)
        self.assertIsNone(states.origin.expanded_by)
        self.assert_same(ours, function(tensor))
        if "across" not in name and "rows" not in name:
            self.assert_shared(ours)
            # The prompt stays where it is, except behind something else
            if (
                "repeat" not in name
                and "within" not in name
                and name not in ("cat of states in front", "cat of itself")
            ):
                self.assertEqual(ours.segments[0].data_ptr(), states.segments[0].data_ptr())

    @parameterized.expand(product(SEGMENTS, PRODUCTS))
    def test_product(self, kind: str, name: str):
        (states, tensor), function = make_states(kind), PRODUCTS[name]
        with Operators() as operators:
            ours = function(states)
        self.assertIsInstance(ours, torch.Tensor)
        self.assertIsNone(states.origin.expanded_by)
        self.assertIsNone(states.dense)
        self.assertNotIn("repeat_interleave", operators.names)
        self.assert_same(ours, function(tensor), exact=False)

    @parameterized.expand(product(SEGMENTS, UNHANDLED))
    def test_unhandled(self, kind: str, name: str):
        """The tensor of all rows takes the place of the segments for good."""
        (states, tensor), (function, operation) = make_states(kind), UNHANDLED[name]
        ours = function(states)
        self.assertEqual(states.origin.expanded_by, operation)
        self.assertIsInstance(states.settle(), torch.Tensor)
        self.assertEqual(states.segments, ())
        self.assert_same(ours, function(tensor))
        self.assert_same(states, tensor)
        dense = states.dense
        states.cumsum(0)
        self.assertIs(states.dense, dense)
        self.assertEqual(states.origin.expanded_by, operation)
        self.assertEqual((states.shape, states.held_bytes), (tensor.shape, tensor.nbytes))

    def test_nested_arguments(self):
        states, tensor = make_states()
        self.assert_same(torch.meshgrid([states.sum(), states[0, 0, 0]], indexing="ij")[0].shape, (1, SIZE))
        ours, theirs = (torch.broadcast_tensors(x, random(1)) for x in (make_states()[0], tensor))
        self.assert_same(ours[0], theirs[0])
        ours = torch.einsum("a...,b...->ab", [make_states()[0].flatten(1), tensor.flatten(1)])
        self.assert_same(ours, torch.einsum("a...,b...->ab", [tensor.flatten(1)] * 2))

    def test_what_is_small_beside_the_states_does_not_expand_them(self):
        """An index of keys, for example: it may be expanded in each step."""
        states = SegmentedStates([random(2, HEADS, 5, 32)], 6, Origin(StepMemo(), BeamMemo()))
        small = F.linear(states, random(3, 32))
        self.assert_same(small.cumsum(0), F.linear(joined(states), random(3, 32)).cumsum(0), exact=False)
        self.assertIsNone(states.origin.expanded_by)
        self.assertIsNone(states.dense)


class QuestionsTest(StatesTestCase):
    def test_what_is_asked_without_values_does_not_expand(self):
        states, tensor = make_states()
        questions = {
            "shape": lambda x: x.shape,
            "size": lambda x: (x.size(), x.size(1), x.size(dim=-1)),
            "len": len,
            "dtype": lambda x: (x.dtype, x.is_floating_point(), x.element_size()),
            "is_floating_point": torch.is_floating_point,
            "is_complex": lambda x: x.is_complex(),
            "device": lambda x: (x.device, x.get_device(), x.layout, x.is_cuda, x.is_quantized, x.is_sparse, x.is_mps),
            "ndim": lambda x: (x.ndim, x.dim(), x.ndimension(), x.numel(), x.nelement()),
            "requires_grad": lambda x: x.requires_grad,
        }
        for name, question in questions.items():
            with self.subTest(name):
                self.assertEqual(question(states), question(tensor))
                self.assertIsNone(states.origin.expanded_by)

    def test_hash_and_comparison(self):
        states, tensor = make_states()
        other, _ = make_states()
        self.assertEqual(len({states, states, other}), 2)
        self.assertIsNone(states.origin.expanded_by)
        self.assertTrue(torch.equal(states == other, tensor == tensor))
        self.assertFalse((states != tensor).any())

    def test_truth_and_conversion(self):
        single = SegmentedStates([torch.full((1, 1, 1, 1), 2.0)], 1, Origin(StepMemo(), BeamMemo()))
        self.assertTrue(single)
        self.assertEqual((float(single), int(single), single.item()), (2.0, 2, 2.0))
        with self.assertRaisesRegex(RuntimeError, "ambiguous"):
            bool(make_states()[0])

    def test_unknown_attribute(self):
        states, _ = make_states()
        self.assertFalse(hasattr(states, "no_such_attribute"))
        self.assertIsNone(states.origin.expanded_by)

    def test_bytes(self):
        states, _ = make_states()
        self.assertEqual(states.held_bytes, (2 * 5 + 6 * 3) * HEADS * SIZE * 4)


class WritesTest(StatesTestCase):
    @parameterized.expand(product(SEGMENTS, WRITES))
    def test_write(self, kind: str, name: str):
        """It reaches the states, and views that were made before."""
        (states, tensor), write = make_states(kind), WRITES[name]
        views = [states.transpose(1, 2), states[:, :, 1:], merge_heads(states)]
        before = tensor.clone()
        write(tensor)
        self.assertFalse(torch.equal(before, tensor))
        write(states)
        self.assert_same(states, tensor)
        for view, expected in zip(views, [tensor.transpose(1, 2), tensor[:, :, 1:], merge_heads(tensor)], strict=True):
            self.assert_same(view, expected)

    @parameterized.expand(product(SEGMENTS, COPIES))
    def test_write_to_a_copy(self, kind: str, name: str):
        (states, tensor), write = make_states(kind), COPIES[name]
        self.assert_same(write(states), write(tensor.clone()))
        self.assert_same(states, tensor)

    @parameterized.expand([("iadd",), ("isub",), ("imul",), ("itruediv",)])
    def test_operator_in_place(self, name: str):
        states, tensor = make_states()
        view = states.transpose(1, 2)
        change = getattr(operator, name)
        result = change(states, 2.5)
        self.assert_same(result, change(tensor, 2.5))
        self.assert_same(states, tensor)
        self.assert_same(view, tensor.transpose(1, 2))

    def test_operator_in_place_on_a_view(self):
        states, tensor = make_states()
        for x in (states, tensor):
            view = x[:, :, 2:6]
            view += 1
        self.assert_same(states, tensor)

    def test_suffix_alone(self):
        """What is written into the suffix is written there: nothing has to be expanded."""
        states, tensor = make_states()
        for x in (states, tensor):
            x[:, :, 5:].mul_(3)
            x[:, :, -1:][:] = 2
            x.index_copy_(2, torch.tensor([6]), random(6, HEADS, 1, SIZE, seed=9))
        self.assertIsNone(states.origin.expanded_by)
        self.assert_same(states, tensor)

    def test_states_computed_before_a_write(self):
        states, tensor = make_states()
        double = states * 2
        states.zero_()
        self.assert_same(double, tensor * 2)

    def test_view_of_what_was_written(self):
        states, tensor = make_states()
        view = states.transpose(1, 2)
        view.add_(1)
        self.assertEqual(view.settle().data_ptr(), states.settle().data_ptr())
        states.add_(1)
        self.assert_same(view, (tensor + 1 + 1).transpose(1, 2))


class CopiesTest(StatesTestCase):
    @parameterized.expand(SEGMENTS)
    def test_copies_are_independent(self, kind: str):
        states, tensor = make_states(kind)
        buffer = io.BytesIO()
        torch.save(states, buffer)
        buffer.seek(0)
        copies = [
            copy.deepcopy(states),
            pickle.loads(pickle.dumps(states)),
            torch.load(buffer, weights_only=False),
        ]
        for copied in copies:
            self.assert_shared(copied)
            self.assertEqual(copied.held_bytes, states.held_bytes)
            self.assert_same(copied, tensor)
            copied.zero_()
        self.assert_same(states, tensor)
        self.assertIsNone(states.origin.expanded_by)

    def test_a_copy_forgets_what_was_made_of_masks(self):
        """A mask is known by its memory, which a copy doesn't hold: something else could take its place there."""
        memo, visible = StepMemo(), torch.ones(1, 1, 1, 3, dtype=torch.bool)
        memo.get(visible, (), lambda: "first")
        self.assertEqual(memo.get(visible, (), lambda: "second"), "first")
        self.assertEqual(copy.deepcopy(memo).get(visible, (), lambda: "second"), "second")

    def test_old_suffixes_are_let_go(self):
        states, _ = make_states()
        old = weakref.ref(states.segments[-1])
        for _ in range(3):
            states = torch.cat([states, random(6, HEADS, 1, SIZE)], dim=2).index_select(0, within_items(6))
        # Attention modules look at them in between
        queries(states) @ repeat_kv(states).view(states.shape[0], 3, HEADS, -1, SIZE)[:, 0].transpose(2, 3)
        gc.collect()
        self.assertIsNone(old())

    def test_expanded_segments_are_let_go(self):
        states, _ = make_states()
        view, segment = states.transpose(1, 2), weakref.ref(states.segments[0])
        states.sum()
        view.sum()
        gc.collect()
        self.assertIsNone(segment())


class ModesTest(StatesTestCase):
    @parameterized.expand(product(SEGMENTS, ("attention", "weights", "einsum of scores", "unhandled")))
    def test_gradients(self, kind: str, name: str):
        function = PRODUCTS.get(name, lambda x: x.softmax(2) ** 2)
        states, _ = make_states(kind)
        for segment in states.segments:
            segment.requires_grad_()
        tensor = make_states(kind)[0]
        leaves = [segment.requires_grad_() for segment in tensor.segments]
        self.assertTrue(states.requires_grad)
        segments = states.segments
        function(states * 2).square().sum().backward()
        function(tensor.joined() * 2).square().sum().backward()
        for ours, theirs in zip(segments, leaves, strict=True):
            self.assertGreater(theirs.grad.abs().max(), 1e-3)
            torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-4, rtol=1e-5)

    @parameterized.expand(("scores", "weights", "bmm", "linear", "attention"))
    def test_autocast(self, name: str):
        """States in float32 continued in bfloat16."""
        states, tensor = make_states()
        function = {**PRODUCTS, "linear": ALIKE["linear"]}[name]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours, theirs = function(states), function(tensor)
            self.assertEqual(ours.dtype, theirs.dtype)
            joined_in_bfloat16 = [
                torch.cat([x, random(6, HEADS, 1, SIZE).bfloat16()], dim=2) for x in (states, tensor)
            ]
        torch.testing.assert_close(joined(ours).float(), theirs.float(), atol=0.05, rtol=0.02)
        self.assertEqual(joined_in_bfloat16[0].dtype, joined_in_bfloat16[1].dtype)
        self.assert_same(*joined_in_bfloat16)

    def test_inference_mode(self):
        with torch.inference_mode():
            states, tensor = make_states()
            states, tensor = (x.index_select(0, within_items(6))[:, :, :-1] for x in (states, tensor))
            self.assert_same(queries(states) @ states.transpose(2, 3), queries(tensor) @ tensor.transpose(2, 3), False)
            self.assertIsNone(states.origin.expanded_by)

    def test_threads(self):
        """Two caches, decoded at once, one of them in inference mode."""
        problems = []

        def decode(seed: int, inference: bool) -> None:
            with torch.inference_mode(inference), torch.no_grad():
                states, tensor = make_states(seed=seed)
                generator = torch.Generator().manual_seed(seed)
                for _ in range(60):
                    index = torch.randint(6, (6,), generator=generator)
                    states, tensor = (x.index_select(0, index) for x in (states, tensor))
                    new = torch.randn(6, HEADS, 1, SIZE, generator=generator)
                    states, tensor = (torch.cat([x, new], dim=2) for x in (states, tensor))
                    if not torch.equal(joined(states), tensor):
                        problems.append((seed, inference))

        threads = [threading.Thread(target=decode, args=(seed, seed % 2 == 0)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(problems, [])

    @parameterized.expand([("eager",), ("aot_eager",)])
    def test_compiled(self, backend: str):
        """As a graph without breaks, with an operation that has no handler, too."""
        torch._dynamo.reset()
        self.addCleanup(torch._dynamo.reset)
        states, tensor = make_states()

        def function(x):
            attended = F.scaled_dot_product_attention(queries_now, x, x.transpose(1, 2).transpose(1, 2))
            return attended + (queries_now @ x.transpose(2, 3)).softmax(-1) @ x + x.cumsum(2).sum()

        queries_now = queries(tensor)
        ours = torch.compile(function, backend=backend, fullgraph=True)(states)
        torch.testing.assert_close(ours, function(tensor), atol=1e-4, rtol=1e-5)


class BeamMemoTest(unittest.TestCase):
    @staticmethod
    def layers() -> list[tuple[SegmentedStates, torch.Tensor]]:
        """Keys of three layers of one cache."""
        made, origin = [make_states(seed=seed) for seed in (0, 10, 20)], Origin(StepMemo(), BeamMemo())
        return [(states.make(states.segments, origin=origin), tensor) for states, tensor in made]

    def reorder(self, layers: list, index: torch.Tensor) -> int:
        """Reorders all layers and compares them. Returns how often the device was asked."""
        count = 0
        for i, (states, tensor) in enumerate(layers):
            with Operators() as operators:
                states = states.index_select(0, index)
            count += operators.names.count("equal")
            layers[i] = states, tensor.index_select(0, index)
            self.assertTrue(torch.equal(joined(states), layers[i][1]))
        return count

    def test_one_answer_for_all_layers(self):
        layers = self.layers()
        for _ in range(3):
            self.assertEqual(self.reorder(layers, within_items(6)), 1)
        self.assertTrue(all(len(states.segments) == 2 for states, _ in layers))

    def test_changed_indices_are_seen(self):
        layers, index = self.layers(), within_items(6)
        self.assertEqual(self.reorder(layers, index), 1)
        index[0] = 5
        self.assertEqual(self.reorder(layers, index), 1)
        self.assertIsInstance(layers[0][0], torch.Tensor)

    def test_one_answer_in_inference_mode(self):
        with torch.inference_mode():
            layers = self.layers()
            self.assertEqual(self.reorder(layers, private_index(within_items(6))), 1)
            index = within_items(6)
            self.assertIsNot(private_index(index), index)
            self.assertIs(private_index(private := private_index(index)), private)

    def test_changed_indices_in_inference_mode(self):
        """Changes aren't counted there: the device is asked again, or the indices are copied first."""
        with torch.inference_mode():
            layers, index = self.layers(), within_items(6)
            self.assertEqual(self.reorder(layers, index), 3)
            index[0] = 5
            self.reorder(layers, index)
            layers, index = self.layers(), within_items(6)
            self.reorder(layers, private_index(index))
            index[0] = 5
            self.reorder(layers, private_index(index))
            self.assertIsInstance(layers[0][0], torch.Tensor)

    def test_rows_that_leave_their_item(self):
        """Each segment of which several rows are taken apart gets all rows; one row for the batch stays."""
        states, tensor = make_states("a common prefix, prompts and suffixes")
        index = torch.arange(11, -1, -1) * 7 % 12
        reordered = states.index_select(0, index)
        self.assertEqual([len(segment) for segment in reordered.segments], [1, 12])
        self.assertTrue(torch.equal(joined(reordered), tensor[index]))
        reordered = states.index_select(0, torch.arange(12) // 4 * 4)
        self.assertEqual([len(segment) for segment in reordered.segments], [1, 3, 12])


STEPS = st.one_of(
    st.tuples(st.sampled_from(["append", "append", "crop", "drop the oldest"]), st.integers(1, 3)),
    st.tuples(st.just("repeat"), st.integers(1, 3)),
    st.tuples(
        st.sampled_from(["reorder within", "reorder within", "reorder", "select", "attend", "write", "write a view"]),
        st.integers(0, 10**6),
    ),
    st.tuples(st.sampled_from(["scale", "transpose twice", "copy", "look", "expand"]), st.just(0)),
)


def step(name: str, number: int, x: Any) -> tuple[Any, Any]:
    """Does the same to states and to a tensor. Returns what they have become, and what was seen."""
    rows, length = x.shape[0], x.shape[2]
    generator = torch.Generator().manual_seed(number)
    if name == "append":
        return torch.cat([x, random(rows, HEADS, number, SIZE, seed=length)], dim=2), None
    if name == "crop":
        return x[:, :, : max(length - number, 1)], None
    if name == "drop the oldest":
        return x[:, :, -max(length - number, 1) :], None
    if name == "repeat":
        return (x.repeat_interleave(number, dim=0) if rows * number <= 48 else x), None
    if name.startswith("reorder"):
        index = torch.randint(rows, (rows,), generator=generator)
        if name == "reorder within" and rows % 3 == 0:
            index = torch.arange(rows) // 3 * 3 + index % 3
        return x.index_select(0, index), None
    if name == "select":
        return x[torch.randint(rows, (number % rows + 1,), generator=generator)], None
    if name == "attend":
        return x, F.scaled_dot_product_attention(random(rows, HEADS, 1, SIZE, seed=number), x, x * 2)
    if name == "write":
        x[number % rows, :, number % length] = 3.0
    elif name == "write a view":
        x.transpose(1, 2)[:, number % length :].mul_(0.5)
    elif name == "scale":
        return x * 0.9, None
    elif name == "transpose twice":
        return x.transpose(1, 2).transpose(1, 2), None
    elif name == "copy":
        return copy.deepcopy(x), None
    elif name == "look":
        return x, x[:, :, 1:].transpose(2, 3)
    elif name == "expand":
        return x, x.cumsum(2)
    return x, None


class RandomStepsTest(StatesTestCase):
    @parameterized.expand(SEGMENTS)
    def test_like_a_tensor(self, kind: str):
        seen = set()

        @given(st.lists(STEPS, min_size=1, max_size=10))
        def check(steps):
            states, tensor = make_states(kind)
            for name, number in steps:
                if isinstance(states, SegmentedStates) and states.settle() is states:
                    seen.add(name)
                (states, ours), (tensor, theirs) = step(name, number, states), step(name, number, tensor)
                self.assert_same(states, tensor)
                self.assert_same(ours, theirs, exact=False)

        check()
        # All of them must have been tried while there were segments
        self.assertEqual(len(seen), 15, seen)
