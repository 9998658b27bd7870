# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""The questions are answered by a tiny random model; the report says what was forwarded; bad input is refused."""

import re
import tempfile
import unittest
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock

from transformers.generation import common_prefix

from .test_long_prompt_beams import load_example, save_tiny_model


example = load_example(Path(__file__).parents[2] / "examples" / "common_prefix.py")


class CommonPrefixTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.folder = Path(temporary.name)
        save_tiny_model(cls.folder / "model")
        (cls.folder / "text.txt").write_text(" ".join(f"w{2 + index * 7 % 65}" for index in range(50)))
        (cls.folder / "questions.txt").write_text("w5 w6\nw9 w8 w7 w6\nw11\n")
        (cls.folder / "one.txt").write_text("w5\n")

    def arguments(self, *more: str, questions: str = "questions.txt") -> list[str]:
        files = ["--prompt-file", str(self.folder / "text.txt"), "--questions-file", str(self.folder / questions)]
        return ["--model", str(self.folder / "model"), *files, "--max-new-tokens", "5", *more]

    def report(self, *more: str) -> tuple[int, str]:
        output = StringIO()
        constants = mock.patch.multiple(common_prefix, MINIMAL_TOKENS=4, MINIMAL_SAVING=1)
        with constants, redirect_stdout(output):
            status = example.main(self.arguments(*more))
        return status, output.getvalue()

    def test_report(self):
        status, output = self.report("--document-tokens", "40")
        self.assertEqual(status, 0, output)
        # "Question", ":" before the question, and "Answer", ":" behind it: 42 tokens in common, tails of 3 to 6
        self.assertRegex(output, r"(?m)^recompute .* 3 x 48, then 4 times 3 x 1$")
        self.assertRegex(output, r"(?m)^auto .* 1 x 42, then 3 x 6, then 4 times 3 x 1$")
        self.assertIn("same tokens: yes", output)
        self.assertEqual(len(re.findall(r"(?m)^  \d\. w.* '(w\d+ ?)+'$", output)), 3)

    def test_exit_status_is_one_when_tokens_differ(self):
        answer = example.answer

        def differing(model, inputs, mode, max_new_tokens):
            measurement = answer(model, inputs, mode, max_new_tokens)
            measurement.sequences = measurement.sequences + (mode == "auto")
            return measurement

        with mock.patch.object(example, "answer", differing):
            status, output = self.report()
        self.assertEqual(status, 1)
        self.assertIn("same tokens: no", output)

    def test_one_question_is_refused(self):
        errors = StringIO()
        with redirect_stderr(errors), redirect_stdout(StringIO()), self.assertRaises(SystemExit):
            example.main(self.arguments(questions="one.txt"))
        self.assertIn("needs at least 2 questions, has 1", errors.getvalue())


if __name__ == "__main__":
    unittest.main()
