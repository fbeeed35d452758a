"""What the front end costs on a fast device: four clients race groups on an emulated one."""
