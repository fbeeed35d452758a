"""Checks that only a GPU can make, in ten minutes: `python -m benchmarks.gpu_check --minutes 9 --output DIR`.

One parent process imports torch and vLLM once, never touches CUDA, and forks every engine and every piece. Pieces run
in order of value. A piece that does not fit into the remaining time is skipped.

Invariant: every measurement is in DIR/lease.jsonl before the next measurement begins.
"""
