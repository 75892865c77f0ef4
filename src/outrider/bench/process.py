"""A server process of our own, started for a measurement or a test, and ended with it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from outrider.errors import OutriderError

PATIENCE_S = 120.0  # for a model to load


class ServerProcess:
    """`outrider serve` with these arguments, on a free port."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._said = TemporaryFile(mode="w+")  # noqa: SIM115 - open as long as the process
        command = [sys.executable, "-m", "outrider", "serve", *arguments, "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._said, text=True)
        self.url = ""
        self._last_words = ""
        self._has_spoken = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        if not self._has_spoken.wait(PATIENCE_S) or not self.url:
            self.kill()
            raise OutriderError(f"the server did not start: {self.errors().strip() or 'it said nothing'}")

    def _listen(self) -> None:
        """Read what it says for ever, or it would stop when the pipe is full."""
        for line in self.process.stdout or ():
            found = re.search(r"answers at (http\S+)", line)
            if found:
                self.url = found[1]
                self._has_spoken.set()
        self._has_spoken.set()

    def errors(self) -> str:
        """What it wrote to standard error."""
        if self._said.closed:
            return self._last_words
        self._said.seek(0)
        return self._said.read()

    def memory(self) -> int:
        """Bytes in memory now; 0 where that cannot be asked."""
        with suppress(OSError):
            for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024
        return 0

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, patience_s: float = 60.0) -> int:
        """Ask it to leave; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait(patience_s)

    def wait(self, patience_s: float = 60.0) -> int:
        try:
            code = self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise OutriderError("the server did not leave when it was told to") from None
        self._close()
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._close()

    def _close(self) -> None:
        self._listener.join()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._last_words = self.errors()
        self._said.close()


@contextmanager
def running_server(*arguments: str) -> Iterator[ServerProcess]:
    """A server for a while."""
    server = ServerProcess(arguments)
    try:
        yield server
    finally:
        server.end()
