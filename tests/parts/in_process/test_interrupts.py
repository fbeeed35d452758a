"""Ctrl-C, and whatever else is raised, in programs that wait for a `vllm_rollout.LLM`: nothing runs on or is torn.

Real are the LLM, the service, vLLM's engine and the scheduler; the device is emulated, in this process. An interrupt is
a real SIGINT, amid the so-manyeth call of a Python function, so that it comes wherever it likes and at the same place
again.
"""

from __future__ import annotations

import _weakrefset
import asyncio
import contextlib
import gc
import json
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

import vllm_rollout
from vllm_rollout.adapter.options import ServeOptions
from vllm_rollout.kernel.http.serialised import GroupsInJson
from vllm_rollout.parts.emulation.options import EXECUTOR_CLS, WORKER_CLS, EmulationOptions
from vllm_rollout.parts.in_process.api import engine_args
from vllm_rollout.parts.in_process.api.interrupts import PATIENCE_S, HeldInterrupts, WaitingLoop

PROMPTS = [[3, 4, 5], [6, 7, 8]]
DEVICE = {"step": {"ms": 0.01}, "kv_tokens": 80_000, "lengths": {"log_normal": {"mean": 30, "sigma": 0.3}}, "seed": 0}
GROUPS = SamplingParams(n=2, max_tokens=200, extra_args={"rollout_redundancy": 2})
PLAIN = SamplingParams(max_tokens=200)


@pytest.fixture(scope="module")
def engine(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> vllm_rollout.LLM:
    device = tmp_path_factory.mktemp("device") / "device.json"
    device.write_text(json.dumps(DEVICE))
    emulation = EmulationOptions(str(device))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setattr(engine_args, "WORKER_CLS", WORKER_CLS)
        return vllm_rollout.LLM(
            tiny_model,
            max_model_len=512,
            max_num_seqs=32,
            enforce_eager=True,
            distributed_executor_backend=EXECUTOR_CLS,
            additional_config=emulation.into(ServeOptions(audit_ratio=0.0).into({})),
        )


@pytest.fixture
def llm(engine: vllm_rollout.LLM) -> Iterator[vllm_rollout.LLM]:
    """As good as new before and after each test."""
    assert_good_as_new(engine)
    yield engine
    assert_good_as_new(engine)


def assert_good_as_new(llm: vllm_rollout.LLM) -> None:
    assert in_engine(llm) == []
    answer = llm.rollout(PROMPTS[:1], 2, 1, sampling_params={"max_tokens": 200})
    assert [group.status for group in answer.groups] == ["complete"]
    assert len(llm.generate(prompts(1), GROUPS, use_tqdm=False)) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def in_engine(llm: vllm_rollout.LLM) -> list[str]:
    """Whatever the scheduler has, running or waiting."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return [*scheduler.requests, *llm.llm_engine.output_processor.request_states]


def prompts(num: int) -> list[Any]:
    return [{"prompt_token_ids": [9, 9, number]} for number in range(num)]


def rollout(llm: vllm_rollout.LLM) -> None:
    llm.rollout(PROMPTS, 2, 2, sampling_params={"max_tokens": 200}, include=["text", "logprobs"])


def stream(llm: vllm_rollout.LLM) -> None:
    for _ in llm.stream(PROMPTS, 2, 2, stream_tokens=8, sampling_params={"max_tokens": 200}):
        pass


def generate(llm: vllm_rollout.LLM) -> None:
    llm.generate(prompts(2), GROUPS, use_tqdm=False)


def generate_plain(llm: vllm_rollout.LLM) -> None:
    llm.generate(prompts(2), SamplingParams(n=2, max_tokens=200), use_tqdm=False)


WEAK_REFERENCES = {weakref.__file__, _weakrefset.__file__}


@contextmanager
def called(do: Callable[[int], None]) -> Iterator[None]:
    """`do` is told the number of each call of a Python function that may raise: weak references let nothing out."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        code = frame.f_code
        if event == "call" and code.co_name != "__del__" and code.co_filename not in WEAK_REFERENCES:
            count += 1
            do(count)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def interrupt(*_: Any) -> None:
    signal.raise_signal(signal.SIGINT)


def interrupted(llm: vllm_rollout.LLM, use: Callable[[vllm_rollout.LLM], None], moments: list[int]) -> bool:
    """Use it, with an interrupt at each of these calls. False when it was over before."""
    num = 0

    def look(count: int) -> None:
        nonlocal num
        if count in moments:
            num += 1
            interrupt()

    try:
        with called(look):
            use(llm)
    except KeyboardInterrupt:
        assert num
    else:
        assert not num, "an interrupt was swallowed"
    gc.collect()
    return num > 0


USES = [rollout, stream, generate]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # interrupted before it was
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("gaps", [(), (3000, 200)], ids=["once", "three-times"])
def test_an_interrupt_at_whatever_moment_ends_all_and_the_next_call_works(llm, use, gaps):
    """From the first calls on, at distances that grow, to the last; further interrupts so many calls later."""
    moment, num_moments = 1, 0
    while interrupted(llm, use, [moment + sum(gaps[:place]) for place in range(len(gaps) + 1)]):
        if gaps:  # the second one may come before what ends a stream has begun: the next call does it
            rollout(llm)
        assert in_engine(llm) == [], f"at call {moment}"
        moment, num_moments = moment + 1 + moment // 8, num_moments + 1
    assert num_moments > 40


PLACES = {
    "schedule": lambda llm: llm.llm_engine.engine_core.engine_core.scheduler,
    "update_from_output": lambda llm: llm.llm_engine.engine_core.engine_core.scheduler,
    "process_outputs": lambda llm: llm.llm_engine.output_processor,
    "_run": lambda llm: asyncio.events.Handle,
    "answer": lambda llm: GroupsInJson,
}
"""Functions by name, and who has them: a step scheduled and not, its outputs, a turn of the loop, the answer."""


@pytest.mark.parametrize("name", PLACES)
def test_an_interrupt_amid_a_step_between_steps_or_at_the_answer_leaves_no_candidate_behind(llm, monkeypatch, name):
    """The moments that matter, by name: the ones above come close to all of them, but do not say so."""
    owner, calls = PLACES[name](llm), []
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupting(getattr(owner, name), calls))
        with pytest.raises(KeyboardInterrupt):
            rollout(llm)
    assert calls
    assert in_engine(llm) == []


def interrupting(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    """The function, whose first calls are interrupted: the engine's are many, that of the answer is one."""

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) in (1, 3):
            interrupt()
        return function(*args, **kwargs)

    return interrupted


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_what_the_body_of_a_loop_over_a_stream_raises_ends_the_stream(llm, error):
    def fail() -> None:
        for _ in llm.stream(PROMPTS, 2, 2, stream_tokens=1, sampling_params={"max_tokens": 200}):
            assert in_engine(llm)
            raise error

    with pytest.raises(error):
        fail()
    assert in_engine(llm) == []


def test_a_stream_that_is_left_or_closed_ends(llm):
    for _ in llm.stream(PROMPTS, 2, 2, stream_tokens=1, sampling_params={"max_tokens": 200}):
        break
    gc.collect()
    assert in_engine(llm) == []
    events = llm.stream(PROMPTS, 2, 2, stream_tokens=1, sampling_params={"max_tokens": 200})
    next(events)
    events.close()
    assert in_engine(llm) == []


def test_an_interrupted_stream_leaves_another_one_as_it_was(llm):
    first = llm.stream(PROMPTS, 2, 2, stream_tokens=1, sampling_params={"max_tokens": 200})
    next(first)
    second = llm.stream(PROMPTS, 2, 2, sampling_params={"max_tokens": 200})
    with called(lambda count: interrupt() if count == 20_000 else None), pytest.raises(KeyboardInterrupt):
        list(second)
    assert [event.status for event in first if event.type == "group"] == ["complete"] * 2


@pytest.mark.parametrize("use", [*USES, generate_plain])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_a_step_itself_raises_leaves_no_candidate_behind(llm, monkeypatch, use, error):
    """As an interrupt that waits no more, or an engine's own failure."""
    calls, step = [], llm.llm_engine.step

    def failing() -> Any:
        calls.append(None)
        if len(calls) == 4:
            raise error("amid a step")
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine, "step", failing)
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                use(llm)
        else:
            with contextlib.suppress(RuntimeError):  # of `generate`; the others say it of each group
                use(llm)
    assert in_engine(llm) == []


@pytest.mark.parametrize("bad", [[9] * 600, [9, 10**6]], ids=["when-added", "when-launched"])
@pytest.mark.parametrize("params", [GROUPS, [GROUPS, GROUPS, PLAIN, GROUPS]], ids=["groups", "mixed"])
def test_one_bad_prompt_among_groups_leaves_none_of_its_siblings(llm, bad, params):
    with pytest.raises((ValueError, VLLMValidationError), match=r"600|vocabulary"):
        llm.generate([*prompts(3), {"prompt_token_ids": bad}], params, use_tqdm=False)
    assert in_engine(llm) == []
    assert len(llm.generate(prompts(2), GROUPS, use_tqdm=False)) == 2


def test_parameters_that_are_refused_leave_none_of_those_before_them_and_all_that_was_enqueued(llm):
    bad = SamplingParams(n=2, max_tokens=5, extra_args={"rollout_redundancy": 99})
    for first in (GROUPS, PLAIN):
        with pytest.raises(VLLMValidationError, match="rollout_redundancy"):
            llm.generate(prompts(2), [first, bad], use_tqdm=False)
        assert in_engine(llm) == []
        llm.enqueue(prompts(2), first, use_tqdm=False)
        with pytest.raises(VLLMValidationError, match="rollout_redundancy"):
            llm.enqueue(prompts(2), [first, bad], use_tqdm=False)
        assert len(llm.wait_for_completion(use_tqdm=False)) == 2


def test_inside_a_running_event_loop_it_waits_as_vllm_does(llm):
    """As in a cell of a notebook."""

    async def amid() -> None:
        loop = asyncio.get_running_loop()
        rollout(llm)
        assert asyncio.get_running_loop() is loop
        await asyncio.sleep(0)

    asyncio.run(amid())


# -- what is held


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_what_a_handler_raises_waits_until_the_block_has_ended_and_stops_it_once():
    stopped, after = [], []

    def hold() -> None:
        with HeldInterrupts(lambda: stopped.append(1)):
            interrupt()
            interrupt()
            after.append(1)

    with pytest.raises(KeyboardInterrupt):
        hold()
    assert (stopped, after) == ([1], [1])


def test_after_a_while_an_interrupt_waits_no_more():
    clock, after = Clock(), []

    def hold() -> None:
        with HeldInterrupts(lambda: None, clock):
            interrupt()
            clock.now_s = PATIENCE_S
            interrupt()
            after.append(1)
            clock.now_s += 1
            interrupt()
            after.append(2)

    with pytest.raises(KeyboardInterrupt):
        hold()
    assert after == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_raises_nothing_runs_at_once_and_one_that_is_set_meanwhile_stays(monkeypatch):
    called: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: called.append(number))
    try:
        with HeldInterrupts(lambda: called.append(0)):
            signal.raise_signal(signal.SIGUSR1)
            assert called == [signal.SIGUSR1]
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert called == [signal.SIGUSR1]


def test_the_last_exception_is_raised_whichever_signal_it_is_of():
    def hold() -> None:
        with HeldInterrupts(lambda: None):
            interrupt()
            signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    try:
        with pytest.raises(SystemExit):
            hold()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_another_thread_there_is_nothing_to_hold():
    def run() -> int:
        return WaitingLoop().run(asyncio.sleep(0, 7))

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run).result() == 7
