"""The start and the end of an engine process: options, model, socket, signals, exit status."""

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import structlog
import zmq

from engine.adapters.files.directory import open_adapter
from engine.config import EngineConfig, LoRAConfig
from engine.errors import AdapterNotFound, EngineError, ModelRefused, PathNotAllowed
from engine.models.loading import load_model
from engine.parallel import (
    SINGLE,
    ParallelGroup,
    RankLost,
    device_of,
    is_rank,
    join_group,
    leave_group,
)
from engine.worker.engine import Engine
from engine.worker.leader import Leader, follow
from engine.worker.options import configs, parse
from engine.worker.worker import QUEUE_FRAMES, Wakeup, Worker, _log
from messages.wire import COMMANDS


def main(arguments: Sequence[str] | None = None) -> int:
    """Load the model, attach to the controller and serve; the exit status of the process.

    Started by `torchrun`, every rank does: rank 0 serves, and the others follow it.
    """
    _log_to_stderr()
    options = parse(arguments)
    try:
        config, lora_config = configs(options)
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
        return 2
    try:
        return _run(Setup(config, lora_config, group, parents), options)
    except RankLost as error:
        _log.error("the engine of several ranks can't go on", rank=group.rank, error=str(error))
        return 1


def _check_default_adapters(config: EngineConfig, lora_config: LoRAConfig) -> None:
    """Raise `PathNotAllowed` for a default adapter's path that will never be read.

    One that is not there may come; an engine that starts again goes on without it.
    """
    for modality, path in (lora_config.default_mm_loras or {}).items():
        try:
            allow_pickled = config.allow_pickled_weights
            with open_adapter(path, config.adapter_roots, allow_pickled=allow_pickled):
                continue
        except AdapterNotFound as error:
            _log.warning("a default adapter is not there", modality=modality, error=str(error))
        except PathNotAllowed as error:
            raise PathNotAllowed(f"default_mm_loras, {modality}={path}: {error}") from error


class Setup(NamedTuple):
    """What a rank starts with."""

    config: EngineConfig
    lora_config: LoRAConfig
    group: ParallelGroup
    parents: Sequence[int]


def _run(setup: Setup, options: Namespace) -> int:
    wakeup, group = Wakeup(), setup.group
    try:
        model = load_model(setup.config, setup.lora_config, group)
        engine = Engine(model, setup.config, setup.lora_config, options.engine_id, wakeup.wake)
    except (ModelRefused, EngineError, ValueError) as error:
        _log.error("the engine can't start", error=str(error))
        return 1
    if group.leads and model.media_tokens and model.without_images:
        _log.warning("the model is served for text alone", reason=model.without_images)
    if group.leads and model.without_head:
        _log.warning(
            "the model was saved without a classification head; requests have to name adapters "
            "that bring one"
        )
    group.wait_for_all()
    if group.leads:
        _serve(engine if group.is_single else Leader(engine, group), setup, options, wakeup)
    else:
        # Whoever ends all ranks tells all; rank 0 is the one to hear it, and says when.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        follow(engine, group)
    leave_group(group)
    return 0


def _serve(engine: Engine | Leader, setup: Setup, options: Namespace, wakeup: Wakeup) -> None:
    """Serve the controller until told to stop."""
    with zmq.Context() as context:
        worker = Worker(engine, _connect(context, options.connect), wakeup, setup.parents)
        _handle_signals(worker, wakeup, bool(setup.parents))
        model = str(setup.config.model_directory)
        _log.info("ready", engine_id=options.engine_id, model=model, ranks=setup.group.world_size)
        try:
            worker.run()
        finally:
            context.destroy(linger=0)
    engine.close()
    _log.info("ended", engine_id=options.engine_id)


def _open_parents(supervisor_pid: int | None) -> list[int]:
    """Descriptors of the supervisor, and of `torchrun` where it stands between; may be none."""
    pids = [] if supervisor_pid is None else [supervisor_pid]
    if is_rank():
        pids.append(os.getppid())
    return [os.pidfd_open(pid) for pid in pids]


def _connect(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> "zmq.Socket[bytes]":
    """The socket to the controller, which may come, go and come again.

    IMMEDIATE queues nothing for a controller that is not there, so that none is met by old beats;
    what must not be lost is kept by the link. The routing name is left to the controller's side: a
    name of our own could meet its own ghost after a reconnection.
    """
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.SNDHWM, QUEUE_FRAMES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_FRAMES)
    socket.setsockopt(zmq.MAXMSGSIZE, COMMANDS.bytes_max)
    socket.connect(endpoint)
    return socket


def _handle_signals(worker: Worker, wakeup: Wakeup, has_supervisor: bool) -> None:
    signal.set_wakeup_fd(wakeup.write_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda _signal, _frame: worker.stop())
    # Ctrl-C reaches the whole group; with a supervisor, it decides what that means for us.
    interrupt = signal.SIG_IGN if has_supervisor else lambda _signal, _frame: worker.stop()
    signal.signal(signal.SIGINT, interrupt)


def _log_to_stderr() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))


def end(status: int) -> None:
    """End the process; a rank without the seconds that its library takes to close connections.

    Of ranks that are gone it would wait for an answer.
    """
    if is_rank():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
