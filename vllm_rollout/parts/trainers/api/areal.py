"""`--rollout-compat areal`: the calls by which AReaL stops generation, loads weights from a folder, and resumes.

AReaL's client sends an aborted request again with the tokens that it has received, so every weights update aborts all
requests. Its weights by NCCL (`areal_*_xccl`) need its own worker extension and are not here.

Invariant: generation resumes after new weights only if it was running before.
"""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_rollout.parts.trainers.api.shared import KEYS_NEEDED, NoWeights, load_weights

router = APIRouter(include_in_schema=False, dependencies=KEYS_NEEDED)


class Weights(BaseModel):
    model_path: str


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
    was_paused = await client.is_paused()
    await _stop(client)
    try:
        await load_weights(client, body.model_path)
    except NoWeights as error:
        return _said(False, f"model_path {error}")
    finally:
        if not was_paused:
            await client.resume_generation()
    return _said(True, f"weights of {body.model_path}")


async def _stop(client: AsyncLLM) -> None:
    await client.pause_generation(mode="abort", clear_cache=True)
    await client.reset_mm_cache()


def _said(success: bool, message: str) -> JSONResponse:
    status = HTTPStatus.OK if success else HTTPStatus.BAD_REQUEST
    return JSONResponse({"success": success, "message": message}, status)
