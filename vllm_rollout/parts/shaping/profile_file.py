"""The profile as one JSON file.

Invariant: a file that can be read can be used. Writing replaces it whole.

A profile belongs to a model's shape, a machine and the engine's flags. It does not depend on the weights: another
checkpoint of the same architecture costs the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_rollout.parts.shaping.rules.cost import CostModel, PTLCurve
from vllm_rollout.whole_file import PUBLIC, write_whole

FORMAT = 1
MAX_PROBLEMS = 3
"""Most problems named in the error for a broken file."""

Facts = dict[str, str | int | float | bool | None]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Point(_Model):
    """Measured decode steps of one batch size and context."""

    tensor_parallel_size: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    context_tokens: int = Field(ge=1)
    """Context as planned, which all points of a curve share."""
    mean_context_tokens: float = Field(ge=0)
    """Mean context as measured."""
    median_s: float = Field(gt=0)
    p10_s: float = Field(gt=0)
    p90_s: float = Field(gt=0)
    num_steps: int = Field(ge=1)


class PrefillPoint(_Model):
    """Measured steps that compute `chunk_tokens` prompt tokens beside one candidate that decodes."""

    tensor_parallel_size: int = Field(ge=1)
    chunk_tokens: int = Field(ge=1)
    median_s: float = Field(gt=0)
    num_steps: int = Field(ge=1)


class CurveFit(_Model):
    """The curve through the points of one tensor-parallel size and context."""

    tensor_parallel_size: int
    context_tokens: int
    mean_context_tokens: float
    batch_sizes: tuple[float, ...]
    """Knots of the curve: ends and breakpoints."""
    seconds: tuple[float, ...]
    r_squared: float
    residuals: dict[int, float]
    """Relative error by batch size: (fitted - measured) / measured."""
    left_out_errors: dict[int, float] | None = None
    """Relative error at each interior batch size of a fit without it. None while the profile is being measured."""
    median_left_out_error: float | None = None

    @property
    def curve(self) -> PTLCurve:
        return PTLCurve(self.batch_sizes, self.seconds)


class EngineFacts(_Model):
    """Facts about the engine of one tensor-parallel size."""

    tensor_parallel_size: int = Field(ge=1)
    max_num_seqs: int = Field(ge=1)
    max_model_len: int = Field(ge=1)
    max_num_batched_tokens: int = Field(ge=1)
    block_size: int = Field(ge=1)
    kv_capacity_tokens: int = Field(ge=1)
    kv_bytes_per_token: float = Field(gt=0)
    """Bytes over all layers and devices."""
    prefill_s_per_token: float = Field(default=0.0, ge=0)
    step_prefill_s: float = Field(default=0.0, ge=0)
    left_out: tuple[tuple[int, int], ...] = ()
    """(batch size, context) of wanted points that do not fit into the KV cache."""


class Mismatch(NamedTuple):
    """Reasons against using a profile, or None."""

    error: str | None
    warning: str | None


class Profile(_Model):
    """Contents of a profile file."""

    format: Literal[1] = FORMAT  # type: ignore[assignment]
    created: str
    updated: str
    command: str
    model_name: str
    model: Facts
    """Shape of the model."""
    hardware: Facts
    versions: dict[str, str]
    serve_flags: tuple[str, ...]
    """The engine's flags as given."""
    flags: Facts
    """Settings in effect, as far as step times depend on them."""
    logprobs: bool
    engines: tuple[EngineFacts, ...] = ()
    points: tuple[Point, ...] = ()
    prefill: tuple[PrefillPoint, ...] = ()
    fits: tuple[CurveFit, ...] = ()

    @classmethod
    def read(cls, path: Path | str) -> Profile:
        """Read a profile. Raises: ValueError that names the file and what is wrong with it."""
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"cannot read the profile {path}: {error}. `vllm-rollout profile MODEL --output {path}` makes one."
            ) from error
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            problems = [
                f"{'.'.join(map(str, problem['loc'])) or 'file'}: {problem['msg']}"
                for problem in error.errors(include_url=False)[:MAX_PROBLEMS]
            ]
            raise ValueError(
                f"{path} is no profile of format {FORMAT}: {'; '.join(problems)}. Make it anew with "
                f"`vllm-rollout profile MODEL --output {path} --restart`."
            ) from error

    def write(self, path: Path | str) -> None:
        write_whole(Path(path), (self.model_dump_json(indent=1) + "\n").encode(), PUBLIC)

    @property
    def tensor_parallel_sizes(self) -> list[int]:
        return sorted({fit.tensor_parallel_size for fit in self.fits})

    def engine(self, tensor_parallel_size: int) -> EngineFacts | None:
        return next((e for e in self.engines if e.tensor_parallel_size == tensor_parallel_size), None)

    def cost(self, tensor_parallel_size: int = 1) -> CostModel:
        """The cost model of one tensor-parallel size. Raises: ValueError if that size was not measured."""
        fits = [fit for fit in self.fits if fit.tensor_parallel_size == tensor_parallel_size]
        engine = self.engine(tensor_parallel_size)
        if not fits or engine is None:
            measured = ", ".join(map(str, self.tensor_parallel_sizes)) or "nothing yet"
            raise ValueError(
                f"the profile of {self.model_name} has no tensor-parallel size {tensor_parallel_size}; measured: "
                f"{measured}. Add it with `vllm-rollout profile {self.model_name} --tensor-parallel "
                f"{tensor_parallel_size}` and the profile's file as --output."
            )
        # Prompts end with a block: two planned contexts may be one that was measured.
        curves = {fit.mean_context_tokens: fit.curve for fit in fits}
        by_context = sorted(curves.items())
        return CostModel(tuple(by_context), engine.prefill_s_per_token, engine.step_prefill_s, engine.max_num_seqs)

    def batch_sizes(self, tensor_parallel_size: int = 1) -> list[int]:
        """Measured batch sizes, ascending."""
        return sorted({p.batch_size for p in self.points if p.tensor_parallel_size == tensor_parallel_size})

    def mismatch(
        self, model: Mapping[str, Any], hardware: Mapping[str, Any], flags: Mapping[str, Any] | None = None
    ) -> Mismatch:
        """Compare with another model, machine or flags. Another model is an error, as its times differ. The rest is a
        warning."""
        error = warning = None
        if differing := _differences(self.model, model):
            error = (
                f"the profile is of {describe_model(self.model_name, self.model)}, not of {describe_model('', model)}: "
                f"{differing}. Make one of this model with `vllm-rollout profile`."
            )
        said = []
        if (differing := _differences(self.hardware, hardware)) is not None:
            said.append(
                f"the profile was made on {describe_hardware(self.hardware)}, this is {describe_hardware(hardware)}: "
                f"{differing}"
            )
        if flags is not None and (differing := _differences(self.flags, flags)) is not None:
            said.append(f"the profile's engine had other flags: {differing}")
        if said:
            warning = (
                f"{'; '.join(said)}. Predicted times may be off; `vllm-rollout profile` makes one for this server."
            )
        return Mismatch(error, warning)


def describe_model(name: str, model: Mapping[str, Any]) -> str:
    shape = (
        f"{model.get('architecture')}, {model.get('num_layers')} layers, hidden size {model.get('hidden_size')}, "
        f"{model.get('dtype')}"
    )
    return f"{name} ({shape})" if name else shape


def describe_hardware(hardware: Mapping[str, Any]) -> str:
    return f"{hardware.get('num_devices')} x {hardware.get('device')} with {hardware.get('num_cpus')} CPUs"


def _differences(profile: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """`name: value there, value here` for each differing value. None if all are equal."""
    names: Sequence[str] = [name for name in {**profile, **here} if profile.get(name) != here.get(name)]
    return ", ".join(f"{name} {profile.get(name)} there, {here.get(name)} here" for name in names) or None
