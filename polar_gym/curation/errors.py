"""What can be wrong with a request to make or validate tasks."""


class CurationError(Exception):
    """No task can be made of this. The message says why, and what to try instead."""
