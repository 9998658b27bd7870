# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Every cache can repeat its batch: rows `[a, b]` become `[a, a, b, b]`, as if the repeated rows had been prefilled.

To repeat, to select and to reorder rows is one operation: to take rows by their index. A cache layer knows its own
tensors in one method, `reorder_cache`, and [`CacheExpansionMixin`] derives the other two from it. The mixins below are
bases of the classes of caches. This module must not import `cache_utils` or a modeling file: they import it.

Shapes: B rows, N repeats, H heads, L cached length, D head size.
"""

from numbers import Integral
from typing import Any

import torch

from .prefix_sharing import SegmentedStates
from .utils import is_torchdynamo_compiling


DERIVED_METHODS = ("batch_repeat_interleave", "batch_select_indices")


def check_repeats(repeats: int) -> int:
    """
    Returns `repeats` if a batch can be repeated that many times.

    Raises:
        `ValueError`: If `repeats` is not an integer of at least 1.
    """
    if not isinstance(repeats, Integral) or repeats < 1:
        raise ValueError(f"`repeats` must be an integer of at least 1, but is {repeats!r}.")
    return repeats


def take_rows(buffer: torch.Tensor, index: torch.LongTensor, static: bool = True) -> torch.Tensor:
    """
    Takes rows of a buffer, on the device where the buffer is.

    A static buffer keeps its address as long as the number of rows stays the same, so that compiled code finds it
    where it was. A new one is marked as static.

    Args:
        buffer (`torch.Tensor`): The buffer, with the rows in the first dimension.
        index (`torch.LongTensor` of shape `(rows,)`): The rows to take, on any device.
        static (`bool`, *optional*, defaults to `True`): Whether compiled code may rely on the buffer's address.

    Returns:
        `torch.Tensor`: The rows: `buffer` itself where it is static and the number of rows has not changed.
    """
    rows = buffer.index_select(0, index.to(buffer.device))
    if isinstance(rows, SegmentedStates):
        return rows.written_to(buffer) if static else rows
    if static and rows.shape == buffer.shape:
        return buffer.copy_(rows)
    if static and not is_torchdynamo_compiling():
        torch._dynamo.mark_static_address(rows)
    return rows


def count_rows(states: Any) -> int | None:
    """
    Returns the number of rows of the first tensor in `states` that has any, `None` if there is none.

    Args:
        states (`torch.Tensor`, or nested `list`, `tuple` or `dict` of such): States with the rows first. Tensors of less
            than two dimensions are none: lengths, and the `torch.tensor([])` that dynamic layers start from.
    """
    if isinstance(states, (torch.Tensor, SegmentedStates)):
        return states.shape[0] if states.dim() > 1 else None
    if isinstance(states, dict):
        states = states.values()
    elif not isinstance(states, (list, tuple)):
        return None
    return next((rows for rows in map(count_rows, states) if rows is not None), None)


def _definer(cls: type, method: str) -> int:
    """Position in `cls.__mro__` of the class whose `method` it has. The smaller, the more derived."""
    return next((i for i, base in enumerate(cls.__mro__) if method in vars(base)), len(cls.__mro__))


class CacheExpansionMixin:
    """
    Derives `batch_repeat_interleave` and `batch_select_indices` of a cache, or of one layer of it, from its
    `reorder_cache`.
    """

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        # A class that overrides `reorder_cache` alone has tensors that the inherited methods leave out
        for method in DERIVED_METHODS:
            if _definer(cls, "reorder_cache") < _definer(cls, method):
                setattr(cls, method, vars(CacheExpansionMixin)[method])

    def cached_rows(self) -> int | None:
        """
        Returns the number B of rows held, `None` if nothing is held. Static buffers hold rows before they are filled.
        For caches whose first tensor has its rows elsewhere than first, or that keep their tensors in other objects, it
        has to be overridden.
        """
        return count_rows(vars(self))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """
        Repeats each of the B rows `repeats` times in place: `[a, b]` becomes `[a, a, b, b]`.

        Args:
            repeats (`int`): Number N of copies of a row. Nothing is copied for one.

        Raises:
            `ValueError`: If `repeats` is not an integer of at least 1.
        """
        if check_repeats(repeats) > 1 and (rows := self.cached_rows()) is not None:
            self.reorder_cache(torch.arange(rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """
        Keeps the rows `indices` alone, in their order.

        Args:
            indices (`torch.Tensor` of shape `(rows,)`): Indices of rows, or a mask of shape `(B,)`.
        """
        if (rows := self.cached_rows()) is not None:
            self.reorder_cache(torch.arange(rows, device=getattr(indices, "device", None))[indices])


class StaticLayerExpansionMixin:
    """
    Keys and values of static layers, of shape `(B, H, max_cache_len, D)`: they are reordered where they lie. Layers that
    are initialized but not filled have B rows as well.
    """

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorders this layer's cache for beam search, where it lies."""
        if self.is_initialized:
            self.keys = take_rows(self.keys, beam_idx)
            self.values = take_rows(self.values, beam_idx)
            self.batch_size = self.keys.shape[0]


class LinearAttentionLayerExpansionMixin:
    """
    Convolution and recurrent states of linear-attention layers, with the rows first. They are as static as their
    address: a layer that records its past assigns convolution states that grow.
    """

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorders this layer's states for beam search, where they lie."""
        for states, static in ((self.conv_states, not self.record_past), (self.recurrent_states, True)):
            for position, state in states.items():
                if state is not None:
                    states[position] = take_rows(state, beam_idx, static=static)


class QuantizedLayerExpansionMixin:
    """
    Rows of layers whose keys and values are mostly quantized. Their `reorder_cache` neither dequantizes nor quantizes
    again: group-wise backends take the rows at the next update, which dequantizes anyway.
    """

    def cached_rows(self) -> int | None:
        if not self.is_initialized:
            return None
        stored, pending = self._quantized_keys, getattr(self, "_pending_beam_idx", None)
        if pending is not None:
            return pending.shape[0]
        # HQQ packs its values, and keeps their shape beside them
        packed = isinstance(stored, tuple) and isinstance(stored[1], dict)
        return stored[1]["shape"][0] if packed else count_rows(stored)


class StaticReferenceWindowLayerExpansionMixin:
    """Buffers of unlimited_ocr's static layers: prompt and sliding window are views of one buffer."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorders this layer's cache for beam search, where it lies."""
        if not self.is_initialized:
            return
        beam_idx = beam_idx.to(self.all_keys.device)
        keys, values = self.all_keys.index_select(0, beam_idx), self.all_values.index_select(0, beam_idx)
        if keys.shape != self.all_keys.shape:
            self.batch_size = keys.shape[0]
            self._allocate_key_value_buffers(self.prefill_keys.shape[-2])
        self.all_keys.copy_(keys)
        self.all_values.copy_(values)


class MiniMaxCacheExpansionMixin:
    """The recurrent states of minimax, which the cache keeps beside its layers: a list with `[]` for the others."""

    def pad_linear_cache(self) -> int:
        """Gives each layer its entry in `linear_cache`, up to the last one. Returns their number."""
        self.linear_cache.extend([] for _ in range(len(self.linear_cache), len(self)))
        return len(self)

    def cached_rows(self) -> int | None:
        return count_rows(self.linear_cache) or cache_rows(self.layers)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorders all layers for beam search."""
        super().reorder_cache(beam_idx)
        for position, state in enumerate(self.linear_cache):
            if len(state) > 0:
                self.linear_cache[position] = take_rows(state, beam_idx, static=False)


class XLSTMCacheExpansionMixin(CacheExpansionMixin):
    """States of xlstm, three tensors a layer with the rows first, allocated with the cache."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorders the cache for beam search, given the selected beam indices."""
        for layer, states in self.rnn_state.items():
            self.rnn_state[layer] = tuple(take_rows(state, beam_idx, static=False) for state in states)


class PaddingCacheExpansionMixin(CacheExpansionMixin):
    """Left context of streaming convolutions, a list of tensors of shape `(B, channels, padding)`, `None` if unused."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorders the cache for beam search, given the selected beam indices."""
        for position, padding in enumerate(self.padding_cache):
            if padding is not None:
                self.padding_cache[position] = take_rows(padding, beam_idx, static=False)


class LayeredPaddingCacheExpansionMixin(CacheExpansionMixin):
    """Left context of streaming convolutions, one static tensor `cache` of shape `(B, channels, padding)` a layer."""

    def cached_rows(self) -> int | None:
        return count_rows([layer.cache for layer in self.layers.values()])

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorders the cache for beam search, given the selected beam indices."""
        for layer in self.layers.values():
            if layer.is_initialized:
                layer.cache = take_rows(layer.cache, beam_idx)


def _parts(cache: Any) -> list:
    """Returns `cache` and the caches for self- and cross-attention in it, if any."""
    parts = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    return [cache, *(part for part in parts if part is not None)]


def _layers(cache: Any) -> list:
    """Returns the layers of all parts of `cache`, those for self-attention first."""
    layers = [getattr(part, "layers", None) for part in _parts(cache)]
    return [layer for part in layers if isinstance(part, list) for layer in part]


def cache_rows(cache: Any) -> int | None:
    """
    Returns the number of rows that a cache holds, without waiting for a device.

    Args:
        cache ([`Cache`] or any other cache, or a list of layers): The cache. Self-attention is looked at first.

    Returns:
        `int` or `None`: The rows of the first layer that is filled, or initialized early. `None` if there is none.
    """
    if hasattr(cache, "cached_rows"):
        return cache.cached_rows()
    rows = (
        layer.cached_rows() if hasattr(layer, "cached_rows") else count_rows(getattr(layer, "keys", None))
        for layer in (cache if isinstance(cache, list) else _layers(cache))
    )
    return next((count for count in rows if count is not None), None)


def cannot_expand(cache: Any) -> str | None:
    """
    Returns why the rows of `cache` can't be repeated, `None` if they can.

    A class from outside of the library that overrides `update` may keep tensors of its own. It is trusted if it, or a
    class derived from it, also says how rows are taken: in `batch_repeat_interleave`, or in a layer's `reorder_cache`.
    """
    for part in _parts(cache):
        name = type(part).__name__
        if not hasattr(part, "batch_repeat_interleave"):
            return f"`{name}` has no `batch_repeat_interleave`"
        if _is_foreign(part) and not _overrides(type(part), "batch_repeat_interleave", ("update", "reorder_cache")):
            return f"`{name}` overrides `update` or `reorder_cache`, but not `batch_repeat_interleave`"
    for layer in _layers(cache):
        name = type(layer).__name__
        if not hasattr(layer, "batch_repeat_interleave"):
            return f"`{name}` has no `batch_repeat_interleave`"
        if _is_foreign(layer) and not _overrides(type(layer), "batch_repeat_interleave", ("update",)):
            return f"`{name}` overrides `update`, but neither `reorder_cache` nor `batch_repeat_interleave`"
    return None


def _is_foreign(cache: Any) -> bool:
    return type(cache).__module__.partition(".")[0] != __name__.partition(".")[0]


def _overrides(cls: type, method: str, others: tuple[str, ...]) -> bool:
    """Whether `method` is defined by no class above those that define the `others`."""
    return all(_definer(cls, method) <= _definer(cls, other) for other in others)


def check_layers(cache: Any, method: str) -> None:
    """
    Refuses a cache with a layer that lacks `method`, before any layer is changed.

    Raises:
        `TypeError`: If there is such a layer.
    """
    for layer in _layers(cache):
        if not hasattr(layer, method):
            raise TypeError(f"`{method}` is not possible: `{type(layer).__name__}`, a layer of this cache, lacks it.")


def layers_to_repeat(cache: Any, repeats: int) -> range:
    """
    Returns the indices of the layers of `cache` to repeat: none for one repeat.

    Raises:
        `ValueError`: If `repeats` is not an integer of at least 1.
        `TypeError`: If a layer can't be repeated.
    """
    check_layers(cache, "batch_repeat_interleave")
    if check_repeats(repeats) == 1:
        return range(0)
    if getattr(cache, "offloading", False):
        # Copies between the devices, started by the last forward, may still be under way
        for device in {getattr(layer, "device", None) for layer in cache.layers}:
            if device is not None and device.type == "cuda":
                torch.cuda.synchronize(device)
    return range(len(cache.layers))
