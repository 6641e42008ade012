"""The hosts are apart as real ones are, and nothing of them outlives the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.bed import ENVIRONMENT, REPOSITORY, Bed
from tests.cluster.processes import HostError, command_line, wait_until

ECHO = """
import socket
server = socket.create_server(("0.0.0.0", 5000))
connection, _ = server.accept()
while data := connection.recv(100):
    connection.sendall(data)
"""
CALL = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000))
for line in range(2):
    time.sleep(line * 2)
    connection.sendall(b"hello")
    print(connection.recv(100).decode(), flush=True)
"""


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    with Bed(tmp_path_factory.mktemp("bed"), ["a", "b"]) as made:
        yield made


def test_hosts_have_their_own_name_address_files_and_processes(bed: Bed) -> None:
    a = bed.host("a")
    b = bed.host("b")
    assert a.run("hostname; hostname -i").stdout.split() == ["a", a.address]
    assert a.address != b.address
    for folder in ("/tmp", "/dev/shm", "/root", str(bed.local)):
        a.run(f"touch {folder}/of-a")
        assert a.run(f"ls {folder}/of-a").stdout
        assert b.run(f"ls {folder}/of-a", check=False).returncode
        assert not Path(folder, "of-a").exists()
    a.run(f"touch {bed.shared}/of-all")
    assert b.run(f"ls {bed.shared}/of-all").stdout
    assert (bed.shared / "of-all").exists()
    sleeper = a.popen("sleep 4321")
    wait_until(
        "the process is there", lambda: "sleep 4321" in map(command_line, a.pids("sleep"))
    )  # not what is about to become it
    assert not b.pids("sleep 4321")
    sleeper.kill()
    wait_until("the process is killed with its Popen", lambda: not a.pids("sleep 4321"))


def test_ssh_goes_from_host_to_host_and_nowhere_else(bed: Bed) -> None:
    assert bed.laptop.run("ssh a ssh b hostname").stdout.strip() == "b"
    assert bed.laptop.run(
        "ssh -o IdentitiesOnly=yes -o IdentityFile=/dev/null -F /dev/null -o StrictHostKeyChecking=no a true",
        check=False,
    ).returncode
    began = time.monotonic()
    with pytest.raises(HostError, match=r"Network is unreachable|No route to host"):
        bed.laptop.run(
            [
                "python",
                "-c",
                "import socket; socket.create_connection(('192.0.2.1', 80), timeout=20)",
            ]
        )
    assert time.monotonic() - began < 15, "refused at once instead of waited for"


def test_a_host_that_loses_its_power_comes_back_with_its_disk_and_nothing_else(bed: Bed) -> None:
    b = bed.host("b")
    b.run(f"sleep 1234 & touch {bed.local}/kept /tmp/lost")
    inside = b.pids()
    b.kill()
    assert not [pid for pid in inside if "sleep 1234" in command_line(pid)]
    with pytest.raises(HostError, match="b is off"):
        b.run("true")
    assert bed.laptop.run("ssh -o ConnectTimeout=2 b true", check=False).returncode
    b.start()
    assert bed.laptop.run("ssh b hostname").stdout.strip() == "b"
    assert b.run(f"ls {bed.local} /tmp").stdout.split().count("kept") == 1
    assert "lost" not in b.run("ls /tmp").stdout
    assert (b.local / "kept").exists()


def test_a_connection_outlives_a_short_cut_of_the_cable(bed: Bed) -> None:
    a = bed.host("a")
    b = bed.host("b")
    server = a.popen(["python", "-c", ECHO])
    wait_until("the server listens", lambda: a.run("ss -Htln sport = 5000").stdout)
    caller = b.popen(["python", "-c", CALL, a.address])
    assert caller.stdout is not None
    assert caller.stdout.readline() == "hello\n"
    a.cut()
    assert bed.laptop.run("ssh -o ConnectTimeout=1 a true", check=False).returncode, (
        "nobody reaches it"
    )
    assert caller.poll() is None
    a.mend()
    assert caller.stdout.readline() == "hello\n"
    caller.communicate(timeout=60)
    server.communicate(timeout=60)


def test_a_disk_has_its_size(bed: Bed) -> None:
    a = bed.host("a")
    a.disk(bed.local / "small", 2**20)
    a.run(f"head -c 900000 /dev/zero > {bed.local}/small/x")
    with pytest.raises(HostError, match="No space left on device"):
        a.run(f"head -c 900000 /dev/zero > {bed.local}/small/y")


def test_nothing_outlives_the_process_that_made_the_bed(tmp_path: Path) -> None:
    script = f"""
import sys, time
sys.path.insert(0, {str(REPOSITORY)!r})
from pathlib import Path
from tests.cluster.bed import Bed
with Bed(Path({str(tmp_path)!r}), ["a"]) as bed:
    bed.host("a").popen("sleep 987654")
    print(*bed.host("a").pids(), *bed.laptop.pids(), bed.switch_pid, flush=True)
    time.sleep(600)
"""
    maker = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert maker.stdout is not None
    pids = [int(pid) for pid in maker.stdout.readline().split()]
    assert len(pids) >= 5, "init and sshd of two hosts, and the switch"
    os.kill(maker.pid, signal.SIGKILL)
    maker.communicate()
    wait_until(
        "all processes are gone", lambda: not any(command_line(pid) for pid in pids), timeout_s=20
    )
    assert not [
        line
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if str(tmp_path) in line
    ]
