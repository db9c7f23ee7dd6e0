"""Small changes of the logic of a Python file, each of which a test should notice; see `mutants.py`."""

import ast
import copy
from collections.abc import Iterator
from pathlib import Path

PAIRS = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn}
PAIRS |= {ast.And: ast.Or, ast.Add: ast.Sub, ast.Mult: ast.Div}
SWAPS = PAIRS | {second: first for first, second in PAIRS.items()}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
MESSAGES = {"warn", "warning", "warning_once", "info", "debug", "print", "argument", "add_argument", "cast", "TypeVar"}


def changed(node: ast.AST) -> ast.AST:
    """Return a copy of a node with one thing changed if there is something to change."""
    new = copy.copy(node)
    if isinstance(node, ast.Compare):
        new.ops = [SWAPS[type(node.ops[0])](), *node.ops[1:]]
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign):
        new.op = SWAPS.get(type(node.op), type(node.op))()
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        new.value = not node.value if isinstance(node.value, bool) else node.value + 1
    elif isinstance(node, ast.Name):
        new.id = NAMES.get(node.id, node.id)
    elif isinstance(node, ast.Attribute):
        new.attr = NAMES.get(node.attr, node.attr)
    elif isinstance(node, ast.Return | ast.Expr) and node.value:
        new.value = ast.Constant(None)
    return new


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield the nodes of logic, each with what it is changed to."""
    call = getattr(node, "value", node) if isinstance(node, ast.Expr) else node
    if isinstance(call, ast.Call):
        if getattr(call.func, "id", getattr(call.func, "attr", "")) in MESSAGES:
            return
    elif isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr | ast.Expr):
        return
    if isinstance(node, ast.FunctionDef) and isinstance(node.body[-1], ast.Raise):  # makes a message
        return
    if isinstance(node, ast.If | ast.IfExp):
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return
        yield node.test, ast.UnaryOp(ast.Not(), node.test)
    if isinstance(node, ast.expr | ast.stmt) and ast.unparse(changed(node)) != ast.unparse(node):
        yield node, changed(node)
    for key, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and key not in ("annotation", "returns"):
                yield from changes(child)


def mutants(file: Path) -> Iterator[tuple[int, str, str, str]]:
    """Yield the line, what it was, what it becomes, and the text of the file, of each change of a file."""
    lines = [b"", *file.read_bytes().splitlines(keepends=True)]
    for node, new in changes(ast.parse(b"".join(lines))):
        text = ast.unparse(new) if isinstance(new, ast.stmt) else f"({ast.unparse(new)})"
        before, last = lines[node.lineno], lines[node.end_lineno]
        after = before[: node.col_offset] + text.encode() + last[node.end_col_offset :]
        whole = [*lines[: node.lineno], after, *lines[node.end_lineno + 1 :]]
        yield node.lineno, before.decode().strip(), after.decode().strip(), b"".join(whole).decode()
