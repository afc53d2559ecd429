"""Run files that nobody writes by hand: each is read, or refused in one sentence, in a time that grows with its
length."""

import time

import pytest

from slipstream.config import load_config
from slipstream.errors import ConfigError

from .conftest import MINIMAL

DEEP = 1500


def refusal(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert len(message) < 400, message
    return message


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (f"[environment.settings]\nx = {'9' * 5000}", "(run.toml:14)"),
        (f"[environment.settings]\nx = 0x{'f' * 5000}", "environment.settings.x is an integer of 20000 bits"),
        (f"[environment.settings]\nx = {'[' * DEEP}{']' * DEEP}", "too deeply"),
        (f"[environment.settings]\nx = {'{a=' * DEEP}1{'}' * DEEP}", "too deeply"),
        (f"[environment.settings]\n{'a.' * DEEP}b = 1", "environment.settings nests lists or tables too deeply"),
        (f"[run]\nseed = 0x{'f' * 5000}", "run.seed is an integer of 20000 bits"),
        (f"[critic]\nlearning_rate = 1{'0' * 400}", "critic.learning_rate is an integer of 1329 bits"),
        ('[run]\nfolder = "a\\u0000b"', "run.folder = \"a\\u0000b\" has a NUL character"),
        (f'[run]\nfolder = "{"x" * 300}"', "has a part of 300 bytes"),
        (f'[run]\nfolder = "{"x/" * 50_000}"', "has 99999 bytes"),
        ("[run]\nseed = -1", "run.seed = -1 must be at least 0"),
        ("[run]\nseed = 4294967296", "must be less than 4294967296"),
        ("[run]\nthreads = 100000", "run.threads = 100000 must be at most 1024"),
        ("[sampling]\ntemperature = 2.5", "must be at most 2"),
        ("[sampling]\ntemperature = 0.001", "must be at least 0.01"),
        ("[weights]\napply_timeout_s = 1e10", "must be at most 604800"),
        ("[inference]\nmax_model_len = 1", "= 1 holds no prompt with a completion: use at least 2"),
    ],
)  # fmt: skip
def test_what_no_run_could_use_is_one_sentence(run_file, extra, expected):
    assert expected in refusal(run_file(f"{MINIMAL}\n{extra}\n"))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("--environment.settings.x", "9" * 5000), "is too long a number or nested too deeply"),
        (("--environment.settings.x", "[" * DEEP + "]" * DEEP), "is too long a number or nested too deeply"),
        (("--environment.settings" + ".a" * DEEP, "1"), "parts: use at most 32"),
        (("--run.seed", "0x" + "f" * 5000), "run.seed is an integer of 20000 bits"),
        (("--environment.system-prompt", "\udcff"), "is not UTF-8 text: write it in the run file"),
    ],
)
def test_the_same_on_the_command_line(run_file, overrides, expected):
    assert expected in refusal(run_file(), *overrides)


def test_a_name_of_any_length_is_refused_shortly(run_file):
    for key, name in (("model", "path"), ("environment", "name")):
        old = "some/model" if key == "model" else "reasoning_gym/spell_backward"
        assert f"{key}.{name} = " in refusal(run_file(MINIMAL.replace(old, "x" * 100_000)))


def test_a_list_over_many_lines_takes_no_longer_than_its_length(run_file):
    lines = "\n".join(f'  "stop {number}",' for number in range(20_000))
    path = run_file(f"{MINIMAL}\n[sampling]\nstop = [\n{lines}\n]\ntop_k = 5\n[run]\nseed = 3\n")
    begin = time.process_time()  # whatever else the machine does
    loaded = load_config(path)
    assert time.process_time() - begin < 10
    assert loaded.origins["sampling.top_k"] == "run.toml:20016"
    assert loaded.origins["run.seed"] == "run.toml:20018"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_every_key_has_its_line_whatever_characters_come_before(run_file, end):
    odd = "\u2028\u2029\x85"
    head = f'''# {odd} "[ {{
[environment]
system_prompt = "{odd} # \\" ["
settings.a = """
[run]
seed = 9 \\""""" # ] }}
settings.b = [ # "
  {{ c = ']' }}, '{odd}',
]
settings."d ]" = \'\'\'
''\'\'\'
'''
    text = head + "[run]\nseed = 5\n" + MINIMAL.replace("[environment]\nname =", "[x]\ny =")
    text = text.replace("[x]\n", "").replace('y = "reasoning_gym/spell_backward"', "")
    text = text.replace("system_prompt", 'name = "reasoning_gym/spell_backward"\nsystem_prompt')
    path = run_file()
    path.write_bytes(text.replace("\n", end).encode())
    origins = load_config(path).origins
    assert origins["environment.system_prompt"] == "run.toml:4"
    assert origins["environment.settings.a"] == "run.toml:5"
    assert origins["environment.settings.b"] == "run.toml:8"
    assert origins['environment.settings."d ]"'] == "run.toml:11"
    assert origins["run.seed"] == "run.toml:14"


def test_a_file_without_an_end_is_not_read_to_it():
    assert "is larger than 4 MiB" in refusal("/dev/zero")


class TestCommandLineTakesEffectAway:
    """A key of the file that the command line leaves without effect is told; one that the file itself does, refused."""

    def test_a_key_of_the_file(self, run_file):
        path = run_file(MINIMAL + 'ranks = 2\nreshard = "step"\n')
        assert load_config(path).warnings == ()
        loaded = load_config(path, ["--training.ranks", "1"])
        assert loaded.warnings == ("training.reshard has no effect while training.ranks is 1 (run.toml:13)",)

    def test_a_section_of_the_file(self, run_file):
        path = run_file(MINIMAL.replace('"grpo"', '"sft"') + "[sampling]\ntop_k = 5\n")
        assert "sampling.top_k has no effect" in load_config(path, ["--no-evaluation"]).warnings[0]

    def test_another_algorithm(self, run_file):
        path = run_file(MINIMAL.replace('"grpo"', '"grpo"\ngroup_size = 4'))
        (warning,) = load_config(path, ["--algorithm.kind", "sft"]).warnings
        assert "algorithm.group_size applies to grpo, not to sft" in warning

    def test_what_the_file_does_itself_is_an_error(self, run_file):
        path = run_file(MINIMAL + 'reshard = "step"\n')
        assert "training.reshard has no effect" in refusal(path, "--training.ranks", "1")

    def test_a_flag_without_effect_is_an_error(self, run_file):
        assert "training.reshard has no effect" in refusal(run_file(), "--training.reshard", "step")

    def test_one_node_takes_effect_from_all_of_its_section_but_itself(self, run_file):
        path = run_file(MINIMAL + "[cluster]\nnodes = 1\n")
        assert load_config(path).warnings == ()
        assert "cluster.run_id has no effect while cluster.nodes is 1" in refusal(path, "--cluster.run_id", "a")
