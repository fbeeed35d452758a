"""Groups that leave or arrive, with their KV blocks."""
