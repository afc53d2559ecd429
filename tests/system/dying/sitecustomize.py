"""In the path of an engine that is to die by SIGKILL: `DIES_IN` is `handshake`, `transfer`, `generation` or `agent`,
and a number. With `second copy` it does not die: the second of two copies loads that version with one wrong value."""

import importlib.abc
import importlib.machinery
import os
import signal
import sys

PLACES = {
    "handshake": ("slipstream.weights.bridges.broadcast", "Group", "__init__"),
    "transfer": ("slipstream.weights.bridges.broadcast", "Group", "begin"),
    "generation": ("slipstream.inference.plugin.server", "EngineServer", "_output"),
    "agent": ("slipstream.inference.plugin.recording", "Recording", "take"),
    "second copy": ("slipstream.inference.plugin.weights.receiver", "WorkerExtension", "slipstream_load"),
}


def spoil(worker):
    if worker._slipstream_number() == 1:
        dict(worker._slipstream_model().named_parameters())["model.norm.weight"].data[0] += 1.0


class Finder(importlib.abc.MetaPathFinder):
    def __init__(self, module, kind, method, number, spoils):
        self.module, self.kind, self.method, self.left, self.spoils = module, kind, method, number, spoils

    def find_spec(self, name, path, target=None):
        if name != self.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run, loader = spec.loader.exec_module, spec.loader
        loader.exec_module = lambda module: (run(module), self.change(getattr(module, self.kind)))
        return spec

    def change(self, kind):
        original = getattr(kind, self.method)

        def dying(*arguments, **options):
            self.left -= 1
            if not self.left and not self.spoils:
                os.kill(os.getpid(), signal.SIGKILL)
            found = original(*arguments, **options)
            if not self.left:
                spoil(arguments[0])
            return found

        setattr(kind, self.method, dying)


if where := os.environ.get("DIES_IN"):
    place, _, number = where.partition(":")
    sys.meta_path.insert(0, Finder(*PLACES[place], int(number), place == "second copy"))
