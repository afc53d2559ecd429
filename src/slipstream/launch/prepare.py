"""Prepares a run without starting anything: loads environment, tasks, conversations and tokenizer, and makes the plan.

It only reads files, so `slipstream plan` does exactly this and stops.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

from slipstream.config import Derived, Loaded, PlannedConfig, RunConfig, SFTConfig
from slipstream.config.bounds import keyed
from slipstream.config.checks import mixture_problems
from slipstream.config.environment import EnvironmentConfig
from slipstream.config.parse.load import DEFAULT
from slipstream.config.traits import measures_loss, rolls_out, uses_engine
from slipstream.config.user_code import CodeRead, DataRead, recorded
from slipstream.data.chat_template import ChatTokenizer
from slipstream.data.conversations import parts_of
from slipstream.data.examples import Examples, tokenized
from slipstream.data.images.processor import ImageProcessor
from slipstream.data.message_fields import check_contents, check_fields
from slipstream.envs.base import Environment
from slipstream.envs.hosted.apart import placement
from slipstream.envs.registry import load_environment, played
from slipstream.envs.single_turn import gold_turns, make_tasks
from slipstream.envs.store.registry import located
from slipstream.errors import ConfigError, DataError
from slipstream.launch.engines import engine_plan
from slipstream.orchestrator.batches.batch_order import BatchOrder
from slipstream.orchestrator.method import Method, method_of
from slipstream.plan.deployable import with_weights_folder
from slipstream.plan.derive import Plan, draft_plan
from slipstream.plan.draw_notes import method_notes, mixture_notes
from slipstream.plan.facts import DataFacts, Facts, ModelFacts, ToolFacts
from slipstream.plan.lengths import least_tokens, wanted_tokens
from slipstream.plan.measure import answer_turns, gather_facts, longest_answer, measure_data, read_model
from slipstream.plan.memory.cards import Gpus
from slipstream.plan.preflight.images import check_images, image_tokens
from slipstream.plan.preflight.model_folder import (
    check_adapter,
    check_model,
    check_teacher,
    find_model,
    find_teacher,
    has_weights,
)
from slipstream.plan.preflight.needs import check_functions, check_needs
from slipstream.plan.preflight.rows import builder_of, read_data, source_of
from slipstream.plan.preflight.texts import check_texts
from slipstream.plan.preflight.torch_builds import check_torch_builds
from slipstream.plan.preflight.turns import check_imitated, check_turns
from slipstream.plan.preflight.unknown_characters import unknown_characters
from slipstream.plan.preflight.vllm_options import check_options, try_options
from slipstream.plan.summary import Note
from slipstream.plan.tool_parser import find_parser
from slipstream.records import Message, SamplingParams, Task

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start."""

    loaded: Loaded
    plan: Plan
    facts: Facts
    tokenizer: ChatTokenizer
    environment: Environment | None
    train_tasks: list[Task]
    eval_tasks: list[Task]
    conversations: list[Sequence[Message]]
    """The training set of SFT."""
    examples: Examples
    """The same as tokens."""
    held_out: Examples
    """Rows of which SFT measures the loss."""
    dropped: dict[str, int]
    """Number of dropped tasks and conversations, by reason."""
    part_of_item: tuple[int, ...] = ()
    """Of a mixture, the number of each training item's part; empty without one."""
    reads: tuple[CodeRead | DataRead, ...] = ()
    """The user's files that were executed, and the data that were read."""

    @property
    def config(self) -> PlannedConfig:
        """The config with every `auto` replaced."""
        return self.plan.config

    @property
    def uses_engine(self) -> bool:
        """Whether this run generates anything."""
        return uses_engine(self.config)

    def images_of_agents(self) -> ImageProcessor | None:
        """What scales images in requests of agents; None where no task has any, as the plan then has no room."""
        return self.tokenizer.images if self.facts.tower is not None else None

    def batch_order(self) -> BatchOrder:
        """The training items of each batch."""
        return BatchOrder(self.config, self.train_tasks, self.num_items, self.part_of_item)

    @property
    def num_items(self) -> int:
        """Size of the training set."""
        return len(self.conversations) if isinstance(self.config.algorithm, SFTConfig) else len(self.train_tasks)

    def sampling(self, temperature: float | None = None) -> SamplingParams:
        """The run's sampling parameters; `temperature` replaces theirs (0: greedy, without top-p, top-k and min-p)."""
        return sampling_of(self.config, temperature, self.tokenizer.stop_token_ids)


def sampling_of(
    config: PlannedConfig, temperature: float | None = None, stop_token_ids: Sequence[int] = ()
) -> SamplingParams:
    """See `Prepared.sampling`. Of the tokens that end a completion the loss does not depend."""
    s = config.sampling
    greedy = temperature == 0.0
    return SamplingParams(
        max_tokens=s.max_tokens,
        temperature=s.temperature if temperature is None else temperature,
        top_p=1.0 if greedy else s.top_p,
        top_k=0 if greedy else s.top_k,
        min_p=0.0 if greedy else s.min_p,
        stop=s.stop,
        stop_token_ids=tuple(stop_token_ids),
    )


def prepare(loaded: Loaded, *, weights: bool = True, gpus: Gpus | None = None) -> Prepared:
    """Load the environment and the data, drop what cannot be used, and plan for `gpus`, by default this machine's.
    Without `weights`, those of a hub id are not downloaded, and a folder need have none: enough for a plan, not for a
    run. Raises `DoesNotFit` for a plan that needs more memory or disk than there is."""
    with recorded() as reads:
        prepared = _prepare(loaded, weights=weights, gpus=gpus)
    return replace(prepared, reads=tuple(dict.fromkeys(reads)))


def _prepare(loaded: Loaded, *, weights: bool, gpus: Gpus | None) -> Prepared:
    check_torch_builds()
    loaded = with_weights_folder(loaded)
    config = loaded.config
    if config.environment is not None:  # on this machine, verified, once, so that all load the same files
        config = config.model_copy(update={"environment": located(config.environment)})
    check_needs(config)
    check_options(config.inference.options)
    model = find_model(config.model, weights=weights)
    config = config.model_copy(update={"model": model, "teacher": find_teacher(config, weights=weights)})
    check_model(model, packing=config.training.packing is True, weights=weights or has_weights(Path(model.path)))
    check_adapter(model, config.lora.path if config.lora else None)
    tokenizer = _tokenizer(config)
    check_functions(config, tokenizer)
    check_teacher(config, tokenizer, weights=weights)
    environment = load_environment(config.environment) if config.environment else None
    method = method_of(config)
    for each in (environment, method):
        if each is not None:
            each.check_tokenizer(tokenizer)
    train_tasks, eval_tasks, requested = _tasks(config, environment)
    if method is not None:
        train_tasks, eval_tasks = method.tasks(train_tasks), method.tasks(eval_tasks)
    dropped: dict[str, int] = {}
    examples_before = 2 * config.environment.num_examples if config.environment else 0
    held_out = {_question(task.prompt, examples_before) for task in eval_tasks}
    if environment is not None:
        held_out |= {_question(task.prompt) for task in environment.held_out()}
    train_tasks = _not_held_out(train_tasks, lambda task: _question(task.prompt, examples_before), held_out, dropped)
    facts_of_model = read_model(model.path, trust_remote_code=model.trust_remote_code)
    context, is_sft = facts_of_model.context_length, isinstance(config.algorithm, SFTConfig)
    rolled_out = {"train": train_tasks} if not is_sft or rolls_out(config) else {}
    asked = rolled_out | {"eval": eval_tasks}
    fitting, longest_prompt = _fitting(asked, tokenizer, config, facts_of_model, environment, dropped)
    train_tasks, eval_tasks = fitting.get("train", train_tasks), fitting["eval"]
    conversations: list[Sequence[Message]] = []
    eval_rows: list[Sequence[Message]] = []
    part_of: dict[int, str] = {}
    if method is not None and config.data is None:
        conversations = method.conversations(train_tasks, environment.max_turns if environment else 1)
    elif is_sft:
        conversations, eval_rows = _conversations(config, environment, train_tasks, dropped, part_of)
    talk = parts_of([*conversations, *eval_rows])
    unknown = unknown_characters(config, environment, tokenizer.vocabulary, talk, train_tasks, eval_tasks)
    place = partial(source_of, config, [*train_tasks, *eval_tasks])
    turns = _turns(config, environment, tokenizer, [*train_tasks, *eval_tasks])
    examples = eval_examples = Examples()
    if method is not None and config.data is None:
        examples = method.examples(train_tasks, tokenizer, context)
    elif is_sft:
        question_of = partial(_question, num_before=0 if config.data else examples_before)
        conversations = _not_held_out(conversations, question_of, held_out, dropped)
        tokens_of = partial(_tokenized, tokenizer, config, context, dropped, place, method)
        conversations, examples = tokens_of(conversations)
        eval_rows, eval_examples = tokens_of(eval_rows, held_out=True)
    items = [part_of.get(id(each), "") for each in conversations] if is_sft else [task.part for task in train_tasks]
    part_of_item = _part_of_item(config.environment, items)
    trained_on = parts_of([*conversations, *eval_rows]) or [task.prompt for task in train_tasks]
    prompts = [*trained_on, *(task.prompt for task in eval_tasks)]
    check_fields(tokenizer, prompts, dropped)
    check_contents(tokenizer, prompts, place)
    turns += check_texts(tokenizer, prompts, place, imitated=is_sft)
    gold = partial(gold_turns, environment) if environment else answer_turns
    data = measure_data(
        *(train_tasks, tokenizer, eval_tasks, examples.lengths, eval_examples.lengths, gold),
        max_prompt_tokens=longest_prompt,
        max_turns=environment.max_turns if environment else 1,
        processes=placement(environment) if environment else DataFacts.processes,
        num_requested_tasks=requested,
    )
    if is_sft:
        each = -(-len(examples.lengths) // max(1, len(conversations)))
        data = replace(
            data, num_train_tasks=len(conversations), row_sequences=max(1, each), num_eval_rows=len(eval_rows)
        )
    facts = gather_facts(
        config,
        data,
        thinks=tokenizer.has_thinking_switch,
        tools=_tool_facts(environment, tokenizer),
        images=image_tokens(tokenizer, trained_on),
        gpus=gpus,
    )
    plan = draft_plan(config, facts)
    for _, sentence in keyed(mixture_problems(plan.config)):  # what is derived may be less than a part asks for
        raise ConfigError(sentence)
    source = environment.eval_source if environment and eval_tasks else ""
    notes = [Note("held-out tasks", len(eval_tasks), "", source)] if source else []
    notes += [*mixture_notes(plan.config, part_of_item), *method_notes(plan.config)]
    notes += check_images(plan.config, tokenizer, prompts, on_cpu=not facts.num_gpus)
    derived = plan.derived
    if model.revision != loaded.config.model.revision:
        reason = f"the commit that the hub has for {loaded.config.model.path}"
        derived = (Derived("model.revision", model.revision, reason), *derived)
    turns += check_imitated(tokenizer.thinks, environment if config.data is None else None, conversations)
    warnings = (*loaded.warnings, *_fewer_tasks(loaded, derived), *plan.warnings, *unknown, *turns)
    plan = replace(plan, derived=derived, warnings=warnings, notes=(*plan.notes, *notes)).checked()
    found = (train_tasks, eval_tasks, conversations, examples, eval_examples, dropped, part_of_item)
    return Prepared(loaded, plan, facts, tokenizer, played(environment, plan.config.environment), *found)


def _tool_facts(environment: Environment | None, tokenizer: ChatTokenizer) -> ToolFacts | None:
    """The template of an environment with tools; an agent may bring some, if a parser for the template is known."""
    facts = ToolFacts(tokenizer.template, tokenizer.renders_tools)
    if environment is not None and environment.needs_address and not environment.tools:
        return facts if tokenizer.renders_tools and find_parser(facts, ()) else None
    return facts if environment is not None and environment.tools else None


def _tokenizer(config: RunConfig) -> ChatTokenizer:
    model, section = config.model, config.environment
    return ChatTokenizer(
        model.path,
        section.system_prompt if section else "",
        model.trust_remote_code,
        model.chat_template_kwargs,
        thinking=model.thinking,
        max_pixels=model.max_pixels,
    )


def check_engine(prepared: Prepared) -> None:
    """Raise `ConfigError` for `inference.options` that vLLM refuses; in a run the engine itself reports them."""
    config = prepared.config
    if prepared.uses_engine and config.inference.options:
        try_options(engine_plan(config, config.model.path, on_cpu=prepared.facts.num_gpus == 0).settings)


def _tasks(config: RunConfig, environment: Environment | None) -> tuple[list[Task], list[Task], int | None]:
    """Training tasks, held-out tasks, and how many of the first were asked for, if any."""
    train_tasks: list[Task] = []
    eval_tasks: list[Task] = []
    requested: int | None = None
    if environment is not None and config.environment is not None:
        if config.data is None:
            asked = config.environment.num_train_tasks
            requested = environment.num_train_tasks if asked == "auto" else asked
            train_tasks = make_tasks(environment, "train", requested)
        if config.evaluation is not None:
            eval_tasks = _eval_tasks(environment, config.evaluation.num_tasks)
    return train_tasks, eval_tasks, requested


def _eval_tasks(environment: Environment, num_tasks: int) -> list[Task]:
    tasks = make_tasks(environment, "eval", num_tasks)
    if not tasks:
        raise DataError(
            f"{environment.name} gave no held-out tasks: have tasks('eval', {num_tasks}) return some, or turn the "
            "evaluation off with --no-evaluation (in Python give eval_tasks, or evaluation=False)"
        )
    return tasks


def _question(messages: Sequence[Message], num_before: int = 0) -> tuple[tuple[str, ...], ...]:
    """Role, content and images of the messages before the first answer, without system messages and the `num_before`
    messages of solved examples after them: the key to find duplicates by."""
    turns = [
        (message.role, message.content, *(image.sha256 for image in message.media))
        for message in messages
        if message.role != "system"
    ][num_before:]
    first = next((index for index, (role, *_) in enumerate(turns) if role == "assistant"), len(turns))
    return tuple(turns[:first])


def _not_held_out(
    items: list[T], question_of: Callable[[T], object], held_out: Collection[object], dropped: dict[str, int]
) -> list[T]:
    """Drop items whose question is a held-out one: accuracy on training data would mean nothing."""
    kept = [item for item in items if question_of(item) not in held_out]
    if len(kept) < len(items):
        dropped["also_held_out"] = dropped.get("also_held_out", 0) + len(items) - len(kept)
    if items and not kept:
        raise DataError(
            f"every one of the {len(items)} training questions is also a held-out one: give other training data, or "
            "let the environment's tasks depend on the split (slipstream.envs.split_of)"
        )
    return kept


def _fitting(
    asked: dict[str, list[Task]],
    tokenizer: ChatTokenizer,
    config: RunConfig,
    model: ModelFacts,
    environment: Environment | None,
    dropped: dict[str, int],
) -> tuple[dict[str, list[Task]], int]:
    """Keep, in each split, the tasks whose prompt leaves enough context for a completion; also returns the tokens of
    their longest prompt."""
    limit = config.inference.max_model_len
    limit = model.context_length if limit == "auto" else min(limit, model.context_length)
    need = config.sampling.max_tokens
    lengths = {split: [_num_prompt_tokens(tokenizer, task) for task in tasks] for split, tasks in asked.items()}
    if need == "auto":
        longest = None
        if model.says_only_answers and environment is not None:
            gold = partial(gold_turns, environment)
            longest = longest_answer(chain.from_iterable(asked.values()), tokenizer, gold)
        turns = environment.max_turns if environment else 1
        wanted, _ = wanted_tokens(limit, longest, turns, says_only_answers=model.says_only_answers)
        # Without gold answers a model with a short context gets all of it.
        need = 1 if wanted == limit else least_tokens([*chain.from_iterable(lengths.values())], limit, wanted)
    elif need >= limit:
        raise ConfigError(
            f"sampling.max_tokens = {need} leaves no room for a prompt within {limit} tokens, the model's context or "
            f"inference.max_model_len: use less than {limit}"
        )
    fitting, longest_prompt = dict[str, list[Task]](), 0
    for split, tasks in asked.items():
        kept = [task for task, length in zip(tasks, lengths[split], strict=True) if length + need <= limit]
        longest_prompt = max(longest_prompt, *(length for length in lengths[split] if length + need <= limit), 0)
        if len(kept) < len(tasks):
            dropped[f"{split}_prompt_too_long"] = len(tasks) - len(kept)
        if tasks and not kept:
            raise DataError(
                f"every one of the {len(tasks)} {split} prompts leaves no room for a completion of {need} tokens "
                f"within {limit} tokens: use shorter prompts, or a model with a longer context"
            )
        fitting[split] = kept
    return fitting, longest_prompt


def _num_prompt_tokens(tokenizer: ChatTokenizer, task: Task) -> int:
    try:
        return len(tokenizer.render(task.prompt))
    except DataError as error:
        raise DataError(f"task {task.id}: {error}") from error


def _conversations(
    config: RunConfig,
    environment: Environment | None,
    tasks: list[Task],
    dropped: dict[str, int],
    part_of: dict[int, str],
) -> tuple[list[Sequence[Message]], list[Sequence[Message]]]:
    """SFT's conversations: those to train on, and those whose loss is measured. `part_of` gets the part of a mixture
    that each is of, by the object's id: two parts may have the same question."""
    if config.data is not None:
        build = builder_of(config)
        return read_data(config.data, dropped, holds_out=measures_loss(config), build=build)
    assert environment is not None, "the config check asks for data or an environment"
    found: list[Sequence[Message]] = []
    for task in tasks:
        if turns := gold_turns(environment, task):
            found.append([*task.prompt, *turns])
            part_of[id(found[-1])] = task.part
    if len(found) < len(tasks):
        dropped["no_gold_answer"] = len(tasks) - len(found)
    if not found:
        raise ConfigError(
            f"environment {environment.name} has no gold answers to imitate: give conversations with data.path, or "
            "train with algorithm grpo"
        )
    return found, []


def _part_of_item(section: EnvironmentConfig | None, items: Sequence[str]) -> tuple[int, ...]:
    """The number of the part of a mixture that each training item belongs to, of the parts' names. Raises ConfigError
    for a part without any."""
    if section is None or not section.mixture or not any(items):
        return ()
    for name in section.mixture:
        if name not in items:
            raise ConfigError(
                f"environment.mixture.{name} has no training task that can be used: give it some, or remove the part"
            )
    parts = {name: number for number, name in enumerate(section.mixture)}
    return tuple(parts[name] for name in items)


def _tokenized(
    tokenizer: ChatTokenizer,
    config: RunConfig,
    context: int,
    dropped: dict[str, int],
    place: Callable[[Sequence[Message]], str],
    method: Method | None,
    conversations: list[Sequence[Message]],
    *,
    held_out: bool = False,
) -> tuple[list[Sequence[Message]], Examples]:
    """Tokens of the conversations, within `data.max_length` and the model's context."""
    assert isinstance(config.algorithm, SFTConfig)
    data, limit, bound = config.data, context, f"the model's context of {context} tokens"
    if data is not None and data.max_length is not None:
        limit, bound = data.max_length, f"data.max_length = {data.max_length}"
        if limit > context:
            raise ConfigError(
                f"data.max_length = {limit} is above the model's context of {context} tokens: use at most {context}"
            )
    return tokenized(
        conversations,
        tokenizer,
        config.algorithm.train_on,
        limit,
        data.too_long if data is not None else "drop",
        dropped,
        where=place,
        bound=bound,
        prefix="eval_" if held_out else "",
        tokens=None if method is None else method.tokens,
    )


def _fewer_tasks(loaded: Loaded, derived: Sequence[Derived]) -> list[str]:
    """A warning where the plan lowers what the user gave."""
    name = "evaluation.num_tasks"
    if loaded.origins.get(name, DEFAULT) == DEFAULT:
        return []
    return [f"{name} was {item.reason}" for item in derived if item.name == name]


def _turns(
    config: RunConfig, environment: Environment | None, tokenizer: ChatTokenizer, tasks: Sequence[Task]
) -> list[str]:
    """See `check_turns`; a template that renders no tools is refused by the plan."""
    if environment is None or not tasks or not uses_engine(config):
        return []
    if environment.tools and not tokenizer.renders_tools:
        return []
    return check_turns(tokenizer, environment, tasks[0].prompt, config.model.path)
