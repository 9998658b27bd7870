# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Every kind of edit as text before and after, and by its errors."""

import re
import textwrap

import pytest

from utils.fork.codemod import (
    AddBase,
    AddDefinitions,
    AddImport,
    AddParameter,
    AddToDocstring,
    Edit,
    EditError,
    RedirectCall,
    RemoveDefinition,
    ReplaceExpression,
    ReplaceStatement,
    apply_edits,
)


def make(kind: type[Edit], **arguments) -> Edit:
    return kind(path="module.py", reason="a test", **arguments)


def check(before: str, after: str, *edits: Edit) -> None:
    assert apply_edits(textwrap.dedent(before), edits) == textwrap.dedent(after)


def check_error(source: str, message: str, *edits: Edit) -> None:
    with pytest.raises(EditError, match=re.escape(message)):
        apply_edits(textwrap.dedent(source), edits)


class TestAddImport:
    BEFORE = """\
        # About the module
        from ..utils import logging
        from .cache import (
            Cache,
        )
        from .mask import mask
        """

    def test_comes_after_the_import(self):
        after = """\
            # About the module
            from ..utils import logging
            from .cache import (
                Cache,
            )
            from .prefill import prefill
            from .mask import mask
            """
        check(self.BEFORE, after, make(AddImport, after=".cache", statement="from .prefill import prefill"))

    def test_relative_level_counts(self):
        edit = make(AddImport, after=".utils", statement="from .prefill import prefill")
        check_error(self.BEFORE, "AddImport(module.py): `from .utils import` found 0 times", edit)

    def test_refuses_two_places(self):
        edit = make(AddImport, after=".cache", statement="from .prefill import prefill")
        source = "from .cache import a\nfrom .cache import b\n"
        check_error(source, "`from .cache import` found 2 times", edit)

    def test_refuses_an_import_that_is_there(self):
        edit = make(AddImport, after="..utils", statement="from .cache import Cache")
        check_error(self.BEFORE, "`from .cache import Cache` is there already", edit)


class TestAddBase:
    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ("class Model:", "class Model(Mixin):"),
            ("class Model():", "class Model(Mixin):"),
            ("class Model(nn.Module):", "class Model(Mixin, nn.Module):"),
            ("class Model(metaclass=Meta):", "class Model(Mixin, metaclass=Meta):"),
            ("class Model(\n    Base,\n    Other,\n):", "class Model(\n    Mixin,\n    Base,\n    Other,\n):"),
        ],
    )
    def test_comes_first(self, before, after):
        body = "\n    x = 1\n"
        check(before + body, after + body, make(AddBase, scope="Model", base="Mixin"))

    def test_refuses_a_base_that_is_there(self):
        check_error("class A(B):\n    pass\n", "base `B` is there already", make(AddBase, scope="A", base="B"))


class TestAddParameter:
    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ("def f():", "def f(n: int = 1):"),
            ("def f(a, b=2):", "def f(a, b=2, n: int = 1):"),
            ("def f(a, **kwargs):", "def f(a, n: int = 1, **kwargs):"),
            ("def f(**kwargs):", "def f(n: int = 1, **kwargs):"),
            ("def f(a, *, b, **kwargs):", "def f(a, *, b, n: int = 1, **kwargs):"),
            ("def f(a, *args, b, **kwargs):", "def f(a, *args, b, n: int = 1, **kwargs):"),
            ("def f(\n    a,\n    b=2,\n):", "def f(\n    a,\n    b=2,\n    n: int = 1,\n):"),
            ("def f(\n    a,\n):", "def f(\n    a,\n    n: int = 1,\n):"),
            ("def f(\n    a, b\n):", "def f(\n    a, b, n: int = 1\n):"),
            ("def f(\n    a,\n    **kwargs,\n):", "def f(\n    a,\n    n: int = 1,\n    **kwargs,\n):"),
        ],
    )
    def test_comes_before_kwargs(self, before, after):
        body = "\n    return 1\n"
        check(before + body, after + body, make(AddParameter, scope="f", parameter="n: int = 1"))

    def test_refuses_a_parameter_that_is_there(self):
        edit = make(AddParameter, scope="f", parameter="a=1")
        check_error("def f(x, *, a): pass\n", "parameter `a` is there already", edit)

    def test_refuses_to_make_a_positional_one_after_args(self):
        edit = make(AddParameter, scope="f", parameter="n=1")
        check_error("def f(a, *args, **kwargs): pass\n", "not provided for", edit)

    def test_refuses_one_without_default_after_one_with(self):
        edit = make(AddParameter, scope="f", parameter="n")
        check_error("def f(a=1): pass\n", "AddParameter(module.py:f): Cannot have param without defaults", edit)


class TestRedirectCall:
    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ("y = self.run()", "y = self.go(n=n)"),
            ("y = self.run(x)", "y = self.go(x, n=n)"),
            ("y = self.run(x, **kwargs)", "y = self.go(x, n=n, **kwargs)"),
            ("y = self.run(**kwargs)", "y = self.go(n=n, **kwargs)"),
            ("y = self.run(\n    x,\n    a=1,\n)", "y = self.go(\n    x,\n    a=1,\n    n=n,\n)"),
            ("y = self.run(\n    x,\n    **kwargs,\n)", "y = self.go(\n    x,\n    n=n,\n    **kwargs,\n)"),
            ("y = self.run(\n    x, a\n)", "y = self.go(\n    x, a, n=n\n)"),
            ("y = (\n    self\n    # why\n    .run(x)\n)", "y = (\n    self.go(x, n=n)\n)"),
        ],
    )
    def test_gets_the_arguments(self, before, after):
        def function(code: str) -> str:
            return f"class A:\n    def f(self, x, **kwargs):\n{textwrap.indent(code, ' ' * 8)}\n"

        edit = make(RedirectCall, scope="A.f", call="self.run", to="self.go", arguments={"n": "n"})
        check(function(before), function(after), edit)

    def test_without_arguments_only_the_name_changes(self):
        edit = make(RedirectCall, scope="f", call="a", to="b.c")
        check("def f():\n    return a( 1, x = 2 )\n", "def f():\n    return b.c( 1, x = 2 )\n", edit)

    def test_refuses_none(self):
        edit = make(RedirectCall, scope="f", call="a", to="b")
        check_error("def f():\n    return a\n", "RedirectCall(module.py:f): call of `a` found 0 times", edit)

    def test_refuses_two(self):
        edit = make(RedirectCall, scope="f", call="a", to="b")
        check_error("def f():\n    return a(a(1))\n", "call of `a` found 2 times", edit)

    def test_refuses_a_change_to_the_same(self):
        edit = make(RedirectCall, scope="f", call="a", to="a")
        check_error("def f():\n    return a(1)\n", "changes nothing", edit)

    def test_refuses_an_argument_that_is_there(self):
        edit = make(RedirectCall, scope="f", call="a", to="b", arguments={"n": "2"})
        check_error("def f():\n    return a(n=1)\n", "leave no valid Python", edit)


class TestReplaceStatement:
    BEFORE = """\
        class A:
            def f(self, x):
                # about y
                y = self.g(
                    x,  # the input
                )  # the output
                return y

            def g(self, x):
                y = self.g(x)
        """

    def check(self, new: str, after: str) -> None:
        edit = make(ReplaceStatement, scope="A.f", old="y = self.g(x)", new=new)
        text = textwrap.dedent(self.BEFORE)
        start, end = text.index("        y = self.g(\n"), text.index("        return y")
        check(self.BEFORE, text[:start] + textwrap.indent(textwrap.dedent(after), " " * 8) + text[end:], edit)

    def test_is_replaced(self):
        self.check("y = 1", "y = 1\n")

    def test_by_several_with_comments(self):
        new = """
            # first
            y = 1
            # second
            if y:
                y = 2  # third
        """
        self.check(new, "# first\ny = 1\n# second\nif y:\n    y = 2  # third\n")

    def test_keeps_the_layout_of_a_statement_that_stays(self):
        new = """
            z = 1
            y = self.g(x)
            # and on
            y += z
        """
        after = """\
            z = 1
            y = self.g(
                x,  # the input
            )  # the output
            # and on
            y += z
        """
        self.check(new, after)

    def test_at_module_level(self):
        edit = make(ReplaceStatement, old='version = "1"', new='version = "2"')
        check("x = 0\nversion = '1'\n\n\nclass A: pass\n", 'x = 0\nversion = "2"\n\n\nclass A: pass\n', edit)

    def test_refuses_none(self):
        edit = make(ReplaceStatement, scope="A.f", old="y = self.h(x)", new="y = 1")
        message = "ReplaceStatement(module.py:A.f): statement `y = self.h(x)` found 0 times"
        check_error(self.BEFORE, message, edit)

    def test_refuses_two(self):
        edit = make(ReplaceStatement, scope="A", old="y = self.g(x)", new="y = 1")
        check_error(self.BEFORE, "statement `y = self.g(x)` found 2 times", edit)

    def test_refuses_a_change_of_layout_only(self):
        edit = make(ReplaceStatement, scope="A.f", old="y = self.g(x)", new="y = (self.g(x))")
        check_error(self.BEFORE, "changes nothing", edit)

    def test_refuses_a_comment_that_would_get_lost(self):
        edit = make(ReplaceStatement, scope="A.f", old="y = self.g(x)", new="y = 1\n# lost")
        check_error(self.BEFORE, "a comment must stand before a statement", edit)


class TestReplaceExpression:
    @pytest.mark.parametrize(
        ("old", "new", "after"),
        [
            ("b", "c.d", "x = a * c.d + f(e)  # comment"),
            ("b", "c + d", "x = a * (c + d) + f(e)  # comment"),
            ("b", "c * d", "x = a * (c * d) + f(e)  # comment"),
            ("e", "c + d", "x = a * b + f(c + d)  # comment"),
            ("f(e)", "1 if a else 2", "x = a * b + (1 if a else 2)  # comment"),
            ("a*b+f( e )", "lambda: 0", "x = lambda: 0  # comment"),
        ],
    )
    def test_gets_parentheses_where_needed(self, old, new, after):
        edit = make(ReplaceExpression, scope="g", old=old, new=new)
        check("def g():\n    x = a * b + f(e)  # comment\n", f"def g():\n    {after}\n", edit)

    def test_in_a_table_of_the_module(self):
        edit = make(ReplaceExpression, old='"remote/search"', new='"_search"')
        before = "TABLE = {\n    Mode.A: 'remote/search',  # why\n    Mode.B: 'other',\n}\n\n\ndef f(): pass\n"
        check(before, before.replace("'remote/search'", '"_search"'), edit)

    def test_refuses_none(self):
        edit = make(ReplaceExpression, scope="g", old="c", new="d")
        check_error("def g():\n    return a\n", "expression `c` found 0 times", edit)

    def test_refuses_two(self):
        edit = make(ReplaceExpression, scope="g", old="a", new="d")
        check_error("def g():\n    return a + a\n", "expression `a` found 2 times", edit)

    def test_refuses_a_name_that_is_no_expression(self):
        edit = make(ReplaceExpression, scope="g", old="a", new="b.c")
        check_error("def g(a):\n    pass\n", "leave no valid Python", edit)


class TestAddDefinitions:
    SOURCE = """\
        class A:
            def f(self):
                return 1

            def g(self):
                return 2
        """

    def test_goes_after_the_one_named(self):
        after = """\
            class A:
                def f(self):
                    return 1

                # About h
                @property
                def h(self):
                    return 3

                def g(self):
                    return 2
            """
        code = """
            # About h
            @property
            def h(self):
                return 3
        """
        check(self.SOURCE, after, make(AddDefinitions, scope="A", after="f", code=code))

    def test_must_be_new_and_have_a_place(self):
        code = "def g(self):\n    return 3\n"
        check_error(
            self.SOURCE, "definition `g` is there already", make(AddDefinitions, scope="A", after="f", code=code)
        )
        check_error(self.SOURCE, "definition `f` found 0 times", make(AddDefinitions, after="f", code=code))
        check_error(
            self.SOURCE, "`code` must hold definitions alone", make(AddDefinitions, scope="A", after="f", code="g = 1")
        )


class TestRemoveDefinition:
    SOURCE = """\
        import a


        class A:
            def f(self):
                return 1

            # About g
            @a.decorator
            def g(self):
                return 2


        def g():
            return 3
        """

    def test_goes_with_its_decorator_and_comment(self):
        after = """\
            import a


            class A:
                def f(self):
                    return 1


            def g():
                return 3
            """
        check(self.SOURCE, after, make(RemoveDefinition, scope="A", name="g"))

    def test_at_module_level(self):
        after = """\
            import a


            def g():
                return 3
            """
        check(self.SOURCE, after, make(RemoveDefinition, name="A"))

    def test_refuses_none(self):
        edit = make(RemoveDefinition, scope="A", name="h")
        check_error(self.SOURCE, "RemoveDefinition(module.py:A): definition `h` found 0 times", edit)

    def test_refuses_two(self):
        source = self.SOURCE.replace("class A:", "def g():\n            return 0\n\n\n        class A:")
        check_error(
            source, "RemoveDefinition(module.py): definition `g` found 2 times", make(RemoveDefinition, name="g")
        )


class TestScope:
    SOURCE = """\
        class A:
            def f(self):
                return 1

        class B:
            def f(self):
                return 1
        """

    def test_only_the_named_definition_changes(self):
        edit = make(ReplaceStatement, scope="B.f", old="return 1", new="return 2")
        before = textwrap.dedent(self.SOURCE)
        check(before, before[::-1].replace("1", "2", 1)[::-1], edit)

    def test_refuses_none(self):
        edit = make(ReplaceStatement, scope="A.g", old="return 1", new="return 2")
        check_error(self.SOURCE, "ReplaceStatement(module.py:A.g): definition `g` found 0 times", edit)

    def test_refuses_two(self):
        edit = make(ReplaceStatement, scope="A.f", old="return 1", new="return 2")
        check_error(self.SOURCE.replace("class B", "class A"), "definition `A` found 2 times", edit)


def test_edits_build_on_each_other():
    edits = [
        make(RedirectCall, scope="f", call="a", to="b", arguments={"n": "1"}),
        make(ReplaceStatement, scope="f", old="return b(n=1)", new="return c"),
    ]
    check("def f():\n    return a()\n", "def f():\n    return c\n", *edits)
    check_error("def f():\n    return a()\n", "statement `return b(n=1)` found 0 times", *reversed(edits))


class TestAddToDocstring:
    BEFORE = '''\
        class Config:
            """
            About it.

            Args:
                first (`int`): One.

                > Others
                second (`int`): Two.
            """

            first = 1
        '''

    def test_entry_comes_before_the_line(self):
        after = '''\
            class Config:
                """
                About it.

                Args:
                    first (`int`): One.

                    third (`int`):
                        Three.

                    > Others
                    second (`int`): Two.
                """

                first = 1
            '''
        text = """
            third (`int`):
                Three.
        """
        check(self.BEFORE, after, make(AddToDocstring, scope="Config", before="> Others", text=text))

    def test_line_of_an_entry(self):
        edit = make(AddToDocstring, scope="Config", before="second (`int`): Two.", text="more", is_entry=False)
        check(self.BEFORE, self.BEFORE.replace("        second", "        more\n                second"), edit)

    def test_line_must_be_there_once(self):
        edit = make(AddToDocstring, scope="Config", before="> Elsewhere", text="more")
        check_error(self.BEFORE, "line `> Elsewhere` found 0 times in the docstring", edit)

    def test_docstring_must_be_there(self):
        edit = make(AddToDocstring, scope="f", before="a", text="more")
        check_error("def f():\n    return 1\n", "AddToDocstring(module.py:f): there is no docstring", edit)
