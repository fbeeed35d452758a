"""Moving where there are rounds: the size of the engine between rounds."""
