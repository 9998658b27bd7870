# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Exact attention of B * N rows to keys and values of which the prefix is stored once per batch item.

The N rows of an item, and the G query heads of each of its key/value heads, are folded into the query axis: the prefix is
read where it lies and never repeated. What a row gets from the prefix and from its own suffix are two attention states, an
output and the natural logarithm of the sum of the exponentials of its scores; they are merged in float32 (or float64).
The method is bifurcated attention (https://huggingface.co/papers/2403.08845), also known from Hydragen
(https://huggingface.co/papers/2402.05099). [`reference_attention`] computes the same by the dullest means.

A cache layer hands its prefix over as the paged cache hands over its block tables: `update` writes a
[`SharedPrefix`] into the `kwargs` of the attention module, which passes them on to its attention function. In
cross-attention nothing is handed over, since there is no suffix: the keys just have fewer rows than the queries.

Shapes: B batch items, N rows per item, H query heads, K key/value heads, G = H / K, Q query length, L prefix length,
S suffix length, D and Dv head sizes of keys and values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..utils import is_torchdynamo_compiling
from ..utils.generic import maybe_autocast


# A chunk of the prefix that is read by itself has at least as many tokens
MINIMAL_CHUNK = 256


class SharedPrefix:
    """
    The keys and values that all rows of a batch item have in common, on their way from a cache layer to the attention
    function.

    Args:
        keys (`torch.Tensor` of shape `(B, K, L, D)`): Keys of the prefix.
        values (`torch.Tensor` of shape `(B, K, L, Dv)`): Values of the prefix.
        repeats (`int`): Number N of rows per batch item: rows `i * N` to `i * N + N - 1` belong to item `i`.

    Attributes:
        is_read (`bool`): Whether an attention function has taken notice. A layer whose prefix was not read reports it.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, repeats: int):
        self.keys, self.values, self.repeats = keys, values, repeats
        self.is_read = False


def takes_shared_prefix(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    kwargs: dict[str, Any],
    dropout: float = 0.0,
    is_causal: bool | None = None,
) -> bool:
    """
    Whether the arguments of an attention function are a case for [`shared_prefix_attention_forward`]: a prefix was
    handed over, or there are fewer rows of keys than of queries, and all of them visible or masked explicitly.
    """
    if "shared_prefix" in kwargs:
        return True
    if not 0 < key.shape[0] < query.shape[0] or query.shape[0] % key.shape[0] != 0 or dropout > 0.0:
        return False
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return query.shape[2] == 1 or attention_mask is not None or not is_causal


def shared_prefix_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    shared_prefix: SharedPrefix | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    return_weights: bool = False,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    Attention to a prefix that N rows share and to a suffix of each row, or (cross-attention) to keys that N rows share and
    nothing else. It has the signature of the other attention functions. 16-bit inputs are computed in float32 and
    rounded once, at the end.

    Args:
        module (`nn.Module`): The attention module. Only its `is_causal` is read.
        query (`torch.Tensor` of shape `(B * N, H, Q, D)`): The queries.
        key (`torch.Tensor` of shape `(B * N, K, S, D)`): Keys of the suffix. In cross-attention, `(B, K, L, D)`.
        value (`torch.Tensor` of shape `(B * N, K, S, Dv)`): Values of the suffix. In cross-attention, `(B, K, L, Dv)`.
        attention_mask (`torch.Tensor` of shape `(B * N or B or 1, 1 or H, Q or 1, L + S)`, *optional*): Boolean (true
            where a query may look) or additive. The N rows of an item must look at the prefix alike: its part of the mask
            is taken from the first of them. Without a mask, every query sees the prefix; the last query sees the whole
            suffix and each one before it one key less if `is_causal`, the whole suffix otherwise.
        shared_prefix ([`SharedPrefix`], *optional*): Keys and values of the prefix. None means cross-attention.
        dropout (`float`, *optional*, defaults to 0.0): Only 0 is supported.
        scaling (`float`, *optional*): Factor of the scores, `D ** -0.5` by default.
        is_causal (`bool`, *optional*): See `attention_mask`. The default is the module's attribute.
        position_bias (`torch.Tensor` of shape `(B * N or 1, H, Q or 1, L + S)`, *optional*): Added to the scores. The
            rows of an item may differ in it.
        softcap (`float`, *optional*): Bound of the scores, which is approached as by `tanh`.
        s_aux (`torch.Tensor` of shape `(H,)`, *optional*): Attention sinks: one more score per head, without a value.
        return_weights (`bool`, *optional*, defaults to `False`): Whether to return the attention weights, too.

    Returns:
        `tuple`: The output `(B * N, Q, H, Dv)`, in the type of `query`, and the weights `(B * N, H, Q, L + S)` or `None`.

    Raises:
        `ValueError`: If `dropout` is not 0, or if the number of rows of `query` or of columns of `attention_mask` does
            not fit the prefix and the suffix.
    """
    if shared_prefix is None:
        shared_prefix = SharedPrefix(key, value, query.shape[0] // key.shape[0])
        key, value = key[:0, :, :0], value[:0, :, :0]
    shared_prefix.is_read = True
    _check_arguments(query, key, attention_mask, shared_prefix, dropout)

    rows, heads, query_length, head_dim = query.shape
    items, kv_heads, prefix_length, _ = shared_prefix.keys.shape
    dtype = query.dtype if query.dtype in (torch.float32, torch.float64) else torch.float32
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and is_causal and query_length > 1:
        attention_mask = _causal_mask(query_length, prefix_length, key.shape[2], query.device)
    scores = _Scores(
        query=query.to(dtype).reshape(rows, kv_heads, -1, head_dim),
        # No-ops in float32. In 16 bits, copies of B rows until the end of this call: kernels for these types round their
        # output, and merging rounds again, which makes an error larger than that of ordinary attention
        prefix=SharedPrefix(shared_prefix.keys.to(dtype), shared_prefix.values.to(dtype), shared_prefix.repeats),
        suffix_keys=key.to(dtype),
        suffix_values=value.to(dtype),
        biases=_split_biases(attention_mask, position_bias, prefix_length, items, heads // kv_heads, dtype),
        groups=heads // kv_heads,
        scaling=head_dim**-0.5 if scaling is None else scaling,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.to(dtype),
    )
    with maybe_autocast(query.device.type, enabled=False):
        if not return_weights and _can_fuse(scores):
            output, weights = _merge_states(scores), None
        else:
            output, weights = _attend_at_once(scores)
    output = output.reshape(rows, heads, query_length, -1).transpose(1, 2).to(query.dtype).contiguous()
    return output, weights.reshape(rows, heads, query_length, -1).to(query.dtype) if return_weights else None


def _check_arguments(query, key, attention_mask, shared_prefix: SharedPrefix, dropout: float) -> None:
    if dropout > 0.0:
        raise ValueError(f"`dropout` must be 0 for attention to a shared prefix, but is {dropout}.")
    items, repeats = shared_prefix.keys.shape[0], shared_prefix.repeats
    if query.shape[0] != items * repeats:
        raise ValueError(
            f"`query` must have {items} * {repeats} rows, as many as share the prefix, but has {query.shape[0]}."
        )
    length = shared_prefix.keys.shape[2] + key.shape[2]
    if attention_mask is not None and attention_mask.shape[-1] != length:
        raise ValueError(
            f"`attention_mask` must have {length} columns, prefix and suffix together, but has "
            f"{attention_mask.shape[-1]}."
        )


def _causal_mask(query_length: int, prefix_length: int, suffix_length: int, device: torch.device) -> torch.Tensor:
    """Mask `(1, 1, Q, L + S)` in which the last query belongs to the last key."""
    length = prefix_length + suffix_length
    visible = torch.ones(query_length, length, dtype=torch.bool, device=device).tril(length - query_length)
    return visible[None, None]


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """
    A mask that is added to the scores. What must not be seen gets the lowest finite number instead of minus infinity, so
    that a prefix of which nothing is visible has a state: its weight beside a visible suffix is zero.
    """
    lowest = torch.finfo(dtype).min
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, lowest)
    return mask.to(dtype).clamp_min(lowest)


def _split_biases(
    mask: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    prefix_length: int,
    items: int,
    groups: int,
    dtype: torch.dtype,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """
    Splits what is added to the scores in its parts for prefix and suffix.

    Returns:
        `tuple`: Tensors that broadcast to `(B, K, N, G, Q, L)`, and tensors that broadcast to `(B * N, K, G, Q, S)`.
    """

    def split_heads(bias: torch.Tensor) -> torch.Tensor:
        heads_per_group = groups if bias.shape[1] > 1 else 1
        return bias.unflatten(1, (-1, heads_per_group))

    def rows_of_items(bias: torch.Tensor) -> torch.Tensor:
        return bias.unflatten(0, (-1, max(bias.shape[0] // items, 1))).transpose(1, 2)

    prefix, suffix = [], []
    if mask is not None:
        mask = split_heads(mask)
        prefix.append(_additive(rows_of_items(mask[..., :prefix_length])[:, :, :1], dtype))
        suffix.append(_additive(mask[..., prefix_length:], dtype))
    if position_bias is not None:
        position_bias = split_heads(position_bias.to(dtype))
        prefix.append(rows_of_items(position_bias[..., :prefix_length]))
        suffix.append(position_bias[..., prefix_length:])
    return prefix, suffix


def _fold(states: torch.Tensor, repeats: int) -> torch.Tensor:
    """`(B * N, K, GQ, D)` to `(B, K, N * GQ, D)`."""
    rows, heads, queries, size = states.shape
    folded = states.reshape(rows // repeats, repeats, heads, queries, size).transpose(1, 2)
    return folded.reshape(rows // repeats, heads, repeats * queries, size)


def _unfold(states: torch.Tensor, repeats: int) -> torch.Tensor:
    """`(B, K, N * GQ, D)` to `(B * N, K, GQ, D)`."""
    items, heads, queries, size = states.shape
    unfolded = states.reshape(items, heads, repeats, queries // repeats, size).transpose(1, 2)
    return unfolded.reshape(items * repeats, heads, queries // repeats, size)


@dataclass
class _Scores:
    """
    What the scores are made of, in the type in which they are computed. The names are those of
    `shared_prefix_attention_forward`; `query` has shape `(B * N, K, G * Q, D)`.
    """

    query: torch.Tensor
    prefix: SharedPrefix
    suffix_keys: torch.Tensor
    suffix_values: torch.Tensor
    biases: tuple[list[torch.Tensor], list[torch.Tensor]]
    groups: int
    scaling: float
    softcap: float | None
    sinks: torch.Tensor | None

    @property
    def query_length(self) -> int:
        return self.query.shape[2] // self.groups

    def of_prefix(self) -> torch.Tensor:
        """Scores `(B, K, N * G * Q, L)`."""
        folded = _fold(self.query, self.prefix.repeats)
        return self._finish(folded, self.prefix.keys, self.biases[0], (self.prefix.repeats, self.groups))

    def of_suffix(self) -> torch.Tensor:
        """Scores `(B * N, K, G * Q, S)`."""
        return self._finish(self.query, self.suffix_keys, self.biases[1], (self.groups,))

    def of_sinks(self) -> torch.Tensor:
        """Scores `(B * N, K, G * Q, 1)`."""
        rows, heads = self.query.shape[:2]
        sinks = self.sinks.view(1, heads, self.groups, 1).expand(rows, -1, -1, self.query_length)
        return sinks.reshape(rows, heads, -1, 1)

    def _finish(self, query, keys, biases: list[torch.Tensor], split: tuple[int, ...]) -> torch.Tensor:
        scores = torch.matmul(query * self.scaling, keys.transpose(2, 3))
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if not biases:
            return scores
        shape = scores.shape
        scores = scores.view(*shape[:2], *split, self.query_length, shape[3])
        for bias in biases:
            scores = scores + bias
        return scores.view(shape)


def _can_fuse(scores: _Scores) -> bool:
    """
    Whether torch's fused kernel for the CPU applies to the prefix. It returns the logarithm that merging needs and makes
    no scores of size N * L. With prompts of 512 to 4096 tokens and N of 4 to 32 it took 0.40 to 1.09 times as long as one
    softmax between two matrix products (float32, head size 64, one thread), the median being 0.84.
    """
    biases, keys, values = scores.biases[0], scores.prefix.keys, scores.prefix.values
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (scores.query, keys, values))
    has_simple_bias = not biases or (len(biases) == 1 and biases[0].shape[1:-1] == (1, 1, 1, 1))
    return (
        keys.device.type == "cpu"
        and keys.shape[-1] == values.shape[-1]
        and scores.softcap is None
        and has_simple_bias
        and not needs_grad
    )


def _merge_states(scores: _Scores) -> torch.Tensor:
    """
    Attention as the merge of several states. Returns the output `(B * N, K, G * Q, Dv)`.

    A chunk of the prefix takes part in the softmax over the suffix as if it were one more key: its score is the
    log-sum-exp of its scores, its value is its output.
    """
    suffix_length = scores.suffix_keys.shape[2]
    outputs, lse = _chunk_states(scores)
    parts = [scores.of_suffix(), lse] if suffix_length > 0 else [lse]
    if scores.sinks is not None:
        parts.append(scores.of_sinks())
    shares = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)).softmax(-1)
    output = (outputs * shares[..., suffix_length : suffix_length + lse.shape[-1], None]).sum(-2)
    if suffix_length == 0:
        return output
    return output + torch.matmul(shares[..., :suffix_length], scores.suffix_values)


def _count_chunks(heads: int, length: int) -> int:
    """
    In how many chunks a prefix is read. The fused kernel's threads get a head of an item each, or 32 of its queries: too
    few to keep them busy alike, where there are few heads. On two threads, two chunks for three heads took 0.66 times as
    long as one (18 queries, L = 2048).
    """
    if is_torchdynamo_compiling():  # compiled code can't ask for the number of threads
        return 1
    return max(1, min(-(-2 * torch.get_num_threads() // heads), length // MINIMAL_CHUNK))


def _chunk_states(scores: _Scores) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Attention to each of C chunks of the prefix, which are views of it: as many of equal length as `_count_chunks` says,
    and what that leaves over (as in split-KV decoding, https://pytorch.org/blog/flash-decoding).

    Returns:
        `tuple`: The outputs `(B * N, K, G * Q, C, Dv)`, and the log-sum-exps `(B * N, K, G * Q, C)`.
    """
    prefix, biases = scores.prefix, scores.biases[0]
    items, heads, length, _ = prefix.keys.shape
    count = _count_chunks(items * heads, length)
    query = _fold(scores.query, prefix.repeats).flatten(0, 1).unsqueeze(1)
    keys, values = prefix.keys.flatten(0, 1), prefix.values.flatten(0, 1)
    # (1 or B, L) to (B * K, L)
    bias = biases[0].flatten(0, 4).expand(items, -1).repeat_interleave(heads, dim=0) if biases else None
    states, cut = [], length // count * count
    for part, chunks in ((slice(0, cut), count), (slice(cut, length), 1)):
        if part.start < part.stop:
            states.append(
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    query.expand(-1, chunks, -1, -1),
                    keys[:, part].unflatten(1, (chunks, -1)),
                    values[:, part].unflatten(1, (chunks, -1)),
                    attn_mask=None if bias is None else bias[:, part].unflatten(1, (chunks, -1)).unsqueeze(2),
                    scale=scores.scaling,
                )
            )
    outputs, lse = (pair[0] if len(pair) == 1 else torch.cat(pair, dim=1) for pair in zip(*states))
    # (B * K, C, N * G * Q, Dv) to (B * N, K, G * Q, C, Dv)
    split = outputs.unflatten(0, (items, heads)).unflatten(3, (prefix.repeats, -1)).permute(0, 3, 1, 4, 2, 5)
    lse = lse.unflatten(0, (items, heads)).unflatten(3, (prefix.repeats, -1)).permute(0, 3, 1, 4, 2)
    return split.flatten(0, 1), lse.flatten(0, 1)


def _attend_at_once(scores: _Scores) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Attention as one softmax over the scores of the prefix, the suffix and the sinks. Returns the output
    `(B * N, K, G * Q, Dv)` and the weights `(B * N, K, G * Q, L + S)`.
    """
    repeats, prefix_length = scores.prefix.repeats, scores.prefix.keys.shape[2]
    parts = [scores.of_prefix()]
    if scores.suffix_keys.shape[2] > 0:
        parts.append(_fold(scores.of_suffix(), repeats))
    if scores.sinks is not None:
        parts.append(_fold(scores.of_sinks(), repeats))
    weights = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)).softmax(-1)
    output = _unfold(torch.matmul(weights[..., :prefix_length], scores.prefix.values), repeats)
    length = prefix_length + scores.suffix_keys.shape[2]
    if length > prefix_length:
        output = output + torch.matmul(_unfold(weights[..., prefix_length:length], repeats), scores.suffix_values)
    return output, _unfold(weights[..., :length], repeats)


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    shared_prefix: SharedPrefix,
    scaling: float | None = None,
    is_causal: bool = True,
    position_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    What [`shared_prefix_attention_forward`] must compute: every row gets its copy of the prefix, every query head its
    copy of the keys, then ordinary attention in the type of the inputs. The arguments are the same, except that
    `key` and `value` are always the suffix (S = 0 in cross-attention).

    Returns:
        `tuple`: The output `(B * N, Q, H, Dv)` and the weights `(B * N, H, Q, L + S)`.
    """
    repeats, groups = shared_prefix.repeats, query.shape[1] // key.shape[1]
    keys = torch.cat([shared_prefix.keys.repeat_interleave(repeats, dim=0), key], dim=2)
    values = torch.cat([shared_prefix.values.repeat_interleave(repeats, dim=0), value], dim=2)
    keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    scores = query @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is None:
        query_length, length = scores.shape[2:]
        if is_causal:
            scores = scores.masked_fill(
                ~torch.ones(query_length, length).tril(length - query_length).bool(), -torch.inf
            )
    elif attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    else:
        scores = scores + attention_mask
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[2]]
    return (weights @ values).transpose(1, 2), weights


def share_prefix_in_eager(eager_attention: Callable) -> Callable:
    """
    Makes an attention function of the kind that modeling files call `eager_attention_forward` aware of shared prefixes.
    Eager attention has no causal mask of its own, and it returns its weights.
    """
    return partial(_eager_attention_forward, eager_attention)


def _eager_attention_forward(eager_attention, module, query, key, value, attention_mask, **kwargs):
    if not takes_shared_prefix(
        module, query, key, attention_mask, kwargs, kwargs.get("dropout", 0.0), is_causal=False
    ):
        return eager_attention(module, query, key, value, attention_mask, **kwargs)
    kwargs |= {"is_causal": False, "return_weights": True}
    return shared_prefix_attention_forward(module, query, key, value, attention_mask, **kwargs)
