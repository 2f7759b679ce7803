"""The command line, with Ctrl-C after a line of its output: `interrupted.py PATTERN ARGUMENT...`; "" is no Ctrl-C."""

import os
import re
import signal
import sys

from hiap.cli.main import main


class Watched:
    """Standard output that presses Ctrl-C when the line is there."""

    def __init__(self, stop: str) -> None:
        self.file, self.line, self.stop = sys.stdout, "", stop

    def write(self, text: str) -> int:
        count = self.file.write(text)
        self.file.flush()
        *lines, self.line = (self.line + text).split("\n")
        if self.stop and any(re.match(self.stop, line) for line in lines):
            self.stop = ""
            os.kill(os.getpid(), signal.SIGINT)
        return count

    def __getattr__(self, name: str) -> object:
        return getattr(self.file, name)


sys.stdout = Watched(sys.argv[1])
sys.exit(main(sys.argv[2:]))
