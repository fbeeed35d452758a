"""Types of the package's names. Written by `python -m docs_tools.stub --write`, which reads the list of parts."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from vllm_rollout.kernel.client.client import AsyncClient, Client
from vllm_rollout.kernel.client.connection import RolloutError
from vllm_rollout.kernel.core.scheduler import make_scheduler as Scheduler
from vllm_rollout.kernel.http.protocol import DualEndSelection, RewardOptions
from vllm_rollout.kernel.worker.worker import RolloutWorker as Worker
from vllm_rollout.parts.drafts.worker.drafts import Drafts
from vllm_rollout.parts.emulation.tokens import succeeded as emulated_success
from vllm_rollout.parts.feeds.client.feed import AsyncFeed, Feed
from vllm_rollout.parts.feeds.client.methods import AsyncFeedCalls, FeedCalls
from vllm_rollout.parts.feeds.with_sessions.client.agents import AgentFeed
from vllm_rollout.parts.in_process.api.async_llm import AsyncLLM
from vllm_rollout.parts.in_process.api.llm import LLM
from vllm_rollout.parts.in_process.with_pruning.api.learning import AsyncLearning, Learning
from vllm_rollout.parts.in_process.with_pruning.api.teaching import teach
from vllm_rollout.parts.moving.client import AsyncRankCalls, RankCalls
from vllm_rollout.parts.pruning.client import AsyncLearningCalls, LearningCalls, QualityHead
from vllm_rollout.parts.pruning.http.fields import Pruning
from vllm_rollout.parts.rounds.client.methods import AsyncRunCalls, RunCalls
from vllm_rollout.parts.rounds.client.run import AsyncRun, Run
from vllm_rollout.parts.rounds.with_sessions.client.agent_rounds import AgentRound, AgentRounds
from vllm_rollout.parts.sessions.client.agent_group import AgentGroup, AgentResult
from vllm_rollout.parts.sessions.client.agent_session import AgentSession, SessionLost, Void
from vllm_rollout.parts.sessions.client.agents import AsyncAgentCalls
from vllm_rollout.parts.weights.client import AsyncWeightCalls, GivenWeights, WeightCalls

class GroupOptions(TypedDict, total=False):
    """Options for the groups of a rollout or a round. None leaves an option out."""

    early_stop: bool | str | None
    selection: str | Mapping[str, Any] | DualEndSelection | None
    on_engine_failure: str | None
    max_candidates: int | None
    migration: str | None
    scale_down: str | None
    pruning: Mapping[str, Any] | Pruning | None
    sampling_params: Mapping[str, Any] | None
    reward: str | Mapping[str, Any] | RewardOptions | None
    include: Sequence[str] | None

class RolloutOptions(GroupOptions, total=False):
    """Options of `rollout` and `stream` of both clients. `help` shows their meaning, in the server's words."""

    order: str | None
    priority: int | None
    audit_ratio: float | None
    audit_unit: str | None
    model: str | None

class FeedMethods(AgentFeed):
    """Methods of feeds that need another part."""

class RunMethods(AgentRounds):
    """Methods of runs that need another part."""

class LLMMethods(Learning):
    """Methods of `LLM` that need another part."""

class AsyncLLMMethods(AsyncLearning):
    """Methods of `AsyncLLM` that need another part."""

class AsyncRolloutClient(
    AsyncLearningCalls, AsyncRunCalls, AsyncWeightCalls, AsyncFeedCalls, AsyncRankCalls, AsyncAgentCalls, AsyncClient
):
    """Async client of a server, or of several. Use as an async context manager, or await `close`."""

    def __init__(
        self,
        base_url: str | Sequence[str] = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        connect_timeout_s: float = 10.0,
        read_timeout_s: float | None = None,
        num_retries: int = 3,
        backoff_s: float = 0.5,
        transport: Any = None,
    ) -> None: ...

class RolloutClient(LearningCalls, RunCalls, WeightCalls, FeedCalls, RankCalls, Client):
    """Sync client. Use as a context manager, or call `close`. Safe to share between threads."""

    def __init__(
        self,
        base_url: str | Sequence[str] = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        connect_timeout_s: float = 10.0,
        read_timeout_s: float | None = None,
        num_retries: int = 3,
        backoff_s: float = 0.5,
        transport: Any = None,
    ) -> None: ...

__all__ = [
    "LLM",
    "AgentGroup",
    "AgentResult",
    "AgentRound",
    "AgentSession",
    "AsyncFeed",
    "AsyncLLM",
    "AsyncRolloutClient",
    "AsyncRun",
    "Drafts",
    "Feed",
    "GivenWeights",
    "GroupOptions",
    "Pruning",
    "QualityHead",
    "RolloutClient",
    "RolloutError",
    "RolloutOptions",
    "Run",
    "Scheduler",
    "SessionLost",
    "Void",
    "Worker",
    "__version__",
    "emulated_success",
    "teach",
]
__version__: str
