"""Makes the console scripts of a Python environment start its interpreter by where they lie themselves.

    python3 scripts/relocate_scripts.py ENVIRONMENT

pip writes the path of the environment into them, as `#!PATH/bin/python3` or, where that is longer than the kernel takes,
as a line for /bin/sh. Sandboxes see the environment under another path (/opt/python), guests without a mount namespace
under the host's: only what names neither works in both. Running it again changes nothing.
"""
import os
import re
import sys

# To sh a command that becomes the interpreter, to Python a string.
HEAD = b"""#!/bin/sh
'''exec' "$(dirname -- "$(realpath -- "$0")")"/python3 "$0" "$@"
' '''
"""
PYTHONS = re.compile(rb"#![^\n]*/python[0-9.]*(?: +-[a-zA-Z]+)*\r?\n")
BY_SH = re.compile(rb"#!/bin/sh\n'''exec' [^\n]*\n' '''\n")


def relocated(text):
    """The script's text with our head, None for what is no script of Python's."""
    found = BY_SH.match(text) or PYTHONS.match(text)
    return HEAD + text[found.end() :] if found else None


def main(environment):
    folder = os.path.join(environment, "bin")
    for entry in os.scandir(folder):
        if not entry.is_file(follow_symlinks=False):
            continue
        with open(entry.path, "r+b") as script:
            text = script.read()
            new = relocated(text)
            if new not in (None, text):
                script.seek(0)
                script.truncate()
                script.write(new)


if __name__ == "__main__":
    main(*sys.argv[1:])
