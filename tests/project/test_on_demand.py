"""Names that are found when they are used, and a module that another package's import brings in."""

import importlib
import importlib.util
import sys

from processes import python

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


def test_names_that_are_elsewhere_too():
    """Programs find them here without a warning; neither ``dir`` nor ``*`` lists them."""
    assert len(moe_ops.__all__) <= 43
    code = (
        "import warnings; warnings.simplefilter('error', DeprecationWarning)\n"
        "import moe_ops; from importlib import import_module as module\n"
        "for place, names in moe_ops._ALSO.items():\n"
        "    for name in names:\n"
        "        assert name not in {*moe_ops.__all__, *dir(moe_ops)}, name\n"
        "        there = getattr(module(f'moe_ops.{place}'), name)\n"
        "        assert getattr(moe_ops, name) is there, name\n"
    )
    run = python(code)
    assert run.returncode == 0, run.stderr
    gone = [name for name in ("Call", "TilePlan", "adjust_routing") if hasattr(moe_ops, name)]
    assert not gone
