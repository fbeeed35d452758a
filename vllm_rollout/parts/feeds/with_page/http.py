"""Feeds on the page: versions, groups, and the lengths and rewards of the bias meter."""

from __future__ import annotations

from vllm_rollout.kernel.http.service import RolloutService
from vllm_rollout.parts.feeds.http.batches import bias_warning, feed_answer
from vllm_rollout.parts.feeds.http.service import FeedService
from vllm_rollout.parts.page.http.events import event_of
from vllm_rollout.parts.page.http.plan import PagePlan


class ShownFeeds:
    """All feeds, as one event."""

    def __init__(self, feeds: FeedService) -> None:
        self._feeds = feeds
        self._told = b""
        """The last event that every viewer got."""

    def everything(self) -> list[bytes]:
        """The feeds as they are now."""
        rows = [{**feed_answer(each).model_dump(), "warning": bias_warning(each)} for each in self._feeds.live]
        return [event_of("feeds", {"feeds": rows})]

    def changes(self) -> list[bytes]:
        """The feeds, if one has changed since the last call."""
        before, (self._told,) = self._told, self.everything()
        return [] if self._told == before else [self._told]


def show(rollouts: RolloutService, feeds: FeedService) -> None:
    """Show the feeds on the page."""
    rollouts.part(PagePlan).viewers.feeds.append(ShownFeeds(feeds))
