"""Carries what a region changes in its thread into the threads that start or work meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from threading import Thread, local
from typing import Any
from unittest.mock import patch


@contextmanager
def in_all_threads(enter: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter a region here, in threads that are started in the body, and in work handed to pools.

    torch's modes belong to one thread, so what another one computed would pass them by.
    """
    here = local()
    start, submit = Thread.start, ThreadPoolExecutor.submit

    def inside(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if getattr(here, "is_inside", False):
                return function(*args, **kwargs)
            here.is_inside = True
            try:
                with enter():
                    return function(*args, **kwargs)
            finally:
                here.is_inside = False

        return run

    def started(thread: Thread) -> None:
        thread.run = inside(thread.run)  # type: ignore[method-assign]
        start(thread)

    def submitted(
        pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        return submit(pool, inside(function), *args, **kwargs)

    with (
        patch.object(Thread, "start", started),
        patch.object(ThreadPoolExecutor, "submit", submitted),
    ):
        here.is_inside = True
        with enter():
            yield
