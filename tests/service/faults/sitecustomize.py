"""Python imports this at the start of every process of a test that has this folder on its path. Once, at the point
that FAULT names, the process kills itself, or its trainer runs out of memory."""

import os
import signal
import sys

POINT, MARK = os.environ.get("FAULT", ""), os.environ.get("FAULT_MARK", "")
SUPERVISOR = "slipstream.service.supervisor"
UPLOADS = "slipstream.service.uploads"
OF_SERVICE = ("decided", "launched")


def is_first():
    """Whether no process was here before."""
    try:
        os.close(os.open(MARK, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def die(point):
    if point == POINT and is_first():
        os.kill(os.getpid(), signal.SIGKILL)


def watch_updates():
    from slipstream.service import store

    real, calls = store.update, [0]

    def update(folder, change):
        calls[0] += 1
        if SUPERVISOR in sys.orig_argv:
            die({1: "before the claim", 2: "started"}.get(calls[0], ""))
        before = store.record_of(folder).state
        record = real(folder, change)
        if SUPERVISOR in sys.orig_argv:
            die({1: "claimed", 2: "its worker stored"}.get(calls[0], ""))
            die(record.state if record.state in ("running", "finalising") and record.state != before else "")
            die("concluded" if before == "finalising" else "")
        elif record.state == "preparing" and before == "queued":
            die("decided")
        return record

    store.update = update


def watch_launches():
    from slipstream.processes import launchers

    real = launchers.Local.launch

    def launch(self, module, *arguments, **options):
        child = real(self, module, *arguments, **options)
        if module == SUPERVISOR:
            die("launched")
        return child

    launchers.Local.launch = launch


def watch_uploads(also_parent):
    """Before and after a file is put, by the last part of its name."""
    import signal

    from slipstream.remote_files import RemoteFolder

    real = RemoteFolder.put

    def end(point):
        if point == POINT.removesuffix(" with its supervisor") and is_first():
            if also_parent:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    def put(self, file, name):
        end(f"before {name.rpartition('/')[2]}")
        digest = real(self, file, name)
        end(f"after {name.rpartition('/')[2]}")
        return digest

    RemoteFolder.put = put


def run_out_of_memory():
    import importlib.abc
    import importlib.machinery

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name != "slipstream.trainer.learner":
                return None
            sys.meta_path.remove(self)
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                real = module.Learner.forward_backward

                def forward_backward(learner, *args, **kwargs):
                    if learner.step >= 2 and is_first():
                        raise RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB")
                    return real(learner, *args, **kwargs)

                module.Learner.forward_backward = forward_backward

            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Finder())


if POINT == "memory" and "slipstream.service.worker" in sys.orig_argv:
    run_out_of_memory()
elif POINT == "no room":
    if UPLOADS in sys.orig_argv:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
elif (POINT.startswith(("before ", "after ")) and "." in POINT) or "DONE" in POINT:
    if UPLOADS in sys.orig_argv:
        watch_uploads(POINT.endswith("supervisor"))
elif POINT and POINT != "memory":
    watch_updates()
    watch_launches()
