import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from slipstream.config import RLConfig, SFTConfig, load_config, load_settings
from slipstream.config.schema import ArgumentsConfig
from slipstream.errors import ConfigError
from tests.refusals import refuses

from .conftest import MINIMAL


def refusal(path, *overrides, algorithm=None):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, algorithm=algorithm)
    return str(caught.value)


def with_line(line, section="[training]", text=MINIMAL):
    return text.replace(section, f"{section}\n{line}")


ENVIRONMENT = '[environment]\nname = "reasoning_gym/spell_backward"'
SFT = MINIMAL.replace('"grpo"', '"sft"')
PPO = MINIMAL.replace('"grpo"', '"ppo"')
SFT_FROM_DATA = SFT.replace('[environment]\nname = "reasoning_gym/spell_backward"', '[data]\npath = "rows.jsonl"')


def test_defaults_and_origins(run_file):
    loaded = load_config(run_file(), ["--sampling.top_p=0.9"])
    assert isinstance(loaded.config.algorithm, RLConfig)
    assert loaded.config.training.steps == 20
    assert loaded.config.model.path == "some/model"
    assert loaded.origins["training.steps"] == "run.toml:11"
    assert loaded.origins["algorithm.kind"] == "run.toml:8"
    assert loaded.origins["sampling.top_p"] == "command line"
    assert loaded.origins["sampling.top_k"] == "default"
    assert "environment.settings" in loaded.origins


def test_lines_are_found_past_values_of_several_lines(run_file):
    text = MINIMAL.replace(
        "[algorithm]",
        'system_prompt = """\n[training]\nsteps = 1\n"""\nsettings.words = [\n  1,\n  2,\n]\n'
        "settings.deep = { x = 1 } # comment\n[environment.settings.more]\ny = 2\n[algorithm]",
    )
    origins = load_config(run_file(text)).origins
    assert origins["environment.system_prompt"] == "run.toml:7"
    assert origins["environment.settings.words"] == "run.toml:11"
    assert origins["environment.settings.deep.x"] == "run.toml:15"
    assert origins["environment.settings.more.y"] == "run.toml:17"
    assert origins["training.steps"] == "run.toml:22"


def test_line_ends_and_byte_order_marks_do_not_matter(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert load_config(path).origins["training.steps"] == "run.toml:11"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[model\n", "not valid TOML: "),
        (b"a = 1\na = 2\n", "not valid TOML: "),
        (b"a = hello\n", "write texts in quotes"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_files_that_are_not_toml(tmp_path, content, expected):
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    message = refusal(path)
    assert expected in message
    assert "run.toml" in message


def test_missing_file_and_folder(tmp_path):
    assert "does not exist" in refusal(tmp_path / "none.toml")
    assert "is a folder" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("learning_rate = -1", "training.learning_rate = -1 must be greater than 0: use a number greater than 0"),
        ('prompts_per_batch = "8"', 'training.prompts_per_batch = "8" is a text: use a positive whole number'),
        ("prompts_per_batch = true", "training.prompts_per_batch = true is a flag: use a positive whole number"),
        ("prompts_per_batch = 1e3", "prompts_per_batch = 1000.0 is a number with a decimal point: use a positive"),
        ("packing = 1", 'training.packing = 1 is a whole number: use true, false or "auto"'),
        ('schedule = "cosin"', 'did you mean "cosine"? It takes "constant", "linear" or "cosine"'),
        ('micro_batch_tokens = "lots"', 'micro_batch_tokens = "lots" is a text: use a positive whole number or "auto"'),
        ("micro_batch_tokens = 0", 'must be greater than 0: use a positive whole number or "auto"'),
        ("adam_beta1 = 1.0", "adam_beta1 = 1.0 must be less than 1: use a number of at least 0 and less than 1"),
        ("learning_rate = inf", "training.learning_rate = inf is not a finite number"),
        ("learning_rate = nan", "training.learning_rate = nan is not a finite number"),
        ("learning_rate = 2020-01-01", "is a date or time: use a number greater than 0 and at most 1 or"),
        ("learning_rate = [1]", "training.learning_rate = [1] is a list"),
        ("lerning_rate = 1", "training.lerning_rate is not a known key: did you mean training.learning_rate?"),
        ("actor_lr = 1", "did you mean training.learning_rate?"),
        ("group_size = 4", "did you mean algorithm.group_size?"),
        ("zzz = 4", "training.zzz is not a known key: [training] has steps, "),
    ],
)
def test_one_wrong_line_is_one_sentence(run_file, line, expected):
    message = refusal(run_file(with_line(line)))
    assert expected in message
    assert message.endswith("(run.toml:11)")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MINIMAL.replace("steps = 20", ""), "training.steps is missing: set it to a positive whole number, "),
        (MINIMAL.replace('[model]\npath = "some/model"', ""), "model.path is missing: "),
        (MINIMAL.replace("[model]", "[modle]"), "modle is not a known section: did you mean the section [model]?"),
        (MINIMAL.replace('kind = "grpo"', ""), 'algorithm.kind is missing: set it to "sft", "grpo",'),
        (
            MINIMAL.replace('[algorithm]\nkind = "grpo"', ""),
            'algorithm.kind is missing: set it to "sft", "grpo",',
        ),
        (MINIMAL.replace('"grpo"', '"gpro"'), 'algorithm.kind = "gpro" is not a choice: did you mean "grpo"?'),
        (MINIMAL.replace('"grpo"', "3"), "algorithm.kind = 3 is a whole number: use"),
        ("weights = 3\n" + MINIMAL, "weights = 3 is not a table: write [weights] and its keys below it (run.toml:1)"),
        ("evaluation = true\n" + MINIMAL, "evaluation = true is not a table: write [evaluation]"),
        ("max_steps = 3\n" + MINIMAL, "did you mean training.steps? (run.toml:1)"),
        (MINIMAL + "[trainer]\ntotal_training_steps = 3\n", "did you mean training.steps?"),
        (MINIMAL + "[actor_rollout_ref.rollout]\nn = 2\n", "did you mean algorithm.group_size?"),
        (MINIMAL + "[evaluation]\nmax_new_tokens = 2\n", "did you mean sampling.max_tokens?"),
        ("steps = 3\n" + MINIMAL, "steps is not a known section: did you mean training.steps? (run.toml:1)"),
        (MINIMAL + "[[weights]]\nbridge = 'disk'\n", "is not a table: write [weights]"),
        (MINIMAL.replace("steps = 20", "step = 20"), "training.step is not a known key: did you mean training.steps?"),
        (MINIMAL.replace('"some/model"', '" "'), "model.path = "),
        (MINIMAL.replace('"some/model"', "3"), "model.path = 3 is a whole number: use a text"),
        (MINIMAL + '[sampling]\nstop = ["a", 3]\n', "sampling.stop[1] = 3 is a whole number: use a list of texts"),
        (MINIMAL + '[sampling]\nstop = [""]\n', "sampling.stop has an empty text"),
        (MINIMAL + "[lora]\ntarget_modules = []\n", 'lora.target_modules = [] is an empty list: use "all-linear" or'),
        (MINIMAL + "[sampling]\ntop_k = 1\n", "no signal"),
        (MINIMAL + "[inference]\noptions.max-model-len = 3\n", "set inference.max_model_len instead"),
        (MINIMAL + "[inference]\nmax_model_len = 10\n[sampling]\nmax_tokens = 10\n", "leaves no room for a prompt"),
        (
            MINIMAL + "[weights]\nprobe_warn = 0.1\nprobe_stop = 0.05\n",
            "probe_stop = 0.05 is not above weights.probe_warn",
        ),
        (MINIMAL + "[run]\nfolder = 3\n", "run.folder = 3 is a whole number: use a path"),
        (MINIMAL.replace("[algorithm]", "settings = 5\n[algorithm]"), "environment.settings = 5 is a whole number"),
    ],
)
def test_wrong_files_are_one_sentence(run_file, text, expected):
    message = refusal(run_file(text))
    assert expected in message
    assert "\n" not in message


def test_several_errors_are_told_at_once(run_file):
    text = with_line("learning_rate = -1\nlr = 2", text=MINIMAL.replace("steps = 20", ""))
    lines = refusal(run_file(text), "--sampling.top_p", "3", "--smapling.top_k", "1").splitlines()
    assert len(lines) == 5
    named = "--smapling.top_k training.lr training.learning_rate training.steps sampling.top_p"
    assert {line.split()[0] for line in lines} == set(named.split())


BASES = {"grpo": MINIMAL, "sft": SFT, "ppo": PPO, "data": SFT_FROM_DATA}
# A file, settings on the command line, and after "->" what the sentence names; by default the last setting.
REFUSED = """
sft  --algorithm.group_size 4
grpo --algorithm.train_on last
grpo --algorithm.arguments.kl_estimator k3 -> algorithm.kl_coef
grpo --algorithm.arguments.kl_in reward -> algorithm.kl_coef
grpo --algorithm.importance_sampling none --algorithm.arguments.importance_cap 2.0
grpo --algorithm.loss policy_gradient --algorithm.clip_low 0.1
grpo --algorithm.kind gspo --algorithm.arguments.clip_dual 3
grpo --algorithm.arguments.clip_dual 1.2 -> 1.28
grpo --algorithm.old_policy engine --algorithm.importance_sampling masked
grpo --algorithm.arguments.importance_floor 2.0
grpo --algorithm.arguments.length_penalty 0.1 -> algorithm.arguments.reward_threshold
grpo --teacher.path teacher --algorithm.kind distill --algorithm.max_refills 9
grpo --algorithm.arguments.best_of 9 -> algorithm.group_size = 8
grpo --critic.gamma 0.9 -> algorithm.advantage
sft  --critic.gamma 0.9 -> algorithm.advantage
ppo  --algorithm.scale_rewards std
grpo --training.overprovision 0.5 -> training.order
grpo --training.order data --training.overprovision 0.5
ppo  --critic.warmup_steps 20 -> training.steps = 20
grpo --algorithm.arguments.thinking_penalty 2 -> algorithm.arguments.thinking_budget
grpo --algorithm.group_size 1 -> at least 2
grpo --algorithm.arguments.overlong_penalty 2.0 -> algorithm.arguments.overlong_buffer
grpo --algorithm.kind rloo --data.path x
grpo --data.path x
sft  --no-evaluation --sampling.top_k 3
sft  --no-evaluation --inference.options.x 3
sft  --no-evaluation --weights.bridge restart
sft  --no-evaluation --environment.reward_timeout_s 3
sft  --run.max_steps_without_signal 3
sft  --data.path x --environment.num_train_tasks 9
data --evaluation.every 5 -> evaluation needs an environment
data --evaluation -> evaluation needs an environment
grpo --training.warmup_steps 20 -> at most 19
grpo --weights.bridge lora -> lora.rank
grpo --weights.bridge single_copy --inference.tensor_parallel_size 2
grpo --training.ranks 2 --training.optimizer muon
grpo --training.ranks 2 --training.optimizer adamw_8bit
grpo --training.ranks 2 --weights.bridge single_copy -> make them equal
grpo --training.ranks 2 --inference.tensor_parallel_size 2 --lora.rank 4 --weights.bridge single_copy
grpo --training.ranks 2 --lora.rank 4 --weights.bridge disk
grpo --training.rank_timeout_s 9 -> training.ranks
grpo --training.context_parallel 2 -> make it a divisor
grpo --training.ranks 6 --training.context_parallel 4 -> make it a divisor
grpo --training.ranks 2 --training.context_parallel 2 --training.packing false -> training.packing
grpo --weights.bridge single_copy --run.placement separate
grpo --weights.bridge single_copy --inference.sleep true
grpo --weights.bridge restart --weights.delta true
grpo --lora.rank 8 --weights.delta true
grpo --lora.rank 8 --lora.path ''
grpo --lora.target_modules '["q_proj", ""]'
grpo --lora.rank 0
grpo --inference.options.max_lora_rank 8 -> lora.rank
grpo --training.updates_per_batch 5 -> 4 or 8
grpo --evaluation.samples_per_task 4 --evaluation.temperature 0 -> samples_per_task = 4 at temperature 0 samples the
grpo --evaluation.samples_per_task 0
grpo --evaluation.samples_per_task 129
grpo --evaluation.samples_per_task 1.5
"""


class TestKnobsWithoutEffect:
    @pytest.mark.parametrize("row", REFUSED.strip().splitlines())
    def test_is_refused_when_set(self, run_file, row):
        given, _, named = row.partition(" -> ")
        base, *overrides = shlex.split(given)
        message = refusal(run_file(BASES[base]), *overrides)
        last = [override for override in overrides if override.startswith("--")][-1]
        assert (named or last.removeprefix("--")) in message
        assert "\n" not in message

    def test_names_the_flag_or_the_line(self, run_file):
        path = run_file(with_line('arguments.kl_estimator = "k1"', "[algorithm]"))
        assert refusal(path).endswith("(run.toml:8)")
        flag = "--algorithm.arguments.kl-estimator"
        assert refusal(run_file(), flag, "k1").endswith(f"({flag})")

    @pytest.mark.parametrize("name", ArgumentsConfig.model_fields)
    def test_a_key_of_before_is_refused_with_the_argument(self, run_file, name):
        hint = f"did you mean algorithm.arguments.{name}?"
        for sentence in (
            refusal(run_file(with_line(f"{name} = 2", "[algorithm]"))),
            refusal(run_file(), f"--algorithm.{name}", "2"),
            refusal(run_file(), f"--algorithm.no-{name}"),
        ):
            assert hint in sentence
            assert "\n" not in sentence
        tables = tomllib.loads(with_line(f"{name} = 2", "[algorithm]"))
        with pytest.raises(ConfigError, match=re.escape(f"{hint} (Python call)")):
            load_settings(tables)

    def test_the_former_key_of_processes_is_refused_with_the_new_one(self, run_file):
        for sentence in (
            refusal(run_file(with_line("apart = true", "[environment]"))),
            refusal(run_file(), "--environment.apart"),
            refusal(run_file(), "--environment.no-apart"),
        ):
            assert "did you mean environment.processes?" in sentence

    def test_arguments_of_nobody_are_refused(self, run_file):
        file = run_file(with_line("arguments.best_off = 2", "[algorithm]"))
        says = "algorithm.arguments.best_off is not a known key: did you mean algorithm.arguments.best_of? (run.toml:8)"
        assert refusal(file) == says
        assert "did you mean algorithm.kl_coef?" in refusal(run_file(), "--algorithm.arguments.kl_coef", "0.1")
        overrides = ["--algorithm.hooks", "own", "--algorithm.arguments.best_off", "2"]
        assert load_config(run_file(), overrides).config.algorithm.arguments.model_extra == {"best_off": 2}
        assert "(--algorithm.arguments.best_of)" in refusal(run_file(), "--algorithm.arguments.best_of", "0")
        sft = ("--algorithm.kind", "sft", "--algorithm.arguments.best_of", "2")
        assert "algorithm.arguments applies to grpo, not to sft" in refusal(run_file(), *sft)

    def test_lora_is_a_section_of_its_own(self, run_file):
        assert load_config(run_file()).config.lora is None
        lora = load_config(run_file(), ["--lora.rank", "8", "--lora.path", "a"]).config.lora
        assert (lora.rank, lora.alpha, lora.target_modules) == (8, 32.0, "all-linear")
        assert lora.path == str(Path.cwd() / "a")
        text = MINIMAL + '[lora]\ntarget_modules = ["q_proj", "v_proj"]\n'
        assert load_config(run_file(text)).config.lora.target_modules == ("q_proj", "v_proj")

    def test_may_be_set_when_it_has_one(self, run_file):
        overrides = ["--algorithm.kl_coef", "0.1", "--algorithm.arguments.kl_estimator", "k1"]
        assert load_config(run_file(), overrides).config.algorithm.arguments.kl_estimator == "k1"

    def test_every_key_of_a_section_is_told(self, run_file):
        text = SFT + "[sampling]\ntop_k = 3\ntop_p = 0.5\n"
        assert len(refusal(run_file("evaluation = false\n" + text)).splitlines()) == 2
        assert len(load_config(run_file(text), ["--no-evaluation"]).warnings) == 2


class TestSources:
    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (SFT_FROM_DATA.replace('"sft"', '"grpo"'), "environment.name is missing, and grpo needs tasks"),
            (SFT.replace(ENVIRONMENT, ""), "neither environment nor data"),
            ('evaluation = false\ndata = { path = "x" }\n' + SFT, "environment.name has no use when data is given"),
        ],
    )
    def test_each_algorithm_needs_one_it_can_use(self, run_file, text, said):
        assert said in refusal(run_file(text))

    def test_sft_from_data_has_no_evaluation(self, run_file):
        loaded = load_config(run_file(SFT_FROM_DATA))
        assert loaded.config.evaluation is None
        assert loaded.origins["evaluation"] == "default"
        assert not any(path.startswith("evaluation.") for path in loaded.origins)

    def test_evaluation_can_be_turned_off_and_on(self, run_file):
        off = run_file("evaluation = false\n" + MINIMAL)
        assert load_config(off).config.evaluation is None
        assert load_config(off).origins["evaluation"] == "run.toml:1"
        assert load_config(off, ["--evaluation"]).config.evaluation is not None
        on = load_config(off, ["--evaluation.every", "5"])
        assert on.config.evaluation is not None
        assert on.config.evaluation.every == 5
        assert load_config(run_file(), ["--no-evaluation"]).origins["evaluation"] == "command line"


class TestForcedAlgorithm:
    def test_fills_in_a_missing_kind(self, run_file):
        loaded = load_config(run_file(MINIMAL.replace('[algorithm]\nkind = "grpo"', "")), algorithm="sft")
        assert isinstance(loaded.config.algorithm, SFTConfig)
        assert loaded.origins["algorithm.kind"] == "command line"

    def test_agrees_with_the_file(self, run_file):
        assert load_config(run_file(SFT), algorithm="sft").origins["algorithm.kind"] == "run.toml:8"

    def test_refuses_another_kind(self, run_file):
        message = refusal(run_file(), algorithm="sft")
        assert message.startswith('algorithm.kind = "grpo" is not what `slipstream sft` does: run `slipstream train`')
        assert message.endswith("(run.toml:8)")

    def test_leaves_nonsense_to_the_schema(self, run_file):
        assert "is not a choice" in refusal(run_file(MINIMAL.replace('"grpo"', '"x"')), algorithm="sft")
        assert "not a table" in refusal(run_file("algorithm = 3\n" + MINIMAL[: MINIMAL.index("[alg")]), algorithm="sft")


class TestPaths:
    @pytest.fixture
    def elsewhere(self, tmp_path, monkeypatch):
        folder = tmp_path / "cwd"
        folder.mkdir()
        monkeypatch.chdir(folder)
        return folder

    def test_beside_the_run_file_comes_first(self, run_file, tmp_path, elsewhere):
        for base in (tmp_path, elsewhere):
            (base / "some" / "model").mkdir(parents=True)
        path = run_file()
        assert load_config(path).config.model.path == str(tmp_path / "some/model")
        assert load_config(path, ["--model.path", "some/model"]).config.model.path == str(elsewhere / "some/model")

    def test_then_the_current_folder(self, run_file, elsewhere):
        (elsewhere / "some" / "model").mkdir(parents=True)
        assert load_config(run_file()).config.model.path == str(elsewhere / "some/model")

    def test_a_hub_id_stays(self, run_file, elsewhere):
        assert load_config(run_file()).config.model.path == "some/model"

    def test_a_leading_dot_is_never_a_hub_id(self, run_file, tmp_path, elsewhere):
        path = run_file(MINIMAL.replace("some/model", "./some/model"))
        assert load_config(path).config.model.path == str(tmp_path / "some/model")
        (elsewhere / "some/model").mkdir(parents=True)
        assert load_config(path).config.model.path == str(elsewhere / "some/model")

    @pytest.mark.parametrize("suffix", ["", ":Spelling"])
    def test_environment_files(self, run_file, tmp_path, elsewhere, suffix):
        text = MINIMAL.replace("reasoning_gym/spell_backward", f"envs/spelling.py{suffix}")
        path = run_file(text)
        (elsewhere / "envs").mkdir()
        (elsewhere / "envs/spelling.py").touch()
        assert load_config(path).config.environment.name == f"{elsewhere}/envs/spelling.py{suffix}"
        (tmp_path / "envs").mkdir()
        (tmp_path / "envs/spelling.py").touch()
        assert load_config(path).config.environment.name == f"{tmp_path}/envs/spelling.py{suffix}"

    def test_data_and_run_folder(self, run_file, tmp_path, elsewhere):
        (tmp_path / "rows.jsonl").touch()
        config = load_config(run_file(SFT_FROM_DATA + '[run]\nfolder = "runs/../runs/a"\n')).config
        assert config.data.path == str(tmp_path / "rows.jsonl")
        assert config.run.folder == elsewhere / "runs/a"

    def test_home(self, run_file):
        home = os.path.realpath(os.path.expanduser("~"))
        assert load_config(run_file(), ["--run.folder", "~/r"]).config.run.folder == Path(home) / "r"


def test_a_registry_is_a_path_or_a_bucket(run_file, tmp_path):
    text = MINIMAL.replace("reasoning_gym/spell_backward", "letters@0123456789ab")

    def registry(address):
        file = run_file(with_line(f'registry = "{address}"', "[environment]", text))
        return load_config(file).config.environment.registry

    assert registry("kept") == str(tmp_path / "kept")
    assert registry("s3://bucket/team/rl") == "s3://bucket/team/rl"
    for address, expected in (
        ("s3:/bucket", "environment.registry = 's3:/bucket' is neither a folder nor an address"),
        ("s3://bucket/../x", "environment.registry = 's3://bucket/../x' is neither a folder nor an address"),
        ("s3://me:hunter2@bucket", "environment.registry has '@', '?' or ':' in it"),
        ("a\\u0000b", "environment.registry = "),
    ):
        with pytest.raises(ConfigError) as caught:
            registry(address)
        assert expected in str(caught.value)
        assert "(run.toml:" in str(caught.value)
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "given", "more"),
    [
        ("environment.variables", '["JUDGE_KEY=SECRET"]', ()),
        ("teacher.key_variable", "sk-SECRET", ("--teacher.url", "http://h/v1")),
        (
            "redis.password_variable",
            "SECRET word",
            ("--run.streams", "redis", "--redis.url", "redis://127.0.0.1:6379/0"),
        ),
    ],
)
def test_a_key_in_place_of_its_variables_name_is_not_shown(run_file, setting, given, more):
    with refuses(setting) as caught:
        load_config(run_file(), (f"--{setting}", given, *more))
    assert "SECRET" not in str(caught.value)


def test_loading_changes_nothing_on_disk(run_file, tmp_path):
    path = run_file()
    load_config(path, ["--run.folder", str(tmp_path / "new")])
    assert list(tmp_path.iterdir()) == [path]
