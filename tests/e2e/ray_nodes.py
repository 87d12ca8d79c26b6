"""The process that runs the nodes of a Ray cluster.

The first node has room for no worker, each other one for three. Ray starts its processes with Python code
that runs between fork and exec. In a process with other threads, such as those of gRPC in the tests, that
code can wait for a lock whose owner the fork has not copied.

The process writes a line of JSON with the address of the cluster and the process ids of the other nodes'
raylets. Then it ends the node of each raylet whose process id it reads, and answers with a line. At the end
of its input it ends all nodes.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from ray.cluster_utils import Cluster


def main() -> None:
    """Run the nodes until the input ends."""
    # Whatever Ray prints goes elsewhere.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    node: dict[str, Any] = {"object_store_memory": 80 << 20}
    nodes = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 0, "include_dashboard": False})
    try:
        others = {raylet_of(each): each for each in (nodes.add_node(**node, num_cpus=3) for _ in range(2))}
        print(json.dumps({"address": nodes.address, "raylets": list(others)}), file=answers)
        for line in sys.stdin:
            nodes.remove_node(others[int(line)], allow_graceful=False)
            print("removed", file=answers)
    finally:
        nodes.shutdown()


def raylet_of(node: Any) -> int:
    """Return the process id of a node's raylet."""
    [raylet] = node.all_processes["raylet"]
    return int(raylet.process.pid)


if __name__ == "__main__":
    main()
