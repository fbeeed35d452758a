"""Entry point of `python -m benchmarks.soak`, see `run.py`."""

from benchmarks.soak.run import main

main()
