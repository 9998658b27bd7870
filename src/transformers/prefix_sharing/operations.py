# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
What [`SegmentedStates`] compute on their segments: views, what treats each row and each token alike, changes of rows and
tokens, products and attention. Each handler has the signature of the operation, after the operation itself, and returns
`NotImplemented` where it has to be given tensors of all rows.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .attention import attend, scores, weigh
from .states import HANDLERS, Handler, SegmentedStates, map_states


def handles(names: str, of_first: bool = True) -> Callable[[Callable], Callable]:
    """Registers a handler of the operations `names`, divided by spaces. `of_first`: whether their first argument is segmented."""

    def register(handler: Callable) -> Callable:
        parameters = inspect.signature(handler).parameters.values()
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        keywords = None if takes_any else frozenset(parameter.name for parameter in parameters)
        HANDLERS.update(dict.fromkeys(names.split(), Handler(handler, keywords, of_first)))
        return handler

    return register


def _keep(states: SegmentedStates, segments: Sequence[torch.Tensor], func: Callable, args, kwargs, **changes) -> Any:
    """A view of `states`."""
    return states.make(segments, source=(states, func, args, kwargs), **changes)


# ------------------------------------------------------------------------------------------------------------ questions
@handles("is_floating_point is_complex is_signed is_inference")
def _ask(func, states):
    return func(states.example)


# ---------------------------------------------------------------------------------------------------------------- views
@handles("transpose swapaxes swapdims")
def _transpose(func, states, dim0, dim1):
    if (
        not isinstance(states, SegmentedStates)
        or states.groups > 1
        and {dim0 % states.ndim, dim1 % states.ndim} != {2, 3}
    ):
        return NotImplemented
    order = list(range(states.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _reordered(func, states, order, (dim0, dim1))


@handles("permute")
def _permute(func, states, *dims):
    order = [dim % states.ndim for dim in (dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims)]
    return _reordered(func, states, order, dims) if states.groups == 1 else NotImplemented


def _reordered(func, states, order, args):
    return _keep(
        states,
        [segment.permute(order) for segment in states.segments],
        func,
        args,
        {},
        row_dim=order.index(states.row_dim),
        length_dim=order.index(states.length_dim),
    )


@handles("unsqueeze")
def _unsqueeze(func, states, dim):
    dim %= states.ndim + 1
    if states.groups > 1:
        return NotImplemented
    dims = {name: getattr(states, name) + (dim <= getattr(states, name)) for name in ("row_dim", "length_dim")}
    return _keep(states, [segment.unsqueeze(dim) for segment in states.segments], func, (dim,), {}, **dims)


@handles("expand")
def _expand(func, states, *sizes):
    sizes = list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    if states.groups > 1 or len(sizes) != states.ndim:
        return NotImplemented
    for dim in (states.row_dim, states.length_dim):
        if sizes[dim] not in (-1, states.shape[dim]):
            return NotImplemented
        sizes[dim] = -1
    return _keep(states, [segment.expand(sizes) for segment in states.segments], func, (sizes,), {})


@handles("view reshape")
def _reshape(func, states, *sizes):
    if len(sizes) == 1 and isinstance(sizes[0], torch.dtype):
        return NotImplemented
    sizes = list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    if -1 in sizes:
        sizes[sizes.index(-1)] = states.numel() // math.prod(size for size in sizes if size != -1)
    if states.groups > 1:
        return states if sizes == list(states.shape) else NotImplemented
    if (dims := _match(states, sizes)) is None:
        return NotImplemented
    row_dim, length_dim, inner = dims
    segments, groups = states.segments, 1
    # Heads that `repeat_kv` repeats: expanded, then merged with the heads. They need not be there
    if states.ndim == 5 and len(sizes) == 4 and dims == (0, 2, 1) and all(s.stride(2) == 0 for s in segments):
        segments, groups = [segment.select(2, 0) for segment in segments], states.shape[2]
    else:
        of_segments = []
        for segment in segments:
            of_segment = list(sizes)
            of_segment[row_dim] = segment.shape[states.row_dim] // states.inner * inner
            of_segment[length_dim] = segment.shape[states.length_dim]
            of_segments.append(segment.reshape(of_segment))
        segments = of_segments
    changes = {"row_dim": row_dim, "length_dim": length_dim, "inner": inner, "groups": groups}
    # `reshape` where a tensor of all rows couldn't be viewed
    return _keep(states, segments, torch.Tensor.reshape, (sizes,), {}, **changes)


def _match(states: SegmentedStates, sizes: list[int]) -> tuple[int, int, int] | None:
    """
    Finds rows and tokens in a shape with as many elements: the new `row_dim`, `length_dim` and `inner`, `None` if they are
    mixed up with other dimensions. Rows may be merged with what comes after them.
    """
    shape, found = list(states.shape), {}
    old = new = 0
    while old < len(shape) or new < len(sizes):
        olds, news = shape[old : old + 1], sizes[new : new + 1]
        first_old, first_new, old, new = old, new, old + 1, new + 1
        while math.prod(olds) != math.prod(news):
            if math.prod(olds) < math.prod(news):
                olds.append(shape[old])
                old += 1
            else:
                news.append(sizes[new])
                new += 1
        if first_old <= states.length_dim < old:
            if len(olds) > 1 or len(news) > 1:
                return None
            found["length"] = first_new
        if first_old <= states.row_dim < old:
            if states.row_dim != first_old or not news or news[0] % states.rows:
                return None
            found["row"] = first_new
    return found["row"], found["length"], sizes[found["row"]] // states.rows


@handles("flatten")
def _flatten(func, states, start_dim=0, end_dim=-1):
    shape = list(states.shape)
    start, end = start_dim % len(shape), end_dim % len(shape)
    return _reshape(func, states, shape[:start] + [math.prod(shape[start : end + 1])] + shape[end + 1 :])


@handles("unflatten")
def _unflatten(func, states, dim, sizes):
    shape = list(states.shape)
    dim, sizes = dim % len(shape), list(sizes)
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[dim] // -math.prod(sizes)
    return _reshape(func, states, shape[:dim] + sizes + shape[dim + 1 :])


@handles("__getitem__")
def _getitem(func, states, index):
    index = index if isinstance(index, tuple) else (index,)
    if not isinstance(states, SegmentedStates) or states.groups > 1:
        return NotImplemented
    if isinstance(index[0], (torch.Tensor, list)) and all(_is_whole(item) for item in index[1:]):
        return (
            _take_rows(states, torch.as_tensor(index[0], device=states.device))
            if states.row_dim == 0
            else NotImplemented
        )
    if not all(item is None or item is Ellipsis or isinstance(item, (int, slice)) for item in index):
        return NotImplemented
    if Ellipsis not in index:
        index = (*index, Ellipsis)
    at, named = index.index(Ellipsis), sum(item is not None and item is not Ellipsis for item in index)
    index = [*index[:at], *[slice(None)] * (states.ndim - named), *index[at + 1 :]]
    # Where the item of each dimension stands in the index, and how many dimensions are before it in the result
    positions = [i for i, item in enumerate(index) if item is not None]
    new_dims = [sum(not isinstance(item, int) for item in index[:i]) for i in positions]
    tokens = index[positions[states.length_dim]]
    if (
        not _is_whole(index[positions[states.row_dim]])
        or not isinstance(tokens, slice)
        or tokens.step not in (None, 1)
    ):
        return NotImplemented
    segments = []
    for start, stop, segment in _slices(states, tokens):
        index[positions[states.length_dim]] = slice(start, stop)
        segments.append(segment[tuple(index)])
    index[positions[states.length_dim]] = tokens
    row_dim, length_dim = new_dims[states.row_dim], new_dims[states.length_dim]
    if len(segments) == 1 and segments[0].shape[row_dim] == states.rows * states.inner:
        # Only the suffix is left. What is written into it is written into the states
        return segments[0]
    return _keep(states, segments, func, (tuple(index),), {}, row_dim=row_dim, length_dim=length_dim)


def _is_whole(item: Any) -> bool:
    return item is Ellipsis or (isinstance(item, slice) and item.start is item.stop is item.step is None)


def _slices(states: SegmentedStates, tokens: slice) -> list[tuple[int, int, torch.Tensor]]:
    """Start, end and segment of each part of a range of tokens. An empty range has one part."""
    length, offset, parts = states.shape[states.length_dim], 0, []
    start, stop = (
        default if at is None else min(max(at + length if at < 0 else at, 0), length)
        for at, default in ((tokens.start, 0), (tokens.stop, length))
    )
    for segment, held in zip(states.segments, states.lengths, strict=True):
        first, last = max(start - offset, 0), min(stop - offset, held)
        if first < last:
            parts.append((first, last, segment))
        offset += held
    return parts or [(0, 0, states.segments[-1])]


@handles("detach")
def _detach(func, states):
    return _keep(states, [segment.detach() for segment in states.segments], func, (), {})


@handles("chunk split split_with_sizes tensor_split")
def _split(func, states, sizes, dim=0):
    if states.groups > 1 or dim % states.ndim in (states.row_dim, states.length_dim):
        return NotImplemented
    parts = zip(*(func(segment, sizes, dim=dim) for segment in states.segments), strict=True)
    pick = lambda whole, i: func(whole, sizes, dim=dim)[i]  # noqa: E731
    return tuple(_keep(states, part, pick, (i,), {}) for i, part in enumerate(parts))


# --------------------------------------------------------------------------------------------------------- rows and tokens
@handles("cat concat concatenate", of_first=False)
def _cat(func, tensors, dim=0):
    # Dynamic layers begin with an empty tensor of one dimension
    parts = [part for part in tensors if part.ndim > 1 or part.numel() > 0]
    all_states = [part for part in parts if isinstance(part, SegmentedStates)]
    first = all_states[0]
    if dim % first.ndim != first.length_dim:
        return _joined_alike(func, parts, dim)
    if first.groups > 1 or not all(_continues(part, first) for part in parts):
        return NotImplemented
    joined: list[torch.Tensor] = []
    for part in parts:
        for segment in part.segments if isinstance(part, SegmentedStates) else [part]:
            joined = _appended(joined, segment, first, first.rows)
    return first.make(joined, parents=all_states if len(all_states) > 1 else ())


def _continues(part: "torch.Tensor | SegmentedStates", states: SegmentedStates) -> bool:
    """Whether `part` can be appended to the tokens of `states`."""
    if part is states:
        return True
    shape, other = list(part.shape), list(states.shape)
    if len(shape) != len(other) or part.dtype != states.dtype or part.device != states.device:
        return False
    shape[states.length_dim] = other[states.length_dim]
    return shape == other and (not isinstance(part, SegmentedStates) or part.has_layout_of(states))


@handles("stack", of_first=False)
def _stack(func, tensors, dim=0):
    if not isinstance(tensors[0], SegmentedStates) or dim % (tensors[0].ndim + 1) == 0:
        return NotImplemented
    return _joined_alike(torch.cat, [part.unsqueeze(dim) for part in tensors], dim)


def _joined_alike(func, parts, dim):
    """Joins states of the same rows and tokens along another dimension."""
    first, *others = parts
    if (
        not all(isinstance(part, SegmentedStates) and part.is_like(parts[0]) for part in parts)
        or dim % first.ndim in (first.row_dim, first.length_dim)
        or first.groups > 1
    ):
        return NotImplemented
    return first.computed([func(pieces, dim=dim) for pieces in zip(*(part.segments for part in parts))], *others)


def _appended(
    segments: list[torch.Tensor], new: torch.Tensor, states: SegmentedStates, rows: int
) -> list[torch.Tensor]:
    """Neighbours that have all rows become one."""
    if segments and segments[-1].shape[states.row_dim] == rows * states.inner == new.shape[states.row_dim]:
        return [*segments[:-1], torch.cat([segments[-1], new], dim=states.length_dim)]
    return [*segments, new]


@handles("index_select")
def _index_select(func, states, dim, index):
    if isinstance(states, SegmentedStates) and dim % states.ndim == states.row_dim:
        return _take_rows(states, index)
    return NotImplemented


def _take_rows(states: SegmentedStates, index: torch.Tensor) -> Any:
    """
    Takes rows. A segment stays as it is where each row goes on with one of its own item. In another one, rows that stand
    for several are repeated.
    """
    if states.inner > 1 or states.groups > 1:
        return NotImplemented
    if index.dtype == torch.bool:
        index = index.nonzero().squeeze(-1)
    count, taken = index.shape[0], []
    if states.is_prompt and count % states.rows == 0 and count > states.rows:
        # Layers that repeat their rows by taking them several times
        own = torch.arange(states.rows, device=index.device).repeat_interleave(count // states.rows)
        if torch.equal(index, own):
            return states.make(states.segments, rows=count)
    for segment, repeats in zip(states.segments, states.repeats, strict=True):
        if segment.shape[states.row_dim] == 1 or (
            repeats > 1 and count == states.rows and states.origin.beams.stays_within_items(index, repeats)
        ):
            taken.append(segment)
        else:
            rows = index if repeats == 1 else index // repeats
            taken = _appended(taken, segment.index_select(states.row_dim, rows.to(segment.device)), states, count)
    if len(taken) == 1 and taken[0].shape[states.row_dim] == count:
        return taken[0]
    return states.make(taken, rows=count)


@handles("repeat_interleave")
def _repeat_interleave(func, states, repeats, dim=None):
    if dim is None or not isinstance(states, SegmentedStates) or not isinstance(repeats, int) or states.groups > 1:
        return NotImplemented
    dim %= states.ndim
    if dim == states.length_dim or (dim == states.row_dim and states.inner > 1):
        return NotImplemented
    if dim != states.row_dim:
        return states.computed([segment.repeat_interleave(repeats, dim=dim) for segment in states.segments])
    segments = [
        segment if states.is_prompt or of_segment > 1 else segment.repeat_interleave(repeats, dim=dim)
        for segment, of_segment in zip(states.segments, states.repeats, strict=True)
    ]
    return states.make(segments, rows=states.rows * repeats)


@handles("index_copy_")
def _index_copy(func, states, dim, index, source):
    # A static layer writes new tokens, which come after the prompt: its `crop` sees to that
    if not isinstance(states, SegmentedStates) or dim % states.ndim != states.length_dim or states.source is not None:
        return NotImplemented
    if states.repeats[-1] > 1 or isinstance(source, SegmentedStates):
        return NotImplemented
    states.segments[-1].index_copy_(dim, index - sum(states.lengths[:-1]), source)
    return states


# ------------------------------------------------------------------------------------------------ each row and token alike
POINTWISE = """
    to type type_as float double half bfloat16 clone neg exp abs tanh relu sigmoid silu gelu softplus rsqrt sqrt square pow clamp
    add sub mul div true_divide multiply divide subtract dropout __neg__ __pow__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__
    __truediv__ __div__
"""


@handles(POINTWISE, of_first=False)
def _pointwise(func, *args, **kwargs):
    leaves = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, (torch.Tensor, SegmentedStates))]
    all_states = [leaf for leaf in leaves if isinstance(leaf, SegmentedStates)]
    if kwargs.get("inplace") or kwargs.get("out") is not None or not all_states:
        return NotImplemented
    states = all_states[0]
    for leaf in leaves:
        if isinstance(leaf, SegmentedStates):
            if not leaf.is_like(states) or leaf.ndim != states.ndim:
                return NotImplemented
        elif func.__name__ in ("to", "type_as"):
            continue
        elif leaf.ndim > states.ndim or not all(
            leaf.ndim < states.ndim - dim or leaf.shape[dim - states.ndim] == 1
            for dim in (states.row_dim, states.length_dim)
        ):
            return NotImplemented
    if states.groups > 1 and len(leaves) > len(all_states):
        return NotImplemented
    if func.__name__ == "dropout" and kwargs.get("training", args[2] if len(args) > 2 else True):
        return NotImplemented
    segments = []
    for i in range(len(states.segments)):
        parts = [arg.segments[i] if isinstance(arg, SegmentedStates) else arg for arg in args]
        segments.append(func(*parts, **kwargs))
    if all(new is old for new, old in zip(segments, states.segments, strict=True)):
        return states
    return states.computed(segments, *all_states[1:])


@handles("linear")
def _linear(func, states, weight, bias=None):
    last = states.ndim - 1 if isinstance(states, SegmentedStates) else None
    if last is None or last in (states.row_dim, states.length_dim) or states.groups > 1:
        return NotImplemented
    return states.computed([func(segment, weight, bias) for segment in states.segments])


@handles("repeat")
def _repeat(func, states, *sizes):
    sizes = list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    if states.groups > 1 or len(sizes) != states.ndim or sizes[states.row_dim] != 1 or sizes[states.length_dim] != 1:
        return NotImplemented
    return states.computed([segment.repeat(sizes) for segment in states.segments])


def map_segments(function: Callable, *states: Any) -> Any:
    """
    Calls a function that treats each row and each token alike once per segment, instead of once for all rows: one that
    expands cached latents to keys and values, for example. Where an argument is a tensor, it is called as it is.

    Args:
        function (`Callable`): Takes tensors of shape `(R, K, L, D)`, and returns a tuple of such.
        states (`SegmentedStates` or `torch.Tensor`): The arguments.

    Returns:
        `tuple`: What the function returns, as [`SegmentedStates`] where the arguments are.
    """
    settled = [state.settle() if isinstance(state, SegmentedStates) else state for state in states]
    first = settled[0]
    if not all(isinstance(state, SegmentedStates) and state.is_like(first) for state in settled):
        return function(*map_states(lambda states: states.expand_rows(function.__name__), settled))
    results = zip(
        *(function(*parts) for parts in zip(*(state.segments for state in settled), strict=True)), strict=True
    )
    return tuple(first.computed(segments, *settled[1:]) for segments in results)


# ------------------------------------------------------------------------------------------------------------- products
@handles("matmul __matmul__ bmm", of_first=False)
def _matmul(func, left, right):
    """The product of queries with transposed keys, or of weights with values."""
    if not isinstance(right, SegmentedStates) or isinstance(left, SegmentedStates) or left.ndim != right.ndim:
        return NotImplemented
    if (
        right.row_dim != 0
        or right.ndim < 3
        or right.length_dim < right.ndim - 2
        or (right.ndim > 4 and right.groups > 1)
    ):
        return NotImplemented
    if left.shape[:-2] != right.shape[:-2] or left.shape[-1] != right.shape[-2]:
        return NotImplemented
    shape = left.shape[:-1] + right.shape[-1:]

    def by_heads(tensor, rows):
        """(rows, ..., m, n) to (rows, H, m, n): heads may be merged with rows, or be divided."""
        return tensor.reshape(rows, -1, *tensor.shape[-2:])

    left = by_heads(left, right.rows)
    segments = [by_heads(segment, right.rows // of) for segment, of in zip(right.segments, right.repeats, strict=True)]
    if right.length_dim == right.ndim - 1:
        return scores(left, [segment.transpose(2, 3) for segment in segments]).reshape(shape)
    return weigh(left, segments).reshape(shape)


@handles("__rmatmul__")
def _rmatmul(func, right, left):
    return _matmul(func, left, right)


@handles("baddbmm", of_first=False)
def _baddbmm(func, input, batch1, batch2, *, beta=1, alpha=1):
    if isinstance(input, SegmentedStates) or (product := _matmul(func, batch1, batch2)) is NotImplemented:
        return NotImplemented
    return torch.add(input * beta, product, alpha=alpha)


@handles("einsum", of_first=False)
def _einsum(func, equation, *operands):
    operands = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    left, _, rest = equation.replace(" ", "").partition(",")
    right, _, result = rest.partition("->")
    if (
        len(operands) != 2
        or len({*left, *right}) != len(left) + 1
        or len(left) != len(right)
        or left[:-2] != right[:-2]
    ):
        return NotImplemented
    *batch, summed, kept = right
    if left[-1] == kept and isinstance(operands[1], SegmentedStates):
        # The second operand comes transposed
        operands, summed, kept = (operands[0], operands[1].transpose(-2, -1)), kept, summed
    if left[-1] != summed or result != f"{left[:-1]}{kept}":
        return NotImplemented
    return _matmul(func, *operands)


@handles("scaled_dot_product_attention", of_first=False)
def _attention(
    func, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, **kwargs
):
    for states in (key, value):
        if (
            not isinstance(states, SegmentedStates)
            or states.ndim != 4
            or states.inner > 1
            or states.groups != key.groups
        ):
            return NotImplemented
        if (
            (states.row_dim, states.length_dim) != (0, 2)
            or states.lengths != key.lengths
            or states.repeats != key.repeats
        ):
            return NotImplemented
    if (
        dropout_p > 0
        or query.ndim != 4
        or query.shape[0] != key.rows
        or isinstance(attn_mask, SegmentedStates)
        or kwargs
    ):
        return NotImplemented
    if query.dtype != torch.float64 and torch.is_autocast_enabled(query.device.type):
        query = query.to(torch.get_autocast_dtype(query.device.type))
    # A single head of keys is broadcast
    if query.shape[1] != key.shape[1] != 1 and (not enable_gqa or query.shape[1] % key.shape[1]):
        return NotImplemented
    return attend(query, key.segments, value.segments, attn_mask, scale, is_causal, memo=key.origin.masks)
