"""Texts of turns, compared piece by piece: as if they were compared whole, and no further than they are the same."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parts.sessions.session_engine import followed
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.parts.sessions.http import trajectory as module
from vllm_rollout.parts.sessions.http.asked import turn_from_xargs
from vllm_rollout.parts.sessions.http.trajectory import Comparison, Conversation, Turn

WORDS = [b"a", b"b", b"ab", b" ", b"ba", "é".encode(), "é".encode()[:1], "é".encode()[1:], "😀".encode(), b"\n"]
"""The vocabulary. As of real ones some tokens are parts of characters."""
WORDS += [bytes([byte]) for byte in "😀".encode()]


def decode(tokens: Sequence[int]) -> str:
    """A space at the beginning is left out, as by tokenizers made with SentencePiece."""
    return b"".join(WORDS[token] for token in tokens).decode(errors="replace").removeprefix(" ")


def conversation(prompt: Sequence[int], answer: Sequence[int], text: str | None = None) -> Conversation:
    begun = Conversation()
    begun.add(
        Turn("first", 0, 0, 0, "stop", 0.0, 0.0, 0.0), prompt, answer, None, decode(answer) if text is None else text
    )
    return begun


def whole(begun: Conversation, prompt: Sequence[int]) -> tuple[str, list[int]]:
    """The specification: everything is decoded at once."""
    known = list(begun.segments[-1].token_ids)
    if prompt[: len(known)] == known:
        return "extended", list(prompt)
    at = next((at for at, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b), len(prompt))
    start = max(0, at - 1)
    text = decode(known[start:])
    if text and "\N{REPLACEMENT CHARACTER}" not in text:
        for num in range(len(prompt) - start + 1):
            if decode(prompt[start : start + num]) == text:
                return "mended", [*known, *prompt[start + num :]]
    said = "".join((decode(known[: begun._num_before]) + begun._sent).split())
    return ("reformatted" if "".join(decode(prompt).split()).startswith(said) else "rewritten"), list(prompt)


TOKENS = st.lists(st.integers(0, len(WORDS) - 1), max_size=24)


@given(first=TOKENS, answer=TOKENS, other=TOKENS, at=st.integers(0, 24), data=st.data())
def test_it_is_found_what_would_be_found_in_whole_texts(first, answer, other, at, data):
    known = [*first, *answer]
    rest = b"".join(WORDS[token] for token in known[at:])
    rewritten: list[int] = []
    while rest and data.draw(st.integers(0, 20)):  # the rest in other tokens, for as long as chance wants it
        token = data.draw(st.sampled_from([n for n, word in enumerate(WORDS) if rest.startswith(word)]))
        rewritten.append(token)
        rest = rest[len(WORDS[token]) :]
    prompt = [*known[:at], *rewritten, *other]
    begun = conversation(first, answer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_TOKENS", data.draw(st.integers(1, 5)))
        found = followed(begun, prompt, decode)
    assert (found.history, list(found.token_ids)) == whole(begun, prompt)


class Counted:
    """A decoder that counts the tokens it decodes."""

    def __init__(self) -> None:
        self.num_tokens = self.most = 0
        self.threads: set[int] = set()

    def __call__(self, tokens: Sequence[int]) -> str:
        self.num_tokens += len(tokens)
        self.most = max(self.most, len(tokens))
        self.threads.add(threading.get_ident())
        return decode(tokens)


@pytest.mark.parametrize("num_tokens", [4_000, 32_000])
@pytest.mark.parametrize(
    ("rest", "history", "num_readings"),
    [
        ([2, 0, 1], "mended", 1),
        ([2, 3], "mended", 1),
        ([3, 2], "reformatted", 2),
        ([5], "rewritten", 3),  # at the very end of a text in other tokens
    ],
)
def test_each_token_is_decoded_a_few_times_however_many_there_are(num_tokens, rest, history, num_readings):
    begun = conversation([0, 1] * (num_tokens // 2), [2], text="ab")
    count = Counted()
    found = followed(begun, [2] * (num_tokens // 2) + rest, count)
    assert found.history == history
    assert count.most <= module.PIECE_TOKENS + 2 * module.OVERLAP_TOKENS
    of_both = 1.5 * num_tokens
    assert count.num_tokens <= num_readings * 1.2 * of_both + 10 * module.PIECE_TOKENS


@pytest.mark.parametrize("num_tokens", [4_000, 32_000])
def test_texts_that_differ_soon_are_not_read_on(num_tokens):
    begun = conversation([0, 1] * (num_tokens // 2), [2])
    count = Counted()
    found = followed(begun, [0, 5] * (num_tokens // 2), count)
    assert (found.history, found.where) == (
        "rewritten",
        f"token 1 of its prompt or later: it was {'ba' * 20!r}, the request has {'éa' * 20!r}",
    )
    assert count.num_tokens <= 8 * (module.PIECE_TOKENS + 4 * module.OVERLAP_TOKENS)


async def test_texts_are_compared_beside_the_event_loop_and_the_turn_may_still_be_refused(service, http):
    declared = await http.post("/v1/groups", json={"group_size": 1})
    (session,) = declared.json()["to_begin"]
    said = turn_from_xargs({}, session, n=1)
    first = service.turn(said, None, [0, 1])
    service.begin(first)
    service.end(first, [0, 1], [0], text="a", finish_reason="stop")
    service._decode = count = Counted()
    late = service.turn(said, None, [2, 0, 1])
    assert (type(late.continuation), count.num_tokens) == (Comparison, 0)
    assert list((await service.compare(late)).token_ids) == [0, 1, 0, 1]
    assert count.threads.isdisjoint({threading.get_ident()})
    wrong = service.turn(said, None, [2, 1, 1])
    with pytest.raises(RequestError, match="does not go on from the turns before, at token 0 of its prompt or later"):
        await service.compare(wrong)
    assert service.begin(late)
