"""The one exception that a user causes and a user can mend."""


class UserError(Exception):
    """A wrong input, named in one line; command lines print it and exit with code 2."""
