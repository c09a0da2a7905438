"""Determines from a chat template's syntax tree what it expects of its messages. Renders nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jinja2 import nodes

_READS_AN_OBJECT = frozenset({"items", "tojson", "dictsort", "length", "map", "list"})
_TESTS = frozenset({"string", "mapping", "iterable"})

Match = Callable[[nodes.Node], bool]


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """How a template reads messages.

    loops_over_content: a message's content may be a list of parts.
    checks_for_string: the template checks whether the content is a string, so it may be one as well.
    takes_argument_text: it writes a tool call's arguments unchanged, so they must be JSON text; every other
    template gets an object, which it converts to JSON itself.
    reads_tools, reads_calls: it has a name for the tools, and for the calls of a message.
    names_developer: it has the role "developer" in a text of its own.
    """

    loops_over_content: bool
    checks_for_string: bool
    takes_argument_text: bool
    reads_tools: bool
    reads_calls: bool
    names_developer: bool


def facts_of(template: nodes.Template) -> TemplateFacts:
    """The facts of a parsed template. Names are followed through `set` and macros, regardless of scope."""
    is_content = _reader_of("content", template)
    is_arguments = _reader_of("arguments", template)
    loops = [loop for loop in template.find_all(nodes.For) if is_content(_unwrapped(loop.iter))]
    tests = [test for test in template.find_all(nodes.Test) if test.name in _TESTS]
    return TemplateFacts(
        loops_over_content=bool(loops),
        checks_for_string=any(is_content(test.node) for test in tests),
        takes_argument_text=_is_written_plainly(template, is_arguments),
        reads_tools=any(name.name == "tools" for name in template.find_all(nodes.Name)),
        reads_calls=any(map(_reader_of("tool_calls", template), template.find_all(nodes.Expr))),
        names_developer=any(
            isinstance(constant.value, str) and "developer" in constant.value
            for constant in template.find_all(nodes.Const)
        ),
    )


def _is_written_plainly(template: nodes.Template, is_arguments: Match) -> bool:
    for use in template.find_all((nodes.Filter, nodes.Call, nodes.Test, nodes.For)):
        if _uses_object(use, is_arguments):
            return False
    operands = [
        operand
        for parent in template.find_all((nodes.Add, nodes.Concat, nodes.Output))
        for operand in parent.iter_child_nodes()
    ]
    return any(is_arguments(operand) for operand in operands)


def _uses_object(use: nodes.Node, is_arguments: Match) -> bool:
    if isinstance(use, nodes.Filter):
        return use.name in _READS_AN_OBJECT and use.node is not None and is_arguments(use.node)
    if isinstance(use, nodes.Test):
        return use.name in _TESTS and is_arguments(use.node)
    if isinstance(use, nodes.Call):
        return isinstance(use.node, nodes.Getattr) and is_arguments(use.node.node)
    return isinstance(use, nodes.For) and is_arguments(use.iter)


def _reader_of(key: str, template: nodes.Template) -> Match:
    """A function that tests whether an expression is the value of `key`, or a name assigned from one."""
    names: set[str] = set()

    def is_value(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Getattr):
            return node.attr == key
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == key
        if isinstance(node, nodes.CondExpr):
            return is_value(node.expr1) or (node.expr2 is not None and is_value(node.expr2))
        return isinstance(node, nodes.Name) and node.name in names

    macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
    bindings = [*_assignments(template), *_passed_arguments(template, macros)]
    # Repeated until no name is added.
    while added := {name for name, value in bindings if is_value(value)} - names:
        names |= added
    return is_value


def _assignments(template: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    for assignment in template.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name):
            yield assignment.target.name, assignment.node


def _passed_arguments(
    template: nodes.Template, macros: dict[str, nodes.Macro]
) -> Iterator[tuple[str, nodes.Node]]:
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            names = [argument.name for argument in macros[call.node.name].args]
            yield from zip(names, call.args, strict=False)
            yield from ((keyword.key, keyword.value) for keyword in call.kwargs)


def _unwrapped(node: nodes.Node) -> nodes.Node:
    while (inner := _inner(node)) is not None:
        node = inner
    return node


def _inner(node: nodes.Node) -> nodes.Node | None:
    if isinstance(node, nodes.Filter):
        return node.node
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return node.node
    return None
