"""Writes a second report of a test run beside the runner's log: each result that `unittest` or pytest reports.

Each line is sealed with a key, and the key is then replaced by its hash. Code that reads the key later can neither
change nor remove earlier lines. The last line says that the run reached its end, and which functions of the test
machinery were replaced during the run. The module runs on any Python from 3.5.

An expected failure counts as a success. Therefore only the test may expect a failure. The tested code may not declare
its failure as expected, although every function can call `pytest.xfail()`.
"""

import hashlib
import hmac
import importlib
import json
import os
import sys

MACHINERY = (
    *("unittest.case", "unittest.suite", "unittest.loader", "unittest.runner", "unittest.result"),
    *("_pytest.runner", "_pytest.reports", "_pytest.python", "_pytest.unittest", "_pytest.outcomes", "_pytest.main"),
    *("_pytest.raises", "_pytest.python_api", "pluggy._callers", "pluggy._hooks", "pluggy._manager"),
)
EXPECTING = frozenset(("xfail", "__unittest_expecting_failure__"))
"""The keywords of a test that is marked as one that fails."""


def begin(key, path):
    import unittest
    import unittest.case
    import unittest.loader
    import unittest.main
    import unittest.runner

    record = _Record(key, path)
    record.write({"begin": sys.version.split()[0]})
    _watch_unittest(unittest.TestResult, record.write)
    _watch_pytest(record.write)
    record.machinery = _machinery()


class _Record:
    def __init__(self, key, path):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._owner = os.getpid()
        self._key = key
        self._needs = (hmac.new, hashlib.sha256, json.dumps, os.write, os.getpid)
        self.machinery = {}

    def write(self, entry):
        seal, sha256, dumps, write, getpid = self._needs
        if getpid() != self._owner:  # a fork of the test process: its tests are not recorded
            return
        if "end" in entry:
            now = _machinery()
            entry["altered"] = sorted(name for name, what in self.machinery.items() if now.get(name) != what)
        line = dumps(entry).encode()
        write(self._file, seal(self._key, line, "sha256").hexdigest().encode() + b" " + line + b"\n")
        self._key = sha256(self._key).digest()


def _machinery():
    """Return name -> the function and its code, for every function of the test machinery."""
    found = {}
    for name in MACHINERY:
        for attribute, value in list(vars(sys.modules.get(name, _Nothing)).items()):
            if getattr(value, "__module__", None) != name:
                continue
            members = list(vars(value).items()) if isinstance(value, type) else [("", value)]
            for member, function in members:
                function = getattr(function, "__func__", function)
                code = getattr(function, "__code__", None)
                if code is not None:
                    found["%s.%s.%s" % (name, attribute, member)] = (function, code)
    return found


class _Nothing:
    pass


def _watch_unittest(result, write):
    words = {
        "addSuccess": "ok",
        "addError": "ERROR",
        "addFailure": "FAIL",
        "addSkip": "skipped",
        "addExpectedFailure": "expected failure",
        "addUnexpectedSuccess": "unexpected success",
    }
    for method, word in words.items():
        _before(result, method, lambda self, test, *_, word=word: write(_unittest_record(test, word)))
    result.addSuccess = _unless_it_failed(result.addSuccess)
    _before(result, "addSubTest", lambda self, test, _, err: err is None or write(_unittest_record(test, "FAIL")))
    _before(result, "stopTestRun", lambda self: write({"end": "unittest"}))


def _before(owner, name, tell):
    """Have a method call `tell` first, with the same arguments."""
    method = getattr(owner, name)

    def call(self, *arguments):
        tell(self, *arguments)
        return method(self, *arguments)

    setattr(owner, name, call)


def _unless_it_failed(add_success):
    """Return an `addSuccess` that reports a failure where `unittest` was told only during the test to expect it."""

    def addSuccess(self, test):
        failure = getattr(getattr(test, "_outcome", None), "expectedFailure", None)
        return add_success(self, test) if failure is None else self.addFailure(test, failure)

    return addSuccess


def _unittest_record(test, word):
    """Return the record of a result; its `text` is the test as `unittest -v` prints it."""
    description = getattr(test, "shortDescription", lambda: None)()
    text = "%s\n%s" % (test, description) if description else str(test)
    return {"test": test.id(), "says": word, "text": text}


def _watch_pytest(write):
    try:
        from _pytest import config
    except ImportError:
        return
    for name in MACHINERY:
        try:
            importlib.import_module(name)
        except ImportError:  # not in this version of pytest
            continue
    of_pytest = getattr(sys.modules.get("_pytest.unittest"), "TestCaseFunction", _Nothing)
    add_success = getattr(of_pytest, "addSuccess", None)
    if add_success is not None:
        setattr(of_pytest, "addSuccess", _unless_it_failed(add_success))  # noqa: B010
    prepare = config._prepareconfig
    witness = _PytestWitness(write)

    def _prepareconfig(args, plugins=None, **more):
        config._prepareconfig = prepare  # a pytest run inside of a test is not watched
        return prepare(args, list(plugins or []) + [witness], **more)

    config._prepareconfig = _prepareconfig


class _PytestWitness:
    def __init__(self, write):
        self._write = write
        self._id = str
        self._origins = {}

    def pytest_configure(self, config):
        self._id = config.cwd_relative_nodeid  # the form of ids in the log

    def pytest_runtest_makereport(self, item, call):
        """Note, before pytest's hook runs, where an exception that means XFAIL comes from. Report nothing."""
        origin = {}
        if call.excinfo is not None and call.excinfo.typename == "XFailed":
            origin = _origin(call.excinfo.tb, getattr(item, "obj", None))
        self._origins[item.nodeid, call.when] = origin

    def pytest_runtest_logreport(self, report):
        origin = self._origins.pop((report.nodeid, report.when), None)
        if report.outcome == "rerun":  # of pytest-rerunfailures; the report of the last try follows
            return
        if report.when == "call" or report.outcome != "passed":
            xfail = hasattr(report, "wasxfail")
            test = self._id(report.nodeid)
            entry = {"test": test, "says": report.outcome, "when": report.when, "xfail": xfail}
            if origin is None and xfail and EXPECTING.isdisjoint(report.keywords):
                origin = {"xfail": False, "says": "failed"}  # of another process (xdist), where its origin is not seen
            self._write(dict(entry, **(origin or {})))

    def pytest_sessionfinish(self, exitstatus):
        self._write({"end": "pytest", "exit": int(exitstatus)})


def _origin(traceback, test):
    """Return the files whose code an XFAIL came through (`through`), without those of the test machinery.

    The result is not an XFAIL (`xfail`: False) where its last caller does not name `xfail`, or where it comes from
    `unittest` for a test that expects no failure.
    """
    files = [sys.modules[name].__file__ or "" for name in ("_pytest", "unittest")]
    machinery = tuple(os.path.dirname(file) + os.sep for file in files)
    codes = []
    while traceback is not None:
        codes.append(traceback.tb_frame.f_code)
        traceback = traceback.tb_next
    codes = [code for code in codes if not code.co_filename.startswith(machinery)]
    if codes:
        meant = "xfail" in codes[-1].co_names + codes[-1].co_varnames + codes[-1].co_freevars
    else:
        owner = getattr(test, "__self__", None)
        meant = any(getattr(each, "__unittest_expecting_failure__", False) for each in (test, owner))
    origin = {"through": [code.co_filename for code in codes]}
    return origin if meant else dict(origin, xfail=False, says="failed")
