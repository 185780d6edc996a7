"""Hosts that `ray up` reaches by ssh: namespaces of this machine, with addresses, processes and folders of their own.

Needs root, `ip`, `sshd` and `rsync`. The first host is the one at which a person sits; all have its key, for it is one
person's. `/mnt` is the same folder on all of them, as NFS would make it.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

NETWORK = "10.77.0"
BIN = Path(sys.executable).parent
# Runs as the first process of a host. Its home, `/tmp` and `/mnt` are folders of the test; /root may hold Python.
_FIRST = """
set -e
mount --bind "$1/home" /home
mount --bind "$1/passwd" /etc/passwd
mount --bind "$1/hosts" /etc/hosts
mount --bind /dev/null /etc/resolv.conf
mount --bind "$2" /mnt
mount -t tmpfs -o size=512m tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mount --bind "$1/tmp" /tmp
mkdir -p /run/sshd
hostname "$3"
exec /usr/sbin/sshd -D -e -f /home/sshd_config
"""


@dataclass(frozen=True, slots=True)
class Host:
    """pid: of the first process, whose namespaces are the host."""

    name: str
    address: str
    pid: int

    def run(self, command: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
        """A line in a login shell at that host."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "--pid", "--mount", "--uts"]
        return subprocess.run(
            [*enter, "--wd=/home", "bash", "-lc", command],
            capture_output=True, text=True, timeout=seconds, check=False, env={**os.environ, "HOME": "/home"},
        )  # fmt: skip


def missing() -> str:
    """What this machine lacks to have hosts; empty where nothing."""
    if os.geteuid() != 0:
        return "only root makes namespaces"
    programs = [name for name in ("ip", "ssh", "rsync", "unshare", "nsenter") if not shutil.which(name)]
    programs += [] if Path("/usr/sbin/sshd").exists() else ["sshd"]
    return f"{', '.join(programs)} is missing: deploy/tools.sh --images" if programs else ""


@contextmanager
def hosts(folder: Path, shared: Path, names: Sequence[str]) -> Iterator[list[Host]]:
    """The hosts, on one network; gone with the block, and all that runs on them."""
    if reason := missing():
        pytest.skip(reason)
    key = folder / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    with ExitStack() as parts:
        addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, 1)}
        made = [parts.enter_context(_host(folder / name, shared, key, name, addresses)) for name in names]
        _connect(made)
        yield made


@contextmanager
def _host(folder: Path, shared: Path, key: Path, name: str, addresses: Mapping[str, str]) -> Iterator[Host]:
    _home(folder / "home", key, addresses[name])
    known = {"localhost": "127.0.0.1", **addresses}
    (folder / "hosts").write_text("".join(f"{address} {each}\n" for each, address in known.items()))
    (folder / "passwd").write_text("root:x:0:0::/home:/bin/bash\nsshd:x:101:65534::/run/sshd:/usr/sbin/nologin\n")
    (folder / "tmp").mkdir(mode=0o1777)
    command = ["unshare", "--net", "--pid", "--mount-proc", "--uts", "--fork", "--kill-child"]
    with (folder / "sshd.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "bash", "-c", _FIRST, name, folder, shared, name],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    try:
        yield Host(name, addresses[name], _child(process.pid))
    finally:
        process.kill()
        process.wait()


def _home(home: Path, key: Path, address: str) -> None:
    """What a person has there: a key that opens every host, and the project's Python in the path."""
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    shutil.copy(key, home / ".ssh/id_ed25519")
    shutil.copy(key, home / "host_key")
    shutil.copy(key.with_suffix(".pub"), home / ".ssh/authorized_keys")
    (home / "sshd_config").write_text(
        f"ListenAddress {address}\nHostKey /home/host_key\nStrictModes no\nUsePAM no\nPidFile none\n"
        "PermitRootLogin prohibit-password\nAuthorizedKeysFile /home/.ssh/authorized_keys\n"
    )
    for name in (".bashrc", ".profile"):
        (home / name).write_text(f'export PATH="{BIN}:$PATH"\n')


def _child(pid: int) -> int:
    """The first process in the namespaces of `unshare`."""
    for _ in range(200):
        if children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            return int(children[0])
        time.sleep(0.02)
    raise AssertionError("the namespaces were not made")


def _connect(made: Sequence[Host]) -> None:
    """A bridge at the first host, and a cable from each of the others to it."""

    def at(host: Host, *words: str) -> None:
        subprocess.run(["nsenter", f"--target={host.pid}", "--net", "ip", *words], check=True)

    first = made[0]
    at(first, "link", "add", "net0", "type", "bridge")
    for number, host in enumerate(made[1:], 1):
        cable = f"cable{number}"
        at(first, "link", "add", cable, "type", "veth", "peer", "name", "net0", "netns", str(host.pid))
        at(first, "link", "set", cable, "master", "net0", "up")
    for host in made:
        at(host, "address", "add", f"{host.address}/24", "dev", "net0")
        for device in ("lo", "net0"):
            at(host, "link", "set", device, "up")
        if host is not first:
            # Ray asks for its own address by way of one that is far away.
            at(host, "route", "add", "default", "via", first.address)
