"""TRL's GRPOTrainer: `colocate` if vLLM runs in the trainer's process, `TRLRollouts` if the trainer asks our server."""

from vllm_rollout.integrations.trl_colocated import colocate
from vllm_rollout.integrations.trl_rollouts import TRLRollouts

__all__ = ["TRLRollouts", "colocate"]
