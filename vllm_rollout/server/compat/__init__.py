"""Protocols of other servers, as routes that ask vLLM's endpoints; off unless `--rollout-compat` names one."""
