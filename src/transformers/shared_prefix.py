# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Cache layers that hold the keys and values of a prompt once for the N rows that continue it.

    cache = model(prompt, use_cache=True).cache      # B rows
    share_cache(cache, repeats=N)                    # stands for B * N rows now, nothing was copied
    model(next_tokens, cache=cache)                  # (B * N, 1) tokens
    cache.reorder_cache(beam_idx)                    # touches the suffixes only
    materialize_cache(cache)                         # ordinary layers with B * N rows, as if nothing had been shared

A shared layer behaves as an ordinary layer of the B * N expanded rows would, in every method. It holds

    prefix  (B, H, L, D)       as the prefill left it: never copied, concatenated, gathered or reordered
    suffix  (B * N, H, S, D)   in a buffer that grows geometrically, or that has room for `suffix_length` from the start

`update` returns the suffix and hands the prefix to the attention function, see `integrations.shared_prefix_attention`.
This is right only for attention modules that pass keys, values and `kwargs` straight on: `shared_prefix_support` tells
which models do. Where `update` gets no `kwargs` there is no way to hand over anything: the layer makes the B * N rows of
its prefix on the spot (it materializes) and goes on as an ordinary layer. Reading `keys` or `values` makes a copy of all
rows as well, but leaves the layer shared.

Of a static layer, the part that the prompt has filled is the prefix, and the suffix gets a buffer with the room that is left:
no shape changes while decoding, so that compiled code goes on.

Cross-attention keys and values don't grow. Their layer holds B rows, and `keys` and `values` are just these: modules read
them there while decoding, and the attention function folds the queries.

Shapes: B batch items, N rows per item (`repeats`), H heads, L prefix length, S suffix length, D head size.
"""

import weakref

import torch

from .cache_expansion import check_repeats, take_rows
from .cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache, StaticLayer
from .integrations.shared_prefix_attention import SharedPrefix
from .utils import is_torchdynamo_compiling


MINIMAL_GROWTH = 4


class _SharedStates:
    """
    Keys or values: a prefix of B rows, and a suffix of B * N rows in a buffer with room for more. Views of both stay as
    they are whatever is done afterwards: what was written once is not written again.

    Args:
        prefix (`torch.Tensor` of shape `(B, H, L, D)`, *optional*): The prefix, which is kept as it is.
        capacity (`int`, *optional*, defaults to 0): Number of tokens for which the first buffer has room at least.
    """

    def __init__(self, prefix: torch.Tensor | None = None, capacity: int = 0):
        self.prefix, self.capacity = prefix, capacity
        self.buffer: torch.Tensor | None = None
        self.start = self.stop = 0

    @property
    def prefix_length(self) -> int:
        return 0 if self.prefix is None else self.prefix.shape[2]

    @property
    def suffix_length(self) -> int:
        return self.stop - self.start

    @property
    def length(self) -> int:
        return self.prefix_length + self.suffix_length

    @property
    def suffix(self) -> torch.Tensor | None:
        """View of the suffix, `(B * N, H, S, D)`. It may be empty; there is none before the first token."""
        return None if self.buffer is None else self.buffer[:, :, self.start : self.stop]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in (self.prefix, self.suffix) if tensor is not None]

    def rows(self, repeats: int) -> torch.Tensor | None:
        """Keys or values of all rows, `(B * N, H, L + S, D)`: a view where nothing has to be repeated or joined."""
        if self.prefix is None:
            return self.suffix
        prefix = self.prefix.repeat_interleave(repeats, dim=0) if repeats > 1 else self.prefix
        return prefix if self.suffix_length == 0 else torch.cat([prefix, self.suffix], dim=2)

    def replace(self, states: torch.Tensor | None) -> None:
        """Forgets the prefix. `states` `(rows, H, L, D)` are the suffix now."""
        self.prefix, self.buffer = None, states
        self.start, self.stop = 0, 0 if states is None else states.shape[2]

    def append(self, states: torch.Tensor) -> None:
        """Appends `(B * N, H, Q, D)` to the suffix."""
        added, held = states.shape[2], self.suffix
        if held is None or self.stop + added > self.buffer.shape[2]:
            length = self.suffix_length + added
            if length > self.capacity:
                self.capacity = length + max(MINIMAL_GROWTH, length // 2)
            self.buffer = states.new_empty(*states.shape[:2], self.capacity, states.shape[3])
            self.start, self.stop = 0, length - added
            if held is not None:
                self.buffer[:, :, : self.stop] = held
        self.buffer[:, :, self.stop : self.stop + added] = states
        self.stop += added

    def take_suffix_rows(self, indices: torch.LongTensor) -> None:
        """Takes the rows `indices` of the suffix, with one copy, into a new buffer that has as much room left."""
        if self.buffer is None:
            return
        held, (_, heads, room, size) = self.suffix, self.buffer.shape
        self.buffer = held.new_empty(indices.shape[0], heads, room - self.start, size)
        self.start, self.stop = 0, held.shape[2]
        torch.index_select(held, 0, indices.to(held.device), out=self.suffix)

    def drop_oldest(self, count: int) -> None:
        from_prefix = min(count, self.prefix_length)
        if from_prefix > 0:
            self.prefix = None if from_prefix == self.prefix_length else self.prefix[:, :, from_prefix:]
        self.start = min(self.start + max(count - from_prefix, 0), self.stop)

    def drop_newest(self, count: int) -> None:
        from_suffix = min(count, self.suffix_length)
        if self.buffer is not None:
            self.stop -= from_suffix
            # Without room: the next token must not be written over the dropped ones, of which somebody may hold a view
            self.buffer = self.buffer[:, :, : self.stop]
        if self.prefix is not None and count > from_suffix:
            self.prefix = self.prefix[:, :, : max(self.prefix_length - (count - from_suffix), 0)]

    def to(self, device: torch.device | str) -> None:
        self.prefix, self.buffer = (
            None if tensor is None else tensor.to(device, non_blocking=True) for tensor in (self.prefix, self.buffer)
        )


class _LastCheck:
    """
    Remembers the result for the last beam indices: all layers of a cache ask about the same tensor, and the answer has to
    come from its device.
    """

    def __init__(self):
        self.entry = None

    def stays_within_items(self, indices: torch.LongTensor, items: int, repeats: int) -> bool:
        if indices.shape[0] != items * repeats:
            return False
        # A tensor that was made in inference mode has no version, so that a change of it would go unnoticed
        key = None if indices.is_inference() else (indices._version, items, repeats)
        if key is not None and self.entry is not None and self.entry[0]() is indices and self.entry[1] == key:
            return self.entry[2]
        of_item = indices.reshape(items, repeats) // repeats
        result = bool((of_item == torch.arange(items, device=indices.device)[:, None]).all())
        self.entry = None if key is None else (weakref.ref(indices), key, result)
        return result


_last_check = _LastCheck()


def _group_rows(items: torch.LongTensor) -> tuple[torch.LongTensor, int]:
    """
    Groups rows by the item that they continue.

    Args:
        items (`torch.LongTensor` of shape `(rows,)`): The item of each row.

    Returns:
        `tuple`: The items of the groups, and the size that all groups have: the largest possible, or 1.
    """
    count = items.shape[0]
    for size in range(count, 1, -1):
        if count % size == 0 and bool((items.view(-1, size) == items[::size, None]).all()):
            return items[::size], size
    return items, 1


class SharedPrefixLayer(DynamicLayer):
    """
    A layer of full attention: keys and values of shape `(B, H, L, D)` that N rows share, and `(B * N, H, S, D)` of the rows
    themselves.

    It is made by `from_layer`. Where a row is moved to another item (`reorder_cache` and `batch_select_indices` allow it,
    beam search never does it) the prefixes move with their rows: they are gathered, once per item where all rows of an
    item moved together, once per row otherwise.

    Attributes:
        repeats (`int`): Number N of rows per batch item.
    """

    def __init__(self, **kwargs):
        self._keys, self._values = _SharedStates(), _SharedStates()
        self.repeats = 1
        self._handed_over: SharedPrefix | None = None
        super().__init__(**kwargs)

    @classmethod
    def from_layer(cls, layer: DynamicLayer, repeats: int, suffix_length: int = 0) -> "SharedPrefixLayer":
        """
        Makes a shared layer of a filled one, whose keys and values become the prefix without being copied.

        Args:
            layer ([`DynamicLayer`]): The layer after the prefill, with B rows. It is left as it is.
            repeats (`int`): Number N of rows per batch item.
            suffix_length (`int`, *optional*, defaults to 0): Number of tokens to come, if known: room for them is made once.

        Raises:
            `ValueError`: If `repeats` is not an integer of at least 1, or if `layer` is empty.
        """
        check_repeats(repeats)
        if not layer.is_initialized or layer.keys.dim() != 4:
            raise ValueError(f"`layer` must be filled before it can be shared, but is an empty {layer}.")
        shared = cls._like(layer)
        shared.device, shared.is_initialized, shared.repeats = layer.device, True, repeats
        shared._keys, shared._values = (_SharedStates(states, suffix_length) for states in (layer.keys, layer.values))
        return shared

    @classmethod
    def _like(cls, layer: DynamicLayer) -> "SharedPrefixLayer":
        return cls()

    def materialize(self) -> DynamicLayer:
        """Returns an ordinary layer of the B * N rows. This one is left as it is."""
        plain = DynamicLayer()
        self._fill(plain)
        return plain

    def _fill(self, plain: DynamicLayer) -> None:
        self._check_read()
        if self._keys.tensors:
            plain.lazy_initialization(*self._keys.tensors[:1], *self._values.tensors[:1])
            # A view of the buffer would keep the room behind it alive
            plain.keys, plain.values = (states.rows(self.repeats).contiguous() for states in self._states)

    @property
    def _states(self) -> tuple[_SharedStates, _SharedStates]:
        return self._keys, self._values

    @property
    def prefix(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The keys and values that are stored once per item, `(B, H, L, D)`, or `None` after materializing."""
        return self._keys.prefix, self._values.prefix

    @property
    def suffix(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The keys and values of the rows themselves, `(B * N, H, S, D)`, or `None` before the first token."""
        return self._keys.suffix, self._values.suffix

    @property
    def bytes_used(self) -> int:
        """Bytes of the prefix's B rows and of the suffix's B * N rows."""
        return sum(tensor.nbytes for states in self._states for tensor in states.tensors)

    @property
    def bytes_reserved(self) -> int:
        """Bytes of the storages behind them: the room for tokens to come, and what a view leaves out, included."""
        storages = [tensor.untyped_storage() for states in self._states for tensor in states.tensors]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @property
    def keys(self) -> torch.Tensor | None:
        """Keys of all rows, `(B * N, H, L + S, D)`, copied for each call while the prefix is shared."""
        return self._keys.rows(self.repeats)

    @keys.setter
    def keys(self, states: torch.Tensor | None) -> None:
        self._materialize_rows()
        self._keys.replace(states)

    @property
    def values(self) -> torch.Tensor | None:
        """Values of all rows, `(B * N, H, L + S, D)`, copied for each call while the prefix is shared."""
        return self._values.rows(self.repeats)

    @values.setter
    def values(self, states: torch.Tensor | None) -> None:
        self._materialize_rows()
        self._values.replace(states)

    def _materialize_rows(self) -> None:
        """Makes the B * N rows of the prefix. The layer is an ordinary one from now on."""
        if self._keys.prefix is not None:
            for states in self._states:
                states.replace(states.rows(self.repeats))
        self.repeats = 1

    def cached_rows(self) -> int | None:
        """Returns the number of rows that the layer stands for, `None` if it is empty."""
        tensors = self._keys.tensors
        return tensors[-1].shape[0] * (self.repeats if tensors[-1] is self._keys.prefix else 1) if tensors else None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device, self.is_initialized = key_states.device, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Appends the new keys and values to the suffix, and hands the prefix over.

        Args:
            key_states (`torch.Tensor` of shape `(B * N, H, Q, D)`): The new keys.
            value_states (`torch.Tensor` of shape `(B * N, H, Q, D)`): The new values.
            kwargs (`dict`, *optional*): The keyword arguments that the attention module will pass to its attention
                function. They get the item `shared_prefix`. Without it the layer materializes.

        Returns:
            `tuple`: Keys and values of the suffix if the prefix was handed over, all of them otherwise.

        Raises:
            `ValueError`: If the number of rows or the type of the new keys or values is not that of the layer.
            `RuntimeError`: If nobody has read the prefix that was handed over by the call before.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check_update(key_states, value_states)
        module_kwargs = kwargs.get("kwargs")
        if module_kwargs is None:
            self._materialize_rows()
        self._keys.append(key_states)
        self._values.append(value_states)
        return self._hand_over(module_kwargs, self._visible_length(key_states.shape[-2]))

    def _visible_length(self, new_tokens: int) -> int | None:
        """Number of tokens that the new ones may look at, themselves included. `None` means all."""
        return None

    def _check_read(self) -> None:
        if self._handed_over is not None and not self._handed_over.is_read:
            raise RuntimeError(
                "The attention function did not read the shared prefix that it was given: it has attended to the suffix "
                "alone. This attention module can't share a prompt; use `prompt_expansion='copy'`."
            )

    def _check_update(self, *new_states: torch.Tensor) -> None:
        self._check_read()
        for name, new, states in zip(("key_states", "value_states"), new_states, self._states, strict=True):
            held = next(iter(states.tensors), None)
            if held is not None and (new.shape[0] != self.cached_rows() or new.dtype != held.dtype):
                raise ValueError(
                    f"`{name}` must have {self.cached_rows()} rows of type {held.dtype}, as many as the layer stands for, "
                    f"but has {new.shape[0]} of type {new.dtype}."
                )

    def _hand_over(self, module_kwargs: dict | None, visible: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the suffix and hands over the prefix, or what the last `visible` tokens leave of them."""
        from_prefix = self._keys.prefix_length
        prefix, suffix = self.prefix, self.suffix
        if visible is not None:
            from_prefix = min(from_prefix, visible - self._keys.suffix_length)
            suffix = tuple(states[:, :, -visible:] for states in suffix)
        self._handed_over = None
        if from_prefix > 0:
            if from_prefix < self._keys.prefix_length:
                prefix = tuple(states[:, :, -from_prefix:] for states in prefix)
            module_kwargs["shared_prefix"] = SharedPrefix(*prefix, self.repeats)
            # Compiled code would depend on what the call before has left here
            self._handed_over = None if is_torchdynamo_compiling() else module_kwargs["shared_prefix"]
        return suffix

    def get_seq_length(self) -> int:
        """Returns the number of tokens of a row, L + S."""
        return self._keys.length

    def crop(self, tokens_to_remove: int) -> None:
        """
        Removes the newest tokens, those of the suffix first. Nothing is copied.

        Args:
            tokens_to_remove (`int`): Minus the number of tokens to remove.

        Raises:
            `ValueError`: If `tokens_to_remove` is positive.
        """
        if tokens_to_remove > 0:
            DynamicLayer.crop(self, tokens_to_remove)
        for states in self._states:
            states.drop_newest(-tokens_to_remove)
        if self._keys.prefix_length == 0:
            self._materialize_rows()

    def reset(self) -> None:
        """Empties the layer. It is an ordinary one from now on."""
        for states in self._states:
            states.replace(None)
        self._handed_over = None
        super().reset()

    def offload(self) -> None:
        """Moves prefix and suffix to the CPU."""
        for states in self._states:
            states.to("cpu")

    def prefetch(self) -> None:
        """Moves prefix and suffix back to the layer's device."""
        if self.is_initialized:
            for states in self._states:
                states.to(self.device)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """
        Reorders the rows: row `i` becomes what row `beam_idx[i]` was. As long as every row stays with its item, only the
        suffix is copied.
        """
        if self._keys.length > 0:
            self._take_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each of the B * N rows `repeats` times. Only the suffix is copied."""
        if check_repeats(repeats) == 1 or self._keys.length == 0:
            return
        rows = self.cached_rows()
        for states in self._states:
            states.take_suffix_rows(torch.arange(rows).repeat_interleave(repeats))
        if self._keys.prefix is not None:
            self.repeats *= repeats

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows `indices` alone, in their order. They may be given in any way that a tensor can be indexed."""
        if self._keys.length > 0:
            self._take_rows(torch.arange(self.cached_rows(), device=getattr(indices, "device", None))[indices])

    def _take_rows(self, rows: torch.LongTensor) -> None:
        self._check_read()
        prefix = self._keys.prefix
        if prefix is not None and not _last_check.stays_within_items(rows, prefix.shape[0], self.repeats):
            items, repeats = _group_rows(rows.cpu() // self.repeats)
            for states in self._states:
                if not torch.equal(items, torch.arange(prefix.shape[0])):
                    states.prefix = states.prefix.index_select(0, items.to(states.prefix.device))
            self.repeats = repeats
        for states in self._states:
            states.take_suffix_rows(rows)


class SharedPrefixSlidingWindowLayer(SharedPrefixLayer, DynamicSlidingWindowLayer):
    """
    A layer of sliding-window attention. What its window shows of the prefix shrinks with every token, and the prefix is
    let go when the last bit of it has left the window.
    """

    get_seq_length = DynamicSlidingWindowLayer.get_seq_length

    @classmethod
    def _like(cls, layer: DynamicSlidingWindowLayer) -> "SharedPrefixSlidingWindowLayer":
        shared = cls(sliding_window=layer.sliding_window)
        shared.cumulative_length, shared.record_past = layer.cumulative_length, layer.record_past
        shared._sliding_window_tensor = layer._sliding_window_tensor
        return shared

    @classmethod
    def from_layer(
        cls, layer: DynamicSlidingWindowLayer, repeats: int, suffix_length: int = 0
    ) -> "SharedPrefixSlidingWindowLayer":
        """
        As [`SharedPrefixLayer.from_layer`]. The window's B rows are copied if the layer holds them as a view of the whole
        prompt, which would otherwise stay alive until the end.
        """
        shared = super().from_layer(layer, repeats, min(suffix_length, layer.sliding_window))
        for states in shared._states:
            if states.prefix.untyped_storage().nbytes() > states.prefix.nbytes:
                states.prefix = states.prefix.clone()
        return shared

    def materialize(self) -> DynamicSlidingWindowLayer:
        plain = DynamicSlidingWindowLayer(self.sliding_window)
        self._fill(plain)
        plain.cumulative_length, plain.record_past = self.cumulative_length, self.record_past
        return plain

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As [`SharedPrefixLayer.update`], with what the window shows of prefix and suffix to the new tokens."""
        shown = super().update(key_states, value_states, *args, **kwargs)
        self.cumulative_length += key_states.shape[-2]
        if not self.record_past:
            self._restrict_to_window()
        return shown

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Takes the device of the first states, for the window's length too, which masks are made from."""
        super().lazy_initialization(key_states, value_states)
        self._sliding_window_tensor = self._sliding_window_tensor.to(self.device)

    def _visible_length(self, new_tokens: int) -> int:
        return self.sliding_window - 1 + new_tokens

    def _restrict_to_window(self) -> None:
        """Lets go what no token to come can see."""
        for states in self._states:
            states.drop_oldest(max(states.length - (self.sliding_window - 1), 0))

    def crop(self, tokens_to_remove: int) -> None:
        """
        Removes the newest tokens, and lets go what is left outside the window. Nothing is copied.

        Args:
            tokens_to_remove (`int`): Minus the number of tokens to remove.

        Raises:
            `ValueError`: If `tokens_to_remove` is positive.
            `RuntimeError`: If the window was reached and past states are not recorded.
        """
        if self.get_seq_length() < self.sliding_window:
            super().crop(tokens_to_remove)
            self.cumulative_length = self._keys.length
        elif not self.record_past or tokens_to_remove > 0:
            DynamicSlidingWindowLayer.crop(self, tokens_to_remove)  # refuses it
        else:
            super().crop(tokens_to_remove)
            self._restrict_to_window()
            self.cumulative_length += tokens_to_remove


class SharedCrossAttentionLayer(SharedPrefixLayer):
    """
    A layer of cross-attention: the encoder's keys and values of shape `(B, H, L, D)`, which N rows of the decoder share.
    Attention modules read `keys` and `values`; the attention function folds the N rows of queries for each row of keys.
    """

    @property
    def keys(self) -> torch.Tensor | None:
        """Keys of the encoder, `(B, H, L, D)`: one row for N rows of the decoder."""
        return self._keys.rows(1)

    @keys.setter
    def keys(self, states: torch.Tensor | None) -> None:
        SharedPrefixLayer.keys.fset(self, states)

    @property
    def values(self) -> torch.Tensor | None:
        """Values of the encoder, `(B, H, L, D)`: one row for N rows of the decoder."""
        return self._values.rows(1)

    @values.setter
    def values(self, states: torch.Tensor | None) -> None:
        SharedPrefixLayer.values.fset(self, states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Materializes and appends: keys that grow are no case for this layer."""
        return super().update(key_states, value_states)


def _mark_static(buffer: torch.Tensor) -> torch.Tensor:
    """Tells compiled code that the buffer stays where it is."""
    if not is_torchdynamo_compiling():
        torch._dynamo.mark_static_address(buffer)
    return buffer


class _StaticSharedStates(_SharedStates):
    """
    Keys or values whose suffix is a static buffer, which counts as a whole, filled or not.

    Args:
        prefix (`torch.Tensor` of shape `(B, H, L, D)`, *optional*): The prefix, which is kept as it is.
        repeats (`int`, *optional*, defaults to 1): Number N of rows per batch item.
        room (`int`, *optional*, defaults to 0): Number of tokens for which the suffix has room.
    """

    def __init__(self, prefix: torch.Tensor | None = None, repeats: int = 1, room: int = 0):
        super().__init__(prefix if prefix is None else _mark_static(prefix))
        if prefix is not None:
            items, heads, _, size = prefix.shape
            self.buffer, self.stop = _mark_static(prefix.new_zeros(items * repeats, heads, room, size)), room

    def replace(self, states: torch.Tensor | None) -> None:
        super().replace(states if states is None else _mark_static(states))

    def write(self, states: torch.Tensor, positions: torch.LongTensor) -> None:
        """Writes `(B * N, H, Q, D)` to the positions `(Q,)` of the suffix."""
        self.buffer.index_copy_(2, positions, states)

    def take_suffix_rows(self, indices: torch.LongTensor) -> None:
        """Takes the rows `indices` of the suffix, where it lies if their number stays the same."""
        if self.buffer is not None:
            self.buffer = take_rows(self.buffer, indices)


class StaticSharedPrefixLayer(SharedPrefixLayer):
    """
    A static layer of M tokens whose first L tokens, those that the prefill has written, N rows share. The suffix
    `(B * N, H, M - L, D)` is a buffer of its own. Masks have M columns, as those of the ordinary static layer.

    Attributes:
        max_cache_len (`int`): Number M of tokens for which a row has room, the prefix included.
        cumulative_length (`torch.LongTensor` of shape `()`): Number of tokens of a row so far, at least L.
    """

    is_compileable = True
    get_mask_sizes = StaticLayer.get_mask_sizes
    get_seq_length = StaticLayer.get_seq_length
    get_max_length = StaticLayer.get_max_length

    def __init__(self, max_cache_len: int, **kwargs):
        super().__init__(**kwargs)
        self._keys, self._values = _StaticSharedStates(), _StaticSharedStates()
        self.max_cache_len, self.cumulative_length = max_cache_len, torch.tensor(0, dtype=int)

    @classmethod
    def from_layer(cls, layer: StaticLayer, repeats: int, suffix_length: int = 0) -> "StaticSharedPrefixLayer":
        """
        As [`SharedPrefixLayer.from_layer`]. The suffix has the room that the static layer has left, whatever
        `suffix_length` is.
        """
        shared = super().from_layer(layer, repeats)
        length = int(layer.cumulative_length)
        shared._keys, shared._values = (
            _StaticSharedStates(states.prefix[:, :, :length], repeats, layer.max_cache_len - length)
            for states in shared._states
        )
        # `update` advances it in place, and the layer is left as it is
        shared.cumulative_length = _mark_static(layer.cumulative_length.clone())
        return shared

    @classmethod
    def _like(cls, layer: StaticLayer) -> "StaticSharedPrefixLayer":
        return cls(layer.max_cache_len)

    @property
    def batch_size(self) -> int | None:
        """Number of rows that the layer stands for."""
        return self.cached_rows()

    def materialize(self) -> StaticLayer:
        return _make_static_layer(self, self.max_cache_len, self.cumulative_length)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As [`SharedPrefixLayer.update`]. The suffix comes with all of its room: the mask hides what is not filled."""
        self._check_update(key_states, value_states)
        module_kwargs = kwargs.get("kwargs")
        if module_kwargs is None:
            self._materialize_rows()
        added = key_states.shape[-2]
        positions = torch.arange(added, device=self.device) + (self.cumulative_length - self._keys.prefix_length)
        self.cumulative_length.add_(added)
        self._keys.write(key_states, positions)
        self._values.write(value_states, positions)
        return self._hand_over(module_kwargs, None)

    def crop(self, tokens_to_remove: int) -> None:
        """
        Removes the newest tokens. Nothing is copied, unless some of them belong to the prefix.

        Args:
            tokens_to_remove (`int`): Minus the number of tokens to remove.

        Raises:
            `RuntimeError`: If `tokens_to_remove` is positive.
        """
        if self.cumulative_length + tokens_to_remove < self._keys.prefix_length:
            self._materialize_rows()
        StaticLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        """Empties the layer. It is an ordinary one from now on, with as many rows."""
        rows = self.cached_rows()
        for states in self._states:
            _, heads, _, size = states.buffer.shape
            states.replace(states.buffer.new_zeros(rows, heads, self.max_cache_len, size))
        self.repeats, self._handed_over = 1, None
        self.cumulative_length.zero_()


class StaticSharedCrossAttentionLayer(SharedCrossAttentionLayer):
    """A static layer of cross-attention, whose encoder keys and values N rows of the decoder share."""

    is_compileable = True

    def materialize(self) -> StaticLayer:
        return _make_static_layer(self, self._keys.length, torch.tensor(self._keys.length))


def _make_static_layer(shared: SharedPrefixLayer, max_cache_len: int, length: torch.LongTensor) -> StaticLayer:
    """Makes a static layer with the rows of a shared one."""
    shared._check_read()
    plain = StaticLayer(max_cache_len)
    if shared._keys.tensors:
        keys, values = (states.rows(shared.repeats) for states in shared._states)
        plain.lazy_initialization(keys, values)
        plain.keys.copy_(keys)
        plain.values.copy_(values)
        plain.cumulative_length.copy_(length)
    return plain


SELF_ATTENTION_LAYERS = {
    DynamicLayer: SharedPrefixLayer,
    DynamicSlidingWindowLayer: SharedPrefixSlidingWindowLayer,
    StaticLayer: StaticSharedPrefixLayer,
}
CROSS_ATTENTION_LAYERS = {DynamicLayer: SharedCrossAttentionLayer, StaticLayer: StaticSharedCrossAttentionLayer}


def cannot_share_cache(cache: Cache) -> str | None:
    """
    Tells what stands in the way of sharing the layers of a cache, filled or not yet.

    Args:
        cache ([`Cache`]): The cache of the prefill.

    Returns:
        `str` or `None`: The reason, `None` if [`share_cache`] will share some layers of it.
    """
    if not isinstance(cache, Cache):
        return f"a {type(cache).__name__} is no `Cache`"
    if isinstance(cache, EncoderDecoderCache):
        reasons = [cannot_share_cache(part) for part in (cache.self_attention_cache, cache.cross_attention_cache)]
        return reasons[0] if None not in reasons else None
    if type(cache).batch_repeat_interleave is not Cache.batch_repeat_interleave:
        return f"a {type(cache).__name__} has states beside those of its layers"
    kinds = {type(layer) for layer in cache.layers} or {cache.layer_class_to_replicate}
    if kinds.isdisjoint(SELF_ATTENTION_LAYERS) and not any(issubclass(kind, SharedPrefixLayer) for kind in kinds):
        return f"none of the layers of the {type(cache).__name__} can be shared"
    return None


def share_cache(
    cache: Cache, repeats: int, suffix_length: int = 0, self_attention: bool = True, cross_attention: bool = True
) -> int:
    """
    Makes a cache of B rows stand for B * N rows, in place: what can be shared is shared, the other layers (and empty ones)
    repeat their rows. Layers of exactly the classes `DynamicLayer`, `DynamicSlidingWindowLayer` and `StaticLayer` can be
    shared; a layer that is shared already stays so. A cache with states beside its layers repeats its rows as a whole.

    Args:
        cache ([`Cache`]): The cache after the prefill. It stays the same object with other layers.
        repeats (`int`): Number N of rows per batch item.
        suffix_length (`int`, *optional*, defaults to 0): Number of tokens to come, if known: room for them is made once.
        self_attention (`bool`, *optional*, defaults to `True`): Whether to share the layers of a cache that is no
            `EncoderDecoderCache`, or those of its `self_attention_cache`. If not, they repeat their rows.
        cross_attention (`bool`, *optional*, defaults to `True`): The same for its `cross_attention_cache`.

    Returns:
        `int`: Number of shared layers.

    Raises:
        `ValueError`: If `repeats` is not an integer of at least 1.
    """
    check_repeats(repeats)
    if not isinstance(cache, EncoderDecoderCache):
        return _share_layers(cache, repeats, suffix_length, SELF_ATTENTION_LAYERS if self_attention else {})
    return share_cache(cache.self_attention_cache, repeats, suffix_length, self_attention) + _share_layers(
        cache.cross_attention_cache, repeats, 0, CROSS_ATTENTION_LAYERS if cross_attention else {}
    )


def _share_layers(
    cache: Cache, repeats: int, suffix_length: int, shared_classes: dict[type, type[SharedPrefixLayer]]
) -> int:
    if cannot_share_cache(cache) is not None:
        cache.batch_repeat_interleave(repeats)
        return 0
    for index, layer in enumerate(cache.layers):
        shared_class = shared_classes.get(type(layer))
        # A window of one token has the ordinary layer keep all tokens: it isn't worth a case here
        if shared_class is None or layer.get_seq_length() == 0 or getattr(layer, "sliding_window", None) == 1:
            layer.batch_repeat_interleave(repeats)
        else:
            cache.layers[index] = shared_class.from_layer(layer, repeats, suffix_length)
    return sum(isinstance(layer, SharedPrefixLayer) for layer in cache.layers)


def materialize_cache(cache: Cache) -> None:
    """
    Replaces the shared layers of a cache by ordinary layers of the B * N rows, in place. The cache stays the same object.

    Args:
        cache ([`Cache`]): A cache, shared or not.
    """
    if isinstance(cache, EncoderDecoderCache):
        materialize_cache(cache.self_attention_cache)
        materialize_cache(cache.cross_attention_cache)
        return
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, SharedPrefixLayer):
            cache.layers[index] = layer.materialize()
