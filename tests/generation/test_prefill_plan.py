# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
What worked before goes on: code of callers that tells rows apart, or that `generate` would pass by, gets all rows, and what
comes out is what pristine upstream gives.
"""

import contextlib
import copy
import functools
import inspect
import re
import sys
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from parameterized import parameterized
from safetensors.torch import load, save
from torch import nn

import transformers
from transformers import DynamicCache, LlamaForCausalLM, LogitsProcessor, StaticCache

from .runs import MODES, forwarded, oracle
from .tiny_models import build_inputs, build_model


SETTINGS = {
    **{name: {**arguments(3), "max_new_tokens": 5} for name, arguments in MODES.items()},
    "equal rows": {"do_sample": True, "max_new_tokens": 5},
}


def as_class(class_: type, model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The weights of `model` in another class."""
    made = class_(model.config).eval()
    made.load_state_dict(model.state_dict())
    return made


def steered(model):
    """Another vector for each row, and for equal rows."""
    vectors = torch.randn(12, 32, generator=torch.Generator().manual_seed(5))
    model.model.layers[0].register_forward_hook(lambda module, args, output: output + vectors[: len(output), None])
    return model


def steered_before(model):
    """The same, in what a module is given."""
    vectors = torch.randn(12, 32, generator=torch.Generator().manual_seed(5))
    model.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] + vectors[: len(args[0]), None],))
    return model


def steered_in_place(model):
    def steer(module, args):
        args[0][:, :, 0] += torch.arange(float(len(args[0])))[:, None]

    model.model.layers[1].mlp.register_forward_pre_hook(steer)
    return model


def steered_by_forward(model):
    layer, forward = model.model.layers[0].mlp, model.model.layers[0].mlp.forward
    layer.forward = lambda x: forward(x) + torch.arange(float(len(x)))[:, None, None]
    return model


def noisy_hook(model):
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: output + torch.randn_like(output))
    return model


def dropout_in_evaluation_mode(model):
    model.model.norm = nn.Sequential(model.model.norm, nn.Dropout(0.4))
    model.model.norm[1].train()
    return model


class Perturbed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.sigma = inner, 0.5

    def forward(self, x):
        return self.inner(x) + self.sigma * torch.randn_like(x)


def noise_of_any_name(model):
    model.model.layers[1].mlp = Perturbed(model.model.layers[1].mlp)
    return model


class Styles(LlamaForCausalLM):
    def _expand_inputs_for_generation(self, expand_size=1, is_encoder_decoder=False, input_ids=None, **kwargs):
        input_ids, kwargs = super()._expand_inputs_for_generation(expand_size, is_encoder_decoder, input_ids, **kwargs)
        input_ids = input_ids.clone()
        input_ids[:, 0] = torch.arange(len(input_ids)) % 40 + 5
        return input_ids, kwargs


class Allocates(LlamaForCausalLM):
    def _prepare_cache_for_generation(self, config, model_kwargs, mode, batch_size, max_cache_length):
        rows = batch_size * max(config.num_beams, config.num_return_sequences)
        model_kwargs["cache"] = StaticCache(self.config, max_cache_len=max_cache_length)
        model_kwargs["cache"].early_initialization(rows, 2, 8, torch.float32, torch.device("cpu"))


class Sees(LlamaForCausalLM):
    """Adds what it sees to every token, at every step."""

    def forward(self, input_ids=None, pixel_values=None, **kwargs):
        embeds = self.model.embed_tokens(input_ids)
        return super().forward(inputs_embeds=embeds if pixel_values is None else embeds + pixel_values, **kwargs)

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return {**inputs, "pixel_values": kwargs.get("pixel_values")}


class Tasks(LlamaForCausalLM):
    """An input of its own with something for each row."""

    def forward(self, input_ids=None, task_ids=None, **kwargs):
        embeds = self.model.embed_tokens(input_ids)
        return super().forward(
            inputs_embeds=embeds + torch.tensor(task_ids).resize_(len(embeds))[:, None, None], **kwargs
        )


class Patched(LlamaForCausalLM):
    """A method assigned to the object."""

    def __init__(self, config):
        super().__init__(config)
        own = self._update_model_kwargs_for_generation

        def update(outputs, model_kwargs, **kwargs):
            outputs.logits = outputs.logits + torch.arange(float(len(outputs.logits)))[:, None, None].cos()
            return own(outputs, model_kwargs, **kwargs)

        self._update_model_kwargs_for_generation = update


@dataclass
class RecurrentOutput(transformers.utils.ModelOutput):
    logits: torch.Tensor | None = None
    memory: torch.Tensor | None = None


def _remote_classes() -> dict[str, type]:
    """Recurrent models of a user: states beside the cache, under a name of their own, or a tuple in its place."""

    class Recurrent(LlamaForCausalLM):
        """The mean of all embeddings, carried on as `memory`, (rows, D) or with the rows second."""

        is_second = False

        def forward(self, input_ids=None, memory=None, **kwargs):
            states = self.model.embed_tokens(input_ids).cumsum(1)
            if memory is not None:
                states = states + (memory.transpose(0, 1) if self.is_second else memory)
            memory = states[:, -1:]
            memory = memory.transpose(0, 1) if self.is_second else memory
            return RecurrentOutput(logits=self.lm_head(states), memory=memory)

        def prepare_inputs_for_generation(self, input_ids, memory=None, **kwargs):
            return {"input_ids": input_ids if memory is None else input_ids[:, -1:], "memory": memory}

    class Carried(Recurrent):
        def _update_model_kwargs_for_generation(self, outputs, model_kwargs, **kwargs):
            return {**model_kwargs, "memory": outputs.memory, "cache": None}

        def _reorder_cache(self, cache, beam_idx):
            return cache

    class Tupled(LlamaForCausalLM):
        def forward(self, input_ids=None, cache=None, **kwargs):
            states = self.model.embed_tokens(input_ids)
            if isinstance(cache, tuple):
                states = torch.cat([cache[0][0], states], dim=1)
            logits = self.lm_head(states.cumsum(1)[:, -input_ids.shape[1] :])
            return transformers.modeling_outputs.CausalLMOutputWithPast(logits=logits, past_key_values=((states,),))

        def prepare_inputs_for_generation(self, input_ids, cache=None, **kwargs):
            return {"input_ids": input_ids[:, -1:] if isinstance(cache, tuple) else input_ids, "cache": cache}

    class TimeFirst(LlamaForCausalLM):
        """Hidden states are (L, B, D)."""

        def forward(self, input_ids=None, **kwargs):
            outputs = super().forward(input_ids=input_ids, **kwargs)
            if outputs.hidden_states is not None:
                outputs.hidden_states = tuple(states.transpose(0, 1) for states in outputs.hidden_states)
            return outputs

    return {"carried": Carried, "tupled": Tupled, "time first": TimeFirst}


CASES = {
    "steered": steered,
    "steered before": steered_before,
    "steered in place": steered_in_place,
    "steered by forward": steered_by_forward,
    "noisy hook": noisy_hook,
    "dropout in evaluation mode": dropout_in_evaluation_mode,
    "noise of any name": noise_of_any_name,
    "styles": lambda model: as_class(Styles, model),
    "allocates": lambda model: as_class(Allocates, model),
    "sees": lambda model: as_class(Sees, model),
    "tasks": lambda model: as_class(Tasks, model),
    "patched": lambda model: as_class(Patched, model),
    **{name: (lambda model, name=name: as_class(_remote_classes()[name], model)) for name in ("carried", "tupled")},
}
# With these the prompt is forwarded once after all
ONCE = {"sees"}


def generate_case(case: str, mode: str) -> bytes:
    """The tokens and scores of two calls, and the rows of the first forward that came to its end in the last one."""
    model = CASES[case](build_model("llama"))
    arguments = {**SETTINGS[mode], "return_dict_in_generate": True, "output_scores": True}
    if case in ("carried", "tupled"):
        # The states of these models aren't reordered
        arguments = {key: value for key, value in arguments.items() if key != "num_beams"} | {"do_sample": True}
    inputs = {"input_ids": build_inputs("llama", 2)["input_ids"][[0, 0] if mode == "equal rows" else [0, 1]]}
    if case == "sees":
        inputs["pixel_values"] = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(2))
    if case == "tasks":
        inputs["task_ids"] = [1.0, 2.0] * 6
    found, rows = {}, []
    model.register_forward_hook(lambda module, args, output: rows.append(output.logits.shape[0]))
    for call in range(2):
        rows.clear()
        torch.manual_seed(0)
        outputs = model.generate(**inputs, **arguments)
        found |= {f"sequences.{call}": outputs.sequences}
        found |= {f"scores.{call}.{step}": scores for step, scores in enumerate(outputs.scores)}
    return save({**found, "rows": torch.tensor(rows[0])})


def generate_with_own_fallback() -> bytes:
    """A subclass of Whisper that calls `generate` with all the arguments that it gets, as upstream's method does."""
    seen = []

    class OwnFallback(transformers.WhisperForConditionalGeneration):
        def generate_with_fallback(self, **arguments):
            seen.extend(arguments["kwargs"])
            return super().generate_with_fallback(**arguments)

    model = build_model("whisper")
    made = OwnFallback(model.config).eval()
    made.load_state_dict(model.state_dict())
    made.generation_config = model.generation_config
    tokens = made.generate(**build_inputs("whisper", 2), num_beams=3, num_return_sequences=2, max_new_tokens=6)
    return save({"sequences": tokens, "segments": torch.tensor("segments" in seen)})


class SameAsUpstreamTest(unittest.TestCase):
    def test_whisper_with_a_fallback_of_its_own(self):
        ours, theirs = load(generate_with_own_fallback()), load(oracle().run(generate_with_own_fallback))
        self.assertFalse(ours["segments"])
        self.assertTrue(torch.equal(ours["sequences"], theirs["sequences"]))

    @parameterized.expand([(case, mode) for case in CASES for mode in SETTINGS])
    def test_rows_that_differ_in_what_is_not_seen(self, case: str, mode: str):
        ours, theirs = load(generate_case(case, mode)), load(oracle().run(generate_case, case, mode))
        all_rows = theirs.pop("rows")
        self.assertEqual(all_rows > 2, mode != "equal rows")
        # The second call knows what the first one has learned
        self.assertEqual(ours.pop("rows"), 2 if case in ONCE else all_rows)
        self.assertEqual(ours.keys(), theirs.keys())
        for name, expected in theirs.items():
            torch.testing.assert_close(ours[name], expected, atol=1e-4, rtol=1e-4, msg=lambda text: f"{name}: {text}")  # noqa: B023

    def test_cases_would_show(self):
        """Rows of a prompt do differ in these cases: with `"copy"`, where it is possible, other tokens come out."""
        for case in ("steered", "steered by forward"):
            model = CASES[case](build_model("llama"))
            arguments = {**build_inputs("llama", 1), **SETTINGS["beam"], "output_scores": True}
            arguments["return_dict_in_generate"] = True
            right, wrong = (model.generate(**arguments, prompt_expansion=way).scores[0] for way in ("auto", "copy"))
            self.assertGreater((right - wrong).abs().max(), 1e-2)


class ObserverTest(unittest.TestCase):
    """Hooks that only look on are no obstacle where that can be seen."""

    def rows_of(self, change, **arguments) -> list[int]:
        model, rows = build_model("llama"), []
        change(model, rows)
        with forwarded(model) as shapes:
            model.generate(**build_inputs("llama", 2), num_beams=3, max_new_tokens=2, **arguments)
        self.assertEqual(rows, [shape[0] for shape in shapes] if rows else [])
        return [shape[0] for shape in shapes]

    def test_pre_hook(self):
        def look_on(model, rows):
            model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))

        self.assertEqual(self.rows_of(look_on), [2, 6])

    def test_hooks_are_put_back(self):
        model, seen = build_model("llama"), []
        hook = lambda module, args: seen.append(len(args[0]))  # noqa: E731
        model.model.layers[0].register_forward_pre_hook(hook)
        changing = model.model.layers[1].register_forward_pre_hook(lambda module, args: (2 * args[0],))
        model.generate(**build_inputs("llama", 2), num_beams=3, max_new_tokens=1)
        self.assertEqual(seen, [2, 6])
        self.assertEqual(list(model.model.layers[0]._forward_pre_hooks.values()), [hook])
        changing.remove()
        model.generate(**build_inputs("llama", 2), num_beams=3, max_new_tokens=1)
        self.assertEqual(seen, [2, 6, 2])

    def test_hook_on_the_model_itself(self):
        self.assertEqual(self.rows_of(lambda model, rows: model.register_forward_hook(lambda *_: None)), [2, 6])

    def test_hooks_of_the_library(self):
        """`output_hidden_states` installs some, which stay."""
        model = build_model("llama")
        model(**build_inputs("llama", 2), output_hidden_states=True)
        self.assertTrue(any(module._forward_hooks for module in model.modules()))
        with forwarded(model) as shapes:
            model.generate(**build_inputs("llama", 2), num_beams=3, max_new_tokens=1)
        self.assertEqual(shapes[0][0], 2)

    def test_explicit_choice_counts_and_is_logged(self):
        model = build_model("llama")
        model.model.layers[0].register_forward_hook(lambda module, args, output: None)
        inputs = {**build_inputs("llama", 2), "num_beams": 3, "max_new_tokens": 1}
        for way, rows in (("auto", 6), ("copy", 2), ("share", 2)):
            with forwarded(model) as shapes:
                model.generate(**inputs, prompt_expansion=way)
            self.assertEqual(shapes[0][0], rows)
        from .test_prompt_expansion import ExpansionTestCase  # imports what upstream doesn't have

        (message,) = ExpansionTestCase().reasons(model, {**inputs, "prompt_expansion": "copy"})
        self.assertRegex(message, "'copy' .*asked for although a hook of a LlamaDecoderLayer")


class ProbationTest(unittest.TestCase):
    def test_class_from_outside_that_changes_nothing(self):
        class Renamed(LlamaForCausalLM):
            def forward(self, *args, **kwargs):
                return super().forward(*args, **kwargs)

        model = as_class(Renamed, build_model("llama"))
        with forwarded(model) as shapes:
            got = model.generate(**build_inputs("llama", 2), num_beams=3, max_new_tokens=4)
        self.assertEqual(shapes[0], (2, 9))
        want = build_model("llama").generate(**build_inputs("llama", 2), num_beams=3, max_new_tokens=4)
        self.assertTrue(torch.equal(got, want))

    @parameterized.expand([(9,), (2,)])
    def test_hidden_states_with_the_sequence_first(self, length: int):
        """Also where there are as many tokens as rows."""
        model = as_class(_remote_classes()["time first"], build_model("llama"))
        inputs = build_inputs("llama", 2, length)
        arguments = {
            "num_beams": 3,
            "max_new_tokens": 1,
            "output_hidden_states": True,
            "return_dict_in_generate": True,
        }
        with forwarded(model) as shapes:
            outputs = model.generate(**inputs, **arguments)
        self.assertEqual([shape[0] for shape in shapes], [2, 6])
        want = model.generate(**inputs, **arguments, prompt_expansion="recompute")
        for got, expected in zip(outputs.hidden_states[0], want.hidden_states[0], strict=True):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        with forwarded(model) as shapes:
            model.generate(**inputs, **arguments)
        self.assertEqual([shape[0] for shape in shapes], [6])

    @parameterized.expand([(DynamicCache,), (StaticCache,)])
    def test_cache_of_the_caller_is_as_it_was(self, kind: type):
        """The prompt is forwarded twice, on 2 rows and on 6, and the cached prefix is there both times."""

        class Extra(LlamaForCausalLM):
            def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
                outputs = super().forward(input_ids, attention_mask, position_ids, **kwargs)
                outputs["extra"] = torch.zeros(1)
                return outputs

        plain = build_model("llama")
        model, inputs = as_class(Extra, plain), {"input_ids": torch.arange(18).view(2, 9) + 5}
        cache = kind(model.config, max_cache_len=30) if kind is StaticCache else kind(config=model.config)
        with torch.no_grad():
            model(input_ids=inputs["input_ids"][:, :6], cache=cache)
        arguments = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 4, "disable_compile": True}
        with forwarded(model) as shapes:
            got = model.generate(**inputs, **arguments, cache=cache)
        self.assertEqual(shapes[:2], [(2, 3), (6, 3)])
        self.assertTrue(torch.equal(got, plain.generate(**inputs, **arguments)))
        self.assertEqual((cache.layers[0].keys.shape[0], cache.get_seq_length()), (6, 12))

    def test_classes_are_not_kept(self):
        from transformers.generation import prefill_obstacles

        before = len(prefill_obstacles._learned)
        model = noise_of_any_name(build_model("llama"))
        model.generate(**build_inputs("llama", 1), num_beams=2, max_new_tokens=1)
        self.assertEqual(len(prefill_obstacles._learned), before + 1)
        del model
        self.assertEqual(len(prefill_obstacles._learned), before)


def with_mixin(mixin: str):
    """A llama that says about itself what another model does."""

    def change(model):
        from transformers.generation import prefill_state

        return as_class(type("Stateful", (getattr(prefill_state, mixin), LlamaForCausalLM), {}), model)

    return change


def with_forward(edit):
    """A class whose `forward` edits its outputs."""

    def change(model):
        class Edited(LlamaForCausalLM):
            def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
                outputs = super().forward(input_ids, attention_mask, position_ids, **kwargs)
                edit(outputs)
                return outputs

        return as_class(Edited, model)

    return change


def changed(edit):
    """The model after `edit` has done something to it."""

    def change(model):
        edit(model)
        return model

    return change


class UpdatingLayer(transformers.cache_utils.DynamicLayer):
    def update(self, *args, **kwargs):
        return super().update(*args, **kwargs)


def cache_of(model, kind: str):
    cache = DynamicCache(config=model.config)
    if kind == "rows":
        with torch.no_grad():
            model(input_ids=torch.full((6, 2), 5), cache=cache)
    elif kind == "layer":
        cache.layers = [UpdatingLayer() for _ in cache.layers]
    else:
        cache = mock.NonCallableMagicMock(spec=["is_compileable", "is_linear"])
    return cache


def loop_without_expansion(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
    return input_ids


# Reason in the log -> what is done to a llama, and the arguments of `generate`
REASONS = {
    r"the model is in training mode, where each row draws its own dropout": (
        changed(lambda model: model.add_module("dropped", nn.Dropout(0.1).train())),
        {},
    ),
    r"the model is in training mode, where its batch normalization reads all rows": (
        changed(lambda model: model.add_module("norm", nn.BatchNorm1d(4).train())),
        {},
    ),
    r"the decoding method `loop_without_expansion` doesn't take `expand_size`": (
        None,
        {"custom_generate": loop_without_expansion},
    ),
    r"the cache passed in holds 6 rows already": (None, {"cache": "rows"}),
    r"`NonCallableMagicMock` has no `batch_repeat_interleave`": (None, {"cache": "foreign"}),
    r"`UpdatingLayer` overrides `update`, but neither `reorder_cache` nor `batch_repeat_interleave`": (
        None,
        {"cache": "layer"},
    ),
    r"token healing may change each row of the prompt": (None, {"token_healing": True}),
    r"the decoder keeps its own state": (with_mixin("OwnDecoderStatePrefillMixin"), {}),
    r"the capacity of the experts depends on the number of rows \(.*\)": (
        lambda model: with_mixin("NllbMoePrefillMixin")(model).train(),
        {},
    ),
    r"the prefill draws noise for each row of `input_values`, unless `sample=False`": (
        lambda model: with_inputs(with_mixin("VibeVoiceAsrPrefillMixin")(model)),
        {"input_values": torch.zeros(2, 1)},
    ),
    r"a hook of a LlamaMLP may treat rows differently": (
        changed(lambda model: model.model.layers[0].mlp.register_forward_hook(lambda *_: None)),
        {},
    ),
    r"a hook changes what a LlamaDecoderLayer is given": (steered_before, {}),
    r"the `forward` of a LlamaMLP was replaced by one that may treat rows differently": (steered_by_forward, {}),
    r"a hook of all modules may treat rows differently": ("global", {}),
    r"`_expand_inputs_for_generation` is not the library's own, and would not see all rows": (
        lambda model: as_class(Styles, model),
        {},
    ),
    r"it isn't known what of `task_ids` belongs to which row": (
        lambda model: as_class(Tasks, model),
        {"task_ids": [1.0] * 6},
    ),
    r"it isn't known which dimension of `position_ids` holds the rows": (
        with_forward(lambda outputs: None),
        {"position_ids": torch.arange(9).expand(3, 2, 9)},
    ),
    r"the model is no `torch.nn.Module`": (lambda model: SessionModel(model), {"do_sample": True}),
    r"the prefill draws random numbers": (noise_of_any_name, {}),
    r"the prefill has filled no `Cache`": (with_forward(lambda outputs: None), {"use_cache": False}),
    r"it isn't known what `extra`, which the prefill returns, holds for each row": (
        with_forward(lambda outputs: outputs.__setitem__("extra", torch.zeros(1))),
        {},
    ),
    r"the prefill of 2 rows returns `logits` of shape \(1, .*\)": (
        with_forward(lambda outputs: outputs.__setitem__("logits", outputs.logits[:1])),
        {},
    ),
    r"after the prefill of 2 rows the cache holds 4": (
        with_forward(lambda outputs: outputs.cache.batch_repeat_interleave(2)),
        {},
    ),
}


def with_inputs(model):
    model._validate_model_kwargs = lambda model_kwargs: None
    return model


def guide_reasons() -> list[str]:
    """Patterns of the reasons that the guide lists in its table of prompts that are computed for every row."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "source" / "en" / "prefill_once.md").read_text()
    table = text.partition('Computed for every row (`"recompute"`):')[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith('| "')]
    quoted = [reason for cell in cells for reason in re.findall(r'"(.*?)"', cell)]
    return [re.escape(reason).replace("…", ".*") for reason in quoted]


class ReasonTest(unittest.TestCase):
    """Every reason to compute all rows is logged, and in the guide, and the guide has no other."""

    def logged_reasons(self, reason: str) -> list[str]:
        from .test_equal_rows import logged

        change, arguments = REASONS[reason]
        model = build_model("llama")
        inputs, arguments = {"input_ids": build_inputs("llama", 2)["input_ids"]}, {"num_beams": 3, **arguments}
        if arguments.pop("do_sample", False):
            arguments = {"do_sample": True, "num_return_sequences": 3}
        with contextlib.ExitStack() as stack:
            if change == "global":
                stack.callback(nn.modules.module.register_module_forward_pre_hook(lambda *_: None).remove)
            elif change is not None:
                model = change(model)
            messages = stack.enter_context(logged())
            for _ in range(2):
                given = {"cache": cache_of(model, arguments["cache"])} if "cache" in arguments else {}
                # What is done to these models may be too much for them: the reason is logged before
                with contextlib.suppress(Exception):
                    model.generate(**inputs, **{**arguments, **given}, max_new_tokens=1)
        return messages

    @parameterized.expand([(reason,) for reason in REASONS])
    def test_logged(self, reason: str):
        messages = self.logged_reasons(reason)
        self.assertRegex(messages[-1], rf"prompt_expansion='recompute' \({reason}\)$")

    def test_guide_lists_them_all(self):
        listed = guide_reasons()
        self.assertGreater(len(listed), 20)
        plain = [reason.replace("\\", "") for reason in REASONS]
        for reason in plain:
            self.assertTrue(any(re.match(pattern, reason) for pattern in listed), reason)
        for pattern in listed:
            self.assertTrue(any(re.match(pattern, reason) for reason in plain), pattern)


class OwnTest(unittest.TestCase):
    """Whose code it is, whatever it says about itself."""

    def test_functions(self):
        from transformers.generation.prefill_obstacles import is_own

        forward = LlamaForCausalLM.forward
        wrapped = functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))
        self.assertEqual(wrapped.__module__, forward.__module__)
        for function, expected in (
            (forward, True),
            (torch.no_grad()(forward), True),
            (functools.partial(forward, None), True),
            (wrapped, False),
            (torch.no_grad()(wrapped), False),
            (functools.partial(wrapped), False),
            (mock.MagicMock(), False),
            (lambda: None, False),
        ):
            self.assertEqual(is_own(function), expected, function)

    def test_every_method_passed_by_is_there(self):
        """A name that upstream drops would be looked for in vain."""
        from transformers.generation.prefill_obstacles import PASSED_BY

        absent = [name for name in PASSED_BY if not hasattr(transformers.GenerationMixin, name)]
        self.assertEqual(absent, ["_reorder_cache"])  # that of single models

    def test_method_replaced_in_the_class(self):
        model, rows = build_model("llama"), []
        own = transformers.GenerationMixin._prefill

        def prefill(self, input_ids, *args, **kwargs):
            rows.append(len(input_ids))
            return own(self, input_ids, *args, **kwargs)

        with mock.patch.object(transformers.GenerationMixin, "_prefill", prefill):
            model.generate(**build_inputs("llama", 2), num_beams=3, max_new_tokens=1)
        self.assertEqual(rows, [6])


@contextlib.contextmanager
def functions_run() -> Iterator[list[str]]:
    """Names the functions of our modules that are called."""
    from transformers.generation import (
        beam_reordering,
        common_prefix,
        equal_rows,
        group_beam_search,
        prefill,
        prefill_obstacles,
    )

    modules = (beam_reordering, common_prefix, equal_rows, group_beam_search, prefill, prefill_obstacles)
    files = {module.__file__ for module in modules}
    files = {inspect.getsourcefile(sys.modules[prefill.__name__]), *files}
    called = []

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename in files:
            caller = frame.f_back
            if caller.f_code.co_filename not in files:
                called.append(frame.f_code.co_qualname)
                if called[-1] == "PrefillPlan.prefills_once":
                    del called[-1]  # the plan is read

    sys.setprofile(profile)
    try:
        yield called
    finally:
        sys.setprofile(None)


class UpstreamsPathTest(unittest.TestCase):
    """One row per prompt takes upstream's code, line by line."""

    @parameterized.expand(
        [
            ("greedy", "llama", 1, {}),
            ("greedy", "llama", 2, {}),
            ("sample", "llama", 2, {"do_sample": True}),
            ("encoder_decoder", "bart", 2, {}),
            (
                "static",
                "llama",
                2,
                {"cache_implementation": "static", "disable_compile": True, "prefill_chunk_size": 4},
            ),
            ("dict", "llama", 2, {"return_dict_in_generate": True, "output_scores": True}),
        ]
    )
    def test_nothing_of_ours_runs_but_the_plan(self, _, name: str, rows: int, arguments: dict):
        model, inputs = build_model(name), build_inputs(name, rows)
        with functions_run() as called:
            model.generate(**inputs, max_new_tokens=3, **arguments)
        self.assertEqual(called, ["plan_prefill"])

    def test_counter_counts(self):
        model = build_model("llama")
        with functions_run() as called:
            model.generate(**build_inputs("llama", 2), num_beams=2, max_new_tokens=2)
        self.assertEqual(called[:3], ["plan_prefill", "detach_from_caller", "PrefillPlan.expand_prompts"])
        self.assertIn("PrefillPlan.prefill", called)

    def test_expansion_is_called_for_one_row(self):
        calls = []

        class Counts(LlamaForCausalLM):
            def _expand_inputs_for_generation(self, expand_size=1, **kwargs):
                calls.append(expand_size)
                return super()._expand_inputs_for_generation(expand_size=expand_size, **kwargs)

        as_class(Counts, build_model("llama")).generate(**build_inputs("llama", 2), max_new_tokens=1)
        self.assertEqual(calls, [1])

    @parameterized.expand([({},), ({"num_beams": 3},), ({"num_beams": 4, "num_beam_groups": 2},)])
    def test_nothing_is_written_to_the_configuration(self, arguments: dict):
        seen = []

        class Keeps(LogitsProcessor):
            def __call__(self, input_ids, scores):
                frame = inspect.currentframe().f_back
                while "generation_config" not in frame.f_locals:
                    frame = frame.f_back
                seen.append(frame.f_locals["generation_config"])
                return scores

        inputs = build_inputs("llama", 2)
        inputs["input_ids"] = inputs["input_ids"][[0, 0]]
        build_model("llama").generate(**inputs, **arguments, max_new_tokens=2, logits_processor=[Keeps()])
        upstream = {"_from_model_config", "_original_object_hash", "_commit_hash", "_mask_length"}
        tensors = {f"_{name}_token_tensor" for name in ("bos", "eos", "pad", "decoder_start")}
        private = {name for name in vars(seen[0]) if name.startswith("_")}
        self.assertLessEqual(private, upstream | tensors)
        self.assertIsNone(seen[0].prompt_expansion)


class SessionModel(transformers.GenerationMixin):
    """`GenerationMixin` around something that is no `torch.nn.Module`, with a tuple for a cache."""

    main_input_name, _is_stateful, base_model_prefix = "input_ids", False, "session"

    def __init__(self, inner):
        self.inner, self.config, self.generation_config = inner, inner.config, inner.generation_config
        self.device, self.dtype = torch.device("cpu"), torch.float32

    def can_generate(self):
        return True

    def get_experts_implementation(self):
        return {}

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def forward(self, input_ids, attention_mask=None, past_key_values=None, **kwargs):
        cache = DynamicCache(past_key_values) if past_key_values is not None else DynamicCache()
        outputs = self.inner(input_ids, attention_mask=attention_mask, cache=cache)
        past = tuple((layer.keys, layer.values) for layer in cache.layers)
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=outputs.logits, past_key_values=past)

    def prepare_inputs_for_generation(self, input_ids, cache=None, attention_mask=None, **kwargs):
        input_ids = input_ids[:, -1:] if isinstance(cache, tuple) else input_ids
        return {"input_ids": input_ids, "past_key_values": cache, "attention_mask": attention_mask}


class OtherObjectsTest(unittest.TestCase):
    @parameterized.expand([({},), ({"do_sample": True, "num_return_sequences": 3},)])
    def test_model_that_is_no_module(self, arguments: dict):
        model, inputs = build_model("llama"), {"input_ids": build_inputs("llama", 2)["input_ids"]}
        found = []
        for candidate in (model, SessionModel(model)):
            torch.manual_seed(0)
            found.append(candidate.generate(**inputs, **arguments, max_new_tokens=4, eos_token_id=None))
        self.assertTrue(torch.equal(*found))
        with self.assertRaisesRegex(ValueError, "no `torch.nn.Module`"):
            SessionModel(model).generate(**inputs, num_beams=2, prompt_expansion="copy")

    def test_processor_with_a_method_of_the_same_name(self):
        """Only our own processors are reordered."""
        calls = []

        class Mine(LogitsProcessor):
            def reorder_cache(self, beam_idx):
                calls.append(beam_idx)

            def __call__(self, input_ids, scores):
                return scores

        build_model("llama").generate(
            **build_inputs("llama", 2), num_beams=3, max_new_tokens=3, logits_processor=[Mine()]
        )
        self.assertEqual(calls, [])

    def test_prefill_and_expand_refuses(self):
        model, inputs = build_model("llama"), build_inputs("llama", 1)
        with self.assertRaisesRegex(ValueError, "`expand_size` must be an integer of at least 1, but is 0"):
            model.prefill_and_expand(inputs["input_ids"], copy.copy(model.generation_config), {}, expand_size=0)
