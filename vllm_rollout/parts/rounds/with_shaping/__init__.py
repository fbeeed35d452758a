"""A round's parallelism: the engine's tensor-parallel size between rounds. These files are there if both parts are."""
