"""Makes certificates: a CA of the test, and what it signs."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from triptych_kit.security.tls import CertificateFiles

_DAY = timedelta(days=1)


class CertificateAuthority:
    """A CA whose files are in `folder`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        builder = _builder(self._name, self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self._certificate = builder.sign(self._key, hashes.SHA256())
        self.file = str(folder / f"{name}.pem")
        Path(self.file).write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self, name: str, *, uri: str | None = None, is_expired: bool = False, file: str | None = None
    ) -> CertificateFiles:
        """A certificate for servers on loopback and for clients, with `name` as its common name.

        file: the name of its files, if it is not `name`; those of an earlier certificate are replaced.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [
            x509.DNSName("localhost"),
            *(x509.IPAddress(ipaddress.ip_address(host)) for host in ("127.0.0.1", "::1")),
        ]
        if uri is not None:
            names.append(x509.UniformResourceIdentifier(uri))
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _builder(_named(name), self._name, key, is_expired=is_expired)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        stem = self._folder / (file or name)
        files = CertificateFiles(f"{stem}.pem", f"{stem}.key", self.file)
        encoding = serialization.Encoding.PEM
        for path, content in (
            (files.certificate, certificate.public_bytes(encoding)),
            (
                files.key,
                key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
            ),
        ):
            # As those who renew certificates do, so that no reader sees a part.
            unfinished = Path(f"{path}.new")
            unfinished.write_bytes(content)
            unfinished.replace(path)
        return files


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, *, is_expired: bool = False
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 3 * _DAY)
        .not_valid_after(now - _DAY if is_expired else now + 3 * _DAY)
    )
