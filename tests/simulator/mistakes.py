"""Mistakes put into the runtime's functions, on their syntax tree: moving or formatting code changes none of them.

A mistake names code by what it is, not where it stands: in whichever module of ``PACKAGES``, and,
where the same code stands twice, in which function. ``...`` as the only argument of a call stands
for any arguments.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("slipstream.runtime.backend", "slipstream.runtime.trt")


@dataclass(frozen=True)
class Change:
    """code: an expression or a statement. instead: what stands in its place; "" leaves it out.

    after: instead of changing it, code's statement is moved behind the one of the same block that holds this.
    within: the function, as "f" or "Class.f", where code stands more than once.
    """

    code: str
    instead: str = ""
    within: str = ""
    after: str = ""


def replace(code: str, instead: str, within: str = "") -> Change:
    """One name, operator or argument by another."""
    return Change(code, instead, within)


def leave_out(code: str, within: str = "") -> Change:
    """A statement, an argument or an operand."""
    return Change(code, within=within)


def move(code: str, after: str, within: str = "") -> Change:
    """A statement behind a later one of its block."""
    return Change(code, within=within, after=after)


def apply(patch: pytest.MonkeyPatch, change: Change) -> None:
    """Run the function with the change from now on. Fails where its code is not found exactly once."""
    found = [
        (module, name, place)
        for module in _modules()
        for name, function in _functions(_tree(module))
        if f".{name}".endswith(f".{change.within}") or not change.within
        for place in _places(function, change)
    ]
    assert len(found) == 1, f"{change} fits {[f'{module}: {name}' for module, name, _ in found]}"
    module, name, _ = found[0]
    tree = ast.parse(_source(module))
    function = dict(_functions(tree))[name]
    _edit(*next(iter(_places(function, change))), change)
    code = _code(compile(ast.fix_missing_locations(tree), _path(module), "exec"), name)
    patch.setattr(_target(module, name), "__code__", code)


Place = tuple[ast.AST, str, int | None]  # the node that holds it, in which field, and where in a list


def _places(function: ast.AST, change: Change) -> Iterator[Place]:
    pattern = _parse(change.code)
    for parent in ast.walk(function):
        for field, value in ast.iter_fields(parent):
            for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if change.after:
                    is_found = isinstance(node, ast.stmt) and _holds(node, pattern)
                    rest = value[index + 1 :] if is_found and index is not None else []
                    is_found = any(_holds(other, _parse(change.after)) for other in rest)
                else:
                    is_found = _fits(pattern, node)
                if is_found:
                    yield parent, field, index


def _edit(parent: ast.AST, field: str, index: int | None, change: Change) -> None:
    value: Any = getattr(parent, field)
    if change.after:
        assert index is not None
        moved = value.pop(index)
        value.insert(next(i for i in range(index, len(value)) if _holds(value[i], _parse(change.after))) + 1, moved)
    elif change.instead and index is None:
        setattr(parent, field, _parse(change.instead))
    elif change.instead:
        value[index] = _parse(change.instead)
    elif index is None:  # the expression that a statement consists of
        setattr(parent, field, ast.Constant(None))
    else:
        value[index : index + 1] = [ast.Pass()] if isinstance(value[index], ast.stmt) else []


def _parse(code: str) -> ast.AST:
    (statement,) = ast.parse(code).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def _holds(node: ast.AST, pattern: ast.AST) -> bool:
    return any(_fits(pattern, part) for part in ast.walk(node))


def _fits(pattern: Any, node: Any) -> bool:
    if isinstance(pattern, list):
        pairs = zip(pattern, node, strict=False) if isinstance(node, list) and len(node) == len(pattern) else None
        return pairs is not None and all(_fits(one, other) for one, other in pairs)
    if not isinstance(pattern, ast.AST):
        return bool(pattern == node)
    if type(pattern) is not type(node):
        return False
    fields = pattern._fields
    if isinstance(pattern, ast.Call) and [ast.dump(arg) for arg in pattern.args] == ["Constant(value=Ellipsis)"]:
        fields = ("func",)
    return all(_fits(getattr(pattern, field), getattr(node, field)) for field in fields)


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Functions of a module and methods of its classes, each with the functions inside it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def _code(outer: types.CodeType, name: str) -> types.CodeType:
    """Code of a function or method by its qualified name."""
    code = outer
    for part in name.split("."):
        (code,) = [inner for inner in code.co_consts if isinstance(inner, types.CodeType) and inner.co_name == part]
    return code


def _target(module: str, name: str) -> Any:
    owner: Any = importlib.import_module(module)
    for part in name.split("."):
        owner = vars(owner)[part]
    return owner.fget if isinstance(owner, property) else owner


@cache
def _modules() -> list[str]:
    packages = [importlib.import_module(name) for name in PACKAGES]
    return [f"{p.__name__}.{info.name}" for p in packages for info in pkgutil.iter_modules(p.__path__)]


@cache
def _source(module: str) -> str:
    return Path(_path(module)).read_text(encoding="utf-8")


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_source(module))


def _path(module: str) -> str:
    return str(importlib.import_module(module).__file__)
