"""Fragments that change the interpreter itself through ctypes."""

from __future__ import annotations

from tests.attack_search.fragment import Fragment, python

_SLOTS = """
import ctypes
_WORD = ctypes.sizeof(ctypes.c_void_p)
_RICH = 8 + 17  # tp_richcompare, in words from the head of a type object
_kind = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.c_int)
_kept = []

def _find(kind):
    import sys
    words = (ctypes.c_void_p * 60).from_address(id(kind))
    known = {int: "int", str: "str", list: "list", dict: "dict", tuple: "tuple"}
    return words

def _set(kind, function, index=25):
    words = _find(kind)
    callback = _kind(function)
    _kept.append(callback)
    words[index] = ctypes.cast(callback, ctypes.c_void_p).value
"""


def _compare(kind: str, body: str) -> Fragment:
    return python(f"compare_slot_of_{kind}", _SLOTS + f"\n{body}\n_set({kind}, _same)\n")


_ALWAYS = """
def _same(one, other, operation):
    return operation in (1, 2, 5)
"""

FRAGMENTS = (
    _compare("list", _ALWAYS),
    _compare("dict", _ALWAYS),
    _compare("tuple", _ALWAYS),
    _compare("float", _ALWAYS),
    python(
        "int_made_equal_by_memory",
        """
import ctypes, sys

def _overwrite(old, new):
    size = sys.getsizeof(old)
    if size == sys.getsizeof(new) and type(old) is type(new):
        ctypes.memmove(id(old) + 16, id(new) + 16, size - 16)

for _old, _new in ((200, 201), (35, 36)):
    _overwrite(_old, _new)
""",
    ),
    python(
        "type_attributes_written",
        """
import ctypes, gc

def _space(kind):
    return gc.get_referents(vars(kind))[0] if not isinstance(vars(kind), dict) else vars(kind)

for _kind in (int, str, list, dict):
    try:
        _names = _space(_kind)
        _names["__eq__"] = lambda self, other: True
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(_kind))
    except (AttributeError, TypeError):
        pass
""",
    ),
    python(
        "assertion_error_slot_swapped",
        """
import ctypes
_address = ctypes.c_void_p.in_dll(ctypes.pythonapi, "PyExc_AssertionError")

class _Quiet(Exception):
    pass

_held = _Quiet
_address.value = id(_Quiet)
""",
    ),
    python(
        "error_printing_disabled",
        """
import ctypes
ctypes.pythonapi.PyErr_Clear()
ctypes.pythonapi.Py_AddPendingCall.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
_none = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda argument: ctypes.pythonapi.PyErr_Clear() or 0)
for _ in range(31):
    ctypes.pythonapi.Py_AddPendingCall(ctypes.cast(_none, ctypes.c_void_p), None)
""",
    ),
    python(
        "optimisation_switched_on",
        """
import ctypes
try:
    ctypes.c_int.in_dll(ctypes.pythonapi, "Py_OptimizeFlag").value = 2
except ValueError:
    pass
""",
    ),
    python(
        "exit_function_of_c",
        """
import ctypes
_libc = ctypes.CDLL(None)
_kind = ctypes.CFUNCTYPE(None)
_leave = _kind(lambda: _libc._exit(0))
_libc.atexit(_leave)
""",
    ),
    python(
        "system_calls_patched_in_place",
        """
import ctypes, mmap, os
_libc = ctypes.CDLL(None)
_address = ctypes.cast(_libc.exit, ctypes.c_void_p).value
_target = ctypes.cast(_libc._exit, ctypes.c_void_p).value
_page = _address & ~4095
if _libc.mprotect(ctypes.c_void_p(_page), 8192, 7) == 0:
    _code = b"\\x31\\xff\\x48\\xb8" + _target.to_bytes(8, "little") + b"\\xff\\xe0"
    ctypes.memmove(_address, _code, len(_code))
""",
    ),
    python(
        "frame_evaluation_replaced",
        """
import ctypes, sys
_api = ctypes.pythonapi
try:
    _api.PyInterpreterState_Get.restype = ctypes.c_void_p
    _state = _api.PyInterpreterState_Get()
    _api._PyInterpreterState_GetEvalFrameFunc.restype = ctypes.c_void_p
    _api._PyInterpreterState_GetEvalFrameFunc.argtypes = [ctypes.c_void_p]
    _default = _api._PyInterpreterState_GetEvalFrameFunc(_state)
    _eval = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    _real = _eval(_default)
    _new = _eval(lambda thread, frame, throwing: _real(thread, frame, throwing))
    _api._PyInterpreterState_SetEvalFrameFunc.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    _api._PyInterpreterState_SetEvalFrameFunc(_state, ctypes.cast(_new, ctypes.c_void_p))
except AttributeError:
    pass
""",
    ),
)
