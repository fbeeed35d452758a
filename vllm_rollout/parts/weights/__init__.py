"""Gives a server new weights while rollouts run."""

from vllm_rollout.kernel.parts import Part

PART = Part(
    "weights",
    "Gives a server new weights while rollouts run.",
    faces={
        "client": "vllm_rollout.parts.weights.client:CLIENT",
        "routes": "vllm_rollout.parts.weights.http:ROUTES",
    },
    exports={"GivenWeights": "vllm_rollout.parts.weights.client:GivenWeights"},
)
