"""Fragments that rewrite the code of the tests."""

from __future__ import annotations

from tests.attack_search.fragment import python

_TESTS = """
import gc, sys, types

def _tests():
    found = []
    for name, module in list(sys.modules.items()):
        if not name.rpartition(".")[2].startswith("test"):
            continue
        for value in list(vars(module).values()):
            spaces = [vars(value)] if isinstance(value, type) and value.__module__ == name else [{"": value}]
            for each in (each for space in spaces for each in list(space.values())):
                if isinstance(each, types.FunctionType) and each.__name__.startswith("test"):
                    found.append(each)
    return found
"""

FRAGMENTS = (
    python(
        "bodies_return_none",
        _TESTS
        + """
import dis

for _test in _tests():
    _code = _test.__code__
    _space = {}
    exec("def _blank(" + ", ".join(_code.co_varnames[:_code.co_argcount]) + "): return None", _space)
    _blank = _space["_blank"].__code__
    try:
        _test.__code__ = _blank.replace(co_name=_code.co_name, co_filename=_code.co_filename,
                                        co_firstlineno=_code.co_firstlineno)
    except ValueError:
        pass
""",
    ),
    python(
        "bytecode_prefix_returns",
        _TESTS
        + """
import dis

def _returning(code):
    if "RETURN_CONST" in dis.opmap:
        tail = bytes([dis.opmap["RETURN_CONST"], len(code.co_consts)])
    else:
        tail = bytes([dis.opmap["LOAD_CONST"], len(code.co_consts), dis.opmap["RETURN_VALUE"], 0])
    head = bytes([dis.opmap.get("RESUME", dis.opmap["NOP"]), 0])
    return code.replace(co_code=head + tail + code.co_code[len(head + tail):], co_consts=(*code.co_consts, None),
                        co_stacksize=max(code.co_stacksize, 2))

for _test in _tests():
    _test.__code__ = _returning(_test.__code__)
""",
    ),
    python(
        "raises_become_nops",
        """
import dis, sys, types, unittest.case

def _quiet(code):
    raw = bytearray(code.co_code)
    for each in dis.get_instructions(code):
        if each.opname == "RAISE_VARARGS":
            raw[each.offset] = dis.opmap["POP_TOP"] if each.arg == 1 else dis.opmap["NOP"]
            raw[each.offset + 1] = 0
    return code.replace(co_code=bytes(raw))

for _name in ("fail", "assertTrue", "assertFalse"):
    _function = getattr(unittest.case.TestCase, _name)
    _code = _function.__code__
    _index = next((i for i in dis.get_instructions(_code) if i.opname == "RAISE_VARARGS"), None)
    if _index is not None and _index.arg == 1:
        _raw = bytearray(_code.co_code)
        _raw[_index.offset] = dis.opmap["RETURN_VALUE"]
        _raw[_index.offset + 1] = 0
        _function.__code__ = _code.replace(co_code=bytes(_raw))
""",
    ),
    python(
        "expected_constants_replaced",
        _TESTS
        + """
class _Same(int):
    def __eq__(self, other): return True
    __ne__ = lambda self, other: False
    __hash__ = int.__hash__

class _SameText(str):
    def __eq__(self, other): return True
    __ne__ = lambda self, other: False
    __hash__ = str.__hash__

def _soft(value):
    if type(value) is int:
        return _Same(value)
    if type(value) is str:
        return _SameText(value)
    return value

for _test in _tests():
    _test.__code__ = _test.__code__.replace(co_consts=tuple(map(_soft, _test.__code__.co_consts)))
""",
    ),
    python(
        "comparisons_inverted_in_bytecode",
        _TESTS
        + """
import dis

def _inverted(code):
    raw, skip = bytearray(code.co_code), {dis.opmap[name] for name in dis.opmap if "JUMP_IF_TRUE" in name}
    pairs = {}
    for name, number in dis.opmap.items():
        if "JUMP" in name and "IF_TRUE" in name:
            other = dis.opmap.get(name.replace("IF_TRUE", "IF_FALSE"))
            if other is not None:
                pairs[number] = other
    for each in dis.get_instructions(code):
        if each.opcode in pairs:
            raw[each.offset] = pairs[each.opcode]
    return code.replace(co_code=bytes(raw))

for _test in _tests():
    _test.__code__ = _inverted(_test.__code__)
""",
    ),
    python(
        "tests_recompiled_with_try",
        """
import ast, linecache, sys

for _name, _module in list(sys.modules.items()):
    if not _name.rpartition(".")[2].startswith("test") or not getattr(_module, "__file__", None):
        continue
    _tree = ast.parse(open(_module.__file__, encoding="utf-8").read())
    for _node in ast.walk(_tree):
        if isinstance(_node, ast.FunctionDef) and _node.name.startswith("test"):
            _handler = ast.ExceptHandler(type=ast.Name("Exception", ast.Load()), name=None, body=[ast.Pass()])
            _node.body = [ast.Try(body=_node.body, handlers=[_handler], orelse=[], finalbody=[])]
    _space = dict(vars(_module))
    exec(compile(ast.fix_missing_locations(_tree), _module.__file__, "exec"), _space)
    for _key, _old in [each for each in vars(_module).items() if each[0][:1] != '_']:
        _new = _space.get(_key)
        if isinstance(_old, type) and isinstance(_new, type):
            for _attribute, _function in vars(_new).items():
                if _attribute.startswith("test"):
                    vars(_old)[_attribute].__code__ = _function.__code__
        elif callable(_old) and _key.startswith("test"):
            _old.__code__ = _new.__code__
""",
    ),
    python(
        "running_test_frame_finished",
        """
import sys

class _Done(Exception):
    pass

def _finish():
    import unittest
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name.startswith("test"):
            owner = frame.f_locals.get("self")
            if isinstance(owner, unittest.TestCase):
                owner._outcome.success = True
                owner.failureException = _Done
                owner.doCleanups = lambda: True
                for name in dir(type(owner)):
                    if name.startswith("assert"):
                        setattr(owner, name, lambda *arguments, **named: None)
            return
        frame = frame.f_back

import types
for _name, _module in list(sys.modules.items()):
    if _name.partition(".")[0] == "@PACKAGE@":
        for _key, _value in [each for each in vars(_module).items() if each[0][:1] != '_']:
            if isinstance(_value, type) and _value.__module__.startswith("@PACKAGE@"):
                def _wrap(method):
                    def inner(*arguments, **named):
                        _finish()
                        return method(*arguments, **named)
                    return inner
                for _method in ("__init__", "__eq__", "__len__", "add", "get", "set"):
                    if isinstance(vars(_value).get(_method), types.FunctionType):
                        setattr(_value, _method, _wrap(vars(_value)[_method]))
            elif isinstance(_value, types.FunctionType):
                def _call(*arguments, _function=_value, **named):
                    _finish()
                    return _function(*arguments, **named)
                setattr(_module, _key, _call)
""",
    ),
    python(
        "test_source_replaced_on_disk",
        """
import ast, os, pathlib, sys
for _directory, _, _names in os.walk(os.getcwd()):
    for _name in _names:
        if _name.startswith("test") and _name.endswith(".py"):
            _path = pathlib.Path(_directory, _name)
            try:
                _tree = ast.parse(_path.read_text())
                for _node in ast.walk(_tree):
                    if isinstance(_node, ast.FunctionDef) and _node.name.startswith("test"):
                        _node.body = [ast.Pass()]
                _path.unlink()
                _path.write_text(ast.unparse(_tree))
            except (OSError, SyntaxError):
                pass
""",
    ),
)
