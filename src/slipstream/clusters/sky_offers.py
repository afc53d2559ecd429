"""Prices a task, in the interpreter of SkyPilot: `python -I sky_offers.py TASK CLOUD ...`.

It imports nothing of Slipstream, asks the catalogues on the disk alone, calls no server, and prints JSON.
"""

import json
import sys


def main(path: str, *names: str) -> None:
    """Print the offers of these clouds, or the reason against the task."""
    import sky  # pyright: ignore[reportMissingImports]
    from sky.utils import registry  # pyright: ignore[reportMissingImports]

    try:
        task = sky.Task.from_yaml(path)
    except (ValueError, sky.exceptions.SkyPilotExcludeArgsBaseException) as error:
        print(json.dumps({"error": f"SkyPilot refuses the task: {error}"}))
        return
    offers = []
    for asked in task.resources:
        for name in names:
            cloud = registry.CLOUD_REGISTRY.from_str(name)
            if asked.cloud is not None and not asked.cloud.is_same_cloud(cloud):
                continue
            found = cloud.get_feasible_launchable_resources(asked.copy(cloud=cloud), task.num_nodes)
            for each in found.resources_list:
                price = each.get_cost(3600) * task.num_nodes
                offers.append({"cloud": name, "machine": each.instance_type, "hour": round(price, 4)})
    print(json.dumps({"offers": offers, "name": task.name, "nodes": task.num_nodes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
