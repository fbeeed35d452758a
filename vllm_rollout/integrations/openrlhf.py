"""OpenRLHF: rollouts that race, in OpenRLHF's own vLLM actors. Start this module instead of OpenRLHF's:

    python -m vllm_rollout.integrations.openrlhf --rollout_redundancy 8 ...   # instead of openrlhf.cli.train_ppo_ray

Every other flag is OpenRLHF's. Each prompt gets this many spare candidates beside its `--rollout.n_samples_per_prompt`.
The trainer gets exactly as many responses as it asked for, the first that finish. Rewards are computed for those only.
Other requests (evaluation with fewer samples, later turns of an agent, images) run unchanged.

Invariant: an executor gets a candidate that the engine gave up only if no other one is left.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from vllm_rollout.adapter.names import SCHEDULER_CLS
from vllm_rollout.integrations.spares import End, Spares

TRAINER = "openrlhf.cli.train_ppo_ray"
ENDS: Mapping[str, End] = {"stop": "finished", "length": "truncated"}
"""End of a candidate by vLLM's finish reason. Every other reason is "stopped"."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--rollout_redundancy", type=int, default=0)
    ours, theirs = parser.parse_known_args(argv)
    # Read here, and passed on to OpenRLHF, which has the same default.
    parser.add_argument("--rollout.n_samples_per_prompt", dest="group_size", type=int, default=1)
    group_size = parser.parse_known_args(theirs)[0].group_size
    use_in_actors(group_size, ours.rollout_redundancy)
    sys.argv = [TRAINER, *theirs]
    runpy.run_module(TRAINER, run_name="__main__", alter_sys=True)


def use_in_actors(group_size: int, redundancy: int) -> None:
    """Replace OpenRLHF's actor class by one that races. OpenRLHF looks the class up by name when it creates actors."""
    import ray
    from openrlhf.trainer.ray import vllm_engine

    theirs = vllm_engine.RolloutRayActor.__ray_metadata__.modified_class
    vllm_engine.RolloutRayActor = ray.remote(actor_class(theirs, group_size, redundancy))


def actor_class(theirs: type, group_size: int, redundancy: int) -> type:
    """OpenRLHF's actor class with our scheduler. Defined in a function, so that ray sends the class and its sizes by
    value.
    """

    class RolloutActor(theirs):
        """Overrides: __init__, generate."""

        async def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._spares: Spares[Any] = Spares(group_size, redundancy, end_of)
            await super().__init__(*args, **{"scheduler_cls": SCHEDULER_CLS, **kwargs})

        async def generate(
            self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None
        ) -> Any:
            if not redundancy or multi_modal_data or sampling_params.temperature == 0:
                return await super().generate(prompt_token_ids, sampling_params, multi_modal_data)

            async def launch(extra_args: Mapping[str, Any], _: int) -> Any:
                params = deepcopy(sampling_params)
                params.extra_args = {**(params.extra_args or {}), **extra_args}
                return await super(RolloutActor, self).generate(prompt_token_ids, params)

            return await self._spares.answer((tuple(prompt_token_ids), repr(sampling_params)), launch)

    return RolloutActor


def end_of(output: Any) -> End:
    return ENDS.get(output.outputs[0].finish_reason, "stopped")


if __name__ == "__main__":
    main()
