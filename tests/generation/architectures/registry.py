# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Which architectures are swept, with what kind of prompt, and why the others are not."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)


@dataclass(frozen=True)
class Case:
    """
    One architecture with one kind of prompt.

    Args:
        mapping (`str`): The auto mapping that names the architecture.
        kind (`str`):
            What the prompt holds: `"text"`; `"images"`, one in the first row and two in the second; `"sound"`, one in
            each row; `"sounds"`, one in the first row and two in the second.
        model_type (`str`): The key of the mapping.
        class_name (`str`): Its value.
    """

    mapping: str
    kind: str
    model_type: str
    class_name: str

    @property
    def name(self) -> str:
        return f"{self.mapping}, {self.kind}: {self.model_type}"

    @property
    def excluded(self) -> str | None:
        """Why upstream cannot serve as the oracle of this case, or `None` if it can."""
        return self._look_up(EXCLUDED, None)

    def _look_up(self, table: Mapping[Any, Any], default: Any) -> Any:
        for key in ((self.kind, self.model_type), self.class_name, self.model_type):
            if key in table:
                return table[key]
        return default

    @property
    def runs_in_float32(self) -> bool:
        return self._look_up(FLOAT32, None) is not None

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `generate` that this architecture needs."""
        return self._look_up(ARGUMENTS, {})

    @property
    def beam_arguments(self) -> dict[str, Any]:
        """Arguments of `generate` that it needs for beam search."""
        return self._look_up(BEAM_ARGUMENTS, {})

    @property
    def reference_beam_arguments(self) -> dict[str, Any]:
        """Arguments that upstream needs in addition to do beam search right."""
        return self._look_up(REFERENCE_BEAM_ARGUMENTS, {})

    @property
    def expanded_first(self) -> dict[str, str]:
        """The modes in which the prompt is expanded before the prefill, with the reasons."""
        return self._look_up(EXPANDED_FIRST, {})

    @property
    def takes_beams(self) -> bool:
        return self.model_type not in WITHOUT_BEAMS

    @property
    def wrong_with_beams(self) -> tuple[str, ...]:
        """The fields of the output that upstream gets wrong in beam search."""
        return self._look_up(WRONG_WITH_BEAMS, ())

    @property
    def is_expanded_by_caller(self) -> bool:
        """Whether the oracle gets rows that the test has expanded: upstream mixes up the images or sounds of a row."""
        return self.kind == "sounds" or (self.kind == "images" and self.model_type in IMAGES_MIXED_UP)


# Names in the mapping of sequence-to-sequence models, beside those of the speech mapping, that take sound
AUDIO_LANGUAGE_MODELS = (
    "audioflamingo3",
    "glmasr",
    "moss_transcribe_diarize",
    "musicflamingo",
    "nemo_speechlm",
    "qwen2_audio",
)
# Models that find the sounds of a row by placeholders in its text
SEVERAL_SOUNDS = (
    *AUDIO_LANGUAGE_MODELS,
    "fun_asr_nano",
    "granite_speech",
    "granite_speech_plus",
    "omniasr",
    "qwen3_asr",
    "voxtral",
)
# Upstream repeats each image of a row by itself, [a, b] -> [a, a, b, b], where rows need [a, b, a, b]
IMAGES_MIXED_UP = (
    "glm46v",
    "glm4v",
    "glm4v_moe",
    "glm5_next",
    "glm_ocr",
    "glmga",
    "granite4_vision",
    "nemotron_h_omni",
)

_TIMM = "the image tower comes from timm"
_IMAGES_ONLY = "does not take a prompt without an image"
_DRAFT = "drafts for another model, on that model's keys and values"
EXCLUDED: dict[str | tuple[str, str], str] = {
    "dia": "its `generate` refuses several sequences per prompt",
    "diffusion_gemma": "denoises blocks of tokens in a loop of its own",
    "fast_vlm": _TIMM,
    "gemma3n": _TIMM,
    "gemma4_assistant": _DRAFT,
    "gemma4_unified_assistant": _DRAFT,
    "inkling_mm_model": "needs SciPy",
    "Llama4ForConditionalGeneration": "upstream's forward pass fails (no `image_outputs`)",
    "perception_lm": _TIMM,
    "pi0": "has no `generate`",
    "vibevoice": "needs a noise scheduler of diffusers",
    ("images", "fuyu"): "upstream does not expand the image features",
    ("images", "mistral4"): "takes text only",
    ("text", "blip"): _IMAGES_ONLY,
    ("text", "blip-2"): _IMAGES_ONLY,
    ("text", "idefics"): _IMAGES_ONLY,
    ("text", "instructblip"): _IMAGES_ONLY,
    ("text", "instructblipvideo"): _IMAGES_ONLY,
    ("text", "pix2struct"): _IMAGES_ONLY,
    ("text", "pp_formulanet"): _IMAGES_ONLY,
    ("text", "udop"): _IMAGES_ONLY,
    ("text", "vision-encoder-decoder"): _IMAGES_ONLY,
    ("text", "voxtral_realtime"): "does not take a prompt without sound",
}

_MASK = "softmax in float32 makes infinities of the float64 mask"
_MASK_CONVERSION = "does not convert the float64 minimum"
_SOFTMAX = "softmax in float32"
_ROUTER = "scores of experts in float32"
# Models that run in float32, and why float64 would not make them exact
FLOAT32 = {
    "bloom": _MASK,
    "flint": _SOFTMAX,
    ("images", "glm5_next"): _ROUTER,
    "gemma2": _MASK,
    "gpt_neo": "scores in float32",
    "granite_swa": _MASK,
    "granitemoe_swa": _MASK,
    "hy_v4": "hyper-connections in float32",
    "hy_v4_vl": "hyper-connections in float32",
    ("images", "inkling2_loop"): _ROUTER,
    "kosmos-2": _MASK_CONVERSION,
    "kyutai_speech_to_text": "codec in float32",
    "mpt": _MASK,
    ("images", "muse_spark"): _ROUTER,
    "nllb-moe": _ROUTER,
    "prophetnet": _MASK,
    "switch_transformers": _ROUTER,
    "t5gemma": _SOFTMAX,
    "vaultgemma": _MASK,
    "voxtral_realtime": "time embedding in float32",
    "xglm": _MASK_CONVERSION,
    "xlm": _MASK,
    "xlnet": "position embedding in float32",
}
_WITHOUT_CACHE = {"use_cache": False}
ARGUMENTS = {
    # Upstream appends the keys and values of the protein to those of the text
    ("images", "evolla"): _WITHOUT_CACHE,
}
BEAM_ARGUMENTS: dict[str, dict[str, Any]] = {
    # Beam search is refused with a state that can't be reordered
    "rwkv": _WITHOUT_CACHE,
    "xlstm": _WITHOUT_CACHE,
    # Upstream returns one and the same hypothesis for all sequences
    "WhisperForConditionalGeneration": {"num_return_sequences": 1},
}
REFERENCE_BEAM_ARGUMENTS: dict[str, dict[str, Any]] = {
    # The linear attention of its cache isn't reordered with the beams
    "minimax": _WITHOUT_CACHE,
}
_OWN_EXPANSION = {"sample": "its own `generate` repeats the prompts for `num_return_sequences`"}
EXPANDED_FIRST: dict[Any, dict[str, str]] = {
    ("sound", "vibevoice_asr"): dict.fromkeys(["sample", "beam", "beam sample"], "its encoder adds noise to each row"),
    "WhisperForConditionalGeneration": _OWN_EXPANSION,
    "musicgen": _OWN_EXPANSION,
    "musicgen_melody": _OWN_EXPANSION,
}
# Models that refuse beam search
WITHOUT_BEAMS = ("musicgen", "musicgen_melody")
WRONG_WITH_BEAMS = {
    # Of the scores of all beams, upstream keeps as many rows as there are prompts
    "WhisperForConditionalGeneration": ("scores",),
}


def all_cases() -> list[Case]:
    """Every case, those that are excluded too, in the order of the mappings."""
    mappings = {
        "causal LM": (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, ["text"]),
        "sequence-to-sequence LM": (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, ["text"]),
        "image-text-to-text": (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, ["text", "images"]),
        "speech": (MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, ["sound"]),
    }
    cases = []
    for mapping, (names, kinds) in mappings.items():
        for model_type, class_name in names.items():
            more = ["sound"] if mapping.startswith("seq") and model_type in AUDIO_LANGUAGE_MODELS else []
            if "sound" in [*kinds, *more] and model_type in SEVERAL_SOUNDS:
                more.append("sounds")
            cases += [Case(mapping, kind, model_type, class_name) for kind in [*kinds, *more]]
    return cases
