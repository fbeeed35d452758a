"""A regular expression -> its syntax tree. Invariant: what is not supported is refused by name, never read otherwise.

Single characters and positions keep their source, for `re` to judge; sequences, choices, groups and repeats are nodes.
"""

from __future__ import annotations

import re
from typing import NamedTuple, TypeAlias

MAX_PATTERN_LENGTH = 512
"""Characters of a pattern."""

MAX_NESTING = 16
"""Groups within groups."""

_FLAGS = re.compile(r"\(\?([aims]+)\)")
_TOKEN = re.compile(
    r"""(?P<repeat>(?:[*+?]|\{(?=[\d,])(?P<least>\d*)(?P<comma>,)?(?P<most>\d*)\})(?P<lazy>\??))
    | (?P<assertion>[\^$]|\\[AZbB])
    | (?P<open>\((?:\?:|(?P<captures>\?P<\w+>|(?!\?))))
    | (?P<close>\)) | (?P<bar>\|)
    | (?P<atom>\[\^?\]?(?:\\.|[^\\\]])*\] | \\(?:[dDsSwWafnrtv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[^0-9A-Za-z])
              | [^\\()|*+?^$\[])""",
    re.VERBOSE | re.DOTALL,
)


class PatternError(ValueError):
    """A pattern that is malformed, not supported, or takes too many steps."""


class Atom(NamedTuple):
    source: str


class Assertion(NamedTuple):
    source: str


class Group(NamedTuple):
    number: int
    """From 1; 0 does not capture."""
    body: Node


class Repeat(NamedTuple):
    body: Node
    least: int
    most: int | None
    greedy: bool


class Choice(NamedTuple):
    options: tuple[Node, ...]


class Sequence(NamedTuple):
    items: tuple[Node, ...]


Node: TypeAlias = "Atom | Assertion | Group | Repeat | Choice | Sequence"


class ParsedPattern(NamedTuple):
    tree: Node
    num_groups: int
    flags: int


def parse_pattern(source: str) -> ParsedPattern:
    """Raises: PatternError when it is malformed, too long or uses what is not supported."""
    if not 1 <= len(source) <= MAX_PATTERN_LENGTH:
        raise PatternError(f"must have 1 to {MAX_PATTERN_LENGTH} characters, got {len(source)}.")
    try:
        re.compile(source)
    except (re.error, OverflowError, RecursionError) as error:
        raise PatternError(f"{source!r} is not a regular expression: {error}.") from None
    prefix = _FLAGS.match(source)
    parser = _Parser(source, prefix.end() if prefix else 0)
    tree = parser.parse()
    return ParsedPattern(tree, parser.num_groups, re.compile(prefix[0]).flags if prefix else 0)


class _Parser:
    """Recursive descent over the tokens of a pattern that `re` has accepted."""

    def __init__(self, source: str, position: int) -> None:
        self._source = source
        self._position = position
        self._token: re.Match[str] | None = None
        self._depth = 0
        self.num_groups = 0

    def parse(self) -> Node:
        self._advance()
        return self._choice()

    def _advance(self) -> None:
        if self._position == len(self._source):
            self._token = None
            return
        self._token = _TOKEN.match(self._source, self._position)
        if self._token is None:
            rest = self._source[self._position : self._position + 4]
            raise PatternError(
                f"{self._source!r} uses {rest!r}..., which is not supported: no backreferences, look-around, "
                "octal or named escapes, inline flags or comments."
            )
        self._position = self._token.end()

    def _at(self, kind: str) -> bool:
        return self._token is not None and self._token[kind] is not None

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._at("bar"):
            self._advance()
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while self._token is not None and not self._at("bar") and not self._at("close"):
            if self._at("repeat"):
                items[-1] = self._repeat(items[-1], self._token)
            else:
                items.append(self._item(self._token))
        return Sequence(tuple(items))

    def _item(self, token: re.Match[str]) -> Node:
        if token["open"] is not None:
            number = 0
            if token["captures"] is not None:
                self.num_groups += 1
                number = self.num_groups
            self._depth += 1
            if self._depth > MAX_NESTING:
                raise PatternError(f"{self._source!r} nests groups deeper than {MAX_NESTING}.")
            self._advance()
            body = self._choice()
            self._depth -= 1
            self._advance()
            return Group(number, body)
        self._advance()
        return Atom(token["atom"]) if token["atom"] is not None else Assertion(token["assertion"])

    def _repeat(self, body: Node, token: re.Match[str]) -> Repeat:
        self._advance()
        if self._at("repeat"):
            raise PatternError(f"{self._source!r} uses a possessive repeat, which is not supported.")
        written = token["repeat"]
        if written[0] == "{":
            least = int(token["least"] or 0)
            most = (int(token["most"]) if token["most"] else None) if token["comma"] else least
        else:
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[written[0]]
        if most != 1 and most != 0 and _can_be_empty(body):
            raise PatternError(
                f"{self._source!r} repeats ({written}) something that can match the empty string. "
                "Make the repeated part match at least one character."
            )
        return Repeat(body, least, most, not token["lazy"])


def _can_be_empty(node: Node) -> bool:
    if isinstance(node, Group):
        return _can_be_empty(node.body)
    if isinstance(node, Repeat):
        return node.least == 0 or _can_be_empty(node.body)
    if isinstance(node, Choice):
        return any(map(_can_be_empty, node.options))
    if isinstance(node, Sequence):
        return all(map(_can_be_empty, node.items))
    return isinstance(node, Assertion)
