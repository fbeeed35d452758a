"""A process that shares KV blocks by NIXL: `share BLOCK...` and `drop NAME` on its input."""

import sys

import msgspec
import torch

from vllm_rollout.parts.moving.wire import KVSegment
from vllm_rollout.parts.moving.worker.kv_layers import KVLayers
from vllm_rollout.parts.moving.worker.nixl_kv import Agent, NixlKV

NUM_BLOCKS = 64


def new_layers(seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.rand(NUM_BLOCKS, 16, 64), torch.rand(NUM_BLOCKS, 16, 48).bfloat16()]


def decoded(answer: str) -> KVSegment:
    return msgspec.msgpack.decode(bytes.fromhex(answer), type=KVSegment)


def main() -> None:
    kv = NixlKV(KVLayers(new_layers(0)), 0, Agent.load())
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "share":
            print("ANSWER", msgspec.msgpack.encode(kv.share(list(map(int, arguments)))).hex(), flush=True)
        else:
            kv.drop(*arguments)
            print("ANSWER", len(kv._lent), flush=True)


if __name__ == "__main__":
    main()
