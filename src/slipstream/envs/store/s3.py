"""A registry in an S3 bucket, of Amazon or of any server that speaks its protocol, through boto3.

Credentials, profile, region and endpoint are found as boto3 finds them. Messages show the code of an error and never
its text, nor the exception that it came from: what boto3 and the server say may repeat what they were sent. For the
same reason boto3's own log is off.
"""

from __future__ import annotations

import contextlib
import logging
import re
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from slipstream.config.addresses import Bucket, is_loopback
from slipstream.envs.store.backends import SUFFIX, Archive, digest_in
from slipstream.envs.store.content import MAX_ARCHIVE_BYTES
from slipstream.errors import ConfigError, DataError, first_line
from slipstream.processes.temporary import temporary

T = TypeVar("T")

_CONNECT_S, _READ_S, _ATTEMPTS = 10.0, 30.0, 3
_ANSWER_S = 120.0
"""How long a request may take, with the search for credentials and all attempts, beside the time for an archive."""
_SLOWEST_BYTES_PER_S = 32 << 10
_CHUNK_BYTES = 1 << 20
_RIGHTS = {"ListObjectsV2": "s3:ListBucket", "GetObject": "s3:GetObject", "PutObject": "s3:PutObject"}
"""What each operation needs. Any other is one that boto3 makes for credentials."""
_OF_CREDENTIALS = frozenset(
    {"AuthFailure", "ExpiredToken", "InvalidAccessKeyId", "InvalidClientTokenId", "InvalidSecurity", "InvalidToken"}
    | {"SignatureDoesNotMatch", "TokenRefreshRequired"}
)
_OF_REGIONS = frozenset({"AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect"})
_SAY_KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or log in, as for any program with boto3"


class S3Registry:
    """A bucket, or what lies in it below a prefix. The bucket is not made."""

    def __init__(self, bucket: Bucket) -> None:
        """Connects to nothing yet, unless boto3 does for credentials. Raises ConfigError without boto3, and for an
        endpoint that is refused."""
        self._bucket = bucket
        self._shown = str(bucket)
        try:
            import boto3
            import botocore.exceptions
            from botocore.config import Config

            options = Config(
                connect_timeout=_CONNECT_S,
                read_timeout=_READ_S,
                retries={"total_max_attempts": _ATTEMPTS, "mode": "standard"},
                # Not every server knows the newer checksums, and versions before 1.36 not these options.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            )
        except (ImportError, TypeError) as error:
            raise ConfigError(
                f"{bucket} is a bucket of S3, which needs the package boto3 from version 1.36 on, which cannot be "
                f"used ({first_line(error)}): pip install 'slipstream[s3]'"
            ) from error
        self._errors: Any = botocore.exceptions
        for library in ("boto3", "botocore"):  # what they log has requests with all headers in it, and tracebacks
            logging.getLogger(library).setLevel(logging.CRITICAL)
        try:
            self._client: Any = self._asked(lambda: boto3.Session().client("s3", config=options))
            self._shown = f"{bucket} at {_checked(self._client.meta.endpoint_url, bucket)}"
        except ValueError:
            raise ConfigError(
                f"the endpoint of {bucket} (AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, or the profile's endpoint_url) is "
                "no address: write https://host"
            ) from None

    def __str__(self) -> str:
        return self._shown

    @property
    def address(self) -> str:
        """See `Registry.address`."""
        return str(self._bucket)

    def archives(self, name: str, digest: str = "") -> list[Archive]:
        """See `Registry.archives`."""
        found = self._asked(lambda: list(self._listed(name, digest)))
        return sorted(found, key=lambda archive: (archive.modified, archive.digest))

    def _listed(self, name: str, digest: str) -> Iterator[Archive]:
        folder = f"{self._bucket.prefix}{name}/"
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket.name, Prefix=folder + digest)
        for page in pages:
            for entry in page.get("Contents", ()):
                whole = digest_in(entry["Key"].removeprefix(folder))
                if whole and whole.startswith(digest):
                    place = self._place(name, whole)
                    yield Archive(name, whole, place, entry["Size"], entry["LastModified"].timestamp())

    def fetch(self, archive: Archive, here: Path) -> Path:
        """See `Registry.fetch`."""
        if archive.size_bytes > MAX_ARCHIVE_BYTES:
            raise DataError(
                f"{archive.place} has {archive.size_bytes:,} bytes, and an environment's archive at most "
                f"{MAX_ARCHIVE_BYTES:,}: it was damaged or replaced, push the environment again"
            )
        file = here / "fetched.tar"
        try:
            self._asked(lambda: self._download(archive, file), archive.size_bytes)
        except OSError as error:
            raise ConfigError(
                f"{archive.place} cannot be copied into {here.parent} ({error.strerror}): make room there"
            ) from error
        return file

    def _download(self, archive: Archive, file: Path) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            answer = self._client.get_object(Bucket=self._bucket.name, Key=self._key(archive.name, archive.digest))
            try:
                with contextlib.closing(answer["Body"]) as body, file.open("wb") as target:
                    _copy(body, target, archive, answer.get("ContentLength"))
                    return
            except (self._errors.HTTPClientError, self._errors.IncompleteReadError):  # it broke off in the middle
                if attempt == _ATTEMPTS:
                    raise

    @contextlib.contextmanager
    def adding(self, name: str) -> Generator[Path]:
        """See `Registry.adding`."""
        try:
            with temporary("environment") as here:
                yield here
        except OSError as error:
            place = tempfile.gettempdir()
            raise ConfigError(
                f"{place} cannot be written to ({error.strerror}): set TMPDIR to another folder"
            ) from error

    def put(self, name: str, digest: str, file: Path) -> str:
        """See `Registry.put`."""

        def upload() -> None:
            with file.open("rb") as body:
                self._client.put_object(Bucket=self._bucket.name, Key=self._key(name, digest), Body=body)

        self._asked(upload, file.stat().st_size)
        return self._place(name, digest)

    def _key(self, name: str, digest: str) -> str:
        return f"{self._bucket.prefix}{name}/{digest}{SUFFIX}"

    def _place(self, name: str, digest: str) -> str:
        return f"s3://{self._bucket.name}/{self._key(name, digest)}"

    def _asked(self, call: Callable[[], T], num_bytes: int = 0) -> T:
        """What a call of boto3 returns. It runs in a thread: neither the search for credentials nor a name's resolution
        nor an answer that comes byte by byte has a deadline of its own."""
        result: Future[T] = Future()

        def work() -> None:
            try:
                result.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                result.set_exception(error)

        threading.Thread(target=work, name="s3", daemon=True).start()
        seconds = _ANSWER_S + num_bytes / _SLOWEST_BYTES_PER_S
        try:
            return result.result(seconds)
        except self._errors.ClientError as error:
            raise self._refusal(error.response, error.operation_name) from None
        except self._errors.BotoCoreError as error:
            raise ConfigError(f"{self} {self._why(error)}") from None
        except RecursionError:  # boto3 asks for a bucket's region again for each answer without one
            raise ConfigError(
                f"{self} is in another region and does not say in which: set AWS_DEFAULT_REGION to the bucket's"
            ) from None
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            if not hasattr(self, "_client"):  # the address of the endpoint
                raise
            raise ConfigError(
                f"{self} gives answers that no server of S3 gives ({type(error).__name__}): correct the endpoint"
            ) from None
        except TimeoutError:
            if result.done():
                raise
            raise ConfigError(
                f"{self} has not answered within {seconds:.0f} s: check the network and the endpoint, and try again"
            ) from None

    def _refusal(self, response: dict[str, Any], operation: str) -> ConfigError:
        """What an error of the server means."""
        right = _RIGHTS.get(operation)
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = response.get("Error", {}).get("Code", "")
        code = code if re.fullmatch(r"[A-Za-z][A-Za-z0-9.]{0,60}", code) else f"status {status}"
        if right is None:
            return ConfigError(
                f"{self} needs credentials, and {operation} does not give them ({code}): correct the profile, or "
                f"{_SAY_KEYS}"
            )
        if code == "NoSuchBucket" or (status == 404 and operation == "ListObjectsV2"):
            return ConfigError(f"{self} does not exist ({code}): create the bucket, or correct its name")
        if code in _OF_CREDENTIALS:
            return ConfigError(f"{self} refuses the credentials ({code}): {_SAY_KEYS}")
        if code == "RequestTimeTooSkewed":
            return ConfigError(f"{self} refuses this machine's time ({code}): set the clock")
        if code in _OF_REGIONS or status in (301, 307):
            return ConfigError(f"{self} is in another region ({code}): set AWS_DEFAULT_REGION to the bucket's")
        if status in (401, 403):
            return ConfigError(
                f"{self} refuses access ({code}): give the credentials the right {right}, or use others (runs and "
                "`env pull` need s3:ListBucket and s3:GetObject, `env push` also s3:PutObject)"
            )
        if status == 404:
            return ConfigError(f"{self} no longer has what it listed ({code}): push the environment again")
        if status >= 500 or code in ("SlowDown", "RequestTimeout"):
            return ConfigError(f"{self} fails ({code}), {_ATTEMPTS} times: try again later, or correct the endpoint")
        return ConfigError(f"{self} refuses the request ({code}): correct its address or the server's settings")

    def _why(self, error: Exception) -> str:
        """What an error of the client means."""
        errors, kind = self._errors, type(error).__name__
        of_credentials = (
            *(errors.NoCredentialsError, errors.PartialCredentialsError, errors.CredentialRetrievalError),
            *(errors.ProfileNotFound, errors.ConfigParseError, errors.InvalidConfigError, errors.SSOError),
            errors.TokenRetrievalError,
        )
        if isinstance(error, of_credentials):
            return f"needs credentials, which cannot be found ({kind}): {_SAY_KEYS}"
        if isinstance(error, errors.SSLError):
            return (
                f"has no certificate that can be verified ({kind}): name its authority in AWS_CA_BUNDLE, or correct "
                "the endpoint"
            )
        if isinstance(error, (errors.ConnectionError, errors.HTTPClientError, errors.IncompleteReadError)):
            return f"does not answer, or breaks off ({kind}): check the network and the endpoint, and try again"
        return f"cannot be used ({kind}): check the endpoint, the region and boto3's other settings"


def _copy(body: Any, target: Any, archive: Archive, length: int | None) -> None:
    """Raises DataError for content that is not as long as the archive was listed."""
    left = archive.size_bytes
    if length is None or length == left:
        while left >= 0 and (block := body.read(_CHUNK_BYTES)):
            left -= len(block)
            target.write(block)
        if left == 0:
            return
    raise DataError(
        f"{archive.place} is not as long as its {archive.size_bytes:,} listed bytes: it was damaged or replaced, push "
        "the environment again"
    )


def _checked(endpoint: str, bucket: Bucket) -> str:
    """An endpoint as messages show it. Raises ConfigError for one where others could listen."""
    parts = urlsplit(endpoint)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    shown = f"{parts.scheme}://{host}:{parts.port}" if parts.port else f"{parts.scheme}://{host}"
    if parts.username or parts.password:
        raise ConfigError(
            f"the endpoint {shown} of {bucket} is given with a name or a password, which logs would show: remove them"
        )
    if parts.scheme != "https" and not is_loopback(parts.hostname or ""):
        raise ConfigError(
            f"the endpoint {shown} of {bucket} is another machine's, where anybody on the network could read and "
            "replace what is sent without TLS: use https://"
        )
    return shown
