"""Run one NVFlare job, whose objects are in `nvflare_job.py`, with the simulator or a proof of concept.

The argument is a request: `{"folder", "scenarios", "clients", "environment", "server", "client"}`.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from nvflare.collab import CollabRecipe
from nvflare.recipe import PocEnv, SimEnv, set_per_site_config
from nvflare_job import Client, Server, build, train


if __name__ == "__main__":
    torch.set_num_threads(1)
    request = json.loads(sys.argv[1])
    folder, scenarios, clients = request["folder"], request["scenarios"], request["clients"]
    if request["environment"] == "local":
        for name in scenarios:
            federation = request["client"].get("federation", {})
            train(build(name, folder, "local", num_clients=len(clients), federation=federation))
        sys.exit()
    recipe = CollabRecipe(
        "federation",
        server=Server(clients, scenarios, folder, **request["server"]),
        client=Client(scenarios, folder, **request["client"]),
        min_clients=request.get("min_clients", len(clients)),
    )
    set_per_site_config(recipe, {client_id: {} for client_id in clients})
    if request["environment"] == "simulator":
        recipe.execute(SimEnv(clients=recipe.configured_sites(), workspace_root=os.path.join(folder, "workspace")))
        sys.exit()
    environment = PocEnv(clients=clients, num_clients=len(clients))
    try:
        run = recipe.execute(environment)
        print("result", run.get_result(timeout=300), run.get_status())
    finally:
        environment.stop(clean_up=True)
