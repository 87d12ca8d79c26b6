"""Makes files of certificates for servers with TLS."""

from __future__ import annotations

from pathlib import Path

import trustme

from quire.rpc.tls import TlsFiles


def write_certificate(ca: trustme.CA, folder: Path, name: str) -> TlsFiles:
    """Write a certificate for a DNS name, its key and its authority's certificate."""
    issued = ca.issue_cert(name)
    files = TlsFiles(folder / f"{name}.pem", folder / f"{name}.key", folder / f"{name}.ca.pem")
    files.certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    files.key.write_bytes(issued.private_key_pem.bytes())
    assert files.authority is not None
    ca.cert_pem.write_to_path(str(files.authority))
    return files
