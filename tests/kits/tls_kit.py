"""Certificates for tests, made by the `openssl` program."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from aioenv.process.tls import TlsFiles

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def make_authority(folder: Path, name: str, address: str = "") -> TlsFiles:
    """Make an authority, and a certificate for this machine, with this address, that it has signed."""
    key, authority, request = folder / f"{name}-ca.key", folder / f"{name}-ca.crt", folder / f"{name}.csr"
    files = TlsFiles(str(folder / f"{name}.crt"), str(folder / f"{name}.key"), str(authority))
    curve = "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"
    openssl(
        "req", "-x509", *curve, "-keyout", str(key), "-out", str(authority), "-days", "2", "-subj", f"/CN={name}-ca"
    )
    openssl("req", *curve, "-keyout", files.key, "-out", str(request), "-subj", f"/CN={name}")
    signed = "-CA", str(authority), "-CAkey", str(key), "-CAcreateserial", "-days", "2"
    # Ray's clients compare the address
    names = folder / f"{name}.ext"
    names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1" + f",IP:{address}" * bool(address) + "\n")
    openssl("x509", "-req", "-in", str(request), *signed, "-out", files.certificate, "-extfile", str(names))
    return files
