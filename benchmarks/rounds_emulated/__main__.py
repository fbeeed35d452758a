from benchmarks.rounds_emulated.run import main

if __name__ == "__main__":
    main()
