"""The start and the end of an engine process: configuration, model, socket, signals, exit status.

It runs as one process, or as one rank of several that `torchrun` starts. Its argument is an
`EngineProcess` as JSON: `loradock serve` makes it, or `loradock engine run` on another machine.
"""

import gc
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import uuid4

import msgspec
import structlog
import zmq

from loradock.engine.adapters.directory import open_adapter
from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.errors import (
    AdapterNotFound,
    Conflict,
    EngineError,
    ModelRefused,
    PathNotAllowed,
)
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.loading import load_model
from loradock.engine.models.pooling_model import PoolingModel
from loradock.engine.parallel import (
    SINGLE,
    ParallelGroup,
    RankLost,
    device_of,
    is_rank,
    join_group,
    leave_group,
)
from loradock.engine.worker.engine import Engine
from loradock.engine.worker.leader import Leader, follow
from loradock.engine.worker.worker import QUEUE_FRAMES, Wakeup, Worker
from loradock.messages.engine_options import EngineProcess
from loradock.messages.traces import configured_tracer
from loradock.messages.wire import COMMANDS
from loradock.processes import process_log
from loradock.processes.key_files import KeyPair, read_key_pair, read_public_key
from loradock.processes.progress import START_BOUND_S, Progress, loading_step
from loradock.processes.subprocesses import EXIT_CONFIG

if TYPE_CHECKING:
    from loradock.engine.worker.spans import InferenceSpans

_ENGINE_ID_CHARACTERS: Final = 32

_log = structlog.get_logger()


def main() -> int:
    """Run the process with the arguments in `sys.argv`; return its exit status."""
    try:
        process = msgspec.json.decode(sys.argv[1], type=EngineProcess)
    except (IndexError, msgspec.MsgspecError) as error:
        process_log.configure(name="engine")
        _log.error("wrong configuration", error=str(error))
        return EXIT_CONFIG
    return run(process)


def run(options: EngineProcess) -> int:
    """Load the model, attach to the controller and serve; return the exit status.

    Every rank that `torchrun` starts runs this: rank 0 serves, and the others follow it.
    """
    process_log.configure(options.start.log_format, "engine", options.start.log_level)
    try:
        config, lora_config = configs(options)
        keys = read_key_pair(options.start.key), read_public_key(options.start.server_key)
        spans = _configured_spans()
        _check_default_adapters(config, lora_config)
        parents = _open_parents(options.parent_pid)
        group = SINGLE
        if is_rank():
            group = join_group(config.torch_device.type)
            config = replace(config, device=device_of(config.torch_device))
    except ProcessLookupError:
        _log.info("the supervisor is gone")
        return 0
    except (ValueError, RuntimeError, PathNotAllowed) as error:
        _log.error("wrong configuration", error=str(error))
        Progress(options.progress).end(str(error))
        return EXIT_CONFIG
    try:
        return _run(RankSetup(config, lora_config, group, parents, *keys, spans), options)
    except RankLost as error:
        _log.error("the ranks of the engine can't continue", rank=group.rank, error=str(error))
        return 1


def new_engine_id(launch_id: str) -> str:
    """Return a unique id of this start; its beginning is the supervisor's run."""
    return (launch_id + uuid4().hex)[:_ENGINE_ID_CHARACTERS]


def configs(options: EngineProcess) -> tuple[EngineConfig, LoRAConfig]:
    """Return the configurations of the engine and of LoRA; raises `ValueError`."""
    start = options.start
    if not start.connect.startswith(("ipc://", "tcp://")):
        raise ValueError(f"--connect must be an ipc:// or tcp:// address, got {start.connect!r}")
    config = EngineConfig(
        model_directory=Path(start.model),
        adapter_roots=tuple(map(Path, start.adapter_roots)),
        device_bytes_max=start.device_bytes_max,
        pinned_bytes_max=start.pinned_bytes_max,
        **vars(options.engine),
    )
    return config, LoRAConfig(max_loras=start.max_loras, **vars(options.lora))


def _check_default_adapters(config: EngineConfig, lora_config: LoRAConfig) -> None:
    """Raise `PathNotAllowed` for a default adapter's path that will never be read.

    One that is missing, or is being written, is only logged, because it may be there later.
    """
    for modality, path in (lora_config.default_mm_loras or {}).items():
        try:
            allow_pickled = config.allow_pickled_weights
            with open_adapter(path, config.adapter_roots, allow_pickled=allow_pickled):
                continue
        except (AdapterNotFound, Conflict) as error:
            _log.warning("a default adapter is not there yet", modality=modality, error=str(error))
        except PathNotAllowed as error:
            raise PathNotAllowed(f"default_mm_loras, {modality}={path}: {error.message}") from error


def _configured_spans() -> "InferenceSpans | None":
    tracer = configured_tracer("engine")
    if tracer is None:
        return None
    from loradock.engine.worker.spans import InferenceSpans  # noqa: PLC0415 - its library is an extra

    return InferenceSpans(tracer)


class RankSetup(NamedTuple):
    """The configuration of a rank.

    `parents`: pidfds of the processes that started it. `key`: its own keys; `server_key`: the
    controller's public key. `spans`: None while tracing is off.
    """

    config: EngineConfig
    lora_config: LoRAConfig
    group: ParallelGroup
    parents: Sequence[int]
    key: KeyPair
    server_key: str
    spans: "InferenceSpans | None"


def _run(setup: RankSetup, options: EngineProcess) -> int:
    wakeup, group = Wakeup(), setup.group
    progress = Progress(options.progress)
    try:
        model = _load(setup, progress)
        engine_id = new_engine_id(options.launch_id)
        engine = Engine(model, setup.config, setup.lora_config, engine_id, wakeup.wake)
    except (ModelRefused, EngineError, ValueError) as error:
        _log.error("the engine can't start", error=str(error))
        progress.end(str(error))
        # Another attempt finds the same model, but perhaps more memory.
        is_final = isinstance(error, ModelRefused | ValueError)
        return EXIT_CONFIG if is_final else 1
    if group.is_leader and model.media_tokens and model.no_images_reason:
        _log.warning("the model is served for text alone", reason=model.no_images_reason)
    if group.is_leader and not setup.config.adapter_roots:
        _log.warning("no adapter can be loaded: start with --adapter-root DIRECTORY")
    if group.is_leader and model.without_head:
        _log.warning(
            "the model was saved without a classification head; requests have to name adapters "
            "that contain one"
        )
    # What a start makes lives as long as the process: garbage collection skips it. A full one would
    # hold the interpreter's lock for some tenths of a second.
    gc.collect()
    gc.freeze()
    group.wait_for_all()
    if group.is_leader:
        served = engine if group.is_trivial else Leader(engine, group)
        _serve(served, setup, options, wakeup, progress)
    else:
        # A signal to the group reaches every rank; rank 0 handles it and ends the others.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        follow(engine, group)
    leave_group(group)
    return 0


def _load(setup: RankSetup, progress: Progress) -> CausalModel | PoolingModel:
    """Load the model, and log the progress of each rank; that of the leader is on its page too."""
    log = _log.bind(rank=setup.group.rank) if is_rank() else _log
    log.info("loading the model", model=str(setup.config.model_directory))

    def on_loaded(loaded: int, tensors: int) -> None:
        log.info("reading weights", loaded=loaded, tensors=tensors)
        if setup.group.is_leader:
            progress.enter(loading_step(loaded, tensors), START_BOUND_S)

    return load_model(setup.config, setup.lora_config, setup.group, on_loaded)


def _serve(
    engine: Engine | Leader,
    setup: RankSetup,
    options: EngineProcess,
    wakeup: Wakeup,
    progress: Progress,
) -> None:
    """Serve the controller until a signal or the end of a parent."""
    with zmq.Context() as context:
        socket = connect(context, options.start.connect, setup.key, setup.server_key)
        step_bound_s = options.step_timeout_ms / 1000
        worker = Worker(engine, socket, wakeup, setup.parents, progress, step_bound_s, setup.spans)
        _handle_signals(worker, wakeup, bool(setup.parents))
        model = str(setup.config.model_directory)
        _log.info("ready", engine_id=engine.engine_id, model=model, ranks=setup.group.world_size)
        try:
            worker.run()
        finally:
            context.destroy(linger=0)
    engine.close()
    _log.info("ended", engine_id=engine.engine_id)


def _open_parents(supervisor_pid: int | None) -> list[int]:
    """Open pidfds of the supervisor, if any, and of `torchrun`, if it started this rank."""
    pids = [] if supervisor_pid is None else [supervisor_pid]
    if is_rank():
        pids.append(os.getppid())
    return [os.pidfd_open(pid) for pid in pids]


def connect(
    context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, key: KeyPair, server_key: str
) -> "zmq.Socket[bytes]":
    """Return the socket to the controller, which may start later and restart.

    Both sides prove that they have their secret keys, so neither talks to another process.

    With IMMEDIATE, nothing is queued while no controller is connected, so a new one receives no old
    beats; `ControllerLink` keeps the reports that must not be lost. The routing id is chosen by
    the controller's socket: a fixed one could be refused after a reconnection, while the old
    connection is still known.
    """
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.SNDHWM, QUEUE_FRAMES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_FRAMES)
    socket.setsockopt(zmq.MAXMSGSIZE, COMMANDS.bytes_max)
    socket.curve_publickey, socket.curve_secretkey = key.public.encode(), key.secret.encode()
    socket.curve_serverkey = server_key.encode()
    socket.connect(endpoint)
    return socket


def _handle_signals(worker: Worker, wakeup: Wakeup, has_supervisor: bool) -> None:
    signal.set_wakeup_fd(wakeup.write_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda _signal, _frame: worker.stop())
    # Ctrl-C reaches the whole process group; a supervisor decides whether the engine ends.
    interrupt = signal.SIG_IGN if has_supervisor else lambda _signal, _frame: worker.stop()
    signal.signal(signal.SIGINT, interrupt)


def end(status: int) -> None:
    """End the process; a rank skips the interpreter's cleanup.

    In it the distributed library would wait several seconds for ranks that have ended.
    """
    if is_rank():
        process_log.flush()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
