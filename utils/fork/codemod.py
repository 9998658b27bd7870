# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
The few kinds of edit that the fork makes to upstream's files, on LibCST syntax trees.

An edit names the enclosing definition (its scope) and one place inside it. It is applied to exactly one match: none or
several, or an edit that changes nothing, is an `EditError`, so that a new upstream release can't be edited by luck.
Statements and expressions are compared by their abstract syntax: layout and comments don't count.
"""

import ast
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import libcst as cst


class EditError(ValueError):
    """An edit that doesn't apply to exactly one place, that changes nothing, or that leaves no valid Python."""


def _code(node: cst.CSTNode) -> str:
    return node.code if isinstance(node, cst.Module) else cst.Module([]).code_for_node(node)


def _syntax(code: str) -> str:
    """The abstract syntax of statements, as text that can be compared."""
    return ast.dump(ast.parse(textwrap.dedent(code)))


def _expression_syntax(code: str) -> str:
    # In parentheses, and those closed on a line of their own, an expression may span lines and hold comments
    return ast.dump(ast.parse(f"({code.strip()}\n)", mode="eval"))


def _statements(code: str) -> list[cst.BaseStatement]:
    """Parses statements, with the comments around them."""
    module = cst.parse_module(textwrap.dedent(code).strip("\n"))
    if module.footer:
        raise EditError("a comment must stand before a statement, not after the last one")
    first, *others = module.body
    return [first.with_changes(leading_lines=[*module.header, *first.leading_lines]), *others]


def _equal(one: cst.CSTNode, other: cst.CSTNode) -> bool:
    if isinstance(one, cst.Module):  # writing out a module is slow, and most of its statements are the same objects
        pairs = zip(one.body, other.body, strict=False)
        return len(one.body) == len(other.body) and all(a is b or _code(a) == _code(b) for a, b in pairs)
    return _code(one) == _code(other)


def _change_scope(node: cst.CSTNode, names: Sequence[str], change: Callable) -> cst.CSTNode:
    """Rebuilds `node` with `change` applied to the definition reached through `names` (outermost first)."""
    if not names:
        changed = change(node)
        if _equal(changed, node):
            raise EditError("changes nothing")
        return changed
    block = node if isinstance(node, cst.Module) else node.body
    found = [
        position
        for position, statement in enumerate(block.body)
        if isinstance(statement, (cst.ClassDef, cst.FunctionDef)) and statement.name.value == names[0]
    ]
    if len(found) != 1:
        raise EditError(f"definition `{names[0]}` found {len(found)} times")
    body = list(block.body)
    body[found[0]] = _change_scope(body[found[0]], names[1:], change)
    new_block = block.with_changes(body=body)
    return new_block if isinstance(node, cst.Module) else node.with_changes(body=new_block)


class _Replacer(cst.CSTTransformer):
    """Replaces every node of a kind for which `matches` holds, and counts them."""

    def __init__(self, kind: type[cst.CSTNode], matches: Callable, replacement: Callable):
        super().__init__()
        self.kind, self.matches, self.replacement, self.count = kind, matches, replacement, 0

    def on_leave(self, original_node, updated_node):
        if isinstance(original_node, self.kind) and self.matches(original_node):
            self.count += 1
            return self.replacement(updated_node)
        return updated_node


def _visit_statements(module: cst.Module, replacer: _Replacer) -> cst.Module:
    """Visits a module's statements one by one: visited as a whole, all of them would come out as new objects."""
    body = []
    for statement in module.body:
        count = replacer.count
        changed = statement.visit(replacer)
        if replacer.count == count:
            body.append(statement)
        elif isinstance(changed, cst.FlattenSentinel):
            body.extend(changed)
        else:
            body.append(changed)
    return module.with_changes(body=body)


def _replace_one(
    node: cst.CSTNode, what: str, kind: type[cst.CSTNode], matches: Callable, replacement: Callable
) -> cst.CSTNode:
    replacer = _Replacer(kind, matches, replacement)
    changed = _visit_statements(node, replacer) if isinstance(node, cst.Module) else node.visit(replacer)
    if replacer.count != 1:
        raise EditError(f"{what} found {replacer.count} times")
    return changed


def _insert(items: Sequence[cst.CSTNode], at: int, new: Sequence[cst.CSTNode], opening: cst.CSTNode) -> list:
    """Inserts arguments or parameters before position `at`, in the layout of those that are there."""
    items, new = list(items), list(new)
    one_a_line = isinstance(opening, cst.ParenthesizedWhitespace)
    separator = cst.Comma(whitespace_after=opening if one_a_line else cst.SimpleWhitespace(" "))
    if len(items) > 1:
        separator = items[0].comma
    last = {"comma": separator if at < len(items) else cst.MaybeSentinel.DEFAULT}
    if at > 0:
        # The new last one takes over what stood between its neighbour and the parenthesis
        space = "whitespace_after_arg" if isinstance(items[0], cst.Arg) else "whitespace_after_param"
        last = {"comma": items[at - 1].comma, space: getattr(items[at - 1], space)}
        items[at - 1] = items[at - 1].with_changes(**{"comma": separator, space: cst.SimpleWhitespace("")})
    new = [item.with_changes(comma=separator) for item in new[:-1]] + [new[-1].with_changes(**last)]
    return [*items[:at], *new, *items[at:]]


@dataclass(frozen=True, kw_only=True)
class Edit:
    """
    One declared change of one upstream file.

    Args:
        path (`str`): The file, relative to the `transformers` package.
        reason (`str`): Why the fork can't do without it.
        scope (`str`): Qualified name of the enclosing definition, empty for the module itself.
    """

    path: str
    reason: str
    scope: str = ""

    def change(self, node: cst.CSTNode) -> cst.CSTNode:
        """Returns the scope's definition, changed."""
        raise NotImplementedError

    def apply(self, module: cst.Module) -> cst.Module:
        """
        Returns `module`, changed.

        Raises:
            `EditError`: The scope or the place in it is there not at all or several times, nothing would change, or
                what comes out isn't Python.
        """
        try:
            return _change_scope(module, self.scope.split(".") if self.scope else [], self.change)
        except (EditError, cst.CSTValidationError) as error:
            raise EditError(f"{self}: {error}") from error

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.path}{f':{self.scope}' if self.scope else ''})"


@dataclass(frozen=True, kw_only=True)
class AddImport(Edit):
    """Adds the import `statement` after the module's one top-level `from after import ...`."""

    statement: str
    after: str

    def change(self, node: cst.Module) -> cst.Module:
        def imports_after(line: cst.CSTNode) -> bool:
            if not isinstance(line, cst.SimpleStatementLine) or not isinstance(line.body[0], cst.ImportFrom):
                return False
            imported = line.body[0]
            module = _code(imported.module) if imported.module is not None else ""
            return "." * len(imported.relative) + module == self.after

        wanted = _syntax(self.statement)
        if any(isinstance(line, cst.SimpleStatementLine) and _syntax(_code(line)) == wanted for line in node.body):
            raise EditError(f"`{self.statement}` is there already")
        found = [position for position, line in enumerate(node.body) if imports_after(line)]
        if len(found) != 1:
            raise EditError(f"`from {self.after} import` found {len(found)} times")
        body = list(node.body)
        body[found[0] + 1 : found[0] + 1] = _statements(self.statement)
        return node.with_changes(body=body)


@dataclass(frozen=True, kw_only=True)
class AddBase(Edit):
    """Puts the class `base` first among the bases of the class that is the scope."""

    base: str

    def change(self, node: cst.ClassDef) -> cst.ClassDef:
        wanted = _expression_syntax(self.base)
        if any(_expression_syntax(_code(base.value)) == wanted for base in node.bases):
            raise EditError(f"base `{self.base}` is there already")
        parenthesised = isinstance(node.lpar, cst.LeftParen)
        left, right = (node.lpar, node.rpar) if parenthesised else (cst.LeftParen(), cst.RightParen())
        # LibCST keeps keywords (`metaclass=...`) apart, but they are written after the bases
        arguments = [*node.bases, *node.keywords]
        arguments = _insert(arguments, 0, [cst.Arg(cst.parse_expression(self.base))], left.whitespace_after)
        split = len(node.bases) + 1
        return node.with_changes(bases=arguments[:split], keywords=arguments[split:], lpar=left, rpar=right)


@dataclass(frozen=True, kw_only=True)
class AddParameter(Edit):
    """Adds `parameter` (`name: type = default`) as the last one before `**kwargs` of the function that is the scope."""

    parameter: str

    def change(self, node: cst.FunctionDef) -> cst.FunctionDef:
        parameters = node.params
        new = cst.parse_statement(f"def f({self.parameter}): pass").params.params[0]
        existing = [*parameters.posonly_params, *parameters.params, *parameters.kwonly_params]
        if any(parameter.name.value == new.name.value for parameter in existing):
            raise EditError(f"parameter `{new.name.value}` is there already")
        if not parameters.kwonly_params and isinstance(parameters.star_arg, cst.Param):
            raise EditError("the function takes `*args` and nothing by keyword after it: not provided for")
        group = "kwonly_params" if parameters.kwonly_params else "params"
        members = getattr(parameters, group)
        members = _insert(members, len(members), [new], node.whitespace_before_params)
        return node.with_changes(params=parameters.with_changes(**{group: members}))


@dataclass(frozen=True, kw_only=True)
class RedirectCall(Edit):
    """Sends the scope's one call of `call` to `to`, with the keyword `arguments` in addition."""

    call: str
    to: str
    arguments: dict[str, str] = field(default_factory=dict)

    def change(self, node: cst.FunctionDef) -> cst.FunctionDef:
        no_space = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
        added = [
            cst.Arg(keyword=cst.Name(name), value=cst.parse_expression(value), equal=no_space)
            for name, value in self.arguments.items()
        ]

        def redirect(call: cst.Call) -> cst.Call:
            arguments = call.args
            if added:
                # Keywords go before `**kwargs`
                end = next((i for i, argument in enumerate(arguments) if argument.star == "**"), len(arguments))
                arguments = _insert(arguments, end, added, call.whitespace_before_args)
            return call.with_changes(func=cst.parse_expression(self.to), args=arguments)

        wanted = _expression_syntax(self.call)
        kind = type(cst.parse_expression(self.call))

        def matches(call: cst.Call) -> bool:
            return isinstance(call.func, kind) and _expression_syntax(_code(call.func)) == wanted

        return _replace_one(node, f"call of `{self.call}`", cst.Call, matches, redirect)


@dataclass(frozen=True, kw_only=True)
class ReplaceStatement(Edit):
    """
    Replaces the scope's one simple statement `old` by the statements `new`. One among `new` that equals `old` keeps
    upstream's layout and comments, so that statements can be added before or after it.
    """

    old: str
    new: str

    def change(self, node: cst.CSTNode) -> cst.CSTNode:
        wanted = _syntax(self.old)
        kind = type(_statements(self.old)[0].body[0])

        def replace(line: cst.SimpleStatementLine) -> cst.FlattenSentinel:
            statements = _statements(self.new)
            for position, statement in enumerate(statements):
                if _syntax(_code(statement)) == wanted:
                    statements[position] = line.with_changes(leading_lines=statement.leading_lines)
            # What upstream says before the statement stays in front
            first = statements[0].with_changes(leading_lines=[*line.leading_lines, *statements[0].leading_lines])
            return cst.FlattenSentinel([first, *statements[1:]])

        def matches(line: cst.SimpleStatementLine) -> bool:
            return isinstance(line.body[0], kind) and _syntax(_code(line)) == wanted

        return _replace_one(node, f"statement `{self.old.strip()}`", cst.SimpleStatementLine, matches, replace)


@dataclass(frozen=True, kw_only=True)
class ReplaceExpression(Edit):
    """Replaces the scope's one expression `old` by `new`, in parentheses where its place needs them."""

    old: str
    new: str

    def change(self, node: cst.CSTNode) -> cst.CSTNode:
        wanted = _expression_syntax(self.old)
        kind = type(cst.parse_expression(self.old))

        def replaced_by(new: str) -> cst.CSTNode:
            return _replace_one(
                node,
                f"expression `{self.old}`",
                kind,
                lambda expression: _expression_syntax(_code(expression)) == wanted,
                lambda _: cst.parse_expression(new),
            )

        plain = replaced_by(self.new)
        if isinstance(cst.parse_expression(self.new), (cst.Name, cst.Attribute, cst.Call, cst.Subscript)):
            return plain  # binds as tightly as parentheses do
        safe = replaced_by(f"({self.new})")
        try:
            return plain if _syntax(_code(plain)) == _syntax(_code(safe)) else safe
        except SyntaxError:
            return safe


@dataclass(frozen=True, kw_only=True)
class AddToDocstring(Edit):
    """
    Adds the lines `text`, and a blank one if `is_entry`, to the docstring of the definition that is the scope, in front
    of its one line `before`.
    """

    before: str
    text: str
    is_entry: bool = True

    def change(self, node: cst.CSTNode) -> cst.CSTNode:
        if node.get_docstring() is None:
            raise EditError("there is no docstring")
        statement = node.body.body[0]
        lines = statement.body[0].value.value.split("\n")
        found = [position for position, line in enumerate(lines) if line.strip() == self.before]
        if len(found) != 1:
            raise EditError(f"line `{self.before}` found {len(found)} times in the docstring")
        indentation = lines[found[0]].removesuffix(self.before)
        text = textwrap.indent(textwrap.dedent(self.text).strip("\n"), indentation)
        lines[found[0] : found[0]] = [*text.split("\n"), *([""] if self.is_entry else [])]
        expression = statement.body[0].with_changes(value=cst.SimpleString("\n".join(lines)))
        body = [statement.with_changes(body=[expression]), *node.body.body[1:]]
        return node.with_changes(body=node.body.with_changes(body=body))


@dataclass(frozen=True, kw_only=True)
class AddDefinitions(Edit):
    """Adds the functions or classes `code` to the scope, after its one definition `after`."""

    code: str
    after: str

    def change(self, node: cst.CSTNode) -> cst.CSTNode:
        block = node if isinstance(node, cst.Module) else node.body
        names = [
            statement.name.value if isinstance(statement, (cst.ClassDef, cst.FunctionDef)) else None
            for statement in block.body
        ]
        first, *others = _statements(self.code)
        line = cst.EmptyLine(indent=False)
        new = [first.with_changes(leading_lines=[line, *first.leading_lines]), *others]
        if not all(isinstance(statement, (cst.ClassDef, cst.FunctionDef)) for statement in new):
            raise EditError("`code` must hold definitions alone")
        for name in (statement.name.value for statement in new):
            if name in names:
                raise EditError(f"definition `{name}` is there already")
        if (count := names.count(self.after)) != 1:
            raise EditError(f"definition `{self.after}` found {count} times")
        body = list(block.body)
        at = names.index(self.after) + 1
        body[at:at] = new
        new_block = block.with_changes(body=body)
        return new_block if isinstance(node, cst.Module) else node.with_changes(body=new_block)


@dataclass(frozen=True, kw_only=True)
class RemoveDefinition(Edit):
    """Removes the function or class `name` from the scope, with the comments in front of it."""

    name: str

    def change(self, node: cst.CSTNode) -> cst.CSTNode:
        block = node if isinstance(node, cst.Module) else node.body
        kept = [
            statement
            for statement in block.body
            if not isinstance(statement, (cst.ClassDef, cst.FunctionDef)) or statement.name.value != self.name
        ]
        if (count := len(block.body) - len(kept)) != 1:
            raise EditError(f"definition `{self.name}` found {count} times")
        new_block = block.with_changes(body=kept)
        return new_block if isinstance(node, cst.Module) else node.with_changes(body=new_block)


def apply_edits(source: str, edits: Sequence[Edit]) -> str:
    """
    Applies the edits of one file in order. Each one starts from what the one before has left.

    Raises:
        `EditError`: An edit doesn't apply to exactly one place, changes nothing, or what comes out isn't Python.
    """
    module = cst.parse_module(source)
    for edit in edits:
        module = edit.apply(module)
    try:
        compile(module.code, edits[0].path, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise EditError(f"the edits of {edits[0].path} leave no valid Python: {error}") from error
    return module.code
