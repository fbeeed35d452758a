"""Dumped drafts that are torn, of another format, or made to harm."""

import struct
import zlib

import numpy as np
import pytest

from vllm_rollout.parts.drafts.worker.memory import DraftMemory
from vllm_rollout.parts.drafts.worker.memory_file import MAGIC, dump_prompts, load_prompts


def tokens(*values):
    return np.array(values, "<i4").tobytes()


def sealed(body):
    return MAGIC + struct.pack("<I", zlib.crc32(body)) + body


def body(num_prompts=1, key=b"p", stem=(1, 2), num_sequences=1, branch=2, versions_old=0, own=(3, 4), **lengths):
    """One prompt of one sequence; `lengths` are told instead of the true ones."""
    told = {"key": len(key), "stem": len(stem), "own": len(own)}
    told |= {name.removesuffix("_length"): length for name, length in lengths.items()}
    return (
        struct.pack("<QQQQ", num_prompts, told["key"], told["stem"], num_sequences)
        + key
        + tokens(*stem)
        + struct.pack("<QQQ", branch, versions_old, told["own"])
        + tokens(*own)
    )


def test_what_is_dumped_is_loaded():
    prompts = [(b"p", tokens(1, 2), [(2, 0, tokens(3, 4)), (0, 7, tokens(5))]), (b"", b"", [(0, 1, tokens(2**31 - 1))])]
    assert load_prompts(dump_prompts(prompts)) == prompts
    assert load_prompts(dump_prompts([])) == []
    assert load_prompts(sealed(body())) == [(b"p", tokens(1, 2), [(2, 0, tokens(3, 4))])]


def test_data_torn_anywhere_or_changed_anywhere_are_refused_and_change_nothing():
    data = sealed(body())
    memory = DraftMemory(10**6)
    for end in range(len(data)):
        with pytest.raises(ValueError, match="drafts"):
            memory.load(data[:end])
        with pytest.raises(ValueError, match="drafts"):
            memory.load(data[:end] + bytes([data[end] ^ 1]) + data[end + 1 :])
    with pytest.raises(ValueError, match="torn"):
        memory.load(data + b"\0")
    assert memory.num_prompts == 0
    memory.load(data)
    assert memory.num_prompts == 1


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (body(num_prompts=2), "24 bytes must follow, got 0"),
        (body(num_prompts=0), "must end after their last prompt"),
        (body() + b"\0", "got 1 more bytes"),
        (body(num_sequences=2**63), "24 bytes must follow"),
        (body(num_sequences=0), "must have a sequence, got none"),
        (body(own=()), "must have a token, got none"),
        (body(branch=3), "at most the 2 tokens of its stem, got 3"),
        (body(versions_old=2**31 + 1), "versions ago, got 2147483649"),
        (body(own=(3, -1)), "tokens must not be negative, got -1"),
        (body(stem=(-5, 1)), "tokens must not be negative, got -5"),
    ],
)
def test_counts_and_tokens_that_cannot_be_are_refused_whoever_sealed_them(made, said):
    with pytest.raises(ValueError, match=said):
        DraftMemory(10**6).load(sealed(made))


@pytest.mark.parametrize("length", ["key_length", "stem_length", "own_length"])
def test_a_length_beyond_the_data_asks_for_no_memory(length):
    with pytest.raises(ValueError, match="bytes must follow"):
        load_prompts(sealed(body(**{length: 2**62})))


def test_another_format_is_named():
    with pytest.raises(ValueError, match="must begin with b'vllm-rollout drafts 1"):
        load_prompts(b"vllm-rollout drafts 2\n" + sealed(body())[len(MAGIC) :])
