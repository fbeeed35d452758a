"""Entry point of `python -m benchmarks.shaping`, see `run.py`."""

from benchmarks.shaping.run import main

main()
