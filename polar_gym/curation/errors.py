"""The error of a request to make or validate tasks."""


class CurationError(Exception):
    """The input does not make a task. The message says why, and which input to try instead."""
