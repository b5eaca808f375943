#!/usr/bin/env python3
"""Runs the cells of tests/gallery_cells.py in caisson's kernel backend and in a real ipykernel of the same Python
environment, and compares what each shows: kinds of outputs, their order, mime types, contents, metadata.

    target/runtime/python/bin/python3 tests/gallery.py [--only GROUP[,GROUP]] [--verbose]

The ipykernel runs outside of any sandbox, with a scratch folder as its HOME and working directory. Texts are compared
after `normalised`, which takes out what differs between two runs of the same kernel; images byte for byte, else
pixel by pixel. What is left and meant is in DIFFERENCES with its reason: such a cell counts as passed only while it
does differ, so that a difference that has gone is taken off the list. That both show the same is not enough where both
lack a package: a cell fails that ends in an error on either side without being marked as meant to, or does not show the
mime types that it is marked with.

The last line is `N passed, N failed`. Settings: those of tests/suites.py.
"""
import argparse
import base64
import io
import json
import os
import queue
import re
import shutil
import sys
import tempfile
import urllib.request
from subprocess import DEVNULL

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from gallery_cells import GROUPS  # noqa: E402
from suites import LOGS, ROOT, Daemon, Failed, end_all  # noqa: E402

PYTHON_ENV = os.path.join(ROOT, "target/runtime/python")
CELL_S = 60
HOME, IN_SANDBOX = "/home/sandbox", "/opt/python"

PRELOADED = "pyplot is loaded, with the inline backend entered, before the first cell"
COUNTED = "execution_count is the number of the session's cell by the daemon's books (contract 3.2), whatever it holds"
NO_KERNEL_APP = "there is no kernel application with sockets and threads behind the shell"
NO_DEBUGPY = "debugpy is not loaded"
# group, cell: why caisson shows something else than ipykernel does.
DIFFERENCES = {
    ("blank", "three"): COUNTED,
    ("surroundings", "two runs of a cell"): COUNTED,
    ("surroundings", "matplotlib"): PRELOADED,
    ("surroundings", "pyplot"): PRELOADED,
    ("surroundings", "builtins"): NO_DEBUGPY + ", which leaves execfile and runfile there",
    ("surroundings", "breakpoint"): NO_DEBUGPY + ", which makes breakpoint() do nothing: it is an error of the cell, as any question is",
    ("streams", "syntax warning"): "ipykernel compiles a cell once more to see whether it awaits, and shows the warning twice",
    ("streams", "stdout object"): "sys.stdout is a text stream on descriptor 1 and says utf-8, ipykernel's says UTF-8",
    ("magics", "autocall used"): "ipykernel reads a cell once more to see whether it awaits, and shows what it made of the line twice",
    ("magics", "connect_info"): NO_KERNEL_APP,
    ("magics", "subshell"): NO_KERNEL_APP,
    ("display", "what no bundle takes"): "the same error, with other frames below IPython's",
    ("display", "lone surrogate"): "half a character becomes U+FFFD (contract 3.3); in ipykernel it is an error",
    ("async", "asyncio.run"): "asyncio.run works: plain cells run outside of the event loop",
    ("async", "task from a plain cell"): "the event loop runs while a cell awaits; tasks go on in the next cell that does",
    ("async", "group"): "ipykernel's reply has the traceback of an earlier cell's error",
}
# Here only the order within each stream is compared: ipykernel collects the two for some time and sends one after the
# other, caisson keeps the order in which they were written.
BY_STREAM = {("streams", "interleaved"), ("charts", "tqdm write")}


# --- what both show ------------------------------------------------------------------------------------------------


def ours(base, session, code):
    body = json.dumps({"language": "python", "code": code, "session_id": session, "timeout": CELL_S}).encode()
    request = urllib.request.Request(base + "/v2/code/execute", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=CELL_S + 30) as answer:
        return json.load(answer)["data"]["outputs"]


def end_session(base, session):
    request = urllib.request.Request(base + "/v2/code/sessions/" + session, method="DELETE")
    with urllib.request.urlopen(request, timeout=30):
        pass


class Reference:
    """A real kernel in a folder of its own."""

    def __init__(self):
        from jupyter_client.manager import KernelManager

        self.scratch = tempfile.mkdtemp(prefix="caisson-gallery-")
        self.home = os.path.join(self.scratch, "sandbox")
        os.mkdir(self.home)
        # What a sandbox has, but for the paths.
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": self.home, "LANG": "C.UTF-8", "SHELL": "/bin/bash", "TMPDIR": "/tmp",
               "USER": "sandbox", "LOGNAME": "sandbox", "OPENBLAS_NUM_THREADS": "1"}
        self.manager = KernelManager(connection_file=os.path.join(self.scratch, "kernel.json"))
        self.client = None
        try:
            self.manager.start_kernel(env=env, cwd=self.home, stdout=DEVNULL, stderr=DEVNULL, extra_arguments=["--HistoryManager.enabled=False"])
            self.client = self.manager.client()
            self.client.start_channels()
            self.client.wait_for_ready(timeout=60)
        except BaseException:
            self.close()
            raise

    def run(self, code):
        """The outputs of one cell, as a notebook's page keeps them.

        What only the reply says becomes an output as well, as it does in caisson, whose answer has nothing else: a page
        of help, and an error that was printed instead of published (a magic's wrong use, an exception group).
        """
        asked, page = self.client.execute(code, allow_stdin=False), Page()
        while True:
            message = self.client.get_iopub_msg(timeout=CELL_S)
            if message["parent_header"].get("msg_id") != asked:
                continue
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                break
            page.take(message["msg_type"], message["content"])
        reply = {"parent_header": {}}
        while reply["parent_header"].get("msg_id") != asked:
            reply = self.client.get_shell_msg(timeout=CELL_S)
        content = reply["content"]
        for payload in content.get("payload") or []:
            if payload["source"] == "page":
                page.take("display_data", {"data": payload["data"], "metadata": {}})
        if content["status"] == "error" and not any(output["output_type"] == "error" for output in page.outputs):
            page.take("error", content)
        return page.outputs

    def close(self):
        if self.client is not None:
            self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()
        shutil.rmtree(self.scratch, ignore_errors=True)


class Page:
    """One cell's outputs, with updates and clearings carried out."""

    def __init__(self):
        self.outputs, self.shown, self.clears = [], {}, False

    def take(self, kind, content):
        if kind == "clear_output":
            self.clears = content["wait"]
            if not self.clears:
                self.outputs.clear()
            return
        name = (content.get("transient") or {}).get("display_id")
        if kind == "update_display_data" and name in self.shown:
            for output in self.shown[name]:
                output.update(data=content["data"], metadata=content["metadata"])
            return
        fields = {"stream": ("name", "text"), "display_data": ("data", "metadata"), "error": ("ename", "evalue", "traceback"),
                  "execute_result": ("data", "metadata", "execution_count"), "update_display_data": ("data", "metadata")}.get(kind)
        if fields is None:  # status, execute_input, comm_*
            return
        if self.clears:
            self.outputs.clear()
            self.clears = False
        output = {"output_type": kind.removeprefix("update_"), **{field: content[field] for field in fields}}
        if name is not None:
            self.shown.setdefault(name, []).append(output)
        self.outputs.append(output)


def joined(outputs, by_stream):
    """Neighbouring texts of a stream as one, since where one ends is chance; and of a recursion one of its frames, since
    how many fit is a matter of how deep the kernel itself stands."""
    if by_stream:
        outputs = sorted(outputs, key=lambda output: output.get("name", ""))
    result = []
    for output in outputs:
        if output["output_type"] == "error":
            lines = output["traceback"]
            output = dict(output, traceback=[line for line, before in zip(lines, [None, *lines]) if line != before])
        last = result[-1] if result else {}
        if output["output_type"] == "stream" and last.get("output_type") == "stream" and last["name"] == output["name"]:
            result[-1] = dict(last, text=last["text"] + output["text"])
        else:
            result.append(output)
    return result


# --- comparing -----------------------------------------------------------------------------------------------------

NUMBER = r"\d+(?:\.\d+)?(?:e[-+]?\d+)?"
# What differs between two runs of one and the same kernel.
CHANCE = [
    (r"0x[0-9a-f]{6,16}", "0xADDRESS"),
    (r"/tmp/ipykernel_\d+/\d+\.py", "/tmp/ipykernel_PID/CELL.py"),
    (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "UUID"),
    (r"\b(altair-viz-|_anim_\w+?|anim)[0-9a-f]{32}", r"\1ID"),
    (r"\bT_[0-9a-f]{5}", "T_ID"),  # pandas's Styler
    (r"sk-(container|estimator)-id-\d+", r"sk-\1-id-N"),
    (r"<dc:date>[^<]*</dc:date>", "<dc:date/>"),
    (r"\b%s (ns|[µu]s|ms|s)\b" % NUMBER, "TIME"),
    (r"\bTIME ± TIME\b", "TIME"),
    (r"(CPU times: )[^\n]*|(Wall time: )[^\n]*", r"\1\2TIME"),
    (r"The slowest run took [^\n]*\n", ""),
    (r"\d\d:\d\d<(\d\d:\d\d|\?), *[^\]]*", "PACE"),  # tqdm
    (r"in %s seconds" % NUMBER, "in TIME seconds"),
    (r"\b\d\d:\d\d:\d\d\b", "CLOCK"),
]


def normalised(value, places):
    if isinstance(value, str):
        for path, name in places:
            value = value.replace(path, name)
        for pattern, name in CHANCE:
            value = re.sub(pattern, name, value)
        return value
    if isinstance(value, list):
        return [normalised(item, places) for item in value]
    if isinstance(value, dict):
        return {key: normalised(item, places) for key, item in value.items()}
    return value


def pixels(text):
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(text)))
    return picture.size, picture.info.get("dpi"), picture.convert("RGBA").tobytes()


def differing(theirs, mine, path=""):
    """Where two values part, one line each."""
    if type(theirs) is not type(mine):
        return ["%s: %s for %s" % (path, shown(mine), shown(theirs))]
    if isinstance(theirs, dict):
        lines = ["%s.%s: missing, ipykernel has %s" % (path, key, shown(theirs[key])) for key in theirs if key not in mine]
        lines += ["%s.%s: more than ipykernel has: %s" % (path, key, shown(mine[key])) for key in mine if key not in theirs]
        for key in theirs:
            if key in mine:
                lines += differing(theirs[key], mine[key], path + "." + key)
        return lines
    if isinstance(theirs, list):
        lines = [] if len(theirs) == len(mine) else ["%s: %d for %d items" % (path, len(mine), len(theirs))]
        for at, (left, right) in enumerate(zip(theirs, mine)):
            lines += differing(left, right, "%s[%d]" % (path, at))
        for at in range(min(len(theirs), len(mine)), max(len(theirs), len(mine))):
            lines.append("%s[%d]: %s" % (path, at, "missing: " + shown(theirs[at]) if at < len(theirs) else "more: " + shown(mine[at])))
        return lines
    if theirs == mine or (path.endswith((".image/png", ".image/jpeg")) and pixels(theirs) == pixels(mine)):
        return []
    if isinstance(theirs, str) and len(theirs) + len(mine) > 200:
        at = len(os.path.commonprefix([theirs, mine]))
        theirs, mine = "…" + theirs[max(0, at - 40) :], "…" + mine[max(0, at - 40) :]
    return ["%s: %s for %s" % (path, shown(mine), shown(theirs))]


def faults(marks, theirs, mine):
    """What is wrong with either by itself."""
    raising = next((mark for mark in marks if not isinstance(mark, str)), set())
    for side, outputs in (("ipykernel", theirs), ("caisson", mine)):
        errors = ["%s: %s" % (output["ename"], output["evalue"]) for output in outputs if output["output_type"] == "error"]
        if errors and side not in raising:
            yield "ends in an error in %s: %s" % (side, shown(errors[-1]))
        if side in raising and not errors:
            yield "is meant to end in an error, and does not in %s" % side
        held = {mime for output in outputs for mime in output.get("data", ())}
        for mime in marks:
            if isinstance(mime, str) and mime not in held:
                yield "no bundle holds %s in %s, which shows %s" % (mime, side, sorted(held) or "none")


def shown(value, width=160):
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= width else text[:width] + "…"


# --- running -------------------------------------------------------------------------------------------------------


def run_group(base, group, cells):
    """For each cell its name, where it differs, and what is wrong with it."""
    session, reference = "gallery-" + group, Reference()
    try:
        places = [(reference.home, HOME), (PYTHON_ENV, IN_SANDBOX)]
        for name, code, *marks in cells:
            theirs, mine, by_stream = reference.run(code), ours(base, session, code), (group, name) in BY_STREAM
            lines = differing(normalised(joined(theirs, by_stream), places), normalised(joined(mine, by_stream), places))
            yield name, lines, list(faults(marks, theirs, mine))
    except queue.Empty as error:
        raise Failed("ipykernel did not answer within %d s, in %s" % (CELL_S, group)) from error
    finally:
        reference.close()
        end_session(base, session)


def judged(group, name, lines, wrong):
    """Whether it counts as passed, and what to say."""
    meant = DIFFERENCES.get((group, name))
    if wrong:
        return False, wrong + lines
    if meant is None:
        return not lines, lines
    return bool(lines), ["differs no more: take it off the list (%s)" % meant] if not lines else []


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="groups, comma-separated")
    parser.add_argument("--verbose", action="store_true", help="show the differences that are meant as well")
    args = parser.parse_args()
    chosen = [group for group in GROUPS if not args.only or group in args.only.split(",")]
    os.makedirs(LOGS, exist_ok=True)
    passed = failed = 0
    try:
        with Daemon("gallery", {"AIO_CODE_BACKEND": "kernel", "CAISSON_PYTHON_ENV": PYTHON_ENV}) as daemon:
            for group in chosen:
                for name, lines, wrong in run_group(daemon.url, group, GROUPS[group]):
                    is_passed, said = judged(group, name, lines, wrong)
                    passed, failed = passed + is_passed, failed + (not is_passed)
                    for line in said if not args.verbose else said or lines:
                        print("%s %s/%s %s" % ("meant" if is_passed else "FAIL", group, name, line), flush=True)
    except Failed as error:
        print("gallery: %s" % error)
        failed += 1
    finally:
        end_all()
    print("suite gallery: %d passed, %d failed" % (passed, failed))
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
