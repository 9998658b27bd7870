# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
What stands in the way of forwarding fewer rows than will be decoded. Each `why_not_*` returns a reason, or `None`, and
changes nothing.

A prefill on fewer rows is right where the forward of a row depends on its inputs alone, and where all that decoding reads
afterwards can be repeated. For the library's own code that is known. Code from outside that `generate` would pass by, or
that may tell rows apart, gets all rows, as it always did.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..cache_expansion import cache_rows, cannot_expand
from ..cache_utils import Cache
from ..configuration_utils import PreTrainedConfig
from ..utils import ModelOutput, TransformersKwargs
from .equal_rows import ROW_INPUTS


if TYPE_CHECKING:
    from ..modeling_utils import PreTrainedModel
    from .configuration_utils import GenerationConfig

# Packages whose hooks and replaced methods treat all rows alike: they place, gather, compile or record
OWN_PACKAGES = ("transformers", "torch", "accelerate", "deepspeed")
# Methods that see B rows, or are called at another time, where the prompt is forwarded before its expansion
PASSED_BY = (
    "_expand_inputs_for_generation",
    "_expand_multimodal_outputs",
    "_get_logits_processor",
    "_maybe_prepare_encoder_kwargs_for_generation",
    "_prefill",
    "_prepare_cache_for_generation",
    "_prepare_static_cache",
    "_reorder_cache",
    "_update_model_kwargs_for_generation",
)
# Methods that run in the prefill: a class that brings its own is on probation
FORWARDING = ("__call__", "forward", "prepare_inputs_for_generation")
# Fields of a model output that hold one tensor, or a (nested) tuple of tensors, with one row per sequence
ATTENTION_FIELDS = ("attentions", "decoder_attentions", "cross_attentions")
HIDDEN_STATE_FIELDS = ("hidden_states", "decoder_hidden_states", "last_hidden_state")
ENCODER_FIELDS = ("encoder_last_hidden_state", "encoder_hidden_states", "encoder_attentions")
DROPOUT = "the model is in training mode, where each row draws its own dropout"

# What prefills have shown: model, or class from outside -> whether it was in training mode -> reason
_learned: WeakKeyDictionary[Any, dict[bool, str]] = WeakKeyDictionary()


def is_own(function: Any) -> bool:
    """
    Whether a function, and all that it wraps, is code of the library, or of a package that treats all rows alike. What
    counts is where the code was written: `functools.wraps` makes the name of a module lie.
    """
    while function is not None:
        function = getattr(function, "__func__", function)
        if isinstance(function, functools.partial):
            function = function.func
            continue
        written_in = getattr(function, "__globals__", None)
        module = type(function).__module__ if written_in is None else written_in.get("__name__", "")
        if module.partition(".")[0] not in OWN_PACKAGES:
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def is_overridden(model: Any, method: str) -> bool:
    """Whether code from outside of the library stands in for `method`, on the class or on the object."""
    function = vars(model).get(method) or getattr(type(model), method, None)
    return function is not None and not is_own(function)


def is_on_probation(model: "PreTrainedModel") -> bool:
    """Whether the prefill of `model` runs code from outside, so that its outputs have to be looked at."""
    return any(is_overridden(model, method) for method in FORWARDING)


def learn(model: "PreTrainedModel", reason: str, about_class: bool) -> None:
    """Remembers, as long as there is the model (or its class), what stood in the way of its prefill."""
    _learned.setdefault(type(model) if about_class else model, {})[model.training] = reason


def why_not_learned(model: "PreTrainedModel") -> str | None:
    """Returns what a prefill of `model`, or of its class, has shown before."""
    for key in (model, type(model)):
        if (reason := _learned.get(key, {}).get(model.training)) is not None:
            return reason
    return None


def why_not_loop(decoding_method: Callable) -> str | None:
    """Returns why a decoding method must get all rows, or `None` if it expands them itself."""
    if takes_plan(decoding_method) or "expand_size" in inspect.signature(decoding_method).parameters:
        return None
    name = getattr(decoding_method, "__qualname__", type(decoding_method).__name__)
    return f"the decoding method `{name}` doesn't take `expand_size`"


def takes_plan(decoding_method: Callable) -> bool:
    """Whether the decoding method is one of the library's that take a plan."""
    return is_own(decoding_method) and "prefill_plan" in inspect.signature(decoding_method).parameters


def why_not_cache(cache: Any, batch_size: int, expand_size: int) -> str | None:
    """
    Returns why a cache that the caller passed in can't be expanded after the prefill, or `None` if it can.

    Args:
        cache ([`Cache`], *optional*): The cache, empty or filled with a common prefix of the prompts.
        batch_size (`int`): Number B of prompts.
        expand_size (`int`): Number N of rows per prompt.

    Raises:
        `ValueError`: If the cache has neither B nor B * N rows.
    """
    if cache is None or expand_size == 1:
        return None
    rows = cache_rows(cache)
    if rows == 1 < batch_size:
        return None  # a prefix that all prompts have in common
    if rows not in (None, batch_size, batch_size * expand_size):
        raise ValueError(
            f"`cache` must hold one row per prompt ({batch_size}) or one row per returned beam or sequence "
            f"({batch_size} * {expand_size} = {batch_size * expand_size}), but it holds {rows} rows."
        )
    if rows is not None and rows != batch_size:
        return f"the cache passed in holds {rows} rows already"
    return cannot_expand(cache)


def why_not_methods(model: "PreTrainedModel") -> str | None:
    """Returns which method of `model` comes from outside and would be passed by."""
    method = next((method for method in PASSED_BY if is_overridden(model, method)), None)
    return None if method is None else f"`{method}` is not the library's own, and would not see all rows"


def why_not_inputs(model: "PreTrainedModel", model_kwargs: dict[str, Any]) -> str | None:
    """Returns which input may hold something for each row that the library doesn't know of."""
    if not is_on_probation(model) and not is_overridden(model, "_validate_model_kwargs"):
        return None
    for name, value in model_kwargs.items():
        if not _is_flag(value) and not name.startswith("decoder_") and name not in _known_inputs(type(model)):
            return f"it isn't known what of `{name}` belongs to which row"
    position_ids = model_kwargs.get("position_ids")
    if position_ids is not None and position_ids.ndim == 3:
        return "it isn't known which dimension of `position_ids` holds the rows"
    return None


def _is_flag(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


@functools.lru_cache(maxsize=1024)
def _known_inputs(model_class: type) -> frozenset[str]:
    """Names of the inputs that the library's own methods of a class take."""
    from .utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

    functions = [vars(base).get(method) for base in model_class.__mro__ for method in FORWARDING]
    named = [
        inspect.signature(function).parameters
        for function in functions
        if inspect.isfunction(function) and is_own(function)
    ]
    return frozenset().union(
        ROW_INPUTS, MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL, TransformersKwargs.__optional_keys__, ["cache"], *named
    )


class ModuleFindings(NamedTuple):
    """
    What the modules of a model say about a prefill on fewer rows.

    Args:
        drawing (`str`, *optional*): Which of them draws random numbers or reads other rows, since it is in training mode.
        hooked (`str`, *optional*): Which of them but the model itself runs code from outside, in a hook or in place of its
            `forward`. On the model itself people count calls.
        watched (`tuple`): Those with pre-hooks from outside. Most of these only look on, which shows when they run.
    """

    drawing: str | None
    hooked: str | None
    watched: tuple[nn.Module, ...]


def look_at_modules(model: nn.Module) -> ModuleFindings:
    """Looks at all modules of `model`, once."""
    drawing = hooked = None
    watched = []
    if not all(map(is_own, _global_hooks())):
        hooked = "a hook of all modules may treat rows differently"
    is_training, pending, seen = False, [model], set()
    while pending:
        module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        state = vars(module)
        has_hooks = state["_forward_hooks"] or state["_forward_pre_hooks"] or "forward" in state
        if has_hooks and hooked is None and module is not model:
            hooked = _why_not_hooks(state, module)
            if not all(map(is_own, state["_forward_pre_hooks"].values())):
                watched.append(module)
        if drawing is None and state["training"]:
            is_training = True
            drawing = _why_not_training(module, state)
        pending.extend(child for child in state["_modules"].values() if child is not None)
    if drawing is None and is_training:
        drawing = _why_not_configuration(getattr(model, "config", None))
    return ModuleFindings(drawing, hooked, tuple(watched))


def _global_hooks() -> Iterator[Callable]:
    yield from nn.modules.module._global_forward_hooks.values()
    yield from nn.modules.module._global_forward_pre_hooks.values()


def _why_not_hooks(state: dict[str, Any], module: nn.Module) -> str | None:
    if not all(map(is_own, state["_forward_hooks"].values())):
        return f"a hook of a {type(module).__name__} may treat rows differently"
    if any(_written_code(hook) in _changing_hooks for hook in state["_forward_pre_hooks"].values()):
        return f"a hook changes what a {type(module).__name__} is given"
    if "forward" in state and not is_own(state["forward"]):
        return f"the `forward` of a {type(module).__name__} was replaced by one that may treat rows differently"
    return None


def _why_not_training(module: nn.Module, state: dict[str, Any]) -> str | None:
    """
    Why it matters that `module` is in training mode. Trainers generate so. Most language models have no dropout: then
    equal rows stay equal. Whatever is named after dropout, jitter, noise or masking counts as drawing, whether it is used
    or not. What draws under another name shows in the prefill.
    """
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return "the model is in training mode, where its batch normalization reads all rows"
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return DROPOUT if module.p > 0 else None
    return DROPOUT if any(_is_positive(state[name]) for name in _drawing_names(tuple(state))) else None


@functools.lru_cache(maxsize=4096)
def _drawing_names(names: tuple[str, ...]) -> tuple[str, ...]:
    words = ("drop", "jitter", "noise", "mask_time", "mask_feature")
    return tuple(name for name in names if any(word in name for word in words))


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


def _why_not_configuration(config: Any) -> str | None:
    configs = [config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))]
    states = map(vars, configs)
    return DROPOUT if any(_is_positive(s[name]) for s in states for name in _drawing_names(tuple(s))) else None


def why_not_prefill_once(
    model: "PreTrainedModel",
    decoding_method: Callable,
    generation_config: "GenerationConfig",
    batch_size: int,
    expand_size: int,
    model_kwargs: dict[str, Any],
) -> tuple[str | None, str | None, tuple[nn.Module, ...]]:
    """
    Looks for what stands in the way of a prefill on fewer rows than will be decoded.

    Args:
        model ([`PreTrainedModel`]): The model, or another object with a [`GenerationMixin`].
        decoding_method (`Callable`): The method that runs the decoding loop.
        generation_config ([`GenerationConfig`]): The configuration of this call.
        batch_size (`int`): Number B of prompts.
        expand_size (`int`): Number N of rows per prompt.
        model_kwargs (`dict`): The inputs of the model, not expanded yet.

    Returns:
        `tuple[str | None, str | None, tuple]`: What stands in the way; what makes it doubtful, code that may or may not
        treat rows differently; and modules whose pre-hooks have to be watched.

    Raises:
        `ValueError`: If the cache passed in has neither B nor B * N rows.
    """
    if not isinstance(model, nn.Module):
        return "the model is no `torch.nn.Module`", None, ()
    obstacle = (
        why_not_loop(decoding_method)
        or why_not_cache(model_kwargs.get("cache"), batch_size, expand_size)
        or ("token healing may change each row of the prompt" if generation_config.token_healing else None)
        or model._why_not_prefill_once(model_kwargs)
        or why_not_methods(model)
        or why_not_inputs(model, model_kwargs)
    )
    if obstacle is not None:
        return obstacle, None, ()
    drawing, hooked, watched = look_at_modules(model)
    return drawing, hooked or why_not_learned(model), watched


class HookChangesInputs(Exception):
    """Raised in place of the forward of a module whose pre-hook turns out to do more than to look on."""


# Functions that have been seen to do so
_changing_hooks: WeakSet[Any] = WeakSet()
# Threads that share a model watch its hooks one after the other
_watch_lock = threading.RLock()


def _written_code(hook: Any) -> Any:
    """What stays the same of a hook that is made anew for each call: its function, or its class."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    return getattr(hook, "__code__", type(hook))


@contextmanager
def watch_pre_hooks(modules: Collection[nn.Module]) -> Iterator[None]:
    """
    Lets the pre-hooks of `modules` look on, and stops the forward at the first one that changes what its module is given.

    Raises:
        `HookChangesInputs`: If a hook returns something, or writes into a tensor.
    """

    def watched(hook: Callable) -> Callable:
        def look_on(module: nn.Module, *inputs: Any) -> Any:
            if threading.get_ident() != watching:
                return hook(module, *inputs)
            tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
            # Tensors of inference mode don't count what is written into them
            versions = [None if tensor.is_inference() else tensor._version for tensor in tensors]
            changes = hook(module, *inputs) is not None or None in versions
            if changes or versions != [tensor._version for tensor in tensors]:
                _changing_hooks.add(_written_code(hook))
                raise HookChangesInputs(type(module).__name__)
            return None

        return look_on

    watching = threading.get_ident()
    with _watch_lock if modules else nullcontext():
        kept = [(module, dict(module._forward_pre_hooks)) for module in modules]
        try:
            for module, hooks in kept:
                module._forward_pre_hooks.update({key: watched(hook) for key, hook in hooks.items()})
            yield
        finally:
            for module, hooks in kept:
                module._forward_pre_hooks.update(hooks)


def why_not_expand(
    model: "PreTrainedModel", outputs: ModelOutput, caches: list[Any], rows: int, on_probation: bool
) -> str | None:
    """
    Returns what in the outputs of a prefill can't be expanded with certainty, or `None`.

    Args:
        model ([`PreTrainedModel`]): The model.
        outputs ([`ModelOutput`]): The outputs of its prefill.
        caches (`list`): The caches that it has filled.
        rows (`int`): Number of rows that the prefill had.
        on_probation (`bool`): Whether code from outside has made the outputs: then all that is in them must be known.
    """
    fields = dict.fromkeys(ATTENTION_FIELDS, lambda _: 0) | dict.fromkeys(
        HIDDEN_STATE_FIELDS, model._hidden_state_row_dim
    )
    for name, row_dim in {"logits": lambda _: 0, **fields}.items():
        for tensor in pytree.tree_leaves(outputs.get(name)):
            if isinstance(tensor, torch.Tensor) and tensor.shape[row_dim(tensor)] != rows:
                return f"the prefill of {rows} rows returns `{name}` of shape {tuple(tensor.shape)}"
            # Either dimension may hold the rows
            if on_probation and name in HIDDEN_STATE_FIELDS and tensor is not None and tensor.shape[1] == rows:
                return f"it isn't known which dimension of `{name}` holds the rows"
    for cache in caches:
        if (reason := cannot_expand(cache)) is not None:
            return reason
        if cache_rows(cache) not in (None, rows):
            return f"after the prefill of {rows} rows the cache holds {cache_rows(cache)}"
    return _why_not_known(outputs, caches, rows, fields) if on_probation else None


def _why_not_known(outputs: ModelOutput, caches: list[Any], rows: int, fields: dict[str, Any]) -> str | None:
    if not any(isinstance(cache, Cache) and cache_rows(cache) == rows for cache in caches):
        return "the prefill has filled no `Cache`"
    known = {"logits", "loss", "cache", *fields, *ENCODER_FIELDS}
    for name, value in outputs.items():
        if name not in known and not all(map(_is_flag, pytree.tree_leaves(value))):
            return f"it isn't known what `{name}`, which the prefill returns, holds for each row"
    return None
