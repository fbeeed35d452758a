"""What a trainer does while rollouts still run: gradients of groups that ended, forward passes over new tokens.

Torch only: any trainer's loop can use it, with our server, another one, or none.
"""
