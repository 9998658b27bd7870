# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
What single models need so that their prompt can be prefilled on B rows: state that they carry from the prefill to the
decoding steps outside of a cache, and layouts of their own. A few lines each, kept together.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..configuration_utils import PreTrainedConfig
from ..utils import ModelOutput


if TYPE_CHECKING:
    from ..modeling_utils import PreTrainedModel


# Models whose state between prefill and decoding steps can't be repeated yet: their prompt is expanded first
OWN_STATE_MODELS = {
    "nemotron_asr_streaming": "the decoder keeps its own state",
    "parakeet_rnnt": "the decoder keeps its own state",
    "parakeet_tdt": "the decoder keeps its own state",
    "qwen2_5_omni_talker": "the reply of the thinker is kept beside the cache",
    "qwen3_omni_moe_talker": "hidden states of the thinker are kept beside the cache",
    "qwen3_omni_moe_talker_code_predictor": "generation steps are kept beside the cache",
}


# Models that read further chunks of their audio at every decoding step
STREAMING_MODELS = ("kyutai_speech_to_text", "voxtral_realtime")


def why_expand_first(model: "PreTrainedModel", model_kwargs: dict[str, Any]) -> str | None:
    """Returns why the prompt of `model` must be expanded before its prefill, or `None` if it needn't be."""
    if (reason := OWN_STATE_MODELS.get(model.config.model_type)) is not None:
        return reason
    has_noise = model_kwargs.get("input_values") is not None and model_kwargs.get("sample", True)
    if model.config.model_type == "vibevoice_asr" and has_noise:
        return "the prefill draws noise for each row of `input_values`, unless `sample=False`"
    # Experts with a capacity drop tokens depending on all rows of the batch (nllb-moe: unless they have room for all)
    if getattr(model.config, "moe_eval_capacity_token_fraction", 1.0) < 1.0:
        return "the capacity of the experts depends on the number of rows (`moe_eval_capacity_token_fraction`)"
    return None


def why_training_matters(model: "PreTrainedModel") -> str | None:
    """
    Returns why the rows of a prompt must be expanded before a prefill in training mode, or `None` if they needn't be.

    Trainers generate with a model in training mode. Most language models have no dropout: then nothing depends on the
    mode, and equal rows stay equal. Whatever is named after dropout, jitter, noise or masking counts as drawing, whether
    the module uses it or not.
    """
    if hasattr(model.config, "moe_eval_capacity_token_fraction"):
        return "the model is in training mode, where the capacity of the experts depends on the number of rows"
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return "the model is in training mode, where its batch normalization reads all rows"
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)
        if (is_dropout and module.p > 0) or _draws_in_training(vars(module)):
            return "the model is in training mode, where each row draws its own dropout"
    configs = [model.config, *(value for value in vars(model.config).values() if isinstance(value, PreTrainedConfig))]
    if any(_draws_in_training(vars(config)) for config in configs):
        return "the model is in training mode, where each row draws its own dropout"
    return None


def _draws_in_training(attributes: dict[str, Any]) -> bool:
    numbers = {name: value for name, value in attributes.items() if isinstance(value, (int, float)) and value > 0}
    return any(word in name for name in numbers for word in ("drop", "jitter", "noise", "mask_time", "mask_feature"))


def hidden_states_row_dim(model: "PreTrainedModel") -> Callable[[torch.Tensor], int]:
    """Returns the function that tells which dimension of a hidden state of `model` holds the rows."""
    if model.config.model_type in ("gemma3n", "gemma3n_text"):
        # All but the last state stack the alternating updates in front: (altup_num_inputs, B, L, D)
        return lambda hidden_state: 1 if hidden_state.ndim == 4 else 0
    return lambda hidden_state: 0


def expand_model_state(
    model: "PreTrainedModel", outputs: ModelOutput, model_kwargs: dict[str, Any], expand_size: int
) -> None:
    """
    Repeats the rows of what `model` carries from the prefill to decoding outside of a cache, in place.

    Args:
        model ([`PreTrainedModel`]): The model.
        outputs ([`ModelOutput`]): The outputs of its prefill.
        model_kwargs (`dict`): Its other inputs.
        expand_size (`int`): Number of copies of a row.
    """
    if (expand := STATE_HOOKS.get(model.config.model_type)) is not None:
        expand(model, outputs, model_kwargs, expand_size)


def _expand_rwkv(model, outputs, model_kwargs, expand_size) -> None:
    if outputs.state is not None:
        outputs.state = [state.repeat_interleave(expand_size, dim=0) for state in outputs.state]


def _expand_xlnet(model, outputs, model_kwargs, expand_size) -> None:
    # Memories are (L, B, D)
    if outputs.mems is not None:
        outputs.mems = tuple(memory.repeat_interleave(expand_size, dim=1) for memory in outputs.mems)


def _expand_reformer(model, outputs, model_kwargs, expand_size) -> None:
    if outputs.past_buckets_states is not None:
        outputs.past_buckets_states.batch_repeat_interleave(expand_size)


def _expand_recurrent_gemma(model, outputs, model_kwargs, expand_size) -> None:
    for module in model.modules():
        for name in ("conv1d_state", "recurrent_states"):
            if isinstance(state := getattr(module, name, None), torch.Tensor):
                setattr(module, name, state.repeat_interleave(expand_size, dim=0))


def _expand_glm_image(model, outputs, model_kwargs, expand_size) -> None:
    if model.model._cached_decode_position_ids is not None:
        position_ids = model.model._cached_decode_position_ids
        model.model._cached_decode_position_ids = position_ids.repeat_interleave(expand_size, dim=0)


def _expand_idefics(model, outputs, model_kwargs, expand_size) -> None:
    # One row per image: (B * images, ...). The images of a prompt stay together
    image_states = outputs.image_outputs.last_hidden_state
    rows = outputs.logits.shape[0] // expand_size
    grouped = image_states.unflatten(0, (rows, -1)).repeat_interleave(expand_size, dim=0)
    outputs.image_outputs.last_hidden_state = grouped.flatten(0, 1)


def _expand_audio_caches(model, outputs, model_kwargs, expand_size) -> None:
    # The audio encoder goes on during decoding, with caches of its own
    caches = [source.get(name) for source in (outputs, model_kwargs) for name in ("encoder_cache", "padding_cache")]
    for cache in {id(cache): cache for cache in caches if cache is not None}.values():
        cache.batch_repeat_interleave(expand_size)


def _expand_fuyu(model, outputs, model_kwargs, expand_size) -> None:
    # Without a cache the image is read at every step. Its features, (B, patches, D), are not among those that
    # upstream expands with the inputs, which have a `pooler_output`
    if (image := (model_kwargs.get("mm_encoder_outputs") or {}).get("image")) is not None:
        image.last_hidden_state = image.last_hidden_state.repeat_interleave(expand_size, dim=0)


STATE_HOOKS = {
    "fuyu": _expand_fuyu,
    "glm_image": _expand_glm_image,
    "idefics": _expand_idefics,
    "kyutai_speech_to_text": _expand_audio_caches,
    "recurrent_gemma": _expand_recurrent_gemma,
    "reformer": _expand_reformer,
    "rwkv": _expand_rwkv,
    "voxtral_realtime": _expand_audio_caches,
    "xlnet": _expand_xlnet,
}
