"""The objects of an OpenAPI document: each has a section, and types link to it.

Invariant: an object that a stream's schema inlines is in the section of its name.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import vllm_rollout
from docs_tools.reference.markdown import prose, table
from vllm_rollout.kernel.http.body import Body
from vllm_rollout.kernel.part_terms import claimed_tables, part_tables
from vllm_rollout.kernel.rules import fields
from vllm_rollout.kernel.rules.rows import rows

Schema = Mapping[str, Any]
REFERENCE = "#/components/schemas/"
TABLES = [value for value in vars(fields).values() if isinstance(value, type) and value.__module__ == fields.__name__]
TABLES += part_tables() + claimed_tables()


class Schemas:
    """Objects by name, including those that streams inline."""

    def __init__(self, openapi: Schema) -> None:
        self.objects: dict[str, Schema] = dict(openapi["components"]["schemas"])
        self.shown: dict[str, None] = {}
        """Names of objects that get a section, in the order of the first link to them."""

    def inlined(self, schema: Schema) -> str:
        """Register an object of a stream's schema under its title. Returns the title."""
        name: str = schema["title"]
        self.objects.setdefault(name, schema)
        return name

    def link(self, name: str) -> str:
        self.shown.setdefault(name)
        return f"[{name}](#{name.lower()})"

    def type_of(self, schema: Schema) -> str:
        """The type in words, with its range."""
        if "$ref" in schema:
            return self.link(schema["$ref"].removeprefix(REFERENCE))
        if "properties" in schema and "title" in schema:
            return self.link(self.inlined(schema))
        if branches := schema.get("anyOf") or schema.get("oneOf"):
            return " or ".join(dict.fromkeys(self.type_of(each) for each in branches))
        if "const" in schema:
            return f"`{json.dumps(schema['const'])}`"
        if "enum" in schema:
            return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
        match schema.get("type"):
            case "array":
                return f"list of {_size(schema)}{_several(self.type_of(schema.get('items', {})))}"
            case "object" if isinstance(values := schema.get("additionalProperties"), Mapping):
                return f"object of {self.type_of(values)}"
            case "integer" | "number" | "string" as kind:
                return kind + _range(schema)
            case str() as kind:
                return kind
        return "any JSON"

    def fields_of(self, name: str) -> str:
        """The table of an object's fields."""
        schema = self.objects[name]
        its_class = class_of(name, tuple(schema.get("properties", ())))
        is_body = its_class is not None and issubclass(its_class, Body)
        found = (self._field(field, each, schema, its_class) for field, each in _in_order(schema))
        if is_body:
            return table(("field", "type", "default", "meaning"), found)
        return table(("field", "type", "meaning"), ((field, type, says) for field, type, _, says in found))

    def _field(self, name: str, its: Schema, owner: Schema, its_class: type | None) -> tuple[str, str, str, str]:
        says = its.get("description") or words_of(its_class, name)
        if its_class is not None and (row := rows(its_class).get(name)) is not None:
            says = says.replace(f" Takes {row.takes.allowed}.", "")  # the column of types says it
        is_required = name in owner.get("required", ())
        default = "required" if is_required else _default(its_class, name, its)
        is_body = its_class is not None and issubclass(its_class, Body)
        return f"`{name}`", self.type_of(said_of(its) if is_body else its), default, prose(says)

    def section(self, name: str) -> Iterator[str]:
        yield f"### {name}"
        yield from self.body(name)

    def body(self, name: str) -> Iterator[str]:
        """An object's description, its table of fields, and its first example."""
        yield prose(summary_of(self.objects[name].get("description", "")))
        yield self.fields_of(name)
        for example in self.objects[name].get("examples", ())[:1]:
            yield f"```json\n{json.dumps(example, indent=2, ensure_ascii=False)}\n```"


FIRST = ("id", "type", "object", "prompts", "group_size")


def _in_order(schema: Schema) -> Iterable[tuple[str, Schema]]:
    """Fields of an object: first the required ones in FIRST, then other required ones, then the rest."""
    properties: Mapping[str, Schema] = schema.get("properties", {})
    required = [name for name in properties if name in schema.get("required", ())]
    first = [name for name in FIRST if name in required]
    names = dict.fromkeys([*first, *required, *properties])
    return ((name, properties[name]) for name in names)


def _range(schema: Schema) -> str:
    least, most = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if least is not None and most is not None:
        return f", {least:.10g} to {most:.10g}"
    said = [f"at least {least:.10g}"] if least is not None else [f"above {above:.10g}"] if above is not None else []
    said += [f"at most {most:.10g}"] if most is not None else [f"below {below:.10g}"] if below is not None else []
    if (longest := schema.get("maxLength")) is not None:
        said.append(f"at most {longest} characters")
    if (pattern := schema.get("pattern")) is not None:
        said.append(f"pattern `{pattern}`")
    return "".join(f", {each}" for each in said)


def _size(schema: Schema) -> str:
    least, most = schema.get("minItems"), schema.get("maxItems")
    return f"{least or 0} to {most} " if most is not None else f"at least {least} " if least else ""


def _several(kind: str) -> str:
    """The plural of a type. Its range then applies to each item."""
    word, comma, rest = kind.partition(", ")
    plural = f"{word}s" if word in ("string", "integer", "number", "object", "boolean") else word
    return f"{plural}{comma}each {rest}" if rest and plural != word else plural + comma + rest


def said_of(schema: Schema) -> Schema:
    """A field's schema without null, because null means the same as leaving the field out."""
    for union in ("anyOf", "oneOf"):
        if union in schema:
            branches = [each for each in schema[union] if each.get("type") != "null"]
            return {**schema, union: branches} if len(branches) > 1 else {**schema, **branches[0], union: None}
    return schema


def _default(its_class: type | None, name: str, its: Schema) -> str:
    default = its.get("default")
    if default is None and (field := getattr(its_class, "model_fields", {}).get(name)) is not None:
        default = field.get_default(call_default_factory=True)
    if default is None:
        return ""
    if hasattr(default, "model_dump"):
        default = default.model_dump(mode="json")
    return f"`{json.dumps(default)}`"


def summary_of(docstring: str) -> str:
    """A docstring without its paragraphs on what it raises, overrides, or takes as a source."""
    blocks = docstring.strip().split("\n\n")
    return "\n\n".join(block for block in blocks if not re.match(r"(Raises|Overrides|Source):", block))


@cache
def class_of(name: str, properties: tuple[str, ...]) -> type | None:
    """The class of this name with most of these properties, or None."""
    found = [
        value
        for module_name, module in list(sys.modules.items())
        if module_name.startswith(vllm_rollout.__name__)
        for value in [vars(module).get(name)]
        if isinstance(value, type) and value.__module__ == module_name
    ]
    return max(found, key=lambda each: len({*_fields_of(each)} & {*properties}), default=None)


def _fields_of(its: type) -> Iterator[str]:
    for base in its.__mro__:
        yield from vars(base).get("__annotations__", ())


def words_of(its: type | None, field: str) -> str:
    """The docstring below a field, in the class or in one of its bases."""
    for base in () if its is None else its.__mro__:
        if base.__module__.startswith(vllm_rollout.__name__) and (words := _words(base).get(field)):
            return words
    return ""


@cache
def _words(its: type) -> Mapping[str, str]:
    """Docstrings under the fields of one class, by field."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(its))).body
    except (OSError, TypeError, SyntaxError):
        return {}
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, words in zip(tree.body, tree.body[1:], strict=False):
        match field, words:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as said)):
                found[name] = said
    return found
