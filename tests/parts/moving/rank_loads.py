"""Ranks with groups on them, by hand and drawn."""

from hypothesis import strategies as st

from vllm_rollout.parts.moving.rules.load import GroupLoad, RankLoad, TransferCost
from vllm_rollout.parts.shaping.rules.cost import CostModel, PTLCurve

FLAT = CostModel(((0, PTLCurve((1,), (1.0,))),))
"""A step takes a second, whatever is in it: consolidation is free."""
PER_CANDIDATE = CostModel(((0, PTLCurve((1, 10), (0.1, 1.0))),))
"""A tenth of a second per candidate: consolidation frees nothing."""


def straggler(
    group_id: str, remaining: int, num_candidates: int = 1, prompt: int = 0, generated: int = 0, late: int = 0
) -> GroupLoad:
    """All of its candidates have the same way to go."""
    return GroupLoad(group_id, num_candidates, prompt, generated, remaining, num_candidates * remaining, late)


def rank(number: int, *groups: GroupLoad, **fields) -> RankLoad:
    return RankLoad(number, groups, **fields)


def moved(loads, moves):
    """The ranks after a plan, and the groups that arrived on each."""
    groups = {group.group_id: group for load in loads for group in load.groups}
    ranks = {load.rank: load for load in loads}
    arrived = {load.rank: [] for load in loads}
    for move in moves:
        ranks[move.source] = ranks[move.source].without_group(move.group_id)
        ranks[move.target] = ranks[move.target].with_group(groups[move.group_id])
        arrived[move.target].append(groups[move.group_id])
    return ranks, arrived


@st.composite
def costs(draw):
    """Steps that do not get quicker with more candidates."""
    sizes = sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=3)))
    seconds = sorted(draw(st.floats(1e-3, 1)) for _ in sizes)
    return CostModel(((0, PTLCurve(tuple(sizes), tuple(seconds))),), draw(st.floats(0, 1e-3)), draw(st.floats(0, 1)))


@st.composite
def ranks_with_groups(draw, max_ranks=5):
    num_groups = 0
    loads = []
    for number in range(draw(st.integers(1, max_ranks))):
        groups = []
        for _ in range(draw(st.integers(0, 4))):
            num = draw(st.integers(1, 8))
            longest = draw(st.integers(1, 400))
            total = longest + sum(draw(st.integers(1, longest)) for _ in range(num - 1))
            prompt, generated = draw(st.integers(0, 200)), draw(st.integers(0, 2000))
            late = draw(st.integers(0, 2000))
            groups.append(GroupLoad(f"g{num_groups}", num, prompt, generated, longest, total, late))
            num_groups += 1
        loads.append(
            RankLoad(
                number,
                tuple(groups),
                other_requests=draw(st.sampled_from((0, 0, 0, 3))),
                other_kv_tokens=draw(st.integers(0, 100)),
                kv_capacity_tokens=draw(st.none() | st.integers(1, 20_000)),
                max_num_seqs=draw(st.none() | st.integers(1, 40)),
                is_held=draw(st.sampled_from((False, False, False, True))),
                transfer=draw(st.none() | st.builds(TransferCost, st.floats(0, 1e-3), st.integers(1, 128))),
            )
        )
    return loads
