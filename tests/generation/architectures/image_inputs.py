# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Prompts with images: one image in the first row, two in the second, wherever the model takes so many."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from transformers import PreTrainedConfig, PreTrainedModel

from .text_inputs import (
    BATCH_SIZE,
    PADDING_LENGTH,
    PROMPT_LENGTH,
    InputMaker,
    Inputs,
    pad,
    random_tensor,
    random_tokens,
    text_inputs,
    text_with_placeholders,
    to_dtype,
)


IMAGES_PER_ROW = (1, 2)
NUM_IMAGES = sum(IMAGES_PER_ROW)


def image_inputs(model: PreTrainedModel) -> Inputs:
    """
    Text with images, and placeholders where their features go.

    Raises:
        `NotImplementedError`: If it isn't known how images are handed to this model.
    """
    model_type = model.config.model_type
    if model_type in IMAGE_INPUTS:
        return IMAGE_INPUTS[model_type](model)
    pixels = _pixels(model)
    token_id = image_token_id(model.config)
    before, after = AROUND_IMAGE.get(model_type, ([], []))
    placeholders = [[*before, *[token_id] * count, *after] for count in _feature_counts(model, pixels)]
    groups = [[placeholders.pop(0) for _ in range(count)] for count in IMAGES_PER_ROW]
    inputs = text_with_placeholders(groups, left=not model.config.is_encoder_decoder)
    arguments = {*_forward_arguments(model), *_forward_arguments(model.base_model)}
    is_image = (inputs["input_ids"] == token_id).long()
    if "mm_token_type_ids" in arguments:
        inputs["mm_token_type_ids"] = is_image
    if "token_type_ids" in arguments and model_type in TYPED_TOKENS:
        inputs["token_type_ids"] = is_image
    if model_type in IMAGES_BY_ROW:
        pixels["pixel_values"] = _images_by_row(pixels["pixel_values"])
    return inputs | pixels


def image_token_id(config: PreTrainedConfig) -> int:
    names = ("image_token_id", "image_token_index")
    return next(getattr(config, name) for name in names if getattr(config, name, None) is not None)


# Models that find images by the tokens around them
AROUND_IMAGE = {"qwen3_omni_moe_thinker": ([103], [104])}
# Models whose `token_type_ids` tell image tokens from text
TYPED_TOKENS = ("gemma3", "paligemma", "gemma4", "gemma4_unified", "molmo2")
# Models that take images as (rows, images, ...), filled up with zeros
IMAGES_BY_ROW = ("idefics2", "idefics3", "smolvlm")
# Models that take several crops of each image
IMAGES_IN_CROPS = ("llava_next", "llava_next_video", "llava_onevision", "granite4_vision")


def _forward_arguments(model: PreTrainedModel) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _feature_extractor(model: PreTrainedModel) -> Callable[..., Any]:
    for owner in (model.base_model, model):
        if hasattr(owner, "get_image_features"):
            return owner.get_image_features
    raise NotImplementedError(f"{type(model).__name__} has no `get_image_features`, and no prompt of its own here")


def _vision_size(config: PreTrainedConfig, *names: str, default: int) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
        if isinstance(value, int):
            return value
    return default


def _pixels(model: PreTrainedModel) -> Inputs:
    """Random images in the form that the model's `get_image_features` takes."""
    if model.config.model_type in PIXELS:
        return PIXELS[model.config.model_type](model.config)
    arguments = inspect.signature(_feature_extractor(model)).parameters
    vision_config = getattr(model.config, "vision_config", None)
    if "image_grid_thw" in arguments:
        patch_size = _vision_size(vision_config, "patch_size", default=8)
        frames = _vision_size(vision_config, "temporal_patch_size", "patch_temporal", default=1)
        channels = _vision_size(vision_config, "in_channels", "num_channels", "in_chans", default=3)
        pixels = {
            "image_grid_thw": GRIDS,
            "pixel_values": random_tensor(int(GRIDS.prod(-1).sum()), channels * frames * patch_size**2),
        }
        if "image_merge_sizes" in arguments:
            pixels["image_merge_sizes"] = torch.tensor([2] * NUM_IMAGES)
        return pixels
    size = _vision_size(vision_config, "image_size", default=16)
    shape = (2, 3, size, size) if model.config.model_type in IMAGES_IN_CROPS else (3, size, size)
    if model.config.model_type in IMAGES_BY_ROW:
        shape = (1, *shape)
    pixels = {"pixel_values": random_tensor(NUM_IMAGES, *shape)}
    if "image_sizes" in arguments and model.config.model_type != "llava":
        pixels["image_sizes"] = torch.tensor([[size, size]] * NUM_IMAGES)
    return pixels


# Time, height and width of the images in patches
GRIDS = torch.tensor([[1, 4, 4], [1, 4, 8], [1, 4, 4]])
NUM_PATCHES = GRIDS.prod(-1).tolist()


def _square_patches(config: PreTrainedConfig) -> Inputs:
    return {"image_grid_thw": GRIDS, "pixel_values": random_tensor(sum(NUM_PATCHES), 3, 8, 8)}


def _merged_patches(config: PreTrainedConfig) -> Inputs:
    # The patches that are merged into one feature come as one square of pixels, channels last
    return {"image_grid_thw": GRIDS, "pixel_values": random_tensor(sum(NUM_PATCHES), 16, 16, 3)}


def _padded_patches(config: PreTrainedConfig) -> Inputs:
    attention_mask = torch.zeros(NUM_IMAGES, max(NUM_PATCHES), dtype=torch.long)
    for i, count in enumerate(NUM_PATCHES):
        attention_mask[i, :count] = 1
    return {
        "pixel_values": random_tensor(NUM_IMAGES, max(NUM_PATCHES), 3 * 8**2),
        "spatial_shapes": GRIDS[:, 1:],
        "pixel_attention_mask": attention_mask,
    }


def _patch_strip(config: PreTrainedConfig) -> Inputs:
    # All patches of all images side by side
    return {"pixel_values": random_tensor(1, 3, 8, 8 * sum(NUM_PATCHES)), "target_sizes": GRIDS[:, 1:].int()}


def _patches_by_grid(config: PreTrainedConfig) -> Inputs:
    return {"pixel_values": random_tensor(sum(NUM_PATCHES), 3 * 8**2), "image_grid_hw": GRIDS[:, 1:]}


def _patches_by_position(side: int, patch_dim: int) -> Callable[[PreTrainedConfig], Inputs]:
    x, y = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy")
    positions = torch.stack([x, y], dim=-1).reshape(1, -1, 2)
    return lambda config: {
        "pixel_values": random_tensor(NUM_IMAGES, side**2, patch_dim),
        "image_position_ids": positions.repeat(NUM_IMAGES, 1, 1),
    }


def _pooled_patches(config: PreTrainedConfig) -> Inputs:
    # One crop of 2 x 2 patches per image. Each of its tokens pools one patch
    patches = torch.arange(4 * NUM_IMAGES)[:, None]
    return {
        "pixel_values": random_tensor(NUM_IMAGES, 4, 3 * 8**2),
        "image_token_pooling": patches,
        "image_grids": torch.tensor([[2, 2, 0, 0]] * NUM_IMAGES),
        "image_num_crops": torch.ones(NUM_IMAGES, dtype=torch.long),
    }


def _two_resolutions(config: PreTrainedConfig) -> Inputs:
    size, high_size = config.vision_config.image_size, config.high_res_vision_config.image_size
    return {
        "pixel_values": random_tensor(NUM_IMAGES, 3, size, size),
        "high_res_pixel_values": random_tensor(NUM_IMAGES, 3, high_size, high_size),
    }


# How images are handed to models that take neither whole images nor flattened patches with `image_grid_thw`
PIXELS: dict[str, Callable[[PreTrainedConfig], Inputs]] = {
    "deepseek_vl_hybrid": _two_resolutions,
    "gemma4": _patches_by_position(6, 3 * 8**2),
    "gemma4_unified": _patches_by_position(2, 3 * 24**2),
    "inkling2": _merged_patches,
    "inkling2_loop": _merged_patches,
    "kimi_k25": _square_patches,
    "lfm2_vl": _padded_patches,
    "minicpm_ocr": _patch_strip,
    "minicpmv4_6": _patch_strip,
    "minicpmv4_7": _patch_strip,
    "molmo2": _pooled_patches,
    "nemotron_h_omni": _patches_by_grid,
    "paddleocr_vl": _square_patches,
}


@torch.no_grad()
def _feature_counts(model: PreTrainedModel, pixels: Inputs) -> list[int]:
    """How many placeholder tokens each image takes."""
    output = _feature_extractor(model)(**to_dtype(pixels, model.dtype), return_dict=True)
    features = getattr(output, "pooler_output", None)
    if features is None and getattr(output, "deepstack_features", None):
        _, features = output.deepstack_features[0]
    if features is None:
        features = getattr(output, "last_hidden_state", output)
    if isinstance(features, torch.Tensor) and features.ndim == 2:
        features = features.chunk(NUM_IMAGES)
    return [image.reshape(-1, image.shape[-1]).shape[0] for image in features]


def _images_by_row(images: torch.Tensor) -> torch.Tensor:
    rows = images[:, 0].split(IMAGES_PER_ROW)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _image_beside_text(model: PreTrainedModel) -> Inputs:
    size = model.config.vision_config.image_size
    return text_inputs(model) | {"pixel_values": random_tensor(BATCH_SIZE, 3, size, size)}


def _mllama(model: PreTrainedModel) -> Inputs:
    size, tiles = model.config.vision_config.image_size, model.config.vision_config.max_num_tiles
    seen = torch.ones(BATCH_SIZE, PROMPT_LENGTH, 1, tiles, dtype=torch.long)
    seen[0, : PADDING_LENGTH + 1] = 0
    return text_inputs(model) | {
        "pixel_values": random_tensor(BATCH_SIZE, 1, tiles, 3, size, size),
        "aspect_ratio_ids": torch.ones(BATCH_SIZE, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(BATCH_SIZE, 1, tiles, dtype=torch.long),
        "cross_attention_mask": seen,
    }


def _idefics(model: PreTrainedModel) -> Inputs:
    size, num_images = model.config.vision_config.image_size, max(IMAGES_PER_ROW)
    seen = torch.ones(BATCH_SIZE, PROMPT_LENGTH, num_images, dtype=torch.long)
    seen[0, :, IMAGES_PER_ROW[0] :] = 0
    return text_inputs(model) | {
        "pixel_values": random_tensor(BATCH_SIZE, num_images, 3, size, size),
        "image_attention_mask": seen,
    }


def _query_tokens_first(model: PreTrainedModel, token_id: int, count: int) -> Inputs:
    """A text prompt behind `count` placeholders of the one image of each row."""
    inputs = text_inputs(model)
    queries = torch.full((BATCH_SIZE, count), token_id)
    return {
        "input_ids": torch.cat([queries, inputs["input_ids"]], dim=1),
        "attention_mask": torch.cat([torch.ones_like(queries), inputs["attention_mask"]], dim=1),
    }


def _blip_2(model: PreTrainedModel) -> Inputs:
    size = model.config.vision_config.image_size
    inputs = _query_tokens_first(model, model.config.image_token_index, model.config.num_query_tokens)
    return inputs | {"pixel_values": random_tensor(BATCH_SIZE, 3, size, size)}


def _instructblip(model: PreTrainedModel) -> Inputs:
    return _blip_2(model) | {
        "qformer_input_ids": random_tokens(BATCH_SIZE, 6),
        "qformer_attention_mask": torch.ones(BATCH_SIZE, 6, dtype=torch.long),
    }


def _instructblipvideo(model: PreTrainedModel) -> Inputs:
    size = model.config.vision_config.image_size
    return _instructblip(model) | {"pixel_values": random_tensor(BATCH_SIZE, 4, 3, size, size)}


def _kosmos_2(model: PreTrainedModel) -> Inputs:
    size, count = model.config.vision_config.image_size, model.config.latent_query_num
    inputs = _query_tokens_first(model, 9, count)
    is_image = torch.zeros_like(inputs["input_ids"])
    is_image[:, :count] = 1
    return inputs | {"pixel_values": random_tensor(BATCH_SIZE, 3, size, size), "image_embeds_position_mask": is_image}


def _kosmos_2_5(model: PreTrainedModel) -> Inputs:
    count = model.config.latent_query_num
    inputs = _query_tokens_first(model, 9, count)
    is_image = torch.zeros_like(inputs["input_ids"])
    is_image[:, :count] = 1
    return inputs | {"flattened_patches": _flattened_patches(3 * 8**2), "image_embeds_position_mask": is_image}


def _flattened_patches(patch_dim: int) -> torch.Tensor:
    # Each patch starts with its row and column, counted from 1
    patches = random_tensor(BATCH_SIZE, 9, 2 + patch_dim)
    patches[:, :, 0] = torch.arange(9) // 3 + 1
    patches[:, :, 1] = torch.arange(9) % 3 + 1
    return patches


def _pix2struct(model: PreTrainedModel) -> Inputs:
    patches = _flattened_patches(model.config.vision_config.patch_embed_hidden_size)
    attention_mask = torch.ones(BATCH_SIZE, 9)
    attention_mask[0, 6:] = 0
    return {"flattened_patches": patches, "attention_mask": attention_mask}


def _pixels_only(model: PreTrainedModel) -> Inputs:
    vision_config = getattr(model.config, "vision_config", None) or model.config.encoder
    size = _vision_size(vision_config, "image_size", default=16)
    return {"pixel_values": random_tensor(BATCH_SIZE, 3, size, size)}


def _granite_docling(model: PreTrainedModel) -> Inputs:
    # One picture per row, cut into one tile and two
    size = model.config.vision_config.image_size
    tiles = torch.arange(max(IMAGES_PER_ROW)) < torch.tensor(IMAGES_PER_ROW)[:, None]
    pixels = {"pixel_values": random_tensor(*tiles.shape, 3, size, size), "pixel_attention_mask": tiles}
    groups = [[[model.config.image_token_id] * count] for count in _feature_counts(model, pixels)]
    return text_with_placeholders(groups, left=True) | pixels


def _fuyu(model: PreTrainedModel) -> Inputs:
    # One image per row: patches are (rows, patches, pixels)
    patches = random_tensor(BATCH_SIZE, 4, 3 * model.config.patch_size**2)
    groups = [[[image_token_id(model.config)] * 4]] * BATCH_SIZE
    return text_with_placeholders(groups, left=True) | {"pixel_values": patches}


def _evolla(model: PreTrainedModel) -> Inputs:
    # Proteins instead of images
    proteins = pad(random_tokens(BATCH_SIZE, 8).tolist(), left=False)
    return text_inputs(model) | {f"protein_{name}": value for name, value in proteins.items()}


def _udop(model: PreTrainedModel) -> Inputs:
    size = model.config.image_size
    boxes = torch.rand(BATCH_SIZE, PROMPT_LENGTH, 4, generator=torch.Generator().manual_seed(0)).sort(dim=-1).values
    return text_inputs(model) | {
        "bbox": boxes,
        "pixel_values": random_tensor(BATCH_SIZE, 3, size, size),
    }


IMAGE_INPUTS: dict[str, InputMaker] = {
    "blip": _image_beside_text,
    "blip-2": _blip_2,
    "evolla": _evolla,
    "fuyu": _fuyu,
    "git": _image_beside_text,
    "granite_docling": _granite_docling,
    "idefics": _idefics,
    "instructblip": _instructblip,
    "instructblipvideo": _instructblipvideo,
    "kosmos-2": _kosmos_2,
    "kosmos-2.5": _kosmos_2_5,
    "mllama": _mllama,
    "pix2struct": _pix2struct,
    "pp_formulanet": _pixels_only,
    "udop": _udop,
    "vision-encoder-decoder": _pixels_only,
}
