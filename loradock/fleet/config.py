"""`fleet.toml`: where etcd is, and the secrets by which the machines of a fleet know each other."""

import os
import ssl
import stat
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

FILE_BYTES_MAX: Final = 1 << 16
FILE_DEFAULT: Final = "fleet.toml"


class FleetError(Exception):
    """A fleet that can't be used: its file, or its catalogue."""


class ConfigError(FleetError, ValueError):
    """A `fleet.toml` that can't be read, or that other users can read."""


class FleetConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A fleet: URLs of the members of etcd, and the secret key that its fronts send to docks.

    `ca`, `certificate` and `certificate_key` are files, relative to the directory of `fleet.toml`;
    they are needed for members at `https`. `name` separates fleets that share an etcd.
    """

    members: Annotated[tuple[str, ...], Meta(min_length=1)]
    key: Annotated[str, Meta(min_length=16)]
    name: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._-]{1,64}\Z")] = "loradock"
    ca: str = ""
    certificate: str = ""
    certificate_key: str = ""

    def __repr__(self) -> str:
        return f"FleetConfig(name={self.name!r}, members={self.members!r})"


def read_config(file: str | Path) -> FleetConfig:
    """Return the fleet of a file, with absolute paths; raises `ConfigError`."""
    path = Path(file)
    try:
        with path.open("rb") as opened:
            mode, data = os.fstat(opened.fileno()).st_mode, opened.read(FILE_BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    # Groups are allowed: volumes of Kubernetes are readable by the pod's group.
    if stat.S_IMODE(mode) & 0o007:
        raise ConfigError(f"{path}: it has secrets; make it private with `chmod 600`")
    try:
        config = msgspec.toml.decode(data, type=FleetConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    _check(path, config)
    files = {
        field: str(path.resolve().parent / value) if (value := getattr(config, field)) else ""
        for field in ("ca", "certificate", "certificate_key")
    }
    return msgspec.structs.replace(config, **files)


def _check(path: Path, config: FleetConfig) -> None:
    for member in config.members:
        if not member.startswith(("http://", "https://")):
            raise ConfigError(f"{path}: a member must be a URL as https://m1:2379, got {member!r}")
        if member.startswith("https:") and not (
            config.ca and config.certificate and config.certificate_key
        ):
            raise ConfigError(f"{path}: {member} needs ca, certificate and certificate_key")


def tls_context(config: FleetConfig) -> ssl.SSLContext | bool:
    """Return the context with this fleet's certificates; False if no member uses TLS.

    Raises `ConfigError` for files that can't be used.
    """
    if not config.ca:
        return False
    try:
        context = ssl.create_default_context(cafile=config.ca)
        context.load_cert_chain(config.certificate, config.certificate_key)
    except OSError as error:
        raise ConfigError(
            f"the certificates {config.ca} and {config.certificate} can't be used: {error}"
        ) from error
    return context
