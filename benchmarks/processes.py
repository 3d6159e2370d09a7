"""Runs pieces of work in processes of their own, several at a time, with limits; each leaves a file with its result."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# On a busy machine, a process may wait this many times as long as it computes.
_WAITING = 6.0


@dataclass(frozen=True)
class Work:
    """A piece of work.

    Attributes:
        path: The file for its result, one line of JSON. What the process prints goes beside it, into a ``.log``.
        run: Returns the result.
        failed: Returns the result for a process that was stopped or crashed, given the reason.
        again: Run it although there is a result; that one is kept until then.
    """

    path: Path
    run: Callable[[], dict[str, Any]]
    failed: Callable[[str], dict[str, Any]]
    again: bool = False


@dataclass
class _Running:
    work: Work
    process: Any
    starts: int
    began: float


def run_all(pieces: Iterable[Work], *, jobs: int, seconds: float, memory: int, starts: int = 1) -> None:
    """Runs the pieces whose file does not exist, or that are to be run again.

    The processes are forked: what is imported before is imported once.

    Args:
        pieces: The work.
        jobs: How many processes run at a time.
        seconds: Processor time for each.
        memory: Bytes that each may allocate.
        starts: How often a process that crashes is started.
    """
    context = multiprocessing.get_context("fork")
    todo = [(work, 1) for work in pieces if work.again or not work.path.exists()][::-1]
    total, done, running = len(todo), 0, list[_Running]()
    while todo or running:
        while todo and len(running) < jobs:
            work, count = todo.pop()
            work.path.unlink(missing_ok=True)
            process = context.Process(target=_run, args=(work, seconds, memory))
            process.start()
            running.append(_Running(work, process, count, time.monotonic()))
        time.sleep(0.05)
        for item in list(running):
            wall = time.monotonic() - item.began
            if item.process.is_alive() and wall < _WAITING * seconds:
                continue
            item.process.kill()
            item.process.join()
            running.remove(item)
            late = wall >= _WAITING * seconds or item.process.exitcode == -signal.SIGXCPU
            if not item.work.path.exists() and not late and item.starts < starts:
                todo.append((item.work, item.starts + 1))
                continue
            if not item.work.path.exists():
                reason = f"took more than {seconds:g} seconds" if late else "ended the process"
                write(item.work.path, item.work.failed(reason))
            done += 1
            print(f"{done}/{total} {item.work.path.stem}: {wall:.1f} s", flush=True)


def write(path: Path, result: dict[str, Any]) -> None:
    """Writes a result completely or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result) + "\n")
    part.rename(path)


def results(folder: Path) -> list[dict[str, Any]]:
    """Returns all results of a folder."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def _run(work: Work, seconds: float, memory: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 5))
    log = os.open(work.path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    write(work.path, work.run())
