"""Python programs in processes of their own, without the seconds that each import of torch takes.

They are forked from one process, which has imported torch, with what the first step of an optimizer
of torch's imports, and nothing of ampfuse. So they read the environment and import ampfuse as a new
interpreter does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import inspect
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import random
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import unittest.mock
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch._dynamo"])
# Read where torch is imported. One thread as in the tests themselves; where a program wants more,
# they do not keep each other from running.
_THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def python(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS``, in this environment with the changes given, until it ends.

    `arguments` may start with ``-W error``; then come ``-c CODE``, ``-m MODULE`` or a file, and the
    program's own.
    """
    return Program(*arguments, **environment).wait()


def ranks(
    size: int, *arguments: object, timeout: float = 600
) -> list[subprocess.CompletedProcess[str]]:
    """Run a program as `size` processes of one torch.distributed group; how each ended, by rank.

    If one fails, the others have five seconds more, and the errors of all are reported: the first
    that ends may only have lost the connection to the one that failed.
    """
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    programs = [
        Program(*arguments, **common, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(size)
    ]
    deadline = time.monotonic() + timeout
    running = {program.sentinel: program for program in programs}
    while running and (left := deadline - time.monotonic()) > 0:
        for sentinel in multiprocessing.connection.wait(list(running), left):
            if running.pop(sentinel).exitcode != 0:
                deadline = min(deadline, time.monotonic() + 5)
    results = [program.end() for program in programs]
    ends = [
        f"rank {rank}: {'killed' if result.returncode is None else result.returncode}\n"
        f"{result.stderr}"
        for rank, result in enumerate(results)
    ]
    assert all(result.returncode == 0 for result in results), "\n".join(ends)
    return results


def in_processes(
    size: int, folder: Path, file: str, names: list[str]
) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """Call functions of a test file, one after the other, in each of `size` processes of a group.

    They have `folder` as the current one, and torch's default device is DEVICE. Each function
    starts from seed 0, as a test does. Returns for each rank, by the functions' names, their
    results and the errors: after one nothing more runs on that rank, as the others wait for it.
    """
    import torch

    ranks(size, __file__, folder, file, *names)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]


def in_two_processes(folder: Path, *jobs: Callable[[], Any]) -> list[dict[str, Any]]:
    """Return what functions of one test file give in two processes of a group, by rank and name."""
    file = jobs[0].__globals__["__file__"]
    outcomes = in_processes(2, folder, file, [job.__name__ for job in jobs])
    for rank, (_, errors) in enumerate(outcomes):
        assert not errors, f"rank {rank}: " + "\n".join(errors.values())
    return [results for results, _ in outcomes]


def _one_of_several(folder: str, file: str, *names: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(file).parent))
    module = importlib.import_module(Path(file).stem)
    device = os.environ.get("DEVICE", "cpu")
    if device != "cpu":
        torch.set_default_device(device)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=300))
    os.chdir(folder)
    results, errors = {}, {}
    for i, name in enumerate(names):
        job = getattr(module, name)
        torch.manual_seed(0)
        try:
            results[name] = getattr(job, "body", job)()
        except Exception:
            errors[name] = traceback.format_exc()
            print(name, errors[name], file=sys.stderr, flush=True)
            errors |= dict.fromkeys(names[i + 1 :], f"not run: {name} failed before")
            break
    torch.save((results, errors), f"{dist.get_rank()}.pt")
    if not errors:
        dist.barrier()


def free_port() -> int:
    """Return a port below those that the system gives to connections: it is free until used."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            return port


def use_one_gloo_worker() -> None:
    """Have torch's gloo run the collectives of a group in one thread.

    By default it has two, which write the name of the collective that they completed into one
    std::string without a lock (ProcessGroupGloo::runLoop; seen in torch 2.15). Names of more than
    15 characters are on the heap, as ALLGATHER_INTO_TENSOR_COALESCED of DTensor: now and then such
    a process ended with "malloc(): unaligned tcache chunk detected".
    """
    from torch.distributed import ProcessGroupGloo

    init = ProcessGroupGloo.__init__

    def init_with_one_worker(
        self: Any, store: Any, rank: int, size: int, *, timeout: timedelta, **others: bool
    ) -> None:
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_default_device()]
        options._threads, options._timeout = 1, timeout
        for name, value in others.items():
            setattr(options, name, value)
        init(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = init_with_one_worker


class Program:
    """A Python program in a forked process. It runs while the test goes on."""

    def __init__(self, *arguments: object, **environment: str) -> None:
        self.arguments = [str(argument) for argument in arguments]
        with unittest.mock.patch.dict(os.environ, _THREADS):
            multiprocessing.forkserver.ensure_running()
        self._folder = tempfile.TemporaryDirectory()
        self._process = _context.Process(
            target=_run,
            args=(
                self.arguments,
                {**os.environ, **_THREADS, **environment},
                self._folder.name,
            ),
        )
        self._process.start()

    def wait(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Raises TimeoutExpired, and ends it, after so many seconds."""
        self._process.join(timeout)
        result = self.end()
        if result.returncode is None:
            raise subprocess.TimeoutExpired(self.arguments, timeout, result.stdout, result.stderr)
        return result

    @property
    def sentinel(self) -> int:
        """Ready when it has ended, see multiprocessing.connection.wait."""
        return self._process.sentinel

    @property
    def exitcode(self) -> int | None:
        return self._process.exitcode

    def end(self) -> subprocess.CompletedProcess[str]:
        """Kill it if it runs; its status is None then."""
        status = self._process.exitcode
        self._process.kill()
        self._process.join()
        out, err = (Path(self._folder.name, name).read_text() for name in ("out", "err"))
        self._folder.cleanup()
        return subprocess.CompletedProcess(self.arguments, status, out, err)


def _run(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        with open(f"{folder}/{name}", "w") as file:
            os.dup2(file.fileno(), stream.fileno())
    faulthandler.enable()  # a process that aborts says where
    os.environ.clear()
    os.environ.update(environment)
    if arguments[:2] == ["-W", "error"]:
        warnings.simplefilter("error")
        del arguments[:2]
    if "WORLD_SIZE" in environment:
        use_one_gloo_worker()
    kind = arguments.pop(0) if arguments[0] in ("-c", "-m") else None
    program, *sys.argv[1:] = arguments
    if kind == "-c":
        sys.argv[0] = kind
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.argv[0] = program
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
    if "WORLD_SIZE" in environment:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # gloo's threads now and then abort a process that ends by itself


def on_ranks(*sizes):
    """The test's body runs in each process of torch.distributed groups of these sizes, all but two
    in slow runs alone; "cuda" is one process on a GPU. Processes take seconds to start, so that
    the chosen tests of a file run in the same ones. After an error the others of a rank do not run.
    """

    def decorate(body):
        def test(errors_by_rank):
            found = {i: errors.get(body.__name__) for i, errors in enumerate(errors_by_rank)}
            assert not any(found.values()), "\n".join(f"rank {i}: {e}" for i, e in found.items())

        functools.update_wrapper(test, body)
        test.__signature__ = inspect.Signature(
            [inspect.Parameter("errors_by_rank", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        )
        test.body = body
        marks = {2: (), "cuda": pytest.mark.gpu}
        params = [pytest.param(size, marks=marks.get(size, pytest.mark.slow)) for size in sizes]
        return pytest.mark.parametrize("errors_by_rank", params, indirect=True)(test)

    return decorate


if __name__ == "__main__":
    _one_of_several(*sys.argv[1:])
