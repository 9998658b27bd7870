# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Prompts with sound."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from transformers import PreTrainedConfig, PreTrainedModel

from .text_inputs import (
    BATCH_SIZE,
    PROMPT_LENGTH,
    InputMaker,
    Inputs,
    random_tensor,
    text_inputs,
    text_with_placeholders,
    to_dtype,
)


NUM_FRAMES = 64


def sound_inputs(model: PreTrainedModel, sounds_per_row: tuple[int, ...] = (1,) * BATCH_SIZE) -> Inputs:
    """
    Sound for an encoder, or text with sounds and placeholders where their features go.

    Args:
        model ([`PreTrainedModel`]): The model.
        sounds_per_row (`tuple[int, ...]`): How many sounds each row of text holds. An encoder takes one.

    Raises:
        `NotImplementedError`: If it isn't known how sound is handed to this model.
    """
    model_type = model.config.model_type
    if model_type in SOUND_INPUTS:
        return SOUND_INPUTS[model_type](model)
    sounds = _sounds(model, sum(sounds_per_row))
    placeholders = [[model.config.audio_token_id] * count for count in _feature_counts(model, sounds)]
    groups = [[placeholders.pop(0) for _ in range(count)] for count in sounds_per_row]
    return text_with_placeholders(groups, left=True) | sounds


def _feature_extractor(model: PreTrainedModel) -> Callable[..., Any]:
    for owner in (model.base_model, model):
        if hasattr(owner, "get_audio_features"):
            return owner.get_audio_features
    raise NotImplementedError(f"{type(model).__name__} has no `get_audio_features`, and no inputs of its own here")


@torch.no_grad()
def _feature_counts(model: PreTrainedModel, sounds: Inputs) -> list[int]:
    """How many placeholder tokens each sound takes."""
    num_sounds = next(iter(sounds.values())).shape[0]
    if model.config.model_type in FEATURE_COUNTS:
        return [FEATURE_COUNTS[model.config.model_type]] * num_sounds
    features = _feature_extractor(model)(**to_dtype(sounds, model.dtype), return_dict=True).pooler_output
    if isinstance(features, torch.Tensor) and features.ndim == 2:
        features = features.chunk(num_sounds)
    return [len(sound) for sound in features]


# Models whose features can't be had before the prompt
FEATURE_COUNTS = {"musicflamingo": NUM_FRAMES // 4, "qwen2_audio": NUM_FRAMES // 4}


def _sounds(model: PreTrainedModel, num_sounds: int) -> Inputs:
    """Random sounds of full length in the form that the model takes, with the masks that it takes."""
    model_type = model.config.model_type
    arguments = inspect.signature(model.forward).parameters
    if model_type in SOUNDS:
        sounds = SOUNDS[model_type](model.config, num_sounds)
    elif "input_values" in arguments:
        sounds = {"input_values": random_tensor(num_sounds, 1, 2000)}
    else:
        sounds = {"input_features": random_tensor(num_sounds, model.config.audio_config.num_mel_bins, NUM_FRAMES)}
    length = next(iter(sounds.values())).shape[-1]
    for name in ("input_features_mask", "feature_attention_mask", "padding_mask"):
        if name in arguments and name not in sounds:
            sounds[name] = torch.ones(num_sounds, length, dtype=torch.long)
    return sounds


def _stacked_frames(config: PreTrainedConfig, num_sounds: int) -> Inputs:
    features = random_tensor(num_sounds, 20, config.audio_config.input_size)
    return {"input_features": features, "input_features_mask": torch.ones(num_sounds, 20, dtype=torch.long)}


def _granite_speech(config: PreTrainedConfig, num_sounds: int) -> Inputs:
    # The mask says which features are used, not which frames
    num_features = math.ceil(NUM_FRAMES / config.window_size) * (config.window_size // config.downsample_rate)
    return {
        "input_features": random_tensor(num_sounds, NUM_FRAMES, config.encoder_config.input_dim),
        "input_features_mask": torch.ones(num_sounds, num_features, dtype=torch.bool),
    }


def _speech_and_speakers(config: PreTrainedConfig, num_sounds: int) -> Inputs:
    features = random_tensor(num_sounds, NUM_FRAMES, config.audio_config.asr_config.num_mel_bins)
    return {"input_features": features, "input_features_mask": torch.ones(num_sounds, NUM_FRAMES, dtype=torch.long)}


def _whole_windows(config: PreTrainedConfig, num_sounds: int) -> Inputs:
    length = 2 * config.audio_config.n_window
    return {"input_features": random_tensor(num_sounds, config.audio_config.num_mel_bins, length)}


def _short_waveforms(config: PreTrainedConfig, num_sounds: int) -> Inputs:
    return {"input_values": random_tensor(num_sounds, 1, 16)}


# How sound is handed to models that take neither waveforms nor 64 frames with the mel bins first
SOUNDS: dict[str, Callable[[PreTrainedConfig, int], Inputs]] = {
    "fun_asr_nano": _stacked_frames,
    "granite_speech": _granite_speech,
    "granite_speech_plus": _granite_speech,
    "nemo_speechlm": _speech_and_speakers,
    "qwen3_asr": _whole_windows,
    "vibevoice_asr": _short_waveforms,
}


def _padded_mask(length: int) -> torch.Tensor:
    attention_mask = torch.ones(BATCH_SIZE, length, dtype=torch.long)
    attention_mask[0, length // 2 :] = 0
    return attention_mask


def _waveform(length: int) -> InputMaker:
    return lambda model: {"input_values": random_tensor(BATCH_SIZE, length), "attention_mask": _padded_mask(length)}


def _spectrogram(length: int) -> InputMaker:
    return lambda model: {
        "input_features": random_tensor(BATCH_SIZE, length, 16),
        "attention_mask": _padded_mask(length),
    }


def _whisper(model: PreTrainedModel) -> Inputs:
    return {"input_features": random_tensor(BATCH_SIZE, model.config.num_mel_bins, 64)}


def _seamless(model: PreTrainedModel) -> Inputs:
    features = random_tensor(BATCH_SIZE, 20, model.config.feature_projection_input_dim)
    return {
        "input_features": features,
        "attention_mask": torch.ones(BATCH_SIZE, 20, dtype=torch.long),
        "tgt_lang": None,
    }


def _kyutai_speech_to_text(model: PreTrainedModel) -> Inputs:
    # One token per frame. The sound goes on after the prompt, and so does its encoder: by windows
    frames = PROMPT_LENGTH + 8
    model.generation_config.audio_window_size = PROMPT_LENGTH + 1
    return text_inputs(model) | {"input_values": random_tensor(BATCH_SIZE, 1, frames * model.config.frame_size)}


def _voxtral_realtime(model: PreTrainedModel) -> Inputs:
    length = (PROMPT_LENGTH + 8) * model.config.audio_length_per_tok
    features = random_tensor(BATCH_SIZE, model.config.audio_config.num_mel_bins, length)
    return text_inputs(model) | {"input_features": features}


def _pop2piano(model: PreTrainedModel) -> Inputs:
    model.generation_config.composer_to_feature_token = {
        f"composer{i}": i for i in range(1, 1 + model.config.composer_vocab_size)
    }
    return {"input_features": random_tensor(BATCH_SIZE, 20, model.config.d_model)}


SOUND_INPUTS: dict[str, InputMaker] = {
    "canary": _spectrogram(64),
    "cohere_asr": _spectrogram(64),
    "kyutai_speech_to_text": _kyutai_speech_to_text,
    "moonshine": _waveform(2000),
    "moonshine_streaming": _waveform(2000),
    "pop2piano": _pop2piano,
    "seamless_m4t": _seamless,
    "seamless_m4t_v2": _seamless,
    "speech-encoder-decoder": _waveform(2000),
    "speech_to_text": _spectrogram(64),
    "speecht5": _waveform(4000),
    "voxtral_realtime": _voxtral_realtime,
    "whisper": _whisper,
}
