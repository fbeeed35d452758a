"""Entry point of `python -m benchmarks.rounds`, see `run.py`."""

from benchmarks.rounds.run import main

main()
