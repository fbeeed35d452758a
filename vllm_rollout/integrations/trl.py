"""TRL's GRPOTrainer: `colocate` where vLLM is in its process, `TRLRollouts` where it asks our server."""

from vllm_rollout.integrations.trl_colocated import colocate
from vllm_rollout.integrations.trl_rollouts import TRLRollouts

__all__ = ["TRLRollouts", "colocate"]
