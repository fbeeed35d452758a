"""Arms on the virtual clock: tokens are the model's, groups obey the bound, and all arms have the same devices."""

import json
import random
from argparse import Namespace

import pytest
import torch

from benchmarks.asynchronous import check, pilot, policy, report
from benchmarks.asynchronous.arms import ARMS, BATCH, DETECTION_LENGTH, GROUP_SIZE
from benchmarks.asynchronous.clock import SLOTS, WORLDS, Clock
from benchmarks.asynchronous.pilot import NUM_PROMPT, Lengths, NoPolicy, clock_of, drawn, plan_of, updates_s
from benchmarks.asynchronous.pruned import Pruner
from benchmarks.asynchronous.run import is_done, train, train_all
from benchmarks.asynchronous.sampler import Answer, Asked, Name, Sampler, Weights
from benchmarks.asynchronous.train import MOMENTS, Graded, Training, most_different
from examples.grpo.model import new_model, new_tokenizer, save
from vllm_rollout.parts.feeds.rules.feed import Feed
from vllm_rollout.training.logprobs import answer_logprobs

PROMPTS = [[1, 30, 5, 9], [1, 30, 5, 9, 7, 8, 12], [1, 6]]


def pilot_lengths(num_steps=6):
    """Lengths with a heavy tail, as a pilot's."""
    chance = random.Random(0)
    return [
        [[min(512, int(chance.lognormvariate(3.5, 1)) + 1) for _ in range(16)] for _ in range(BATCH)]
        for _ in range(num_steps)
    ]


LENGTHS = pilot_lengths()
GROUPS = [group for step in LENGTHS for group in step]
PLAN = plan_of(WORLDS["quarter"], LENGTHS)


def clock_at(name, share=0.25):
    """The arm's clock with this share of the devices."""
    arm = ARMS[name]
    return PLAN.clock.split(share) if arm.splits_devices else clock_of(arm, PLAN, LENGTHS)


def replayed(name, limit_s=PLAN.limit_s / 4):
    training = Training(ARMS[name], clock_at(name), Lengths(drawn(GROUPS)), NoPolicy())
    return training, list(training.go(limit_s))


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads are several times slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models():
    """Two models without training, whose next tokens are far from uniform."""
    found = [new_model(seed).eval() for seed in (0, 1)]
    for model in found:
        with torch.no_grad():
            model.lm_head.weight *= 20
    return found


def model_logprobs(model, prompt, answer):
    logprobs, mask = answer_logprobs(model, [prompt], [answer.token_ids])
    return logprobs[mask > 0].tolist()


def test_sampled_tokens_have_the_models_log_probabilities(models):
    sampler = Sampler(Weights(models[0]), seed=0)
    sampler.launch([Asked(group, ids, 5) for group, ids in enumerate(PROMPTS)])
    answers = [answer for _ in range(20) for answer in sampler.step()]
    sampler.launch([Asked(7, PROMPTS[0], 2)])  # another wave
    answers += sampler.stop([Name(1, index) for index in range(5)])
    answers += [answer for _ in range(90) for answer in sampler.step()]
    answers += sampler.stop([Name(group, index) for group in range(8) for index in range(5)])
    assert sampler.num_running == 0
    assert sorted(answer.name for answer in answers) == [(g, i) for g in range(3) for i in range(5)] + [(7, 0), (7, 1)]
    assert max(len(answer.token_ids) for answer in answers) > 64  # KV has grown
    for answer in answers:
        prompt = PROMPTS[answer.name.group % 7]
        assert answer.logprobs == pytest.approx(model_logprobs(models[0], prompt, answer), abs=1e-4)


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_change_between_two_tokens(models, recompute):
    sampler = Sampler(Weights(models[0]), seed=1)
    sampler.launch([Asked(group, ids, 4) for group, ids in enumerate(PROMPTS)])
    for _ in range(8):
        sampler.step()
    sampler.load(Weights(models[1]), recompute=recompute)
    for _ in range(4):
        sampler.step()
    answers = sampler.stop([Name(group, index) for group in range(3) for index in range(4)])
    whole = [answer for answer in answers if len(answer.token_ids) == 12]
    assert whole
    for answer in whole:
        assert answer.versions == [0] * 8 + [1] * 4
        old, new = (model_logprobs(model, PROMPTS[answer.name.group], answer) for model in models)
        assert answer.logprobs[:8] == pytest.approx(old[:8], abs=1e-4)
        assert (answer.logprobs[8:] == pytest.approx(new[8:], abs=1e-4)) is recompute


def test_states_are_those_of_the_last_tokens(models):
    sampler = Sampler(Weights(models[0]), seed=0)
    sampler.launch([Asked(group, ids, 4) for group, ids in enumerate(PROMPTS)])
    for _ in range(6):
        sampler.step()
    names = [Name(2, 1), Name(0, 3), Name(1, 0)]
    sampler.stop([Name(group, index) for group in range(3) for index in range(4) if (group, index) not in names])
    logprobs = sampler.weights.logprobs(sampler.states(names))
    answers = {answer.name: answer for answer in sampler.stop(names)}
    for name, its in zip(names, logprobs, strict=True):
        assert its[answers[name].token_ids[-1]].item() == pytest.approx(answers[name].logprobs[-1], abs=1e-5)


def test_pruning_learns_which_candidates_are_right():
    pruner, chance = Pruner(4, seed=0), torch.Generator().manual_seed(0)
    kept, right_kept = 0, 0
    for number in range(80):
        names = [Name(number, index) for index in range(16)]
        right = torch.arange(16) % 4 == 0
        states = torch.randn(16, 4, generator=chance) + 4 * right[:, None]
        stopped = pruner.prune(names, states, at_least=6)
        assert number > 0 or not stopped  # it has no rewards
        assert len(stopped) <= 10
        left = [name for name in names if name not in stopped]
        answers, rewards = [Answer(name, [5] * 40, [], [0]) for name in left], [float(right[n.index]) for n in left]
        if number >= 60:
            kept, right_kept = kept + len(left), right_kept + sum(rewards)
        pruner.learn([Graded(None, [], answers, rewards, [])])
        assert not pruner.scored
    assert kept == pytest.approx(20 * 8, rel=0.15)  # half
    assert right_kept > 0.9 * 20 * 4


@pytest.mark.parametrize("name", ["pruned", "stale2-pruned"])
def test_half_of_a_group_is_pruned_at_the_detection_length(name):
    training, _ = replayed(name)
    groups = [group for group in training.groups.values() if training.num_steps - group.started > DETECTION_LENGTH]
    assert groups
    for group in groups:
        states = [group.rules.state(index) for index in group.rules.indices]
        num_long = 16 - sum(len(answer.token_ids) <= DETECTION_LENGTH for answer in group.answers.values())
        assert states.count("pruned") == min(num_long // 2, num_long - max(0, GROUP_SIZE - 16 + num_long))
        assert {len(answer.token_ids) for answer in group.stopped} <= {DETECTION_LENGTH}


def test_the_pilot_sets_the_share_of_training():
    for name, world in WORLDS.items():
        plan = plan_of(world, LENGTHS)
        training = Training(ARMS["wait"], plan.clock, Lengths(drawn(GROUPS)), NoPolicy())
        steps = [line for line in training.go(plan.limit_s) if line["kind"] == "step"]
        assert len(steps) == pytest.approx(24, abs=2), name
        assert steps[-1]["training_s"] / steps[-1]["seconds"] == pytest.approx(world.training, rel=0.12), name


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_keeps_the_bound_and_its_devices(name):
    arm, (training, lines) = ARMS[name], replayed(name)
    steps = [line for line in lines if line["kind"] == "step"]
    assert steps
    assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)
    assert len(lines) - len(steps) == len(MOMENTS)
    assert max(step["max_staleness"] for step in steps) <= arm.max_staleness
    assert training.totals["dropped"] == 0 or arm.on_stale == "drop"
    assert training.rollouts.num_running <= SLOTS
    clock = training.clock
    if arm.splits_devices:
        assert clock.rollout_share + clock.training_share == 1
        assert steps[-1]["staleness"] > 0
    else:
        assert steps[-1]["rollout_s"] + steps[-1]["training_s"] <= steps[-1]["seconds"] + 1e-6


def test_what_is_too_old_is_dropped_and_makes_room():
    training, lines = replayed("stale2-drop")
    assert training.totals["dropped"] > 0
    assert lines[-1]["step"] > 10
    assert len(training.groups) <= training.feed.terms.num_places


def test_one_step_off_trains_on_whole_batches_of_the_weights_before():
    _, lines = replayed("off")
    steps = [line for line in lines if line["kind"] == "step"]
    assert {step["staleness"] for step in steps[1:]} == {1.0}


@pytest.mark.parametrize("name", ["rounds", "off-rounds"])
def test_rounds_train_on_each_prompt_once_and_their_long_rounds_wait(name, monkeypatch):
    trained, take = [], Feed.take
    monkeypatch.setattr(Feed, "take", lambda feed: trained.append(take(feed)) or trained[-1])
    training, lines = replayed(name, PLAN.limit_s)
    numbers = [group.number for batch in trained if batch for group in batch]
    assert len(numbers) == len(set(numbers))
    kinds = [record.kind for record in training.rounds.run.history]
    assert kinds[:5] == ["short"] * 4 + ["long"]  # each short round defers 4 of its 20 prompts
    longest = [line["longest"] for line in lines if line["kind"] == "step"]
    assert longest[4] > max(longest[:4])


def test_the_bound_is_faster_than_any_arm_without_a_race(tmp_path):
    _, lines = replayed("wait")
    values = dict.fromkeys(("easy", "hard", "length", "p99", "difference"), 0.5)
    waited = [line | values | {"success": line["seconds"] / lines[-1]["seconds"]} for line in lines]
    start = {"kind": "start", "rollout_share": 1.0, "limit_s": lines[-1]["seconds"]}
    record = tmp_path / "wait-1.jsonl"
    record.write_text("".join(f"{json.dumps(line)}\n" for line in [start, *waited, {"kind": "end"}]))
    wait, bound = report.rows_of(tmp_path, 0)
    assert (bound["arm"], bound["steps"], bound["end"]) == ("bound", wait["steps"], None)
    assert bound["to_0.6"]["seconds"] < wait["to_0.6"]["seconds"]
    updates = {name: replayed(name)[1][-1]["step"] / lines[-1]["seconds"] for name in ("off", "stale1", "stale8")}
    assert 1 / bound["step_s"] > max(updates.values())


def test_a_share_of_devices_is_the_fastest_one():
    arm, plan, shares = ARMS["stale1"], PLAN._replace(limit_s=PLAN.limit_s / 3), [0.1, 0.3, 0.8]
    speeds = {share: updates_s(arm, plan.clock.split(share), plan.limit_s, LENGTHS) for share in shares}
    assert clock_of(arm, plan, LENGTHS, shares) == plan.clock.split(max(speeds, key=speeds.get))
    assert len(set(speeds.values())) == 3


def test_kv_that_is_computed_again_costs_seconds():
    clock = Clock(WORLDS["quarter"], 1e4).split(0.5)
    assert clock.update_s(0) == 1.0
    assert clock.update_s(1000) == pytest.approx(1.0 + 1000 * 16 * 5e-6 / 0.5)
    kept, again = (replayed(name)[1] for name in ("stale2", "stale2-recompute"))
    assert again[-1]["step"] <= kept[-1]["step"]
    assert again[-1]["recomputed"] > 0


def test_a_rollout_takes_the_seconds_of_a_batch_that_empties():
    lengths = [[2] * 8 + [3] * 8] * BATCH  # a race ends after two tokens
    clock = Clock(check.WORLD, 1.0)
    first = [clock.rollout_s(16 * BATCH, 16 * BATCH * (NUM_PROMPT + place)) for place in range(2)]
    assert check.clock_s(ARMS["race"], lengths) == pytest.approx(sum(first))
    third = clock.rollout_s(8 * BATCH, 8 * BATCH * (NUM_PROMPT + 2))
    assert check.clock_s(ARMS["different"], lengths) == pytest.approx(sum(first) + third)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([1, 1, 1, 0], [2, 3]), ([0, 0, 0, 1], [3, 2]), ([1, 1, 1, 1], [3, 2]), ([0, 1, 0, 1], [3, 2])],
)
def test_the_most_different_answers_are_half_right(rewards, expected):
    answers = [Answer(Name(0, index), [5] * length, [], []) for index, length in enumerate((9, 8, 7, 6))]
    assert most_different(answers, [float(reward) for reward in rewards], 2) == expected


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A policy that was not trained. An answer has at most twelve tokens, and is right if the last one is even."""
    save(new_model(0), new_tokenizer(), tmp_path / "model")
    monkeypatch.setattr(policy, "NUM_HELD_OUT", 4)
    monkeypatch.setattr(policy.Policy, "reward", lambda self, problem, answer: float(answer.token_ids[-1] % 2 == 0))
    monkeypatch.setattr("benchmarks.asynchronous.sampler.MAX_TOKENS", 12)
    return str(tmp_path / "model")


@pytest.mark.parametrize("name", ["race-taught", "off", "stale2-recompute", "pruned"])
def test_a_run_learns_and_is_reported(small, tmp_path, monkeypatch, name):
    monkeypatch.setattr("benchmarks.asynchronous.train.DETECTION_LENGTH", 4)
    arm, world = ARMS[name], tmp_path / "quarter"
    world.mkdir()
    last = train(arm, clock_at(name), 20.0, small, 3, world / f"{name}-3.jsonl")
    assert is_done(world / f"{name}-3.jsonl")
    (row,) = report.rows_of(tmp_path / "quarter", 0)
    assert (row["arm"], row["seeds"], row["steps"]) == (name, [3], last["step"])
    assert row["runs"][0]["over_time"]["seconds"][-1] == 20.0
    lines = [json.loads(line) for line in (world / f"{name}-3.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert any(step["gradient_norm"] > 0 for step in steps)
    assert steps[0]["difference"] < 1e-4  # no weights have changed
    assert steps[-1]["token_staleness"] == steps[-1]["staleness"] or not arm.in_batches
    text = report.tables({"worlds": {"quarter": [row]}})
    assert f"| {arm.title} | 1 |" in text


def test_a_completed_run_is_not_repeated(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pilot, "PILOT_STEPS", 2)  # or it lasts longer
    arguments = Namespace(folder=tmp_path, model=small, arms=["wait"], seeds=[1], learning_rate=1e-3)
    lengths = [[[4] * 16] * BATCH] * 3
    assert plan_of(WORLDS["quarter"], lengths).limit_s > 0
    for _ in range(2):
        train_all(arguments, "quarter", lengths)
    assert capsys.readouterr().out.count("wait-1") == 1


def test_a_pilot_is_run_once(small, tmp_path, monkeypatch):
    monkeypatch.setattr(pilot, "PILOT_STEPS", 1)
    monkeypatch.setattr(pilot, "BATCH", 2)
    lengths = pilot.pilot(small, tmp_path / "pilot.json")
    assert [[len(group) for group in step] for step in lengths] == [[pilot.PILOT_SIZE] * 2]
    assert pilot.pilot("no model", tmp_path / "pilot.json") == lengths


def run_of(arm, seed, success):
    over_time = {"seconds": [0.0, 100.0, 200.0], "success": success}
    others = ("end", "end_hard", "end_p99", "steps", "generated", "dropped", "rollout_share", *report.OF_STEPS)
    run = {"arm": arm, "seed": seed, "limit_s": 200.0, "max_staleness": 0, "over_time": over_time}
    return {**run, **report.goals_of(over_time), **dict.fromkeys(others, 1.0)}


def test_a_gain_is_of_pairs_of_seeds(tmp_path):
    waits = [run_of("wait", seed, [0.4, 0.5, 0.7]) for seed in (1, 2, 3)]
    races = [run_of("race", seed, [0.4, 0.8, 0.8]) for seed in (1, 2, 3)] + [run_of("race", 4, [0.4, 0.4, 0.4])]
    never = [run_of("race12", seed, [0.4, 0.4, 0.4]) for seed in (1, 2, 3)]
    wait, race, slow = (report.row_of(runs, 0) for runs in (waits, races, never))
    assert [row["to_0.6"]["seconds"] for row in (wait, race, slow)] == [pytest.approx(150), pytest.approx(50), None]
    assert (race["to_0.6"]["num"], slow["to_0.6"]["num"]) == (3, 0)
    assert report.gain(race, wait, "to_0.6", 0)["value"] == pytest.approx(3)
    assert report.gain(race, wait, "to_0.6", 0)["num"] == 3
    assert (report.gain(slow, wait, "to_0.6", 0)["value"], report.gain(slow, slow, "to_0.6", 0)["value"]) == (0, None)
    report.draw({"worlds": {"quarter": [wait, race, slow]}}, tmp_path / "it.png")
    assert (tmp_path / "it.png").stat().st_size > 10_000


def test_groups_have_eight_answers_to_train_on():
    for arm in ARMS.values():
        assert arm.plan.group_size == (16 if arm.most_different else GROUP_SIZE)
        assert arm.feed.batch == BATCH


def test_runs_of_an_earlier_report_stay_unless_they_were_repeated(tmp_path):
    earlier = [run_of(arm, seed, [0.4, 0.5, 0.7]) for arm in ("wait", "stale2") for seed in (1, 2)]
    lines = [
        {"kind": "start", "rollout_share": 0.5, "limit_s": 200.0},
        *({"kind": "evaluation", "seconds": at, "step": 0, "success": value} for at, value in ((0, 0.4), (100, 0.8))),
        {"kind": "end"},
    ]
    for line in lines[1:3]:
        line |= dict.fromkeys(("easy", "hard", "length", "p99", "generated"), 1)
    (tmp_path / "stale2-2.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    wait, stale = report.rows_of(tmp_path, 0, earlier)
    assert (wait["seeds"], stale["seeds"]) == ([1, 2], [1, 2])
    assert [run["to_0.6"] for run in stale["runs"]] == [pytest.approx(150), pytest.approx(50)]
    assert stale["to_0.6"]["gain"]["num"] == 2


@pytest.mark.parametrize("has_about", [False, True])
def test_a_report_of_no_runs_is_refused_and_replaces_no_file(tmp_path, monkeypatch, capsys, has_about):
    result = tmp_path / "it.json"
    result.write_text("earlier")
    if has_about:
        (tmp_path / "about.json").write_text("{}")
    words = [str(tmp_path), "--output", str(result), "--output-picture", str(tmp_path / "it.png")]
    monkeypatch.setattr("sys.argv", ["report", *words])
    with pytest.raises(SystemExit):
        report.main()
    assert "runs of benchmarks.asynchronous.run" in capsys.readouterr().err
    assert result.read_text() == "earlier"
