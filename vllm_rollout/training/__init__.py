"""Trainer work while rollouts still run: gradients of finished groups, and forward passes over new tokens.

It needs torch, and safetensors to write weights. Any trainer's loop can use it, with our server, another server, or
no server.
"""
