"""`python -m benchmarks.rounds`."""

from benchmarks.rounds.run import main

main()
