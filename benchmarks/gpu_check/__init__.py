"""What only a GPU can show, in ten minutes: `python -m benchmarks.gpu_check --minutes 9 --output DIR`.

One parent process imports torch and vLLM once, never touches CUDA, and forks every engine and every piece. Pieces run
in order of worth; one that does not fit into the rest of the time is skipped.

Invariant: whatever is measured is in DIR/lease.jsonl before the next thing is measured.
"""
