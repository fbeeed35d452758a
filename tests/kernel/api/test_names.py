"""Adapters that are served under one name, one after the other."""

from types import SimpleNamespace

import pytest
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from vllm_rollout.adapter.names import MAX_NAMES, AdapterNames, learned_name
from vllm_rollout.kernel.api.client import RolloutAsyncLLM
from vllm_rollout.kernel.api.refusals import refuses_prompt_logprobs


def test_adapters_of_one_name_are_told_apart_and_learn_under_it():
    names = AdapterNames()
    first, second, third = (LoRARequest("sql@7", number, "/somewhere") for number in (1, 2, 3))
    assert names.told_apart(first) is first
    assert len({first, names.told_apart(second), names.told_apart(third), names.told_apart(second)}) == 3
    assert second.lora_name == "sql@7", "vLLM's own is not changed"
    assert {learned_name(names.told_apart(each)) for each in (first, second, third)} == {"sql@7"}


def test_names_without_end_are_not_remembered_without_end():
    names = AdapterNames()
    for number in range(1, MAX_NAMES + 10):
        names.told_apart(LoRARequest(f"step-{number}", number, "/somewhere"))
    assert len(names._first) == MAX_NAMES


@pytest.mark.parametrize(("lora", "is_cpu"), [(True, True), (True, False), (False, True)])
def test_log_probabilities_of_prompts_are_refused_beside_adapters_on_a_cpu(monkeypatch, lora, is_cpu):
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: is_cpu)
    config = SimpleNamespace(lora_config=object() if lora else None)
    assert refuses_prompt_logprobs(config) == (lora and is_cpu)


async def test_an_adapter_that_took_the_place_of_another_is_not_read_again_in_each_step():
    """Every request carries the adapter along as it was loaded."""

    class Core:
        async def add_lora_async(self, lora: LoRARequest) -> bool:
            loaded.append(lora.load_inplace)
            return True

    class Client(RolloutAsyncLLM):
        def shutdown(self, timeout: float | None = None) -> None:
            """Do nothing: nothing has started."""

    loaded: list[bool] = []
    client = Client.__new__(Client)
    client.engine_core = Core()
    lora = LoRARequest("a", 1, "/a", load_inplace=True)
    assert await client.add_lora(lora)
    assert (loaded, lora.load_inplace) == ([True], False)
