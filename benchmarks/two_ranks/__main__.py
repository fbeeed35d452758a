"""`python -m benchmarks.two_ranks`."""

from benchmarks.two_ranks.run import main

if __name__ == "__main__":
    main()
