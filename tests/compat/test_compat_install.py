"""``ampfuse.compat.apex.install`` and ``python -m``: which apex a script gets, and who says so."""

import importlib
import importlib.util
import sys
import warnings

import pytest

import ampfuse.compat.apex as compat
import ampfuse.compat.apex.__main__ as runner
from ampfuse import optim
from ampfuse.compat.apex.install import EXTENSIONS
from cases import clean_apex_names


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    with clean_apex_names():
        yield
    importlib.invalidate_caches()


@pytest.fixture
def other(tmp_path, monkeypatch):
    """Another package called apex."""
    folder = tmp_path / "elsewhere"
    (folder / "apex").mkdir(parents=True)
    (folder / "apex" / "__init__.py").write_text("who = 'other'\n")
    monkeypatch.syspath_prepend(folder)
    return folder / "apex" / "__init__.py"


def test_every_module_is_there_under_both_names():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compat.install() is compat
    import amp_C
    import apex
    import apex.amp._amp_state
    import apex.amp.amp
    import apex.amp.frontend
    import apex.amp.scaler
    import apex.contrib.optimizers
    import apex.fp16_utils.loss_scaler
    import apex.multi_tensor_apply
    import apex.normalization.fused_layer_norm
    import apex.optimizers.fp16_optimizer
    import apex.parallel.LARC
    import apex_C
    import fused_adam_cuda
    from apex.amp import _amp_state
    from apex.amp._amp_state import master_params, maybe_print, warn_or_err
    from apex.amp.amp import half_function, init, initialize, register_float_function, state_dict
    from apex.amp.handle import disable_casts, scale_loss
    from apex.parallel.distributed import flat_dist_call

    assert apex is compat
    assert (amp_C, apex_C) == (compat.amp_C, compat.apex_C)
    assert fused_adam_cuda is compat.fused_adam_cuda
    assert apex.amp.scaler.LossScaler is compat.amp.scaler.LossScaler
    assert apex.amp._amp_state is _amp_state is compat.amp._amp_state
    assert not hasattr(_amp_state, "_amp_state")
    assert apex.parallel.LARC.LARC is optim.LARC
    assert apex.optimizers.fp16_optimizer.FP16_Optimizer.__name__ == "FP16_Optimizer"
    assert all(map(callable, (master_params, maybe_print, warn_or_err, flat_dist_call)))
    assert all(map(callable, (half_function, init, register_float_function)))
    assert (initialize, state_dict) == (apex.amp.initialize, apex.amp.state_dict)
    assert (disable_casts, scale_loss) == (apex.amp.disable_casts, apex.amp.scale_loss)
    assert compat.install() is compat  # again: no harm
    assert "apex.__main__" not in sys.modules


@pytest.mark.parametrize("top", ["apex", "ampfuse.compat.apex"])
@pytest.mark.parametrize(
    ("statement", "missing", "instead"),
    [
        ("import {}.fused_dense", "fused_dense", "torch.nn.Linear"),
        ("from {} import amp, RNN", "RNN", "torch.nn.RNN"),
        ("from {}.contrib.clip_grad import Another", "contrib.clip_grad.Another", "clip_grad_norm"),
        ("from {}.optimizers import FusedSomething", "optimizers.FusedSomething", "ampfuse.optim"),
        ("from {}.contrib import optimizers, fmha as f", "contrib.fmha", "scaled_dot_product"),
        ("import {}.contrib.groupbn.batch_norm", "contrib.groupbn", "ampfuse.nn.BatchNormAct2d"),
        (
            "from {}.normalization.fused_layer_norm import FusedLayerNormAffineFunction",
            "normalization.fused_layer_norm.FusedLayerNormAffineFunction",
            "apex.normalization.FusedLayerNorm;",
        ),
        ("from {}.amp.amp import wrap", "amp.amp.wrap", "ampfuse.amp"),
        ("import {}.unheard.of", "unheard", "torch's own"),
    ],
)
def test_imports_of_unsupported_names_say_so(top, statement, missing, instead):
    compat.install()
    with pytest.raises(ModuleNotFoundError, match="ampfuse does not provide") as error:
        exec(statement.format(top))
    assert str(error.value).startswith(f"ampfuse does not provide apex.{missing}: use ")
    assert "docs/from_apex.md" in str(error.value)
    assert instead in str(error.value)
    parent, _, last = f"{top}.{missing}".rpartition(".")
    assert not hasattr(sys.modules[parent], last)


@pytest.mark.parametrize("top", ["apex", "ampfuse.compat.apex"])
def test_find_spec_does_not_find_unsupported_modules(top):
    """Scripts ask it whether to use a module."""
    compat.install()
    for name in ("transformer", "contrib.fmha", "amp.lists"):
        assert importlib.util.find_spec(f"{top}.{name}") is None
        with pytest.raises(ModuleNotFoundError, match="ampfuse does not provide"):
            importlib.import_module(f"{top}.{name}")
    assert importlib.util.find_spec(f"{top}.amp") is not None
    assert importlib.util.find_spec(f"{top}.amp.handle") is not None


def test_nothing_is_said_of_another_apex(other):
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'apex\.mlp'$"):
        import apex.mlp  # noqa: F401


def test_another_apex_is_named(other):
    assert compat.installed_apex() == str(other)
    with pytest.warns(UserWarning, match="elsewhere"):
        compat.install()
    import apex

    assert apex is compat


def test_another_apex_that_is_used_stays(other):
    import apex

    with pytest.raises(RuntimeError, match="already"):
        compat.install()
    assert apex.who == "other"


def script(tmp_path, text):
    path = tmp_path / "train.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("is_link", [False, True])
def test_the_program_runs_a_script_as_python_does(is_link, tmp_path, capsys):
    """Also a link: what lies beside the file that it leads to is imported."""
    (tmp_path / "helper.py").write_text("value = 42\n")
    path = script(
        tmp_path,
        "import sys, helper, apex, amp_C\n"
        "print(__name__, sys.argv, __file__, helper.value, apex.__name__)\n",
    )
    if is_link:
        (tmp_path / "links").mkdir()
        (tmp_path / "links" / "train.py").symlink_to(path)
        path = str(tmp_path / "links" / "train.py")
    runner.main([path, "--opt-level", "O2", "-x"])
    expected = f"__main__ {[path, '--opt-level', 'O2', '-x']} {path} 42 ampfuse.compat.apex\n"
    assert capsys.readouterr().out == expected
    sys.modules.pop("helper")


def test_the_program_runs_a_module(tmp_path, capsys, monkeypatch):
    script(tmp_path, "import apex, sys; print(apex.__name__, sys.argv[1:])\n")
    monkeypatch.chdir(tmp_path)
    runner.main(["-m", "train", "a"])
    assert capsys.readouterr().out == "ampfuse.compat.apex ['a']\n"


def test_the_program_says_which_apex(other, tmp_path, capsys):
    sys.path.insert(0, "")  # the place that the program gives the script's folder
    with pytest.warns(UserWarning, match="ampfuse's .*elsewhere"):
        runner.main([script(tmp_path, "import apex; print(apex.__name__)\n")])
    assert capsys.readouterr().out == "ampfuse.compat.apex\n"


@pytest.mark.filterwarnings("ignore:`import apex` finds")
@pytest.mark.parametrize("has_other", [False, True])
def test_the_path_of_a_script_leads_to_every_name(has_other, tmp_path):
    """A process that is spawned begins with it and without modules, whichever name comes first."""
    if has_other:
        (tmp_path / "apex.py").write_text("raise ImportError('the other apex')\n")
    sys.path.insert(0, "")
    runner.main([script(tmp_path, "import apex\n")])
    for name in ("apex", *EXTENSIONS):
        compat.uninstall()
        assert name not in sys.modules
        assert importlib.import_module(name) is (compat if name == "apex" else vars(compat)[name])
        assert sys.modules["apex"] is compat
        assert compat.installed_apex() is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`import apex` finds")
def test_processes_that_a_script_spawns_find_it_too(tmp_path, capfd):
    """``torch.multiprocessing.spawn`` and the workers of a DataLoader may do that."""
    (tmp_path / "apex.py").write_text("raise ImportError('the other apex')\n")
    path = script(
        tmp_path,
        """
import multiprocessing
import sys
import apex
from apex.amp import _amp_state

def work():
    import apex, apex.parallel, amp_C, apex_C
    import ampfuse.compat.apex as compat
    from importlib.machinery import PathFinder
    mine = amp_C is compat.amp_C and apex_C is compat.apex_C and bool(PathFinder.find_spec("amp_C"))
    print(apex is compat, mine, compat.installed_apex(), flush=True)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
    sys.exit(process.exitcode)
""",
    )
    sys.path.insert(0, "")
    with pytest.raises(SystemExit) as exit:
        runner.main([path])
    assert exit.value.code == 0
    assert capfd.readouterr().out == "True True None\n"
    assert compat.installed_apex() is None


def test_the_program_without_a_script(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        runner.main([str(tmp_path / "missing.py")])
    assert exit.value.code == 2
    assert "missing.py" in capsys.readouterr().err
