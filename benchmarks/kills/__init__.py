"""What becomes of rollouts when ranks of their server are killed, over and over."""
