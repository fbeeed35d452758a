"""`python -m benchmarks.front_end`."""

from benchmarks.front_end.run import main

main()
