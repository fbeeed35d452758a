"""`--rollout-compat areal`: the calls by which AReaL stops generation, loads weights from a folder, and resumes.

AReaL's client sends an aborted request again with the tokens that it has received, so every weights update aborts all
requests. Its weights by NCCL (`areal_*_xccl`) need its own worker extension and are not here.

Invariant: generation resumes after new weights only if it was running before.
"""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_rollout.kernel.http.boundary import RolloutRoute
from vllm_rollout.parts.trainers.api.shared import KEYS_NEEDED, NoWeights, check_weights, load_weights, text_of

router = APIRouter(include_in_schema=False, route_class=RolloutRoute, dependencies=KEYS_NEEDED)


class Weights(BaseModel):
    model_path: str = Field(description="The folder of a checkpoint.")


def attach(app: FastAPI) -> None:
    app.include_router(router)


@router.post("/areal_pause_generation")
async def pause_generation(request: Request) -> JSONResponse:
    await _stop(request.app.state.engine_client)
    return _said(True, "generation is paused, all requests are aborted")


@router.post("/areal_continue_generation")
async def continue_generation(request: Request) -> JSONResponse:
    await request.app.state.engine_client.resume_generation()
    return _said(True, "generation goes on")


@router.post("/areal_update_weights")
async def update_weights(body: Weights, request: Request) -> JSONResponse:
    client: AsyncLLM = request.app.state.engine_client
    folder = text_of(body.model_path, "model_path")
    try:
        await check_weights(folder)  # before requests are aborted for it
        await _update(client, folder)
    except NoWeights as error:
        return _said(False, f"model_path {error}")
    return _said(True, f"weights of {folder}")


async def _update(client: AsyncLLM, folder: str) -> None:
    """Replace the weights while nothing is generated. Raises: NoWeights."""
    was_paused = await client.is_paused()
    try:
        await _stop(client)
        await load_weights(client, folder)
    finally:
        if not was_paused:
            await client.resume_generation()


async def _stop(client: AsyncLLM) -> None:
    await client.pause_generation(mode="abort", clear_cache=True)
    await client.reset_mm_cache()


def _said(success: bool, message: str) -> JSONResponse:
    status = HTTPStatus.OK if success else HTTPStatus.BAD_REQUEST
    return JSONResponse({"success": success, "message": message}, status)
