"""Learning by served name: rollouts, rewards, lengths, heads and reports of one adapter are its own."""

import json
import struct

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.kernel.http.fake_engine import MODEL, FakeEngine
from tests.kernel.http.test_errors import check_error
from tests.parts.pruning.fakes import FakeLearning, succeeded
from tests.parts.pruning.learning_steps import DETECTION_LENGTH, PRUNING, post, rewards_of, roll, teach
from tests.parts.shaping.fakes import FakeShaping
from vllm_rollout import RolloutClient
from vllm_rollout.config import MAX_ADAPTERS
from vllm_rollout.parts.pruning.http.body import HEAD_HEADER
from vllm_rollout.parts.pruning.rules.pruning_plan import HeadKey

HEAD = "/v1/quality_head"
REPORT = "/v1/quality_head/report"
PROMPTS = "/v1/rollouts/prompts"
ODD = "\u4e2d/s q l@1"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(adapters=("a", "b", ODD, *(f"step {number}" for number in range(2 * MAX_ADAPTERS))))


def metadata_of(head: bytes) -> dict[str, str]:
    (length,) = struct.unpack_from("<Q", head)
    metadata: dict[str, str] = json.loads(head[8 : 8 + length])["__metadata__"]
    return metadata


async def test_an_adapter_begins_with_a_cold_start_whatever_others_know(http):
    await teach(http)
    answer = await roll(http, model="a")
    assert answer.model == "a"
    assert answer.usage.num_pruned == 0
    (warning,) = answer.warnings
    assert "cold start" in warning
    assert "0 positive and 0 negative" in warning, "of the adapter, not of the base model"
    assert (await roll(http)).usage.num_pruned > 0


async def test_redundancy_auto_goes_by_the_adapters_own_lengths(http, engine: FakeEngine):
    body = {"prompts": [{"id": name, "prompt": name} for name in "xy"], "group_size": 4, "audit_ratio": 0}
    for model, lengths in (("a", {0: 3, 1: 3, 2: 3, 3: 3}), ("b", {0: 2, 1: 9, 2: 20, 3: 39})):
        engine.lengths = lengths
        assert (await http.post("/v1/rollouts", json={**body, "model": model})).status_code == 200
    keys = ["id:x", "id:y"]
    shaping = engine.part(FakeShaping)
    means = [[known.mean for known in (await shaping.length_history(keys, model)).prompts] for model in "ab"]
    assert means[0] == [3, 3]
    assert min(means[1]) > 10
    assert (await shaping.length_history(keys)).prompts == [None, None]
    auto = {**body, "redundancy": "auto", "model": MODEL}
    answer = (await http.post("/v1/rollouts", json=auto)).json()
    assert [group["allocation"]["std_tokens"] for group in answer["groups"]] == [None, None]
    answer = (await http.post("/v1/rollouts", json={**auto, "model": "a"})).json()
    assert [group["allocation"]["std_tokens"] for group in answer["groups"]] == [0, 0]
    answer = (await http.post("/v1/rollouts", json={**auto, "model": "b"})).json()
    assert min(group["allocation"]["std_tokens"] for group in answer["groups"]) > 5
    listed = (await http.get(PROMPTS, params={"model": "b"})).json()
    assert {prompt["id"] for prompt in listed["data"]} == {"x", "y"}


@pytest.mark.parametrize(
    ("method", "path"), [("GET", HEAD), ("PUT", HEAD), ("GET", REPORT), ("GET", PROMPTS)]
)  # fmt: skip
async def test_a_name_that_is_not_served_is_a_404_that_says_so(http, method, path):
    response = await http.request(method, path, params={"model": "unheard of"})
    check_error(response, 404, "model", ["'unheard of'", MODEL])
    check_error(await http.request(method, path, params={"model": ""}), 400, "model", [])


async def test_a_head_is_put_in_an_adapters_place_and_scores_its_candidates(http, engine: FakeEngine):
    await teach(http)
    weights = (await http.get(HEAD)).content
    answer = await http.put(HEAD, params={"model": ODD}, content=weights)
    assert (answer.status_code, answer.json()["adapter"]) == (200, ODD)
    assert set(engine.part(FakeLearning).heads) == {HeadKey(DETECTION_LENGTH), HeadKey(DETECTION_LENGTH, ODD)}
    got = await http.get(HEAD, params={"model": ODD})
    assert metadata_of(got.content) == metadata_of(weights), "the file says what model the states are of"
    assert json.loads(got.headers[HEAD_HEADER])["adapter"] == ODD
    shadow = {"detection_length": DETECTION_LENGTH, "mode": "shadow"}
    for model, version in ((ODD, engine.part(FakeLearning).heads[HeadKey(DETECTION_LENGTH)].version), ("a", 0)):
        answer = await roll(http, model=model, pruning=shadow)
        assert {each.head_version for group in answer.groups for each in group.trajectories} == {version}


async def test_rewards_of_several_names_come_in_one_post(http, engine: FakeEngine):
    rewards = []
    for model in (None, "a", "b"):
        answer = await roll(http, model=model)
        groups = {group.prompt_id: group.group_id for group in answer.groups}
        rewards += [
            {"group_id": groups[each["prompt_id"]], "index": each["index"], "reward": each["reward"]}
            for each in rewards_of(answer)
        ]
    posted = (await http.post("/v1/rewards", json={"rewards": rewards})).json()
    named = [{"group_id": told["group_id"], "index": told["index"]} for told in posted["results"]]
    assert named == [{"group_id": reward["group_id"], "index": reward["index"]} for reward in rewards]
    assert {(told["request_id"], told["status"], told["message"]) for told in posted["results"]} == {
        (None, "accepted", None)
    }
    assert posted["num_training"] == len(rewards)
    assert posted["counts"]["accepted"] == len(rewards)
    assert posted["head_versions"] == {"8": 0}
    assert posted["adapter_head_versions"] == {"a": {"8": 0}, "b": {"8": 0}}
    assert set(engine.part(FakeLearning).heads) == {HeadKey(DETECTION_LENGTH, adapter) for adapter in ("", "a", "b")}


async def gauges(http: httpx.AsyncClient, name: str) -> dict[str, float]:
    """Gauges by adapter."""
    families = text_string_to_metric_families((await http.get("/metrics")).text)
    samples = [sample for family in families for sample in family.samples if sample.name == f"vllm_rollout:{name}"]
    return {sample.labels["adapter"]: sample.value for sample in samples}


async def test_gauges_name_the_adapter_and_their_number_is_bounded(http):
    for number in range(2 * MAX_ADAPTERS):
        await post(http, await roll(http, model=f"step {number}"))
    await post(http, await roll(http))
    names = {"", *(f"step {number}" for number in range(MAX_ADAPTERS))}
    assert set(await gauges(http, "rewards_awaited")) == names
    assert set(await gauges(http, "length_mean_tokens")) <= names
    assert (await gauges(http, "head_version"))[""] == 0


def test_the_client_brings_heads_reports_prompts_and_state_back_by_name(client: RolloutClient, engine: FakeEngine):
    for seed in range(12):
        sampling = {"seed": seed, "min_tokens": 12}
        answer = client.rollout(["x"], 4, 4, model="a", pruning=PRUNING, sampling_params=sampling)
        rewards = [("0", t.index, succeeded(t.token_ids)) for t in answer.groups[0].trajectories]
        client.post_rewards(answer.id, rewards)
    head, report, state = client.quality_head(model="a"), client.report(8, model="a"), client.state()
    assert head.head.version == report.head.version > 0
    assert (head.head.adapter, report.adapter, report.signals["head"].auc > 0.5) == ("a", "a", True)
    assert (client.prompts(model="a").num_prompts, client.prompts().num_prompts) == (1, 0)
    (only,) = client.prompts(model="a", sort="success", limit=1).data
    assert client.prompts(model="a", after=only.key).data == []
    engine.part(FakeLearning).heads.clear()
    assert client.set_quality_head(head.weights, model="b").adapter == "b"
    assert metadata_of(client.quality_head(8, "b").weights) == metadata_of(head.weights)
    client.set_state(state)
    assert (client.quality_head(8, "a").head, client.report(model="a")) == (head.head, report)
