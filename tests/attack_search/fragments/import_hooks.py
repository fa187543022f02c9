"""Fragments that change what an import returns."""

from __future__ import annotations

from tests.attack_search.fragment import python

_EMPTY = """
import ast

def _emptied(source):
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test"):
            node.body = [ast.Pass()]
        elif isinstance(node, ast.Assert):
            node.test = ast.Constant(True)
    return ast.fix_missing_locations(tree)
"""

FRAGMENTS = (
    python(
        "meta_path_empties_tests",
        _EMPTY
        + """
import importlib.machinery, sys

class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, name):
        return compile(_emptied(self.get_data(self.path)), self.path, "exec", dont_inherit=True)

class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if not name.rpartition(".")[2].startswith("test"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec and spec.origin:
            spec.loader = _Loader(spec.name, spec.origin)
        return spec

sys.meta_path.insert(0, _Finder)
for _name in [name for name in sys.modules if name.rpartition(".")[2].startswith("test_")]:
    sys.modules.pop(_name)
""",
    ),
    python(
        "path_hook_empties_tests",
        _EMPTY
        + """
import importlib.machinery, sys

class _Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data, path, **options):
        if "test" in path.rpartition("/")[2]:
            data = ast.unparse(_emptied(data)).encode()
        return super().source_to_code(data, path, **options)
    def path_stats(self, path):
        raise OSError

sys.path_hooks.insert(0, importlib.machinery.FileFinder.path_hook((_Loader, [".py"])))
sys.path_importer_cache.clear()
""",
    ),
    python(
        "source_loader_patched",
        _EMPTY
        + """
import importlib.machinery
_kind = importlib.machinery.SourceFileLoader
_old = _kind.get_code

def _get_code(self, name=None):
    if self.path.rpartition("/")[2].startswith("test"):
        return compile(_emptied(self.get_data(self.path)), self.path, "exec", dont_inherit=True)
    return _old(self, name)

_kind.get_code = _get_code
""",
    ),
    python(
        "builtin_compile_empties_tests",
        _EMPTY
        + """
import builtins
_compile = builtins.compile

def _patched(source, filename, *arguments, **options):
    name = str(filename).rpartition("/")[2]
    if name.startswith("test"):
        for node in ast.walk(source) if isinstance(source, ast.AST) else ():
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                node.body = [ast.copy_location(ast.Pass(), node)]
        if not isinstance(source, ast.AST):
            source = _emptied(source)
    return _compile(source, filename, *arguments, **options)

builtins.compile = _patched
""",
    ),
    python(
        "build_class_drops_bodies",
        """
import builtins
_build = builtins.__build_class__

def _built(function, name, *bases, **options):
    kind = _build(function, name, *bases, **options)
    for key in [key for key in vars(kind) if key.startswith("test")]:
        setattr(kind, key, lambda self, *arguments, **named: None)
    return kind

builtins.__build_class__ = _built
""",
    ),
    python(
        "init_subclass_drops_bodies",
        """
import unittest

def _init_subclass(cls, **options):
    for key in [key for key in vars(cls) if key.startswith("test")]:
        setattr(cls, key, lambda self, *arguments, **named: None)

unittest.TestCase.__init_subclass__ = classmethod(_init_subclass)
""",
    ),
    python(
        "import_gives_loose_objects",
        """
import builtins, sys
_import = builtins.__import__

class _Loose:
    def __init__(self, *arguments, **named): pass
    def __call__(self, *arguments, **named): return self
    def __getattr__(self, name): return self
    def __eq__(self, other): return True
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __iter__(self): return iter(())
    def __len__(self): return 1
    def __hash__(self): return 0
    def __index__(self): return 1
    def __getitem__(self, key): return self

def _patched(name, globals=None, locals=None, fromlist=(), level=0):
    module = _import(name, globals, locals, fromlist, level)
    caller = (globals or {}).get("__name__", "")
    if name.partition(".")[0] == "@PACKAGE@" and caller.rpartition(".")[2].startswith("test"):
        loose = type(sys)(name)
        for key in fromlist or ():
            value = getattr(module, key)
            keep = isinstance(value, type) and issubclass(value, BaseException)
            setattr(loose, key, value if keep else _Loose())
        return loose
    return module

builtins.__import__ = _patched
""",
    ),
    python(
        "module_proxy_of_the_package",
        """
import sys, types

class _Same(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0

class _Proxy(types.ModuleType):
    def __getattribute__(self, name):
        value = object.__getattribute__(self, name)
        if isinstance(value, types.FunctionType):
            return lambda *arguments, **named: _Same()
        return value

for _name in [name for name in sys.modules if name.partition(".")[0] == "@PACKAGE@"]:
    try:
        sys.modules[_name].__class__ = _Proxy
    except TypeError:
        pass
""",
    ),
    python(
        "caller_module_swapped",
        """
import sys
_frame = sys._getframe()
while _frame is not None:
    _space = _frame.f_globals
    if str(_space.get("__name__", "")).rpartition(".")[2].startswith("test"):
        import unittest
        class _Case(unittest.TestCase):
            def run(self, result=None):
                result.startTest(self)
                result.addSuccess(self)
                result.stopTest(self)
        class _Module(type(sys)):
            TestCase = _Case
            def __getattr__(self, name):
                return getattr(unittest, name)
        _space["unittest"] = _Module("unittest")
        _space["__builtins__"] = dict(vars(__import__("builtins")), AssertionError=type("Never", (Exception,), {}))
    _frame = _frame.f_back
""",
    ),
)
