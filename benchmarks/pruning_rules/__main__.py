"""`python -m benchmarks.pruning_rules`."""

from benchmarks.pruning_rules.run import main

main()
