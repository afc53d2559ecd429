"""The reward `code`: rows' tests in all forms, what counts as passed, and programs that fake it."""

import json
import textwrap
import time

import pytest

from slipstream.config.schema import EnvironmentConfig
from slipstream.envs.base import RewardFailed
from slipstream.envs.registry import load_environment
from slipstream.envs.rewards import Options, named
from slipstream.envs.rewards import code_tests as code_module
from slipstream.envs.rewards.code_harness import decode, encode, unknown_names
from slipstream.envs.rewards.code_tests import Code, program_of, read_tests, same_output
from slipstream.envs.rewards.contract import Checked
from slipstream.envs.rewards.sandbox import Limits, why_not
from slipstream.envs.scoring.pool import ScorerPool
from slipstream.errors import ConfigError, DataError
from slipstream.records import Message, Task

SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
ADD = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, [7]]}
MBPP = ["assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]", "assert add('a', 'b') == 'ab'"]
HUMAN = {
    "entry_point": "add",
    "test": "METADATA = {}\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n    for n in range(50):\n"
    "        assert abs(candidate(n, 0.5) - n - 0.5) < 1e-6\n",
}
RIGHT = "def add(a, b):\n    return a + b\n"
pytestmark = pytest.mark.skipif(bool(why_not(Limits())), reason="no namespaces here")


def task(tests):
    return Task("t", (Message("user", "Write it"),), None, {"ground_truth": tests})


@pytest.fixture(scope="module")
def code():
    return Code(Options(code={"timeout_s": 60.0}, reward_timeout_s=200.0))


def passed(code, tests, program):
    score = code(task(tests), textwrap.dedent(program))
    assert score.reward == float(score.metrics["tests_passed"] == 1.0)
    return score.metrics["tests_passed"]


@pytest.mark.parametrize("tests", [ADD, MBPP, HUMAN, json.dumps(ADD), json.dumps(MBPP), "\n".join(MBPP)])
def test_right_and_wrong_functions(code, tests):
    assert passed(code, tests, RIGHT) == 1.0
    assert passed(code, tests, f"Here:\n```python\n{RIGHT}```\nDone.") == 1.0
    assert passed(code, tests, "def add(a, b):\n    return None") == 0.0
    assert passed(code, tests, "this is no program") == 0.0
    assert code(task(tests), "<think>never ends").metrics == {"unclosed_thinking": 1.0}
    assert code(task(tests), f"<think>```\nx\n```</think>\n{RIGHT}").reward == 1.0


def test_programs_that_read_and_print(code):
    assert passed(code, SUMS, "a, b = map(int, input().split())\nprint(a + b)") == 1.0
    assert passed(code, SUMS, "if __name__ == '__main__':\n    print(sum(map(int, input().split())), '  ')") == 1.0
    assert passed(code, SUMS, "print(3)") == 0.5
    assert passed(code, SUMS, "print(3)\nraise SystemExit(1)") == 0.0
    lines = {"inputs": [["2", "5"]], "outputs": [["5", "2"]]}
    assert passed(code, lines, "a, b = input(), input()\nprint(b)\nprint(a)") == 1.0


def test_methods_of_a_class_and_arguments_as_text(code):
    tests = {"fn_name": "add", "inputs": ["[1]\n[2, 3]"], "outputs": ["[1, 2, 3]"]}
    assert passed(code, tests, "class Solution:\n    def add(self, a, b):\n        return tuple(a + b)") == 1.0


def test_setup_of_mbpp_and_values_of_many_kinds(code):
    tests = {
        "test_setup_code": "import math\nclass Pair(dict): pass",
        "test_list": [
            "assert f(1) == (1, {2}, frozenset([3]), b'4', 5j, None, True)",
            "assert math.isclose(f(2)[0], 2.0)",
            "assert sorted(f(x)[0] for x in range(3)) == [0, 1, 2]",
        ],
    }
    assert passed(code, tests, "def f(x): return x, {2}, frozenset([3]), b'4', 5j, None, True") == 1.0
    tests = ["try:\n    f(0)\n    assert False, 'no error'\nexcept ZeroDivisionError:\n    pass", "assert f(1) == 1"]
    assert passed(code, tests, "def f(x): return 1 // x") == 1.0


FAKES = {
    "exits": "import sys\nsys.exit(0)",
    "exits hard": "import os\nos._exit(0)",
    "exits in the function": "import os\ndef add(a, b): os._exit(0)",
    "kills itself": "import os\nos.kill(os.getpid(), 9)",
    "says what the harness says": """
        import os
        for fd in range(64):
            try:
                os.write(fd, b'{"passed": [true, true, true]}\\n{"value": 3}\\n')
            except OSError:
                pass
        os._exit(0)
    """,
    "equals everything": """
        class Any:
            __eq__ = lambda self, other: True
            __ne__ = __lt__ = __gt__ = lambda self, other: False
            __sub__ = __rsub__ = __abs__ = lambda self, *_: self
        def add(a, b): return Any()
    """,
    "patches builtins": """
        import builtins, json, operator
        class Yes(int):
            def __eq__(self, other): return True
        builtins.int = builtins.abs = builtins.all = Yes
        json.dumps = lambda *_, **__: '{"passed": [true, true, true]}'
        def add(a, b): return Yes(17)
    """,
    "says that there is no sandbox": "import os\nos.write(2, b'sandbox: forged')\nos._exit(125)",
    "reports that there is no sandbox": """
        import os
        for fd in range(64):
            try:
                os.write(fd, b"forged")
            except OSError:
                pass
        os._exit(125)
    """,
    "ends the values": "def add(a, b): raise StopIteration",
    "raises what passes": "class E(BaseException): pass\ndef add(a, b): raise E",
    "looks for what is expected": """
        import gc, os, sys
        def add(a, b):
            found = []
            frame = sys._getframe()
            while frame:
                found += [str(value) for value in frame.f_locals.values()]
                frame = frame.f_back
            text = " ".join(found) + " ".join(str(each) for each in gc.get_objects() if type(each) is dict)[:1 << 20]
            for folder in ("/work", "/tmp", "/proc", "/"):
                for name in os.listdir(folder) if os.path.isdir(folder) else ():
                    try:
                        text += open(os.path.join(folder, name)).read()
                    except OSError:
                        pass
            return "found" if str(987653 + 1) in text else 0
    """,
}


def test_the_end_of_an_iteration_is_no_way_through_a_test(code):
    tests = ["assert all(map(add, [1, 2], [3, 4]))", "assert not any(add(n, n) for n in range(3))"]
    assert passed(code, tests, FAKES["ends the values"]) == 0.0
    assert passed(code, tests[:1], "def add(a, b): return a + b") == 1.0


@pytest.mark.parametrize("fake", FAKES)
@pytest.mark.parametrize("tests", [ADD, MBPP, HUMAN, SUMS], ids=["calls", "mbpp", "humaneval", "runs"])
def test_success_cannot_be_faked(code, tests, fake):
    assert passed(code, tests, FAKES[fake]) == 0.0


def test_what_is_expected_is_not_where_the_program_is(code):
    finds = FAKES["looks for what is expected"]
    told = 'assert add("find", "it") == "found"'
    assert passed(code, [told, "assert add(1, 2) == 987654"], finds) == 0.0
    assert passed(code, {"fn_name": "add", "inputs": [[1, 2], [1, 3]], "outputs": ["found", 987654]}, finds) == 0.0
    # The search works: it finds the same number in an argument.
    assert passed(code, [told.replace('"it"', "987654")], finds) == 1.0


def test_a_program_that_hangs_costs_its_deadline():
    start, code = time.monotonic(), Code(Options(code={"timeout_s": 1.0}))
    assert passed(code, MBPP, "def add(a, b):\n    while a == 1: pass\n    return a + b") == pytest.approx(2 / 3)
    assert passed(code, ADD, "while True: pass") == 0.0
    assert time.monotonic() - start < 60
    quick = Code(Options(code={"timeout_s": 0.5, "total_s": 0.8}))
    start = time.monotonic()
    assert passed(quick, {"inputs": ["1"] * 50, "outputs": ["1"] * 50}, "while True: pass") == 0.0
    assert time.monotonic() - start < 20, "50 runs would take 25 s"


def test_only_the_first_tests_if_so_set():
    code = Code(Options(code={"max_tests": 1}))
    assert passed(code, SUMS, "print(3)") == 1.0
    assert passed(code, MBPP, "def add(a, b): return 3") == 1.0


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("print(1)", "print(1)"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("a\n```py\nx\n```\nb\n```python\ny\n```\nend", "y\n"),
        ("```python\nprint(1)", "print(1)"),
        ("```python\nx\n```\nthen\n```python\ny", "y"),
        ("  ```python\n  x\n  ```", "  x\n"),
    ],
)
def test_the_program_in_an_answer(answer, program):
    assert program_of(answer) == program


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ("1 2\n", "1 2", True),
        ("1 2 \n\n", "1 2", True),
        ("1  2", "1 2", True),
        ("1\n2", "1 2", False),
        ("0.30000001", "0.3", True),
        ("0.31", "0.3", False),
        ("3.0", "3", False),
        ("3", "3.0", True),
        ("yes", "Yes", False),
        ("", "", True),
        ("nan", "1.0", False),
        ("0", "0.0000004", False),
        ("0", "4e-7", False),
        ("0.0000004", "4e-7", True),
        ("1e-17", "0.0", True),
        ("0.3333333333", "0.333333", True),
        ("0.333", "0.333333", False),
        ("0.00001", "0.0", False),
        ("123456789.4", "123456789.0", True),
        ("-0.5", "0.5", False),
        ("inf", "1e400", False),
        ("1e400", "inf.e", False),
    ],
)
def test_outputs_that_are_the_same(ours, theirs, same):
    assert same_output(ours, theirs) is same


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"inputs": ["1"]}, "the answer has the keys inputs"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [], "outputs": []}, "0 inputs and 0 outputs"),
        ("{nothing", "the answer is no JSON"),
        ('{"inputs": ' + "[" * 100_000, "the answer is no JSON"),
        ({"fn_name": "f", "inputs": ["[" * 100_000], "outputs": ["1"]}, "are no JSON"),
        (17, "the answer 17 is a int"),
        ([], "the assertions"),
        (["assert f(1"], "is no Python"),
        (["x = 1"], "call no function of the program"),
        ("null", "assert nothing"),
        (["add(1, 2) == 3"], "assert nothing"),
        ({"test": "def check(candidate):\n    candidate(1, 2)", "entry_point": "add"}, "assert nothing"),
        ({"test": "def check(c):\n    assert c(1)", "entry_point": "Solution().add"}, "is no name of a function"),
        ({"fn_name": 5, "inputs": [[1]], "outputs": [1]}, "is no name of a function"),
        ({"fn_name": "f", "inputs": [1], "outputs": [1]}, "arguments 1 are a int, not a list"),
        ({"fn_name": "f", "inputs": ["x"], "outputs": [1]}, "are no JSON"),
    ],
)
def test_tests_that_cannot_be_read_are_found_before_the_run(code, answer, said):
    with pytest.raises(ValueError, match=said):
        read_tests(answer)
    with pytest.raises(DataError, match=rf"row 3 of x.jsonl: .*{said}.*give "):
        code.check([Checked("row 3 of x.jsonl", task(answer))])


def test_assertions_whose_setup_raises_are_a_failure_not_a_zero(code):
    with pytest.raises(RewardFailed, match="setup of the row's assertions raised ModuleNotFoundError"):
        code(task({"test_setup_code": "import nowhere", "test_list": MBPP}), RIGHT)


def test_names_that_tests_leave_to_the_program():
    source = (
        "import math as m\ndef check(c):\n    for x in range(3):\n        assert c(x) == helper(m.pi)\ncheck(candidate)"
    )
    assert unknown_names(source) == ["candidate", "helper"]


def test_values_travel_unchanged_or_not_at_all():
    values = [None, True, -(10**30), 1.5, "é\n", b"\0", (1, [2, {3: (4,)}]), {(1, 2): {5}}, frozenset(), 1j]
    assert [decode(json.loads(json.dumps(encode(value)))) for value in values] == values
    assert [type(decode(encode(value))) for value in values] == [type(value) for value in values]
    with pytest.raises(TypeError, match="a object is no plain value"):
        encode([object()])


def test_without_namespaces_it_refuses_unless_told(monkeypatch):
    monkeypatch.setattr(code_module, "why_not", lambda limits: "unshare: no" if limits.namespaces else "")
    with pytest.raises(ConfigError, match=r'no namespaces for one \(unshare: no\).*sandbox = "limits"'):
        named("code")
    weaker = named("code", Options(sandbox="limits"))
    assert weaker(task(SUMS), "print(sum(map(int, input().split())))").reward == 1.0
    assert weaker(task(MBPP), RIGHT).reward == 1.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (Options(code={"timeout": 1}), "unknown field `timeout`: it has timeout_s"),
        (Options(code={"memory_mib": 0}), "a limit that is not greater than 0"),
        (Options(code={"total_s": 30}), "total_s = 30 is not below environment.reward_timeout_s = 10"),
    ],
)
def test_wrong_settings(options, said):
    with pytest.raises(ConfigError, match=said):
        named("code", options)


async def test_rows_with_tests_in_workers(tmp_path, monkeypatch):
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    rows = [{"question": f"Sum {n}", "answer": json.dumps(SUMS)} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"path": str(tmp_path / "rows.jsonl"), "reward": "code", "code": {"timeout_s": 1.0}}
    config = EnvironmentConfig(name="rows", settings=settings)
    environment = load_environment(config)
    found = environment.tasks("train", 5)
    assert [environment.gold(each) for each in found] == [None] * 5
    async with ScorerPool(config) as scorer:
        for _ in range(10):  # on a busy machine a second may be too short for it
            score = await scorer.score(found[0], "```python\nprint(sum(map(int, input().split())))\n```")
            if score.reward:
                break
        assert score.metrics == {"tests_passed": 1.0, "runs": 1.0}
        assert (await scorer.score(found[0], "while True: pass")).reward == 0.0
    assert not list(temporary.glob("slipstream-sandbox-*"))
