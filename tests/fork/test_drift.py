# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Digests of relied-upon upstream functions, and the report about another release."""

import ast
import json
import re
import shutil
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from utils.fork import drift
from utils.fork.build import PACKAGE, check_upstream, read_pin
from utils.fork.drift import DRIFT_FILE, RELIED_ON, compare, definitions, digest, digests
from utils.fork.edits import EDITS
from utils.fork.rebase import report


def digest_of(source: str) -> str:
    (nodes,) = definitions(source).values()
    return digest(nodes)


class TestDigest:
    SOURCE = 'def f(x, *, y=1):\n    """Says something."""\n    return g(x) + f"{y!r:>{x}}"\n'

    @pytest.mark.parametrize(
        "same",
        [
            'def f(x, *, y=1):\n    """Says something else."""\n    return g(x) + f"{y!r:>{x}}"\n',
            'def f(\n    x,\n    *,\n    y=1,\n):\n    # Why\n    return (g(x)\n        + f"{y!r:>{x}}")\n',
        ],
    )
    def test_layout_comments_and_docstring_do_not_count(self, same):
        assert digest_of(same) == digest_of(self.SOURCE)

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("y=1", "y=2"),
            ("g(x)", "g(y)"),
            ("*, ", ""),
            ("!r", ""),
            ("def", "async def"),
            ("def", "@g\ndef"),
            ("+", "-"),
        ],
    )
    def test_anything_else_counts(self, old, new):
        assert old in self.SOURCE
        assert digest_of(self.SOURCE.replace(old, new)) != digest_of(self.SOURCE)

    def test_is_the_same_in_every_version_of_python(self):
        # Computed with 3.11, 3.12 and 3.13
        assert digest_of(self.SOURCE) == "7b983e7c3237d0d5"

    def test_all_definitions_of_a_name_count(self):
        once = "class A:\n    def f(self):\n        return 1\n"
        twice = once + "\n    @f.setter\n    def f(self, x):\n        self.x = x\n"
        other = twice.replace("self.x = x", "self.x = 2")
        values = {digest(definitions(source)["A.f"]) for source in (once, twice, other)}
        assert len(values) == 3

    def test_finds_definitions_at_every_depth(self):
        source = "if x:\n    class A:\n        def f(self):\n            def g(): pass\nasync def h(): pass\n"
        assert list(definitions(source)) == ["A", "A.f", "A.f.g", "h"]


def test_compare_tells_changed_gone_and_new():
    recorded = {"a.py": {"f": "1", "g": "1", "h": "1"}, "b.py": {"f": "1"}}
    found = {"a.py": {"f": "1", "g": "2", "i": "1"}, "c.py": {"f": "1"}}
    assert compare(recorded, found) == [
        "changed  a.py: g",
        "gone     a.py: h",
        "new      a.py: i",
        "gone     b.py: f",
        "new      c.py: f",
    ]


class TestDriftFile:
    def test_is_that_of_the_pinned_release(self, upstream):
        assert json.loads(DRIFT_FILE.read_text()) == digests(Path(upstream.locate_file(PACKAGE))), "run `make drift`"

    @pytest.mark.parametrize(
        ("path", "name"),
        [(path, name) for path, names in RELIED_ON.items() for name in names],
    )
    def test_every_pattern_names_a_function(self, path, name, monkeypatch, upstream):
        monkeypatch.setattr(drift, "relied_on", lambda: {path: [name]})
        assert digests(Path(upstream.locate_file(PACKAGE)))

    def test_holds_the_functions_that_are_edited(self, upstream):
        package = Path(upstream.locate_file(PACKAGE))
        recorded = json.loads(DRIFT_FILE.read_text())
        files = {path: definitions((package / path).read_text(encoding="utf-8")) for path in {e.path for e in EDITS}}
        functions = 0
        for edit in EDITS:
            if any(isinstance(node, ast.FunctionDef) for node in files[edit.path].get(edit.scope, [])):
                functions += 1
                assert edit.scope in recorded[edit.path]
        assert functions > 0


class TestReport:
    @pytest.fixture
    def copy(self, upstream: Distribution, tmp_path: Path) -> Path:
        """A copy of the pinned release that can be changed."""
        for file in check_upstream(upstream, read_pin()).values():
            target = tmp_path / file.relative_to(upstream.locate_file(""))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
        info = f"{PACKAGE}-{upstream.version}.dist-info"
        shutil.copytree(upstream.locate_file(info), tmp_path / info)
        return tmp_path / PACKAGE

    def test_the_pinned_release_fits(self, upstream):
        lines, fits = report(Path(upstream.locate_file(PACKAGE)))
        assert fits, lines
        assert f'  record_sha256 = "{read_pin().record_sha256}"' in lines

    def test_says_what_does_not(self, copy):
        utils = copy / "generation" / "utils.py"
        source = utils.read_text(encoding="utf-8")
        assert source.count("    def _prefill(\n") == 1
        assert source.count("class GenerationMixin(ContinuousMixin):") == 1
        source = source.replace("    def _prefill(\n", "    def _fill(\n")
        source = source.replace("class GenerationMixin(ContinuousMixin):", "class GenerationMixin(PrefillMixin):")
        utils.write_text(source, encoding="utf-8")
        layer = "\nclass NewLayer:\n    def _prefill(self): ...\n"
        sdpa = copy / "integrations" / "sdpa_attention.py"
        sdpa.write_text(sdpa.read_text(encoding="utf-8") + layer, encoding="utf-8")
        ours = copy / "generation" / "prefill.py"
        ours.write_text("")
        record = copy.parent / f"{PACKAGE}-{read_pin().version}.dist-info" / "RECORD"
        lines = record.read_text() + f"{PACKAGE}/generation/prefill.py,sha256=x,0\n"
        (copy / "cache_utils.py").unlink()
        record.write_text(re.sub(r".*/cache_utils\.py,.*\n", "", lines))

        lines, fits = report(copy)
        assert not fits
        for line in (
            "  gone     generation/utils.py: GenerationMixin._prefill",
            "  gone     cache_utils.py: DynamicLayer.update",
            "  new      integrations/sdpa_attention.py: NewLayer._prefill",
            "  AddBase(generation/utils.py:GenerationMixin): base `PrefillMixin` is there already",
            "  the overlay may only add files, but upstream has these too: generation/prefill.py",
        ):
            assert line in lines, "\n".join(lines)
