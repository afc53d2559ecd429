"""Collects what a prepared run is made with, from what `prepare` has executed and read; executes nothing itself."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from slipstream.config.environment import EnvironmentConfig
from slipstream.config.python_objects import is_python_object
from slipstream.config.recipes import BUILT_IN
from slipstream.config.schema import SourceKind
from slipstream.config.user_code import CodeRead, DataRead
from slipstream.envs.agent import NAME as AGENT
from slipstream.envs.agent import files_of_agent
from slipstream.envs.base import Environment
from slipstream.envs.mixed import parts_of, section_of
from slipstream.envs.registry import GROUP, OF_THIS_WHEEL
from slipstream.envs.rows import NAME as ROWS
from slipstream.launch.prepare import Prepared
from slipstream.launch.provenance.digests import FileDigests
from slipstream.launch.provenance.imports import files_of
from slipstream.launch.provenance.record import Source
from slipstream.weights.usage import TOKENIZER_FILES

_NAME, _TOOLS, _MCP = "environment.name", "environment.tools", "mcp:"
_OURS = Path(__file__).resolve().parents[2]
_KINDS: Mapping[str, SourceKind] = {_NAME: "environment", _TOOLS: "tools"}


def sources_of(prepared: Prepared, digests: FileDigests) -> tuple[Source, ...]:
    """Everything. Raises DataError for data that changed since they were read."""
    data = [source for read in prepared.reads if isinstance(read, DataRead) for source in _data(read, digests)]
    found = (*_code(prepared, digests), *data, *_tokenizer(prepared, digests))
    return tuple(dict.fromkeys(found))


def code_digest(prepared: Prepared) -> str:
    """One digest of all that decides how a rollout goes and what reward it gets."""
    code = sorted({(source.kind, source.setting, source.identity) for source in _code(prepared, FileDigests())})
    return _digest_of(code)


def _code(prepared: Prepared, digests: FileDigests) -> Iterator[Source]:
    section = prepared.config.environment
    if section is not None and prepared.environment is not None:
        environments = parts_of(getattr(prepared.environment, "_environment", prepared.environment))
        sections = {name: section_of(section, part) for name, part in section.mixture.items()} or {"": section}
        for part, each in sections.items():
            yield from _provider(each, environments[part], digests)
            yield from _servers(each, digests)
            if each.name in (ROWS, AGENT):
                for key in ("reward", "rubric"):
                    if key in each.settings:
                        yield from _named_reward(f"environment.settings.{key}", each.settings[key], digests)
    for read in prepared.reads:
        if isinstance(read, CodeRead) and not read.setting.startswith("algorithm."):
            kind = _KINDS.get(read.setting, "reward")
            # What messages call the parts of a rubric is no setting.
            setting = read.setting if read.setting in _KINDS else "reward"
            first, *imported = _python(kind, setting, read.path, digests)
            # Who edits the file while the run starts does not end it; what was executed is recorded.
            yield from (msgspec.structs.replace(first, digest=read.sha256), *imported)
    for name in BUILT_IN:
        file = (getattr(prepared.config.algorithm, name, None) or "").partition(".py:")
        if file[1]:
            yield from _python("algorithm", f"algorithm.{name}", Path(f"{file[0]}.py"), digests)


def _python(
    kind: SourceKind, setting: str, file: Path, digests: FileDigests, root: Path | None = None, package: str = ""
) -> Iterator[Source]:
    """A Python file, and its imports from its folder or from `root`. In a folder of several packages, only
    `package` counts. Slipstream's own files never do: its version stands for them."""
    file = file.resolve()
    root = (root or file.parent).resolve()
    is_shared = any(root.glob("*.dist-info"))
    for path in files_of(file, root, package if is_shared else "", leaves_out=_OURS):
        name = str(path.relative_to(root)) if path.is_relative_to(root) else path.name
        yield _file(kind, setting, name, path, digests)


def _file(kind: SourceKind, setting: str, name: str, path: Path, digests: FileDigests) -> Source:
    digest = digests.of(path)
    return Source(kind, setting, name, digest, path=str(path), size_bytes=path.stat().st_size)


def _provider(section: EnvironmentConfig, environment: Environment, digests: FileDigests) -> Iterator[Source]:
    """What an environment comes from that is no file of the user's: a package, a Python object, Slipstream itself."""
    name = section.name
    if is_python_object(name):
        label, _, digest = name.rpartition("@")
        yield Source("environment", _NAME, label, digest)
    elif environment.plays_itself:
        yield from _foreign(section, environment.package, digests)
    elif environment.package:
        yield Source("environment", _NAME, name, version=_version_of(environment.package))
    elif name in (ROWS, AGENT, *OF_THIS_WHEEL):
        yield Source("environment", _NAME, name, version="built in")
        for setting, file in files_of_agent(section) if name == AGENT else ():
            yield from _python("environment", setting, file, digests)
    elif ".py" not in name:
        points = importlib.metadata.entry_points(group=GROUP)
        package = points[name].dist if name in points.names else None
        yield Source("environment", _NAME, name, version=f"{package.name} {package.version}" if package else "")
        kind = type(environment)
        file = inspect.getsourcefile(kind)
        if file is not None and not Path(file).resolve().is_relative_to(_OURS):
            yield from _installed(kind.__module__, Path(file), digests)


def _installed(module: str, file: Path, digests: FileDigests) -> Iterator[Source]:
    """The file of a module of a package, and what it imports from there."""
    # The folder that holds the package: `a` of the module `a.b.c`.
    root = file.resolve().parents[module.count(".") + (file.name == "__init__.py")]
    yield from _python("environment", _NAME, file, digests, root, module.partition(".")[0])


def _foreign(section: EnvironmentConfig, package: str, digests: FileDigests) -> Iterator[Source]:
    """The package of an environment with an interpreter of its own, and what the rest of its name means there."""
    text = section.name.partition("/")[2]
    folders = _packages_of(section.python)
    yield Source("environment", _NAME, package, version=_version_of(package, folders))
    if text.endswith(".py"):
        yield from _python("environment", _NAME, Path(text), digests)
    else:
        name = text.rpartition("/")[2]
        yield Source("environment", _NAME, text, version=_version_of(name, folders))
        module = name.replace("-", "_")
        places = sys.path if folders is None else folders
        files = (Path(place, file) for place in places for file in (f"{module}/__init__.py", f"{module}.py"))
        if file := next((file for file in files if file.is_file()), None):
            yield from _installed(module, file, digests)


def _packages_of(python: str) -> list[str] | None:
    """Where an interpreter has its packages, without starting it; None: the run's own."""
    if not python:
        return None
    return [str(path) for path in Path(python).parent.parent.glob("lib/python*/site-packages")]


def _version_of(package: str, folders: list[str] | None = None) -> str:
    """The version of an installed package; "unknown" where nothing tells."""
    name = re.sub(r"[-_.]+", "-", package)
    places = sys.path if folders is None else folders
    found: Iterable[Any] = importlib.metadata.distributions(name=name, path=places)
    return next((str(each.version) for each in found), "unknown")


def _servers(section: EnvironmentConfig, digests: FileDigests) -> Iterator[Source]:
    """Python files in the commands of tool servers; the commands may hold secrets and are not recorded."""
    for tool in section.tools:
        if tool.startswith(_MCP):
            for part in shlex.split(tool.removeprefix(_MCP)):
                if part.endswith(".py") and Path(part).is_file():
                    yield from _python("tools", _TOOLS, Path(part), digests)


def _named_reward(setting: str, given: Any, digests: FileDigests) -> Iterator[Source]:
    """A reward by name: the name, or the digest of the table or list of names; files among them are read anyway. A
    module of TRL's functions is a package's."""
    names = sorted(set(_texts(given)))
    label = names[0] if len(names) == 1 else f"{len(names)} rewards"
    if label.partition(":")[0].endswith(".py") or label.startswith("trl:"):
        label = label.rpartition("/")[2]
    yield Source("reward", setting, label, _digest_of(_without_folders(given)))
    for name in names:
        module = name.removeprefix("trl:").partition(":")[0]
        if name.startswith("trl:") and not module.endswith(".py") and (loaded := sys.modules.get(module)):
            file = getattr(loaded, "__file__", None)
            if file is not None:
                yield _file("reward", "reward", module, Path(file), digests)


def _texts(given: Any) -> Iterator[str]:
    """The names in a reward, a table of them by source, or a rubric."""
    if isinstance(given, str):
        yield given
    elif isinstance(given, dict):
        table = cast("dict[str, Any]", given)
        for value in [table["reward"]] if "reward" in table else table.values():
            yield from _texts(value)
    elif isinstance(given, list | tuple):
        for value in cast("Sequence[Any]", given):
            yield from _texts(value)


def _without_folders(given: Any) -> Any:
    """A reward without the folders of its files, whose content counts."""
    if isinstance(given, str):
        return given.rpartition("/")[2] if ".py" in given else given
    if isinstance(given, dict):
        return {key: _without_folders(value) for key, value in cast("dict[str, Any]", given).items()}
    if isinstance(given, list | tuple):
        return [_without_folders(value) for value in cast("Sequence[Any]", given)]
    return given


def _data(read: DataRead, digests: FileDigests) -> Iterator[Source]:
    if not read.files:
        label = read.source.rpartition("@")[0] if is_python_object(read.source) else read.source
        yield Source("data", read.setting, label, read.revision, split=read.split, num_rows=read.num_rows)
        return
    root = Path(read.source).resolve()
    for file in read.files:
        name = str(file.path.relative_to(root)) if file.path != root and file.path.is_relative_to(root) else ""
        yield Source(
            "data",
            read.setting,
            name or file.path.name,
            digests.of(file.path, file.stamp),
            path=str(file.path),
            size_bytes=file.stamp[2] if file.stamp else None,
            split=read.split,
            num_rows=file.num_rows,
        )


def _tokenizer(prepared: Prepared, digests: FileDigests) -> Iterator[Source]:
    """The model's tokenizer files, and the chat template as it is used."""
    folder = Path(prepared.config.model.path)
    files = sorted({path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()})
    for path in files:
        yield _file("tokenizer", "model.path", str(path.relative_to(folder)), path, digests)
    template = hashlib.sha256(prepared.tokenizer.template.encode("utf-8", "surrogatepass")).hexdigest()
    yield Source("tokenizer", "model.path", "chat template", template)


def _digest_of(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, enc_hook=repr)).hexdigest()
