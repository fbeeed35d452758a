"""New weights for the server: pause, send, recompute running groups' KV, name the version, resume.

Invariant: a server that was paused here is resumed, even if a step fails.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

from vllm_rollout.kernel.client.blocking import Blocked, blocking
from vllm_rollout.kernel.client.calls import Call
from vllm_rollout.kernel.client.connection import RolloutError
from vllm_rollout.kernel.client.methods import ClientPart
from vllm_rollout.kernel.client.sender import Sender
from vllm_rollout.weight_files import EXPECTED, has_weights

KV = Literal["keep", "recompute"]


@dataclass(frozen=True, slots=True)
class GivenWeights:
    """The server's new weight version, and the seconds that the update took."""

    version: str | None
    """The version, as in `weight_versions` of trajectories. None if the server's vLLM has no names for versions."""
    pause_s: float
    send_s: float
    finish_s: float
    """Seconds after sending: naming the version and recomputing KV."""

    @property
    def seconds(self) -> float:
        return self.pause_s + self.send_s + self.finish_s


async def give_weights(
    self: Sender,
    weights: str | PathLike[str] | Callable[[], object],
    version: str,
    kv: KV = "recompute",
    *,
    adapter: str | None = None,
) -> GivenWeights:
    """Replace the server's weights, and name them. The server needs VLLM_SERVER_DEV_MODE=1.

    weights: a folder with a checkpoint (safetensors), which the server reads under the same path. Or a function that
    sends the weights, sync or async, such as `send_weights` of vLLM's own TrainerWeightTransferEngine. It is called
    while the server is paused. Check weights before: values that are not finite are sent unchanged.
    version: name of the weights, as it appears in `weight_versions` of trajectories.
    kv: KV of running groups. "recompute" computes it again by the new weights: later log probabilities are those of the
    new weights. "keep" continues at once with KV of the old weights. Groups that begin later read KV of the new weights
    only.
    adapter: name of a LoRA adapter, whose weights these are, in a folder. An adapter of this name is replaced. The
    server needs --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.

    Running groups are frozen meanwhile, and continue with the new weights. A server that was paused is resumed, even if
    sending fails.

    Raises: ValueError for a folder without weights, for an unknown `kv`, an empty `version`, and for an adapter that is
    no folder. TypeError for a `version` that is no string.
    RolloutError, 404 without the development mode. If sending fails, the server may have a part of the weights: give
    them again before the next rollout.
    """
    if kv not in get_args(KV):
        raise ValueError(f'kv must be "keep" or "recompute", got {kv!r}')
    if adapter is not None and callable(weights):
        raise ValueError(f"weights of the adapter {adapter!r} must be a folder, got a function")
    if not isinstance(version, str):
        raise TypeError(f"version must be a string that is not empty, got {version!r}")
    if not version:
        raise ValueError('version must be a string that is not empty, got ""')
    if not callable(weights) and not has_weights(weights):
        # vLLM prepares the model before it looks for new weights: without a file the model would be left with none
        raise ValueError(f"{weights} has {EXPECTED}. Write them there before they are given.")
    began = time.perf_counter()
    async with _paused(self):
        paused = time.perf_counter()
        if callable(weights):
            await self._aside(weights)
        elif adapter is None:
            folder = str(Path(weights).resolve())
            call = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            await self.send(_post("/collective_rpc", call))
        else:
            with _explained(
                "The server takes no adapters: start it with --enable-lora and the environment variable "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."
            ):
                body = {"lora_name": adapter, "lora_path": str(Path(weights).resolve()), "load_inplace": True}
                await self.send(_post("/v1/load_lora_adapter", body))
        sent = time.perf_counter()
        name = await _name_version(self, version, adapter)
        if kv == "recompute":  # after the name, which also counts weights that came unnoticed
            await self.send(_post("/v1/weights/recompute"))
    return GivenWeights(name, paused - began, sent - paused, time.perf_counter() - sent)


@asynccontextmanager
async def _paused(client: Sender) -> AsyncIterator[None]:
    """Pause the server for the duration of the block."""
    may_be_paused = True
    try:
        try:
            with _explained(
                "The server takes no weights: start it with the environment variable VLLM_SERVER_DEV_MODE=1."
            ):
                await client.send(_post("/pause?mode=keep&clear_cache=false"))
        except RolloutError as error:
            # a proxy may have timed out before the server paused
            may_be_paused = error.status is None or error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
            raise
        yield
    except BaseException:
        if may_be_paused:
            with suppress(RolloutError):  # the first error is raised
                await client.send(_post("/resume"))
        raise
    await client.send(_post("/resume"))


async def _name_version(client: Sender, version: str, adapter: str | None) -> str | None:
    call = _post("/update_weight_version", {"new_version": version})
    if adapter is not None:
        call = _post("/v1/weights/adapter_version", {"adapter": adapter, "version": version})
    try:
        await client.send(call)
    except RolloutError as error:
        if error.status == HTTPStatus.NOT_FOUND:
            return None
        raise
    return version


@contextmanager
def _explained(remedy: str) -> Iterator[None]:
    """Replace the message of a server's 404 by `remedy`."""
    try:
        yield
    except RolloutError as error:
        if error.status == HTTPStatus.NOT_FOUND:
            raise RolloutError(error.status, remedy, error.type) from error
        raise


def _post(path: str, body: dict[str, Any] | None = None) -> Call[None]:
    return Call("POST", path, lambda _: None, body)


class AsyncWeightCalls(Sender):
    """Methods of the async client."""

    give_weights = give_weights


class WeightCalls(Blocked):
    """Methods of the sync client."""

    give_weights = blocking(give_weights)


CLIENT = ClientPart(AsyncWeightCalls, WeightCalls)
