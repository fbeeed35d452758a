"""`python -m benchmarks.kills`."""

from benchmarks.kills.run import main

main()
