"""Checks of settings that say on how many processes and engines a run is divided."""

from __future__ import annotations

from urllib.parse import urlsplit

from slipstream.config.addresses import is_loopback, key_variable_problem
from slipstream.config.atropos import NAME as ATROPOS
from slipstream.config.bounds import Problems
from slipstream.config.inference import InferenceServer
from slipstream.config.python_objects import is_python_object
from slipstream.config.schema import RLConfig, RunConfig
from slipstream.config.sft import SFTConfig
from slipstream.config.traits import num_replicas, serves_agents, shares_weights, starts_teacher, uses_engine


def process_problems(config: RunConfig) -> Problems:
    """See `checks.contradictions`."""
    yield from _streams(config)
    yield from _single_copy(config)
    yield from _orchestrators(config)
    yield from _ranks(config)
    yield from _context_parallel(config)
    yield from _nodes(config)
    yield from _atropos(config)
    yield from _servers(config)
    yield from _publications(config)


def _nodes(config: RunConfig) -> Problems:
    """Checks for several nodes."""
    if (number := config.cluster.nodes) == 1:
        return
    address, is_manual = config.cluster.address, config.cluster.launcher == "manual"
    host, _, port = address.rpartition(":")
    if (address or is_manual) and (not host or not port.isdigit()):
        yield f"cluster.address = {address!r} is no HOST:PORT: give this host's, for agents to join"
    if is_manual and not config.cluster.run_id and config.run.folder is None:
        yield f'cluster.nodes = {number} needs a name that agents can give: set cluster.run_id = "first", say'
    if shares_weights(config):
        yield (
            "weights.bridge",
            f"cluster.nodes = {number} divides trainer and engines over nodes, and weights.bridge = "
            '"single_copy" has both in one memory: use another bridge',
        )
    if starts_teacher(config):
        yield f"cluster.nodes = {number} has no place for the engine of teacher.path: give the address of its server"
    if config.run.streams != "memory" and uses_engine(config):
        yield (
            "run.streams",
            f'cluster.nodes = {number} does not go with run.streams = "{config.run.streams}", whose engines another '
            'process starts: use "memory"',
        )
    if serves_agents(config):
        yield (
            "environment.name",
            f'"agent" does not go with cluster.nodes = {number}: requests of agents reach engines of this host only',
        )


def _atropos(config: RunConfig) -> Problems:
    """Checks for groups from outside."""
    environment = config.environment
    if environment is None:
        return
    if any(part.name == ATROPOS for part in environment.mixture.values()):
        yield "environment.mixture", f'"{ATROPOS}" is no part of a mixture: its environments mix by their weights'
    if environment.name != ATROPOS:
        return
    if isinstance(config.algorithm, SFTConfig):
        yield "environment.name", f'"{ATROPOS}" brings rollouts, and SFT trains on answers: use grpo'
    if config.evaluation is not None:
        yield "evaluation", f'"{ATROPOS}" has no held-out tasks: its programs evaluate; set evaluation = false'
    if (number := config.run.orchestrators) > 1:
        yield f'run.orchestrators = {number}: environment.name = "{ATROPOS}" has one entrance: use 1'
    if config.cluster.nodes > 1:
        yield f'cluster.nodes = {config.cluster.nodes} does not go with environment.name = "{ATROPOS}": use one node'
    if config.inference.sleep is True:
        yield (
            f'inference.sleep = true does not go with environment.name = "{ATROPOS}", whose requests may come at any '
            "time: turn it off"
        )


def _servers(config: RunConfig) -> Problems:
    """Checks for engines that are servers already."""
    servers, inference = config.inference.servers, config.inference
    if not servers:
        return
    what = "inference.servers are engines that the run does not start"
    for server in servers:
        if problem := server_problem(server):
            yield "inference.servers", problem
    if len({server.url for server in servers}) < len(servers):
        yield "inference.servers", "inference.servers has one address twice: remove one of the two"
    if inference.replicas != "auto":
        yield (
            "inference.replicas",
            f"{what}, and inference.replicas = {inference.replicas} are started by it: leave it out",
        )
    if config.weights.bridge in ("single_copy", "restart"):
        yield (
            "weights.bridge",
            f'{what}, so weights.bridge = "{config.weights.bridge}" does not reach them: use "broadcast", or "disk" in '
            "a folder that they see",
        )
    if config.run.orchestrators > 1:
        yield "run.orchestrators", f"{what}, and run.orchestrators = {config.run.orchestrators} would share them: use 1"
    if config.cluster.nodes > 1 and config.run.streams != "memory":
        yield "run.streams", f'{what}, and cluster.nodes = {config.cluster.nodes}: use run.streams = "memory"'


def server_problem(server: InferenceServer) -> str:
    """The fault of an address, or of its token's variable; empty for none."""
    if problem := key_variable_problem("inference.servers.token_variable", server.token_variable):
        return problem
    parts = urlsplit(server.url)
    if parts.username or parts.password or parts.query or parts.fragment:
        return "inference.servers.url has more than an address: give the token by token_variable, not in the address"
    try:
        is_whole = parts.scheme in ("http", "https") and parts.hostname and parts.port and parts.path in ("", "/")
    except ValueError:
        is_whole = False
    if not is_whole and not (parts.scheme == "unix" and parts.path.startswith("/")):
        return f"inference.servers.url = {server.url!r:.80} is no address: write http://host:port or unix:/path"
    if parts.scheme != "unix" and not server.token_variable and not is_loopback(parts.hostname or ""):
        return f"inference.servers.url = {server.url!r:.80} needs a token: name its variable in token_variable"
    return ""


def _publications(config: RunConfig) -> Problems:
    """Checks for weights that are not published after each step."""
    if (every := config.weights.every) == 1:
        return
    if isinstance(config.algorithm, RLConfig) and config.training.staleness < every - 1:
        yield (
            "weights.every",
            f"weights.every = {every} trains on tokens {every - 1} versions old, and training.staleness = "
            f"{config.training.staleness} refuses them: set it to {every - 1} or more",
        )
    if config.weights.bridge in ("single_copy", "restart"):
        yield (
            "weights.every",
            f'weights.every = {every} leaves out versions, and weights.bridge = "{config.weights.bridge}" has one for '
            "each step: use another bridge",
        )


def _context_parallel(config: RunConfig) -> Problems:
    """Checks for rows on several ranks."""
    training = config.training
    if (size := training.context_parallel) == 1:
        return
    what = f"training.context_parallel = {size}"
    if training.ranks % size:
        yield f"{what} does not divide training.ranks = {training.ranks}: make it a divisor"
    if training.packing is False:
        yield f"{what} needs the attention of packed rows: leave out training.packing = false"


def _streams(config: RunConfig) -> Problems:
    streams, environment = config.run.streams, config.environment
    if streams == "redis" and config.redis is None:
        yield 'run.streams = "redis" needs a server: set redis.url, or use "files"'
    if streams != "memory" and environment is not None and is_python_object(environment.name):
        yield (
            f'run.streams = "{streams}" generates in a separate process, without the objects of the Python caller: '
            "put the environment into a file and give its path"
        )


def _single_copy(config: RunConfig) -> Problems:
    """Checks for one copy of the weights that trainer and engine share."""
    if not shares_weights(config):
        return
    size, ranks = config.inference.tensor_parallel_size, config.training.ranks
    if size != ranks:
        yield (
            "inference.tensor_parallel_size" if size > 1 else "training.ranks",
            f'weights.bridge = "single_copy" has each rank of the trainer train what one worker of the engine has, and '
            f"there are training.ranks = {ranks} and inference.tensor_parallel_size = {size}: make them equal, or use "
            "another bridge",
        )
    if (replicas := num_replicas(config)) > 1:
        yield (
            f"inference.replicas = {replicas} keeps the weights {replicas} times, and weights.bridge = "
            '"single_copy" has one engine whose memory the trainer trains: use 1, or another bridge'
        )
    if (orchestrators := config.run.orchestrators) > 1:
        yield (
            f"run.orchestrators = {orchestrators} have an engine each, and weights.bridge = "
            '"single_copy" has one engine whose memory the trainer trains: use 1, or another bridge'
        )
    if config.run.placement == "separate":
        yield (
            'run.placement = "separate" gives trainer and engine a GPU each, and weights.bridge = "single_copy" has '
            'them share one memory: use "shared", or another bridge'
        )
    if config.inference.sleep is True:
        yield (
            "inference.sleep = true frees the engine's weights, which are the trainer's under weights.bridge = "
            '"single_copy": turn it off, or use another bridge'
        )


def _orchestrators(config: RunConfig) -> Problems:
    """Checks for several processes that generate rollouts."""
    number, prompts = config.run.orchestrators, config.training.prompts_per_batch
    if number == 1:
        return
    what = f"run.orchestrators = {number}"
    if config.run.streams == "memory":
        remedy = 'use "files" or "redis"'
        yield f'{what} are separate processes, and run.streams = "memory" has no queue between processes: {remedy}'
    if isinstance(config.algorithm, SFTConfig):
        yield f"{what} generate rollouts to train on, and SFT needs none: leave it out"
    if prompts % number:
        yield f"training.prompts_per_batch = {prompts} prompts cannot be divided equally among {what}: use a multiple"
    if config.teacher is not None and config.teacher.path is not None:
        yield f"{what} would start a teacher each: use 1, or a teacher that is served (teacher.url)"


def _ranks(config: RunConfig) -> Problems:
    """Checks for settings that do not work with several trainer processes."""
    ranks, optimizer, bridge = config.training.ranks, config.training.optimizer, config.weights.bridge
    if ranks == 1:
        return
    spread = f"training.ranks = {ranks} gives each process a part of every weight"
    whole = {
        "muon": "whole matrices",
        "adamw_8bit": "whole weights, in blocks of 256",
        "adamw_paged_8bit": "whole weights, in blocks of 256",
        "adamw_paged": "moments in memory that the CUDA driver moves, of whole weights",
    }
    if optimizer in whole:
        yield (
            "training.optimizer",
            f'{spread}, and training.optimizer = "{optimizer}" works on {whole[optimizer]}: use "adamw" or '
            '"adamw_bf16"',
        )
    if config.model.train_tower:
        yield (
            "model.train_tower",
            f"{spread}, and a vision tower that is trained is not divided so far: use model.train_tower = false, or "
            "one rank",
        )
    if config.lora is not None and config.lora.dora:
        yield "lora.dora", f"{spread}, and DoRA's norms are those of whole weights: use LoRA, or one rank"
    if config.lora is not None and shares_weights(config):
        yield (
            "weights.bridge",
            f'{spread}, and under [lora] weights.bridge = "single_copy" shares the base with one process: use "lora", '
            "or one rank",
        )
    elif config.lora is not None and uses_engine(config) and bridge not in ("auto", "lora"):
        yield (
            "weights.bridge",
            f'{spread}, and weights.bridge = "{bridge}" publishes an adapter merged into whole weights: use "lora", or '
            "one rank",
        )
