# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Random models, prompts and arguments: `generate` of the fork against pristine upstream, in a process kept alive.

`make fuzz` runs more examples, and new ones each time.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import event, given, note, settings
from hypothesis import strategies as st
from safetensors.torch import load
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedTokenizerFast
from transformers.cache_utils import DynamicSlidingWindowLayer

from .architectures.runner import strategies
from .changes import CHANGES, ONCE, RecentCache
from .runs import MODES, assert_same, oracle, run
from .tiny_models import BUILDERS, DECODER_ONLY, EOS, PAD, SPECIAL, VOCABULARY, build_model


MODELS = [name for name in [*BUILDERS, *SPECIAL] if name != "whisper"]
# Full attention, with a cache that a caller can fill with a common prefix
PREFIX_MODELS = [name for name in DECODER_ONLY if name != "gemma3"]
# The other one has no keys and values, and refuses to share a prompt
SHARING_MODELS = [name for name in MODELS if name != "mamba"]


@dataclass
class Case:
    """One call: a tiny model, its prompts, the arguments of `generate`, and the length of a prefix already cached."""

    name: str
    input_ids: list[list[int]]
    padding: list[int]
    arguments: dict[str, Any]
    expand_size: int
    prefix_length: int = 0
    stop_strings: list[str] = field(default_factory=list)
    change: str | None = None
    has_foreign_cache: bool = False

    def inputs(self) -> dict[str, torch.Tensor]:
        input_ids = torch.tensor(self.input_ids)
        attention_mask = torch.ones_like(input_ids)
        for row, padding in enumerate(self.padding):
            positions = (
                slice(0, padding) if self.name not in ("bart", "t5") else slice(len(input_ids[row]) - padding, None)
            )
            attention_mask[row, positions] = 0
        return {"input_ids": input_ids.masked_fill(attention_mask == 0, PAD), "attention_mask": attention_mask}

    def dtype(self) -> torch.dtype:
        """
        The type of the weights. A key that differs in its last digit may be stored as the next number of 8 bits, which is
        up to 1/8 of it away, and no bound on the output follows. In float64 that is too unlikely to be seen.
        """
        # Grouped products of experts lack float64
        has_experts = self.name in ("mixtral", "deepseek_v3", "qwen3_next")
        is_quantized = self.arguments.get("cache_implementation") == "quantized"
        return torch.float64 if is_quantized and not has_experts else torch.float32

    def prefilled_rows(self) -> int:
        """How many rows the fork's prefill has: one per distinct prompt, unless each row continues a cached prefix."""
        if self.has_foreign_cache or (self.change is not None and self.change not in ONCE):
            return len(self.input_ids) * self.expand_size
        if self.prefix_length > 0 or self.change is not None:
            return len(self.input_ids)
        return len(self._rows().unique(dim=0))

    def stored_rows(self) -> int:
        """How many rows a shared prompt is kept in: those of the prefill, or all B where equal ones don't form groups."""
        distinct, sizes = self._rows().unique_consecutive(dim=0, return_counts=True)
        is_grouped = len(distinct) == self.prefilled_rows() and len(sizes.unique()) == 1
        return len(distinct) if is_grouped else len(self.input_ids)

    def _rows(self) -> torch.Tensor:
        return torch.cat(list(self.inputs().values()), dim=1)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Token 5 is the word `w5`. The last token is what stop strings are matched with."""
    words = {f"w{token}": token for token in range(VOCABULARY)} | {"abcdef": VOCABULARY}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=f"w{PAD}", eos_token=f"w{EOS}")


def run_case(case: Case, prefix_repeats: int, **fork_arguments: Any) -> tuple[str, bytes | str]:
    """
    Runs a case, here or in the oracle.

    Args:
        case (`Case`): The case.
        prefix_repeats (`int`): Rows per prompt of the cache that holds the prefix: upstream takes B * N rows only.
        fork_arguments: Arguments of `generate` that upstream doesn't have.

    Returns:
        `tuple`: `"output"` and the output as safetensors, or `"error"` and the name of the exception's class.
    """
    inputs, arguments = case.inputs(), case.arguments | fork_arguments
    if case.stop_strings:
        arguments |= {"stop_strings": case.stop_strings, "tokenizer": word_tokenizer()}
    if case.prefix_length > 0:
        model = build_model(case.name)
        arguments["cache"] = DynamicCache(config=model.config)
        rows = {
            name: value[:, : case.prefix_length].repeat_interleave(prefix_repeats, 0) for name, value in inputs.items()
        }
        rows["position_ids"] = (rows["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            model(**rows, cache=arguments["cache"])
    if case.has_foreign_cache:
        arguments["cache"] = RecentCache(config=build_model(case.name).config)
    options = {"inputs": inputs, "dtype": case.dtype(), "change": case.change}
    try:
        return "output", run(case.name, len(case.input_ids), arguments, **options)
    except Exception as error:  # compared with the other side's
        return "error", type(error).__name__


@contextmanager
def sharing() -> Iterator[list[tuple[torch.Tensor, Any]]]:
    """
    Collects the layers that a prompt is shared in, each with the keys that it got from the prefill: as they are after the last
    step, before the caller gets ordinary ones.
    """
    # The oracle imports this module too
    from transformers.generation import prefill
    from transformers.prefix_sharing import SegmentedStates

    found, share_cache, learn_from = [], prefill.share_cache, prefill.learn_from

    def layers_of(cache: Cache) -> list[Any]:
        if isinstance(cache, EncoderDecoderCache):
            return layers_of(cache.self_attention_cache) + layers_of(cache.cross_attention_cache)
        return cache.layers

    def share(cache: Cache, *args) -> int:
        keys = [getattr(layer, "keys", None) for layer in layers_of(cache)]
        count = share_cache(cache, *args)
        pairs = zip(keys, layers_of(cache), strict=True)
        # A common prefix is shared before the prompts are
        found[:] = [
            (keys, layer) for keys, layer in pairs if isinstance(getattr(layer, "keys", None), SegmentedStates)
        ]
        assert len(found) == count
        return count

    def learn(*args) -> None:
        found[:] = [(keys, copy.copy(layer)) for keys, layer in found]
        learn_from(*args)

    with patch.object(prefill, "share_cache", share), patch.object(prefill, "learn_from", learn):
        yield found


@st.composite
def penalties(draw) -> dict[str, Any]:
    """Arguments that any mode takes."""
    choices = {
        "repetition_penalty": st.sampled_from([0.7, 1.3]),
        "encoder_repetition_penalty": st.sampled_from([0.7, 1.3]),
        "no_repeat_ngram_size": st.integers(1, 3),
        "encoder_no_repeat_ngram_size": st.integers(2, 3),
        "bad_words_ids": st.just([[7], [9, 11]]),
        "sequence_bias": st.just([[[8], -3.0], [[12, 5], 4.0]]),
        "suppress_tokens": st.just([4, 6]),
        "begin_suppress_tokens": st.just([5, 10]),
        "forced_eos_token_id": st.just(EOS),
        "min_new_tokens": st.integers(1, 4),
        "exponential_decay_length_penalty": st.just([2, 1.5]),
        "renormalize_logits": st.just(True),
        "remove_invalid_values": st.just(True),
    }
    names = draw(st.lists(st.sampled_from(sorted(choices)), max_size=3, unique=True))
    return {name: draw(choices[name]) for name in names}


@st.composite
def modes(draw, share: bool) -> tuple[int, dict[str, Any]]:
    """N, and the arguments of a decoding mode. One beam is greedy search; there is nothing to share with one row."""
    mode, expand_size = draw(st.sampled_from(sorted(MODES))), draw(st.integers(2 if share else 1, 4))
    arguments = MODES[mode](expand_size)
    if mode != "sample":
        arguments["num_return_sequences"] = draw(st.integers(1, expand_size))
        arguments["length_penalty"] = draw(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]))
        arguments["early_stopping"] = draw(st.sampled_from([False, True, "never"]))
    if mode != "beam":
        arguments |= draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "temperature": st.sampled_from([0.5, 1.5]),
                    "top_k": st.sampled_from([0, 5, 20]),
                    "top_p": st.sampled_from([0.6, 0.95]),
                    "min_p": st.just(0.05),
                },
            )
        )
    return expand_size, arguments


@st.composite
def caches(draw, name: str, share: bool) -> dict[str, Any]:
    """Arguments on the cache, and on chunks of the prefill."""
    choices = [{}, {}, {"cache_implementation": "dynamic"}]
    # Static layers that hold states of linear attention, too, are copied: "share" is refused where there are no others
    if not (share and name == "falcon_h1"):
        choices.append({"cache_implementation": "static", "disable_compile": True})
    if not share:
        choices += [
            {"use_cache": False},
            {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
        ]
    arguments = draw(st.sampled_from(choices))
    if name in DECODER_ONLY and "use_cache" not in arguments and draw(st.integers(0, 3)) == 0:
        arguments = {**arguments, "prefill_chunk_size": draw(st.integers(1, 5))}
    return arguments


@st.composite
def prompts(draw, length: int, repeated: bool) -> tuple[list[list[int]], list[int]]:
    """Tokens and padding of each row: rows that are all drawn, or some of them several times, in any order."""
    batch_size = draw(st.integers(1, 3))
    tokens = st.lists(st.integers(3, VOCABULARY - 1), min_size=length, max_size=length)
    rows = draw(st.lists(st.tuples(tokens, st.integers(0, length - 1)), min_size=batch_size, max_size=batch_size))
    if repeated:
        group_size = draw(st.integers(1, 4))
        picks = [row for row in range(batch_size) for _ in range(group_size)]
        if group_size == 1 or draw(st.booleans()):
            picks = draw(st.lists(st.integers(0, batch_size - 1), min_size=2, max_size=6))
        rows = [rows[pick] for pick in picks]
        # The same tokens with another mask
        rows += [(rows[0][0], draw(st.integers(0, length - 1))) for _ in range(draw(st.integers(0, 1)))]
    return [list(row) for row, _ in rows], [padding for _, padding in rows]


@st.composite
def cases(draw, repeated: bool = False, share: bool = False, changed: bool = False) -> Case:
    name, length = draw(st.sampled_from(SHARING_MODELS if share else MODELS)), draw(st.integers(1, 10))
    input_ids, padding = draw(prompts(length, repeated))
    expand_size, arguments = draw(modes(share))
    eos = draw(st.sampled_from([EOS, None, [EOS, 5], [EOS, 5, 17, 23]]))
    arguments |= {"eos_token_id": eos, "max_new_tokens": draw(st.integers(1, 8)), "return_dict_in_generate": True}
    arguments |= {
        flag: True for flag in ("output_scores", "output_logits", "output_hidden_states") if draw(st.booleans())
    }
    arguments |= draw(penalties())
    case = Case(
        name=name,
        input_ids=input_ids,
        padding=padding,
        arguments=arguments,
        expand_size=expand_size,
        stop_strings=draw(st.sampled_from([[], [], [], ["w7", "w30 w3"]])),
    )
    if name in PREFIX_MODELS and length > 1 and draw(st.integers(0, 3)) == 0:
        case.prefix_length = draw(st.integers(1, length - 1))
    elif changed and name in PREFIX_MODELS and draw(st.integers(0, 5)) == 0:
        case.has_foreign_cache = True
    else:
        arguments |= draw(caches(name, share))
    if changed and not case.has_foreign_cache and case.prefix_length == 0:
        case.change = draw(st.sampled_from(sorted(CHANGES)))
    return case


def assert_shared(case: Case, layers: list[tuple[torch.Tensor, Any]]) -> None:
    """Asserts that the prompt was stored once to the end, where the prefill put it, for all rows of an item."""
    # The oracle imports this module too
    from transformers.prefix_sharing import SegmentedStates

    assert layers
    for prefilled_keys, layer in layers:
        is_window = isinstance(layer, DynamicSlidingWindowLayer)
        keys = layer.keys.settle() if isinstance(layer.keys, SegmentedStates) else layer.keys
        is_shared = isinstance(keys, SegmentedStates)
        event(f"{type(layer).__name__} {'with' if is_shared else 'without'} a prefix")
        if is_window and not is_shared:
            # Let go when all of it has left the window
            continue
        assert is_shared, layer
        # One row for what all prompts have in common
        assert len(keys.segments[0]) in (1, case.stored_rows())
        first = prefilled_keys.segments[0] if isinstance(prefilled_keys, SegmentedStates) else prefilled_keys
        # A window is copied if it is a part of the prompt
        assert is_window or keys.segments[0].data_ptr() == first.data_ptr()


def assert_same_as_upstream(case: Case, **fork_arguments: Any) -> None:
    note(repr(case))
    with strategies() as taken, sharing() as shared:
        ours = run_case(case, prefix_repeats=1, **fork_arguments)
    event(f"strategy: {taken[0][0] if taken else 'nothing to expand'}")
    theirs = oracle().run(run_case, case, prefix_repeats=case.expand_size)
    assert ours[0] == theirs[0], (ours, theirs)
    if ours[0] == "error":
        event(f"both raise {ours[1]}")
        assert ours == theirs
        return
    ours, theirs = load(ours[1]), load(theirs[1])
    has_equal_rows = case.prefilled_rows() < len(case.input_ids)
    event("equal rows" if has_equal_rows else "output")
    if case.change == "steer before":
        # Seen to be one that changes inputs when it runs: in the first forward of the first example
        for found in (ours, theirs):
            del found["forwards"]
    else:
        assert ours["rows"] == case.prefilled_rows()
    event(f"change: {case.change or case.has_foreign_cache}")
    assert theirs["rows"] == len(case.input_ids) * case.expand_size
    if case.change == "steer before":
        assert all(way == "recompute" for way, _ in taken) or not shared
    elif taken and taken[0][0] == "share":
        assert_shared(case, shared)
    else:
        assert not shared and "prompt_expansion" not in fork_arguments
    # Up to 28 rows become one, whose products round differently; hidden states, keys and values reach 16 to 30
    tolerance = 1e-4 if has_equal_rows else 1e-5
    if case.arguments.get("cache_implementation") == "quantized" and case.dtype() == torch.float32:
        tolerance = 0.05  # a number stored as its neighbour, see `dtype`: no bound, but none was seen to need more
    # Deep random models amplify rounding on the way; what comes out is normalized
    assert_same(ours, theirs, tolerance, state_tolerance=max(tolerance, 1e-4))


@given(cases())
def test_same_as_upstream(case: Case):
    assert_same_as_upstream(case)


# Half as many: what is done to the model decides more than the rest
@settings(max_examples=settings.default.max_examples // 2)
@given(st.booleans().flatmap(lambda repeated: cases(repeated, changed=True)))
def test_changed_models_same_as_upstream(case: Case):
    assert_same_as_upstream(case)


@given(cases(repeated=True))
def test_same_as_upstream_with_repeated_prompts(case: Case):
    assert_same_as_upstream(case)


# Half as many: what is drawn differs in less
@settings(max_examples=settings.default.max_examples // 2)
@given(st.booleans().flatmap(lambda repeated: cases(repeated, share=True)))
def test_shared_prompt_same_as_upstream(case: Case):
    assert_same_as_upstream(case, prompt_expansion="share")


@st.composite
def prefix_cases(draw) -> Case:
    """Prompts that begin alike, with tails and pads of random length, some of them several times."""
    tokens = st.integers(3, VOCABULARY - 1)
    length = draw(st.integers(1, 16))
    prefix = draw(st.lists(tokens, min_size=length, max_size=length))
    distinct = draw(st.lists(st.lists(tokens, min_size=1, max_size=6), min_size=2, max_size=4))
    if draw(st.booleans()):
        size = min(map(len, distinct))
        distinct = [tail[:size] for tail in distinct]
    picks = list(range(len(distinct))) + draw(st.lists(st.integers(0, len(distinct) - 1), max_size=3))
    rows = [prefix + distinct[pick] for pick in draw(st.permutations(picks))]
    longest = max(map(len, rows)) + draw(st.integers(0, 2))
    padding = [longest - len(row) for row in rows]
    expand_size, arguments = draw(modes(share=False))
    arguments |= draw(penalties()) | {"max_new_tokens": draw(st.integers(1, 6))}
    arguments |= {"eos_token_id": draw(st.sampled_from([EOS, None])), "pad_token_id": PAD}
    if draw(st.booleans()):
        arguments |= {"return_dict_in_generate": True, "output_scores": True}
    if draw(st.integers(0, 3)) == 0:
        arguments["prefill_chunk_size"] = draw(st.integers(1, 9))
    return Case(
        name=draw(st.sampled_from([*DECODER_ONLY, "mixtral"])),
        input_ids=[[PAD] * pads + row for pads, row in zip(padding, rows, strict=True)],
        padding=padding,
        arguments=arguments,
        expand_size=expand_size,
    )


def takes_prefix(case: Case, minimal_tokens: int) -> bool:
    """Whether the common beginning of the prompts is to be computed by itself."""
    rows = {tuple(row[pads:]) for row, pads in zip(case.input_ids, case.padding, strict=True)}
    common = 0
    while common < min(map(len, rows)) - 1 and len({row[common] for row in rows}) == 1:
        common += 1
    is_ragged = len(set(case.padding)) > 1
    is_padded = is_ragged or case.padding[0] > 0
    is_readable = not (is_ragged and case.name == "gemma3") and not (
        is_padded and "return_dict_in_generate" in case.arguments
    )
    return len(rows) > 1 and common >= minimal_tokens and is_readable


@given(prefix_cases())
def test_same_as_upstream_with_a_common_prefix(case: Case):
    # The oracle imports this module too
    from transformers.generation import common_prefix

    note(repr(case))
    with patch.multiple(common_prefix, MINIMAL_TOKENS=4, MINIMAL_SAVING=1):
        ours = run_case(case, prefix_repeats=1)
    theirs = oracle().run(run_case, case, prefix_repeats=1)
    assert ours[0] == theirs[0], (ours, theirs)
    if ours[0] == "error":
        event(f"both raise {ours[1]}")
        assert ours == theirs
        return
    ours, theirs = load(ours[1]), load(theirs[1])
    is_taken = takes_prefix(case, minimal_tokens=4)
    event(f"prefix once: {is_taken}")
    assert ours["rows"] == (1 if is_taken else case.prefilled_rows())
    for found in (ours, theirs):
        del found["forwards"], found["query_length"]
    assert_same(ours, theirs, 1e-4)
