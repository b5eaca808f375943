import locale
import os
import sys
import tempfile

locale.setlocale(locale.LC_ALL, "")
assert sys.getfilesystemencoding() == "utf-8"
assert locale.getpreferredencoding(False).lower().replace("-", "") == "utf8"
path = os.path.join(tempfile.mkdtemp(), "отчёт 結果.txt")
with open(path, "w") as out:
    out.write("naïve ☕ 🚀")
with open(path) as text:
    assert text.read() == "naïve ☕ 🚀"
print("ok locale_utf8")
