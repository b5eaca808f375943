"""Waits until the daemon of process argv[1] answers, then shows one execution in each language (scripts/serve.sh)."""
import json
import os
import sys
import time
import urllib.request

PARENT, ARGS = int(sys.argv[1]), sys.argv[2:]
WAIT_S = 60
CELLS = [
    ("python", "import sys, os; print('hello from Python', sys.version.split()[0], 'as pid', os.getpid())"),
    ("javascript", "console.log('hello from Node', process.version)"),
]


def address():
    listens = [b for a, b in zip(ARGS, ARGS[1:]) if a == "--listen"] + [a.split("=", 1)[1] for a in ARGS if a.startswith("--listen=")]
    host = os.environ.get("AIO_HOST", "127.0.0.1")
    listen = listens[0] if listens else "%s:%s" % (host, os.environ.get("AIO_PORT", "18091"))
    return "http://" + listen.replace("0.0.0.0", "127.0.0.1")


def key():
    first = os.environ.get("CODE_INTERPRETER_API_KEYS", "").split(",")[0].partition("=")[2]
    return os.environ.get("AIO_API_KEY") or os.environ.get("CODE_INTERPRETER_API_KEY") or first


def call(base, body=None, path="/v1/code/execute"):
    headers = {"content-type": "application/json"}
    if key():
        headers["x-api-key"] = key()
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(base + path, data, headers), timeout=60) as answer:
        return answer.read().decode()


def main():
    base = address()
    for _ in range(WAIT_S * 5):
        if os.getppid() != PARENT:  # the daemon refused to start and has said why
            return
        try:
            call(base, path="/health")
            break
        except OSError:
            time.sleep(0.2)
    else:
        print("serve: %s/health did not answer within %d s" % (base, WAIT_S), file=sys.stderr)
        return
    for language, code in CELLS:
        body = {"language": language, "code": code}
        auth = " -H 'x-api-key: …'" if key() else ""
        shell_body = json.dumps(body).replace("'", "'\\''")
        print("\n$ curl -s %s/v1/code/execute -H 'content-type: application/json'%s -d '%s'" % (base, auth, shell_body))
        try:
            print(call(base, body), flush=True)
        except OSError as error:
            print("serve: that call failed: %s" % error, file=sys.stderr)
    print("\ncaisson answers at %s; Ctrl-C stops it." % base, flush=True)


main()
