# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Equal rows: a batch that holds the same prompt several times is forwarded once per distinct prompt. Trainers repeat a
prompt G times in the batch where they could ask for `num_return_sequences=G`, and get the same for it here.

Rows are equal if everything that the model reads is equal in them, bit by bit. Only the encoder and the prefill see the
U distinct rows. Everything else, the decoding loop included, sees all B rows and draws for each of them.

Shapes: B rows, U distinct rows, G rows per group, N rows per prompt that decoding makes of each row, L prompt length.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


# Inputs with one row per sequence, whatever the model. What belongs to which row of images, or of an unknown input,
# can't be told from its shape.
ROW_INPUTS = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "mm_token_type_ids",
    "global_attention_mask",
    "encoder_outputs",
    "decoder_input_ids",
    "decoder_inputs_embeds",
    "decoder_attention_mask",
    "decoder_position_ids",
)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd 64-bit constants of the splitmix64 generator, as signed integers
_STEP, _FIRST_MIX, _SECOND_MIX = (
    value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def group_equal(items: Iterable[Hashable]) -> tuple[list[int], list[int]]:
    """Returns the position of the first item of each group of equal items, and the group of each item."""
    firsts: dict[Hashable, int] = {}
    numbers: dict[Hashable, int] = {}
    groups = []
    for position, item in enumerate(items):
        if item not in firsts:
            firsts[item], numbers[item] = position, len(firsts)
        groups.append(numbers[item])
    return list(firsts.values()), groups


@dataclass(frozen=True)
class EqualRows:
    """
    Which rows of a batch are equal.

    Args:
        firsts (`list[int]`): The first row of each of the U groups, in their order.
        groups (`list[int]`): The group of each of the B rows.
    """

    firsts: list[int]
    groups: list[int]

    @property
    def group_size(self) -> int:
        """G if the batch is U groups of G consecutive rows, 1 if it has any other pattern."""
        size = len(self.groups) // len(self.firsts)
        return size if self.groups == [row // size for row in range(len(self.groups))] else 1

    def select(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Keeps the first row of each group of all inputs with B rows. The cache is the same object."""
        return {name: value if name == "cache" else self._select(name, value) for name, value in inputs.items()}

    def _select(self, name: str, value: Any) -> Any:
        def select_rows(tensor: torch.Tensor) -> torch.Tensor:
            dim = row_dim(name, tensor)
            if tensor.ndim <= dim or tensor.shape[dim] != len(self.groups):
                return tensor
            return tensor.index_select(dim, torch.tensor(self.firsts, device=tensor.device))

        return pytree.tree_map_only(torch.Tensor, select_rows, value)

    def can_restore(self, value: Any) -> bool:
        """Whether all tensors in `value` have U rows."""
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        return all(tensor.ndim > 0 and tensor.shape[0] == len(self.firsts) for tensor in tensors)

    def restore(self, value: Any) -> Any:
        """Makes B rows of the U rows of all tensors in `value`."""

        def restore_rows(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.index_select(0, torch.tensor(self.groups, device=tensor.device))

        return pytree.tree_map_only(torch.Tensor, restore_rows, value)


def row_dim(name: str, tensor: torch.Tensor) -> int:
    """Which dimension of an input holds the rows: multimodal position ids are (axes, B, L)."""
    return 1 if name == "position_ids" and tensor.ndim == 3 else 0


def tensors_by_row(inputs: dict[str, Any], main_input: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors in `inputs` with their rows first, all but `main_input`."""
    named = [(name, tensor) for name in ROW_INPUTS for tensor in pytree.tree_leaves(inputs.get(name))]
    return [
        tensor.movedim(row_dim(name, tensor), 0)
        for name, tensor in named
        if tensor is not None and tensor is not main_input
    ]


def why_not_compare(inputs: dict[str, Any], rows: int) -> str | None:
    """
    Returns why it can't be told which rows are equal, or `None` if it can.

    Args:
        inputs (`dict`): All inputs of the model.
        rows (`int`): Number B of rows.
    """
    for name, value in inputs.items():
        if value is None or isinstance(value, (bool, int, float, str)):
            continue
        if name == "cache":
            return "a cache was passed in, which may hold something else for each row"
        tensors = pytree.tree_leaves(value)
        if name not in ROW_INPUTS or not all(_is_comparable(name, tensor, rows) for tensor in tensors):
            return f"it isn't known what of `{name}` belongs to which row"
    return None


def _is_comparable(name: str, value: Any, rows: int) -> bool:
    if value is None:
        return True
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_complex():
        return False
    dim = row_dim(name, value)
    return value.ndim > dim and value.shape[dim] == rows


def fingerprints(tensors: list[torch.Tensor]) -> torch.LongTensor:
    """
    Computes a number per row, which is the same for rows that are equal in all of `tensors`. Every tensor is read once, and no
    device is waited for.

    Args:
        tensors (`list[torch.Tensor]`): Tensors of shape `(B, ...)` of any type.

    Returns:
        `torch.LongTensor` of shape `(B,)`: The fingerprints.
    """
    combined = fingerprint_rows(tensors[0])
    for tensor in tensors[1:]:
        combined = combined * _STEP + fingerprint_rows(tensor).to(combined.device)
    return combined


def find_equal_rows(tensors: list[torch.Tensor], prints: list[int] | None = None) -> EqualRows | None:
    """
    Finds the rows that are equal in all of `tensors`, bit by bit, wherever they stand in the batch. Only where fingerprints
    repeat, the rows themselves are compared.

    Args:
        tensors (`list[torch.Tensor]`): Tensors of shape `(B, ...)` of any type.
        prints (`list[int]`, *optional*): Their fingerprints, if they are known.

    Returns:
        [`EqualRows`] or `None`: The groups, `None` if all rows are different.
    """
    firsts, groups = group_equal(fingerprints(tensors).tolist() if prints is None else prints)
    if len(firsts) == len(groups):
        return None
    repeated = [row for row, group in enumerate(groups) if firsts[group] != row]
    originals = [firsts[groups[row]] for row in repeated]
    checks = [(bits[repeated] == bits[originals]).all() for bits in map(_bits, tensors)]
    # Different rows with the same fingerprint: none are known, and then nothing is lost but time
    return EqualRows(firsts, groups) if all(checks) else None


def fingerprint_rows(tensor: torch.Tensor) -> torch.LongTensor:
    """
    Computes a 64-bit number per row, by weights that look random: equal for equal rows, and most likely different for
    different ones. No random number is drawn for it.

    Args:
        tensor (`torch.Tensor` of shape `(B, ...)`): A tensor of any type.

    Returns:
        `torch.LongTensor` of shape `(B,)`: The fingerprints.
    """
    bits = _bits(tensor)
    weights = torch.arange(1, bits.shape[1] + 1, device=bits.device) * _STEP
    weights = (weights ^ (weights >> 30)) * _FIRST_MIX
    weights = (weights ^ (weights >> 27)) * _SECOND_MIX
    return (bits * (weights ^ (weights >> 31))).sum(dim=1)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of each row as integers, `(B, numbers per row)`."""
    tensor = tensor.flatten(1) if tensor.ndim > 1 else tensor.unsqueeze(1)
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])
