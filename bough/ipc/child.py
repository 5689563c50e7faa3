"""Start and end of a child process: it ends with its parent, writes down why it failed, and ignores Ctrl-C."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from bough.core.errors import BoughError
from bough.ipc.handoff import Launch, load_launch, write_error
from bough.ipc.outbox import flush
from bough.observability.log import set_up_logging

_PR_SET_PDEATHSIG = 1
_log = logging.getLogger(__name__)


def run_child(name: str, directory: str, body: Callable[[Launch], None], *, janitor: bool = False) -> int:
    """Runs `body` as the process `name` of the server in `directory` and returns its exit status.

    The process ends within seconds after its parent, however the parent ends. SIGINT and SIGHUP are ignored: the parent
    handles them. SIGTERM raises `SystemExit` in the main thread unless `body` installs a handler. A failure is written
    to `error.<name>.json`; the launcher prints it. The process named `janitor` removes the private directory if the
    parent was killed; without one, the next server that starts removes it.
    """
    launch = load_launch(directory)
    _die_with_parent(launch, janitor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_quietly)
    set_up_logging(name, launch.config.log)
    status = 1
    with launch.endpoints.fault(name).open("w") as fault_file:
        faulthandler.enable(fault_file)
        try:
            body(launch)
            status = 0
        except SystemExit as ending:
            status = ending.code if isinstance(ending.code, int) else 0
        except BaseException as error:
            _report(name, launch, error)
        finally:
            faulthandler.disable()
    with contextlib.suppress(Exception):
        flush()
    return status


def _report(name: str, launch: Launch, error: BaseException) -> None:
    trace = ""
    if launch.config.log.log_level == "debug" or not isinstance(error, BoughError):
        trace = "".join(traceback.format_exception(error))
        _log.error("%s failed\n%s", name, trace)
    with contextlib.suppress(OSError):
        write_error(launch.endpoints, name, error, trace if launch.config.log.log_level == "debug" else "")


def _exit_quietly(_signal: int, _frame: object) -> None:
    raise SystemExit(0)


def _die_with_parent(launch: Launch, janitor: bool) -> None:
    # The janitor must live long enough to clean up. The kernel kills the others immediately, even in native code.
    if sys.platform == "linux" and launch.die_with_parent_thread and not janitor:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launch.parent_pid:
        _end(launch, janitor)
    if launch.lifeline_fd >= 0:
        watch = threading.Thread(target=_watch_lifeline, args=(launch, janitor), name="lifeline", daemon=True)
        watch.start()


def _watch_lifeline(launch: Launch, janitor: bool) -> None:
    while True:
        try:
            if not os.read(launch.lifeline_fd, 1):
                break
        except OSError:
            break
    _end(launch, janitor)


def _end(launch: Launch, janitor: bool) -> NoReturn:
    """Ends this process. The janitor first waits for the others and removes the private directory."""
    if janitor:
        time.sleep(0.5)
        shutil.rmtree(launch.directory, ignore_errors=True)
    os._exit(1)
