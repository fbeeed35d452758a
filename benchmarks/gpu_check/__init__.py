"""`make gpu-check`: everything that can only be known on a GPU, in pieces of at most ten minutes each.

Invariant: a piece runs in a process of its own, and its result is in the file before the next one starts, so that
whatever ends the program leaves what was measured and the next call goes on.
"""
