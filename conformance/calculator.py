"""The tool that the agents of all trainers call."""


def calculate(terms: str) -> str:
    """Adds numbers.

    Args:
        terms: Numbers with a plus between them.
    """
    return f"The calculator says {sum(map(int, terms.split('+')))}."
