"""The cluster of these tests: its processes import what tests define, and listen to this machine alone."""

import os
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_cluster")]


def own_process() -> int:
    return os.getpid()


def ports_open_to_the_network() -> set[int]:
    """Ports at which something here listens to other machines."""
    found = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, address, _, state = line.split()[:4]
            host, _, port = address.partition(":")
            # 0A: listening. 127.0.0.1 as it lies in memory, alone or as the end of an IPv6 address; ::1.
            if state == "0A" and not host.endswith(("0100007F", "00000000000000000000000001000000")):
                found.add(int(port, 16))
    return found


@pytest.mark.further
def test_tasks_run_in_other_processes_and_import_what_the_tests_define() -> None:
    assert ray.get(ray.remote(own_process).remote()) != os.getpid()


@pytest.mark.further
@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="only Linux tells who listens")
def test_nothing_of_the_cluster_listens_to_the_network() -> None:
    (node,) = [node for node in ray.nodes() if node["Alive"]]
    assert node["NodeManagerAddress"] == "127.0.0.1"
    gcs = ray.get_runtime_context().gcs_address
    ports = {int(gcs.rpartition(":")[2]), node["NodeManagerPort"], node["ObjectManagerPort"]}
    assert ports.isdisjoint(ports_open_to_the_network())
