"""Patterns against `re.finditer`, and patterns on which `re` would never return."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.group.answer_pattern import MAX_SEARCH_STEPS, SEARCH_LENGTH, compile_pattern
from vllm_rollout.group.pattern_syntax import MAX_NESTING, MAX_PATTERN_LENGTH, PatternError

ATOMS = [
    "a",
    "b",
    "1",
    " ",
    ".",
    r"\d",
    r"\w",
    r"\s",
    r"\W",
    "[ab]",
    "[^a]",
    "[]a-b]",
    r"[\d.]",
    r"\.",
    r"\x61",
    "{",
    "}",
]
ASSERTIONS = ["^", "$", r"\b", r"\B", r"\A", r"\Z"]
REPEATS = ["*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{,2}", "{1,}", "{0,3}?"]


def patterns():
    def extend(parts):
        return st.one_of(
            st.lists(parts, min_size=1, max_size=3).map("".join),
            st.tuples(parts, parts).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
            parts.map("({})".format),
            st.tuples(parts, st.sampled_from(REPEATS)).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        )

    single = st.one_of(st.sampled_from(ATOMS), st.sampled_from(ATOMS), st.sampled_from(ASSERTIONS))
    return st.tuples(st.sampled_from(["", "(?i)", "(?s)", "(?m)"]), st.recursive(single, extend, max_leaves=8)).map(
        "".join
    )


texts = st.text(st.sampled_from("aAb1. }\n"), max_size=12)


def last_of_finditer(pattern: str, text: str) -> str | None:
    answer = None
    for match in re.finditer(pattern, text):
        groups = [group for group in match.groups() if group is not None]
        captured = groups[0] if groups else match[0]
        if captured.strip():
            answer = captured
    return answer


@settings(max_examples=100, deadline=None, database=None)
@given(patterns(), texts)
def test_the_last_match_is_that_of_re(pattern, text):
    try:
        found = compile_pattern(pattern).last_match(text)
    except PatternError as refusal:
        found = str(refusal)
    assert found == last_of_finditer(pattern, text) or "match the empty string" in found


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        (r"\\boxed{([^}]*)}", r"\boxed{1} \boxed{2}", "2"),
        (r"\\boxed\{(.*)\}", r"\boxed{1} \boxed{2}", r"1} \boxed{2"),
        (r"(?P<answer>\d+)\s*$", "12 is 3\n", "3"),
        (r"x(\d)*", "x123", "3"),
        (r"(a)|(b)", "ab", "b"),
        (r"(?i)ANSWER: (.)", "Answer: x", "x"),
        (r"a{x}", "a{x}", "a{x}"),
        (r"été (\w+)", "été première", "première"),
    ],
)
def test_examples_of_patterns(pattern, text, found):
    assert compile_pattern(pattern).last_match(text) == found == last_of_finditer(pattern, text)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(a+)+$", "a" * 5000 + "b"),
        ("(a|a)+$", "a" * 5000 + "b"),
        ("a*a*a*a*a*c", "a" * 5000),
        (r"(\w+\s?)+\.", "word " * 1000),
    ],
)
def test_patterns_on_which_re_backtracks_forever_find_nothing_in_bounded_steps(pattern, text):
    assert compile_pattern(pattern).last_match(text) is None


def test_a_search_that_takes_too_many_steps_is_refused():
    # Every `a` is a match and a look at all the rest.
    with pytest.raises(PatternError, match=f"takes more than {MAX_SEARCH_STEPS} steps on a text of 5000 characters"):
        compile_pattern("a.*b|a").last_match("a" * 5000)


def test_only_matches_that_begin_near_the_end_are_found():
    digits = compile_pattern(r"\d+x*")
    assert digits.last_match("7" + "x" * SEARCH_LENGTH) is None
    assert digits.last_match("y7" + "x" * (SEARCH_LENGTH - 1)) == "7" + "x" * (SEARCH_LENGTH - 1)
    assert compile_pattern("^y").last_match("y" * (SEARCH_LENGTH + 1)) is None


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("", f"1 to {MAX_PATTERN_LENGTH} characters, got 0"),
        ("a" * (MAX_PATTERN_LENGTH + 1), f"1 to {MAX_PATTERN_LENGTH} characters"),
        ("(", "not a regular expression"),
        ("*a", "not a regular expression"),
        ("a{99999999999}", "not a regular expression"),
        (r"(a)\1", "not supported"),
        ("(?=a)b", "not supported"),
        ("(?<!a)b", "not supported"),
        ("(?P<x>a)(?P=x)", "not supported"),
        ("(?i:a)", "not supported"),
        ("(?#note)a", "not supported"),
        ("a*+", "possessive|not a regular expression"),
        ("(a*)*", r"repeats \(\*\) something that can match the empty string"),
        (r"(?:a|\b)+", "can match the empty string"),
        ("(?:a{50}){50}", "too large"),
        ("(?:(?:){9999999}){9999999}", "can match the empty string"),
        ("^$", "can only match the empty string"),
        ("(" * (MAX_NESTING + 1) + "a" + ")" * (MAX_NESTING + 1), "nests groups deeper"),
    ],
)
def test_a_pattern_that_cannot_be_used_says_why(pattern, words):
    with pytest.raises(PatternError, match=words):
        compile_pattern(pattern)
