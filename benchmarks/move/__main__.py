"""`python -m benchmarks.move`."""

from benchmarks.move.run import main

if __name__ == "__main__":
    main()
