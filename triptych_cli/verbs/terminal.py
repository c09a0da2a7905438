"""Text of other processes on a terminal."""


def printable(text: str) -> str:
    """`text` as one line that moves no cursor and changes no colour: other characters are escaped."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
