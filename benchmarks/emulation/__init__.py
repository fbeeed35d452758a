"""An emulated device against the engine that it was profiled on."""
