"""The content of `--rollout-emulate FILE`.

Invariant: a file that can be read can be served. Errors name file and field.

The file is a profile, as `vllm-rollout profile` writes it, or a JSON object with the fields of `Settings`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from vllm_rollout.config import MAX_TRACED_TOKENS
from vllm_rollout.kernel.parts import face, faces
from vllm_rollout.parts.shaping.profile_file import Profile
from vllm_rollout.parts.shaping.rules.trace import TracedPrompt

DEFAULT_KV_TOKENS = 1_000_000
MAX_KV_TOKENS = 2**40
MAX_STEP_MS = 1e7
MAX_PROBLEMS = 3
"""Number of problems named in the error for a broken file."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class StepSettings(_Model):
    """Milliseconds of a step: a constant, and shares of what is in it."""

    ms: float = Field(8.0, gt=0, le=MAX_STEP_MS)
    ms_per_request: float = Field(0.02, ge=0, le=MAX_STEP_MS)
    ms_per_context_token: float = Field(0.0, ge=0, le=MAX_STEP_MS)
    """Milliseconds per token of context, of all requests in the step together."""
    ms_per_prefilled_token: float = Field(0.0, ge=0, le=MAX_STEP_MS)
    """Milliseconds per token that the step computes beyond one token per request."""


class Size(_Model):
    """The device at one tensor-parallel size."""

    step: StepSettings = StepSettings()
    kv_tokens: int = Field(DEFAULT_KV_TOKENS, ge=1, le=MAX_KV_TOKENS)


class LogNormal(_Model):
    """Output tokens, the end-of-sequence token among them."""

    mean: float = Field(400.0, ge=1, le=MAX_TRACED_TOKENS)
    """Mean length in tokens before the cap."""
    sigma: float = Field(1.0, ge=0, le=5)
    """The standard deviation of the logarithm, among the candidates of one prompt."""
    prompt_sigma: float = Field(0.0, ge=0, le=5)
    """The standard deviation of the logarithm, among prompts."""
    cap: int | None = Field(None, ge=1, le=MAX_TRACED_TOKENS)
    """Longer answers end here, by themselves. Without a cap, `max_tokens` cuts them."""


class LengthSettings(_Model):
    log_normal: LogNormal | None = None
    trace: str | None = None
    """A file written by `--rollout-record`. A relative path starts at the file that names it."""

    @model_validator(mode="after")
    def _one(self) -> LengthSettings:
        if (self.log_normal is None) == (self.trace is None):
            raise ValueError("give one of log_normal and trace")
        return self


class Success(_Model):
    """Share of candidates that succeed."""

    rate: float = Field(0.5, ge=0, le=1)
    """The rate of candidates whose length is the reference length."""
    prompt_sigma: float = Field(0.0, ge=0, le=5)
    """Standard deviation of the log-odds of success between prompts."""
    log_odds_per_doubling: float = Field(0.0, ge=-10, le=10)
    """Change of the log-odds of success when the length doubles."""
    reference_length: float = Field(400.0, ge=1, le=MAX_TRACED_TOKENS)


class Score(_Model):
    """Information of early states about success."""

    auc: float = Field(0.75, gt=0, lt=1)
    """Probability that a candidate that succeeds is scored above one that does not."""


class Turns(_Model):
    """Answers are turns of conversations with tools: most of them ask for one."""

    mean: float = Field(3.0, ge=1, le=1000)
    """Turns of a conversation. Their number is geometric: whether a turn is the last one does not depend on how many
    came before."""
    marker: str = Field("<tool_call>", min_length=1, max_length=1000)
    """Text with which every turn ends but the last."""


class Settings(_Model):
    """An emulated device and what it says. `settings_type` has the fields of parts, too."""

    step: StepSettings | None = None
    profile: str | None = None
    """File with step times instead. Its path is relative to the file that names it."""
    sizes: dict[Annotated[int, Field(ge=1)], Size] | None = Field(None, min_length=1)
    """Step times and capacity by tensor-parallel size instead."""
    tensor_parallel_size: int | None = Field(None, ge=1)
    """Tensor-parallel size of the profile to use. Default: the engine's."""
    kv_tokens: int | None = Field(None, ge=1, le=MAX_KV_TOKENS)
    """KV cache capacity in tokens. Default: the profiled capacity, else `DEFAULT_KV_TOKENS`."""
    lengths: LengthSettings = LengthSettings(log_normal=LogNormal())
    success: Success = Success()
    score: Score = Score()
    turns: Turns | None = None
    seed: int = Field(0, ge=0, lt=2**63)

    @model_validator(mode="after")
    def _one_cost(self) -> Settings:
        if (self.step is not None) + (self.profile is not None) + (self.sizes is not None) > 1:
            raise ValueError("give one of step, profile and sizes")
        if self.sizes is not None and self.kv_tokens is not None:
            raise ValueError("kv_tokens: say it in each of sizes")
        return self

    @classmethod
    def read(cls, path: Path | str) -> Settings:
        """Read settings from a file. Its paths become absolute, and the files at these paths are read once.

        Raises: ValueError that names the file, the field, the value and what is allowed.
        """
        path = Path(path).resolve()
        try:
            fields = json.loads(path.read_text())
        except (OSError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(
                f"cannot read {path}: {error}. docs/guides/emulation.md has an example to begin with."
            ) from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{error.lineno}: not JSON ({error.msg} at column {error.colno})") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{path} must hold a JSON object, got {fields!r:.60}")
        if "format" in fields and "fits" in fields:
            fields = {"profile": str(path)}
        try:
            settings = settings_type().model_validate(fields)
        except ValidationError as error:
            problems = "; ".join(_problem(problem) for problem in error.errors(include_url=False)[:MAX_PROBLEMS])
            raise ValueError(f"{path}: {problems}. docs/guides/emulation.md lists the fields.") from error
        return settings._read_named_files(path)

    @property
    def engine_sizes(self) -> tuple[int, ...]:
        """Tensor-parallel sizes that an engine may have, ascending."""
        if self.sizes is not None:
            return tuple(sorted(self.sizes))
        if self.profile is not None and self.tensor_parallel_size is None:
            return tuple(Profile.read(self.profile).tensor_parallel_sizes)
        return (1,)

    def at(self, size: int) -> Settings:
        """The device of an engine of one tensor-parallel size: with a step or a profile, and a capacity.

        Raises: ValueError when the file says nothing of that size.
        """
        if self.sizes is not None and size in self.sizes:
            its = self.sizes[size]
            return self.model_copy(update={"sizes": None, "step": its.step, "kv_tokens": its.kv_tokens})
        if self.sizes is not None or (size != 1 and (self.profile is None or self.tensor_parallel_size is not None)):
            known = ", ".join(map(str, self.engine_sizes))
            raise ValueError(
                f"it has no tensor-parallel size {size}, but {known}. Say what a step costs there in sizes, or name a "
                "profile that has it."
            )
        if self.profile is None:
            return self.model_copy(update={"kv_tokens": self.kv_tokens or DEFAULT_KV_TOKENS})
        profile, profiled = Profile.read(self.profile), self.tensor_parallel_size or size
        profile.cost(profiled)
        engine = profile.engine(profiled)
        assert engine is not None, "a profile has an engine for every cost"
        kv_tokens = self.kv_tokens or engine.kv_capacity_tokens
        return self.model_copy(update={"tensor_parallel_size": profiled, "kv_tokens": kv_tokens})

    def _read_named_files(self, path: Path) -> Settings:
        changed: dict[str, Any] = {}
        try:
            if self.profile is not None:
                changed["profile"] = str(path.parent / self.profile)
                profile = Profile.read(changed["profile"])
                if self.tensor_parallel_size is not None:
                    profile.cost(self.tensor_parallel_size)
            if self.lengths.trace is not None:
                changed["lengths"] = LengthSettings(trace=str(path.parent / self.lengths.trace))
                traced_prompts(changed["lengths"].trace)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        return self.model_copy(update=changed)


@cache
def settings_type() -> type[Settings]:
    """Settings of a device with a field for each part that has fields there, under the part's name."""
    fields: dict[str, Any] = {name: (its, its()) for name, its in faces("device_settings")}
    return create_model("Settings", __base__=Settings, **fields)


def traced_prompts(path: str) -> Sequence[TracedPrompt]:
    """Prompts of a recording. Raises: ValueError for a file that is none, and where nothing reads recordings."""
    if (traces := face("page", "traces")) is None:
        raise ValueError("lengths.trace: the part 'page' reads recordings, and it is left out")
    prompts: Sequence[TracedPrompt] = traces.read_trace(Path(path)).prompts
    return prompts


def _problem(problem: Any) -> str:
    where = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return f"{where}: is not a field"
    message = problem["msg"].removeprefix("Value error, ")
    said = f"{where}: {message[:1].lower()}{message[1:]}" if where else message
    return said if problem["type"] == "value_error" else f"{said}, got {problem['input']!r:.60}"
