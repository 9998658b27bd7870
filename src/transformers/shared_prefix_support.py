# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Who may share a prefix: what has to be known about a model before its cache is shared, and why not if not.

A shared layer returns the suffix from `update` and leaves the prefix in `kwargs` (see `shared_prefix`). That is right for
an attention module only if keys and values go straight from `update` to an attention function that finds the prefix
there. The rule is read off the code of the function that is going to run: a small data-flow analysis of its syntax tree,
once per class. It holds for subclasses and for code from outside, which no table of class names would; what it says about
each of upstream's classes is recorded in a table that a test compares, so that no change of it goes unnoticed.

Rejected is whatever isn't recognized: source that can't be read, a `forward` replaced on the instance, other uses of
keys or values (even of their shape: the suffix is shorter), unknown arguments, an attention function of unknown kind.
"""

import ast
import inspect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from torch import nn

from .integrations.sdpa_attention import sdpa_attention_forward


if TYPE_CHECKING:
    from .modeling_utils import PreTrainedModel

IMPLEMENTATION = "self.config._attn_implementation"

# Arguments of the attention functions that are supported, or that (as upstream's) ours leave to the mask
SUPPORTED_ARGUMENTS = {
    "attention_mask",
    "dropout",
    "is_causal",
    "output_attentions",
    "position_bias",
    "position_ids",
    "s_aux",
    "scaling",
    "sliding_window",
    "softcap",
}

# Attributes and global names that occur in upstream's eager attention functions
EAGER_NAMES = set(
    ["F", "cat", "contiguous", "dropout", "dtype", "expand", "float", "float32", "functional", "getattr", "hasattr", "head_dim", "logsumexp", "matmul", "max", "nn", "num_key_value_groups", "repeat_kv", "reshape", "shape", "sigmoid", "sinks", "size", "softmax", "tanh", "to", "torch", "training", "transpose", "type", "unsqueeze", "values", "view", "maybe_autocast", "device"]
)


@dataclass
class CacheUse:
    """
    What a method does with keys and values that come from a cache.

    Attributes:
        self_attention (`list[str]`): What stands in the way of sharing what `update` returns.
        cross_attention (`list[str]`): What stands in the way of keeping what is read from a layer at B rows.
        updates (`bool`): Whether it calls `update` of a cache of self-attention.
        reads_layers (`bool`): Whether it reads keys and values of a cross-attention cache.
        eager_functions (`set[str]`): Names of the eager attention functions that it falls back to.
    """

    self_attention: list[str] = field(default_factory=list)
    cross_attention: list[str] = field(default_factory=list)
    updates: bool = False
    reads_layers: bool = False
    eager_functions: set[str] = field(default_factory=set)


def _name_of(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def _dotted(node: ast.AST) -> str:
    """`"a.b.c"` for an attribute of an attribute of a variable, `""` for other expressions."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def _is_cache_update(node: ast.AST) -> bool:
    """
    A call `<cache>.update(key, value, layer_idx, ...)`. Dictionaries are updated with fewer arguments, the padding caches
    of convolutions with the convolution itself as the third.
    """
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "update":
        return False
    has_index = len(node.args) >= 3 and _name_of(node.args[2]) != "self"
    return bool(_dotted(node.func)) and (has_index or any(keyword.arg == "kwargs" for keyword in node.keywords))


def _is_layer_read(node: ast.AST) -> bool:
    """An expression `<cache>.layers[index].keys`, or `.values`."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr in ("keys", "values")
        and isinstance(node.value, ast.Subscript)
        and isinstance(node.value.value, ast.Attribute)
        and node.value.value.attr == "layers"
    )


class _Flow:
    """
    Follows keys and values through the statements of a method. The state maps a variable to where it may come from:
    `"update"`, or `"layer"` (read from a cross-attention cache, or returned by the update that fills it).
    """

    def __init__(self, function: ast.FunctionDef, is_eager: bool):
        self.kwargs = function.args.kwarg.arg if function.args.kwarg else None
        self.is_eager = is_eager
        self.use = CacheUse()
        self.eager_flags: set[str] = set()
        self.interfaces: set[str] = set()
        self.follow(function.body, {})
        mentions_cross_cache = any(
            isinstance(node, ast.Attribute) and node.attr == "cross_attention_cache" for node in ast.walk(function)
        )
        if self.use.reads_layers and not mentions_cross_cache:
            self.reject({"update", "layer"}, "reads keys from a cache that is not an encoder-decoder cache")

    def reject(self, sources: set[str], reason: str) -> None:
        reasons = {"update": self.use.self_attention, "layer": self.use.cross_attention}
        for source in sources:
            if reason not in reasons[source]:
                reasons[source].append(reason)

    def follow(self, statements: list[ast.stmt], state: dict[str, set[str]]) -> dict[str, set[str]] | None:
        """Returns the state after `statements`, `None` if they don't come to their end."""
        for statement in statements:
            if isinstance(statement, ast.If):
                state = self.follow_branches(statement, state)
            elif isinstance(statement, (ast.With, ast.For, ast.While, ast.Try)):
                state = self.follow_block(statement, state)
            elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
                self.follow_assignment(statement, state)
            else:
                self.check(statement, state)
            if state is None or isinstance(statement, (ast.Return, ast.Raise)):
                return None
        return state

    def follow_branches(self, statement: ast.If, state: dict[str, set[str]]) -> dict[str, set[str]] | None:
        self.check(statement.test, state)
        ends = [self.follow(statement.orelse, {**state})]
        if not self.is_false(statement.test):
            ends.append(self.follow(statement.body, {**state}))
        ends = [end for end in ends if end is not None]
        if not ends:
            return None
        return {name: set().union(*(end.get(name, set()) for end in ends)) for end in ends for name in end}

    def follow_block(self, statement: ast.stmt, state: dict[str, set[str]]) -> dict[str, set[str]]:
        """Blocks other than `if` are of no use to attention modules: keys and values must not be touched there."""
        for node in ast.walk(statement):
            if _is_cache_update(node) or _is_layer_read(node):
                self.reject({"update", "layer"}, f"`{type(statement).__name__.lower()}` block around the cache")
        self.check(statement, state)
        return state

    def is_false(self, test: ast.expr) -> bool:
        """Whether a condition is false because it asks for eager attention, which is not in use."""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            return any(self.is_false(operand) for operand in test.values)
        return not self.is_eager and (_name_of(test) in self.eager_flags or self.asks_for_eager(test))

    @staticmethod
    def asks_for_eager(node: ast.expr) -> bool:
        return (
            isinstance(node, ast.Compare)
            and _dotted(node.left) == IMPLEMENTATION
            and isinstance(node.ops[0], ast.Eq)
            and getattr(node.comparators[0], "value", None) == "eager"
        )

    def follow_assignment(self, statement: ast.Assign | ast.AnnAssign, state: dict[str, set[str]]) -> None:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        target, value = targets[0], statement.value
        names = [
            node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        ]
        for name in names:
            state.pop(name, None) if not self.reads(value, name) else None
        pairs = zip(target.elts, value.elts, strict=False) if isinstance(value, ast.Tuple) and isinstance(
            target, ast.Tuple) else [(target, value)]  # fmt: skip
        for part, part_value in pairs:
            self.follow_value(part, part_value, state)
        if self.kwargs in names:
            self.reject({"update"}, f"assigns to `{self.kwargs}`")

    @staticmethod
    def reads(node: ast.AST | None, name: str) -> bool:
        return node is not None and any(_name_of(part) == name for part in ast.walk(node))

    def follow_value(self, target: ast.expr, value: ast.expr | None, state: dict[str, set[str]]) -> None:
        if value is None:
            return
        if _is_cache_update(value):
            self.follow_update(target, value, state)
        elif _is_layer_read(value) and _name_of(target):
            self.use.reads_layers = True
            state[target.id] = {"layer"}
        else:
            self.check(value, state)
            self.check(target, state)
            if _name_of(target):
                state.pop(target.id, None)
            if self.is_interface(value):
                self.interfaces.add(_name_of(target) or "")
                self.use.eager_functions.add(value.args[1].id)
            if self.asks_for_eager(value):
                self.eager_flags.add(_name_of(target) or "")

    @staticmethod
    def is_interface(value: ast.expr) -> bool:
        return (
            isinstance(value, ast.Call)
            and _dotted(value.func) == "ALL_ATTENTION_FUNCTIONS.get_interface"
            and len(value.args) == 2
            and _dotted(value.args[0]) == IMPLEMENTATION
            and isinstance(value.args[1], ast.Name)
        )

    def follow_update(self, target: ast.expr, call: ast.Call, state: dict[str, set[str]]) -> None:
        source = "layer" if "cross_attention_cache" in _dotted(call.func) else "update"
        if source == "update":
            self.use.updates = True
            passed = [_name_of(keyword.value) for keyword in call.keywords if keyword.arg == "kwargs"]
            if self.kwargs is None or passed != [self.kwargs]:
                self.reject({"update"}, "calls `update` without its `kwargs`")
        names = [_name_of(element) for element in target.elts] if isinstance(target, ast.Tuple) else []
        if len(names) != 2 or None in names:
            self.reject({"update", "layer"}, "does not assign what `update` returns to a key and a value")
        for name in names:
            state[name] = {source}

    def check(self, node: ast.AST, state: dict[str, set[str]]) -> None:
        """Rejects uses of keys and values in an expression or a simple statement, calls of the interface excepted."""
        if isinstance(node, ast.Call) and _name_of(node.func) in self.interfaces:
            self.check_attention_call(node, state)
        elif _is_cache_update(node):
            self.reject({"update", "layer"}, "does not assign what `update` returns to a key and a value")
        elif _is_layer_read(node):
            self.reject({"update", "layer"}, "uses keys of a layer without assigning them")
        elif self.is_length(node) and _name_of(node.value.value) in state:
            self.reject(state[node.value.value.id] & {"update"}, "takes a length from the keys after `update`")
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in state:
            self.reject(state[node.id], "uses keys or values in another way than attention")
        else:
            for child in ast.iter_child_nodes(node):
                self.check(child, state)

    @staticmethod
    def is_length(node: ast.AST) -> bool:
        """`x.shape[-2]`, or `x.shape[2]`: the number of keys, not that of rows."""
        is_shape = (
            isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
        )
        return is_shape and ast.unparse(node.slice) in ("-2", "2")

    def check_attention_call(self, call: ast.Call, state: dict[str, set[str]]) -> None:
        key, value = [_name_of(argument) for argument in call.args[2:4]] or (None, None)
        sources = state.get(key, set()) | state.get(value, set())
        if len(call.args) < 4 or state.get(key) != state.get(value):
            self.reject(sources, "pays attention to keys and values that don't come from the same place")
        unknown = {keyword.arg for keyword in call.keywords if keyword.arg} - SUPPORTED_ARGUMENTS
        if unknown:
            self.reject(sources, f"passes the attention function {', '.join(f'`{name}`' for name in sorted(unknown))}")
        unpacked = [_name_of(keyword.value) for keyword in call.keywords if keyword.arg is None]
        if unpacked != [self.kwargs]:
            self.reject(sources & {"update"}, "does not pass its `kwargs` to the attention function")
        others = [*call.args[:2], *call.args[4:], *(keyword.value for keyword in call.keywords)]
        for argument in others:
            self.check(argument, state)


def analyze_function(function: ast.FunctionDef, is_eager: bool) -> CacheUse:
    """
    Tells what a method does with the keys and values of a cache.

    Args:
        function (`ast.FunctionDef`): The method.
        is_eager (`bool`): Whether eager attention is in use. What is done for eager attention alone doesn't count else.
    """
    if not any(_is_cache_update(node) or _is_layer_read(node) for node in ast.walk(function)):
        return CacheUse()
    return _Flow(function, is_eager).use


@cache
def _cache_uses(function: Callable, is_eager: bool) -> CacheUse | None:
    """What a method does with a cache, `None` if it does nothing with keys and values of one."""
    code = getattr(function, "__code__", None)
    if code is None or not {"update", "layers"} & set(code.co_names):
        return None
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        reasons = ["has source code that can't be read"]
        return CacheUse(reasons, reasons, updates=True, reads_layers=True)
    # A method comes with its indentation
    statement = ast.parse(f"class _:\n{source}" if source[0].isspace() else source).body[0]
    use = analyze_function(statement.body[0] if source[0].isspace() else statement, is_eager)
    return use if use.updates or use.reads_layers else None


def _methods(module_class: type[nn.Module]) -> list[Callable]:
    """The functions that a class defines or inherits, without those of `nn.Module`, and without their decorators."""
    bases = module_class.__mro__[: module_class.__mro__.index(nn.Module)]
    attributes = [
        getattr(module_class, name, None) for name in sorted({name for base in bases for name in vars(base)})
    ]
    return [inspect.unwrap(attribute) for attribute in attributes if inspect.isfunction(attribute)]


def _replaced_forward(module: nn.Module) -> bool:
    """Whether the instance has a `forward` of its own. Hooks of accelerate run the class's one, and tell so."""
    replaced = vars(module).get("forward")
    if replaced is None:
        return False
    original = getattr(vars(module).get("_old_forward"), "__func__", None)
    return not hasattr(module, "_hf_hook") or original is not type(module).forward


def _attention_function_obstacle(module: nn.Module, function: Callable, use: CacheUse) -> str | None:
    """What stands in the way of handing a prefix to the attention function that `function` fetches."""
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    interface = function.__globals__.get("ALL_ATTENTION_FUNCTIONS")
    if interface is None or not use.eager_functions:
        return "has its own attention code"
    if implementation == "sdpa":
        is_ours = interface.get("sdpa") is sdpa_attention_forward
        return None if is_ours else "replaces the attention function `sdpa`"
    if implementation != "eager":
        return f"uses the attention implementation {implementation!r}, which can't read a prefix: use 'sdpa'"
    for name in use.eager_functions:
        eager = function.__globals__.get(name)
        if not getattr(eager, "__module__", "").startswith("transformers.models.") or not is_standard_eager(eager):
            return f"has an eager attention `{name}` of its own kind"
    return None


def is_standard_eager(eager_attention: Callable) -> bool:
    """
    Whether an eager attention function of upstream's modeling files computes what the shared one does: scaled scores, an
    optional softcap, position bias, mask and sinks, a softmax, the product with the values.
    """
    code = getattr(eager_attention, "__code__", None)
    return code is not None and {"matmul", "softmax"} <= set(code.co_names) <= EAGER_NAMES


def cannot_share(model: "PreTrainedModel", kind: str = "self_attention") -> str | None:
    """
    Tells what stands in the way of sharing a prefix, before anything is computed.

    Args:
        model ([`PreTrainedModel`]): The model that is going to decode.
        kind (`str`, *optional*, defaults to `"self_attention"`): `"self_attention"`, or `"cross_attention"`: whether keys
            and values of the encoder may stay at one row per batch item.

    Returns:
        `str` or `None`: The reason, beginning with the name of the class in whose code it lies, `None` if sharing is
        right.

    Raises:
        `ValueError`: If `kind` is neither of the two.
    """
    if kind not in ("self_attention", "cross_attention"):
        raise ValueError(f"`kind` must be 'self_attention' or 'cross_attention', but is {kind!r}.")
    if model.training:
        return f"{type(model).__name__} is in training mode, where attention may drop out"
    modules_by_class = defaultdict(list)
    for module in model.modules():
        modules_by_class[type(module)].append(module)
    has_attention = False
    for module_class, modules in modules_by_class.items():
        for function in _methods(module_class):
            for module in modules:
                is_eager = getattr(getattr(module, "config", None), "_attn_implementation", None) == "eager"
                use = _cache_uses(function, is_eager)
                if use is None or not (use.updates if kind == "self_attention" else use.reads_layers):
                    break
                has_attention = True
                obstacle = _obstacle(module, function, use, kind)
                if obstacle is not None:
                    return f"{module_class.__name__} {obstacle}"
    return None if has_attention else f"{type(model).__name__} has no {kind.replace('_', '-')} with a cache to share"


def _obstacle(module: nn.Module, function: Callable, use: CacheUse, kind: str) -> str | None:
    if _replaced_forward(module):
        return "has a `forward` of its own on the instance"
    obstacles = getattr(use, kind)
    return obstacles[0] if obstacles else _attention_function_obstacle(module, function, use)
