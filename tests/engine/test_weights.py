"""New weights under running groups, held against the model itself: log probabilities, versions, KV."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.conftest import V2, Server, paused, python_path, serve_command, with_other_weights
from tests.support.reference import worst
from vllm_rollout import RolloutClient, RolloutError
from vllm_rollout.adapter.compat import SCALE_OUT_FLAG, WEIGHT_SPANS, has
from vllm_rollout.kernel import parts

pytestmark = pytest.mark.versions

PROMPTS = [[(7 * i * (j + 1)) % 300 + 3 for i in range(70)] for j in range(2)]
FLAGS = ["--max-model-len", "1024", "--max-num-seqs", "8", "--dtype", "float32"]
FLAGS += ["--enable-scale-out"] if has(SCALE_OUT_FLAG) else []  # before, its endpoints are always there
TOLERANCE = 1e-4
"""In nats: float32 here and there. Stale KV was off by up to 4.8."""


@pytest.fixture(scope="module")
def folders(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Models of one shape: two whose weights differ in every number, and one whose weights are not finite."""
    chance = torch.Generator().manual_seed(1)

    def noisy(each: torch.Tensor) -> torch.Tensor:
        return each + 0.3 * each.float().std() * torch.randn(each.shape, generator=chance).to(each.dtype)

    folder = tmp_path_factory.mktemp("weights")
    bad = with_other_weights(tiny_model, folder / "bad", lambda each: each + torch.nan)
    return [tiny_model, with_other_weights(tiny_model, folder / "other", noisy), bad]


@pytest.fixture(scope="module")
def changing(folders: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("changing") / "log"
    extension = ["--worker-extension-cls", "trainer_extension.TrainerExtension"]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": python_path(Path(__file__).parent)}
    with Server(serve_command(folders[0], *FLAGS, *extension), log, **environment) as server:
        yield server


def give(server: Server, folder: str, name: str | None = None) -> None:
    call = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
    server.http.post("/collective_rpc", json=call).raise_for_status()
    if name is not None:
        server.http.post("/update_weight_version", json={"new_version": name}).raise_for_status()


def roll(server: Server, prompt: list[int], num_tokens: int) -> dict[str, Any]:
    body = {
        "prompts": [{"prompt_token_ids": prompt}], "group_size": 4, "include": ["logprobs"],
        "sampling_params": {"max_tokens": num_tokens, "ignore_eos": True, "seed": 5},
    }  # fmt: skip
    answer = server.http.post("/v1/rollouts", json=body)
    answer.raise_for_status()
    (group,) = answer.json()["groups"]
    return group


@pytest.mark.parametrize("pauses", [True, False])
def test_what_begins_after_an_update_is_the_new_weights_own_and_what_runs_says_where_it_changed(
    changing: Server, folders: list[str], pauses: bool
) -> None:
    give(changing, folders[0], "old")
    roll(changing, PROMPTS[0], 20)  # its prompt is in the prefix cache
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(roll, changing, PROMPTS[1], 900)
        changing.wait_until(lambda: changing.num_in_engine >= 4 or running.done())
        if pauses:
            with paused(changing):
                give(changing, folders[1], "new")
        else:
            give(changing, folders[1], "new")
        later = [roll(changing, prompt, 40) for prompt in PROMPTS]
        straddling = running.result()
    for prompt, group in zip(PROMPTS, later, strict=True):
        for trajectory in group["trajectories"]:
            assert len(trajectory["weight_versions"]) == 1
            assert worst(folders[1], prompt, trajectory) < TOLERANCE
        assert group["off_policy"] is False
    assert straddling["off_policy"] is True
    assert len(straddling["weight_versions"]) == 2
    for trajectory in straddling["trajectories"]:
        old, new = trajectory["weight_versions"]
        assert 0 < old["end"] == new["start"] < new["end"] == 900
        assert worst(folders[0], PROMPTS[1], trajectory, old["end"]) < TOLERANCE
        assert worst(folders[0], PROMPTS[1], trajectory, old["end"] + 3) > TOLERANCE, "the boundary is exact"
        assert (old["version"], new["version"]) == ("old", "new")


@pytest.mark.skipif(not has(WEIGHT_SPANS), reason="this vLLM has no spans")
@pytest.mark.parametrize("pauses", [True, False])
def test_a_request_without_our_fields_says_where_the_weights_changed_whose_trainer_names_none(
    changing: Server, folders: list[str], pauses: bool
) -> None:
    sampling = {"max_tokens": 900, "ignore_eos": True, "logprobs": 0}
    body = {"token_ids": PROMPTS[1], "sampling_params": sampling}
    give(changing, folders[0])
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(changing.http.post, "/inference/v1/generate", json=body)
        changing.wait_until(lambda: changing.num_in_engine >= 1 or running.done())
        if pauses:
            with paused(changing):
                give(changing, folders[1])
        else:
            give(changing, folders[1])
        answer = running.result().raise_for_status()
    (choice,) = answer.json()["choices"]
    old, new = choice["weight_versions"]
    logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
    trajectory = {"token_ids": choice["token_ids"], "logprobs": logprobs}
    assert old["version"] != new["version"]
    assert 0 < old["end"] == new["start"] < new["end"] == 900
    assert worst(folders[0], PROMPTS[1], trajectory, old["end"]) < TOLERANCE
    assert worst(folders[0], PROMPTS[1], trajectory, old["end"] + 3) > TOLERANCE, "the boundary is exact"


@pytest.mark.parametrize("fault", ["another model", "cut file", "amid a load"])
def test_weights_that_cannot_be_loaded_leave_a_server_that_goes_on(
    changing: Server, folders: list[str], tmp_path: Path, fault: str
) -> None:
    give(changing, folders[0], "before")
    broken = with_other_weights(folders[0], tmp_path / "broken", lambda each: each[:-1].clone())
    (file,) = Path(broken).glob("*.safetensors")
    if fault == "cut file":
        content = Path(folders[1], file.name).read_bytes()
        file.write_bytes(content[: len(content) // 2])
    if fault == "amid a load":  # a layer has one half of its weights
        whole = load_file(Path(folders[1], file.name))
        save_file({**whole, "model.norm.weight": whole["model.norm.weight"][:-1]}, file, {"format": "pt"})
    with ThreadPoolExecutor(1) as pool, RolloutClient(str(changing.http.base_url)) as client:
        running = pool.submit(roll, changing, PROMPTS[1], 900)
        changing.wait_until(lambda: changing.num_in_engine >= 4 or running.done())
        with pytest.raises(RolloutError, match="the weights were not loaded"):
            client.give_weights(broken, "broken")
        assert len(running.result()["trajectories"]) == 4
        if fault == "another model":
            (trajectory, *_) = roll(changing, PROMPTS[0], 20)["trajectories"]
            assert worst(folders[0], PROMPTS[0], trajectory) < TOLERANCE
        client.give_weights(folders[1], "after")
    for trajectory in roll(changing, PROMPTS[0], 20)["trajectories"]:
        assert worst(folders[1], PROMPTS[0], trajectory) < TOLERANCE
    assert changing.engines[0]["num_internal_errors"] == 0


def test_requests_wait_while_the_model_lacks_weights(changing: Server, folders: list[str]) -> None:
    """A trainer has died amid a transfer, and another one resumes the server."""
    changing.http.post("/collective_rpc", json={"method": "begin_load"}).raise_for_status()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(roll, changing, PROMPTS[0], 20)
        changing.wait_until(lambda: changing.num_in_engine >= 4 or waiting.done())
        changing.http.post("/resume").raise_for_status()
        assert changing.http.get("/is_paused").json() == {"is_paused": True}
        give(changing, folders[1], "whole")
        for trajectory in waiting.result()["trajectories"]:
            assert worst(folders[1], PROMPTS[0], trajectory) < TOLERANCE
    assert changing.http.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.skipif(not parts.has("feeds"), reason="this server has no feeds")
def test_groups_that_a_pause_aborts_start_again(changing: Server, folders: list[str]) -> None:
    """vLLM's `/pause` aborts what runs by default. A trainer that pauses so loses no prompt of its feed."""
    give(changing, folders[0], "step-0")
    with RolloutClient(str(changing.http.base_url)) as client:
        feed = client.feed(
            group_size=2, batch=2, max_staleness=1, sampling_params={"max_tokens": 300, "ignore_eos": True}
        )
        with feed:
            feed.put([{"id": str(i), "prompt_token_ids": prompt} for i, prompt in enumerate(PROMPTS)])
            changing.wait_until(lambda: changing.num_in_engine >= 4)
            changing.http.post("/pause").raise_for_status()
            give(changing, folders[1], "step-1")
            changing.http.post("/resume").raise_for_status()
            batch = feed.batch()
            assert (sorted(group.prompt_id for group in batch.groups), batch.failed) == (["0", "1"], [])
            spans = {
                span["version"] for group in batch.groups for t in group.trajectories for span in t.weight_versions
            }
            assert spans == {"step-1"}


@pytest.mark.skipif(not parts.has("feeds"), reason="this server has no feeds")
@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_kv_of_a_feeds_groups_is_computed_again_where_the_feed_says_so(
    changing: Server, folders: list[str], on_update: str
) -> None:
    give(changing, folders[0], "first")
    sampling = {"max_tokens": 900, "ignore_eos": True, "seed": 5}
    fields: dict[str, Any] = {"on_update": on_update, "include": ["logprobs"], "sampling_params": sampling}
    with RolloutClient(str(changing.http.base_url)) as client, client.feed(2, 1, max_staleness=1, **fields) as feed:
        before = changing.counter("vllm:generation_tokens_total")
        feed.put([{"prompt_token_ids": PROMPTS[1]}])
        changing.wait_until(lambda: changing.counter("vllm:generation_tokens_total") > before)
        client.give_weights(folders[1], "second", kv="keep")
        (group,) = feed.batch().groups
    for each in group.trajectories:
        old, new = each.weight_versions
        assert (old["version"], new["version"]) == ("first", "second")
        trajectory = {"token_ids": each.token_ids, "logprobs": each.logprobs}
        worst_new = worst(folders[1], PROMPTS[1], trajectory, begin=new["start"])
        assert (worst_new < TOLERANCE) == (on_update == "recompute"), worst_new


def update_under(server: Server, folders: list[str], num_tokens: int) -> None:
    """Log probabilities after the update are those of the new weights alone, as if the tokens before were a prompt."""
    give(server, folders[0], "old")
    plain = {"prompt": PROMPTS[0], "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    before = server.counter("vllm:num_preemptions_total")
    with ThreadPoolExecutor(2) as pool, RolloutClient(str(server.http.base_url)) as client:
        running = pool.submit(roll, server, PROMPTS[1], num_tokens)
        other = pool.submit(server.http.post, "/v1/completions", json=plain)
        server.wait_until(lambda: server.num_in_engine >= 5 or running.done())
        client.give_weights(folders[1], "new")
        later = roll(server, PROMPTS[1], 10)
        straddling = running.result()
        other.result().raise_for_status()
    (engine,) = server.engines
    assert worst(folders[1], PROMPTS[1], later["trajectories"][0]) < TOLERANCE
    for trajectory in straddling["trajectories"]:
        old, new = trajectory["weight_versions"]
        assert (old["version"], new["version"]) == ("old", "new")
        assert worst(folders[0], PROMPTS[1], trajectory, old["end"]) < TOLERANCE
        assert worst(folders[1], PROMPTS[1], trajectory, begin=new["start"]) < TOLERANCE
    assert (engine["weight_version"], engine["num_preemptions"]) == ("new", 0), "but those of another reason"
    assert server.counter("vllm:num_preemptions_total") == before + 4


def test_kv_of_a_group_is_computed_again_and_others_are_undisturbed(changing: Server, folders: list[str]) -> None:
    update_under(changing, folders, 900)


def test_model_runner_v2_computes_it_again_too(folders: list[str], tmp_path: Path) -> None:
    with Server(serve_command(folders[0], *FLAGS), tmp_path / "log", VLLM_SERVER_DEV_MODE="1", **V2) as server:
        update_under(server, folders, 60)


def test_kv_that_bad_weights_have_left_harms_nobody_under_good_ones(changing: Server, folders: list[str]) -> None:
    """Blocks are used again before they are full, and some kernels multiply what is behind their end by 0."""
    give(changing, folders[2], "bad")
    body = {"prompt": "hello", "max_tokens": 600, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        for answer in pool.map(lambda _: changing.http.post("/v1/completions", json=body), range(2)):
            answer.raise_for_status()
    give(changing, folders[0], "good")
    body = {
        "prompts": [{"prompt_token_ids": [20 + i, 30, 40]} for i in range(12)], "group_size": 4,
        "sampling_params": {"max_tokens": 40, "ignore_eos": True},
    }  # fmt: skip
    assert changing.rollout(**body)["usage"]["num_failed"] == 0


def test_turns_of_a_session_say_which_weights_they_are_of(changing: Server, folders: list[str]) -> None:
    (session,) = changing.http.post("/v1/groups", json={"group_size": 1, "cut_turn": "goes_on"}).json()["to_begin"]
    prompt = list(PROMPTS[0])
    for folder in folders[:2]:
        give(changing, folder)
        body = {"prompt": prompt, "max_tokens": 5, "return_token_ids": True}
        answer = changing.http.post("/v1/completions", json=body, headers={"x-session-id": session})
        answer.raise_for_status()
        prompt += answer.json()["choices"][0]["token_ids"]
    trajectory = changing.http.get(f"/v1/sessions/{session}").json()
    versions = [turn["weight_versions"] for turn in trajectory["turns"]]
    assert [len(spans) for spans in versions] == [1, 1]
    assert versions[0][0]["version"] != versions[1][0]["version"]
    assert trajectory["off_policy"] is True


NUM_UPDATES = 12


def test_updates_under_load_lose_nothing_and_say_whose_each_token_is(changing: Server, folders: list[str]) -> None:
    """Rollouts, sessions, raced and plain requests, and a client that leaves. Each update keeps KV, or has it computed
    again, with a pause or without; the same weights come twice, and older ones again."""
    chance = random.Random(int(os.environ.get("NIGHTLY_SEED", 20)))
    over = threading.Event()
    url = str(changing.http.base_url)

    def rollouts(seed: int) -> list[tuple[list[int], dict[str, Any]]]:
        told = []
        while not over.is_set():
            prompt = PROMPTS[len(told) % 2]
            group = roll(changing, prompt, 250)
            assert (group["status"], len(group["trajectories"])) == ("complete", 4)
            told += [(prompt, each) for each in group["trajectories"]]
        return told

    def sessions() -> list[tuple[list[int], dict[str, Any]]]:
        """Each turn as a trajectory of its own, which begins with the turns before."""
        told = []
        while not over.is_set():
            (session,) = changing.http.post("/v1/groups", json={"group_size": 1, "cut_turn": "goes_on"}).json()[
                "to_begin"
            ]
            prompts = [list(PROMPTS[1])]
            for _ in range(3):
                body = {
                    "prompt": prompts[-1],
                    "max_tokens": 40,
                    "return_token_ids": True,
                    "logprobs": 0,
                    "ignore_eos": True,
                }
                (choice,) = changing.http.post("/v1/completions", json=body, headers={"x-session-id": session}).json()[
                    "choices"
                ]
                told.append(
                    (prompts[-1], {"token_ids": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"]})
                )
                prompts.append([*prompts[-1], *choice["token_ids"]])
            turns = changing.http.get(f"/v1/sessions/{session}").json()["turns"]
            for (_, trajectory), turn in zip(told[-3:], turns, strict=True):
                trajectory["weight_versions"] = turn["weight_versions"]
        return told

    def others() -> int:
        num = 0
        while not over.is_set():
            body = {
                "prompt": PROMPTS[0],
                "max_tokens": 60,
                "n": 1 + num % 3,
                "vllm_xargs": {"rollout_redundancy": num % 2},
            }
            changing.http.post("/v1/completions", json=body).raise_for_status()
            with suppress(httpx.TimeoutException):
                httpx.post(f"{url}/v1/completions", json={**body, "max_tokens": 900, "ignore_eos": True}, timeout=0.2)
            num += 1
        return num

    kinds: dict[str, str] = {}
    with ThreadPoolExecutor(4) as pool, RolloutClient(url) as client:
        give(changing, folders[0], "0-begin")
        kinds["0-begin"] = "recompute"
        running = [pool.submit(rollouts, 1), pool.submit(rollouts, 2), pool.submit(sessions)]
        loaded = pool.submit(others)
        for number in range(NUM_UPDATES):
            folder, kind = chance.randrange(2), chance.choice(["keep", "recompute", "no pause"])
            version = f"{folder}-{number}"
            kinds[version] = kind
            if kind == "no pause":
                give(changing, folders[folder], version)
            else:
                client.give_weights(folders[folder], version, kv=kind)
            time.sleep(chance.random() / 2)
        over.set()
        trajectories = [each for thread in running for each in thread.result()]
        assert loaded.result() > 0
    changing.wait_until_idle()
    (engine,) = changing.engines
    assert engine["num_internal_errors"] == 0
    num_changes = num_recomputed = 0  # of weights, amid trajectories: a slow machine has few trajectories of many spans
    for prompt, trajectory in trajectories:
        spans = trajectory["weight_versions"]
        assert [spans[0]["start"], *(span["end"] for span in spans[:-1])] == [span["start"] for span in spans]
        assert spans[-1]["end"] == len(trajectory["token_ids"])
        num_changes += len(spans) - 1
        for span in spans:
            version = span["version"]
            if version in kinds and (span is spans[0] or kinds[version] == "recompute"):  # else its name came later
                folder = folders[int(version[0])]
                assert worst(folder, prompt, trajectory, span["end"], span["start"]) < TOLERANCE, (span, spans)
                num_recomputed += span is not spans[0]
    assert num_changes > 5
    assert num_recomputed > 0
