# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Digests of the upstream functions that the fork relies on, so that a new release shows which of them changed.

`drift.json` holds the digests of the pinned release; `make drift` writes it, `make rebase` compares another release
with it. Digests are taken over the abstract syntax, without docstrings: layout and comments don't count.
"""

import argparse
import ast
import hashlib
import json
from collections import defaultdict
from fnmatch import fnmatchcase
from pathlib import Path

from .edits import EDITS


DRIFT_FILE = Path(__file__).with_name("drift.json")

# Upstream file -> qualified names, or patterns of them, of what our modules call, override or imitate.
# Functions that are edited need no mention.
RELIED_ON = {
    "cache_utils.py": [
        "*.batch_repeat_interleave",
        "*.batch_select_indices",
        "*.crop",
        "*.early_initialization",
        "*.get_mask_sizes",
        "*.get_seq_length",
        "*.lazy_initialization",
        "*.lazy_initialization_indexer",
        "*.reorder_cache",
        "*.reset",
        "*.update",
        "*.update_conv_state",
        "*.update_indexer",
        "*.update_recurrent_state",
        "Cache.batch_size",
        "QuantizedLayer._apply_pending_reorder",
    ],
    "generation/utils.py": [
        "GenerationMixin._beam_search",
        "GenerationMixin._beam_search_has_unfinished_sequences",
        "GenerationMixin._check_early_stop_heuristic",
        "GenerationMixin._expand_inputs_for_generation",
        "GenerationMixin._expand_multimodal_outputs",
        "GenerationMixin._flatten_beam_dim",
        "GenerationMixin._gather_beams",
        "GenerationMixin._get_logits_processor",
        "GenerationMixin._get_running_beams_for_next_iteration",
        "GenerationMixin._get_top_k_continuations",
        "GenerationMixin._has_unfinished_sequences",
        "GenerationMixin._maybe_prepare_encoder_kwargs_for_generation",
        "GenerationMixin._prefill",
        "GenerationMixin._prepare_attention_mask_for_generation",
        "GenerationMixin._prepare_cache_for_generation",
        "GenerationMixin._prepare_static_cache",
        "GenerationMixin._sample",
        "GenerationMixin._update_finished_beams",
        "GenerationMixin._update_model_kwargs_for_generation",
        "GenerationMixin._validate_model_kwargs",
        "GenerationMixin.generate",
        "GenerationMixin.prepare_inputs_for_generation",
    ],
    "integrations/sdpa_attention.py": ["*"],
    "models/whisper/generation_whisper.py": [
        "WhisperGenerationMixin._expand_variables_for_generation",
        "WhisperGenerationMixin._postprocess_outputs",
        "WhisperGenerationMixin._stack_split_outputs",
    ],
}

Digests = dict[str, dict[str, str]]


def definitions(source: str) -> dict[str, list[ast.stmt]]:
    """Finds the classes and functions of a file: qualified name -> all definitions of it."""
    found = defaultdict(list)

    def collect(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                found[prefix + child.name].append(child)
                name = f"{prefix}{child.name}."
            collect(child, name)

    collect(ast.parse(source), "")
    return found


def plain_syntax(node: object) -> object:
    """The abstract syntax as plain data that is the same in every version of Python, without docstrings."""
    if isinstance(node, list):
        return [plain_syntax(item) for item in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    if isinstance(node, ast.JoinedStr):
        fields["values"] = [part for part in node.values if getattr(part, "value", None) != ""]  # 3.12.1 adds some
    # What is empty is left out: newer versions of Python have more fields
    return [
        type(node).__name__,
        {name: plain_syntax(value) for name, value in fields.items() if value not in (None, [])},
    ]


def digest(nodes: list[ast.stmt]) -> str:
    """Digest of all definitions of one name."""
    return hashlib.sha256(json.dumps(plain_syntax(nodes)).encode()).hexdigest()[:16]


def relied_on() -> dict[str, list[str]]:
    """What `RELIED_ON` lists, and the scopes of all edits."""
    patterns = {path: list(names) for path, names in RELIED_ON.items()}
    for edit in EDITS:
        patterns.setdefault(edit.path, []).append(edit.scope)
    return patterns


def digests(package: Path) -> Digests:
    """
    Takes the digests of a release: file -> qualified name -> digest of every function that the fork relies on.

    Args:
        package (`Path`): The release's package `transformers`. Files that it doesn't have are left out.
    """
    found = {}
    for path, patterns in sorted(relied_on().items()):
        if not (package / path).is_file():
            continue
        functions = {
            name: digest(nodes)
            for name, nodes in definitions((package / path).read_text(encoding="utf-8")).items()
            if not isinstance(nodes[0], ast.ClassDef) and any(fnmatchcase(name, pattern) for pattern in patterns)
        }
        if functions:
            found[path] = dict(sorted(functions.items()))
    return found


def compare(recorded: Digests, found: Digests) -> list[str]:
    """Lists in words what changed, vanished, or is new among what the patterns name."""
    differences = []
    for path in sorted(recorded.keys() | found.keys()):
        before, after = recorded.get(path, {}), found.get(path, {})
        for name in sorted(before.keys() | after.keys()):
            if name not in after:
                differences.append(f"gone     {path}: {name}")
            elif name not in before:
                differences.append(f"new      {path}: {name}")
            elif before[name] != after[name]:
                differences.append(f"changed  {path}: {name}")
    return differences


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m utils.fork.drift", description="Writes drift.json anew.")
    parser.add_argument("--pristine", type=Path, required=True, help="the pinned release's package `transformers`")
    found = digests(parser.parse_args().pristine)
    DRIFT_FILE.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"{sum(map(len, found.values()))} functions in {DRIFT_FILE.name}")


if __name__ == "__main__":
    main()
