import os
from pathlib import Path

import pytest

from slipstream.config import RLConfig, SFTConfig, load_config
from slipstream.errors import ConfigError

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
        (
            "learning_rate = -1",
            "training.learning_rate = -1 must be greater than 0: use a number greater than 0 and at most 1 or",
        ),
        (
            'prompts_per_batch = "8"',
            'training.prompts_per_batch = "8" is a text: use a positive whole number (run.toml:11)',
        ),
        (
            "prompts_per_batch = true",
            "training.prompts_per_batch = true is a flag: use a positive whole number (run.toml:11)",
        ),
        (
            "prompts_per_batch = 1e3",
            "training.prompts_per_batch = 1000.0 is a number with a decimal point: "
            "use a positive whole number (run.toml:11)",
        ),
        ("packing = 1", 'training.packing = 1 is a whole number: use true, false or "auto" (run.toml:11)'),
        (
            'schedule = "cosin"',
            'training.schedule = "cosin" is not a choice: did you mean "cosine"? '
            'It takes "constant", "linear" or "cosine" (run.toml:11)',
        ),
        (
            'micro_batch_tokens = "lots"',
            'training.micro_batch_tokens = "lots" is a text: use a positive whole number or "auto" (run.toml:11)',
        ),
        (
            "micro_batch_tokens = 0",
            "training.micro_batch_tokens = 0 must be greater than 0: "
            'use a positive whole number or "auto" (run.toml:11)',
        ),
        (
            "adam_beta1 = 1.0",
            "training.adam_beta1 = 1.0 must be less than 1: use a number of at least 0 and less than 1 (run.toml:11)",
        ),
        (
            "learning_rate = inf",
            "training.learning_rate = inf is not a finite number: use a number greater than 0 and at most 1 or",
        ),
        (
            "learning_rate = nan",
            "training.learning_rate = nan is not a finite number: use a number greater than 0 and at most 1 or",
        ),
        ("learning_rate = 2020-01-01", "is a date or time: use a number greater than 0 and at most 1 or"),
        (
            "learning_rate = [1]",
            "training.learning_rate = [1] is a list: use a number greater than 0 and at most 1 or",
        ),
        (
            "lerning_rate = 1",
            "training.lerning_rate is not a known key: did you mean training.learning_rate? (run.toml:11)",
        ),
        ("actor_lr = 1", "training.actor_lr is not a known key: did you mean training.learning_rate? (run.toml:11)"),
        (
            "group_size = 4",
            "training.group_size is not a known key: did you mean algorithm.group_size? (run.toml:11)",
        ),
        ("zzz = 4", "training.zzz is not a known key: [training] has steps, "),
    ],
)
def test_one_wrong_line_is_one_sentence(run_file, line, expected):
    message = refusal(run_file(with_line(line)))
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MINIMAL.replace("steps = 20", ""), "training.steps is missing: set it to a positive whole number, "),
        (MINIMAL.replace('[model]\npath = "some/model"', ""), "model.path is missing: "),
        (
            MINIMAL.replace("[model]", "[modle]"),
            "modle is not a known section: did you mean the section [model]?",
        ),
        (MINIMAL.replace('kind = "grpo"', ""), 'algorithm.kind is missing: set it to "sft", "grpo",'),
        (
            MINIMAL.replace('[algorithm]\nkind = "grpo"', ""),
            'algorithm.kind is missing: set it to "sft", "grpo",',
        ),
        (
            MINIMAL.replace('"grpo"', '"gpro"'),
            'algorithm.kind = "gpro" is not a choice: did you mean "grpo"?',
        ),
        (MINIMAL.replace('"grpo"', "3"), "algorithm.kind = 3 is a whole number: use"),
        (
            "weights = 3\n" + MINIMAL,
            "weights = 3 is not a table: write [weights] and its keys below it (run.toml:1)",
        ),
        ("evaluation = true\n" + MINIMAL, "evaluation = true is not a table: write [evaluation]"),
        ("steps = 3\n" + MINIMAL, "steps is not a known section: did you mean training.steps? (run.toml:1)"),
        (MINIMAL + "[[weights]]\nbridge = 'disk'\n", "is not a table: write [weights]"),
        (
            MINIMAL.replace("steps = 20", "step = 20"),
            "training.step is not a known key: did you mean training.steps?",
        ),
        (MINIMAL.replace('"some/model"', '" "'), "model.path = "),
        (MINIMAL.replace('"some/model"', "3"), "model.path = 3 is a whole number: use a text"),
        (
            MINIMAL + '[sampling]\nstop = ["a", 3]\n',
            "sampling.stop[1] = 3 is a whole number: use a list of texts",
        ),
        (MINIMAL + '[sampling]\nstop = [""]\n', "sampling.stop has an empty text"),
        (MINIMAL + "[sampling]\ntop_k = 1\n", "no signal"),
        (MINIMAL + "[inference]\noptions.max-model-len = 3\n", "set inference.max_model_len instead"),
        (
            MINIMAL + "[inference]\nmax_model_len = 10\n[sampling]\nmax_tokens = 10\n",
            "leaves no room for a prompt",
        ),
        (
            MINIMAL + "[weights]\nprobe_warn = 0.1\nprobe_stop = 0.05\n",
            "weights.probe_stop = 0.05 is not above weights.probe_warn",
        ),
        (MINIMAL + "[run]\nfolder = 3\n", "run.folder = 3 is a whole number: use a path"),
        (
            MINIMAL.replace("[algorithm]", "settings = 5\n[algorithm]"),
            "environment.settings = 5 is a whole number",
        ),
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
    assert {line.split()[0] for line in lines} == {
        "--smapling.top_k",
        "training.lr",
        "training.learning_rate",
        "training.steps",
        "sampling.top_p",
    }


class TestKnobsWithoutEffect:
    @pytest.mark.parametrize(
        ("text", "overrides", "expected"),
        [
            (
                SFT,
                ["--algorithm.group_size", "4"],
                "algorithm.group_size applies to grpo, not to sft: remove it",
            ),
            (
                MINIMAL,
                ["--algorithm.train_on", "last"],
                "algorithm.train_on applies to sft, not to grpo: remove it",
            ),
            (
                MINIMAL,
                ["--algorithm.kl_estimator", "k3"],
                "has no effect while algorithm.kl_coef is 0: remove it",
            ),
            (
                MINIMAL,
                ["--algorithm.importance_sampling", "none", "--algorithm.importance_cap", "2.0"],
                'importance_cap has no effect while algorithm.importance_sampling is "none": remove it',
            ),
            (
                MINIMAL,
                ["--algorithm.loss", "policy_gradient", "--algorithm.clip_low", "0.1"],
                'clip_low has no effect on algorithm.loss = "policy_gradient", which clips nothing: remove it',
            ),
            (
                MINIMAL,
                ["--algorithm.kind", "gspo", "--algorithm.clip_dual", "3"],
                'clip_dual has no effect on algorithm.loss = "gspo", only on "clip": remove it',
            ),
            (MINIMAL, ["--algorithm.clip_dual", "1.2"], "clip_dual = 1.2 is not above 1 + clip_high = 1.28: use 3"),
            (MINIMAL, ["--algorithm.kl_in", "reward"], "has no effect while algorithm.kl_coef is 0: remove it"),
            (
                MINIMAL,
                ["--algorithm.old_policy", "engine", "--algorithm.importance_sampling", "masked"],
                'corrects what algorithm.old_policy = "engine" has in its ratio already',
            ),
            (
                MINIMAL,
                ["--algorithm.importance_floor", "2.0"],
                "importance_floor = 2 is not below algorithm.importance_cap = 2: lower the first",
            ),
            (MINIMAL, ["--algorithm.length_penalty", "0.1"], "set algorithm.reward_threshold"),
            (
                MINIMAL,
                ["--algorithm.kind", "distill", "--algorithm.max_refills", "9", "--teacher.path", "teacher"],
                "max_refills = 9 leaves out groups whose rewards agree, and under algorithm.advantage",
            ),
            (MINIMAL, ["--algorithm.best_of", "9"], "best_of = 9 is more than algorithm.group_size = 8"),
            (MINIMAL, ["--critic.gamma", "0.9"], 'critic.gamma has no effect without algorithm.advantage = "gae"'),
            (SFT, ["--critic.gamma", "0.9"], 'critic.gamma has no effect without algorithm.advantage = "gae"'),
            (PPO, ["--algorithm.scale_rewards", "std"], 'are not compared with other rewards: use "whiten" or "none"'),
            (MINIMAL, ["--training.overprovision", "0.5"], 'set training.order = "ready", or remove it'),
            (MINIMAL, ["--training.order", "data", "--training.overprovision", "0.5"], "last cancelled"),
            (PPO, ["--critic.warmup_steps", "20"], "critic.warmup_steps = 20 is not below training.steps = 20"),
            (
                MINIMAL,
                ["--algorithm.thinking_penalty", "2"],
                "has no effect while algorithm.thinking_budget is not set",
            ),
            (MINIMAL, ["--algorithm.group_size", "1"], "algorithm.group_size = 1 must be at least 2"),
            (MINIMAL, ["--algorithm.overlong_penalty", "2.0"], "has no effect while algorithm.overlong_buffer is 0"),
            (MINIMAL, ["--algorithm.kind", "rloo", "--data.path", "x"], "data.path applies to sft, not to rloo"),
            (SFT, ["--no-evaluation", "--sampling.top_k", "3"], "sampling.top_k has no effect under sft"),
            (
                SFT,
                ["--no-evaluation", "--inference.options.x", "3"],
                "inference.options.x has no effect under sft",
            ),
            (
                SFT,
                ["--no-evaluation", "--weights.bridge", "restart"],
                "weights.bridge has no effect under sft",
            ),
            (SFT, ["--no-evaluation", "--environment.reward_timeout_s", "3"], "has no effect under sft"),
            (SFT, ["--run.max_steps_without_signal", "3"], "applies to grpo, not to sft: remove it"),
            (
                'evaluation = false\ndata = { path = "x" }\n' + SFT,
                ["--training.steps", "3"],
                "environment.name has no use when data is given",
            ),
            (
                SFT,
                ["--data.path", "x", "--environment.num_train_tasks", "9"],
                "has no effect when data is given",
            ),
            (MINIMAL, ["--data.path", "x"], "data.path applies to sft, not to grpo"),
            (
                SFT_FROM_DATA,
                ["--evaluation.every", "5"],
                "evaluation needs an environment, and there is none",
            ),
            (SFT_FROM_DATA, ["--evaluation"], "evaluation needs an environment, and there is none"),
            (SFT_FROM_DATA + "[evaluation]\n", [], "evaluation needs an environment, and there is none"),
            (MINIMAL, ["--training.warmup_steps", "20"], "use at most 19"),
            (
                MINIMAL,
                ["--weights.bridge", "lora"],
                "there is no [lora]: set lora.rank",
            ),
            (
                MINIMAL,
                ["--weights.bridge", "single_copy", "--inference.tensor_parallel_size", "2"],
                "training.ranks = 1 and inference.tensor_parallel_size = 2: make them equal",
            ),
            (MINIMAL, ["--training.ranks", "2", "--training.optimizer", "muon"], 'use "adamw" or "adamw_bf16"'),
            (MINIMAL, ["--training.ranks", "2", "--training.optimizer", "adamw_8bit"], "in blocks of 256"),
            (MINIMAL, ["--training.ranks", "2", "--weights.bridge", "single_copy"], "make them equal, or use another"),
            (
                MINIMAL,
                [
                    "--weights.bridge",
                    "single_copy",
                    "--lora.rank",
                    "4",
                    "--training.ranks",
                    "2",
                    "--inference.tensor_parallel_size",
                    "2",
                ],
                "shares the base with one process",
            ),
            (MINIMAL, ["--training.ranks", "2", "--lora.rank", "4", "--weights.bridge", "disk"], 'use "lora", or one'),
            (MINIMAL, ["--training.rank_timeout_s", "9"], "has no effect while training.ranks is 1"),
            (
                MINIMAL,
                ["--weights.bridge", "single_copy", "--run.placement", "separate"],
                'has them share one memory: use "shared", or another bridge',
            ),
            (
                MINIMAL,
                ["--weights.bridge", "single_copy", "--inference.sleep", "true"],
                "which are the trainer's under weights.bridge",
            ),
            (
                MINIMAL,
                ["--weights.bridge", "restart", "--weights.delta", "true"],
                'weights.bridge = "restart" starts the engine on whole versions: remove it, or set',
            ),
            (
                MINIMAL,
                ["--lora.rank", "8", "--weights.delta", "true"],
                'weights.bridge = "lora" publishes the adapter alone',
            ),
            (MINIMAL, ["--lora.rank", "8", "--lora.path", ""], 'lora.path = "" is empty'),
            (MINIMAL, ["--lora.target_modules", '["q_proj", ""]'], "has an empty name: remove it"),
            (MINIMAL, ["--lora.rank", "0"], "lora.rank"),
            (MINIMAL, ["--inference.options.max_lora_rank", "8"], "set lora.rank instead"),
            (
                MINIMAL,
                ["--training.updates_per_batch", "5"],
                "does not divide training.prompts_per_batch = 32: use 4 or 8",
            ),
        ],
    )
    def test_is_refused_when_set(self, run_file, text, overrides, expected):
        message = refusal(run_file(text), *overrides)
        assert expected in message
        assert "\n" not in message

    def test_names_the_flag_or_the_line(self, run_file):
        path = run_file(with_line('kl_estimator = "k1"', "[algorithm]"))
        assert refusal(path).endswith("(run.toml:8)")
        assert refusal(run_file(), "--algorithm.kl-estimator", "k1").endswith("(--algorithm.kl-estimator)")

    def test_lora_is_a_section_of_its_own(self, run_file):
        assert load_config(run_file()).config.lora is None
        lora = load_config(run_file(), ["--lora.rank", "8", "--lora.path", "a"]).config.lora
        assert (lora.rank, lora.alpha, lora.target_modules) == (8, 32.0, "all-linear")
        assert lora.path == str(Path.cwd() / "a")
        text = MINIMAL + '[lora]\ntarget_modules = ["q_proj", "v_proj"]\n'
        assert load_config(run_file(text)).config.lora.target_modules == ("q_proj", "v_proj")

    def test_may_be_set_when_it_has_one(self, run_file):
        overrides = ["--algorithm.kl_coef", "0.1", "--algorithm.kl_estimator", "k1"]
        assert load_config(run_file(), overrides).config.algorithm.kl_estimator == "k1"

    def test_every_key_of_a_section_is_told(self, run_file):
        text = SFT + "[sampling]\ntop_k = 3\ntop_p = 0.5\n"
        assert len(refusal(run_file("evaluation = false\n" + text)).splitlines()) == 2
        assert len(load_config(run_file(text), ["--no-evaluation"]).warnings) == 2


class TestSources:
    def test_grpo_needs_an_environment(self, run_file):
        text = SFT_FROM_DATA.replace('"sft"', '"grpo"')
        assert "environment.name is missing, and grpo needs tasks" in refusal(run_file(text))

    def test_sft_needs_something(self, run_file):
        text = SFT.replace(ENVIRONMENT, "")
        assert "neither environment nor data" in refusal(run_file(text))

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
        return load_config(
            run_file(with_line(f'registry = "{address}"', "[environment]", text))
        ).config.environment.registry

    assert registry("kept") == str(tmp_path / "kept")
    assert registry("s3://bucket/team/rl") == "s3://bucket/team/rl"
    for address, expected in (
        ("s3:/bucket", "environment.registry = 's3:/bucket' is neither a folder nor a bucket of S3"),
        ("gs://bucket", "environment.registry = 'gs://bucket' is neither a folder nor a bucket of S3"),
        ("s3://bucket/../x", "environment.registry = 's3://bucket/../x' has a prefix that cannot be one"),
        ("s3://me:hunter2@bucket", "environment.registry has '@', '?' or ':' in it"),
        ("a\\u0000b", "environment.registry = "),
    ):
        with pytest.raises(ConfigError) as caught:
            registry(address)
        assert expected in str(caught.value)
        assert "(run.toml:" in str(caught.value)
        assert "hunter2" not in str(caught.value)


def test_loading_changes_nothing_on_disk(run_file, tmp_path):
    path = run_file()
    load_config(path, ["--run.folder", str(tmp_path / "new")])
    assert list(tmp_path.iterdir()) == [path]
