"""Names of the package that have moved, and a module that another package's import brings in."""

import importlib
import importlib.util
import sys

import pytest

import moe_ops
from moe_ops.on_demand import import_after


def test_a_module_is_imported_after_another_packages(tmp_path, monkeypatch, caplog):
    """Whichever comes first; a search without an import is none, and an error is only logged."""
    monkeypatch.syspath_prepend(tmp_path)
    before, wrong = list(sys.meta_path), []
    for name, text in (("theirs", "late = 1"), ("ours", "import {0}_theirs as t; t.late = 2"),
                       ("broken", "import {0}_theirs as t; t.late = 3; 1 / 0")):  # fmt: skip
        for case in ("first", "second", "fails"):
            (tmp_path / f"{case}_{name}.py").write_text(text.format(case))
    importlib.import_module("first_theirs")
    import_after("first_theirs", "first_ours")
    import_after("second_theirs", "second_ours")
    import_after("fails_theirs", "fails_broken")
    import_after("never_theirs", "second_broken")
    wrong += [name for name in sys.modules if name.startswith(("second_", "fails_"))]
    assert importlib.util.find_spec("second_theirs").name == "second_theirs"
    late = [importlib.import_module(f"{c}_theirs").late for c in ("first", "second", "fails")]
    assert late == [2, 2, 3] and not wrong
    assert caplog.messages == ["fails_broken is not in use: division by zero"]
    (rest,) = [finder for finder in sys.meta_path if finder not in before]
    sys.meta_path.remove(rest)
    assert importlib.reload(sys.modules["second_theirs"]).late == 1


def test_names_that_moved():
    """They are found where they were, with a warning that says where they are."""
    assert len(moe_ops.__all__) <= 43
    for module, names in moe_ops._MOVED.items():
        for name in names:
            assert name not in moe_ops.__all__
            with pytest.warns(DeprecationWarning, match=rf"is now moe_ops\.{module}\.{name}$"):
                old = getattr(moe_ops, name)
            assert old is getattr(getattr(moe_ops, module), name)
