"""Decides by scores and rewards which candidates go on. Runs in the engine core. Reports and votes run in the API
process."""
