"""`python -m benchmarks.pruning`."""

from benchmarks.pruning.run import main

main()
