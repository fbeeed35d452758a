"""The tool of the agents of all trainers."""


def calculate(terms: str) -> str:
    """Adds numbers.

    Args:
        terms: Numbers with a plus between them.
    """
    return f"The calculator says {sum(map(int, terms.split('+')))}."
