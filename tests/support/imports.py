"""Reads from a module's source what it imports. Nothing is executed to find out."""

import ast
from collections.abc import Iterator
from functools import cache


@cache
def imported_modules(source: str, package: str = "vllm_rollout", with_types: bool = True) -> frozenset[str]:
    """Dotted names of everything a module of `package` imports, at any depth of nesting.

    Without `with_types`, what stands below `if TYPE_CHECKING:` is left out.
    """
    return frozenset(_imports(ast.parse(source), package, with_types))


def _imports(tree: ast.AST, package: str, with_types: bool) -> Iterator[str]:
    for node in _walk(tree, with_types):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            # `from a import b` may mean the module a.b.
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            target = node.args[0]
            if name in ("import_module", "__import__") and isinstance(target, ast.Constant):
                yield str(target.value)


def _walk(node: ast.AST, with_types: bool) -> Iterator[ast.AST]:
    """The nodes below `node`, and `node` itself."""
    yield node
    for_types_only = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING") and not with_types
    for child in node.orelse if for_types_only else ast.iter_child_nodes(node):
        yield from _walk(child, with_types)
