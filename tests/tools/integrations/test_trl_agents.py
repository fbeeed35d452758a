"""Conversations of an environment of TRL's that race, without TRL: a small module has what is used of its templates."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.parts.sessions.turns import decode
from vllm_rollout.integrations.trl_agents import TRLAgents, tools_of

SUFFIX = "\n"


class Tokenizer:
    """A token per character; a chat is its contents in lines."""

    response_template = "known"

    def apply_chat_template(self, conversation: list[Any], tools: Any, chat_template: str | None, **_: Any) -> Any:
        assert [tool.__name__ for tool in tools] == ["add", "fails"]
        return {"input_ids": [tokens(f"{chat_template}\n" + "\n".join(m["content"] for m in c)) for c in conversation]}


def tokens(text: str) -> list[int]:
    return list(map(ord, text))


def parse_response(tokenizer: Tokenizer, ids: list[int], prefix: list[int], tools: Any) -> dict[str, Any]:
    """An answer "so add 1 2" calls that tool, and "so add 1 2;add 3 4" two."""
    text = decode(ids)
    assert decode(prefix).endswith(text.removeprefix("so ")), "what came before"
    calls = [call.split() for call in text.removeprefix("so ").split(";") if call.split()[0] in ("add", "fails", "no")]
    functions = [{"name": name, "arguments": dict(zip("ab", map(int, rest), strict=False))} for name, *rest in calls]
    message: dict[str, Any] = {"role": "assistant", "content": text}
    return {**message, "tool_calls": [{"function": each} for each in functions]} if functions else message


@pytest.fixture(autouse=True)
def _trl(monkeypatch: pytest.MonkeyPatch) -> None:
    trl, module = ModuleType("trl"), ModuleType("trl.chat_template_utils")
    module.parse_response = parse_response  # type: ignore[attr-defined]
    module.is_chat_template_prefix_preserving = lambda tokenizer: False  # type: ignore[attr-defined]
    module.get_training_chat_template = lambda tokenizer: "training"  # type: ignore[attr-defined]
    trl.chat_template_utils = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trl", trl)
    monkeypatch.setitem(sys.modules, "trl.chat_template_utils", module)


class Adder:
    """An environment; the calls of those beyond `quick` last until `ends`."""

    made = 0
    quick = 100
    ends = threading.Event()
    was_waited_for = False

    def __init__(self) -> None:
        self.number, Adder.made = Adder.made, Adder.made + 1

    def reset(self, prompt: Any, bonus: float = 0.0, **columns: Any) -> str | None:
        self.total = bonus
        return columns.get("says")

    def add(self, a: int, b: int) -> int:
        self.total += a + b
        if self.number > self.quick:  # the first one was made to see what tools there are
            Adder.was_waited_for |= not self.ends.wait(20)
        return a + b

    async def fails(self) -> None:
        raise KeyError("nothing")

    def get_reward(self) -> float:
        return self.total

    def _private(self) -> None: ...


@pytest.fixture(autouse=True)
def _adder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (("made", 0), ("quick", 100), ("ends", threading.Event()), ("was_waited_for", False)):
        monkeypatch.setattr(Adder, name, value)
    yield
    Adder.ends.set()


def model(training: bool = True, max_position_embeddings: int = 1000) -> SimpleNamespace:
    return SimpleNamespace(training=training, config=SimpleNamespace(max_position_embeddings=max_position_embeddings))


def trainer(rows: list[dict[str, Any]], num_generations: int = 2, **more: Any) -> SimpleNamespace:
    settings: dict[str, Any] = {
        "model": model(), "accelerator": SimpleNamespace(process_index=0, wait_for_everyone=lambda: None),
        "train_dataset": rows, "eval_dataset": rows, "num_generations": num_generations, "num_generations_eval": 1,
        "processing_class": Tokenizer(), "tools": [], "chat_template": None, "chat_template_kwargs": {},
        "max_tool_calling_iterations": 3, "max_completion_length": 100, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
        "min_p": None, "repetition_penalty": 1.0,
        "args": SimpleNamespace(vllm_structured_outputs_regex=None, generation_kwargs={"seed": 3}),
        "_get_tool_suffix_ids": lambda messages: tokens("\n" + ";".join(each["content"] for each in messages)),
    }  # fmt: skip
    return SimpleNamespace(**{**settings, **more})


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def told(output: dict[str, list[Any]]) -> list[tuple[str, str]]:
    """Per completion its text, and the text of the policy in it with a dot per other token."""
    rows = zip(output["completion_ids"], output["env_mask"], strict=True)
    return [(decode(ids), "".join(chr(i) if m else "." for i, m in zip(ids, mask, strict=True))) for ids, mask in rows]


def test_conversations_have_their_tools_their_masks_and_their_rewards(url, turns):
    rows = [{"prompt": chat("add 1 2;add 3 4"), "bonus": 0.5}, {"prompt": chat("hello"), "bonus": 7.0}]
    agents = TRLAgents(url, environment_factory=Adder)
    of = trainer(rows)
    output = agents([rows[place]["prompt"] for place in (0, 0, 1, 1, 1)], of)  # the last of a group that was cut in two
    with_tool = ("so add 1 2;add 3 4\n3;7so 3;7", "so add 1 2;add 3 4....so 3;7")
    assert told(output) == [with_tool] * 2 + [("so hello", "so hello")] * 3
    assert [decode(ids) for ids in output["prompt_ids"][1:3]] == ["training\nadd 1 2;add 3 4", "training\nhello"]
    assert [logprob == -1.0 for logprob in output["logprobs"][0]] == [bool(m) for m in output["env_mask"][0]]
    assert agents.rewards(**output) == [10.5, 10.5, 7.0, 7.0, 7.0]
    assert [each.get_reward() for each in output["environments"]] == [10.5, 10.5, 7.0, 7.0, 7.0]
    assert [message["role"] for message in output["messages"][0]] == ["assistant", "tool", "tool", "assistant"]
    assert of.chat_template == "training", "as TRL does for tools of its own"
    assert {body["seed"] for body in turns.bodies} == {3, 4}, "siblings differ"
    assert sorted(body["max_tokens"] for body in turns.bodies) == [78, 78, 100, 100, 100, 100, 100]


def test_losers_are_stopped_and_their_tools_are_not_waited_for(url):
    Adder.quick = 2
    rows = [{"prompt": chat("add 1 2")}]
    output = TRLAgents(url, environment_factory=Adder, redundancy=2)([chat("add 1 2")] * 2, trainer(rows))
    assert [text for text, _ in told(output)] == ["so add 1 2\n3so 3"] * 2
    assert [environment.number for environment in output["environments"]] == [1, 2]
    assert (Adder.made, Adder.was_waited_for) == (5, False)


def test_what_a_tool_raises_and_a_tool_that_is_not_there_are_told_as_trl_tells_them(url):
    output = TRLAgents(url, environment_factory=Adder)([chat("fails;no")], trainer([{"prompt": chat("fails;no")}], 1))
    said = """{'error': "'nothing'"};{'error': 'Tool no not found.'}"""
    assert told(output)[0][0] == f"so fails;no\n{said}so {said}"


@pytest.mark.parametrize(
    ("limits", "text", "reward"),
    [
        ({"max_tool_calling_iterations": 0}, "so add 1 2", 0.0),
        ({"max_completion_length": 12}, "so add 1 2", 3.0),
        ({"max_completion_length": 13}, "so add 1 2\n3so 3", 3.0),
        (
            {"model": model(max_position_embeddings=28)},
            "so add 1 2",
            3.0,
        ),
    ],
)
def test_a_conversation_ends_at_trl_s_limits(url, limits, text, reward):
    rows = [{"prompt": chat("add 1 2")}]
    output = TRLAgents(url, environment_factory=Adder)([chat("add 1 2")], trainer(rows, 1, **limits))
    assert (told(output)[0][0], output["environment_reward"]) == (text, [reward])


def test_an_evaluation_has_its_own_rows_and_number_of_generations(url, turns):
    of = trainer([], model=model(training=False), eval_dataset=[{"prompt": chat("hello"), "bonus": 3.0}])
    output = TRLAgents(url, environment_factory=Adder)([chat("hello")] * 2, of)
    assert (output["environment_reward"], turns.num_groups) == ([3.0, 3.0], 2)


def test_what_reset_says_is_added_to_the_prompt(url):
    rows = [{"prompt": chat("hello "), "says": "you"}]
    output = TRLAgents(url, environment_factory=Adder)([chat("hello ")], trainer(rows, 1))
    assert (decode(output["prompt_ids"][0]), told(output)[0][0]) == ("training\nhello you", "so hello you")


def test_a_trainer_with_tools_and_a_group_that_stays_incomplete_are_refused(url):
    agents = TRLAgents(url, environment_factory=Adder)
    with pytest.raises(ValueError, match="train on the tools' words"):
        agents([chat("hello")], trainer([], tools=[print]))
    with pytest.raises(ValueError, match="the data set has no"):
        agents([chat("hello")], trainer([]))

    class Broken(Adder):
        def reset(self, **columns: Any) -> None:
            raise RuntimeError("no sandbox")

    with pytest.raises(RuntimeError, match="has 0 conversations, 2 are needed"):
        TRLAgents(url, environment_factory=Broken, max_sessions=2)([chat("a")] * 2, trainer([{"prompt": chat("a")}]))


def test_tools_are_the_public_methods_but_two():
    assert [tool.__name__ for tool in tools_of(Adder())] == ["add", "fails"]
