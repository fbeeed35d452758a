"""Entry point of `python -m benchmarks.front_end`, see `run.py`."""

from benchmarks.front_end.run import main

main()
