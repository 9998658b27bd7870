# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
import runpy
import unittest
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path


SCRIPT = Path(__file__).parents[2] / "examples" / "quickstart.py"


class QuickstartTest(unittest.TestCase):
    def test_prompt_is_computed_once_with_the_same_tokens(self):
        output = StringIO()
        with redirect_stdout(output):
            runpy.run_path(str(SCRIPT), run_name="__main__")
        self.assertEqual(
            output.getvalue().splitlines(),
            [
                "recompute: rows and tokens of the first forward: (6, 200)",
                "auto: rows and tokens of the first forward: (1, 200)",
                "same tokens: True",
            ],
        )
