"""What `loradock fleet init` writes: `fleet.toml`, certificates, and a systemd unit per etcd.

Each member of etcd has the same certificate, and each client another one; both are signed by an
authority whose key is not kept, so nobody can issue more.
"""

import datetime
import secrets
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from loradock.fleet.config import FILE_DEFAULT
from loradock.processes.key_files import write_new

PORT_DEFAULT: Final = 2379
ETCD: Final = "/usr/bin/etcd"

# No certificate expires: RFC 5280 has this date for it (4.1.2.5).
_VALID_FROM: Final = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_VALID_UNTIL: Final = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)

_TOML: Final = """\
# A fleet of LoRADock. Every machine of it needs this file, ca.pem, client.pem and client.key.
members = [{members}]
# Secret: fronts send it to docks.
key = "{key}"
name = "{name}"
ca = "ca.pem"
certificate = "client.pem"
certificate_key = "client.key"
"""

_UNIT: Final = """\
[Unit]
Description=etcd for LoRADock, member {name}
After=network-online.target
Wants=network-online.target

[Service]
Type=notify
User=etcd
ExecStart={command}
Restart=on-failure
StateDirectory=loradock-etcd

[Install]
WantedBy=multi-user.target
"""


class Member(NamedTuple):
    """A member of etcd; its peers reach it at the port after `port`."""

    host: str
    port: int

    @property
    def name(self) -> str:
        """The member's name in its cluster."""
        return f"{self.host}-{self.port}"


def parse_members(text: str) -> list[Member]:
    """Return the members of `HOST[:PORT],...`; raises `ValueError`."""
    members = []
    for one in text.split(","):
        host, _, port = one.strip().partition(":")
        if not host or (port and not port.isdecimal()):
            raise ValueError(f"--members must be HOST[:PORT],..., got {text!r}")
        members.append(Member(host, int(port or PORT_DEFAULT)))
    if len(members) % 2 == 0:
        raise ValueError(f"etcd needs an odd number of members, got {len(members)}")
    return members


def write_fleet(directory: Path, members: Sequence[Member], name: str) -> list[Path]:
    """Write all files of a new fleet; return them. Raises `FileExistsError` if one exists."""
    urls = ", ".join(f'"https://{one.host}:{one.port}"' for one in members)
    toml = _TOML.format(members=urls, key=secrets.token_urlsafe(32), name=name)
    files = {FILE_DEFAULT: toml.encode(), **_certificates([one.host for one in members])}
    place, token = Path("/etc/loradock"), secrets.token_hex(8)
    for member in members:
        state = Path("/var/lib/loradock-etcd")
        command = " \\\n    ".join(etcd_command(members, member, place, state, token))
        unit = _UNIT.format(name=member.name, command=command)
        files[f"loradock-etcd-{member.name}.service"] = unit.encode()
    directory.mkdir(parents=True, exist_ok=True)
    for file, data in files.items():
        is_secret = file.endswith((".toml", ".key"))
        write_new(directory / file, data, 0o600 if is_secret else 0o644)
    return [directory / file for file in files]


def etcd_command(
    members: Sequence[Member], own: Member, keys: Path, state: Path, token: str
) -> list[str]:
    """Return the command of a member: `keys` has its certificate, `state` gets its data."""
    cluster = ",".join(f"{one.name}=https://{one.host}:{one.port + 1}" for one in members)
    return [
        ETCD,
        f"--name={own.name}",
        f"--data-dir={state}",
        f"--listen-client-urls=https://{_bound(own)}:{own.port}",
        f"--advertise-client-urls=https://{own.host}:{own.port}",
        f"--listen-peer-urls=https://{_bound(own)}:{own.port + 1}",
        f"--initial-advertise-peer-urls=https://{own.host}:{own.port + 1}",
        f"--initial-cluster={cluster}",
        f"--initial-cluster-token={token}",
        "--client-cert-auth",
        f"--trusted-ca-file={keys}/ca.pem",
        f"--cert-file={keys}/etcd.pem",
        f"--key-file={keys}/etcd.key",
        "--peer-client-cert-auth",
        f"--peer-trusted-ca-file={keys}/ca.pem",
        f"--peer-cert-file={keys}/etcd.pem",
        f"--peer-key-file={keys}/etcd.key",
        "--auto-compaction-retention=1",
    ]


def _bound(member: Member) -> str:
    """Return the address to listen at: etcd binds to addresses, not to names."""
    return member.host if _is_address(member.host) else "0.0.0.0"  # noqa: S104 - needs certificates


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _certificates(hosts: Sequence[str]) -> dict[str, bytes]:
    """Return the files of an authority, of a certificate for etcd, and of one for clients."""
    authority = ec.generate_private_key(ec.SECP256R1())
    issuer = _name("LoRADock fleet")
    root = _builder(issuer, issuer, authority.public_key())
    root = root.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    usage = x509.KeyUsage(
        *(False,) * 5, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False
    )
    certificate = root.add_extension(usage, critical=True).sign(authority, hashes.SHA256())
    files = {"ca.pem": certificate.public_bytes(serialization.Encoding.PEM)}
    # The JSON gateway of etcd is a client of etcd with the certificate of the server.
    for file, names in (("etcd", (*hosts, "localhost", "127.0.0.1")), ("client", ())):
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        leaf = _builder(_name(file), issuer, key.public_key())
        if names:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
            found = [
                x509.IPAddress(ip_address(one)) if _is_address(one) else x509.DNSName(one)
                for one in dict.fromkeys(names)
            ]
            leaf = leaf.add_extension(x509.SubjectAlternativeName(found), critical=False)
        leaf = leaf.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        leaf = leaf.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),
            critical=False,
        )
        signed = leaf.sign(authority, hashes.SHA256())
        files[f"{file}.pem"] = signed.public_bytes(serialization.Encoding.PEM)
        files[f"{file}.key"] = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    return files


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_VALID_FROM)
        .not_valid_after(_VALID_UNTIL)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )
