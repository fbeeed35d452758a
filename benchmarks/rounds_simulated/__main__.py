"""`python -m benchmarks.rounds_simulated`."""

from benchmarks.rounds_simulated.run import main

main()
