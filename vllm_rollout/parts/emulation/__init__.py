"""The work of an emulated device: step times, lengths, outcomes and a log of its steps, without computing.

Invariant: every value follows from the settings, the prompt and the request's seed. Time is an argument.
"""
