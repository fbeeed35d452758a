"""A tool of verl's: `rollout.multi_turn.function_tool_path`."""

from verl.tools.function_tool import function_tool


@function_tool
def calculate(terms: str) -> str:
    """Adds numbers.

    Args:
        terms: Numbers with a plus between them.
    """
    return f"The calculator says {sum(map(int, terms.split('+')))}."
