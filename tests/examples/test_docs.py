# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
The Python blocks of the documentation run, and print what stands below them.

A page's blocks share one namespace. A ```` ```text ```` block right after a Python block is what it prints. A block
that can't run here has the comment `<!-- not run: reason -->` on the line before it.
"""

import re
import traceback
import unittest
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from parameterized import parameterized

from transformers.utils import logging as transformers_logging


REPOSITORY = Path(__file__).parents[2]
GUIDE = REPOSITORY / "docs" / "source" / "en" / "prefill_once.md"
PAGES = sorted(GUIDE.parent.glob("*.md")) + [REPOSITORY / "README.md"]
BLOCK = re.compile(
    r"^(?P<marker><!-- not run:(?P<reason>[^\n]*)-->\n)?```(?:python|py)\n(?P<code>.*?)^```$"
    r"(?:\n+```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


@dataclass
class Block:
    """A Python block of a page."""

    code: str
    line: int  # of its first line of code
    output: str | None  # what it must print, `None` if the page doesn't say
    reason: str | None  # why it isn't run, `None` if it is


def find_blocks(text: str) -> list[Block]:
    return [
        Block(
            code=match["code"],
            line=text.count("\n", 0, match.start("code")) + 1,
            output=match["output"],
            reason=match["reason"],
        )
        for match in BLOCK.finditer(text)
    ]


def run_blocks(blocks: list[Block], name: str) -> None:
    """Runs the blocks of the page `name` in one namespace, and compares what they print."""
    namespace = {"__name__": "__main__"}
    for block in blocks:
        if block.reason is not None:
            continue
        # Empty lines in front let a traceback show the line of the page
        code = compile("\n" * (block.line - 1) + block.code, name, "exec")
        printed = StringIO()
        with redirect_stdout(printed):
            exec(code, namespace)
        if block.output is not None and printed.getvalue() != block.output:
            raise AssertionError(
                f"{name}, line {block.line}: the page says\n{block.output}\nbut the block prints\n{printed.getvalue()}"
            )


class DocsTest(unittest.TestCase):
    @parameterized.expand([(page.stem, page) for page in PAGES])
    def test_blocks_run(self, _, page):
        blocks = find_blocks(page.read_text(encoding="utf-8"))
        if not blocks:
            self.skipTest(f"{page.name} has no Python block")
        # As in a process of its own: other tests may have had the same message logged, which comes only once
        transformers_logging.info_once.cache_clear()
        run_blocks(blocks, str(page.relative_to(REPOSITORY)))

    def test_every_skipped_block_has_a_reason(self):
        for page in PAGES:
            for block in find_blocks(page.read_text(encoding="utf-8")):
                if block.reason is not None:
                    self.assertNotEqual(block.reason.strip(), "", f"{page.name}, line {block.line}")

    def test_guide_is_run(self):
        blocks = find_blocks(GUIDE.read_text(encoding="utf-8"))
        self.assertGreater(sum(block.reason is None for block in blocks), 5)
        self.assertGreater(sum(block.output is not None for block in blocks), 5)

    def test_reasons_of_the_guide_are_those_of_the_code(self):
        sources = [path.read_text(encoding="utf-8") for path in (REPOSITORY / "src" / "transformers").rglob("*.py")]
        cells = re.findall(r'^\| (".+?) \|', GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
        reasons = [reason for cell in cells for reason in re.findall(r'"(.+?)"', cell)]
        self.assertGreater(len(reasons), 30)
        for reason in reasons:
            # The parts around a name or a number stand on one line of the code
            pattern = re.compile(".*?".join(re.escape(part.strip()) for part in reason.split("…")))
            self.assertTrue(any(pattern.search(source) for source in sources), f"not in the code: {reason}")


class BlockFinderTest(unittest.TestCase):
    PAGE = "Text.\n\n```python\nvalue = 2\nprint(value)\n```\n\n```text\n2\n```\n\n<!-- not run: no hub -->\n```py\n1 / 0\n```\n"

    def test_finds_code_line_output_and_reason(self):
        first, second = find_blocks(self.PAGE)
        self.assertEqual(
            (first.code, first.line, first.output, first.reason), ("value = 2\nprint(value)\n", 4, "2\n", None)
        )
        self.assertEqual((second.code, second.line, second.output), ("1 / 0\n", 14, None))
        self.assertEqual(second.reason.strip(), "no hub")

    def test_skips_marked_blocks_and_shares_a_namespace(self):
        run_blocks(find_blocks(self.PAGE + "```python\nassert value == 2\n```\n"), "page")

    def test_other_output_fails(self):
        with self.assertRaisesRegex(AssertionError, "page, line 4"):
            run_blocks(find_blocks(self.PAGE.replace("print(value)", "print(value + 1)")), "page")

    def test_failure_names_the_line_of_the_page(self):
        try:
            run_blocks(find_blocks("One line.\n\n```python\nx = 1\n1 / 0\n```\n"), "page")
        except ZeroDivisionError as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
        self.assertEqual((last.filename, last.lineno), ("page", 5))


if __name__ == "__main__":
    unittest.main()
