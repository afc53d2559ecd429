"""Secrets in settings: none is in the run folder, in its report, in kept evaluations or at a metric sink."""

import itertools
import json
import tomllib
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config.parse.dump import toml_value
from slipstream.config.parse.keys import all_keys
from slipstream.errors import EngineError
from slipstream.launch.recovery.resume import changed_settings
from slipstream.report import write_report
from slipstream.runlog import RunLog, read_settings
from slipstream.runlog.redaction import hide_userinfo, is_secret, is_secret_variable, redact, redact_toml, secrets_of
from slipstream.sinks import run_of

SECRET = "SEKRET.1-x"
FORMS = (
    f"mcp:python srv.py --api-key={SECRET}",
    f"mcp:python srv.py --api-key '{SECRET}' --port 80",
    f'mcp:env API_KEY="{SECRET}" python srv.py',
    f'mcp:npx mcp-remote http://h/sse --header "Authorization: Bearer {SECRET}"',
    f"mcp:curl -H X-Auth-Token:{SECRET} http://h",
    f"https://h/v1?a=b&api_key={SECRET}#x",
    f"https://me:{SECRET}@h/v1",
    f"http://h/#access_token={SECRET}",
    f"Bearer {SECRET}",
)


def _value(section, key, form):
    """The form in a list, but where a summary of the run wants another type."""
    return {"model.path": form, "training.steps": 1}.get(f"{section}.{key}", [form])


@pytest.mark.parametrize("form", FORMS)
def test_a_secret_in_any_setting_leaves_nothing_of_it(form, tmp_path):
    lines = ["tools = 1"]
    names = [name.split(".") for name in all_keys() if name.count(".") == 1]
    for section, keys in itertools.groupby(sorted(names), key=lambda name: name[0]):
        lines += ["", f"[{section}]"]
        lines += [f"{key} = {toml_value(_value(section, key, form))}  # {form}" for _, key in keys]
    lines += [f"# left_out = {toml_value(form)}  # no effect", "", "[own.settings]"]
    lines += [f'{name} = "{SECRET}"' for name in ("pwd", "auth_header", "session_id", "webhook_url")]
    with RunLog.create(tmp_path / "run") as log:
        log.resolved("\n".join(lines))
        log.event("odd", text=form, more={"cookie": SECRET}, of=[f"the server said {SECRET}"])
        log.sample({"step": 1, "completion": f"I know {SECRET}", "prompt": form})
        log.warning(f"refused {form}")
        log.exit(EngineError(f"{form} failed: {SECRET}"))
    settings = read_settings(tmp_path / "run")
    assert "<redacted>" in settings["environment.name"][0]
    sink = repr(run_of(tmp_path / "run", 0, settings))
    write_report([tmp_path / "run"], tmp_path / "report.html")
    texts = [path.read_text() for path in (*(tmp_path / "run").iterdir(), tmp_path / "report.html")]
    assert [text for text in (*texts, sink) if SECRET in text] == []
    again = tomllib.loads(redact_toml("\n".join(lines))[0])["environment"]["name"]
    assert changed_settings({"environment.name": settings["environment.name"]}, {"environment.name": again}) == []
    assert changed_settings({"environment.apart": True}, {"environment.processes": 1}) == [], "its former name"


@given(st.lists(st.sampled_from(FORMS), min_size=1), st.text(max_size=20))
def test_what_is_hidden_is_hidden_once(forms, text):
    found = redact({"tools": [*forms, f"mcp:{text}", f"http://{text}", text]})
    assert redact(found) == found
    assert secrets_of(found) == set()


@pytest.mark.parametrize(
    "text",
    [
        "mcp:python srv.py --use-auth --max-token 5 --keys=true",
        "mcp:python /home/key/srv.py --port 80",
        "https://h/v1?a=b&max_tokens=5",
        "Bearer of good news",
        "Question: is a?key=b a query",
        "me@example.com",
    ],
)
def test_what_is_no_secret_stays(text):
    assert redact(text) == text
    assert hide_userinfo(text) == text


def test_variables_that_every_shell_has_are_no_secrets():
    assert [name for name in ("PWD", "OLDPWD", "SSH_AUTH_SOCK", "HF_TOKEN") if is_secret_variable(name)] == ["HF_TOKEN"]


def test_a_connection_string_is_a_secret():
    assert redact({"connection_string": "Account=a;Key=b"}) == {"connection_string": "<redacted>"}


def test_arguments_in_a_list_follow_their_options():
    given = {"args": ["--token", "S3KRETX", "--api-key=S4KRETX", "--verbose", "yes", "--password", "--quiet"]}
    hidden = ["--token", "<redacted>", "--api-key=<redacted>", "--verbose", "yes", "--password", "--quiet"]
    assert redact(given) == {"args": hidden}
    assert secrets_of(given) == {"S3KRETX", "S4KRETX"}


@pytest.mark.parametrize("secret", ["p/w+SEKRET=xyz", 'a"b\\SEKRET', "pä SEKRET"])
def test_a_secret_is_hidden_as_addresses_and_json_write_it(secret, tmp_path):
    with RunLog.create(tmp_path / "run") as log:
        log.resolved(f"[own.settings]\napi_key = {toml_value(secret)}\n")
        for form in (secret, quote(secret), quote(secret, safe=""), quote_plus(secret), json.dumps(secret)):
            log.warning(f"refused {form}")
        log.event("odd", more={secret: 1}, **{f"x {secret}": 2})
        log.metrics(1, {f"reward/{secret}": 1.0})
        log.sample({"step": 1, secret: 1})
    assert [path.name for path in (tmp_path / "run").iterdir() if "SEKRET" in path.read_text()] == []


SECRET_NAMES = (
    *("api_keys", "db_pass", "userPasswords", "x_api_token2", "key_1", "apikey2", "token", "hf_token"),
    *("api-key", "apiKey", "WANDB_API_KEY", "client_secret", "pwd", "auth", "auth_header", "bearer", "cookie"),
    *("dsn", "pat", "session_id", "webhook_url", "access_code", "passcode", "sessionId", "x-amz-signature"),
)
PLAIN_NAMES = (
    *("max_tokens", "pass_through", "keys", "compass", "sha256", "author", "path", "session", "code", "pattern"),
    *("identity", "access", "tokenizer", "keyboard", "keep_checkpoints"),
)


@pytest.mark.parametrize("name", [*SECRET_NAMES, *PLAIN_NAMES])
def test_names_of_secrets(name):
    assert (redact({name: "SEKRET"}) == {name: "<redacted>"}) == is_secret(name) == (name in SECRET_NAMES)
