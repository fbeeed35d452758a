"""Beside vLLM's model runner: shows logits and hidden states of candidates to the tracker."""
