"""Data-parallel ranks: who runs where, what moves, which ranks are freed. Runs in the API process."""
