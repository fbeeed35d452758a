"""What an emulated device does instead of computing: step times, lengths, outcomes, and a log of its steps.

Invariant: everything is made up from the settings, the prompt and the request's seed; time is an argument.
"""
