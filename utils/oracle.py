# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Pristine upstream in a process of its own, as the oracle of equivalence tests.

A test runs a function here, with the fork, and the same function in the oracle, with the pinned upstream release, and
compares what they return:

    oracle = Oracle()
    assert tokens(prompt) == oracle.run(tokens, prompt)
"""

import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from packaging.version import Version

import transformers


# The release that the fork was made from: its own version without the local part
UPSTREAM_VERSION = Version(transformers.__version__).public
REPOSITORY = Path(__file__).resolve().parents[1]


class OracleError(RuntimeError):
    """Raised where the oracle cannot be started, where it died, and where a function raised in it (with traceback)."""


def oracle_path() -> Path:
    """The directory that holds pristine `transformers`: `$PREFILL_ORACLE`, by default `build/oracle`."""
    return Path(os.environ.get("PREFILL_ORACLE", REPOSITORY / "build" / "oracle")).resolve()


class Oracle:
    """
    A process that imports the pinned upstream release and runs functions in it, one after the other, until `close` or
    the end of this process.

    Raises:
        OracleError: If `oracle_path()` holds no `transformers`, or another release than the pinned one.
    """

    def __init__(self) -> None:
        path = oracle_path()
        if not (path / "transformers" / "__init__.py").is_file():
            raise OracleError(f"no pristine `transformers` in {path} (see PREFILL_ORACLE)")
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, str(theirs.fileno())],
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(REPOSITORY)])},
                pass_fds=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())
        version, file = self._answer()
        if version != UPSTREAM_VERSION or not Path(file).is_relative_to(path):
            self.close()
            raise OracleError(f"the oracle imported transformers {version} from {file}: not the release in {path}")

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """
        Calls `function` in the oracle and returns its result.

        Args:
            function (`Callable`):
                A function of a module that imports in the oracle too, found there by its name.
            args, kwargs:
                Its arguments, pickled: pass plain data and tensors, not objects of `transformers` classes that the
                fork extends.

        Raises:
            OracleError: If the function raises (the message is the traceback), or the process dies.
        """
        self._send((function, args, kwargs))
        return self._answer()

    def close(self) -> None:
        self._connection.close()
        self._process.wait()

    def _send(self, request: Any) -> None:
        # Not `Connection.send`: torch makes it pass tensors in shared memory, which has to outlive the receiver's use
        self._connection.send_bytes(pickle.dumps(request))

    def _answer(self) -> Any:
        try:
            succeeded, result = pickle.loads(self._connection.recv_bytes())
        except EOFError:
            raise OracleError(f"the oracle's process died with exit code {self._process.wait()}") from None
        if not succeeded:
            raise OracleError(f"in the oracle:\n{result}")
        return result


def _serve(connection: Connection) -> None:
    """Sends where `transformers` was found, then the result of each request, until the other side closes."""
    answer = (True, (transformers.__version__, transformers.__file__))
    while True:
        connection.send_bytes(pickle.dumps(answer))
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        try:
            function, args, kwargs = pickle.loads(request)
            answer = (True, function(*args, **kwargs))
        except Exception:
            answer = (False, traceback.format_exc())


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
