# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Who may share a prefix: the rule on small pieces of code, on all of upstream's attention classes, and on models."""

import ast
import json
import textwrap
import types
import unittest
from types import SimpleNamespace
from unittest import mock

import torch
from parameterized import parameterized
from torch import nn

from transformers.integrations.shared_prefix_attention import share_prefix_in_eager
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, repeat_kv
from transformers.shared_prefix_support import analyze_function, cannot_share, is_standard_eager
from transformers.utils.generic import maybe_autocast

from ..generation.test_shared_prefix_attention import Case
from ..generation.tiny_models import BUILDERS, build_model
from .sharing_table import MODELS, TABLE, attention_methods, modeling_files, scan


STANDARD = """
    def forward(self, x, cache=None, mask=None, **kwargs):
        k, v = self.k(x), self.v(x)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx, kwargs=kwargs)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        return attend(self, x, k, v, mask, dropout=0.0, scaling=self.scaling, **kwargs)
"""
CROSS = """
    def forward(self, x, encoded=None, cache=None, mask=None, **kwargs):
        current = cache.self_attention_cache if encoded is None else cache.cross_attention_cache
        if encoded is not None and cache.is_updated[self.layer_idx]:
            k, v = current.layers[self.layer_idx].keys, current.layers[self.layer_idx].values
        else:
            k, v = self.k(x), self.v(x)
            k, v = current.update(k, v, self.layer_idx, kwargs=kwargs)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        return attend(self, x, k, v, mask, **kwargs)
"""
UPDATE = "k, v = cache.update(k, v, self.layer_idx, kwargs=kwargs)"
ATTEND = "return attend(self, x, k, v, mask, dropout=0.0, scaling=self.scaling, **kwargs)"
# What is changed in STANDARD, and the obstacle that it makes
OBSTACLES = {
    "keys altered": (ATTEND, f"k = k * 2; {ATTEND}", "in another way"),
    "values altered": (ATTEND, f"v = self.norm(v); {ATTEND}", "in another way"),
    "altered in place": (ATTEND, f"k.mul_(2); {ATTEND}", "in another way"),
    "altered in an operation": (ATTEND, f"k *= 2; {ATTEND}", "in another way"),
    "second name": (UPDATE, f"k, v = {UPDATE.replace('k, v', 'pair')}", "does not assign what `update` returns"),
    "kwargs changed in a block": (ATTEND, f"\n        with self.x: kwargs = {{}}\n        {ATTEND}", "assigns to"),
    "interface replaced": (
        "return attend(",
        "attend = self.f if self.f else attend\n        return attend(",
        "in another",
    ),
    "altered in a branch": (ATTEND, f"k = self.norm(k) if self.normed else k; {ATTEND}", "in another way"),
    "altered in the call": (ATTEND, ATTEND.replace("x, k, v", "x, k * 2, v * 2"), "in another way"),
    "keys altered in the call": (ATTEND, ATTEND.replace("x, k,", "x, k * 2,"), "in another way"),
    "keys and values swapped": (ATTEND, ATTEND.replace("x, k, v", "x, v, k"), "from the same place"),
    "keys for the mask": (ATTEND, ATTEND.replace("mask,", "self.mask(mask, k),"), "in another way"),
    "rows of the keys": (ATTEND, f"rows = k.shape[0]; {ATTEND}", "in another way"),
    "kept elsewhere": (ATTEND, f"self.shared[0] = k, v; {ATTEND}", "in another way"),
    "returned": (ATTEND, f"result = {ATTEND[7:]}; return result, k, v", "in another way"),
    "length of the keys": (ATTEND, f"bias = self.bias(k.shape[-2]); {ATTEND}", "takes a length"),
    "bias of that length": (
        ATTEND,
        ATTEND.replace("**kw", "position_bias=self.b(k.shape[-2]), **kw"),
        "takes a length",
    ),
    "no kwargs for update": (", kwargs=kwargs)", ")", "without its `kwargs`"),
    "other kwargs for update": ("kwargs=kwargs)", "kwargs=self.kwargs)", "without its `kwargs`"),
    "no kwargs for attention": (", **kwargs)\n", ")\n", "does not pass its `kwargs`"),
    "other kwargs for attention": ("scaling, **kwargs)", "scaling, **self.kwargs)", "does not pass its `kwargs`"),
    "new kwargs": (ATTEND, f"kwargs = {{}}; {ATTEND}", "assigns to `kwargs`"),
    "unknown argument": ("dropout=0.0", "block_indices=self.blocks", "passes the attention function `block_indices`"),
    "own attention": (ATTEND, "return torch.softmax(x @ k.mT, -1) @ v", "in another way"),
    "other interface": ("ALL_ATTENTION_FUNCTIONS.get", "MINE.get", "in another way"),
    "other configuration": ("self.config._attn", "self.other_config._attn", "in another way"),
    "keys as values": (ATTEND, ATTEND.replace("x, k, v", "x, k, k2"), "from the same place"),
    "one result": (UPDATE, f"kv = {UPDATE[7:]}; k, v = kv", "does not assign what `update` returns"),
    "nested result": (UPDATE, f"k, v = self.norm(*{UPDATE[7:]})", "does not assign what `update` returns"),
    "loop": (UPDATE, f"\n            for _ in range(2):\n                {UPDATE}", "block around the cache"),
    "layer of the own cache": (UPDATE, f"{UPDATE}; k = cache.layers[0].keys", "is not an encoder-decoder cache"),
}


def analyze(code: str, is_eager: bool = False):
    return analyze_function(ast.parse(textwrap.dedent(code)).body[0], is_eager)


class RuleTest(unittest.TestCase):
    def test_standard_code(self):
        use = analyze(STANDARD)
        self.assertTrue(use.updates)
        self.assertFalse(use.reads_layers)
        self.assertEqual(use.self_attention, [])
        self.assertEqual(use.eager_functions, {"eager_attention_forward"})

    @parameterized.expand(OBSTACLES)
    def test_obstacle(self, name):
        old, new, reason = OBSTACLES[name]
        self.assertEqual(STANDARD.count(old), 1)
        use = analyze(STANDARD.replace(old, new))
        self.assertIn(reason, "; ".join(use.self_attention))

    def test_what_is_done_before_the_update_does_not_matter(self):
        code = STANDARD.replace("if cache is", "k = self.norm(k) + k.shape[-2]\n        if cache is")
        self.assertEqual(analyze(code).self_attention, [])

    def test_overwritten_keys_are_no_longer_followed(self):
        """Another branch's keys, or other tensors under the same name."""
        code = STANDARD.replace(ATTEND, f"result = {ATTEND[7:]}; k = x; return k, result")
        self.assertEqual(analyze(code).self_attention, [])
        code = STANDARD.replace(f"    {UPDATE}", f"    {UPDATE}\n        else:\n            k = k * 2")
        self.assertEqual(analyze(code).self_attention, [])

    def test_a_branch_that_returns_does_not_go_on(self):
        code = STANDARD.replace(ATTEND, f"if self.fast: {ATTEND}\n        return None")
        self.assertEqual(analyze(code).self_attention, [])

    def test_code_for_eager_attention_alone(self):
        branch = "if eager and self.upcast:\n            return self.own(x, k, v)\n        "
        code = STANDARD.replace(ATTEND, branch + ATTEND)
        code = code.replace("if cache", "eager = self.config._attn_implementation == 'eager'\n        if cache")
        self.assertEqual(analyze(code, is_eager=False).self_attention, [])
        self.assertIn("in another way", analyze(code, is_eager=True).self_attention[0])

    def test_cross_attention(self):
        use = analyze(CROSS)
        self.assertTrue(use.updates and use.reads_layers)
        self.assertEqual((use.self_attention, use.cross_attention), ([], []))

    def test_a_length_of_the_keys_is_right_for_cross_attention(self):
        use = analyze(CROSS.replace("attend = ", "length = k.shape[-2]\n        attend = "))
        self.assertEqual(use.cross_attention, [])
        self.assertIn("takes a length", use.self_attention[0])

    def test_altered_cross_attention(self):
        use = analyze(CROSS.replace("attend = ", "k = self.norm(k)\n        attend = "))
        self.assertIn("in another way", use.self_attention[0])
        self.assertIn("in another way", use.cross_attention[0])

    def test_no_cache(self):
        for code in (
            "def forward(self, x, options): options.update(x)",
            "def forward(self, x, padding): return padding.update(x, self.key, self)",
            "def forward(self, x, cache): return cache.get_seq_length()",
        ):
            use = analyze(code)
            self.assertFalse(use.updates or use.reads_layers)


class UpstreamTest(unittest.TestCase):
    """All of upstream's modeling files."""

    def test_table(self):
        """A difference is to be read: upstream has a new class, or does something else with its keys now."""
        self.maxDiff = None
        self.assertEqual(scan(), json.loads(TABLE.read_text(encoding="utf-8")))

    def test_totals(self):
        counts = {}
        for kind in ("self_attention", "cross_attention"):
            uses = [[use[kind] for use in classes.values() if kind in use] for classes in scan().values()]
            counts[kind] = sum(bool(of_model) and not any(of_model) for of_model in uses)
        self.assertEqual(counts, {"self_attention": 180, "cross_attention": 49})

    @parameterized.expand(
        [
            ("deepseek_v3", "DeepseekV3Attention", "in another way"),  # rebuilds keys and values
            ("gemma3n", "Gemma3nTextAttention", "in another way"),  # hands them to other layers
            ("jetmoe", "JetMoeAttention", "in another way"),  # repeats them
            ("idefics", "IdeficsAttention", "in another way"),  # normalizes them
            ("bloom", "BloomAttention", "without its `kwargs`"),
            ("gpt_neox", "GPTNeoXAttention", "without its `kwargs`"),
            ("t5", "T5Attention", "takes a length"),
            ("mllama", "MllamaTextCrossAttention", "not an encoder-decoder cache"),
        ]
    )
    def test_known_obstacles(self, model, class_name, reason):
        """Found by reading, not by this rule."""
        self.assertIn(reason, "; ".join(scan()[model][class_name]["self_attention"]))

    def test_eager_attention_functions(self):
        """Those that are taken for standard, of files with an attention class that may share, compute what ours does."""
        checked = {}
        for model, tree in modeling_files().items():
            uses = [analyze_function(method, is_eager=True) for _, method in attention_methods(tree)]
            names = {name for use in uses if not use.self_attention for name in use.eager_functions}
            for definition in tree.body:
                if getattr(definition, "name", None) not in names:
                    continue
                code = "\n".join(map(ast.unparse, definition.body))
                if is_standard_eager(definition) and code not in checked:
                    checked[code] = model
                    with self.subTest(model=model):
                        self.check_eager(self.compile(definition), "module.sinks" in code, "softcap" in code)
        self.assertGreaterEqual(len(checked), 15)

    def test_eager_attention_that_is_not_standard(self):
        """Vision attention that leaves its argument `scaling` out, and one that leaves out the mask."""
        for model, name in (("llama4", "vision_eager_attention_forward"), ("vjepa2", "eager_attention_forward")):
            tree = ast.parse((MODELS / model / f"modeling_{model}.py").read_text(encoding="utf-8"))
            functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
            self.assertFalse(is_standard_eager(functions[name]))

    def compile(self, definition: ast.FunctionDef):
        for argument in [*definition.args.args, definition.args.kwarg]:
            argument.annotation = None
        definition.returns = None
        namespace = {
            "torch": torch,
            "nn": nn,
            "F": nn.functional,
            "repeat_kv": repeat_kv,
            "maybe_autocast": maybe_autocast,
        }
        exec(compile(ast.Module([definition], []), "eager", "exec"), namespace)
        return namespace[definition.name]

    def check_eager(self, eager, reads_sinks: bool, softcap: bool) -> None:
        case = Case(heads=4, kv_heads=4, prefix_length=30)
        mask = case.mask("additive")
        sinks = case.random(4)
        module = SimpleNamespace(
            num_key_value_groups=1, head_dim=8, training=False, is_causal=True, sinks=sinks if reads_sinks else None
        )
        keys, values = (
            torch.cat([prefix.repeat_interleave(case.repeats, dim=0), suffix], dim=2)
            for prefix, suffix in ((case.prefix_keys, case.key), (case.prefix_values, case.value))
        )
        arguments = {"scaling": 0.4, "dropout": 0.0}
        arguments |= {"s_aux": sinks} if reads_sinks else {}
        arguments |= {"softcap": 1.5} if softcap else {}
        expected = eager(module, case.query, keys, values, mask, **arguments)
        ours = share_prefix_in_eager(eager)(
            module, case.query, case.key, case.value, mask, shared_prefix=case.prefix, **arguments
        )
        if reads_sinks or softcap:
            plain = case.reference(mask, scaling=0.4)[0]
            self.assertGreater((ours[0] - plain).abs().max().item(), 1e-3)
        self.assertLess(
            (ours[0].reshape(-1) - self.token_first(expected[0], case).reshape(-1)).abs().max().item(), 1e-5
        )

    @staticmethod
    def token_first(output: torch.Tensor, case: Case) -> torch.Tensor:
        return output.view(case.rows, case.queries, case.heads, -1)


class CannotShareTest(unittest.TestCase):
    @parameterized.expand(
        [
            ("llama", None),
            ("qwen3", None),
            ("gpt2", None),
            ("gemma3", None),
            ("bart", None),
            ("whisper", None),
            ("gpt_neox", "GPTNeoXAttention calls `update` without its `kwargs`"),
            ("t5", "T5Attention takes a length from the keys after `update`"),
        ]
    )
    def test_self_attention(self, name, reason):
        self.assertEqual(cannot_share(build_model(name)), reason)

    @parameterized.expand(BUILDERS)
    def test_cross_attention(self, name):
        reason = cannot_share(build_model(name), "cross_attention")
        if name in ("bart", "whisper", "t5", "gpt2"):
            self.assertIsNone(reason)
        else:
            self.assertIn("has no cross-attention with a cache", reason)

    def test_no_cache_at_all(self):
        self.assertIn("has no self-attention with a cache", cannot_share(build_model("mamba")))

    def test_eager(self):
        self.assertIsNone(cannot_share(build_model("llama", attn_implementation="eager")))
        self.assertIn("in another way", cannot_share(build_model("gpt2", attn_implementation="eager")))

    def test_other_implementations(self):
        model = build_model("llama")
        for implementation in ("flash_attention_2", "flex_attention"):
            model.config._attn_implementation_internal = implementation
            self.assertIn(f"uses the attention implementation '{implementation}'", cannot_share(model))

    def test_replaced_attention_functions(self):
        model = build_model("llama")
        with mock.patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, {"sdpa": lambda *args, **kwargs: None}):
            self.assertIn("replaces the attention function `sdpa`", cannot_share(model))
        model.set_attn_implementation("eager")

        def eager_attention_forward(module, query, key, value, attention_mask, **kwargs):
            return torch.linalg.vecdot(query, key), None

        path = "transformers.models.llama.modeling_llama.eager_attention_forward"
        with mock.patch(path, eager_attention_forward):
            self.assertIn("has an eager attention `eager_attention_forward` of its own kind", cannot_share(model))

    def test_training(self):
        self.assertIn("is in training mode", cannot_share(build_model("gpt2").train()))
        # Without dropout, the mode makes no difference
        self.assertIsNone(cannot_share(build_model("llama").train()))

    def test_wrong_kind(self):
        with self.assertRaisesRegex(ValueError, "`kind` must be .* but is 'encoder'"):
            cannot_share(build_model("llama"), "encoder")

    def test_subclasses(self):
        """The rule is read off the method that runs, whoever wrote it."""

        class SameAttention(LlamaAttention):
            pass

        class OtherAttention(LlamaAttention):
            def forward(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, **kwargs):
                keys, values = cache.update(hidden_states, hidden_states, self.layer_idx, kwargs=kwargs)
                return keys * 2, values

        model = build_model("llama")
        model.model.layers[1].self_attn = SameAttention(model.config, 1).eval()
        self.assertIsNone(cannot_share(model))
        model.model.layers[1].self_attn = OtherAttention(model.config, 1).eval()
        self.assertIn("OtherAttention uses keys or values in another way", cannot_share(model))

    def test_source_that_cannot_be_read(self):
        namespace = {"LlamaAttention": LlamaAttention}
        exec(
            "class HiddenAttention(LlamaAttention):\n    def forward(self, x, cache, **kwargs):\n"
            "        return cache.update(x, x, self.layer_idx, kwargs=kwargs)",
            namespace,
        )
        model = build_model("llama")
        model.model.layers[1].self_attn = namespace["HiddenAttention"](model.config, 1).eval()
        self.assertIn("HiddenAttention has source code that can't be read", cannot_share(model))

    def test_forward_of_the_instance(self):
        model = build_model("llama")
        attention = model.model.layers[1].self_attn
        attention.forward = types.MethodType(lambda self, *args, **kwargs: None, attention)
        self.assertIn("has a `forward` of its own on the instance", cannot_share(model))

    def test_hooks_of_accelerate(self):
        """They replace `forward`, keep the class's one and run it. The attribute names are accelerate's."""
        model = build_model("llama")
        attention = model.model.layers[1].self_attn
        attention._old_forward, attention._hf_hook = attention.forward, object()
        attention.forward = types.MethodType(
            lambda self, *args, **kwargs: self._old_forward(*args, **kwargs), attention
        )
        self.assertIsNone(cannot_share(model))
