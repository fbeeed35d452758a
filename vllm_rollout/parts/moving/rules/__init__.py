"""Data-parallel ranks: placement of groups, moves between ranks, and ranks to free. Runs in the API process."""
