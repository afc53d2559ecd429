"""The sandbox of the reward `code`: what programs try to get out of it, and what is left of them."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest
from tests.waiting import until

from slipstream.envs.rewards import sandbox as sandbox_module
from slipstream.envs.rewards import sandbox_child
from slipstream.envs.rewards.sandbox import Limits, Sandbox, SandboxFailed, why_not

NAMESPACES, LIMITS = Limits(memory_mib=256, folder_mib=16, output_mib=1), Limits(namespaces=False, memory_mib=256)
pytestmark = pytest.mark.skipif(bool(why_not(NAMESPACES)), reason=f"no namespaces here: {why_not(NAMESPACES)}")
both = pytest.mark.parametrize("limits", [NAMESPACES, LIMITS], ids=["namespaces", "limits"])


def run(program, limits=NAMESPACES, text=b"", seconds=60.0, cpu_s=5.0):
    with Sandbox({"main.py": textwrap.dedent(program)}, ["main.py"], limits, cpu_s) as sandbox:
        return sandbox.run(text, time.monotonic() + seconds)


def output(program, limits=NAMESPACES, **options):
    found = run(program, limits, **options)
    assert found.status == 0, found
    return found.output.decode().strip()


def processes(mark):
    """Processes of the whole machine that have `mark` in their command line."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if mark.encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                pass
    return found


@both
def test_a_program_runs(limits):
    found = run("import sys, math, json, random\nprint(sys.stdin.read()[::-1])", limits, text=b"hello")
    assert (found.output, found.status, found.errors) == (b"olleh\n", 0, b"")
    assert run("raise SystemExit(3)", limits).status == 3
    assert b"ZeroDivisionError" in run("1 / 0", limits).errors


@both
def test_it_sees_nothing_of_the_environment(limits, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "secret-key")
    assert "secret-key" not in output("import os; print(dict(os.environ))", limits)
    assert output("import sys; print(sys.flags.isolated, sys.flags.no_site)", limits) == "1 1"


@both
def test_its_folder_is_removed(limits, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    output("open('x', 'w').write('y'); import os; print(os.getcwd())", limits)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("family", ["inet", "unix", "abstract"])
def test_no_network(family, tmp_path):
    kind = socket.AF_INET if family == "inet" else socket.AF_UNIX
    with socket.socket(kind) as server:
        name = f"\0slipstream-test-{os.getpid()}" if family == "abstract" else str(tmp_path / "s")
        server.bind(("127.0.0.1", 0) if family == "inet" else name)
        server.listen()
        address = server.getsockname()
        program = f"""
            import socket
            try:
                socket.socket({int(kind)}).connect({address!r})
                print("connected")
            except OSError as error:
                print("refused")
        """
        assert output(program) == "refused"
        assert output(program, LIMITS) == "connected"  # what the name of the weaker limits says


def test_files_of_the_user_can_be_neither_read_nor_written(tmp_path):
    secret = tmp_path / "answers.json"
    secret.write_text("expected")
    program = f"""
        import os
        for path in ({str(secret)!r}, {str(tmp_path)!r}, "/etc/passwd", "/etc/shadow", {__file__!r}, "/proc/1/environ",
                     "/proc/self/environ", "/root/.ssh", "/home", "/sys/kernel", "/dev/mem", "/dev/sda"):
            if os.path.exists(path):
                print("sees", path)
        for path in ({str(secret)!r}, "/usr/lib/x", "/lib/x", os.__file__, "/dev/null/x", "/etc/x"):
            try:
                open(path, "r+" if os.path.exists(path) else "w").write("mine")
                print("wrote", path)
            except OSError:
                pass
        print("end")
    """
    written = output(program).split("\n")
    # `/etc` exists in the sandbox's own memory and goes with it.
    assert [line for line in written if line != "wrote /etc/x"] == ["end"]
    assert secret.read_text() == "expected"
    assert not Path("/etc/x").exists()
    assert not Path("/usr/lib/x").exists()


def test_no_way_back_through_parents_links_mounts_or_descriptors():
    program = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        found = []
        for flags in (0x10000000, 0x10020000, 0x20000, 0x40000000):
            found.append(libc.unshare(flags))
        found.append(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None))
        found.append(libc.mount(None, b"/usr/lib", None, 32 | 4096, None))
        found.append(libc.umount2(b"/usr/lib", 2))
        found.append(libc.chroot(b"/tmp"))
        found.append(libc.setuid(0))
        found.append(libc.ptrace(16, 1, 0, 0))
        for number in range(3, 64):
            try:
                found.append(f"fd {number} {os.readlink(f'/proc/self/fd/{number}')}")
            except OSError:
                pass
            try:
                os.fstat(number)
                found.append(f"fd {number}")
            except OSError:
                pass
        os.chdir("/")
        for _ in range(50):
            os.chdir("..")
        own = {"usr", "lib", "lib64", "etc", "dev", "work", "tmp", "root", "opt", "home"}  # of the sandbox
        print(found + sorted({*os.listdir(".")} - own))
    """
    assert output(program) == str([-1] * 10)


def test_no_process_of_the_machine_can_be_seen_or_signalled():
    with subprocess.Popen(["sleep", "600"]) as other:
        program = f"""
            import os
            found = [os.getpid() < 10]
            for pid in ({other.pid}, {os.getpid()}, 1):
                try:
                    os.kill(pid, 9)
                    found.append(pid)
                except OSError:
                    pass
            try:
                os.kill(-1, 9)
            except ProcessLookupError:
                found.append("nobody")
            print(found, flush=True)
        """
        found = run(program)
        other.poll()
        assert other.returncode is None
        other.kill()
    assert found.output in (b"[True, 1, 'nobody']\n", b"[True, 'nobody']\n")  # 1 is its own first, which lives on


@both
def test_a_daemon_does_not_outlive_it(limits):
    mark = f"slipstream-daemon-{os.getpid()}-{limits.namespaces}"
    program = f"""
        import os, sys, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.closerange(0, 3)
                os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(600)", {mark!r}])
            os._exit(0)
        time.sleep(0.3)
        print("started")
    """
    start = time.monotonic()
    assert output(program, limits) == "started"
    assert time.monotonic() - start < 50
    until(lambda: not processes(mark))


@both
def test_a_daemon_does_not_outlive_a_deadline_either(limits):
    mark = f"slipstream-late-{os.getpid()}-{limits.namespaces}"
    program = f"""
        import os, sys, time
        if os.fork() == 0:
            os.setsid()
            os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(600)", {mark!r}])
        print("here", flush=True)
        time.sleep(600)
    """
    for seconds in (1.5, 15.0, 60.0):  # on a busy machine it may not come so far at first
        found = run(program, limits, seconds=seconds)
        if found.output:
            break
    assert (found.status, found.reason, found.output) == (None, "deadline", b"here\n")
    until(lambda: not processes(mark))


def test_nothing_is_left_when_the_caller_is_killed(tmp_path):
    mark, folder = f"slipstream-orphan-{os.getpid()}", tmp_path / "temporary"
    folder.mkdir()
    program = f"""
        import time
        from slipstream.envs.rewards.sandbox import *
        text = "import os, sys\\ncommand = [sys.executable, '-S', '-c', 'import time; time.sleep(600)', {mark!r}]\\n"
        text += "os.execv(sys.executable, command)"
        with Sandbox({{"main.py": text}}, ["main.py"], Limits(), 5.0) as sandbox:
            print("up", flush=True)
            sandbox.run(b"", time.monotonic() + 600)
    """
    command, environment = [sys.executable, "-c", textwrap.dedent(program)], {**os.environ, "TMPDIR": str(folder)}
    caller = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path, env=environment)
    caller.stdout.readline()
    until(lambda: processes(mark))
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    until(lambda: not processes(mark))
    assert not list(folder.iterdir())


def test_a_fork_bomb_is_bounded_and_ends():
    program = """
        import os, time
        made = 0
        while True:
            try:
                if os.fork() == 0:
                    time.sleep(30)
                    os._exit(0)
                made += 1
            except OSError:
                break
        print(made)
    """
    limits = Limits(processes=12)
    start = time.monotonic()
    assert int(output(program, limits)) < 12
    found = run(
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass", limits, seconds=1.0
    )
    assert found.reason == "deadline"
    assert time.monotonic() - start < 28, "its processes would end after 30 s"
    # Sandboxes side by side do not take one another's processes.
    results = []
    threads = [threading.Thread(target=lambda: results.append(int(output(program, limits)))) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert all(number >= 8 for number in results)


@both
def test_memory_cpu_and_files_are_bounded(limits):
    assert b"MemoryError" in run("x = bytearray(2 << 30)", limits).errors
    assert run("while True: pass", limits, cpu_s=0.5).status in (128 + 9, 128 + 24), "and not its deadline"
    program = "f = open('x', 'wb')\nfor _ in range(200): f.write(bytes(1 << 20))"
    assert run(program, limits).status != 0


def test_all_files_together_are_bounded():
    program = """
        made = 0
        try:
            for number in range(100):
                with open(str(number), "wb") as file:
                    file.write(bytes(1 << 20))
                made += 1
        except OSError as error:
            print(made, error.strerror)
    """
    made, _, reason = output(program).partition(" ")
    assert int(made) < 16
    assert reason == "No space left on device"


@both
def test_endless_output_is_cut(limits):
    found = run("while True: print('y' * 1000)", limits)
    assert found.reason == "output"
    assert len(found.output) <= limits.output_mib * 2**20 + 65536
    for seconds in (1.0, 10.0, 60.0):
        found = run("import sys\nwhile True: sys.stderr.write('y' * 1000)", limits, seconds=seconds, cpu_s=100.0)
        if len(found.errors) == 4096:
            break
    assert (found.reason, len(found.errors)) == ("deadline", 4096)


@both
def test_input_that_nobody_reads_blocks_nothing(limits):
    assert output("print('no')", limits, text=b"x" * (1 << 20)) == "no"
    assert run("import time; time.sleep(600)", limits, text=b"x" * (1 << 20), seconds=1.0).reason == "deadline"


@both
def test_where_memory_ends_its_processes_go_first(limits):
    program = "print('here', flush=True); import time; time.sleep(600)"
    with Sandbox({"main.py": program}, ["main.py"], limits, 5.0) as sandbox:
        assert sandbox.receive(time.monotonic() + 60.0) == b"here"
        pids = [sandbox._process.pid]
        for pid in pids:
            pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        scores = {Path(f"/proc/{pid}/oom_score_adj").read_text() for pid in pids}
    assert len(pids) >= 2
    assert scores == {"1000\n"}


def test_a_sandbox_that_cannot_be_made_says_why(monkeypatch):
    monkeypatch.setattr(sandbox_module, "_readable", lambda: ["/nowhere/at/all"])
    with pytest.raises(SandboxFailed, match=r"mount|No such file"):
        run("print(1)")


@pytest.mark.parametrize("map_", ["1000 {} 1", "0 {} 1"])
def test_a_user_without_privileges_gets_user_namespaces(map_):
    """Also a root user who is root in a container only."""
    program = f"""
        import ctypes, os, sys
        map_ = {map_!r}.format(os.getuid())
        assert ctypes.CDLL(None).unshare(0x10000000) == 0
        open("/proc/self/setgroups", "w").write("deny")
        open("/proc/self/uid_map", "w").write(map_)
        open("/proc/self/gid_map", "w").write(map_)
        os.execv(sys.executable, [sys.executable, "-c", {INSIDE!r}])
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.stdout.split("\n")[:2] == ["", "65534 ['work', 'tmp'] refused"], found


INSIDE = """
import time
from slipstream.envs.rewards.sandbox import *

limits = Limits()
print(why_not(limits))
program = '''
import os, socket
writable = [name for name in ("work", "tmp", "usr/lib", "lib") if os.access("/" + name, os.W_OK)]
try:
    socket.create_connection(("127.0.0.1", 22), 1)
    told = "connected"
except OSError:
    told = "refused"
print(os.getuid(), writable, told)
'''
with Sandbox({"main.py": program}, ["main.py"], limits, 5.0) as sandbox:
    print(sandbox.run(b"", time.monotonic() + 60).output.decode())
"""


def test_the_child_imports_the_standard_library_only():
    names = {line.split()[1].split(".")[0] for line in Path(sandbox_child.__file__).read_text().splitlines()
             if line.startswith(("import ", "from "))}  # fmt: skip
    assert names <= {*sys.stdlib_module_names, "__future__"}
