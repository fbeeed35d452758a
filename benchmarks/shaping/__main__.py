"""`python -m benchmarks.shaping`."""

from benchmarks.shaping.run import main

main()
