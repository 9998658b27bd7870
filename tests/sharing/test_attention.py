# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Attention to segments is compared with torch's attention to the same keys, repeated for each row and joined. What
happens on the way, which operations run and what they allocate, is seen by watching the operators.
"""

import unittest
from dataclasses import dataclass
from itertools import product
from unittest import mock

import torch
import torch.nn.functional as F
from parameterized import parameterized
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from transformers.prefix_sharing import attention
from transformers.prefix_sharing.attention import StepMemo, attend, merge_states, scores, weigh


CPU_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
FLASH_KERNEL = "_scaled_dot_product_flash_attention"
EFFICIENT_KERNEL = "_scaled_dot_product_efficient_attention"

# R, and (R_i, L_i) of each segment
SEGMENTS = {
    "prompt and suffix": (6, ((2, 17), (6, 5))),
    "first step": (6, ((2, 17), (6, 0))),
    "cross-attention": (6, ((2, 17),)),
    "common prefix": (12, ((1, 9), (3, 4), (12, 3))),
    "nothing shared": (4, ((4, 7),)),
    "suffix in two pieces": (6, ((2, 17), (6, 2), (6, 3))),
    "rows that don't nest": (6, ((6, 2), (2, 5), (3, 4))),
    "shared last": (6, ((6, 2), (1, 5))),
}
MASKS = [
    "none",
    "bool",
    "blind rows",
    "lowest",
    "infinite",
    "of a row",
    "of queries",
    "bias",
    "bias of heads",
    "two dims",
]


class Operators(TorchDispatchMode):
    """Notes the operators that run, which of them compute (are no views), and the largest new storage in bytes."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.computing: list[str] = []
        self.arguments: dict[str, list[tuple]] = {}
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        self.names.append(name)
        self.arguments.setdefault(name, []).append(args)
        if not function.is_view and name != "_unsafe_view":
            self.computing.append(name)
        given = {x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)}
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given:
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return result


@dataclass
class Case:
    """Random inputs. The queries lie in memory as a projection leaves them: `(R, Q, H, D)`."""

    segments: str | tuple = "prompt and suffix"
    heads: int = 4
    kv_heads: int = 2
    queries: int = 1
    size: int = 8
    value_size: int | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self):
        self.generator = torch.Generator().manual_seed(self.seed)
        self.rows, segments = SEGMENTS[self.segments] if isinstance(self.segments, str) else self.segments
        self.length = sum(length for _, length in segments)
        self.query = self.random(self.rows, self.queries, self.heads, self.size).transpose(1, 2)
        self.keys, self.values = (
            [self.random(rows, self.kv_heads, length, size) for rows, length in segments]
            for size in (self.size, self.value_size or self.size)
        )

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def mask(self, kind: str) -> torch.Tensor | None:
        self.generator.manual_seed(self.seed + 1)
        if kind == "none":
            return None
        if kind.startswith("bias") or kind == "two dims":
            heads = self.heads if kind == "bias of heads" else 1
            bias = self.random(1 if kind == "bias of heads" else self.rows, heads, self.queries, self.length)
            return bias[0, 0] if kind == "two dims" else bias
        visible = torch.rand(self.rows, 1, self.queries, self.length, generator=self.generator) > 0.4
        visible[..., -1] = True
        if kind == "of a row":
            return visible[:1]
        if kind == "of queries":
            return visible[:, :, :1]
        if kind != "bool":
            visible[0] = False  # nothing at all
            visible[-1, :, :, : self.keys[0].shape[2]] = False  # nothing of the first segment
        if kind in ("bool", "blind rows"):
            return visible
        hidden = -torch.inf if kind == "infinite" else torch.finfo(self.dtype).min
        return torch.zeros(visible.shape, dtype=self.dtype).masked_fill(~visible, hidden)

    def attend(self, mask=None, **arguments):
        return attend(self.query, self.keys, self.values, mask, **arguments)

    def arguments(self) -> tuple:
        return self.query, self.keys, self.values

    def copied(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all rows."""
        return tuple(
            torch.cat([part.repeat_interleave(self.rows // part.shape[0], dim=0) for part in parts], dim=2)
            for parts in (self.keys, self.values)
        )

    def reference(self, mask=None, **arguments):
        return F.scaled_dot_product_attention(self.query, *self.copied(), mask, enable_gqa=True, **arguments)


class AttentionTest(unittest.TestCase):
    def assert_close(self, ours: torch.Tensor, reference: torch.Tensor, tolerance: float = 1e-5) -> None:
        self.assertEqual((ours.shape, ours.dtype), (reference.shape, reference.dtype))
        difference = (ours - reference).abs()
        self.assertTrue((difference <= tolerance).all(), f"max {difference.max()}, mean {difference.mean()}")

    @parameterized.expand(product(SEGMENTS, [(4, 4, 8), (6, 2, 8), (4, 1, 8), (6, 2, 4)], [1, 3]))
    def test_same_as_torch(self, segments, heads, queries):
        *heads, value_size = heads
        case = Case(segments, *heads, queries, value_size=value_size)
        for kind in MASKS:
            with self.subTest(mask=kind):
                mask = case.mask(kind)
                with Operators() as operators:
                    output = case.attend(mask)
                read = sum(key.shape[2] > 0 for key in case.keys)
                calls = operators.names.count(CPU_KERNEL)
                self.assertTrue(calls >= read if value_size == 8 else calls == 0, calls)
                self.assert_close(output, case.reference(mask))

    @parameterized.expand(product(SEGMENTS, [1, 3]))
    def test_scale_and_causal(self, segments, queries):
        case = Case(segments, queries=queries)
        self.assertGreater((case.reference(scale=0.7) - case.reference()).abs().max().item(), 1e-3)
        self.assert_close(case.attend(scale=0.7), case.reference(scale=0.7))
        self.assertGreater((case.reference(is_causal=True) - case.reference()).abs().max().item(), 1e-3)
        self.assert_close(case.attend(is_causal=True), case.reference(is_causal=True))

    def test_packed_groups(self):
        """As the library packs them: the groups of a head in the place of queries, one mask for all of them."""
        case = Case(heads=6, kv_heads=2)
        mask = case.mask("bool")
        packed = attend(case.query.reshape(6, 2, 3, 8), case.keys, case.values, mask)
        self.assert_close(packed.reshape(6, 6, 1, 8), case.reference(mask))

    def test_no_keys_at_all(self):
        case = Case((4, ((2, 0), (4, 0))))
        self.assert_close(case.attend(), case.reference())

    @parameterized.expand(product([torch.float64, torch.bfloat16, torch.float16], [8, 4], ["none", "bool", "lowest"]))
    def test_types(self, dtype, value_size, mask):
        case = Case("common prefix", dtype=dtype, value_size=value_size)
        tolerance = 1e-12 if dtype == torch.float64 else 0.02
        self.assert_close(case.attend(case.mask(mask)), case.reference(case.mask(mask)), tolerance)

    @parameterized.expand(
        product([torch.bfloat16, torch.float16], [(20, 20), (100, 8), (2500, 3)], [64, 32], ["none", "lowest"])
    )
    def test_error_in_16_bits(self, dtype, lengths, value_size, mask):
        """
        Against float64: at most twice that of torch's attention to copied keys and values, in the mean and at worst.
        (An element by itself may do worse: states that cancel are rounded before.)
        """
        ours, torchs = [], []
        for seed in range(8):
            segments = (16, ((4, lengths[0]), (16, lengths[1])))
            case = Case(segments, 4, 2, size=64, value_size=value_size, dtype=dtype, seed=seed)
            mask_tensor = case.mask(mask)
            exact_mask = None if mask_tensor is None else mask_tensor.double()
            keys, values = (x.double() for x in case.copied())
            exact = F.scaled_dot_product_attention(case.query.double(), keys, values, exact_mask, enable_gqa=True)
            ours.append((case.attend(mask_tensor).double() - exact).abs())
            torchs.append((case.reference(mask_tensor).double() - exact).abs())
        ours, torchs = torch.stack(ours), torch.stack(torchs)
        self.assertGreater(torchs.mean().item(), 0)
        self.assertLessEqual(ours.max().item(), 2 * torchs.max().item())
        self.assertLessEqual(ours.mean().item(), 2 * torchs.mean().item())

    def test_mask_in_another_type(self):
        case = Case(dtype=torch.bfloat16)
        mask = case.mask("lowest")
        self.assert_close(case.attend(mask.float()), case.attend(mask), 0)

    def test_segment_in_another_type_is_cast(self):
        case = Case()
        expected = case.reference()
        case.keys[0], case.values[0] = case.keys[0].double(), case.values[0].double()
        self.assert_close(case.attend(), expected)

    def test_under_autocast(self):
        """Nothing is cast in here."""
        case = Case(value_size=4)
        expected = case.attend(case.mask("bool"))
        case = Case(value_size=4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            self.assertEqual(torch.matmul(case.query, case.query.mT).dtype, torch.bfloat16)
            self.assert_close(case.attend(case.mask("bool")), expected, 0)

    @parameterized.expand(product(["none", "bool", "blind rows", "bias"], [1, 3]))
    def test_gradients(self, mask, queries):
        case = Case("common prefix", queries=queries, dtype=torch.float64)
        mask, gradients = case.mask(mask), []
        inputs = [case.query, *case.keys, *case.values]
        if mask is not None and mask.dtype != torch.bool:
            inputs.append(mask)
        for compute in (case.attend, case.reference):
            for tensor in inputs:
                tensor.requires_grad_().grad = None
            compute(mask).square().sum().backward()
            gradients.append([tensor.grad.clone() for tensor in inputs])
        self.assertGreater(gradients[0][1].abs().max().item(), 1e-3)
        for ours, reference in zip(*gradients, strict=True):
            self.assert_close(ours, reference, 1e-10)

    def test_switched_off_kernels(self):
        """As torch does, where the caller asks for plain products."""
        case = Case()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), Operators() as operators:
            output = case.attend()
        self.assertNotIn(CPU_KERNEL, operators.names)
        self.assert_close(output, case.reference())

    def test_strides_that_the_kernel_can_not_read(self):
        case = Case()
        expected = case.reference()
        case.keys = [key.mT.contiguous().mT for key in case.keys]
        self.assert_close(case.attend(), expected)

    def test_wrong_arguments(self):
        case = Case()
        for arguments, message in (
            (
                (case.query[:5], case.keys, case.values),
                r"must have rows that divide .*\(5, 4\).*\(2, 2, 17, 8\)",
            ),
            ((case.query[:, :3], case.keys, case.values), r"\(6, 3\)"),
            (
                (case.query, [case.keys[0], case.keys[1][:, :1]], case.values),
                r"as many in each segment.*\(6, 1, 5, 8\)",
            ),
            ((case.query, case.keys, case.values[:1]), "the same segments, .* have 2 and 1"),
            ((case.query, [], []), "at least one, but have 0 and 0"),
            ((case.query, case.keys, [case.values[0], case.values[0]]), r"\(6, 2, 5, 8\) and \(2, 2, 17, 8\)"),
            ((*case.arguments(), torch.ones(6, 1, 1, 21).bool()), r"must broadcast to \(6, 4, 1, 22\), but .*21"),
            ((*case.arguments(), torch.ones(1, 6, 1, 1, 22).bool()), r"must broadcast to \(6, 4, 1, 22\)"),
            (
                (*case.arguments(), torch.ones(22, dtype=torch.int64)),
                "must be boolean or of floating point, but is .*int64",
            ),
            ((*case.arguments(), torch.ones(22).bool(), None, True), "`attn_mask` must be None where `is_causal`"),
        ):
            with self.subTest(message=message), self.assertRaisesRegex(ValueError, message):
                attend(*arguments)


class ChunksTest(unittest.TestCase):
    """The fused kernel reads segments in chunks, where they are long and threads are many."""

    def setUp(self):
        for target, name, value in ((attention, "MINIMAL_CHUNK", 4), (torch, "get_num_threads", lambda: 12)):
            patch = mock.patch.object(target, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    @parameterized.expand(product(SEGMENTS, [torch.float32, torch.bfloat16], [1, 3]))
    def test_same_as_torch(self, segments, dtype, queries):
        case = Case(segments, queries=queries, dtype=dtype)
        for kind in MASKS:
            with self.subTest(mask=kind):
                mask = case.mask(kind)
                output, reference = case.attend(mask), case.reference(mask)
                self.assertEqual(output.dtype, dtype)
                self.assertLess((output - reference).abs().max().item(), 1e-5 if dtype == torch.float32 else 0.02)

    def test_chunks_are_views(self):
        """Of equal length, and one more with what is left over."""
        case = Case("cross-attention")
        with Operators() as operators:
            output = case.attend(case.mask("bool"))
        keys = [arguments[1] for arguments in operators.arguments[CPU_KERNEL]]
        self.assertEqual([key.shape for key in keys], [(4, 4, 4, 8), (2, 2, 1, 8)])
        self.assertEqual(
            {key.data_ptr() for key in keys}, {case.keys[0].data_ptr(), case.keys[0][:, :, 16:].data_ptr()}
        )
        self.assertLess((output - case.reference(case.mask("bool"))).abs().max().item(), 1e-5)

    def test_number_of_chunks(self):
        """Two tasks for each thread, of 4 tokens at least, and only views."""
        for shape, count in (((1, 3, 100), 8), ((1, 24, 100), 1), ((5, 5, 100), 1), ((3, 1, 11), 2), ((1, 3, 7), 1)):
            self.assertEqual(attention._count_chunks(torch.empty(*shape, 8)), count)
        self.assertEqual(attention._count_chunks(torch.empty(2, 100, 3, 8).transpose(1, 2)), 1)
        self.assertEqual(attention._count_chunks(torch.empty(2, 3, 200, 8)[:, :, :100]), 4)


class CostTest(unittest.TestCase):
    """Which operations a layer's step runs and what they allocate. A step: one query, a prompt, a suffix, a memo."""

    @parameterized.expand([(None,), ("padding",)])
    def test_calls(self, mask):
        """At most 20 more than copying, of which at most 5 compute, in all layers but the first."""
        case = Case(heads=6, kv_heads=2)
        mask = case.mask("bool") if mask else None
        old, new = zip(*((part[:, :, :-1].contiguous(), part[:, :, -1:]) for part in case.copied()))
        with Operators() as copying:
            keys, values = (torch.cat(pair, dim=2) for pair in zip(old, new))
            query = case.query if mask is None else case.query.reshape(6, 2, 3, 8)
            expected = F.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=mask is None)
        memo = StepMemo()
        case.attend(mask, memo=memo)
        with Operators() as sharing:
            output = case.attend(mask, memo=memo)
        self.assertEqual([copying.names.count(name) for name in ("cat", CPU_KERNEL)], [2, 1])
        self.assertEqual(sharing.names.count(CPU_KERNEL), 2)
        self.assertLess((output - expected.reshape(output.shape)).abs().max().item(), 1e-5)
        self.assertLessEqual(len(sharing.names), len(copying.names) + 20)
        self.assertLessEqual(len(sharing.computing), len(copying.computing) + 5)

    @parameterized.expand(product([torch.float32, torch.bfloat16], [8, 4], ["none", "blind rows", "lowest"]))
    def test_no_copy_of_a_prefix(self, dtype, value_size, mask):
        """Not even of a quarter of its keys. (Values of another size: products, with scores and chunks in float32.)"""
        segments = (8, ((2, 3000), (8, 3)))
        case = Case(segments, heads=4, kv_heads=4, dtype=dtype, size=64, value_size=64 if value_size == 8 else 32)
        mask, prefix = case.mask(mask), case.values[0]
        with Operators() as operators:
            case.attend(mask)
        bound = prefix.nbytes // 4
        if value_size == 4:  # scores (B, K, N, L), and a chunk in float32
            self.assertNotIn(CPU_KERNEL, operators.names)
            bound = max(4 * 8 * 4 * 3000, 4 * case.keys[0][:, :, : attention.CAST_CHUNK].numel())
            self.assertLess(bound, 4 * prefix.numel())
        self.assertLessEqual(operators.largest, bound)
        with Operators() as operators:
            case.reference(mask)
        self.assertGreater(operators.largest, 2 * bound)


class AcceleratorTest(unittest.TestCase):
    """Which kernels run on CUDA, by torch's shape functions: no GPU is needed."""

    def setUp(self):
        patch = mock.patch.object(attention, "_has_flash_attention", return_value=True)
        self.has_flash_attention = patch.start()
        self.addCleanup(patch.stop)

    def attend(self, dtype, mask: str = "none", size: int = 64, value_size: int = 64, queries: int = 1):
        with FakeTensorMode():
            query = torch.empty(12, queries, 6, size, dtype=dtype, device="cuda").transpose(1, 2)
            keys, values = (
                [
                    torch.empty(*shape, x, dtype=dtype, device="cuda")
                    for shape in ((1, 2, 999), (3, 2, 4000), (12, 2, 5))
                ]
                for x in (size, value_size)
            )
            mask = {
                "none": None,
                "bool": torch.empty(12, 1, 1, 5004, dtype=torch.bool, device="cuda"),
                "additive": torch.empty(12, 6, queries, 5004, dtype=dtype, device="cuda"),
            }[mask]
            memo = StepMemo()
            attend(query, keys, values, mask, memo=memo)
            with Operators() as operators:
                output = attend(query, keys, values, mask, memo=memo)
        self.assertEqual(output.shape, (12, 6, queries, value_size))
        self.assertEqual((output.dtype, output.device.type), (dtype, "cuda"))
        self.assertNotIn("_local_scalar_dense", operators.names)  # nothing waits for the device
        return operators, keys

    @parameterized.expand(product([torch.bfloat16, torch.float16], [1, 3]))
    def test_flash_attention(self, dtype, queries):
        operators, keys = self.attend(dtype, queries=queries)
        self.assertEqual(operators.names.count(FLASH_KERNEL), 3)
        self.assertLess(operators.largest, keys[0].nbytes // 4)

    @parameterized.expand(product([torch.bfloat16, torch.float32], ["bool", "additive"], [1, 3], [64, 32]))
    def test_efficient_attention(self, dtype, mask, queries, value_size):
        operators, keys = self.attend(dtype, mask, queries=queries, value_size=value_size)
        self.assertEqual(operators.names.count(EFFICIENT_KERNEL), 3)
        self.assertLess(operators.largest, keys[0].nbytes // 4)

    def test_other_cases_for_efficient_attention(self):
        for arguments in ({"dtype": torch.float32}, {"dtype": torch.bfloat16, "value_size": 32}):
            self.assertEqual(self.attend(**arguments)[0].names.count(EFFICIENT_KERNEL), 3)
        self.has_flash_attention.return_value = False
        self.assertEqual(self.attend(torch.bfloat16)[0].names.count(EFFICIENT_KERNEL), 3)

    @parameterized.expand([(torch.float64, 64), (torch.bfloat16, 60)])
    def test_products(self, dtype, size):
        operators, _ = self.attend(dtype, "bool", size=size)
        self.assertEqual({FLASH_KERNEL, EFFICIENT_KERNEL} & set(operators.names), set())
        self.assertIn("bmm", operators.names)

    def test_biases_are_aligned(self):
        """Rows that begin at multiples of 16 bytes, where torch's kernel reads them."""
        operators, _ = self.attend(torch.bfloat16, "bool")
        for query, key, _, bias, *_ in operators.arguments[EFFICIENT_KERNEL]:
            self.assertEqual(bias.shape, (*query.shape[:3], key.shape[2]))
            self.assertEqual(bias.dtype, query.dtype)
            *others, last = bias.stride()
            self.assertEqual(last, 1)
            self.assertTrue(all(stride % 16 == 0 for stride in others), others)


class CompileTest(unittest.TestCase):
    def setUp(self):
        torch.compiler.reset()

    @parameterized.expand(
        [
            *product(["eager"], ["none", "blind rows", "lowest"], [8, 4]),
            ("inductor", "none", 8),
            ("inductor", "blind rows", 8),
            ("inductor", "lowest", 4),
        ]
    )
    def test_full_graph(self, backend, mask, value_size):
        """One graph for all lengths."""
        graphs = []

        def count(graph, inputs):
            graphs.append(graph)
            return torch._dynamo.lookup_backend(backend)(graph, inputs)

        compiled, memo = torch.compile(attend, fullgraph=True, dynamic=True, backend=count), StepMemo()
        with torch.no_grad():
            for length, suffix in ((40, 3), (50, 5), (64, 9)):
                case = Case((6, ((2, length), (6, suffix))), value_size=value_size)
                output = compiled(case.query, case.keys, case.values, case.mask(mask), memo=memo)
                self.assertLess((output - case.reference(case.mask(mask))).abs().max().item(), 1e-5)
        self.assertEqual(len(graphs), 1)
        names = {str(node.target) for node in graphs[0].graph.nodes}
        self.assertEqual(any(CPU_KERNEL in name for name in names), value_size == 8)
        self.assertEqual(len(memo._entries), 0)


class StepMemoTest(unittest.TestCase):
    def setUp(self):
        self.case, self.memo = Case(), StepMemo()
        patch = mock.patch.object(attention, "_make_mask", wraps=attention._make_mask)
        self.make = patch.start()
        self.addCleanup(patch.stop)

    def assert_right(self, mask):
        output = self.case.attend(mask, memo=self.memo)
        self.assertLess((output - self.case.reference(mask)).abs().max().item(), 1e-5)

    def test_once_per_step(self):
        mask = self.case.mask("blind rows")
        for _ in range(3):
            self.assert_right(mask)
            self.assert_right(mask[:, :, :, :])  # the same view, made anew
        self.assertEqual(self.make.call_count, 1)

    def test_another_mask_another_view_another_case(self):
        mask = self.case.mask("blind rows")
        for other in (mask, mask.clone(), mask[1:2], mask[2:3], mask.flip(-1)):
            self.assert_right(other)
        self.assertEqual(self.make.call_count, 5)
        self.case = Case((6, ((3, 17), (6, 5))))
        self.assert_right(mask)
        self.assertEqual(self.make.call_count, 6)

    def test_changed_in_place(self):
        mask = self.case.mask("bool")
        self.assert_right(mask)
        mask[:, :, :, :9] = False
        self.assert_right(mask)
        self.assertEqual(self.make.call_count, 2)

    def test_in_inference_mode(self):
        """Changes aren't counted there: nothing is kept."""
        with torch.inference_mode():
            mask = self.case.mask("bool")
            self.assert_right(mask)
            mask[:, :, :, :9] = False
            self.assert_right(mask)
        self.assertEqual(self.make.call_count, 2)

    def test_bounded(self):
        """And what is kept can't be taken for a new mask at the same place in memory."""
        for seed in range(20):
            self.case.seed = seed
            self.assert_right(self.case.mask("bool"))
        self.assertEqual(self.make.call_count, 20)
        self.assertEqual(len(self.memo._entries), 4)

    def test_with_gradients(self):
        mask = self.case.mask("bias").requires_grad_()
        for _ in range(2):
            mask.grad = None
            self.case.attend(mask, memo=self.memo).square().sum().backward()
            self.assertGreater(mask.grad.abs().max().item(), 0)
        self.assertEqual(self.make.call_count, 2)


class ProductsTest(unittest.TestCase):
    @parameterized.expand(product(SEGMENTS, [(4, 4), (6, 2), (4, 1)], [1, 3]))
    def test_scores_and_weigh(self, segments, heads, queries):
        case = Case(segments, *heads, queries, value_size=5)
        keys, values = (x.repeat_interleave(heads[0] // heads[1], dim=1) for x in case.copied())
        expected = case.query @ keys.mT
        with Operators() as operators:
            ours = scores(case.query, case.keys)
            output = weigh(expected.softmax(-1), case.values)
        self.assertEqual(operators.names.count("bmm"), 2 * len(case.keys))
        self.assertLess((ours - expected).abs().max().item(), 1e-5)
        self.assertLess((output - expected.softmax(-1) @ values).abs().max().item(), 1e-5)

    def test_no_copy_of_a_prefix(self):
        case = Case((8, ((2, 1000), (8, 3))), heads=4, kv_heads=4, size=64)
        with Operators() as operators:
            weigh(scores(case.query, case.keys).softmax(-1), case.values)
        self.assertLess(operators.largest, case.keys[0].nbytes // 4)
        with Operators() as operators:
            case.copied()
        self.assertGreaterEqual(operators.largest, 4 * case.keys[0].nbytes)

    def test_gradients(self):
        case = Case("common prefix", dtype=torch.float64)
        gradients = []
        for share in (True, False):
            for tensor in (case.query, *case.keys, *case.values):
                tensor.requires_grad_().grad = None
            keys, values = (x.repeat_interleave(2, dim=1) for x in case.copied())
            weights = (scores(case.query, case.keys) if share else case.query @ keys.mT).softmax(-1)
            (weigh(weights, case.values) if share else weights @ values).square().sum().backward()
            gradients.append([tensor.grad.clone() for tensor in (case.query, *case.keys, *case.values)])
        for ours, reference in zip(*gradients, strict=True):
            self.assertGreater(reference.abs().max().item(), 0)
            self.assertLess((ours - reference).abs().max().item(), 1e-10)

    def test_wrong_arguments(self):
        case = Case()
        with self.assertRaisesRegex(ValueError, "must have rows that divide .* and heads"):
            scores(case.query[:5], case.keys)
        with self.assertRaisesRegex(ValueError, "must have rows that divide .* and heads"):
            weigh(torch.ones(5, 4, 1, 22), case.values)


class MergeStatesTest(unittest.TestCase):
    def test_any_order(self):
        generator = torch.Generator().manual_seed(0)
        products, values = torch.randn(3, 9, generator=generator), torch.randn(9, 2, generator=generator)
        parts = [slice(0, 4), slice(4, 5), slice(5, 9)]
        first, second, third = (
            (products[:, part].softmax(-1) @ values[part], products[:, part].logsumexp(-1)) for part in parts
        )
        expected = products.softmax(-1) @ values, products.logsumexp(-1)
        for merged in (
            merge_states(merge_states(first, second), third),
            merge_states(first, merge_states(second, third)),
            merge_states(third, merge_states(second, first)),
        ):
            for ours, reference in zip(merged, expected, strict=True):
                self.assertLess((ours - reference).abs().max().item(), 1e-6)
        self.assertIsNone(merge_states(first, second, need_lse=False)[1])

    def test_types(self):
        """16-bit outputs are merged in float32, as their log-sum-exps are."""
        output, lse = merge_states(
            (torch.ones(2, 3, dtype=torch.bfloat16), torch.zeros(2)), (torch.full((2, 3), 2.0), torch.zeros(2))
        )
        self.assertEqual((output.dtype, lse.dtype), (torch.float32, torch.float32))
        self.assertTrue(torch.equal(output, torch.full((2, 3), 1.5)))
