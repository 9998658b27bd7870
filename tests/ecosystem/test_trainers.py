# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Trainers that generate: trl's GRPO and RLOO, and transformers' own for sequence-to-sequence models."""

import tempfile

import peft
import trl
from datasets import Dataset
from parameterized import parameterized

from tests.generation.runs import forwarded
from tests.generation.tiny_models import build_inputs, build_model
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from .observation import EQUAL_ROWS, SHARED, EcosystemTest, prefill_log
from .tokenizer import build_tokenizer


GENERATIONS, STEPS = 4, 3
TRAINERS = {"grpo": (trl.GRPOConfig, trl.GRPOTrainer), "rloo": (trl.RLOOConfig, trl.RLOOTrainer)}


def train(algorithm: str, lora_dropout: float | None, options: dict) -> dict:
    """Three steps: all completions, the rows of the first forward, and a checksum of what was trained."""
    completions = []

    def reward(completion_ids: list[list[int]], **kwargs) -> list[float]:
        completions.append([list(ids) for ids in completion_ids])
        return [float(sum(ids) % 7) for ids in completion_ids]

    config_class, trainer_class = TRAINERS[algorithm]
    prompts = Dataset.from_dict({"prompt": [f"w{3 + i} w{9 + i} w{20 + i} w{30 + i}" for i in range(8)]})
    model = build_model("llama")
    adapter = None
    if lora_dropout is not None:
        adapter = peft.LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=lora_dropout, task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as folder:
        config = config_class(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=2 * GENERATIONS,
            num_generations=GENERATIONS,
            max_completion_length=6,
            learning_rate=1e-3,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            beta=0.0,  # no model to refer to, which would be loaded by its name
            seed=0,
            **{"gradient_checkpointing": False, **options},
        )
        trainer = trainer_class(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=prompts,
            processing_class=build_tokenizer(),
            peft_config=adapter,
        )
        with forwarded(model) as shapes, prefill_log() as log:
            trainer.train()
    trained = sum(float(p.detach().double().abs().sum()) for p in trainer.model.parameters() if p.requires_grad)
    return {"tokens": completions, "rows": shapes[0][0], "log": log, "trained": trained}


def evaluate() -> dict:
    """Evaluates bart by beam search, as for a translation."""
    model = build_model("bart")
    inputs = build_inputs("bart", 2)
    rows = [
        {"input_ids": ids, "attention_mask": mask, "labels": ids}
        for ids, mask in zip(inputs["input_ids"].tolist(), inputs["attention_mask"].tolist())
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = Seq2SeqTrainingArguments(
            output_dir=folder,
            predict_with_generate=True,
            generation_num_beams=4,
            generation_max_length=12,
            per_device_eval_batch_size=2,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Seq2SeqTrainer(model=model, args=config)
        with forwarded(model) as shapes, prefill_log() as log:
            predictions = trainer.predict(Dataset.from_list(rows))
    return {"tokens": predictions.predictions.tolist(), "rows": shapes[0][0], "log": log}


class TrainersTest(EcosystemTest):
    @parameterized.expand(
        [
            ("grpo", "grpo", None, {}),
            ("rloo", "rloo", None, {}),
            ("lora", "grpo", 0.0, {}),
            ("gradient_checkpointing", "grpo", None, {"gradient_checkpointing": True}),
            ("static_cache", "grpo", None, {"cache_implementation": "static"}),
        ]
    )
    def test_prompts_of_a_group_are_prefilled_once(self, _, algorithm: str, lora_dropout: float | None, options: dict):
        rows = (2, 2 * GENERATIONS)
        ours, theirs = self.assert_prefilled_once(rows, EQUAL_ROWS, train, algorithm, lora_dropout, options)
        self.assertEqual(len(ours["tokens"]), STEPS)
        self.assertAlmostEqual(ours["trained"], theirs["trained"], delta=1e-5 * theirs["trained"])

    def test_dropout_needs_all_rows(self):
        rows = (2 * GENERATIONS, 2 * GENERATIONS)
        self.assert_prefilled_once(rows, "each row draws its own dropout", train, "grpo", 0.1, {})

    def test_predict_with_generate(self):
        # The decoder's first forward
        self.assert_prefilled_once((2, 8), SHARED, evaluate)
