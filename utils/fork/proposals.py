# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
What the fork proposes to upstream, declared: which edits, modules, tests and pages a patch holds, and what is adapted for
it. `patch.py` writes the patches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .codemod import Edit, RemoveDefinition, ReplaceExpression, ReplaceStatement
from .edits import CACHE_EDITS, EDITS, GENERATION_EDITS


# Folder of ours -> where upstream keeps such files. What lies elsewhere stays here
PLACES = {
    "src/transformers/": "src/transformers/",
    "tests/generation/": "tests/generation/",
    "tests/cache/": "tests/utils/",
    "docs/source/en/": "docs/source/en/",
}
# Upstream has these, but they aren't in its wheel
UPSTREAM_PACKAGES = {"tests/__init__.py", "tests/generation/__init__.py", "tests/utils/__init__.py"}

# The rule for tests: one goes along unless it, or anything that it imports, is one of these
FORK_ONLY_TESTS = {
    "utils.fork": "how the fork is built",
    "hypothesis": "it isn't among what upstream's tests require",
    "tests.generation.architectures.runner": "a sweep over all architectures, against a table for one release",
    "tests.generation.test_whisper": "Whisper repeats its rows itself, so that only the pristine release is an oracle",
}
# Here the oracle is the pristine release, in a process of its own. There it is the order that `generate` had before
SUBSTITUTES = {"tests.generation.oracle": "tests.generation.expand_first_oracle"}
# What modules of tests read
TEST_DATA = {
    "tests.generation.test_group_beam_search_oracle": [
        "tests/generation/fixtures/group_beam_search.safetensors",
        "tests/generation/fixtures/make_group_beam_search.py",
    ],
}


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """
    A change that upstream could take.

    Args:
        subject (`str`): First line of the commit message.
        description (`str`): The rest of it, and the description of the pull request.
        edits (`Sequence[Edit]`): What changes in upstream's files.
        modules (`Sequence[str]`, *optional*): Our modules, relative to the package. All of them if unset.
        tests (`Sequence[str]`, *optional*): Our test modules. All that go along if unset, see `FORK_ONLY_TESTS`.
        pages (`Mapping[str, Sequence[str]]`, *optional*): Our pages, with the sections that stay here.
        adaptations (`Sequence[Edit]`, *optional*): What changes in our own files. Paths are those in this repository.
    """

    subject: str
    description: str
    edits: Sequence[Edit]
    modules: Sequence[str] | None = None
    tests: Sequence[str] | None = None
    pages: Mapping[str, Sequence[str]] = field(default_factory=dict)
    adaptations: Sequence[Edit] = ()


# The support table of `prefill_support.md` is the report of a sweep over one release
FULL = Proposal(
    subject="Generate: prefill each prompt once, and share it among its beams and sequences",
    description="""
With `num_beams` or `num_return_sequences`, `generate` repeats each of B prompts N times and forwards B * N rows, though
the N rows of a prompt are equal until the first token is chosen. This forwards B rows and expands afterwards: inputs,
logits, attentions, hidden states and cache. Fixes #27449.

- `GenerationConfig.prompt_expansion` chooses how: "recompute" (the order until now), "copy" (the cache is repeated),
  "share" (the prompt's keys and values stay stored once for its N rows), "auto" (the default: the cheapest that works).
  Where something stands in the way, "auto" takes the next one and logs why; the others raise before any forward.
- A decoding method that declares `expand_size` gets B rows and expands them itself. Any other (custom loops, subclasses
  with a `_sample` of their own) gets B * N rows, as it always did. `_prefill` keeps its signature and its result.
- Every cache class has `batch_repeat_interleave`. Static buffers keep their address when rows are repeated or reordered.
- Shared prompts: layers return the suffix and hand the prefix to the attention function, which reads it in place.
  Whether the attention of a model allows that is read off its code.
- Rows of a batch that are equal are prefilled once, as if `num_return_sequences` had been asked for.
- Group beam search is a decoding method again.
- Whisper encodes an audio once for all of its sequences. Beams of classifier-free guidance keep their own context.

Tests compare all output fields, and the rows of the first forward, with prompts that are expanded first. The fixtures of
group beam search were made with release 4.55.4.

To do when applied to a checkout: list `prefill_once` and `group_beam_search` in `docs/source/en/_toctree.yml`, under
"Generate API".
""",
    edits=EDITS,
    pages={
        "docs/source/en/prefill_once.md": (),
        # Measured with a script and weights that stay here
        "docs/source/en/group_beam_search.md": ("How diverse, and at what price",),
    },
)

TEST_PROMPT_EXPANSION = "tests/generation/test_prompt_expansion.py"
ONLY_COPIES = "there is no other strategy yet"

# What a first pull request should contain: one thing, that works for every model and changes no result. Sharing, equal
# rows, group beam search, Whisper's own loop and the guidance of beams are changes of their own, which build on it or
# don't need it.
MINIMAL = Proposal(
    subject="Generate: prefill each prompt once for all of its beams and sequences",
    description="""
With `num_beams` or `num_return_sequences`, `generate` repeats each of B prompts N times and forwards B * N rows, though
the N rows of a prompt are equal until the first token is chosen. This forwards B rows and expands afterwards: inputs,
logits, attentions, hidden states and cache. Fixes #27449.

- A decoding method that declares `expand_size` gets B rows and expands them itself. Any other (custom loops, subclasses
  with a `_sample` of their own) gets B * N rows, as it always did. `_prefill` keeps its signature and its result.
- `GenerationConfig.prompt_expansion`: "recompute" is the order until now, "copy" the new one, "auto" (the default) takes
  "copy" unless something stands in the way, which is logged.
- Every cache class has `batch_repeat_interleave`. Static buffers keep their address when rows are repeated or reordered.

Tests compare all output fields, and the rows of the first forward, with prompts that are expanded first.
""",
    edits=[*GENERATION_EDITS, *CACHE_EDITS],
    modules=[
        "cache_expansion.py",
        "generation/prefill.py",
        "generation/prefill_hooks.py",
        "generation/prompt_expansion.py",
    ],
    tests=[
        "tests.cache.test_batch_expansion",
        "tests.cache.test_cache_classes",
        "tests.cache.test_foreign_caches",
        "tests.cache.test_static_address",
        "tests.generation.test_prefill",
        "tests.generation.test_prompt_expansion",
    ],
    adaptations=[
        ReplaceStatement(
            path="src/transformers/generation/prompt_expansion.py",
            old='PROMPT_EXPANSIONS = ("auto", "recompute", "copy", "share")',
            new='PROMPT_EXPANSIONS = ("auto", "recompute", "copy")',
            reason=ONLY_COPIES,
        ),
        ReplaceStatement(
            path="tests/cache/test_cache_classes.py",
            old='TESTED_ELSEWHERE = ("prefix_sharing",)',
            new="TESTED_ELSEWHERE = ()",
            reason="there are no layers that share",
        ),
        RemoveDefinition(
            path="tests/generation/test_prefill.py",
            scope="PrefillOnceTest",
            name="test_shared_prompt_same_as_upstream",
            reason=ONLY_COPIES,
        ),
        RemoveDefinition(path=TEST_PROMPT_EXPANSION, name="ShareTest", reason=ONLY_COPIES),
        ReplaceExpression(
            path=TEST_PROMPT_EXPANSION,
            scope="KnobTest.test_value_is_kept",
            old='["recompute", "copy", "share", "auto"]',
            new='["recompute", "copy", "auto"]',
            reason=ONLY_COPIES,
        ),
        ReplaceExpression(
            path=TEST_PROMPT_EXPANSION,
            scope="KnobTest.test_all_but_recompute_prefill_once",
            old='("recompute", "copy", "share", "auto", None)',
            new='("recompute", "copy", "auto", None)',
            reason=ONLY_COPIES,
        ),
        ReplaceExpression(
            path=TEST_PROMPT_EXPANSION,
            scope="ObstacleTest.test_reason_to_prefill_once_is_logged",
            old=r"""r"LlamaForCausalLM: prompt_expansion='share' \(the prompt's cache can be shared\)" """,
            new=r"""r"LlamaForCausalLM: prompt_expansion='copy' \(the prompt's cache can be repeated\)" """,
            reason=ONLY_COPIES,
        ),
        ReplaceExpression(
            path=TEST_PROMPT_EXPANSION,
            scope="GuidanceTest.test_negative_prompt_follows_the_rows",
            old="product(MODES, (False, True))",
            new='product(("sample",), (False, True))',
            reason="the guidance of beams is a change of its own",
        ),
    ],
)

PROPOSALS = {"full": FULL, "minimal": MINIMAL}
