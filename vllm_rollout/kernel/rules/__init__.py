"""Decides which candidates run, win, stop. Standard library only: no clock, no chance, no I/O, no torch, no vllm."""
