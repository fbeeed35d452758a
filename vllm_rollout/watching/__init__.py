"""Looking at rollouts from outside: a page of a file, and a server in a terminal."""
