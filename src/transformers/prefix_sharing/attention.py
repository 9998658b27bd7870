# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Exact attention of R rows to keys and values that are stored in segments, most of them for fewer rows.

A segment is a tensor of `R_i` rows, each of which stands for `n = R / R_i` consecutive rows: a prompt's keys for its N
beams, an encoder's keys, a common prefix for the whole batch. Rows are never repeated. The n rows of an item and the G
query heads of a key/value head are folded into the query axis instead, each segment is read once by a fused kernel,
and what the rows get from it, a state of an output and a log-sum-exp, is merged with the states of the other segments.
The method is bifurcated attention (https://huggingface.co/papers/2403.08845), also known from Hydragen
(https://huggingface.co/papers/2402.05099).

Shapes: R rows, R_i rows of a segment, n = R / R_i, H query heads, K key/value heads, G = H / K, Q query length, L_i
length of a segment, D and Dv head sizes of keys and values.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from typing import NamedTuple

import torch

from ..utils.generic import maybe_autocast


State = tuple[torch.Tensor, torch.Tensor]

# Added to the score of what a row must not see, in place of minus infinity: a segment of which nothing is visible then
# has a state, which weighs nothing beside one with something visible. It absorbs any score, and kernels may multiply
# it by log2(e).
HIDDEN = -(2.0**96)
# A chunk of a segment that is read by itself has at least as many tokens
MINIMAL_CHUNK = 256
# As many tokens of 16-bit keys and values are cast to float32 at once, where no fused kernel serves
CAST_CHUNK = 1024


def attend(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    memo: "StepMemo | None" = None,
) -> torch.Tensor:
    """
    What `torch.nn.functional.scaled_dot_product_attention` returns for the segments' rows repeated and joined, with
    grouped heads. Segments and partial outputs stay in the type of `query`, and are merged in float32 (or float64).

    Args:
        query (`torch.Tensor` of shape `(R, H, Q, D)`): The queries.
        keys (`Sequence[torch.Tensor]`, each of shape `(R_i, K, L_i, D)`): Segments, oldest first. Row j of a segment
            stands for the rows `j * n` to `j * n + n - 1`. A segment in another type than `query` is cast to it.
        values (`Sequence[torch.Tensor]`, each of shape `(R_i, K, L_i, Dv)`): The same segments of the values.
        attn_mask (`torch.Tensor`, broadcastable to `(R, H, Q, sum of L_i)`, *optional*): Boolean (true where a query
            may look) or additive, for each row by itself.
        scale (`float`, *optional*): Factor of the scores, `D ** -0.5` by default.
        is_causal (`bool`, *optional*, defaults to `False`): Whether query i sees the keys 0 to i.
        memo ([`StepMemo`], *optional*): Keeps what is made of a mask for the next layers.

    Returns:
        `torch.Tensor`: The output `(R, H, Q, Dv)`, in the type of `query`.

    Raises:
        `ValueError`: If `keys` and `values` differ in number, if the rows or heads of a segment don't divide those of
            `query`, if `attn_mask` can't be broadcast or is of integers, or if it is given beside `is_causal`.
    """
    _check(query, keys, values)
    segments = [segment for segment in zip(keys, values) if segment[0].shape[2] > 0]
    rows, heads, queries, size = query.shape
    if not segments:  # As torch does: a sum of no values
        return query.new_zeros(rows, heads, queries, values[0].shape[3])
    if is_causal:
        if attn_mask is not None:
            raise ValueError("`attn_mask` must be None where `is_causal` is True.")
        attn_mask = query.new_ones(queries, sum(key.shape[2] for key in keys), dtype=torch.bool).tril()
        memo = None
    scale = size**-0.5 if scale is None else scale
    with maybe_autocast(query.device.type, enabled=False):
        mask = _Mask([None] * len(segments))
        if attn_mask is not None:
            mask = _fold_mask(attn_mask, query, [key for key, _ in segments], memo)
        if mask.query_factor is not None:
            query = query * mask.query_factor
        output = _attend_segments(query, segments, mask.biases, scale)
        return output if mask.output_factor is None else output * mask.output_factor


def scores(query: torch.Tensor, keys: Sequence[torch.Tensor]) -> torch.Tensor:
    """
    The product of queries and transposed keys, for eager attention.

    Args:
        query (`torch.Tensor` of shape `(R, H, Q, D)`): The queries.
        keys (`Sequence[torch.Tensor]`, each of shape `(R_i, K, L_i, D)`): Segments, oldest first, see [`attend`].

    Returns:
        `torch.Tensor`: Scores `(R, H, Q, sum of L_i)`, without a scale.

    Raises:
        `ValueError`: If the rows or heads of a segment don't divide those of `query`.
    """
    _check(query, keys, keys)
    parts = []
    for key in keys:
        product = torch.matmul(_fold(query, *key.shape[:2]), key.transpose(2, 3))
        parts.append(_unfold(product, query.shape[0]).reshape(*query.shape[:3], -1))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def weigh(weights: torch.Tensor, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """
    The product of attention weights and values, for eager attention.

    Args:
        weights (`torch.Tensor` of shape `(R, H, Q, sum of L_i)`): The weights.
        values (`Sequence[torch.Tensor]`, each of shape `(R_i, K, L_i, Dv)`): Segments, oldest first, see [`attend`].

    Returns:
        `torch.Tensor`: The weighted sums `(R, H, Q, Dv)`.

    Raises:
        `ValueError`: If the rows or heads of a segment don't divide those of `weights`.
    """
    _check(weights, values, values)
    parts = []
    for share, value in zip(weights.split([value.shape[2] for value in values], dim=-1), values):
        product = torch.matmul(_fold(share, *value.shape[:2]), value)
        parts.append(_unfold(product, weights.shape[0]).reshape(*weights.shape[:3], -1))
    return reduce(torch.add, parts)


def merge_states(first: State, second: State, need_lse: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    Merges what the same queries get from two sets of keys
    (https://docs.flashinfer.ai/tutorials/recursive_attention.html). Merging is associative and commutative.

    Args:
        first (`tuple[torch.Tensor, torch.Tensor]`): The output `(..., Dv)` and the natural logarithm `(...)` of the
            sum of the exponentials of the scores, which must be finite.
        second (`tuple[torch.Tensor, torch.Tensor]`): The state of the other keys.
        need_lse (`bool`, *optional*, defaults to `True`): Whether the state will be merged with another one.

    Returns:
        `tuple[torch.Tensor, torch.Tensor | None]`: The state of both, its output in the type of the log-sum-exps.

    Example:

    ```python
    >>> import torch
    >>> from transformers.prefix_sharing.attention import merge_states

    >>> scores, values = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[1.0], [2.0], [4.0]])
    >>> states = [
    ...     (scores[:, part].softmax(-1) @ values[part], scores[:, part].logsumexp(-1))
    ...     for part in (slice(0, 2), slice(2, 3))
    ... ]
    >>> output, _ = merge_states(*states)
    >>> torch.allclose(output, scores.softmax(-1) @ values)
    True
    ```
    """
    (output, lse), (other, other_lse) = first, second
    share = torch.sigmoid(other_lse - lse).unsqueeze(-1)
    if output.dtype != share.dtype:
        output = output.to(share.dtype)
    if other.dtype != share.dtype:
        other = other.to(share.dtype)
    return torch.lerp(output, other, share), torch.logaddexp(lse, other_lse) if need_lse else None


class StepMemo:
    """
    What was made of the last masks, so that the layers of a step make it once. The caller keeps one for each cache. A
    mask is known by its memory, view and version, and held, so that nothing else can take its place; one whose changes
    torch doesn't count (made in inference mode) or that needs a gradient is not remembered.
    """

    def __init__(self):
        # Self- and cross-attention, full and sliding
        self._entries: deque[tuple] = deque(maxlen=4)

    def get(self, mask: torch.Tensor, purpose: tuple, make: "Callable[[], _Mask]") -> "_Mask":
        """What `make()` returns for `mask` and `purpose`, or returned when it was last called for them."""
        if mask.is_inference() or mask.requires_grad:
            return make()
        key = (mask._version, mask.dtype, purpose)
        for known, known_key, parts in self._entries:
            if known_key == key and (known is mask or known.is_set_to(mask)):
                return parts
        parts = make()
        self._entries.append((mask, key, parts))
        return parts


class _Layout(NamedTuple):
    """The shapes of a call. `segments` has `(R_i, L_i)` for each segment."""

    rows: int
    heads: int
    queries: int
    kv_heads: int
    segments: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        return sum(length for _, length in self.segments)


class _Mask(NamedTuple):
    """
    A mask by segments: `biases` broadcast to `(R_i, K, n * G * Q, L_i)`. The factors `(R or 1, H or 1, Q or 1, 1)` are
    zero for queries that see nothing: see `_make_mask`.
    """

    biases: list[torch.Tensor | None]
    query_factor: torch.Tensor | None = None
    output_factor: torch.Tensor | None = None


def _check(query: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    if len(keys) != len(values) or not keys:
        raise ValueError(
            f"`keys` and `values` must have the same segments, at least one, but have {len(keys)} and {len(values)}."
        )
    (rows, heads), kv_heads = query.shape[:2], keys[0].shape[1]
    for key, value in zip(keys, values):
        fits = rows % key.shape[0] == heads % kv_heads == 0 and key.shape[1] == kv_heads
        if not fits or key.shape[:3] != value.shape[:3]:
            raise ValueError(
                "A segment of `keys` and `values` must have rows that divide those of the queries, and heads, as many "
                f"in each segment, that divide their heads, {(rows, heads)}, but they have the shapes "
                f"{tuple(key.shape)} and {tuple(value.shape)}."
            )


def _attend_segments(query: torch.Tensor, segments: list[State], biases: list, scale: float) -> torch.Tensor:
    """
    The merge of the states of all segments, `(R, H, Q, Dv)`. The newest segment comes first: it mostly has all rows,
    and the others are merged into its state through views.
    """
    rows, merged = query.shape[0], None
    for i in reversed(range(len(segments))):
        (key, value), bias = segments[i], biases[i]
        if key.dtype != query.dtype:
            key, value = key.to(query.dtype), value.to(query.dtype)
        items, kv_heads = key.shape[:2]
        state = _choose_kernel(query, key, value, bias)(_fold(query, items, kv_heads), key, value, bias, scale)
        output, lse = state if items == rows else (_unfold(part, rows) for part in state)
        if merged is not None:
            if items < rows:
                merged = [part.reshape(items, rows // items, *part.shape[1:]) for part in merged]
            output, lse = merge_states(merged, (output, lse), need_lse=i > 0)
        if items < rows and i > 0:
            output, lse = output.flatten(0, 1), lse.flatten(0, 1)
        merged = output, lse
    return merged[0].to(query.dtype).reshape(*query.shape[:3], -1)


def _fold(query: torch.Tensor, items: int, kv_heads: int) -> torch.Tensor:
    """`(R, H, Q, D)` to `(R_i, K, n * G * Q, D)`: a view where n or G * Q is 1, else a copy of the queries."""
    rows, heads, queries, size = query.shape
    if items == rows:
        return query.reshape(rows, kv_heads, heads // kv_heads * queries, size)
    query = query.reshape(items, rows // items, kv_heads, heads // kv_heads * queries, size)
    return query.transpose(1, 2).reshape(items, kv_heads, -1, size)


def _unfold(state: torch.Tensor, rows: int) -> torch.Tensor:
    """`(R_i, K, n * G * Q, ...)` to `(R_i, n, K, G * Q, ...)`, a view."""
    items, kv_heads, folded, *rest = state.shape
    repeats = rows // items
    return state.view(items, kv_heads, repeats, folded // repeats, *rest).transpose(1, 2)


def _fold_mask(mask: torch.Tensor, query: torch.Tensor, keys: list[torch.Tensor], memo: StepMemo | None) -> _Mask:
    layout = _Layout(*query.shape[:3], keys[0].shape[1], tuple((key.shape[0], key.shape[2]) for key in keys))
    if memo is None or torch.compiler.is_compiling():
        return _make_mask(mask, layout, query)
    return memo.get(mask, (layout, query.dtype, query.device), lambda: _make_mask(mask, layout, query))


def _make_mask(mask: torch.Tensor, layout: _Layout, query: torch.Tensor) -> _Mask:
    """
    Splits a mask by segments. A query's greatest bias is subtracted from all of them, which changes no weight. A query
    that sees nothing gets what torch's attention gives it: zero where all biases are minus infinity, else, where the
    greatest absorbs any score, the mean of the values that have it. `query_factor` makes its scores equal,
    `output_factor` zero.
    """
    full = (layout.rows, layout.heads, layout.queries, layout.length)
    if mask.dim() > 4 or any(size not in (1, other) for size, other in zip(mask.shape[::-1], full[::-1])):
        raise ValueError(f"`attn_mask` must broadcast to {full}, but has the shape {tuple(mask.shape)}.")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"`attn_mask` must be boolean or of floating point, but is {mask.dtype}.")
    mask = mask.view((1,) * (4 - mask.dim()) + tuple(mask.shape))
    dtype = torch.promote_types(query.dtype, torch.float32)
    if mask.dtype == torch.bool:
        bias = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -torch.inf)
    else:
        bias = mask.to(dtype)
    greatest = bias.amax(-1, keepdim=True)
    lowest = max(HIDDEN, torch.finfo(_bias_dtype(query)).min)
    bias = (bias - greatest.masked_fill(greatest == -torch.inf, 0.0)).clamp_min(lowest)
    bias = bias.expand(-1, -1, -1, layout.length)
    parts = bias.split([length for _, length in layout.segments], dim=-1)
    biases = [_fold_bias(part, items, layout, query) for part, (items, _) in zip(parts, layout.segments)]
    sees = greatest > HIDDEN
    if _can_look(mask) and sees.all():
        return _Mask(biases)
    return _Mask(biases, sees.to(query.dtype), (greatest > -torch.inf).to(query.dtype))


def _fold_bias(bias: torch.Tensor, items: int, layout: _Layout, query: torch.Tensor) -> torch.Tensor | None:
    """`(R or 1, H or 1, Q or 1, L_i)` to what broadcasts to `(R_i, K, n * G * Q, L_i)`. None where it adds nothing."""
    repeats, groups = layout.rows // items, layout.heads // layout.kv_heads
    bias = bias.unflatten(0, (items, repeats) if bias.shape[0] > 1 else (1, 1))
    bias = bias.unflatten(2, (layout.kv_heads, groups) if bias.shape[2] > 1 else (1, 1)).transpose(1, 2)
    if _can_look(bias):
        if not bias.any():
            return None
        if torch.equal(bias[:, :, :1].expand_as(bias), bias):
            bias = bias[:, :, :1]
    if bias.shape[2:5] != (1, 1, 1):
        bias = bias.expand(-1, -1, repeats, groups, layout.queries, -1)
    bias = bias.flatten(2, 4).to(_bias_dtype(query))
    if query.device.type != "cuda":
        return bias.contiguous()
    # What the memory-efficient kernel asks for: rows that begin at multiples of 16 elements, and no broadcasting
    length = bias.shape[-1]
    padded = torch.nn.functional.pad(bias, (0, -length % 16)).narrow(-1, 0, length)
    return padded.expand(items, layout.kv_heads, repeats * groups * layout.queries, -1)


def _can_look(mask: torch.Tensor) -> bool:
    """Whether values of a mask may be looked at. On an accelerator that waits for it, and compiled code can't."""
    return mask.device.type == "cpu" and not mask.requires_grad and not torch.compiler.is_compiling()


def _bias_dtype(query: torch.Tensor) -> torch.dtype:
    return query.dtype if query.device.type == "cuda" else torch.promote_types(query.dtype, torch.float32)


def _choose_kernel(query, key, value, bias) -> Callable[..., State]:
    """
    The fused attention that returns its log-sum-exp on the device, else two products. cuDNN's is left out: it makes a
    plan for each new length, and a suffix has a new length in each step.

    A kernel is called with folded queries `(R_i, K, M, D)`, M = n * G * Q, keys `(R_i, K, L_i, D)`, values
    `(R_i, K, L_i, Dv)`, a bias that broadcasts to `(R_i, K, M, L_i)` or None, and the scale. It returns an output
    `(R_i, K, M, Dv)` and a log-sum-exp `(R_i, K, M)`.
    """
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (query, key, value, bias)):
        return _attend_by_products
    if key.stride(3) != 1 or value.stride(3) != 1 or query.stride(3) != 1:
        return _attend_by_products
    flash, efficient, size = True, True, key.shape[3]
    if not torch.compiler.is_compiling():
        flash, efficient = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()
    if query.device.type == "cpu" and flash and size == value.shape[3]:
        return _attend_on_cpu
    if query.device.type == "cuda":
        is_16_bit, aligned = query.element_size() == 2, 16 // query.element_size()
        fits = bias is None and is_16_bit and size == value.shape[3] <= 256 and size % 8 == 0
        if flash and fits and _has_flash_attention(query.device):
            return _attend_by_flash_attention
        if efficient and query.element_size() <= 4 and size % aligned == value.shape[3] % aligned == 0:
            return _attend_by_efficient_attention
    return _attend_by_products


@lru_cache
def _has_flash_attention(device: torch.device) -> bool:
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def _attend_by_flash_attention(query, key, value, bias, scale: float) -> State:
    output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, False, scale=scale)
    return output, lse.narrow(2, 0, query.shape[2])


def _attend_by_efficient_attention(query, key, value, bias, scale: float) -> State:
    """Its log-sum-exps are padded."""
    output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, 0.0, False, scale=scale
    )
    return output, lse.narrow(2, 0, query.shape[2])


def _attend_on_cpu(query, key, value, bias, scale: float) -> State:
    """
    In chunks where few heads leave threads without work: the kernel's threads get a head of an item each, or 32 of its
    queries. Chunks of equal length are views in a further dimension, what they leave over is one more state.
    """
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    count = _count_chunks(key)
    if count == 1:
        return attention(query, key, value, attn_mask=bias, scale=scale)
    items, heads, length, _ = key.shape
    chunk = length // count
    key_chunks, value_chunks = (
        x.narrow(2, 0, chunk * count).flatten(0, 1).unflatten(1, (count, chunk)) for x in (key, value)
    )
    bias_chunks = bias
    if bias is not None:
        bias_chunks = bias.narrow(3, 0, chunk * count).expand(items, heads, -1, -1).flatten(0, 1)
        bias_chunks = bias_chunks.unflatten(2, (count, chunk)).transpose(1, 2)
    queries = query.flatten(0, 1).unsqueeze(1).expand(-1, count, -1, -1)
    outputs, lse = attention(queries, key_chunks, value_chunks, attn_mask=bias_chunks, scale=scale)
    output = (outputs * lse.softmax(1).unsqueeze(3)).sum(1).view(items, heads, *outputs.shape[2:])
    state = output, lse.logsumexp(1).view(items, heads, -1)
    if chunk * count == length:
        return state
    rest = (x.narrow(2, chunk * count, length - chunk * count) for x in (key, value))
    rest_bias = None if bias is None else bias.narrow(3, chunk * count, length - chunk * count)
    return merge_states(state, attention(query, *rest, attn_mask=rest_bias, scale=scale))


def _count_chunks(key: torch.Tensor) -> int:
    """On two threads, two chunks for three heads took 0.66 times as long as one (18 queries, L = 2048)."""
    items, heads, length, _ = key.shape
    if (
        torch.compiler.is_compiling() or length < 2 * MINIMAL_CHUNK
    ):  # compiled code can't ask for the number of threads
        return 1
    threads, are_views = torch.get_num_threads(), items == 1 or key.stride(0) == heads * key.stride(1)
    if threads == 1 or not are_views:
        return 1
    return max(1, min(-(-2 * threads // (items * heads)), length // MINIMAL_CHUNK))


def _attend_by_products(query, key, value, bias, scale: float) -> State:
    """The plain form: differentiable, for any type and device."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    if key.dtype != dtype and key.shape[2] > CAST_CHUNK and not torch.compiler.is_compiling():
        biases = [None] * len(key.split(CAST_CHUNK, 2)) if bias is None else bias.split(CAST_CHUNK, 3)
        chunks = zip(key.split(CAST_CHUNK, 2), value.split(CAST_CHUNK, 2), biases)
        return reduce(merge_states, (_attend_by_products(query, *chunk, scale) for chunk in chunks))
    weights = torch.matmul(query.to(dtype) * scale, key.to(dtype).transpose(2, 3))
    if bias is not None:
        weights = weights + bias
    return torch.matmul(weights.softmax(-1), value.to(dtype)), weights.logsumexp(-1)
