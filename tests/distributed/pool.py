"""Rank processes that outlive a test, so that torch and lightning are imported once per rank, not once per test.

`Pool` is the side of the tests: it hands all ranks the same function call and gathers their replies. `_serve` is the
side of a rank. Between them is one pipe per rank, on which plain pickles travel. The ranks look as if ``torchrun`` had
started them, and their default process group (gloo) is ready before the first call. Each is an interpreter of its own,
so the order of sets differs between them as it does in production.

`launch` is for what a pool cannot test: the launchers themselves.
"""

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import psutil
import torch
import torch.distributed as dist

T = TypeVar("T")
START_DEADLINE = 180.0  # Seconds that the ranks of a pool have to start.
GRACE = 30.0  # Seconds that the other ranks have to finish, once one has raised.


class RankError(AssertionError):
    """A call raised on some rank, or some rank died, passed the deadline or fell out of step with the others."""


@dataclass
class _Reply:
    """What a rank answers to a call: the value, or the error (type name and message) and its traceback."""

    value: Any = None
    error: tuple[str, str] | None = None
    trace: str = ""


class Pool:
    """Ranks on which functions are called, one call at a time.

    The ranks start with the first call. A call that leaves a rank stuck, dead or out of step with the others ends all
    of them, and the next call starts new ones. Otherwise each call finds the same processes with seeds, default dtype,
    warning filters, environment and working directory (a throwaway) reset, and without the groups that others made.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self._ranks: list[_Rank] = []
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._store: Any = None  # Where the ranks meet, served from here as by a torchrun agent.

    def run(self, fn: Callable[..., T], /, *args: Any, deadline: float = 60.0, **kwargs: Any) -> list[T]:
        """Calls ``fn(*args, **kwargs)`` on every rank.

        Args:
            fn: A function at the top level of a module, which the ranks import.
            args: Positional arguments of the function.
            deadline: Seconds that the call may take.
            kwargs: Keyword arguments of the function.

        Returns:
            What the function returned, in the order of the ranks.

        Raises:
            RankError: If a rank raised, died or did not finish in time, or if the ranks ended out of step. The message
                shows the traceback, exit code or stacks of each rank, and what it printed.
        """
        return [reply.value for reply in self._call(fn, args, kwargs, deadline, may_raise=False)]

    def run_expecting_errors(
        self, fn: Callable[..., object], /, *args: Any, deadline: float = 60.0, **kwargs: Any
    ) -> list[tuple[str, str] | None]:
        """Does what `run` does, but returns the type name and message of each rank's error, ``None`` without one."""
        return [reply.error for reply in self._call(fn, args, kwargs, deadline, may_raise=True)]

    def close(self) -> None:
        """Ends the ranks."""
        for rank in self._ranks:
            rank.end()
        if self._scratch:
            self._scratch.cleanup()
        self._ranks, self._scratch, self._store = [], None, None

    def _call(
        self, fn: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any], deadline: float, may_raise: bool
    ) -> list[_Reply]:
        name = getattr(fn, "__qualname__", repr(fn))
        call, check = pickle.dumps((fn, args, kwargs)), pickle.dumps((_check_in_step, (), {}))
        try:
            if not self._ranks:
                self._start()
            replies = self._exchange(name, call, deadline)
        except BaseException:
            self.close()
            raise
        failure = ""
        if not may_raise and any(reply.error for reply in replies):
            failure = self._report(f"{name} raised", replies)
        try:
            in_step = not any(reply.error for reply in self._exchange("The check", check, GRACE))
        except RankError:
            in_step = False
        if not in_step:
            self.close()
            if not may_raise:
                failure = failure or f"{name} returned on all ranks, but left their collectives or groups out of step"
        if failure:
            raise RankError(failure)
        return replies

    def _start(self) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="pool-", ignore_cleanup_errors=True)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world):
            self._ranks.append(_Rank(rank, self.world, self._store.port, Path(self._scratch.name)))
        self._gather("The start of the ranks", START_DEADLINE)

    def _exchange(self, name: str, call: bytes, deadline: float) -> list[_Reply]:
        for rank in self._ranks:
            rank.send(call)
        return self._gather(name, deadline)

    def _gather(self, name: str, deadline: float) -> list[_Reply]:
        """Waits for the replies of all ranks. Raises if one dies, or does not reply in time."""
        replies: list[_Reply | None] = [None] * self.world
        reason, end = f"passed its deadline of {deadline:g} s", time.monotonic() + deadline
        while None in replies:
            waiting = [i for i, reply in enumerate(replies) if reply is None]
            ready = wait([self._ranks[i].pipe for i in waiting], timeout=0.1)
            for rank in [self._ranks[i] for i in waiting if self._ranks[i].pipe in ready]:
                try:
                    reply = replies[rank.number] = pickle.loads(rank.pipe.recv_bytes())
                except (EOFError, OSError):  # The rank is dying.
                    rank.process.wait(GRACE)
                    continue
                if reply.error and end > time.monotonic() + GRACE:
                    reason, end = "raised on some ranks, others did not finish", time.monotonic() + GRACE
            if any(replies[i] is None and self._ranks[i].process.poll() is not None for i in waiting):
                raise RankError(self._report(f"{name} lost a rank", replies))
            if None in replies and time.monotonic() > end:
                raise RankError(self._report(f"{name} {reason}", replies))
        return [reply for reply in replies if reply]

    def _report(self, headline: str, replies: Sequence[_Reply | None]) -> str:
        fates = [f"--- rank {rank.number} {rank.describe(replies[rank.number])}" for rank in self._ranks]
        return "\n".join([headline, *fates])


class _Rank:
    """One rank seen from the tests: its process, its pipe and the files that it writes."""

    def __init__(self, rank: int, world: int, port: int, scratch: Path) -> None:
        self.number = rank
        self._log, self._stacks = scratch / f"rank{rank}.log", scratch / f"rank{rank}.stacks"
        self._printed = 0
        self.pipe, far_end = multiprocessing.Pipe()
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "pool"}
        agent = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
        code = f"from {__name__} import _serve; _serve({far_end.fileno()}, {str(self._stacks)!r})"
        command, cwd = [sys.executable, "-c", code], scratch / "cwd"
        cwd.mkdir(exist_ok=True)
        self.process = _spawn(command, place | meeting | agent, cwd, self._log, pass_fds=[far_end.fileno()])
        far_end.close()

    def send(self, call: bytes) -> None:
        """Hands the rank a call. If it has died, waiting for its reply will tell."""
        self._printed = self._log.stat().st_size
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(call)

    def describe(self, reply: _Reply | None) -> str:
        """Tells how the rank fared: its traceback, exit code or stacks, and the end of what it printed."""
        code = self.process.poll()
        if reply:
            state = f"raised\n{reply.trace}" if reply.error else "finished"
        elif code is not None:
            state = f"died with exit code {code}" + (f" ({signal.Signals(-code).name})" if code < 0 else "")
        else:
            state = f"did not finish, its stacks:\n{self._dump_stacks()}"
        printed = self._log.read_bytes()[self._printed :].decode(errors="replace")
        return f"{state}\nand printed:\n{_tail(printed)}" if printed.strip() and state != "finished" else state

    def _dump_stacks(self) -> str:
        """Has the rank's fault handler write the Python stacks of all threads, which it can in a blocked call too."""
        self.process.send_signal(signal.SIGUSR1)
        size, end = -1, time.monotonic() + 3
        while time.monotonic() < end and (size <= 0 or size != self._stacks.stat().st_size):
            size = self._stacks.stat().st_size
            time.sleep(0.1)
        return self._stacks.read_text()

    def end(self) -> None:
        """Ends the process and those that it started."""
        _kill(self.process)
        self.pipe.close()


def _serve(descriptor: int, stacks: str) -> None:
    """Runs a rank: answers calls until the tests close the pipe."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a rank does not outlive the tests.
    faulthandler.enable()
    _keep_dumping_stacks(stacks)
    torch.set_num_threads(1)
    import lightning.pytorch  # noqa: F401  # Slow, so not left to the first call.

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    home, pipe = os.getcwd(), Connection(descriptor)
    gc.collect()
    gc.freeze()  # What is imported stays, so collecting between calls can pass it over.
    pipe.send_bytes(pickle.dumps(_Reply()))
    with contextlib.suppress(EOFError):
        while True:
            call = pipe.recv_bytes()
            with mock.patch.dict(os.environ), warnings.catch_warnings():
                os.chdir(home)
                random.seed(0)
                np.random.seed(0)
                torch.manual_seed(0)
                torch.set_default_dtype(torch.float32)
                torch.use_deterministic_algorithms(False)
                answer = _answer(call)
            gc.collect()
            pipe.send_bytes(answer)


def _answer(call: bytes) -> bytes:
    """Makes the call and pickles what comes of it. Tensors travel in the pickle, not as shared memory."""
    try:
        fn, args, kwargs = pickle.loads(call)
        return pickle.dumps(_Reply(fn(*args, **kwargs)))
    except BaseException as error:
        return pickle.dumps(_Reply(error=(type(error).__name__, str(error)), trace=traceback.format_exc()))


def _check_in_step() -> None:
    """Destroys the groups that the last call made, and passes if all ranks have entered the same collectives."""
    dist.barrier()
    for group in list(dist.distributed_c10d._pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    group = dist.new_group()  # Hangs unless the ranks have made the same number of groups.
    dist.barrier(group)  # A rank that destroyed the group at once would break the connections that others still make.
    dist.destroy_process_group(group)


def _keep_dumping_stacks(path: str) -> None:
    """Makes SIGUSR1 write the stacks to a file, also after a fit.

    A trainer saves and restores all signal handlers. It cannot see the fault handler, so it restores the default one.
    """
    file, set_handler = open(path, "w"), signal.signal  # noqa: SIM115

    def set_handler_or_dump(signum: int, handler: Any) -> Any:
        previous = set_handler(signum, handler)
        if signum == signal.SIGUSR1 and handler == signal.SIG_DFL:
            faulthandler.unregister(signum)
            faulthandler.register(signum, file, all_threads=True)
        return previous

    signal.signal = set_handler_or_dump  # type: ignore[assignment]
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def launch(
    script_or_args: str | Path | Sequence[str | Path],
    *,
    world: int,
    nodes: int = 1,
    env: Mapping[str, str] | None = None,
    deadline: float = 120.0,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Runs a program that consists of several ranks, in a temporary working directory.

    Args:
        script_or_args: A Python script, or a script and its arguments, which ``torchrun`` launches. If the first item
            does not end in ``.py``, it is a command that launches its own ranks, run once per node with ``NODE_RANK``,
            ``MASTER_ADDR`` and ``MASTER_PORT`` set.
        world: Number of ranks on all nodes together. Unused for a command.
        nodes: Number of nodes, all of them on this machine.
        env: Environment variables to add.
        deadline: Seconds until all processes are killed.
        check: Whether to fail if the program does.

    Returns:
        The first exit code other than 0, if any, and the output of all nodes as ``stdout``.

    Raises:
        AssertionError: If the program does not end in time or, with ``check``, if it fails.
    """
    given = [script_or_args] if isinstance(script_or_args, str | Path) else script_or_args
    command, port, failure = [str(item) for item in given], free_port(), ""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **(env or {})}
    torchrun: list[str] = []
    if command[0].endswith(".py"):
        command[0] = os.path.abspath(command[0])
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}"]
        torchrun += [f"--nproc-per-node={world // nodes}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    with tempfile.TemporaryDirectory(prefix="launch-") as scratch:
        processes, cwd, log = [], Path(scratch, "cwd"), Path(scratch, "log")
        cwd.mkdir()
        end = time.monotonic() + deadline
        try:
            for node in range(nodes):
                agent = [*torchrun, f"--node-rank={node}"] if torchrun else []
                processes.append(_spawn([*agent, *command], variables | {"NODE_RANK": node}, cwd, log))
            codes = [process.wait(max(0.0, end - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            codes, failure = [-signal.SIGKILL], f"did not end within {deadline:g} s"
        finally:
            for process in processes:
                _kill(process)
        output = log.read_text(errors="replace")
    code = next((code for code in codes if code), 0)
    if check and code:
        failure = failure or f"ended with exit code {code}"
    if failure:
        raise AssertionError(f"{' '.join(command)} {failure} and printed:\n{_tail(output)}")
    return subprocess.CompletedProcess(command, code, output, "")


def free_port() -> int:
    """Gives a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _spawn(
    command: list[str], variables: Mapping[str, object], cwd: Path, log: Path, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Starts a process with a group of its own, that imports what the tests import and computes on one core."""
    shared = {"OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": 1}
    shared["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    env = os.environ | {name: str(value) for name, value in {**shared, **variables}.items()}
    with log.open("ab") as out:
        return subprocess.Popen(
            command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            pass_fds=pass_fds, start_new_session=True,
        )  # fmt: skip


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process, its group, and its descendants in other groups (torchrun puts its workers there)."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(text: str, lines: int = 40) -> str:
    return "\n".join(text.splitlines()[-lines:])
