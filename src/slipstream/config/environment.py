"""The section [environment]: tasks, and how rewards are computed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.config import bounds
from slipstream.config.bounds import Auto, Section
from slipstream.config.mixture import MixturePart, PartName

AGENT = "agent"
"""`environment.name` of programs with requests to the policy."""
GradedText = Literal["all", "tag", "last_line"]


class EnvironmentConfig(Section):
    """The source of tasks and rewards."""

    name: str
    """`reasoning_gym/<task>`, `rows` (questions and answers from a file), `detection` (images and their objects,
    docs/detection.md), `agent` (a program of yours, docs/agents.md), `atropos` (programs on atroposlib,
    docs/atropos.md), or `verifiers/<name>` (see `python`). Or `path/to/file.py:Class`, `name@digest` (see `registry`),
    `mixture` (of the tasks below `mixture`), or the name of an entry point in the group `slipstream.environments`."""
    mixture: dict[PartName, MixturePart] = {}
    """With `name = "mixture"`, the tasks of the run: a table `[environment.mixture.NAME]` for each, with `name`,
    `weight`, `settings`, `system_prompt`, `num_train_tasks`, `group_size`, `max_tokens`, `max_turns`, `tools` and
    `python`. Held-out tasks are taken from all of them in turn."""
    curriculum: Literal["none", "adaptive"] = "none"
    """`adaptive`: a task of a mixture is drawn by `weight` times the recent fraction of its groups with different
    rewards (at least 0.1). Tasks always or never solved are drawn less often. Checkpoints hold these weights."""
    registry: str = ""
    """The folder or address (`s3://bucket/prefix`, with the extra `s3`) of `name@digest`, added by
    `slipstream env push`. Its files are verified before any of them is imported, and kept on this machine; a later
    start does not need the registry."""
    settings: dict[str, Any] = {}
    """Passed to the environment as they are. `rows` takes `path`, `subset`, `split`, `eval_path`, `eval_split`,
    `format`, `prompt_column`, `answer_column`, `messages_column`, `gold_column`, `reward`, `rubric`, `score_groups`,
    `strip_thinking`, `sandbox`, `code`, `judges`, `tokenizer`. `detection`: `path`, `subset`, `split`, `eval_path`,
    `eval_split`, `prompt`. `agent`: `command` or `callable`, `tasks` or the settings of `rows`, `reward`. `atropos`:
    `url`, `host`, `port`, `model_port`, `token_variable`."""
    python: str = ""
    """The Python interpreter of an environment of `verifiers`, in a process of its own: its packages cannot be
    installed beside vLLM's. Empty: the run's own."""
    tools: bounds.Texts = ()
    """Tools for the policy, beside the environment's own: `path/to/file.py:function`, or `mcp:COMMAND`, a server of the
    Model Context Protocol started by COMMAND."""
    max_turns: bounds.Items | Auto = "auto"
    """The most turns of one episode. `auto`: the environment's number; 4 if `tools` are given to an environment of a
    single turn."""
    system_prompt: str = ""
    """Put before every conversation without a system message of its own."""
    num_examples: Annotated[int, Field(ge=0, le=64)] = 0
    """Solved tasks before each question, as earlier turns of the conversation: the first training tasks. These are not
    trained on."""
    graded_text: GradedText = "all"
    """The graded part of a completion, after its thinking: `all`, the text of its last `<answer>` tag (`tag`), or its
    last line with text (`last_line`). Without this part the reward is 0 and the metric `no_answer` 1. Under `tag` gold
    answers get the tag, as targets of SFT and as examples."""
    seed: bounds.Seed = 0
    """Seeds the tasks. In reasoning_gym a question's text alone decides whether it is held out, so no run of any
    seed trains on a held-out one; for an environment of your own `slipstream.envs.split_of` does the same."""
    num_train_tasks: bounds.Items | Auto = "auto"
    """Size of the training set; it repeats in a fresh shuffle when used up. `auto`: all rows of a file, 10,000 tasks if
    a program makes them."""
    reward_timeout_s: bounds.Seconds = 10.0
    """A longer reward call is killed; the rollout is counted as `reward_timeout` and not trained on."""
    reward_workers: bounds.Processes | Auto = "auto"
    """Processes for rewards, and as many for tools; the second and further ones start when rewards or calls of tools
    have to wait. `auto`: one less than there are cores, at least 1."""
    reward_concurrency: bounds.Items = 32
    """Concurrent rewards in each worker, if they are coroutines (`async def`), such as requests to a server."""
    reward_memory_gib: bounds.Gibibytes = 8.0
    """Largest memory of a worker (RLIMIT_DATA); a reward beyond it meets a MemoryError. A reward with a model on a GPU
    needs much more than the model's size, since the driver's address space counts."""
    reward_processes: bounds.Processes = 256
    """Most living processes started by a worker's rewards or tools; a worker with more is ended with all of them."""
    tool_timeout_s: bounds.Seconds = 10.0
    """A longer call of a tool is killed; the policy is told so and goes on."""
    tool_concurrency: bounds.Items = 1024
    """Concurrent calls in each worker, if tools are coroutines (`async def`), such as requests to a server."""
    fresh_worker: bool = False
    """Each call of a reward or tool runs in a process of its own, a fork of one with the environment loaded and nothing
    else done. Everything started by the call is killed at its return. For rewards that execute a model's text: this
    may change the reward's own code. A few milliseconds a call. It is no sandbox."""
    user_namespace: bool = True
    """Rewards and tools run in a Linux user namespace of their own, if the kernel allows it. User and files are the
    same, but they cannot read the memory and environment of other processes, with the run's keys in them. `false` if
    they need `sudo`, or start containers without root."""
    variables: bounds.Texts = ()
    """Environment variables for reward workers, such as a judge's key. By themselves they get PATH, HOME, the locale,
    TMPDIR and the like, the variables of Python and its environments, CUDA and OpenMP, and no keys or tokens."""
    processes: bounds.EnvironmentProcesses | Auto = "auto"
    """Processes for episodes. 0: the run's process plays them. Blocking code in another process holds up its own
    episodes only; it is named, and interrupted after half of `run_timeout_s`. `auto`: for a function as the agent one
    for 2 cores, at most 8; 1 for an environment with a method `run`, `setup`, `close`, `setup_episode` or
    `close_episode`; otherwise 0. Such methods see the task, the settings, and the environment variables in
    `variables`. Several processes share no variables."""
    run_timeout_s: bounds.Seconds = 300.0
    """How long the environment may take between two turns; then the rollout is counted as `environment_error` and not
    trained on."""
    max_reward_failures: bounds.Fraction = 0.1
    """The run stops when more than this part of the rollouts fail, in the reward, the environment or the engine, by
    more than chance explains. A batch is judged alone, and with the seven before it."""
