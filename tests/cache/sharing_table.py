# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
What the rule of `shared_prefix_support` says about each attention class of upstream's modeling files, recorded in
`sharing_table.json`. `python -m tests.cache.sharing_table` records it anew; the changes are then to be read one by one.
"""

import ast
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import transformers
from transformers.shared_prefix_support import analyze_function


TABLE = Path(__file__).with_suffix(".json")
MODELS = Path(transformers.__file__).parent / "models"


@cache
def modeling_files() -> dict[str, ast.Module]:
    """The syntax trees of the modeling files that mention a cache, by the name of their model."""
    trees = {}
    for file in sorted(MODELS.glob("*/modeling_*.py")):
        source = file.read_text(encoding="utf-8")
        if ".update(" in source or ".layers[" in source:
            trees[file.stem.removeprefix("modeling_")] = ast.parse(source)
    return trees


def attention_methods(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The methods of the classes of modules, with the name of their class."""
    for definition in tree.body:
        if isinstance(definition, ast.ClassDef) and not any("Cache" in ast.unparse(base) for base in definition.bases):
            for method in definition.body:
                if isinstance(method, ast.FunctionDef):
                    yield definition.name, method


@cache
def scan() -> dict[str, dict[str, dict[str, list[str]]]]:
    """
    Returns:
        `dict`: Model -> class -> `"self_attention"` or `"cross_attention"` -> what stands in the way of sharing.
    """
    table: dict = {}
    for model, tree in modeling_files().items():
        for class_name, method in attention_methods(tree):
            use = analyze_function(method, is_eager=False)
            kinds = {"self_attention": use.updates, "cross_attention": use.reads_layers}
            obstacles = {kind: getattr(use, kind) for kind, is_used in kinds.items() if is_used}
            if obstacles:
                table.setdefault(model, {}).setdefault(class_name, {}).update(obstacles)
    return table


if __name__ == "__main__":
    TABLE.write_text(json.dumps(scan(), indent=1) + "\n", encoding="utf-8")
