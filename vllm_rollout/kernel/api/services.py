"""The services of one engine, placed where their routes look for them.

Invariant: a server and a trainer's own process have the same services.
"""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from pathlib import Path

from fastapi import FastAPI
from vllm import envs

from vllm_rollout import background
from vllm_rollout.kernel.api.client import RolloutAsyncLLM
from vllm_rollout.kernel.api.engine import VLLMEngine
from vllm_rollout.kernel.api.first import Listener
from vllm_rollout.kernel.api.open_paths import lacks_key
from vllm_rollout.kernel.api.state_folder import FolderLock
from vllm_rollout.kernel.http.clients import namespace_of
from vllm_rollout.kernel.http.first import HandOn
from vllm_rollout.kernel.http.service import RolloutService
from vllm_rollout.kernel.options import ServeOptions
from vllm_rollout.kernel.parts import faces
from vllm_rollout.parts.page.http.recorder import TraceRecorder
from vllm_rollout.parts.pruning.api.state_file import StateFile
from vllm_rollout.parts.rewards.api.graded_answers import AnswerGrader
from vllm_rollout.parts.rewards.api.rewards import begin_grading
from vllm_rollout.parts.rewards.grading.grader import default_num_processes
from vllm_rollout.parts.rewards.grading.kept_limits import KeptLimits
from vllm_rollout.parts.rounds.api import whole_text
from vllm_rollout.parts.rounds.http.service import RunService
from vllm_rollout.parts.rounds.http.store import LEARNED, RUNS, RunStore
from vllm_rollout.parts.rounds.with_shaping.api.parallelism import parallelism_of
from vllm_rollout.parts.sessions.http.service import SessionService

LIMITS = "time_limits.json"
"""File in the folder of --rollout-state with the time limits of test cases."""


def keys_of(settings: Namespace) -> list[str]:
    """API keys by vLLM's rule: those of --api-key, or VLLM_API_KEY."""
    return [key for key in (settings.api_key or [envs.VLLM_API_KEY]) if key]


def _namespace_of_the_first(keys: list[str]) -> str:
    return namespace_of(f"Bearer {keys[0]}") if keys else ""


async def build_services(client: RolloutAsyncLLM, app: FastAPI, settings: Namespace) -> VLLMEngine:
    """Build the services and put them into the app's state. Returns the engine that they share.

    The state already has models and renderer. `settings`: our flags. Raises: RuntimeError, which ends the start, for
    flags that do not work here.
    """
    state = app.state
    engine = VLLMEngine(client, state)
    await engine.shaping.use_costs(settings)
    recorder = None
    if settings.rollout_record is not None:
        recorder = TraceRecorder(Path(settings.rollout_record), settings.rollout_record_max_mib << 20)
    is_first = client.client_index == 0
    store = RunStore()
    if settings.rollout_state is not None:
        folder = Path(settings.rollout_state)
        state_file = StateFile(folder / LEARNED, engine.learning, engine.calls, client)
        if is_first:
            state.rollout_folder = FolderLock(folder)
            store = RunStore(folder / RUNS, keyless=_namespace_of_the_first(keys_of(settings)))
            await state_file.load(store.staged)
    client.life.watch()
    engine.moves.follow_holds()
    grader = await begin_grading(
        dict(settings.rollout_reward),
        settings.rollout_reward_processes or max(1, default_num_processes() // client.num_api_processes),
        settings.rollout_reward_limits,
    )
    kept_limits = None
    if settings.rollout_state is not None:
        try:
            kept_limits = KeptLimits(Path(settings.rollout_state) / LIMITS, grader.limits)
        except ValueError as error:
            raise RuntimeError(f"--rollout-state: {error}") from error
    metrics = client.rollout_metrics
    background.count_with(metrics.task_failed)
    service = RolloutService(
        engine,
        metrics,
        recorder=recorder,
        admin_key=settings.rollout_admin_key,
        audit_ratio=ServeOptions.of(client.vllm_config).audit_ratio,
        graders=grader,
        kept_limits=kept_limits,
    )
    state.rollout_service, state.rollout_page = service, settings.enable_rollout_page
    client.answer_grader = AnswerGrader(service.grading, service.rewards)
    listener = Listener() if client.num_api_processes > 1 else None
    if listener is not None and not is_first:
        # Around all middleware: a request for another process passes that process's middleware.
        own = app.middleware_stack or app.build_middleware_stack()
        app.middleware_stack = HandOn(own, listener.from_another(), partial(lacks_key, app))
        return engine
    sessions = SessionService(
        engine.give_up,
        service.grading,
        service.rewards,
        metrics,
        partial(whole_text, client.model_config),
        pruning_refusal=lambda: service.learning.pruning_refusal,
        observers=[each for _, make in faces("session_observers") for each in make(service.viewers, recorder)],
        audit_ratio=ServeOptions.of(client.vllm_config).audit_ratio,
        begin=None if listener is None else listener.has_sessions,
    )
    client.sessions = state.session_service = sessions
    parallelism = parallelism_of(settings, client, engine)
    state.run_service = RunService(service, engine, store, metrics, parallelism, sessions)
    if listener is not None:
        listener.serve(app)
    return engine
