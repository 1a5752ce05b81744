"""Certificates and keys of a deployment, made by one command."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import Any

YEARS = 5
"""How long certificates are valid."""


def make_keys(server: Path, nodes: dict[str, Path], hosts: list[str]) -> None:
    """Make a certificate authority, the server's certificate, and a key for every node.

    Args:
        server: The server's folder: ``ca.crt``, ``server.crt``, ``server.key``, and the nodes'
            public keys. The authority's own key isn't kept: nothing else can be signed with it.
        nodes: The folder of every node, by its name: ``ca.crt`` and its private ``node.key``.
        hosts: Names and addresses under which nodes reach the server.
    """
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    for folder in (server, *nodes.values()):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority, key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    root = _sign("lightning-pfl deployment", authority.public_key(), None, authority, [])
    own = _sign(hosts[0], key.public_key(), root, authority, hosts)
    root_pem = root.public_bytes(Encoding.PEM)
    (server / "ca.crt").write_bytes(root_pem)
    (server / "server.crt").write_bytes(own.public_bytes(Encoding.PEM))
    pem = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    _write_secret(server / "server.key", key.private_bytes(*pem))
    for name, folder in nodes.items():
        node = ec.generate_private_key(ec.SECP384R1())
        ssh = (Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        (folder / "ca.crt").write_bytes(root_pem)
        _write_secret(folder / "node.key", node.private_bytes(*ssh))
        public = node.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        (server / f"{name}.pub").write_bytes(public)


def _sign(name: str, key: Any, issuer: Any, issuer_key: Any, hosts: list[str]) -> Any:
    """Sign a certificate; without an issuer it is an authority's own."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    now = datetime.datetime.now(datetime.timezone.utc)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
    )
    if issuer is None:
        signs = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        builder = builder.add_extension(signs, critical=True).add_extension(
            x509.SubjectKeyIdentifier.from_public_key(key), critical=False
        )
    else:
        names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _general_name(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_secret(path: Path, data: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(data)
