# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""The default model in the formats that the peers read, all made from the same GGUF file."""

import shutil
from importlib import metadata
from pathlib import Path

import torch

from examples.long_prompt_beams import DEFAULT_MODEL_PACKAGE, find_default_model, load, status


GGUF_NAME = "model-f16.gguf"


def export_model(parent: Path) -> Path:
    """
    Returns the folder of the default model below `parent`, which is made once: float32 weights and tokenizer in
    upstream's format, and a GGUF file of 16-bit floats.
    """
    source = find_default_model()  # explains what to install
    folder = parent / f"{DEFAULT_MODEL_PACKAGE}-{metadata.version(DEFAULT_MODEL_PACKAGE)}"
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(unfinished, ignore_errors=True)
        model, tokenizer = load(None, torch.device("cpu"), torch.float32)
        # The weights are floats by now, but upstream refuses to save a model that was read from GGUF
        model.hf_quantizer = None
        del model.config.quantization_config
        with status(f"writing the model to {folder}"):
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
            write_half_precision(
                Path(source["pretrained_model_name_or_path"]) / source["gguf_file"], unfinished / GGUF_NAME
            )
        unfinished.rename(folder)
    return folder


def write_half_precision(source: Path, target: Path) -> None:
    """Copies a GGUF file with its matrices as 16-bit floats, whatever they are in `source`."""
    from gguf import GGUFReader, GGUFWriter
    from gguf.quants import dequantize

    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    # The writer adds these by itself
    own = ("GGUF.", "general.architecture", "general.file_type")
    for name, field in reader.fields.items():
        if not name.startswith(own):
            kind, *element = field.types
            writer.add_key_value(name, field.contents(), kind, *(element or [None])[:1])
    writer.add_file_type(1)  # most tensors are float16
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.ndim > 1:
            values = values.astype("float16")
        writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
