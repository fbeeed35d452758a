"""Quality heads on an emulated device. These files are there if both parts are."""
