"""Batches of a feed as answers. Invariant: a key gets one batch, and the newest ones are sent again by their keys."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from http import HTTPStatus

from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.http.protocol import RolloutFields
from vllm_rollout.kernel.http.serialised import filled, to_json
from vllm_rollout.parts.feeds.http.answers import (
    FeedAnswer,
    FeedBatch,
    FeedMeter,
    FeedShare,
    FeedTotals,
    OfRollout,
)
from vllm_rollout.parts.feeds.http.born import BornFields
from vllm_rollout.parts.feeds.http.live import LiveFeed
from vllm_rollout.parts.feeds.http.running import AdmittedGroup
from vllm_rollout.parts.feeds.http.store import BatchToKeep, StoredFeed
from vllm_rollout.parts.feeds.rules.bias import Share, share_of
from vllm_rollout.parts.feeds.rules.feed import Newest, TakenGroup

NUM_KEPT = 2
"""Batches whose answers are kept, and as many empty ones."""
EMPTY = b'"groups":[]}'
"""End of the answer of an empty batch."""


class Batches:
    """A feed, with the answers of its newest batches."""

    def __init__(self, feed: LiveFeed) -> None:
        self.feed = feed
        self.turn, self.putting = asyncio.Lock(), asyncio.Lock()
        self.puts, self._used = Newest(), Newest()
        self._answers: dict[str, list[bytes]] = {}

    def kept(self, key: str) -> list[bytes] | None:
        """The answer that was made for this key, if it is kept."""
        return self._answers.get(key)

    def take(self, key: str, *, drain: bool, waited_s: float) -> list[bytes] | None:
        """The batch of this key as JSON, in parts. None: wait. Raises: RequestError (410)."""
        if (kept := self.kept(key)) is not None:
            return kept
        if key in self._used:
            raise RequestError(
                f"idempotency_key: the batch of {key!r} was taken, and its answer is not kept any more. Answers are "
                f"kept of {', '.join(map(repr, self._answers))}. Take a new key.",
                status=HTTPStatus.GONE,
                param="idempotency_key",
            )
        taken = self.feed.take(drain=drain)
        if taken is None:
            return None
        self._used.add(key)
        answer = _batch(self.feed, taken, key, waited_s)
        forgotten = self._keep(key, answer)
        turns = [group.turn for _, group in taken]
        self.feed.kept.take(BatchToKeep(turns, self.feed.num_batches - 1, key, b"".join(answer), forgotten))
        return answer

    def take_up(self, stored: StoredFeed) -> None:
        """Continue with the keys and answers on disk."""
        for key, digest in stored.puts.items():
            self.puts.add(key, digest)
        for key in stored.keys:
            self._used.add(key)
        for key, answer in stored.answers.items():
            self._keep(key, [answer])

    def _keep(self, key: str, answer: list[bytes]) -> list[str]:
        """Keep an answer. Returns the keys whose answers are forgotten. An empty batch pushes out no other one."""
        self._answers[key] = answer
        alike = [each for each, its in self._answers.items() if _is_empty(its) == _is_empty(answer)]
        for each in (forgotten := alike[:-NUM_KEPT]):
            del self._answers[each]
        return forgotten


def _is_empty(answer: list[bytes]) -> bool:
    return b"".join(answer[-2:]).endswith(EMPTY)


def _batch(feed: LiveFeed, taken: Sequence[tuple[TakenGroup, AdmittedGroup]], key: str, waited_s: float) -> list[bytes]:
    since, meter, bound = feed.report(), feed_meter(feed), feed.rule.terms.max_staleness
    warning = bias_warning(feed)
    ages = [each.staleness for each, _ in taken]
    summary = FeedBatch(
        feed=feed.id,
        batch=feed.num_batches - 1,
        idempotency_key=key,
        version=feed.rule.version,
        weight_version=feed.versions.name,
        max_staleness=max(ages, default=0),
        num_over=sum(age > bound for age in ages),
        dropped=since.dropped,
        deferred=since.deferred,
        filtered=since.filtered,
        failed=since.failed,
        num_waiting=len(feed.queue.waiting),
        waited_s=round(waited_s, 3),
        meter=meter,
        warnings=[*since.warnings, *filter(None, [warning])],
        groups=[],
    )
    return filled(summary, "groups", [_group(each, group) for each, group in taken])


def _group(taken: TakenGroup, group: AdmittedGroup) -> bytes:
    """A FeedGroup as JSON: the group's JSON with fields of the feed before its own."""
    own = BornFields(born=taken.born, born_version=group.born_version, staleness=taken.staleness)
    if group.rollout_id is not None:
        own = OfRollout(**vars(own), rollout_id=group.rollout_id)
    return to_json(own)[:-1] + b"," + group.json[1:]


def feed_answer(feed: LiveFeed) -> FeedAnswer:
    """The feed as it is now."""
    rule, request, shares = feed.rule, feed.request, feed.meter.shares
    return FeedAnswer(
        id=feed.id,
        created=feed.created,
        model=feed.model,
        group_size=request.group_size,
        batch=request.batch,
        max_staleness=request.max_staleness,
        on_stale=request.on_stale,
        on_update=request.on_update,
        filter=request.filter,
        sessions=None if request.sessions is None else request.sessions.model_dump(mode="json", exclude_unset=True),
        num_harnesses=feed.runner.num_harnesses,
        defaults=request.model_dump(mode="json", include=set(RolloutFields.model_fields), exclude_unset=True),
        version=rule.version,
        weight_version=feed.versions.name,
        num_batches=feed.num_batches,
        num_waiting=len(feed.queue.waiting),
        num_deferred=len(feed.queue.deferred),
        num_running=len(rule.running),
        num_stopped=len(feed.stopped),
        num_complete=len(rule.complete),
        complete_bytes=rule.num_bytes,
        max_complete_bytes=rule.max_bytes,
        capacity=rule.capacity,
        waits_for=feed.waits_for,
        refusal=feed.refusal,
        totals=FeedTotals(
            num_put=feed.queue.num_put,
            num_admitted=rule.num_admitted,
            num_taken=shares["trained"].tokens.num,
            num_filtered=shares["filtered"].tokens.num,
            num_dropped=shares["dropped"].tokens.num,
            num_failed=shares["failed"].tokens.num,
            generated_tokens=feed.generated_tokens,
            wasted_tokens=feed.wasted_tokens,
        ),
        meter=feed_meter(feed),
    )


def feed_meter(feed: LiveFeed) -> FeedMeter:
    shares = feed.meter.shares
    return FeedMeter(
        admitted=_share(_admitted(feed)),
        trained=_share(shares["trained"]),
        filtered=_share(shares["filtered"]),
        dropped=_share(shares["dropped"]),
        failed=_share(shares["failed"]),
        complete=_share(share_of(group.size for group in feed.complete)),
        running=_share(share_of(group.size for group in feed.running)),
        trained_std_error=shares["trained"].tokens.std_error,
    )


def bias_warning(feed: LiveFeed) -> str | None:
    """A warning if trained groups are shorter than admitted ones by more than the standard error."""
    return feed.meter.warning(_admitted(feed))


def _admitted(feed: LiveFeed) -> Share:
    return feed.meter.admitted(share_of(group.size for group in feed.groups.values()))


def _share(share: Share) -> FeedShare:
    return FeedShare(num_groups=share.tokens.num, mean_tokens=share.tokens.mean, mean_reward=share.rewards.mean)
