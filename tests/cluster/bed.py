"""Hosts to break: real ones as far as the kernel goes, on one machine.

    with Bed(tmp_path, ["head", "w1", "w2"]) as bed:
        bed.host("w1").run("hostname -i")                        # 10.77.0.12
        driver = bed.laptop.popen("suite run x.yaml --address …")  # killing the Popen kills the command
        bed.host("w1").kill()                                    # power off: nothing on it gets a last word, its peers no RST
        bed.host("w1").start()                                   # boots again: same name, address and disk, empty /tmp
        bed.host("w2").cut(); bed.host("w2").mend()              # the cable pulled from the switch and put back

Each host is a set of Linux namespaces (network, process, mount, host name, IPC) with an address on the bed's own switch, /tmp, /dev/shm,
home directory, and an sshd for the bed's key. They see the machine's files, so also the checkout and its virtual environment;
`bed.shared` is one folder for all of them and for the test, `bed.local` one path that is another disk on each host.
There is always a `laptop` to work from. The hosts reach one another and nothing else.

The namespaces have no names and nothing outside them is changed: when the process that made the bed ends, however it ends, they are gone.
Root is needed: `why_not()` says what is missing. The programs are Debian's openssh-server, rsync, iproute2 and util-linux.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from tests.cluster.processes import PATIENCE, HostError, children, command_line, is_in, must_run

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAMS = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "hostname": "hostname",
    "ip": "iproute2",
    "/usr/sbin/sshd": "openssh-server",
    "ssh": "openssh-client",
    "rsync": "rsync",
}
SHM_BYTES = 256 * 2**20
NETWORK = "10.77.0."
FIRST = 10
"""Every bed has its own switch, so that all may use the same addresses."""
ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "180",  # many Rays share few cores
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "180",
    "TERM": "dumb",
}
"""What a command on a host starts from, by nsenter or by SSH; nothing of the test's own environment."""
PROBE = """
hostname probe
mount -t tmpfs tmpfs /mnt
mount -t devpts -o newinstance devpts /mnt
ip link add type bridge
ip link add type veth
echo 1 > /proc/sys/net/ipv4/ip_forward
test -e /proc/$$/task/$$/children
"""
"""What a bed does, tried in namespaces that end with it."""
SSHD = """\
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {bed}/etc/key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
PidFile none
MaxSessions 50
MaxStartups 50
PrintMotd no
"""


def why_not() -> str | None:
    """Why there can be no bed on this machine, with the remedy; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root: run it as root, or in a container with --privileged"
    missing = sorted(
        {package for program, package in PROGRAMS.items() if shutil.which(program) is None}
    )
    if missing:
        return f"programs are missing: apt-get install {' '.join(missing)}"
    tried = subprocess.run([*_unshare(), "sh", "-e", "-c", PROBE], capture_output=True, text=True)
    if tried.returncode:
        return f"this kernel or container does not let namespaces be made and furnished: {tried.stderr.strip() or tried.returncode}"
    return None


class Bed:
    """Named hosts and a laptop on one switch; a context manager.

    Args:
        folder: Where the hosts' disks are kept; outlives the bed.
        names: Host names; "laptop" is added.
        shm_bytes: Size of each host's /dev/shm.

    Attributes:
        shared: A folder at the same path on every host and in the test.
        local: A path that is another folder on each host, kept while the host is off; from the test, see `Host.local`.
        key: The private key that logs in as root on each host.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str] = ("head", "w1", "w2"),
        *,
        shm_bytes: int = SHM_BYTES,
    ) -> None:
        self.folder = folder.resolve()
        self.shm_bytes = shm_bytes
        self.shared, self.local, self.etc = (
            self.folder / name for name in ("shared", "local", "etc")
        )
        self.key = self.etc / "key"
        self.hosts = {
            name: Host(self, name, FIRST + i) for i, name in enumerate([*names, "laptop"])
        }
        self._switch: subprocess.Popen[str] | None = None

    def __enter__(self) -> Bed:
        for path in (self.shared, self.local, self.etc):
            path.mkdir(parents=True, exist_ok=True)
        self._write_etc()
        try:
            self._plug_in()
            for host in self.hosts.values():
                host.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def host(self, name: str) -> Host:
        return self.hosts[name]

    @property
    def laptop(self) -> Host:
        return self.hosts["laptop"]

    @property
    def switch_pid(self) -> int:
        assert self._switch is not None, "the bed is not open"
        return self._switch.pid

    def close(self) -> None:
        """Switch everything off; may be called again."""
        for host in self.hosts.values():
            host.kill()
        if self._switch is not None:
            self._switch.kill()
            self._switch.communicate()
            self._switch = None

    def _plug_in(self) -> None:
        """A network namespace with a bridge; what leaves the bed is refused at once instead of being waited for."""
        commands = [
            "ip link add bed type bridge",
            f"ip address add {NETWORK}1/24 dev bed",
            "ip link set bed up",
            "echo 1 > /proc/sys/net/ipv4/ip_forward",
            "ip route add unreachable default",
            "echo ready",
            "read _",
        ]
        script = "set -e; " + "; ".join(commands)
        self._switch = subprocess.Popen(
            ["unshare", "--net", "bash", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        _wait_ready(self._switch, "the switch")

    def _write_etc(self) -> None:
        """Files that all hosts have in common."""
        self.key.unlink(missing_ok=True)
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "bed", "-f", str(self.key)],
            check=True,
        )
        names = "".join(f"{host.address} {host.name}\n" for host in self.hosts.values())
        (self.etc / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{names}")
        (self.etc / "shadow").write_text(
            "root:*:19000:0:99999:7:::\n"
        )  # no password, and not locked: sshd refuses locked accounts
        (self.etc / "resolv.conf").write_text(
            "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n"
        )


class Host:
    """One machine of a bed. Made by it.

    Attributes:
        address: On the bed's network; its interface is eth0.
        local: Its folder behind `bed.local`, as the test sees it.
        home: Its /root, as the test sees it.
    """

    def __init__(self, bed: Bed, name: str, number: int) -> None:
        self.bed = bed
        self.name = name
        self.number = number
        self.address = f"{NETWORK}{number}"
        self.folder = bed.folder / "hosts" / name
        self.home = self.folder / "root"
        self.local = self.folder / "local"
        self._init: subprocess.Popen[str] | None = (
            None  # `unshare`, the parent of the host's process 1
        )
        self._boots = 0

    @property
    def is_on(self) -> bool:
        return self._init is not None

    @property
    def pid(self) -> int:
        """The host's process 1, by its number outside.

        Raises:
            HostError: The host is off.
        """
        first = children(self._init.pid) if self._init is not None else []
        if not first:
            raise HostError(f"{self.name} is off")
        return first[0]

    def start(self) -> None:
        """Boot: namespaces, disk, network, sshd. Returns when SSH answers."""
        assert self._init is None, f"{self.name} is on"
        self._make_disk()
        kept = sorted(
            {
                str(path)
                for path in (self.bed.folder, REPOSITORY, Path(sys.prefix), Path(sys.base_prefix))
            }
        )
        script = [
            "bash",
            str(Path(__file__).with_name("host.sh")),
            self.name,
            str(self.folder),
            str(self.bed.folder),
        ]
        self._init = subprocess.Popen(
            [*_unshare(), *script, str(self.bed.shm_bytes), *kept],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        _wait_ready(self._init, self.name)
        self._plug_in()

    def kill(self) -> None:
        """Power off, at once; returns when all its processes are gone. Nothing if it is off."""
        if self._init is None:
            return
        for pid in children(self._init.pid):
            os.kill(pid, signal.SIGKILL)
        self._init.communicate()  # unshare ends after process 1, and that after all others
        self._init = None

    def cut(self) -> None:
        """Pull the cable from the switch: the host goes on, alone."""
        self._switch("ip", "link", "set", self._port, "down")

    def mend(self) -> None:
        """Put the cable back."""
        self._switch("ip", "link", "set", self._port, "up")
        self._announce()

    def disk(self, path: Path | str, size_bytes: int) -> None:
        """Mount an empty disk of this size at a folder of this host, for example below `bed.local`. `umount` by `run`."""
        self.run(["mkdir", "-p", str(path)])
        self.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path)])

    def run(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = 60.0,
        check: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command (a text: by bash) as root in the checkout's folder.

        Args:
            check: Whether another exit code than 0 raises.
            env: Beside ENVIRONMENT.

        Raises:
            HostError: It failed, or took too long (it is killed then).
        """
        with (
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as err,
        ):  # pipes would wait for what it leaves running
            process = self._spawn(command, env, out, err)
            try:
                code = process.wait(timeout_s * PATIENCE)
                ended = f"exit {code}"
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = 1
                check = True
                ended = f"no end after {timeout_s:g} s"
            texts = [file.read() for file in (out, err) if not file.seek(0)]
        if check and code:
            raise HostError(f"{self.name}: {command}: {ended}\n{texts[0]}\n{texts[1]}")
        return subprocess.CompletedProcess(command, code, *texts)

    def popen(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command; `kill()` of what is returned kills it; for other signals see `pids`.

        Args:
            log: File for its output instead of the pipes `stdout` and `stderr`.
        """
        if log is None:
            return self._spawn(command, env, subprocess.PIPE, subprocess.PIPE)
        with log.open("a") as file:
            return self._spawn(command, env, file, subprocess.STDOUT)

    def pids(self, words: str = "") -> list[int]:
        """Processes of this host whose command line contains `words`, by their numbers outside: for os.kill."""
        world = os.readlink(f"/proc/{self.pid}/ns/pid")
        return sorted(
            pid
            for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
            if is_in(pid, world) and words in command_line(pid)
        )

    def _spawn(
        self,
        command: str | Sequence[str],
        env: Mapping[str, str] | None,
        out: IO[str] | int,
        err: IO[str] | int,
    ) -> subprocess.Popen[str]:
        words = ["bash", "-c", command] if isinstance(command, str) else list(command)
        enter = [
            "nsenter",
            "--target",
            str(self.pid),
            "--mount",
            "--uts",
            "--ipc",
            "--net",
            "--pid",
        ]
        return subprocess.Popen(
            [*enter, "setpriv", "--pdeathsig", "KILL", "env", "-C", str(REPOSITORY), *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            text=True,
            env=ENVIRONMENT | dict(env or {}),
            start_new_session=True,
        )

    @property
    def _port(self) -> str:
        return f"port{self.number}-{self._boots}"

    @property
    def _mac(self) -> str:
        """The same at each boot, as a network card has it."""
        return f"02:77:00:00:00:{self.number:02x}"

    def _make_disk(self) -> None:
        """Its folders and SSH set-up, at the first boot; what is there stays."""
        for path in (self.home / ".ssh", self.local, self.folder / "tmp"):
            path.mkdir(parents=True, exist_ok=True)
        if (self.folder / "host_key").exists():
            return
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / "host_key")],
            check=True,
        )
        (self.folder / "sshd_config").write_text(
            SSHD.format(folder=self.folder, bed=self.bed.folder)
        )
        shutil.copy(self.bed.key, self.home / ".ssh" / "id_ed25519")
        (self.home / ".ssh" / "config").write_text(
            "Host *\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )
        exports = "".join(
            f"export {key}={shlex.quote(value)}\n"
            for key, value in ENVIRONMENT.items()
            if key not in ("HOME", "USER", "TERM")
        )
        (self.home / ".bashrc").write_text(exports)
        (self.home / ".bash_profile").write_text(". ~/.bashrc\n")

    def _plug_in(self) -> None:
        self._boots += (
            1  # the port of the last boot is removed by the kernel some time after the host
        )
        peer = ["peer", "name", self._port, "netns", str(self.bed.switch_pid)]
        self._net("ip", "link", "add", "eth0", "address", self._mac, "type", "veth", *peer)
        self._switch("ip", "link", "set", self._port, "master", "bed", "up")
        for arguments in (
            f"address add {self.address}/24 dev eth0",
            "link set lo up",
            "link set eth0 up",
            f"route add default via {NETWORK}1",
        ):
            self._net("ip", *arguments.split())
        self._announce()

    def _announce(self) -> None:
        """Tell the others that it is there, as ARP announcements do: who has looked for it in vain refuses for a while otherwise."""
        for other in self.bed.hosts.values():
            if other is not self and other.is_on:
                other._net(
                    "ip",
                    "neighbour",
                    "replace",
                    self.address,
                    "lladdr",
                    self._mac,
                    "dev",
                    "eth0",
                    "nud",
                    "reachable",
                )

    def _net(self, *command: str) -> None:
        must_run("nsenter", "--target", str(self.pid), "--net", *command)

    def _switch(self, *command: str) -> None:
        must_run("nsenter", "--target", str(self.bed.switch_pid), "--net", *command)


def _unshare() -> list[str]:
    return [
        "unshare",
        "--mount",
        "--uts",
        "--ipc",
        "--net",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]


def _wait_ready(process: subprocess.Popen[str], who: str) -> None:
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        process.kill()
        _, err = process.communicate()
        raise HostError(f"{who} did not start: {err}")
