"""Forward passes over new tokens give the numbers of one pass over the whole trajectory, whatever the chunks."""

import gc
from contextlib import suppress
from functools import cache
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from vllm_rollout.training.incremental import IncrementalLogprobs, Logprobs
from vllm_rollout.training.stream import StreamTrainer

transformers = pytest.importorskip("transformers")
VOCABULARY = 23


@cache
def model_of(kind, dtype=torch.float64):
    """Llama turns keys by their position, with fewer of them than queries; GPT-2 looks positions up."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16}
    config = transformers.AutoConfig.for_model(
        kind, **sizes, **({"num_key_value_heads": 2, "intermediate_size": 32} if kind == "llama" else {})
    )
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def whole(model, prompt, answer, temperature=1.0):
    """Log probabilities and entropies of an answer, by one pass: each [num_tokens]."""
    token_ids = torch.tensor([*prompt, *answer])
    logprobs = (model(input_ids=token_ids[None]).logits[0] / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
    return logprobs.gather(-1, token_ids[len(prompt) :, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def tokens(*sizes):
    return st.lists(st.integers(0, VOCABULARY - 1), min_size=sizes[0], max_size=sizes[1])


trajectories = st.lists(st.tuples(tokens(1, 5), tokens(0, 12)), min_size=1, max_size=4)


def stream(passes, pairs, chunks):
    """Answers come in chunks of drawn lengths, of one candidate or another, with passes in between."""
    sent = [0] * len(pairs)
    for i, (prompt, _) in enumerate(pairs):
        passes.begin(("q", i), prompt)
    while any(sent[i] < len(answer) for i, (_, answer) in enumerate(pairs)):
        i = chunks.draw(st.sampled_from([i for i, (_, answer) in enumerate(pairs) if sent[i] < len(answer)]))
        size = chunks.draw(st.integers(1, 6))
        passes.add(("q", i), sent[i], pairs[i][1][sent[i] : sent[i] + size])
        sent[i] += size
        if chunks.draw(st.booleans()):
            waiting = passes.num_new
            assert passes.forward() == waiting
            assert passes.num_new == 0


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@settings(max_examples=30, deadline=None)
@given(
    pairs=trajectories, chunks=st.data(), room=st.sampled_from([1, 10, 4096]), temperature=st.sampled_from([1.0, 0.7])
)
def test_any_chunks_give_the_numbers_of_the_whole(kind, pairs, chunks, room, temperature):
    model = model_of(kind)
    passes = IncrementalLogprobs(model, entropy=True, temperature=temperature, max_pass_tokens=room)
    stream(passes, pairs, chunks)
    for i, (prompt, answer) in enumerate(pairs):
        found, expected = passes.finish(("q", i)), whole(model, prompt, answer, temperature)
        assert not found.logprobs.requires_grad
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-10, atol=1e-10)
    assert passes.cache_bytes == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"), [("gpt2", torch.float64, 1e-10), ("llama", torch.float32, 2e-5)]
)  # Llama's norms compute in float32, whatever its weights have
@settings(max_examples=20, deadline=None)
@given(pairs=trajectories.filter(lambda pairs: any(answer for _, answer in pairs)), chunks=st.data())
def test_kept_activations_give_the_gradient_of_the_whole(kind, dtype, tolerance, pairs, chunks):
    model = model_of(kind, dtype)
    losses = torch.cat([-whole(model, prompt, answer)[0] * (1 + i) for i, (prompt, answer) in enumerate(pairs)])
    expected = torch.autograd.grad(losses.mean(), list(model.parameters()))
    passes = IncrementalLogprobs(model, keep_activations=True)
    stream(passes, pairs, chunks)
    trainer = StreamTrainer(model.parameters())
    trainer.begin(1)
    found = torch.cat([-passes.finish(("q", i)).logprobs * (1 + i) for i in range(len(pairs))])[None]
    trainer.add(found, torch.ones_like(found))
    trainer.finish()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=tolerance, atol=tolerance)
    trainer.abandon()


def test_prompts_do_not_share_a_graph():
    """So each group's backward pass can run when the group ends, while others grow."""
    passes = IncrementalLogprobs(model_of("llama"), keep_activations=True)
    for prompt in "ab":
        passes.begin((prompt, 0), [1, 2])
        passes.add((prompt, 0), 0, [3, 4, 5])
    passes.forward()
    for prompt in "ab":
        passes.finish((prompt, 0)).logprobs.sum().backward()
    model_of("llama").zero_grad()


def test_a_stopped_candidate_leaves_no_cache_and_no_trace():
    passes = IncrementalLogprobs(model_of("llama"))
    for i in range(3):
        passes.begin(("q", i), [1, 2, 3])
        passes.add(("q", i), 0, [4 + i] * 8)
    assert (passes.forward(), passes.num_new) == (30, 0)
    per_token = passes.cache_bytes // 30
    assert per_token == 2 * 2 * 2 * 4 * 8  # layers, keys and values, heads, their size, float64
    assert passes.drop(("q", 1)) == 10
    assert passes.cache_bytes == 20 * per_token
    torch.testing.assert_close(
        passes.finish(("q", 2)).logprobs, whole(model_of("llama"), [1, 2, 3], [6] * 8)[0], rtol=1e-10, atol=1e-10
    )
    assert passes.cache_bytes == 10 * per_token
    passes.begin(("q", 1), [1])  # a candidate that restarted


class OutOfMemory(TorchFunctionMode):
    """Memory is out at the n-th call of `torch.cat` or `clone`."""

    def __init__(self, n):
        super().__init__()
        self.calls_left = n

    def __torch_function__(self, function, _types, arguments=(), named=None):
        if function in (torch.cat, torch.Tensor.clone):
            self.calls_left -= 1
            if self.calls_left == 0:
                raise torch.OutOfMemoryError
        return function(*arguments, **(named or {}))


def test_what_ran_out_of_memory_can_run_again():
    """Whatever call it was: no token is counted or cached twice, and no trajectory is lost."""
    model, pairs = model_of("llama"), {("q", 0): ([1, 2, 3], [4, 5, 6, 7]), ("q", 1): ([9], [3, 2, 1])}
    expected = {key: whole(model, *pair) for key, pair in pairs.items()}
    for n in count(1):
        passes, found = IncrementalLogprobs(model, entropy=True), {}
        for key, (prompt, answer) in pairs.items():
            passes.begin(key, prompt)
            passes.add(key, 0, answer[:2])
        passes.forward()
        for key, (_, answer) in pairs.items():
            passes.add(key, 2, answer[2:])
        with suppress(torch.OutOfMemoryError), OutOfMemory(n) as memory:
            passes.forward()
            found.update((key, passes.finish(key)) for key in pairs)
        passes.forward()
        left = pairs.keys() - found.keys()
        num_cached = sum(len(prompt) + len(answer) - 1 for prompt, answer in map(pairs.get, left))
        assert passes.cache_bytes == num_cached * 2 * 2 * 2 * 4 * 8
        found.update((key, passes.finish(key)) for key in left)
        for key, values in found.items():
            torch.testing.assert_close(values, Logprobs(*expected[key]), rtol=1e-10, atol=1e-10, check_dtype=False)
        if memory.calls_left > 0:
            return


def test_a_pass_leaves_no_joined_cache_behind():
    passes = IncrementalLogprobs(model_of("llama"))
    passes.begin(("q", 0), [1, 2, 3])
    gc.collect()
    gc.disable()
    try:
        for first in range(0, 4, 2):
            passes.add(("q", 0), first, [4, 5])
            passes.forward()
        assert not [each for each in gc.get_objects() if type(each) is passes._cache_class]
    finally:
        gc.enable()


def test_chunks_that_do_not_join_are_refused():
    passes = IncrementalLogprobs(model_of("llama"))
    passes.begin(("q", 0), [1, 2])
    passes.add(("q", 0), 0, [3, 4, 5])
    for offset in (0, 2, 4):
        with pytest.raises(
            ValueError, match=rf"\('q', 0\) begins at offset {offset}, but 3 tokens have come.*begin again"
        ):
            passes.add(("q", 0), offset, [7])
    passes.add(("q", 0), 3, [7])
    assert len(passes.finish(("q", 0)).logprobs) == 4


def test_misuse_is_named():
    model = model_of("llama")
    passes = IncrementalLogprobs(model)
    for attempt in (
        lambda: passes.add(("q", 1), 0, [1]),
        lambda: passes.finish(("q", 1)),
        lambda: passes.drop(("q", 1)),
    ):
        with pytest.raises(ValueError, match=r"\('q', 1\) is not on its way; 0 others are"):
            attempt()
    with pytest.raises(ValueError, match="has no tokens"):
        passes.begin(("q", 1), [])
    passes.begin(("q", 1), [1])
    with pytest.raises(ValueError, match="has begun before"):
        passes.begin(("q", 1), [1])
    with pytest.raises(ValueError, match="temperature must be above 0, got 0"):
        IncrementalLogprobs(model, temperature=0)
    with pytest.raises(ValueError, match="max_pass_tokens must be at least 1, got 0"):
        IncrementalLogprobs(model, max_pass_tokens=0)


def test_weights_that_change_under_a_trajectory_are_noticed():
    model = transformers.AutoModelForCausalLM.from_config(model_of("llama").config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    passes = IncrementalLogprobs(model)
    passes.begin(("q", 0), [1, 2, 3])
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    optimizer.step()
    with pytest.raises(RuntimeError, match="weights have changed while 1 trajectories"):
        passes.forward()
    passes.drop(("q", 0))
    passes.begin(("q", 0), [1, 2, 3])
    passes.forward()


def test_models_that_forget_or_keep_no_cache_are_refused():
    config = transformers.AutoConfig.for_model(
        "mistral", vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, sliding_window=4,
    )  # fmt: skip
    with pytest.raises(ValueError, match="layers of the model are sliding_attention"):
        IncrementalLogprobs(transformers.AutoModelForCausalLM.from_config(config))
    model = transformers.AutoModelForCausalLM.from_config(model_of("llama").config).train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"returns no past_key_values.*gradient_checkpointing_disable"):
        IncrementalLogprobs(model)
