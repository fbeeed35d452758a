"""Who of a group wins, and whom nobody needs any more. Runs in the engine core and the API process."""
