"""Cost of the front end on a fast emulated device: several kinds of clients race groups."""
