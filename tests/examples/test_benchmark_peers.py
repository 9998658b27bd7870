# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""The benchmark of other engines drives their processes, says which it leaves out and why, and renders its tables."""

import importlib.util
import json
import re
import tempfile
import unittest
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from parameterized import parameterized

from benchmark.measurement import Subject
from benchmark.peers import __main__ as peers
from benchmark.peers.environment import PEERS, Peer, install
from benchmark.peers.protocol import Call, Description, PeerError, Setup
from benchmark.peers.tables import EXPLANATION, HEADER, best_beam, render_tables

from .test_long_prompt_beams import CONTEXT, save_tiny_model


SETUP = Setup(model="a/model", cache="a/cache", threads=2, context=20, num_sequences=3)


class PeersTest(unittest.TestCase):
    """The fake peer runs in a real virtual environment with no packages, so its end of the protocol needs none."""

    @classmethod
    def setUpClass(cls):
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.folder = Path(temporary.name)
        cls.nothing, cls.missing = cls.folder / "nothing.txt", cls.folder / "missing.txt"
        cls.nothing.write_text("# no packages\n")
        cls.missing.write_text("--no-index\nno-such-package==1.0\n")

    def peer(self, fault: str = "") -> Peer:
        return Peer("fake", "tests.examples.fake_peer", self.nothing, environment={"FAULT": fault})

    def start(self, fault: str = ""):
        worker = self.peer(fault).start(self.folder, SETUP)
        self.addCleanup(worker.close)
        return worker

    def test_a_call(self):
        worker = self.start()
        self.assertEqual(worker.description, Description("1.2.3", "float32, 2 threads"))
        for mode in ("beam", "sample"):
            measured = worker.run(Call(mode, [5, 7], num_sequences=3, new_tokens=2, seed=0))
            self.assertEqual(measured.tokens, [[7, 8], [8, 9], [9, 10]])
            self.assertGreater(measured.seconds, 0)
            self.assertGreaterEqual(measured.cpu_seconds, 0)
            self.assertGreaterEqual(measured.peak_memory_bytes, 0)
        log = (self.folder / "worker.log").read_text()
        self.assertEqual(log, "loading a/model\n" + 2 * "a line of the engine\n")

    @parameterized.expand(
        [
            ("raise", "ValueError: out of blocks"),
            ("die", "its process ended with exit code -6: .*a line of the engine / see .*worker.log"),
            ("short", r"sequences of \[2, 2\] new tokens were generated, in place of \[2, 2, 2\]"),
        ]
    )
    def test_a_call_that_fails(self, fault, message):
        with self.assertRaisesRegex(PeerError, message):
            self.start(fault).run(Call("beam", [5], num_sequences=3, new_tokens=2, seed=1))

    def test_a_model_that_does_not_load(self):
        with self.assertRaisesRegex(PeerError, "ValueError: the model can't be read"):
            self.start("load")

    def test_an_environment_is_made_once(self):
        folder, log = self.folder / "venv", self.folder / "install.log"
        python = install(self.nothing, (), folder, log)
        log.unlink()
        self.assertEqual(install(self.nothing, (), folder, log), python)
        self.assertFalse(log.exists())

    def test_packages_that_do_not_install(self):
        folder, log = self.folder / "none", self.folder / "none.log"
        for _ in range(2):  # the second time no better than the first
            with self.assertRaisesRegex(PeerError, "missing.txt: pip install failed .*no-such-package==1.0.*none.log"):
                install(self.missing, (), folder, log)

    def measure(self, *arguments: str, lengths: str = "20") -> tuple[bool, list[dict], str]:
        model = self.folder / "model"
        if not model.exists():
            save_tiny_model(model)
        options = f"--lengths {lengths} --new-tokens 3 --repeats 2 --sequences"
        parsed = peers.build_parser().parse_args([*options.split(), *arguments])
        fakes = [
            self.peer(),
            Peer("dying", "tests.examples.fake_peer", self.nothing, environment={"FAULT": "die"}),
            Peer("missing", "tests.examples.fake_peer", self.missing),
        ]
        results = self.folder / "peers.jsonl"
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as errors:
            any_left = peers.measure(
                parsed, fakes, Subject(str(model), "cpu", "float32"), model, self.folder / "made", results
            )
        return any_left, [json.loads(line) for line in results.read_text().splitlines()], errors.getvalue()

    def test_rounds(self):
        any_left, lines, errors = self.measure("4")
        self.assertTrue(any_left)
        calls = [(line["run"], line["mode"], line["num_sequences"], line["engine"]) for line in lines if "run" in line]
        # Engines take turns; one sequence is measured though it was not asked for; `dying` fails in its second run
        whole = [
            (run, mode, count, engine)
            for run in range(2)
            for mode in ("beam", "sample")
            for count in (1, 4)
            for engine in ("upstream", "share", "fake", "dying")
            if (count == 1 or engine != "upstream") and (run == 0 or engine != "dying")
        ]
        self.assertEqual(calls, whole)
        left_out = {line["left_out"]: line["reason"] for line in lines if "left_out" in line}
        self.assertEqual(set(left_out), {"dying", "missing"})
        for name, reason in left_out.items():
            self.assertIn(f"left out: {name}: {reason}", errors)
        self.assertIn("exit code -6", left_out["dying"])
        self.assertIn("no-such-package", left_out["missing"])

        by_engine = {line["engine"]: line for line in lines if line.get("num_sequences") == 1}
        self.assertEqual(by_engine["fake"]["version"], "1.2.3")
        self.assertEqual(by_engine["fake"]["precision"], f"float32, {torch.get_num_threads()} threads")
        self.assertEqual(by_engine["upstream"]["version"], "5.24.0")
        self.assertIn("+prefill.", by_engine["share"]["version"])
        # The fake counts on from the prompt's last token: it was given the prompt of the other engines
        prompt = peers.prompt(Subject(str(self.folder / "model"), "cpu", "float32"), 20)[0].tolist()
        self.assertEqual(by_engine["fake"]["tokens"][0][0], prompt[-1])
        tables = render_tables(lines)
        self.assertEqual(len(re.findall(r"^\| fake \| 1.2.3 \|", tables, re.MULTILINE)), 4)
        self.assertIn("Left out: missing: missing.txt: pip install failed", tables)

    def test_prompts_that_do_not_fit(self):
        with self.assertRaisesRegex(ValueError, rf"--lengths and --new-tokens .* 94 \+ 3 = 97 tokens.* {CONTEXT}"):
            self.measure("1", lengths="20 94")


class CommandLineTest(unittest.TestCase):
    @parameterized.expand(
        [
            ("--lengths 0", "--lengths: must be at least 1, but is 0"),
            ("--sequences 6 -1", "--sequences: must be at least 1, but is -1"),
            ("--new-tokens many", "--new-tokens: must be an integer, but is 'many'"),
            ("--repeats 0", "--repeats: must be at least 1, but is 0"),
            ("--peers other", "--peers: invalid choice: 'other'"),
            ("--modes greedy", "--modes: invalid choice: 'greedy'"),
        ]
    )
    def test_bad_arguments(self, arguments, message):
        with redirect_stderr(StringIO()) as errors, self.assertRaises(SystemExit) as stopped:
            peers.main(arguments.split())
        self.assertEqual(stopped.exception.code, 2)
        self.assertIn(message, errors.getvalue())

    def test_no_peer_left_is_a_failure(self):
        with tempfile.TemporaryDirectory() as folder:

            def measure(arguments, peers, subject, model, made, results):
                results.write_text("\n".join(json.dumps(line) for line in LINES))
                return False

            with (
                mock.patch.object(peers, "measure", measure),
                mock.patch.object(peers, "export_model"),
                redirect_stdout(StringIO()) as printed,
            ):
                status = peers.main(["--output", folder])
            self.assertEqual(status, 1)
            self.assertEqual((Path(folder) / "peers.md").read_text(), printed.getvalue().removesuffix("\n"))

    def test_requirements_are_pinned(self):
        for peer in PEERS.values():
            lines = [line for line in peer.requirements.read_text().splitlines() if not line.startswith("#")]
            self.assertTrue(lines, peer.name)
            for line in lines:
                self.assertRegex(line, r"^[\w-]+==[\w.+]+$")
            self.assertIsNotNone(importlib.util.find_spec(peer.worker), peer.name)


def line(engine: str, count: int, run: int, seconds: float, tokens: list[int], mode: str = "beam") -> dict:
    return {
        "engine": engine,
        "version": "1.0",
        "precision": "float32",
        "run": run,
        "mode": mode,
        "length": 64,
        "num_sequences": count,
        "new_tokens": 3,
        "seconds": seconds,
        "cpu_seconds": seconds**2,
        "tokens": [tokens] * count,
        "load": seconds / 10,
    }


LINES = [
    {"machine": {"device": "a processor", "threads": 2}, "model": "a-model"},
    *(line("upstream", 1, run, seconds, [7, 8, 9]) for run, seconds in enumerate([2.0, 4.0, 3.0])),
    line("share", 6, 0, 3.3, [7, 8, 9]),
    line("other", 1, 0, 5.0, [7, 8, 9]),
    *(line("other", 6, run, seconds, tokens) for run, seconds, tokens in [(0, 6, [7, 8, 9]), (1, 7, [7, 5, 9])]),
    line("other", 6, 0, 6.0, [1, 1, 1], mode="sample"),
    {"left_out": "absent", "reason": "it doesn't install"},
]


class TablesTest(unittest.TestCase):
    def test_tables(self):
        rows = [
            "| upstream | 1.0 | float32 | 1 | 3.00 | 2.00 - 4.00 | 9.00 | 1.00 | 1.00 | 1.00 |  |",
            "| share | 1.0 | float32 | 6 | 3.30 | 3.30 - 3.30 | 10.89 |  |  | 1.10 | same |",
            "| other | 1.0 | float32 | 1 | 5.00 | 5.00 - 5.00 | 25.00 | 1.00 | 1.00 | 1.67 |  |",
            "| other | 1.0 | float32 | 6 | 6.50 | 6.00 - 7.00 | 42.50 | 1.30 | 1.70 | 2.17 | first 1 of 3 |",
        ]
        sample = "| other | 1.0 | float32 | 6 | 6.00 | 6.00 - 6.00 | 36.00 |  |  |  |  |"
        expected = [
            "a-model. device: a processor, threads: 2. Load of the machine: 0.2 to 0.7.\n",
            f"## beam, L = 64, 3 new tokens\n\n{HEADER}",
            *rows,
            f"\n## sample, L = 64, 3 new tokens\n\n{HEADER}",
            sample,
            f"\n{EXPLANATION}",
            "Left out: absent: it doesn't install\n",
        ]
        self.assertEqual(render_tables(LINES), "\n".join(expected))
        self.assertEqual(HEADER.splitlines()[1].count("---"), rows[0].count("|") - 1)

    def test_tables_where_nothing_ran(self):
        self.assertIn("Left out: absent", render_tables([LINES[0], LINES[-1]]))

    def test_best_beam(self):
        reference = [line("share", 2, 0, 1.0, [7, 8, 9])]
        for tokens, told in [([7, 8, 9], "same"), ([7, 8, 1], "first 2 of 3"), ([1, 8, 9], "first 0 of 3")]:
            self.assertEqual(best_beam([line("other", 2, 0, 1.0, tokens)], reference), told)
        self.assertEqual(best_beam(reference, None), "")


@unittest.skipUnless(importlib.util.find_spec("gguf"), "gguf, of examples/requirements.txt, is not installed")
class HalfPrecisionTest(unittest.TestCase):
    def test_quantized_matrices_become_16_bit_floats(self):
        from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
        from gguf.quants import dequantize, quantize

        from benchmark.peers.export import write_half_precision

        matrix = quantize(np.arange(128, dtype=np.float32).reshape(2, 64), GGMLQuantizationType.Q8_0)
        vector = np.linspace(0, 1, 5, dtype=np.float32)
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "source.gguf", Path(folder) / "target.gguf"
            writer = GGUFWriter(source, "llama")
            writer.add_block_count(3)
            writer.add_token_list(["a", "b"])
            writer.add_tensor("matrix", matrix, raw_dtype=GGMLQuantizationType.Q8_0)
            writer.add_tensor("vector", vector)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            write_half_precision(source, target)
            reader = GGUFReader(target)
            tensors = {tensor.name: tensor.data for tensor in reader.tensors}
            self.assertEqual(tensors["matrix"].dtype, np.float16)
            expected = dequantize(matrix, GGMLQuantizationType.Q8_0).astype(np.float16)
            np.testing.assert_array_equal(tensors["matrix"], expected)
            np.testing.assert_array_equal(tensors["vector"], vector)
            self.assertEqual(reader.fields["llama.block_count"].contents(), 3)
            self.assertEqual(reader.fields["tokenizer.ggml.tokens"].contents(), ["a", "b"])
            self.assertEqual(reader.fields["general.architecture"].contents(), "llama")


if __name__ == "__main__":
    unittest.main()
