# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
The whole fork as one change, declared: which edits, modules, tests and pages its patch holds. `patch.py` writes it. What
upstream could take, step by step, is the series in `series/`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .codemod import Edit
from .edits import EDITS


# Folder of ours -> where upstream keeps such files. What lies elsewhere stays here
PLACES = {
    "src/transformers/": "src/transformers/",
    "tests/generation/": "tests/generation/",
    "tests/cache/": "tests/utils/",
    "tests/sharing/": "tests/sharing/",
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
    A change of upstream's repository.

    Args:
        subject (`str`): First line of the commit message.
        description (`str`): The rest of it, and the description of the pull request.
        edits (`Sequence[Edit]`): What changes in upstream's files.
        modules (`Sequence[str]`, *optional*): Our modules, relative to the package. All of them if unset.
        tests (`Sequence[str]`, *optional*): Our test modules. All that go along if unset, see `FORK_ONLY_TESTS`.
        pages (`Mapping[str, Sequence[str]]`, *optional*): Our pages, with the sections that stay here.
    """

    subject: str
    description: str
    edits: Sequence[Edit]
    modules: Sequence[str] | None = None
    tests: Sequence[str] | None = None
    pages: Mapping[str, Sequence[str]] = field(default_factory=dict)


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
- `generate` makes one plan per call, before any forward. Where code from outside of the library may tell rows apart, or
  would be passed by, the plan is the order until now.
- A decoding method that declares `expand_size` gets B rows and expands them itself. Any other (custom loops, subclasses
  with a `_sample` of their own) gets B * N rows, as it always did. `_prefill` keeps its signature and its result.
- Every cache class has `batch_repeat_interleave`. Static buffers keep their address when rows are repeated or reordered.
- Shared prompts: keys and values carry the prompt in segments, which attention reads where they lie.
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
