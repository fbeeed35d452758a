"""Prompts whose lengths are known, too. These files are there if both parts are."""
