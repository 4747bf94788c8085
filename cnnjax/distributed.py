"""Several processes that train one model: how they start, agree and end, and what happens when one is lost.

Every process runs the same program on the same options; the mesh spans the devices of all of them. Process 0 alone
writes and prints. Batches, initial state and sample order are functions of the options, so that the processes need to
agree on little else: `Processes.from_first` and `Votes` are for what remains.
"""

import contextlib
import itertools
import json
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cnnjax import partition
from cnnjax.console import Console

START_S = 60  # that the processes may take to find each other
SILENCE_S = 20  # after which a process counts as lost
_BACKSTOP_S = 2 * SILENCE_S  # after which JAX itself aborts the process, should the thread that watches be stuck
_GRACE_S = 2.0  # that a failing process leaves the others to hear of it
_FOREVER_MS = 10 * 24 * 3600 * 1000
EXIT_LOST = 4

# Keys in the store that the coordinator, process 0, keeps.
_ALIVE, _FAILED, _FIRST_FAILURE, _TOLD = "cnnjax/alive/", "cnnjax/failed/", "cnnjax/failure", "cnnjax/told/"


def detected(environment: Mapping[str, str]) -> str | None:
    """The launcher that started more than one process and from which JAX can tell who is who; else None.

    Raises:
        ValueError: If Open MPI started several processes, but is of a version that JAX cannot read.
    """
    slurm = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")
    if int(environment.get("SLURM_NTASKS") or 1) > 1 and all(name in environment for name in slurm):
        return "SLURM"
    if int(environment.get("OMPI_COMM_WORLD_SIZE") or 1) > 1:
        if "OMPI_MCA_orte_hnp_uri" not in environment:
            raise ValueError(
                "JAX cannot find the coordinator from this version of Open MPI (it can up to version 4): give "
                "--coordinator HOST:PORT --num-processes $OMPI_COMM_WORLD_SIZE --process-id $OMPI_COMM_WORLD_RANK"
            )
        return "Open MPI"
    return None


def start(coordinator: str | None, num_processes: int | None, process_id: int | None, mesh: str) -> "Processes":
    """Joins the other processes, where there are any. Call it before any other use of JAX.

    Args:
        coordinator: ``HOST:PORT`` at which process 0 listens; None for what SLURM or Open MPI say, or for one process.
        num_processes: Processes of the run.
        process_id: Which one this is, from 0.
        mesh: As ``--mesh``; on CPUs, each process makes its share of the devices.

    Raises:
        ValueError: If the mesh cannot be shared out, or the coordinator's address cannot be used. Where the others do
            not appear within `START_S` seconds, the process says so and ends with exit code 2.
    """
    launcher = None if coordinator is not None else detected(os.environ)
    if launcher is not None:
        names = ("SLURM_NTASKS", "SLURM_PROCID") if launcher == "SLURM" else _OMPI_NAMES
        num_processes, process_id = (int(os.environ[name]) for name in names)
    if num_processes is None or process_id is None:
        return Processes()
    try:
        partition.request_cpu_devices(_share(mesh, num_processes))
        where = coordinator or f"the address that {launcher} gives"
        if coordinator is not None:
            _check_address(coordinator, listen=process_id == 0)
    except ValueError as error:
        # All processes can see a wrong mesh, but an address may be wrong for one of them alone.
        raise ValueError(str(error) if process_id == 0 else f"process {process_id}: {error}") from None

    def give_up() -> None:
        missing = f"the other {num_processes - 1} did not all come" if process_id == 0 else "no coordinator answered"
        _print_error(f"process {process_id} of {num_processes}: {missing} at {where} within {START_S} s")
        os._exit(2)

    if num_processes > 1:
        # JAX would take SIGTERM as a hint for its own checkpoints; here the loop decides.
        jax.config.update("jax_enable_preemption_service", False)
        timer = threading.Timer(START_S, give_up)
        timer.daemon = True
        timer.start()
        try:
            jax.distributed.initialize(
                coordinator, num_processes, process_id, initialization_timeout=START_S + 30,
                heartbeat_timeout_seconds=_BACKSTOP_S, shutdown_timeout_seconds=START_S,
            )  # fmt: skip
        except Exception as error:
            raise ValueError(f"process {process_id} of {num_processes} cannot join {where}: {error}") from None
        finally:
            timer.cancel()
        _silence_libraries(printing=process_id == 0)
    processes = Processes(process_id, num_processes)
    jax.devices()  # starts the backend with the devices asked for above
    return processes


def _silence_libraries(printing: bool) -> None:
    """Gloo prints every connection to standard output; only what Python prints there stays, if ``printing``."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    kept = os.dup(1) if printing else nowhere
    os.dup2(nowhere, 1)
    sys.stdout = os.fdopen(kept, "w", buffering=1, encoding=sys.stdout.encoding, errors=sys.stdout.errors)


_OMPI_NAMES = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")


def _share(mesh: str, num_processes: int) -> int:
    """CPU devices that each process makes."""
    sizes = partition.parse_mesh(mesh)
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values():
        return math.lcm(fixed, num_processes) // num_processes
    if fixed % num_processes:
        raise ValueError(
            f"--mesh {mesh} has {fixed} devices, which {num_processes} processes cannot share evenly; "
            f"allowed: a multiple of {num_processes}"
        )
    return fixed // num_processes


def _check_address(address: str, listen: bool) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"--coordinator {address}: {error.strerror or error}") from None
    if not listen:
        return
    try:
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        socket.create_server(("", int(port)), family=family, dualstack_ipv6=family == socket.AF_INET6).close()
    except OSError as error:
        raise ValueError(f"--coordinator {address}: process 0 cannot listen there: {error.strerror or error}") from None


class Processes:
    """The processes of this run, of which this is one; does nothing where it is the only one.

    As a context manager it watches the others: when one of them fails or is lost, this process says so and ends, and
    when its own body fails, the others hear of it. It leaves together with the others.

    Attributes:
        index: Which process this is, from 0.
        count: How many there are.
        hint: Ends every message about a lost process; such as how to resume.
        last_words: Called with such a message before the process ends.
    """

    def __init__(self, index: int = 0, count: int = 1):
        self.index, self.count = index, count
        self.hint = ""
        self.last_words: Callable[[str], None] = lambda text: None
        self._calls = 0
        self._left = threading.Event()
        self._ending = threading.Lock()
        if count > 1:
            import orbax.checkpoint as ocp  # the public road to JAX's own client

            self._client = ocp.multihost.get_jax_distributed_client()

    @property
    def first(self) -> bool:
        """Whether this process writes and prints."""
        return self.index == 0

    def __enter__(self) -> "Processes":
        if self.count > 1:
            for watch in (self._hear, self._beat):
                threading.Thread(target=watch, name=f"processes{watch.__name__}", daemon=True).start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.count == 1:
            return
        if error is not None:
            self._fail(error)
        # A process that is ahead waits here, and is still watched.
        self._client.wait_at_barrier("cnnjax/end", _FOREVER_MS)
        self._left.set()
        jax.distributed.shutdown()

    # -- agreement ----------------------------------------------------------------------------------------------------

    def from_first(self, call: Callable[[], Any]) -> Any:
        """What ``call`` returns in process 0, which alone calls it; must be JSON. All processes must come here."""
        if self.count == 1:
            return call()
        self._calls += 1
        key = f"{_TOLD}{self._calls}"
        if self.first:
            self._client.key_value_set(key, json.dumps(call()))
        return json.loads(self._client.blocking_key_value_get(key, _FOREVER_MS))

    def whole(self, array: jax.Array) -> np.ndarray:
        """An array on the host; of one that is spread over processes, all must ask."""
        if array.is_fully_addressable:
            return np.asarray(array)
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))

    def first_then_others(self, call: Callable[[], Any]) -> Any:
        """Calls in process 0, then in the others, which find what it has written, such as a download."""
        mine = call() if self.first else None
        self.from_first(lambda: None)
        return mine if self.first else call()

    def same(self, what: str, facts: dict[str, Any]) -> None:
        """Checks that all processes have the same facts.

        Raises:
            ValueError: In a process whose facts differ from those of process 0; lists them.
        """
        told = self.from_first(lambda: facts)
        mine = json.loads(json.dumps(facts))
        if wrong := [f"{name} is {mine[name]}, but {told.get(name)} in process 0" for name in mine
                     if mine[name] != told.get(name)]:  # fmt: skip
            raise ValueError(f"all processes need the same {what}: {'; '.join(wrong)}")

    def check_mesh(self, mesh: Mesh) -> None:
        """Checks that the processes have equal parts of the mesh.

        Raises:
            ValueError: If they do not.
        """
        owners = [device.process_index for device in mesh.devices.flat]
        parts = [owners.count(process) for process in range(self.count)]
        if len(set(parts)) > 1:
            raise ValueError(
                f"--mesh {partition.describe(mesh)} takes {', '.join(map(str, parts))} devices of processes 0 to "
                f"{self.count - 1}; allowed: a mesh of all {jax.device_count()} devices"
            )

    @contextlib.contextmanager
    def closing(self, thing: Any) -> Iterator[None]:
        """Closes it at the end, but after an error only if no other process must close it too."""
        try:
            yield
        except BaseException:
            if self.count == 1:
                thing.close()
            raise
        thing.close()

    # -- failure ------------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Shows that this process lives, and looks whether the others do."""
        seen: dict[int, tuple[str, float]] = {}
        for beat in itertools.count():
            try:
                self._client.key_value_set(f"{_ALIVE}{self.index}", str(beat), allow_overwrite=True)
                counts = {int(key.rpartition("/")[2]): value for key, value in self._client.key_value_dir_get(_ALIVE)}
            except Exception:
                self._lost_coordinator()
                return
            now = time.monotonic()
            for process in range(self.count):
                value = counts.get(process, "")
                if process not in seen or seen[process][0] != value:
                    seen[process] = value, now
                elif now - seen[process][1] > SILENCE_S:
                    self._lost(f"process {process} is lost: it has given no sign of life for {SILENCE_S} s")
            if self._left.wait(1.0):
                return

    def _hear(self) -> None:
        """Waits until a process tells that it failed, or until the coordinator closes the line."""
        try:
            failure = json.loads(self._client.blocking_key_value_get(_FIRST_FAILURE, _FOREVER_MS))
        except Exception:
            self._lost_coordinator()
            return
        # If this process is about to fail for the same reason, it says so itself; the coordinator goes last.
        time.sleep(_GRACE_S if self.first else _GRACE_S / 2)
        self._end(f"process {failure['process']} failed: {failure['text']}", failure["code"])

    def _lost_coordinator(self) -> None:
        self._lost("process 0, the coordinator, is lost: its connection broke")

    def _lost(self, text: str) -> None:
        if not self._left.is_set():
            self._end(f"{text}; {self.hint}".rstrip("; "), EXIT_LOST)

    def _end(self, text: str, code: int) -> NoReturn:
        with self._ending:  # never left: one message is enough
            text = f"process {self.index} of {self.count}: {text}"
            _print_error(text)
            self._say_last(text)
            os._exit(code)

    def _say_last(self, text: str) -> None:
        try:
            self.last_words(f"error: {text}")
        except Exception:  # such as a full disk
            traceback.print_exc()

    def _fail(self, error: BaseException) -> NoReturn:
        """Ends this process for an error in its body, after telling the others."""
        if any(isinstance(cause, jax.errors.JaxRuntimeError) for cause in _causes(error)):
            # Most likely a collective broke because a process was lost. The watch knows which, at the latest by then.
            time.sleep(SILENCE_S + 5)
        code = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
        text = " ".join(str(error).split()) if code == 2 else type(error).__name__ + f": {error}".rstrip(": ")
        with self._ending:
            if self.first:
                self._report(text, code, error)
            # Where all fail alike, process 0 says it for all.
            if self._tell(text, code) != text and not self.first:
                self._report(f"process {self.index} of {self.count}: {text}", code, error)
            os._exit(code)

    def _report(self, text: str, code: int, error: BaseException) -> None:
        if code == 1:
            traceback.print_exception(error)
        _print_error(text)

    def _tell(self, text: str, code: int) -> str | None:
        """Tells the others of a failure, gives them time to hear it, and returns how process 0 failed, if it did."""
        with contextlib.suppress(Exception):  # the coordinator may be gone
            self._client.key_value_set(f"{_FAILED}{self.index}", text)
            with contextlib.suppress(Exception):  # another process may have failed first
                failure = {"process": self.index, "text": text, "code": code}
                self._client.key_value_set(_FIRST_FAILURE, json.dumps(failure))
            time.sleep(_GRACE_S if self.first else _GRACE_S / 2)  # the coordinator goes last
            return dict(self._client.key_value_dir_get(_FAILED)).get(f"{_FAILED}0")
        return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _print_error(text: str) -> None:
    os.write(2, f"error: {text}\n".encode())


class Silent(Console):
    """The console of the processes that do not print."""

    def warn(self, text: str) -> None:
        """Leaves the warning to process 0, which has the same."""


class Votes:
    """Signals reach one process; all must stop at the same step. The votes of a step are counted on the devices."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._split = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
        self._max = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._none = self._array(0)

    def _array(self, number: int) -> jax.Array:
        shape = (self._mesh.size,)
        return jax.make_array_from_callback(shape, self._split, lambda index: np.full(shape, number, np.int32)[index])

    def cast(self, signal: signal.Signals | None) -> jax.Array:
        """Starts a count and returns its result, a scalar: the largest number of a signal, or 0. All must come."""
        return self._max(self._none if signal is None else self._array(signal))
