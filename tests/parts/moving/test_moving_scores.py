"""Groups with pruning that move between two schedulers."""

from vllm.lora.request import LoRARequest

from tests.parts.pruning.scored_runs import add_group, prune_by_sign
from tests.parts.pruning.steps import judge_of, scores
from vllm_rollout.kernel.rules.rewards import Reward
from vllm_rollout.parts.pruning.rules.pruning_plan import HeadKey, PruningPlan


def test_scores_and_verdicts_continue(new_ranks):
    plan = PruningPlan(detection_length=32, keep_ratio=0.5, target_positive_ratio=0.5)
    ranks = new_ranks()
    for run in ranks.runs:
        prune_by_sign(run, 32)
    ids = add_group(
        ranks.runs[0], "g", [60] * 4, group_size=2, pruning=plan, logits=[1.0, -1.0, 1.0, -1.0], early_stop=False
    )
    ranks.until("g-0", 20)
    ranks.move("g")
    ranks.until("g-0", 40)
    ranks.move("g", source=1, epoch=2)
    ranks.run()
    run = ranks.runs[0]
    assert [run.state(id) for id in ids] == ["finished", "pruned", "finished", "pruned"]
    assert scores(run.note("g-0")).assessment.score == 1.0
    ledger = judge_of(ranks.runs[0].scheduler).ledger
    assert [ledger.reward("rollout", "g", index, 1.0)[0] for index in range(4)] == [
        "accepted", "unknown", "accepted", "unknown",
    ]  # fmt: skip
    ledger = judge_of(ranks.runs[1].scheduler).ledger
    assert [ledger.reward("rollout", "g", index, 1.0)[0] for index in range(4)] == [
        "unknown", "unfinished", "unknown", "unfinished",
    ]  # fmt: skip


def test_what_a_moved_candidate_teaches_is_its_adapters(new_ranks):
    plan = PruningPlan(detection_length=32, mode="shadow", allow_fewer=True)
    ranks = new_ranks()
    lora = LoRARequest("a", 1, "/a")
    add_group(ranks.runs[0], "g", [60] * 2, 2, pruning=plan, logits=[1.0, -1.0], lora_request=lora)
    ranks.until("g-0", 20)
    ranks.move("g")
    ranks.run()
    first, second = (judge_of(run.scheduler) for run in ranks.runs)
    assert list(second.memories.all()) == ["", "a"]
    assert list(second.known("a").learnings) == [32]
    assert second.memory.learnings == {}
    assert list(first.memories.all()) == [""]
    _, _, labels = second.reward("rollout", [Reward("g", index, 1.0, True) for index in range(2)])
    assert [label.key for label in labels] == [HeadKey(32, "a")] * 2
