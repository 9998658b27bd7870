# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""The example refuses, before it measures anything, a plot that it couldn't draw."""

import unittest
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from unittest import mock

from .test_long_prompt_beams import load_example


example = load_example(Path(__file__).parents[2] / "examples" / "group_beam_search.py")


class GroupBeamSearchTest(unittest.TestCase):
    def test_plot_needs_matplotlib(self):
        errors = StringIO()
        with (
            mock.patch.object(example, "is_matplotlib_available", return_value=False),
            mock.patch.object(example, "load") as load,
            redirect_stderr(errors),
        ):
            self.assertEqual(example.main(["--plot", "diversity.png"]), 2)
        self.assertEqual(errors.getvalue(), "error: --plot needs matplotlib: run `pip install matplotlib`\n")
        load.assert_not_called()
