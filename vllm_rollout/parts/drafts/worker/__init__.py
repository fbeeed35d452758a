"""The proposer of drafts, and its memory."""
