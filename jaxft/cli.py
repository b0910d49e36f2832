"""The edge between a command and the shell: exit codes, and faults a user can mend in one line."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from jaxft.errors import UserError


def run(main: Callable[[list[str]], int | None], argv: Sequence[str] | None = None) -> NoReturn:
    """Calls `main` with the arguments and leaves the process with its exit code.

    A UserError becomes one line on stderr and exit code 2, Ctrl-C exit code 130. Every other
    exception is a fault of the program and keeps its traceback. Characters that the terminal's
    encoding lacks are written as escapes instead of failing the run.

    Where the locale makes Python take paths for ASCII (LC_ALL=C with PYTHONUTF8=0) the command
    starts over in Python's UTF-8 mode: tokenizers and checkpoints know UTF-8 paths only.
    """
    if sys.getfilesystemencoding() != "utf-8":
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # absent where a test has replaced it
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    try:
        code = main(list(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code or 0)
