"""Entry point of `autopar` and of `python -m autopar`."""

import atexit
import gc
import os
import signal
import sys
import threading
from concurrent.futures import thread as pools

_PATIENCE_SECONDS = 2.0
_INTERRUPTED = 130
_OBJECTS_BETWEEN_COLLECTIONS = 100_000


def main() -> None:
    """Run the command line, and exit even if a thread of the model file never ends."""
    try:
        _take_signals()
        collect_rarely()
        # imported after signal handlers are set, because it takes seconds
        from autopar.cli import main as run

        run()
    except KeyboardInterrupt:  # before the command begins
        print("interrupted", file=sys.stderr)
        sys.exit(_INTERRUPTED)
    except SystemExit as leaving:
        waiting = [one for one in threading.enumerate() if _is_endless(one)]
        if waiting:
            from autopar.console import print_note

            print_note(f"a thread of the model file still runs, and is ended: {waiting[0].name}")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(leaving.code if isinstance(leaving.code, int) else 0)
        raise


def collect_rarely() -> None:
    """Have Python search for unreachable objects rarely, and not when it ends.

    torch makes so many objects that frequent searches are slow, and those at the end take a second.
    """
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    atexit.register(gc.freeze)


def _take_signals() -> None:
    """Make SIGTERM, SIGHUP and SIGUSR1 act like Ctrl-C, so that nothing is left half-written."""
    for name in ("SIGTERM", "SIGHUP", "SIGUSR1"):
        number = getattr(signal, name, None)
        # an ignored signal stays ignored, as SIGHUP under nohup
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


def _is_endless(thread: threading.Thread) -> bool:
    """Whether Python waits for a thread at exit, and the thread still runs after two seconds."""
    ends_with_python = thread.daemon or thread in pools._threads_queues
    if ends_with_python or thread is threading.main_thread():
        return False
    thread.join(_PATIENCE_SECONDS)
    return thread.is_alive()


if __name__ == "__main__":
    main()
