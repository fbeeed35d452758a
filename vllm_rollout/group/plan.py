"""Request fields -> GroupPlan. Invariant: a plan that exists can be carried out by the rules as they stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from vllm_rollout.config import MAX_GROUP_SIZE
from vllm_rollout.group.types import Signal

SelectionRule = Literal["first", "shortest", "dual_end"]
SELECTION_RULES: tuple[SelectionRule, ...] = ("first", "shortest", "dual_end")

Default = TypeVar("Default", int, None)

XARG_PREFIX = "rollout_"
PLAN_XARGS = ("rollout_redundancy", "rollout_early_stop", "rollout_selection", "rollout_num_longest")
JOIN_XARGS = ("rollout_group_id", "rollout_group_size", "rollout_num_candidates", "rollout_early_stop")


PruningRule = Literal["balance", "paper"]
PRUNING_RULES: tuple[PruningRule, ...] = ("balance", "paper")
PruningMode = Literal["active", "shadow"]
PRUNING_MODES: tuple[PruningMode, ...] = ("active", "shadow")
SIGNALS: tuple[Signal, ...] = ("head", "confidence")


class PlanError(ValueError):
    """A field of a group request is out of its range. `field` names it as the user wrote it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True, slots=True)
class PruningPlan:
    """How candidates are judged at `detection_length` (ARRoL section 4.2 and A.4)."""

    detection_length: int
    """Output tokens after which a candidate is scored, L_detect."""
    rule: PruningRule = "balance"
    keep_ratio: float = 0.5
    """Share of scored candidates to keep on average, kappa."""
    target_positive_ratio: float = 0.5
    """Success rate wanted among survivors, rho."""
    strength: float = 0.5
    """Lambda of the paper's rule; the balance rule solves its own."""
    min_survival: float = 0.05
    max_survival: float = 0.95
    mode: PruningMode = "active"
    """`shadow`: decide and report, stop nothing."""
    signal: Signal = "head"
    allow_fewer: bool = False
    """Prune even when fewer than `group_size` candidates are left to finish."""
    min_labels: int = 64
    """Rewards of either kind, positive and negative, before anything is pruned."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What to do with one prompt."""

    group_size: int
    """Trajectories to return, M."""
    redundancy: int = 0
    """Spare candidates, M' - M."""
    early_stop: bool = True
    """Stop the others as soon as `group_size` valid candidates have finished."""
    selection: SelectionRule = "first"
    num_longest: int = 0
    """L of a dual-end selection; K = group_size - L."""
    pruning: PruningPlan | None = None

    @property
    def num_candidates(self) -> int:
        """M' of DARTS."""
        return self.group_size + self.redundancy


@dataclass(frozen=True, slots=True)
class GroupJoin:
    """A single request that belongs to a group which other requests of the client make up."""

    group_id: str
    group_size: int
    num_candidates: int
    early_stop: bool = True


def make_plan(
    group_size: int,
    redundancy: int = 0,
    early_stop: bool | None = None,
    selection: SelectionRule = "first",
    num_longest: int | None = None,
    *,
    max_candidates: int,
    names: Mapping[str, str] | None = None,
) -> GroupPlan:
    """Check the fields of one group and return its plan.

    `early_stop=None` means "whenever the selection allows it". `max_candidates` is the engine's `max_num_seqs`: a group
    whose candidates cannot all run at once would decide its race by queue position. `names` maps field names to what
    the user wrote (`rollout_redundancy` in xargs).

    Raises: PlanError with field, value, allowed range and remedy.
    """
    named = names or {}

    def name(field: str) -> str:
        return named.get(field, field)

    if not 1 <= group_size <= MAX_GROUP_SIZE:
        raise PlanError(name("group_size"), f"must be in [1, {MAX_GROUP_SIZE}], got {group_size}.")
    if redundancy < 0:
        raise PlanError(
            name("redundancy"),
            f"must be at least 0, got {redundancy}. It counts spare candidates beyond {name('group_size')}.",
        )
    num_candidates = group_size + redundancy
    if num_candidates > max_candidates:
        raise PlanError(
            name("redundancy") if redundancy else name("group_size"),
            f"{name('group_size')} + {name('redundancy')} must be at most the server's max_num_seqs "
            f"({max_candidates}), got {group_size} + {redundancy} = {num_candidates}. "
            f"Ask for fewer candidates or start the server with --max-num-seqs {num_candidates}.",
        )
    if selection not in SELECTION_RULES:
        raise PlanError(name("selection"), f"must be one of {', '.join(SELECTION_RULES)}, got {selection!r}.")
    if selection != "dual_end":
        if num_longest is not None:
            raise PlanError(name("num_longest"), f"only applies to selection dual_end, got selection {selection!r}.")
        return GroupPlan(group_size, redundancy, early_stop is not False, selection)
    num_longest = 1 if num_longest is None else num_longest
    if not 0 <= num_longest <= group_size:
        raise PlanError(name("num_longest"), f"must be in [0, {name('group_size')}={group_size}], got {num_longest}.")
    if early_stop:
        raise PlanError(
            name("early_stop"),
            "cannot be true with selection dual_end: the longest of the pool are known only when the whole pool has "
            "ended. Set it to false, or select first or shortest.",
        )
    return GroupPlan(group_size, redundancy, False, selection, num_longest)


def rollout_xargs(extra_args: Mapping[str, object]) -> dict[str, object]:
    """The fields of ours among a request's `vllm_xargs`."""
    return {key: value for key, value in extra_args.items() if key.startswith(XARG_PREFIX)}


def plan_from_xargs(xargs: Mapping[str, object], n: int, *, max_candidates: int) -> GroupPlan | GroupJoin:
    """Flat `rollout_*` fields of an OpenAI request -> plan of its own group, or membership of a shared one.

    `n` is the request's OpenAI `n`, the `group_size` of its own group.

    Raises: PlanError naming the field as the user wrote it.
    """
    if "rollout_group_id" in xargs:
        return _join_from_xargs(xargs, n, max_candidates)
    _reject_unknown(xargs, PLAN_XARGS)
    selection = xargs.get("rollout_selection", "first")
    num_longest = _int(xargs, "rollout_num_longest", None)
    early_stop = _bool(xargs, "rollout_early_stop")
    return make_plan(
        n,
        _int(xargs, "rollout_redundancy", 0),
        early_stop,
        selection,  # type: ignore[arg-type]  # make_plan checks it
        num_longest,
        max_candidates=max_candidates,
        names={"group_size": "n", **{field[len(XARG_PREFIX) :]: field for field in PLAN_XARGS}},
    )


def _join_from_xargs(xargs: Mapping[str, object], n: int, max_candidates: int) -> GroupJoin:
    _reject_unknown(xargs, JOIN_XARGS)
    group_id = xargs["rollout_group_id"]
    if not isinstance(group_id, str) or not 1 <= len(group_id) <= 256:
        raise PlanError("rollout_group_id", f"must be a string of 1 to 256 characters, got {group_id!r}.")
    if n != 1:
        raise PlanError(
            "rollout_group_id",
            f"joins single requests, but n is {n}. Leave it out to run the n choices as one group, or send n=1.",
        )
    group_size = _int(xargs, "rollout_group_size", None)
    if group_size is None:
        raise PlanError("rollout_group_size", "is required with rollout_group_id: how many siblings have to finish.")
    remedy = "Send fewer or start the server with a larger --max-num-seqs."
    if not 1 <= group_size <= max_candidates:
        raise PlanError(
            "rollout_group_size",
            f"must be between 1 and the server's max_num_seqs ({max_candidates}), got {group_size}. {remedy}",
        )
    num_candidates = _int(xargs, "rollout_num_candidates", group_size)
    if not group_size <= num_candidates <= max_candidates:
        raise PlanError(
            "rollout_num_candidates",
            f"counts all siblings and must be between rollout_group_size ({group_size}) and the server's max_num_seqs "
            f"({max_candidates}), got {num_candidates}. {remedy}",
        )
    return GroupJoin(group_id, group_size, num_candidates, _bool(xargs, "rollout_early_stop") is not False)


def _reject_unknown(xargs: Mapping[str, object], allowed: tuple[str, ...]) -> None:
    for key in xargs:
        if key not in allowed:
            raise PlanError(key, f"is not a field of this version; allowed here: {', '.join(allowed)}.")


def _int(xargs: Mapping[str, object], key: str, default: Default) -> int | Default:
    value = xargs.get(key)
    if value is None:
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise PlanError(key, f"must be an integer, got {value!r}.")
    return value


def _bool(xargs: Mapping[str, object], key: str) -> bool | None:
    value = xargs.get(key)
    if value is None or value in (0, 1, True, False):  # vllm_xargs narrows JSON booleans to 0 and 1
        return None if value is None else bool(value)
    raise PlanError(key, f"must be true or false (or 1 or 0), got {value!r}.")
