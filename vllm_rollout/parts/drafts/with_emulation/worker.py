"""Drafts on an emulated device: made up, but chosen by the same rule as on a real one.

Invariant: whether a draft is right follows from the candidate and the position. A wrong draft differs from the
candidate's token at that position. So drafts change no token.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from vllm.v1.outputs import DraftTokenIds

from vllm_rollout.kernel.wire import CandidateTag
from vllm_rollout.parts.drafts.acceptance import DraftSettings, share_factor
from vllm_rollout.parts.drafts.rules import NUM_BINS, DraftingRule, bin_of, draft_key
from vllm_rollout.parts.emulation.device import StepWork
from vllm_rollout.parts.emulation.fate import chances
from vllm_rollout.parts.emulation.worker.ports import EmulatedPart, SaidRow
from vllm_rollout.parts.emulation.worker.request import EmulatedRequest

MAX_KNOWN_PROMPTS = 2**17
"""Limit of prompts whose answers are counted. A real memory is bounded in bytes."""


class DrawnDrafts(NamedTuple):
    """The drafts of one row and step."""

    probabilities: Sequence[float]
    """Probability that each draft is accepted together with all drafts before it."""
    num_right: int
    """Number of correct drafts, from the first one on."""


NO_DRAFTS = DrawnDrafts((), 0)


def draw(settings: DraftSettings, factor: float, salt: int, number: int) -> DrawnDrafts:
    """Drafts for output token `number` and those after it, of the candidate with this `salt`."""
    place, luck, *_ = chances("drafts", salt, number)
    for kind in settings.kinds:
        place -= factor * kind.share
        if place < 0:
            return DrawnDrafts(kind.accepted, sum(probability > luck for probability in kind.accepted))
    return NO_DRAFTS


class EmulatedDrafts(EmulatedPart):
    """Decides the drafts of one engine."""

    def __init__(self, settings: DraftSettings, most: int, max_model_len: int) -> None:
        """`most`: most drafts per row."""
        self._most = most
        self._settings = settings
        self._rule = DraftingRule()
        self._max_model_len = max_model_len
        self._known: OrderedDict[str, Counter[str]] = OrderedDict()
        """Number of candidates of each group, by prompt. The newest prompt is last."""
        self._candidates: dict[str, tuple[str, str]] = {}
        """Prompt and group by request id."""
        self._verifying: dict[str, Sequence[int]] = {}
        """Bins of the drafts that are being verified, by request id."""

    def begin(self, request: EmulatedRequest, tag: CandidateTag, prompt: Sequence[int]) -> None:
        self.know(request.id, draft_key(tag.namespace, prompt, ""), tag.group_id)

    def know(self, request_id: str, prompt: str, group_id: str) -> None:
        """Register a candidate. `prompt`: the key under which answers to its prompt serve as drafts."""
        self._candidates[request_id] = prompt, group_id
        self._known.setdefault(prompt, Counter())[group_id] += 1
        self._known.move_to_end(prompt)
        if len(self._known) > MAX_KNOWN_PROMPTS:
            self._known.popitem(last=False)

    def end(self, request: EmulatedRequest) -> None:
        """Forget a request. Its tokens still serve as drafts."""
        self._candidates.pop(request.id, None)
        self._verifying.pop(request.id, None)

    def took(self, work: StepWork, seconds: float) -> None:
        if not work.prefilled_tokens:
            self._rule.took(work.num_requests, work.num_drafts, seconds)

    def propose(self, rows: Sequence[SaidRow]) -> DraftTokenIds:
        self._learn_accepted(rows)
        longest = min(self._rule.longest(len(rows)), self._most)
        if not longest:
            return DraftTokenIds([row.request.id for row in rows], [[] for _ in rows])
        drawn = [self._draw(row, longest) for row in rows]
        bins = [list(map(bin_of, its.probabilities)) for its in drawn]
        choice = self._rule.choose(len(rows), _by_bin(bin for its in bins for bin in its))
        lengths = choice.lengths(bins)
        for row, its, length in zip(rows, bins, lengths, strict=True):
            if length:
                self._verifying[row.request.id] = its[:length]
        tokens = [_tokens(*each) for each in zip(rows, drawn, lengths, strict=True)]
        return DraftTokenIds([row.request.id for row in rows], tokens)

    def _learn_accepted(self, rows: Sequence[SaidRow]) -> None:
        drafted: list[int] = []
        accepted: list[int] = []
        for row in rows:
            bins = self._verifying.pop(row.request.id, ())[: row.num_drafts]  # vLLM may have scheduled fewer
            if row.num_said:
                drafted += bins
                accepted += bins[: row.num_said - 1]
        if drafted:
            self._rule.verified(_by_bin(drafted), _by_bin(accepted))

    def _draw(self, row: SaidRow, longest: int) -> DrawnDrafts:
        """Drafts found for a row, up to the token before its last one. None for a request that is no candidate."""
        request = row.request
        room = min(
            longest,
            request.length - 1 - request.num_before - request.newest,
            request.max_tokens - 1 - request.newest,
            self._max_model_len - 1 - request.num_prompt - request.newest,
        )
        if not row.num_said or room < 1 or row.request.id not in self._candidates:
            return NO_DRAFTS
        prompt, group_id = self._candidates[row.request.id]
        groups = self._known.get(prompt, Counter({group_id: 1}))
        num_siblings = max(0, groups[group_id] - 1)
        factor = share_factor(self._settings, num_siblings, groups.total() - groups[group_id])
        probabilities, num_right = draw(self._settings, factor, request.salt, request.num_before + request.newest + 1)
        return DrawnDrafts(probabilities[:room], min(num_right, room))


def emulated_drafts(worker: Any) -> EmulatedDrafts | None:
    """Face `emulated`: drafts of a worker whose engine verifies some."""
    speculative = worker.vllm_config.speculative_config
    if speculative is None:
        return None
    return EmulatedDrafts(
        worker.emulation.drafts, speculative.num_speculative_tokens, worker.model_config.max_model_len
    )


def _by_bin(bins: Iterable[int]) -> list[int]:
    counted = Counter(bins)
    return [counted[bin] for bin in range(NUM_BINS)]


def _tokens(row: SaidRow, drawn: DrawnDrafts, length: int) -> list[int]:
    request = row.request
    first = request.num_before + request.newest + 1
    said = [request.token(first + place) for place in range(length)]
    return [token if place < drawn.num_right else token - 1 if token else 1 for place, token in enumerate(said)]
