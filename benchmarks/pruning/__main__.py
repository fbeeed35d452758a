"""Entry point of `python -m benchmarks.pruning`, see `run.py`."""

from benchmarks.pruning.run import main

main()
