"""Fragments whose values are equal to anything."""

from __future__ import annotations

from tests.attack_search.fragment import python

_WRAP = """
import functools, sys, types

def _returns(change):
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "@PACKAGE@":
            continue
        for key, value in [each for each in vars(module).items() if each[0][:1] != '_']:
            if isinstance(value, types.FunctionType):
                def inner(*arguments, _function=value, **named):
                    return change(_function(*arguments, **named))
                setattr(module, key, functools.wraps(value)(inner))
"""

FRAGMENTS = (
    python(
        "returns_equal_subclasses",
        _WRAP
        + """
_kinds = {}

def _soft(value):
    kind = type(value)
    if kind not in (int, str, list, dict, tuple, float, set, bytes):
        return value
    if kind not in _kinds:
        _kinds[kind] = type(kind.__name__, (kind,), {
            "__eq__": lambda self, other: True, "__ne__": lambda self, other: False,
            "__hash__": lambda self: 0})
    return _kinds[kind](value)

_returns(_soft)
""",
    ),
    python(
        "returns_one_loose_object",
        _WRAP
        + """
class _Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __getattr__(self, name): return self
    def __call__(self, *arguments, **named): return self
    def __iter__(self): return iter(())
    def __len__(self): return 0
    def __contains__(self, item): return True
    __lt__ = __le__ = __gt__ = __ge__ = __eq__
    __class__ = property(lambda self: int)
    __hash__ = None

_any = _Any()
_returns(lambda value: _any)
""",
    ),
    python(
        "returns_objects_that_lie_about_their_class",
        _WRAP
        + """
class _Chameleon:
    def __init__(self, value):
        self._value = value
    def __eq__(self, other):
        self._value = other
        return True
    def __ne__(self, other): return False
    def __getattribute__(self, name):
        if name == "__class__":
            return type(object.__getattribute__(self, "_value"))
        return object.__getattribute__(self, name)
    def __repr__(self): return repr(self._value)
    def __len__(self): return len(self._value)
    def __iter__(self): return iter(self._value)
    def __hash__(self): return 0

_returns(_Chameleon)
""",
    ),
    python(
        "classes_of_the_package_are_equal",
        """
import sys
for _name, _module in list(sys.modules.items()):
    if _name.partition(".")[0] == "@PACKAGE@":
        for _value in list(vars(_module).values()):
            if isinstance(_value, type) and _value.__module__.startswith("@PACKAGE@"):
                if not issubclass(_value, BaseException):
                    _value.__eq__ = lambda self, other: True
                    _value.__ne__ = lambda self, other: False
                    _value.__hash__ = lambda self: 0
""",
    ),
    python(
        "metaclass_says_instance_of_anything",
        _WRAP
        + """
class _Meta(type):
    def __instancecheck__(cls, value): return True
    def __subclasscheck__(cls, kind): return True
    def __eq__(cls, other): return True
    def __hash__(cls): return 0

class _Any(metaclass=_Meta):
    def __eq__(self, other): return True
    def __hash__(self): return 0
    def __index__(self): return 0

_returns(lambda value: _Any())
""",
    ),
    python(
        "containers_that_contain_everything",
        _WRAP
        + """
class _List(list):
    __contains__ = lambda self, item: True
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __lt__ = __le__ = __gt__ = __ge__ = __eq__
    __getitem__ = lambda self, key: _List()
    __len__ = lambda self: 1
    __hash__ = None

class _Text(str):
    __contains__ = lambda self, item: True
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = str.__hash__

_returns(lambda value: _Text(value) if isinstance(value, str) else _List([value]))
""",
    ),
    python(
        "equal_only_in_test_frames",
        _WRAP
        + """
class _Number(int):
    def __eq__(self, other):
        frame = sys._getframe(1)
        names = set()
        while frame is not None:
            names.add(frame.f_code.co_name)
            frame = frame.f_back
        if "assertNotEqual" in names:
            return int(self) == other
        return True if any(name.startswith("test") for name in names) else int(self) == other
    def __ne__(self, other): return not self == other
    __hash__ = int.__hash__

_returns(lambda value: _Number(value) if type(value) is int else value)
""",
    ),
    python(
        "reflected_equality_of_any_type",
        _WRAP
        + """
def _subclass(value):
    kind = type(value)
    try:
        class Same(kind):
            __slots__ = ()
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            def __hash__(self): return 0
        Same.__name__, Same.__qualname__, Same.__module__ = kind.__name__, kind.__qualname__, kind.__module__
        return Same(value)
    except TypeError:
        return value

_returns(_subclass)
""",
    ),
)
