"""A scripted hub: what `huggingface_hub` asks for to make a repository and push files to it."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub:
    """Keeps commits; each is a dict of file contents by name. `status` refuses all."""

    def __init__(self):
        self.repos, self.commits, self.objects, self.tokens, self.paths = {}, [], {}, set(), []
        self.status = 0
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def _answer(self, value, status=200):
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _body(self):
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))

            def do_GET(self):
                hub.paths.append(f"GET {self.path}")
                self._answer({"error": "not found"}, 404)

            def do_PUT(self):
                hub.objects[self.path.rpartition("/")[2]] = self._body()
                self._answer({})

            def do_POST(self):
                body = self._body()
                hub.paths.append(f"POST {self.path}")
                hub.tokens.add(self.headers.get("Authorization"))
                if hub.status:
                    return self._answer({"error": "no"}, hub.status)
                if self.path.endswith("/repos/create"):
                    given = json.loads(body)
                    name = f"{given.get('organization') or 'me'}/{given['name']}"
                    hub.repos[name] = given
                    return self._answer({"url": f"{hub.url}/{name}", "name": name})
                if "/preupload/" in self.path:
                    files = json.loads(body)["files"]
                    modes = [
                        {
                            "path": each["path"],
                            "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular",
                            "shouldIgnore": False,
                        }
                        for each in files
                    ]
                    return self._answer({"files": modes})
                if self.path.endswith("/info/lfs/objects/batch"):
                    objects = [
                        {**each, "actions": {"upload": {"href": f"{hub.url}/upload/{each['oid']}"}}}
                        for each in json.loads(body)["objects"]
                    ]
                    return self._answer({"transfer": "basic", "objects": objects})
                if "/commit/" in self.path:
                    lines = [json.loads(line) for line in body.splitlines() if line]
                    files = {}
                    for line in lines:
                        value = line["value"]
                        if line["key"] == "file":
                            files[value["path"]] = base64.b64decode(value["content"])
                        elif line["key"] == "lfsFile":
                            files[value["path"]] = hub.objects[value["oid"]]
                    hub.commits.append(files)
                    return self._answer({"commitUrl": f"{hub.url}/me/mine/commit/{'a' * 40}", "commitOid": "a" * 40})
                return self._answer({})

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
