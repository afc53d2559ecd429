from slipstream.data.conversations import problems_of
from slipstream.data.readers import read_rows


def read_problems(path, columns):
    """The problems of a file."""
    return problems_of(read_rows(path), columns)
