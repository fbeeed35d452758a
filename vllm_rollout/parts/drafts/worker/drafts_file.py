"""Answers that serve as drafts, kept in a file between two starts of a server.

Invariant: no file keeps a server from starting or ending. A file that cannot be read or written is logged and left.
"""

from __future__ import annotations

import json
from pathlib import Path

from vllm.config import ModelConfig
from vllm.logger import init_logger

from vllm_rollout.parts.drafts.worker.memory import DraftMemory
from vllm_rollout.whole_file import write_whole

logger = init_logger("vllm.vllm_rollout")
FIRST_LINE_BYTES = 1 << 16


class DraftsFile:
    """The drafts of one rank. The file's first line is JSON and identifies the model. The rest is the memory's own
    format.
    """

    def __init__(self, path: Path, memory: DraftMemory, model: ModelConfig) -> None:
        self._path = path
        self._memory = memory
        self._model = {"tokenizer": Path(model.tokenizer).name, "vocab_size": model.get_vocab_size()}

    def load(self) -> None:
        try:
            # A token takes less than half as many bytes there as in memory.
            if (size := self._path.stat().st_size) > self._memory.max_bytes + FIRST_LINE_BYTES:
                raise ValueError(
                    f"it has {size:,} bytes, more than the {self._memory.max_bytes:,} of --rollout-draft-memory-mib"
                )
            first, _, data = self._path.read_bytes().partition(b"\n")
            if (of := json.loads(first)) != self._model:
                logger.warning("vllm_rollout: drafts in %s are of another model, %s, and not used", self._path, of)
                return
            self._memory.load(data)
            logger.info("vllm_rollout: drafts of %d prompts from %s", self._memory.num_prompts, self._path)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            said = str(error) or type(error).__name__
            logger.warning("vllm_rollout: drafts in %s cannot be read and are left: %s", self._path, said)

    def save(self) -> None:
        try:
            write_whole(self._path, json.dumps(self._model).encode() + b"\n" + self._memory.dump())
        except OSError as error:
            logger.warning("vllm_rollout: drafts are not kept in %s: %s", self._path, error)
