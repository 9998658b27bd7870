# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""The rollout runs with a tiny random model, reports what was forwarded, and refuses what it can't use."""

import os
import re
import subprocess
import sys
import tempfile
import unittest
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock

import torch

from .test_long_prompt_beams import CONTEXT, load_example, save_tiny_model


SCRIPT = Path(__file__).parents[2] / "examples" / "grpo_rollout.py"


example = load_example(SCRIPT)


class GRPORolloutTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.model, cls.text = Path(temporary.name) / "model", Path(temporary.name) / "text.txt"
        save_tiny_model(cls.model)
        cls.text.write_text(" ".join(f"w{2 + index * 7 % 65}" for index in range(60)), encoding="utf-8")

    def arguments(self, *more: str) -> list[str]:
        return ["--model", str(self.model), "--prompt-file", str(self.text), *more]

    def test_command_reports_both_modes(self):
        options = ["--num-prompts", "2", "--num-completions", "3", "--prompt-tokens", "40", "--max-new-tokens", "5"]
        command = [sys.executable, str(SCRIPT), *self.arguments(*options)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        output = result.stdout
        self.assertRegex(output, r"(?m)^auto .* 2 x 40, then 4 times 6 x 1$")
        self.assertRegex(output, r"(?m)^recompute .* 6 x 40, then 4 times 6 x 1$")
        self.assertIn("rows forwarded in the prefill: 2 instead of 6", output)
        self.assertRegex(output, r"(?m)^prefill, recompute / auto: \d+\.\d\d times faster$")
        self.assertIn("same tokens: yes", output)
        self.assertEqual(
            len(re.findall(r"(?m)^  prompt \d: mean \d\.\d\d, best \d\.\d\d .*: '(w\d+ ?)+'$", output)), 2
        )

    def test_exit_status_is_one_when_tokens_differ(self):
        def differing(model, input_ids, mode, max_new_tokens):
            rollout = roll_out(model, input_ids, mode, max_new_tokens)
            rollout.sequences = rollout.sequences + (mode == "auto")
            return rollout

        roll_out, output = example.roll_out, StringIO()
        with mock.patch.object(example, "roll_out", differing), redirect_stdout(output):
            status = example.main(self.arguments("--prompt-tokens", "10", "--max-new-tokens", "2"))
        self.assertEqual(status, 1)
        self.assertIn("same tokens: no", output.getvalue())

    def test_prompts_are_different_stretches_of_the_text(self):
        prompts = example.cut_prompts(list(range(10)), num_prompts=3, length=4)
        self.assertEqual(prompts.tolist(), [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]])
        self.assertEqual(example.cut_prompts([5, 6], num_prompts=1, length=2).tolist(), [[5, 6]])

    def test_rewards(self):
        self.assertEqual([example.reward(text) for text in ("a b c d", "a A a a", "")], [1.0, 0.25, 0.0])
        advantages = example.group_advantages(torch.tensor([[1.0, 3.0], [2.0, 2.0]]))
        torch.testing.assert_close(advantages, torch.tensor([[-0.7071, 0.7071], [0.0, 0.0]]), atol=1e-3, rtol=0)

    def test_refusals(self):
        cases = (
            (["--prompt-tokens", "60"], "--prompt-tokens 60 and --num-prompts 4: the text has only 60 tokens, and 63"),
            (
                ["--prompt-tokens", "50", "--max-new-tokens", "50"],
                f"50 \\+ 50 = 100 tokens, but its context has {CONTEXT}",
            ),
            (["--num-completions", "1"], "--num-completions: must be at least 2, but is 1"),
        )
        for options, pattern in cases:
            errors = StringIO()
            with redirect_stderr(errors), redirect_stdout(StringIO()), self.assertRaises(SystemExit) as refused:
                example.main(self.arguments(*options))
            self.assertEqual(refused.exception.code, 2)
            self.assertRegex(errors.getvalue().splitlines()[-1], pattern)
