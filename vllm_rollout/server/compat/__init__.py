"""Protocols of other servers, as routes that ask vLLM's endpoints of the same app; off unless `--compat` names one."""
