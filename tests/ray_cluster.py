"""A real Ray cluster on this machine, for tests: see the fixture ``ray_cluster`` of conftest.py."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

#: Where the tests lie, so that what they define can be imported by name in Ray's processes.
TESTS = Path(__file__).resolve().parent

# Ray reads these when it is imported, which tests do as they are collected. A token of this run's own: else
# Ray writes one into the user's home.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", uuid.uuid4().hex)


@contextlib.contextmanager
def cluster(cpus: int = 8) -> Iterator[None]:
    """Start Ray with ``cpus`` logical processors, and stop it with all of its processes.

    It listens on 127.0.0.1 alone, behind a token of its own, and keeps everything in one short folder (the
    paths of its sockets may have 107 bytes) that goes with it. The driver's environment is that of the
    workers: tests' modules can be imported there.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rr", dir="/tmp"))
        stack.enter_context(
            mock.patch.dict(
                os.environ,
                RAY_USAGE_STATS_ENABLED="0",
                RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
                RAY_DATA_DISABLE_PROGRESS_BARS="1",
                # Else 15: beside other test processes, a worker would wait many seconds for its imports.
                RAY_worker_niceness="0",
                # Else Ray kills its workers while other tests take the machine's memory or disk.
                RAY_memory_monitor_refresh_ms="0",
                RAY_local_fs_capacity_threshold="1",
                OMP_NUM_THREADS="1",
                PYTHONPATH=os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))),
            )
        )
        import ray
        from ray._private import node, services

        # ray.init() replaces 127.0.0.1 by the machine's address in the network, and would listen there.
        stack.enter_context(mock.patch.object(services, "resolve_ip_for_localhost", lambda address: address))
        # Processes that no test needs: the autoscaler, the reader of workers' logs, the dashboard.
        for start in ("start_monitor", "start_log_monitor", "start_api_server"):
            stack.enter_context(mock.patch.object(node.Node, start))
        with warnings.catch_warnings():
            # Ray 2.54 leaves the files that it opens for its processes to the garbage collector.
            warnings.simplefilter("ignore", ResourceWarning)
            ray.init(
                num_cpus=cpus,
                resources={"seat": 1},
                include_dashboard=False,
                object_store_memory=256 * 2**20,
                log_to_driver=False,
                logging_level="ERROR",
                _node_ip_address="127.0.0.1",
                _temp_dir=folder,
            )
            gc.collect()
        stack.callback(_stop)
        yield


@contextlib.contextmanager
def second_node() -> Iterator[Any]:
    """Add a node to the cluster, with one more ``seat``; it may be gone at the end.

    It is another raylet of this machine: all nodes have one host name, and one disk.
    """
    from ray._private import worker
    from ray.cluster_utils import Cluster

    head = worker._global_node
    assert head is not None
    nodes = Cluster()
    nodes.head_node, nodes.redis_address = head, head.redis_address
    node = nodes.add_node(
        num_cpus=2,
        resources={"seat": 1},
        object_store_memory=80 * 2**20,
        node_ip_address="127.0.0.1",
        temp_dir=head.get_temp_dir_path(),
    )
    try:
        yield node
    finally:
        stop_node(node)


def stop_node(node: Any) -> None:
    """End a node and all workers on it, and wait until the cluster knows; it may have been ended before.

    It is told to end: the cluster takes a quarter of a minute to miss one that was killed.
    """
    import ray

    node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)
    while any(other["NodeID"] == node.node_id and other["Alive"] for other in ray.nodes()):
        time.sleep(0.01)


def _stop() -> None:
    """Stop Ray, and wait for what it started: it kills its processes and waits for none."""
    import ray
    from ray._private import worker

    node = worker._global_node
    assert node is not None
    started = [info.process for infos in node.all_processes.values() for info in infos]
    ray.shutdown()
    for process in started:
        process.wait(timeout=30)
