"""What becomes of runs when their server is killed, over and over."""
