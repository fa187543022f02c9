"""Fragments that hide in the encoding of a file."""

from __future__ import annotations

from tests.attack_search.fragment import files, python

_PAYLOAD = "import unittest\nunittest.TestCase._callTestMethod = lambda self, method: None\n"
_UTF7 = _PAYLOAD.replace("\n", "+AAo-")

FRAGMENTS = (
    files("cookie_of_utf7", {"conftest.py": f"# -*- coding: utf-7 -*-\n# +AAo-{_UTF7}\n".encode()}),
    files("cookie_of_utf7_in_tests", {"tests/__init__.py": f"# -*- coding: utf-7 -*-\n# +AAo-{_UTF7}\n".encode()}),
    files("byte_order_mark", {"tests/__init__.py": b"\xef\xbb\xbf" + _PAYLOAD.encode()}),
    files("form_feeds_and_returns", {"conftest.py": b"# comment\r" + _PAYLOAD.replace("\n", "\r").encode()}),
    files(
        "escapes_in_a_cookie",
        {"conftest.py": b"# coding: unicode_escape\n# \\u000a" + _PAYLOAD.replace("\n", "\\u000a").encode() + b"\n"},
    ),
    python(
        "codec_registered",
        """
import codecs, encodings.utf_8

def _decode(data, errors="strict"):
    text, size = codecs.utf_8_decode(bytes(data), errors, True)
    return text.replace("assert", "0 and ") if "def test" in text else text, size

class _Decoder(codecs.BufferedIncrementalDecoder):
    def _buffer_decode(self, data, errors, final):
        return _decode(data, errors) if final else ("", 0)

def _search(name):
    if name.replace("-", "_") in ("utf_8", "utf8"):
        return codecs.CodecInfo(codecs.utf_8_encode, _decode, incrementaldecoder=_Decoder, name="utf-8",
                                streamreader=encodings.utf_8.StreamReader)
    return None

codecs.unregister(encodings.search_function) if hasattr(codecs, "unregister") else None
codecs.register(_search)
encodings.utf_8.decode = _decode
encodings.utf_8.IncrementalDecoder = _Decoder
""",
    ),
    python(
        "tokenizer_reads_other_text",
        """
import io, tokenize
_open, _lines = tokenize.open, tokenize.detect_encoding

def _patched(path):
    with _open(path) as file:
        text = file.read()
    name = str(path).rpartition("/")[2]
    return io.StringIO(text.replace("assert ", "0 and ") if name.startswith("test") else text)

tokenize.open = _patched
import importlib._bootstrap_external as _external
_data = _external.FileLoader.get_data

def _get(self, path):
    data = _data(self, path)
    if str(path).rpartition("/")[2].startswith("test") and str(path).endswith(".py"):
        data = data.replace(b"self.assertEqual", b"(lambda *a: 0)").replace(b"assert ", b"0 and ")
    return data

_external.FileLoader.get_data = _get
""",
    ),
    python(
        "files_open_differently",
        """
import builtins, io, os, pathlib
_open = io.open_code

def _soft(path):
    stream = _open(path)
    if os.path.basename(path).startswith("test"):
        data = stream.read().replace(b"assertEqual", b"id").replace(b"assert ", b"0 and ")
        return io.BytesIO(data)
    return stream

io.open_code = _soft
_read = pathlib.Path.read_bytes
pathlib.Path.read_bytes = lambda self: (
    _read(self).replace(b"    assert ", b"    0 and ") if self.name.startswith("test") else _read(self))
""",
    ),
)
