"""Regular expressions of users, matched in bounded time. Invariant: no pattern and no text can hold up the process.

Python's `re` backtracks: `(a+)+$` takes forever on a short text and holds the interpreter's lock meanwhile. Here `re`
judges single characters and positions only; sequences, choices and repeats run as a Thompson automaton that keeps every
state at most once per character, and a step budget bounds the whole search. Results equal those of `re.finditer` for
what is supported: literals, classes, `.`, groups, `|`, greedy and lazy repeats, `^ $ \\A \\Z \\b \\B` and a leading
`(?i)`, `(?s)`, `(?m)` or `(?a)`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from vllm_rollout.group.pattern_syntax import (
    Assertion,
    Atom,
    Choice,
    Group,
    Node,
    PatternError,
    Repeat,
    Sequence,
    parse_pattern,
)

MAX_PATTERN_STATES = 2_000
"""States of the automaton; counted repeats are written out, `\\d{1,9}` has nine."""

SEARCH_LENGTH = 4_096
"""Only matches that begin in this many last characters of a text are found: answers stand at the end."""

MAX_SEARCH_STEPS = 500_000
"""State visits per text, about half a second at worst; ordinary patterns need 1 to 30 per character."""


class _State(NamedTuple):
    """One state of the automaton; `then` and `otherwise` are the next ones, in order of preference."""

    kind: Literal["atom", "assertion", "split", "save", "end"]
    then: int = 0
    otherwise: int = 0
    test: re.Pattern[str] | None = None
    slot: int = 0


class AnswerPattern:
    """A compiled pattern; `last_match` finds the answer in a text."""

    def __init__(self, source: str) -> None:
        """Raises: PatternError saying what is wrong with the pattern."""
        parsed = parse_pattern(source)
        self.source = source
        self.num_groups = parsed.num_groups
        self.states: list[_State] = [_State("end")]
        self._flags = parsed.flags
        self.entry = self._build(parsed.tree, 0)
        firsts = self._first_atoms()
        if not firsts:
            raise PatternError(f"{source!r} can only match the empty string.")
        self.first = re.compile("|".join(firsts), self._flags)
        """Finds where a match can begin at all, at the speed of `re`: one character, so nothing to backtrack."""

    def last_match(self, text: str) -> str | None:
        """The last of the matches that `re.finditer` would find, or None.

        It is the first group that took part, where the pattern has groups; what is blank is passed over.

        Raises: PatternError when the search would take more than MAX_SEARCH_STEPS.
        """
        search = _Search(self, text)
        position = max(0, len(text) - SEARCH_LENGTH)
        answer = None
        while (found := search.next_match(position)) is not None:
            captured, position = found
            if captured.strip():
                answer = captured
        return answer

    def _build(self, node: Node, then: int) -> int:
        """Append the states of a node that leads to state `then`; the number of its first state."""
        if isinstance(node, (Atom, Assertion)):
            kind = "atom" if isinstance(node, Atom) else "assertion"
            return self._add(_State(kind, then, test=re.compile(node.source, self._flags)))
        if isinstance(node, Sequence):
            for item in reversed(node.items):
                then = self._build(item, then)
            return then
        if isinstance(node, Choice):
            entry = self._build(node.options[-1], then)
            for option in reversed(node.options[:-1]):
                entry = self._add(_State("split", self._build(option, then), entry))
            return entry
        if isinstance(node, Group):
            if not node.number:
                return self._build(node.body, then)
            close = self._add(_State("save", then, slot=2 * node.number))
            return self._add(_State("save", self._build(node.body, close), slot=2 * node.number - 1))
        return self._build_repeat(node, then)

    def _build_repeat(self, node: Repeat, then: int) -> int:
        def split(body: int) -> _State:
            return _State("split", body, then) if node.greedy else _State("split", then, body)

        entry = then
        if node.most is None:
            entry = self._add(_State("split"))
            self.states[entry] = split(self._build(node.body, entry))
        else:
            for _ in range(node.most - node.least):
                entry = self._add(split(self._build(node.body, entry)))
        for _ in range(node.least):
            entry = self._build(node.body, entry)
        return entry

    def _add(self, state: _State) -> int:
        if len(self.states) >= MAX_PATTERN_STATES:
            raise PatternError(f"{self.source!r} is too large: use smaller counts in its repeats.")
        self.states.append(state)
        return len(self.states) - 1

    def _first_atoms(self) -> list[str]:
        """Sources of the atoms a match can begin with."""
        found: dict[str, None] = {}
        seen: set[int] = set()
        pending = [self.entry]
        while pending:
            number = pending.pop()
            if number in seen:
                continue
            seen.add(number)
            state = self.states[number]
            if state.kind == "atom" and state.test is not None:
                found[state.test.pattern] = None
            elif state.kind != "end":
                pending += [state.then, state.otherwise] if state.kind == "split" else [state.then]
        return list(found)


@lru_cache(maxsize=64)
def compile_pattern(source: str) -> AnswerPattern:
    """Raises: PatternError saying what is wrong with the pattern."""
    return AnswerPattern(source)


_Thread: TypeAlias = "tuple[int, tuple[int, ...]]"
"""A state and where its match and its groups began and ended; -1: not yet."""


class _Search:
    """One pattern on one text, with one step budget."""

    def __init__(self, pattern: AnswerPattern, text: str) -> None:
        self._pattern = pattern
        self._unset = (-1,) * (2 * pattern.num_groups)
        self._text = text
        self._num_steps = 0
        self._accepts: dict[tuple[int, str], bool] = {}

    def next_match(self, position: int) -> tuple[str, int] | None:
        """What the leftmost non-empty match from `position` on captured, and where it ends."""
        threads: list[_Thread] = []
        seen: set[int] = set()
        best: tuple[tuple[int, ...], int] | None = None
        while True:
            if not threads:
                start = None if best else self._pattern.first.search(self._text, position)
                if start is None:
                    return self._captured(*best) if best else None
                position, seen = start.start(), set()
            if best is None and self._pattern.first.match(self._text, position):
                self._follow(threads, seen, self._pattern.entry, (position, *self._unset), position)
            upcoming: list[_Thread] = []
            seen = set()
            for number, marks in threads:
                if self._pattern.states[number].kind == "end":
                    if position > marks[0]:
                        best = marks, position
                        break
                elif position < len(self._text) and self._accept(number, self._text[position]):
                    self._follow(upcoming, seen, self._pattern.states[number].then, marks, position + 1)
            threads, position = upcoming, position + 1

    def _follow(
        self, threads: list[_Thread], seen: set[int], number: int, marks: tuple[int, ...], position: int
    ) -> None:
        """Add the states reached from `number` without consuming a character, in order of preference."""
        pending = [(number, marks)]
        while pending:
            number, marks = pending.pop()
            self._num_steps += 1
            if number in seen:
                continue
            seen.add(number)
            state = self._pattern.states[number]
            if state.kind == "split":
                pending += [(state.otherwise, marks), (state.then, marks)]
            elif state.kind == "save":
                pending.append((state.then, (*marks[: state.slot], position, *marks[state.slot + 1 :])))
            elif state.kind == "assertion":
                if state.test is not None and state.test.match(self._text, position):
                    pending.append((state.then, marks))
            else:
                threads.append((number, marks))
        if self._num_steps > MAX_SEARCH_STEPS:
            raise PatternError(
                f"{self._pattern.source!r} takes more than {MAX_SEARCH_STEPS} steps on a text of "
                f"{len(self._text)} characters. Begin it with a literal, or have fewer choices and repeats."
            )

    def _accept(self, number: int, character: str) -> bool:
        key = (number, character)
        if key not in self._accepts:
            test = self._pattern.states[number].test
            self._accepts[key] = test is not None and test.match(character) is not None
        return self._accepts[key]

    def _captured(self, marks: tuple[int, ...], end: int) -> tuple[str, int]:
        for begin, close in zip(marks[1::2], marks[2::2], strict=True):
            if close >= 0:
                return self._text[begin:close], end
        return self._text[marks[0] : end], end
