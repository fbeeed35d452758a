"""How a turn's prompt goes on from the turns before, and what is kept of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.server.sessions.trajectory import Conversation, Turn

WORDS = ["", "a", "b", "ab", " ", "\n", "<end>", "ba", "é", "�"]
"""The vocabulary: "ab" is one token or two."""
A, B, AB, SPACE, LINE, END, BA, ACUTE, BROKEN = range(1, 10)


def decode(tokens: Sequence[int]) -> str:
    return "".join(WORDS[token] for token in tokens)


def turn(history: str = "first", **fields: object) -> Turn:
    return Turn(history, 0, 0, 0, "stop", 0.0, 0.0, 0.0)


def conversation(
    prompt: Sequence[int], answer: Sequence[int], text: str | None = None, logprobs: Sequence[float] | None = None
) -> Conversation:
    begun = Conversation()
    begun.add(turn(), prompt, answer, logprobs, decode(answer) if text is None else text)
    return begun


@pytest.mark.parametrize(
    ("prompt", "history", "tokens"),
    [
        ([A, B, A, B, END, LINE, A], "extended", [A, B, A, B, END, LINE, A]),
        ([A, B, A, B, END], "extended", [A, B, A, B, END]),
        ([AB, A, B, END, LINE, A], "mended", [A, B, A, B, END, LINE, A]),
        ([A, BA, B, END, LINE, A], "mended", [A, B, A, B, END, LINE, A]),
        ([A, B, AB, END], "mended", [A, B, A, B, END]),
        ([A, B, A, B, SPACE, END, LINE], "reformatted", None),
        ([A, B, A, B, LINE, A], "reformatted", None),  # without the stop token
        ([A, B, A, END, LINE, A], "rewritten", None),
        ([A, B], "rewritten", None),  # cut
        ([], "rewritten", None),
    ],
)
def test_how_a_prompt_goes_on(prompt, history, tokens):
    begun = conversation([A, B], [A, B, END], text="ab")
    found = begun.follow(prompt, decode)
    assert (found.history, list(found.token_ids)) == (history, prompt if tokens is None else tokens)


def test_another_history_is_shown_where_it_begins():
    begun = conversation([A, B], [A, A, END], text="aa")
    found = begun.follow([A, B, A, B, END], decode)
    assert found.where == "character 3 of the conversation: it was 'a', the request has 'b<end>'"


def test_what_no_text_stands_for_is_not_mended():
    """A token that is a part of a character has no text of its own."""
    begun = conversation([A], [BROKEN, END], text="")
    assert begun.follow([A, ACUTE, END], decode).history == "reformatted"


def test_segments_hold_what_was_seen_and_who_generated_it():
    begun = conversation([A, B], [A, END], logprobs=[-1.0, -2.0])
    begun.add(turn("extended"), [A, B, A, END, LINE, B], [B, END], [-3.0, -4.0], "b")
    begun.add(turn("rewritten"), [B], [A], None, "a")
    first, second = begun.segments
    assert list(first.token_ids) == [A, B, A, END, LINE, B, B, END]
    assert list(first.mask) == [0, 0, 1, 1, 0, 0, 1, 1]
    assert list(first.logprobs or ()) == [0, 0, -1, -2, 0, 0, -3, -4]
    assert (list(second.token_ids), list(second.mask), second.logprobs) == ([B, A], [0, 1], None)
    assert begun.num_held_tokens == 10


def test_log_probabilities_are_kept_where_every_turn_had_them():
    begun = conversation([A], [B], logprobs=None)
    begun.add(turn("extended"), [A, B, A], [B], [-1.0], "b")
    assert begun.segments[0].logprobs is None
    begun = conversation([A], [B], logprobs=[-1.0])
    begun.add(turn("extended"), [A, B, A], [B], None, "b")
    assert begun.segments[0].logprobs is None


TOKENS = st.lists(st.sampled_from([A, B, AB, SPACE, END, BA]), min_size=1, max_size=12)


@given(first=TOKENS, answer=TOKENS, more=TOKENS, data=st.data())
def test_the_same_text_is_never_another_history_and_is_mended_to_the_tokens_that_were_there(first, answer, more, data):
    begun = conversation(first, answer)
    known = [*first, *answer]
    text = decode(known)
    written: list[int] = []
    while text:  # in any tokens that say it
        token = data.draw(st.sampled_from([t for t in (A, B, AB, SPACE, END, BA) if text.startswith(WORDS[t])]))
        written.append(token)
        text = text.removeprefix(WORDS[token])
    found = begun.follow([*written, *more], decode)
    assert found.history in ("extended", "mended")
    assert list(found.token_ids)[: len(known)] == known
    assert decode(found.token_ids) == decode([*written, *more])
