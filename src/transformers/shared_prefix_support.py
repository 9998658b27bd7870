# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Who may share a prefix: what has to be known about a model before its cache is shared, and why not if not.

A shared layer returns the suffix from `update` and leaves the prefix in `kwargs` (see `shared_prefix`). That is right for
an attention module only if keys and values go straight from `update` to an attention function that finds the prefix
there. The rule is read off the code of the function that is going to run: a small data-flow analysis of its syntax tree,
once per class. It holds for subclasses and for code from outside, which no table of class names would; what it says about
each class of the library is recorded in a table that a test compares, so that no change of it goes unnoticed.

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

from .generation.prefill_obstacles import look_at_modules
from .integrations.sdpa_attention import sdpa_attention_forward


if TYPE_CHECKING:
    from .modeling_utils import PreTrainedModel

IMPLEMENTATION = "self.config._attn_implementation"

# Arguments of the attention functions that are supported, or that (as the others) ours leave to the mask
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

# What standard eager attention reads: its arguments, and these attributes and global names at most
EAGER_ARGUMENTS = {"query", "key", "value", "attention_mask", "scaling"}
EAGER_NAMES = {
    *("F", "cat", "contiguous", "device", "dropout", "dtype", "expand", "float", "float32", "functional", "getattr"),
    *(
        "hasattr",
        "head_dim",
        "logsumexp",
        "matmul",
        "max",
        "maybe_autocast",
        "nn",
        "num_key_value_groups",
        "repeat_kv",
    ),
    *(
        "reshape",
        "shape",
        "sigmoid",
        "sinks",
        "size",
        "softmax",
        "tanh",
        "to",
        "torch",
        "training",
        "transpose",
        "type",
    ),
    *("unsqueeze", "values", "view"),
}


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


def _asks_for_eager(node: ast.AST) -> bool:
    """The expression `self.config._attn_implementation == "eager"`."""
    return (
        isinstance(node, ast.Compare)
        and _dotted(node.left) == IMPLEMENTATION
        and isinstance(node.ops[0], ast.Eq)
        and getattr(node.comparators[0], "value", None) == "eager"
    )


def _is_interface(node: ast.AST) -> bool:
    """A call `ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, <name>)`."""
    return (
        isinstance(node, ast.Call)
        and _dotted(node.func) == "ALL_ATTENTION_FUNCTIONS.get_interface"
        and len(node.args) == 2
        and _dotted(node.args[0]) == IMPLEMENTATION
        and isinstance(node.args[1], ast.Name)
    )


def _targets(node: ast.AST) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []


def _always(function: ast.FunctionDef, is_such: Callable[[ast.AST], bool]) -> set[str]:
    """The variables that are only ever assigned such values."""
    names = [node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    such = [
        target.id
        for node in ast.walk(function)
        for target in _targets(node)
        if _name_of(target) and is_such(node.value)
    ]
    return {name for name in such if names.count(name) == such.count(name)}


class _Flow:
    """
    Follows keys and values through the statements of a method. The state maps a variable to where it may come from:
    `"update"`, or `"layer"` (read from a cross-attention cache, or returned by the update that fills it). A variable has
    one role in the whole method: it holds keys, or values.
    """

    def __init__(self, function: ast.FunctionDef, is_eager: bool):
        self.kwargs = function.args.kwarg.arg if function.args.kwarg else None
        self.is_eager = is_eager
        self.use = CacheUse()
        self.eager_flags = _always(function, _asks_for_eager)
        self.interfaces = _always(function, _is_interface)
        self.roles: dict[str, set[str]] = {"keys": set(), "values": set()}
        self.follow(function.body, {})
        nodes = list(ast.walk(function))
        self.use.eager_functions = {node.args[1].id for node in nodes if _is_interface(node)}
        if any(_name_of(node) == self.kwargs and isinstance(node.ctx, ast.Store) for node in nodes if _name_of(node)):
            self.reject({"update"}, f"assigns to `{self.kwargs}`")
        if self.use.reads_layers and not any(getattr(node, "attr", None) == "cross_attention_cache" for node in nodes):
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
            elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and len(_targets(statement)) == 1:
                self.follow_assignment(_targets(statement)[0], statement.value, state)
            elif isinstance(statement, ast.AugAssign) and _name_of(statement.target) in state:
                self.reject(state[statement.target.id], "uses keys or values in another way than attention")
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
        return not self.is_eager and (_name_of(test) in self.eager_flags or _asks_for_eager(test))

    def follow_assignment(self, target: ast.expr, value: ast.expr | None, state: dict[str, set[str]]) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for part, part_value in zip(target.elts, value.elts, strict=True):
                self.follow_assignment(part, part_value, state)
        elif value is None:
            return
        elif _is_cache_update(value):
            self.follow_update(target, value, state)
        elif _is_layer_read(value) and _name_of(target):
            self.use.reads_layers = True
            state[target.id] = {"layer"}
            self.roles[value.attr].add(target.id)
        else:
            self.check(value, state)
            self.check(target, state)
            for node in ast.walk(target):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    state.pop(node.id, None)

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
        for name, role in zip(names, self.roles, strict=False):
            state[name] = {source}
            self.roles[role].add(name)

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
        key, value = ([*map(_name_of, call.args[2:4])] + [None] * 2)[:2]
        sources = state.get(key, set()) | state.get(value, set())
        are_pair = (
            key in self.roles["keys"] - self.roles["values"] and value in self.roles["values"] - self.roles["keys"]
        )
        if state.get(key) != state.get(value) or (sources and not are_pair):
            self.reject(sources, "pays attention to keys and values that don't come from the same place")
        unknown = {keyword.arg for keyword in call.keywords if keyword.arg} - SUPPORTED_ARGUMENTS
        if unknown:
            self.reject(sources, f"passes the attention function {', '.join(f'`{name}`' for name in sorted(unknown))}")
        unpacked = [_name_of(keyword.value) for keyword in call.keywords if keyword.arg is None]
        if unpacked != [self.kwargs]:
            self.reject(sources & {"update"}, "does not pass its `kwargs` to the attention function")
        others = [argument for i, argument in enumerate(call.args) if i not in (2, 3) or _name_of(argument) is None]
        for argument in [*others, *(keyword.value for keyword in call.keywords)]:
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


def _syntax(function: Callable) -> ast.FunctionDef | None:
    """The syntax tree of a function, `None` if there is no source code to read."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return None
    # A method comes with its indentation
    is_method = source[0].isspace()
    statement = ast.parse(f"class _:\n{source}" if is_method else source).body[0]
    return statement.body[0] if is_method else statement


@cache
def _cache_uses(function: Callable, is_eager: bool) -> CacheUse | None:
    """What a method does with a cache, `None` if it does nothing with keys and values of one."""
    code = getattr(function, "__code__", None)
    if code is None or not {"update", "layers"} & set(code.co_names):
        return None
    syntax = _syntax(function)
    if syntax is None:
        reasons = ["has source code that can't be read"]
        return CacheUse(reasons, reasons, updates=True, reads_layers=True)
    use = analyze_function(syntax, is_eager)
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
        if not _is_standard_eager(function.__globals__.get(name)):
            return f"has an eager attention `{name}` of its own kind"
    return None


def is_standard_eager(function: ast.FunctionDef) -> bool:
    """
    Whether an eager attention function of a modeling file computes what the shared one does: scaled scores, an
    optional softcap, position bias, mask and sinks, a softmax, the product with the values.
    """
    nodes = [node for statement in function.body for node in ast.walk(statement)]
    loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    own = {argument.arg for argument in function.args.args} | stored
    return (
        loaded >= EAGER_ARGUMENTS
        and {"matmul", "softmax"} <= attributes
        and (loaded - own) | attributes <= EAGER_NAMES
    )


@cache
def _is_standard_eager(eager_attention: Callable) -> bool:
    if not getattr(eager_attention, "__module__", "").startswith("transformers.models."):
        return False
    function = _syntax(eager_attention)
    return function is not None and is_standard_eager(function)


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
    if model.training and look_at_modules(model).drawing is not None:
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
