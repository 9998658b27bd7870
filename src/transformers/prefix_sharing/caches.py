# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Caches whose layers hold the keys and values of a prompt once for the N rows that continue it.

    cache = model(prompt, use_cache=True).cache      # B rows
    share_cache(cache, repeats=N)                    # stands for B * N rows now, no keys or values were copied
    model(next_tokens, cache=cache)                  # (B * N, 1) tokens
    cache.reorder_cache(beam_idx)                    # touches the suffixes only
    materialize_cache(cache)                         # ordinary tensors of B * N rows, as if nothing had been shared

The layers stay what they are, with [`SegmentedStates`] in place of tensors: all of their methods work on these as they are. So
a layer of which anybody needs all rows becomes an ordinary one, by that.

Shapes: B batch items, N rows per item (`repeats`), H heads, L prompt length, S suffix length, D head size.
"""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional as F

from ..cache_expansion import check_repeats
from ..cache_utils import BaseQuantizedLayer, Cache, DynamicCache, DynamicLayer, EncoderDecoderCache, StaticLayer
from ..modeling_utils import ALL_ATTENTION_FUNCTIONS
from ..utils import logging
from .attention import StepMemo
from .cost import Decoding, why_not_pays
from .states import BeamMemo, Origin, SegmentedStates


if TYPE_CHECKING:
    from ..modeling_utils import PreTrainedModel


logger = logging.get_logger(__name__)

LIBRARY = __name__.partition(".")[0]
READERS = ("sdpa", "eager")
# What a modeling file calls on keys and values, and people replace
REPLACEABLE = ("eager_attention_forward", "repeat_kv", "apply_rotary_pos_emb", "sdpa_attention_forward")
# Which layers of a model had to become ordinary ones, and the operation that needed it
_learned: "WeakKeyDictionary[type, dict[tuple[str, int], str]]" = WeakKeyDictionary()


def _parts(cache: Cache) -> Iterator[tuple[str, Cache]]:
    """The caches that hold layers, by the kind of attention."""
    if isinstance(cache, EncoderDecoderCache):
        yield "self", cache.self_attention_cache
        yield "cross", cache.cross_attention_cache
    else:
        yield "self", cache


def share_cache(
    cache: Cache, repeats: int, model: "PreTrainedModel | None" = None, decoding: Decoding | None = None
) -> int:
    """
    Makes a cache of B rows stand for B * N rows, in place. Keys and values of layers that concatenate, and of static layers,
    are stored once; everything else repeats its rows.

    Args:
        cache ([`Cache`]): The cache after the prefill. It stays the same object.
        repeats (`int`): Number N of rows per batch item.
        model ([`PreTrainedModel`], *optional*): The model that goes on with it. Its layers that had to become ordinary ones
            in an earlier call are repeated at once.
        decoding ([`Decoding`], *optional*): What follows. If it is given, layers are shared only where it pays.

    Returns:
        `int`: Number of layers whose keys and values are shared. Why others that could be are not is in `cache.copied_layers`.

    Raises:
        `ValueError`: If `repeats` is not an integer of at least 1.
    """
    check_repeats(repeats)
    learned = _learned.get(type(model), {})
    masks, beams, origins, copied = StepMemo(), BeamMemo(), {}, {}
    for kind, part in _parts(cache):
        if repeats > 1 and _why_not_part(part) is None:
            for index, layer in enumerate(part.layers):
                if not _can_share(layer):
                    continue
                reason = f"`{learned[kind, index]}` needs all rows" if (kind, index) in learned else None
                if reason is None and decoding is not None:
                    keys = next(iter(_states(layer).values()))
                    reason = why_not_pays(keys, repeats, kind, decoding)
                if reason is None:
                    origins[kind, index] = Origin(masks, beams)
                    part.layers[index] = _wrap(layer, origins[kind, index])
                else:
                    copied[kind, index] = reason
        part.batch_repeat_interleave(repeats)
    cache.shared_origins, cache.copied_layers = origins, copied
    return len(origins)


def _can_share(layer: Any) -> bool:
    """Whether a layer holds states of a prompt in tensors that it appends to, or writes to in place."""
    is_dynamic = (
        isinstance(layer, DynamicLayer) and not isinstance(layer, BaseQuantizedLayer) and _is_ours(type(layer))
    )
    return (is_dynamic or type(layer) is StaticLayer) and len(_states(layer)) > 0


def _states(layer: Any) -> dict[str, torch.Tensor | SegmentedStates]:
    """The states `(B, H, L, D)` of a layer by name: keys, values, and what some layers keep apart from them."""
    return {
        name: value
        for name, value in vars(layer).items()
        if type(value) in (torch.Tensor, SegmentedStates) and value.dim() == 4 and 0 not in value.shape[:3]
    }


def _wrap(layer: Any, origin: Origin) -> Any:
    """Makes a layer repeat its rows without copying them."""
    if isinstance(layer, StaticLayer):
        shared = SharedStaticLayer(layer.max_cache_len)
        vars(shared).update(vars(layer), origin=origin)
        return shared
    for name, states in _states(layer).items():
        if isinstance(states, SegmentedStates):
            states = states.make(states.segments, origin=origin) if states.segments else states.dense
        elif states.untyped_storage().nbytes() > states.nbytes:
            # A view, as windows are of the whole prompt, would keep the rest alive
            states = states.clone()
        if isinstance(states, torch.Tensor):
            states = SegmentedStates([states], states.shape[0], origin)
        states.is_prompt = True
        setattr(layer, name, states)
    return layer


class SharedStaticLayer(StaticLayer):
    """
    A static layer of M tokens whose first L tokens, those that the prefill has written, are stored once per item. The suffix
    `(B * N, H, M - L, D)` is a buffer of its own: no shape changes while decoding, so that compiled code goes on.
    """

    origin: Origin

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats the rows of the suffix alone."""
        if isinstance(self.keys, SegmentedStates):
            self.keys, self.values = (states.repeat_interleave(repeats, dim=0) for states in (self.keys, self.values))
        else:
            length = int(self.cumulative_length)
            self.keys, self.values = (self._divide(states, length, repeats) for states in (self.keys, self.values))
        self.batch_size *= repeats

    def _divide(self, states: torch.Tensor, length: int, repeats: int) -> SegmentedStates:
        items, heads, room, size = states.shape
        segments = [states[:, :, :length], states.new_zeros(items * repeats, heads, room - length, size)]
        segments = [segment for segment in segments if segment.shape[2] > 0]
        for segment in segments:
            torch._dynamo.mark_static_address(segment)
        return SegmentedStates(segments, items * repeats, self.origin)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest tokens. If some of them belong to the prompt, the layer becomes an ordinary one."""
        prompt_length = self.keys.lengths[0] if isinstance(self.keys, SegmentedStates) and self.keys.segments else 0
        if self.cumulative_length - abs(tokens_to_remove) < prompt_length:
            self.keys, self.values = self.keys.expand_rows("crop"), self.values.expand_rows("crop")
        super().crop(tokens_to_remove)


def materialize_cache(cache: Cache) -> None:
    """
    Gives the shared layers of a cache ordinary tensors of the B * N rows, in place. The cache stays the same object.

    Args:
        cache ([`Cache`]): A cache, shared or not.
    """
    for name in ("shared_origins", "copied_layers"):
        vars(cache).pop(name, None)
    for _, part in _parts(cache):
        for layer in part.layers:
            shared = {name: states for name, states in vars(layer).items() if isinstance(states, SegmentedStates)}
            for name, states in shared.items():
                tensor = states.settle()
                setattr(layer, name, tensor.joined() if isinstance(tensor, SegmentedStates) else tensor)
                if isinstance(layer, StaticLayer):
                    torch._dynamo.mark_static_address(getattr(layer, name))
            if isinstance(layer, SharedStaticLayer):
                layer.__class__ = StaticLayer
                del layer.origin


def learn_from(cache: Cache, model: "PreTrainedModel") -> None:
    """
    Remembers which layers have become ordinary ones, for the class of the model, and logs it once per class.

    Args:
        cache ([`Cache`]): The cache after decoding.
        model ([`PreTrainedModel`]): The model that has used it.
    """
    origins = getattr(cache, "shared_origins", {})
    expanded = {layer: origin.expanded_by for layer, origin in origins.items() if origin.expanded_by is not None}
    if expanded:
        known = _learned.setdefault(type(model), {})
        if not known:
            kinds = ", ".join(sorted({f"{kind}-attention ({operation})" for (kind, _), operation in expanded.items()}))
            logger.info(f"{type(model).__name__}: some layers need all rows of their keys and values: {kinds}")
        known.update(expanded)


def why_not_share_cache(cache: Cache) -> str | None:
    """
    Tells what stands in the way of sharing the layers of a cache, filled or not yet.

    Returns:
        `str` or `None`: The reason, `None` if [`share_cache`] will share some layers of it.
    """
    if not isinstance(cache, Cache):
        return f"a {type(cache).__name__} is no `Cache`"
    reasons = [_why_not_part(part) for _, part in _parts(cache)]
    return reasons[0] if None not in reasons else None


def _why_not_part(cache: Cache) -> str | None:
    if not _is_ours(type(cache)):
        return f"a {type(cache).__name__} is not one of the library's caches"
    if cache.offloading:
        return "an offloaded cache can't be shared"
    kinds = {type(layer) for layer in cache.layers} or {cache.layer_class_to_replicate}
    if not any(kind is StaticLayer or (issubclass(kind, DynamicLayer) and _is_ours(kind)) for kind in kinds):
        return f"none of the layers of the {type(cache).__name__} can be shared"
    for owner in (type(cache), *kinds):
        if hasattr(owner, "update") and not _is_library_function(owner.update):
            return f"`{owner.__name__}.update` has been replaced"
    if any("update" in vars(owner) for owner in (cache, *cache.layers)):
        return "`update` has been replaced"
    return None


def why_not_share(model: "PreTrainedModel", cache: Cache | None = None) -> str | None:
    """
    Tells what stands in the way of sharing a prompt's keys and values among the rows that a model decodes.

    [`SegmentedStates`] give what a tensor gives, whatever is done with them in Python. Code outside of the library and of
    torch may do something else: hand them to an extension. So it isn't given any.

    Args:
        model ([`PreTrainedModel`]): The model that is going to decode.
        cache ([`Cache`], *optional*): The cache, filled or not yet.

    Returns:
        `str` or `None`: The reason, `None` if nothing does.
    """
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in model.parameters()):
        return "gradients are computed"
    if F.scaled_dot_product_attention is not torch._C._nn.scaled_dot_product_attention:
        return "`torch.nn.functional.scaled_dot_product_attention` has been replaced"
    if "eager" in ALL_ATTENTION_FUNCTIONS or not _is_library_function(ALL_ATTENTION_FUNCTIONS.get("sdpa")):
        return "an attention function has been registered anew"
    if sys.modules[f"{LIBRARY}.generation.utils"].DynamicCache is not DynamicCache:
        return "the class of the cache has been replaced"
    if cache is not None and (reason := why_not_share_cache(cache)) is not None:
        return reason
    modules = {}
    for module in model.modules():
        modules.setdefault(type(module), []).append(module)
    for module_class, instances in modules.items():
        if (reason := _why_not_class(module_class, instances)) is not None:
            return f"{module_class.__name__} {reason}"
    return None


def _why_not_class(module_class: type, instances: list[torch.nn.Module]) -> str | None:
    """Why modules of a class can't be given segmented states. Modules that aren't of the library get none, unless derived."""
    for module in instances:
        state = vars(module)
        if state.get("_compiled_call_impl") is not None or hasattr(state.get("forward"), "_torchdynamo_orig_callable"):
            return "is compiled"
    if not any(_is_ours(base) for base in module_class.__mro__):
        return None
    if not (_is_library_function(module_class.forward) or _origin(module_class.forward) == "torch"):
        return "has a `forward` of its own"
    if not hasattr(instances[0], "layer_idx"):
        return None
    for module in instances:
        if "forward" in vars(module) and not hasattr(module, "_hf_hook"):
            return "has a `forward` of its own on the instance"
        implementation = getattr(getattr(module, "config", None), "_attn_implementation", "eager")
        if implementation not in READERS and implementation is not None:
            return f"uses the attention implementation {implementation!r}, which can't read a prefix: use 'sdpa'"
    names = vars(sys.modules[module_class.__module__])
    for name in REPLACEABLE:
        if name in names and not _is_library_function(names[name]):
            return f"calls `{name}`, which has been replaced"
    return None


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == LIBRARY


def _is_library_function(function: Any) -> bool:
    """Whether a function was defined in the library. A wrapper has the name of what it wraps, but globals of its own."""
    while (origin := _origin(function)) == "torch" and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return origin == LIBRARY


def _origin(function: Any) -> str:
    """The package in which a function, or a method, was defined."""
    function = getattr(function, "__func__", function)
    return getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0]
