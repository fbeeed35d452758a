"""Request fields -> plans, and when a group may start. Runs in the API process; plans travel to the engine core."""
