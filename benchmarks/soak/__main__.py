"""`python -m benchmarks.soak`."""

from benchmarks.soak.run import main

main()
