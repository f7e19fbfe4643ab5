"""What a file or an override may name under `hydra.*`, where Hydra calls it before this program's check begins."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf

from ranker.cli import entry
from ranker.errors import ConfigError

CONF = Path(__file__).resolve().parents[3] / "conf"


@pytest.fixture(scope="module", autouse=True)
def rules():
    entry.register()


def composed(*overrides: str):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        assert type(GlobalHydra.instance().config_loader()).__name__ == "CheckedLoader"
        return compose("train", list(overrides), return_hydra_config=True)


FILES = {
    "callable in logging": (
        "job_logging: {handlers: {console: {(): os.system, command: ls}}}",
        r"hydra\.job_logging\.handlers\.console\.\(\)",
    ),
    "class in logging": (
        "job_logging: {handlers: {x: {class: subprocess.Popen, args: ls}}}",
        r"hydra\.job_logging\.handlers\.x\.class",
    ),
    "formatter": (
        "hydra_logging: {formatters: {x: {class: evil.Formatter}}}",
        r"hydra\.hydra_logging\.formatters\.x\.class",
    ),
    "filter": ("job_logging: {filters: {x: {(): evil.Filter}}}", r"hydra\.job_logging\.filters\.x\.\(\)"),
    "import by value": (
        "job_logging: {handlers: {console: {stream: ext://evil.stream}}}",
        r"handlers\.console\.stream",
    ),
    "value of the configuration": (
        "job_logging: {handlers: {console: {stream: cfg://evil}}}",
        r"handlers\.console\.stream",
    ),
    "log elsewhere": (
        "job_logging: {handlers: {x: {class: logging.FileHandler, filename: /tmp/x, mode: w}}}",
        r"handlers\.x\.filename",
    ),
    "log above": (
        "job_logging: {handlers: {x: {class: logging.FileHandler, filename: '${hydra.run.dir}/../x.log'}}}",
        r"handlers\.x\.filename",
    ),
    "made node": (
        "job_logging: {handlers: {console: '${oc.create:{class:evil.Handler}}'}}",
        r"handlers\.console: expected plain text",
    ),
    "callback": ("callbacks: {x: {_target_: os.system, command: ls}}", r"hydra\.callbacks\.x"),
    "callback that pickles": (
        "callbacks: {x: {_target_: hydra.experimental.callbacks.PickleJobInfoCallback}}",
        r"hydra\.callbacks\.x",
    ),
    "callback's argument": ("callbacks: {sweep: {evil: {_target_: os.system}}}", r"hydra\.callbacks\.sweep"),
    "launcher": ("launcher: {_target_: os.system}", r"hydra\.launcher: expected a plugin"),
    "sweeper's argument": (
        "sweeper: {pruning: {evil: {_target_: os.system, command: ls}}}",
        r"hydra\.sweeper\.pruning\.evil\._target_",
    ),
    "sampler": ("sweeper: {sampler: {_target_: os.system, command: ls}}", r"hydra\.sweeper\.sampler\._target_"),
    "imported sampler": (
        "sweeper: {sampler: {_target_: optuna.samplers._base.warnings.warn}}",
        r"hydra\.sweeper\.sampler\._target_",
    ),
    "sweeper's made node": ("sweeper: {params: '${oc.create:{_target_:os.system}}'}", r"hydra\.sweeper\.params"),
    "folder of Hydra's files": ("output_subdir: ../x", r"hydra\.output_subdir"),
    "name of a job": ("job: {name: ../x}", r"hydra\.job\.name"),
    "variables": (
        "job: {env_set: {LD_PRELOAD: /evil.so}}",
        r"hydra\.job\.env_set: expected the key on the command line as well",
    ),
}


@pytest.mark.parametrize("name", list(FILES))
def test_a_file_of_somebody_else(tmp_path, name):
    content, message = FILES[name]
    sweeper = [] if name.startswith(("launcher", "callback")) else ["hydra/sweeper=optuna"]
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/evil.yaml").write_text(f"# @package _global_\nhydra:\n  {content}\n")
    with pytest.raises(ConfigError, match=message):
        composed(f"hydra.searchpath=[file://{tmp_path}]", *sweeper, "experiment=evil")


@pytest.mark.parametrize(
    "override",
    [
        "+hydra.job_logging.handlers.x.class=os.system",
        "hydra.callbacks.sweep._target_=os.system",
        "+hydra.launcher.x={_target_: os.system}",
        "hydra.launcher._target_=os.system",
        "hydra.output_subdir=/elsewhere",
    ],
)
def test_an_override(override):
    with pytest.raises(ConfigError, match=r"^hydra\.(job_logging|callbacks|launcher|output_subdir)"):
        composed(override)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["hydra/job_logging=default"],
        ["hydra/job_logging=disabled"],
        ["hydra/job_logging=none"],
        ["hydra/job_logging=stdout"],
        ["hydra/hydra_logging=default"],
        ["hydra/launcher=dry_run"],
        ["sweep=joblib"],
        ["sweep=slurm", "hydra.launcher.setup=[module load cuda]"],
        ["sweep=submitit_local"],
        ["sweep=optuna_monobert"],
        ["sweep=optuna_monobert", "hydra.sweeper.sampler._target_=optuna.samplers.RandomSampler"],
        ["+hydra.job.env_set.A=b"],
        ["hydra.output_subdir=.hydra"],
    ],
    ids=" ".join,
)
def test_what_is_known_may_be_chosen(overrides):
    assert composed(*overrides).hydra.job.name


def test_commands_of_a_file_are_taken_where_the_command_line_repeats_them(tmp_path):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/ours.yaml").write_text(
        "# @package _global_\ndefaults: [{override /hydra/launcher: submitit_slurm}]\nhydra: "
        "{launcher: {setup: [module load cuda]}}\n"
    )
    ours = (f"hydra.searchpath=[file://{tmp_path}]", "sweep=ours")
    with pytest.raises(ConfigError, match=r"hydra\.launcher\.setup: expected the key on the command line as well"):
        composed(*ours)
    assert OmegaConf.select(composed(*ours, "hydra.launcher.setup=[module load cuda]"), "hydra.launcher.setup") == [
        "module load cuda"
    ]


@pytest.mark.parametrize("added", [[], ["hydra.mode=RUN"]])
def test_the_composition_that_is_kept_equals_a_fresh_one(added):
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        program = GlobalHydra.instance().hydra
        overrides = ["run=a.trec", "qrels=q.txt", "hydra.job.name=x", "hydra.run.dir=outputs/x"]
        assert program.get_mode("evaluate", overrides) is None
        kept, fresh = (program.compose_config("evaluate", [*overrides, *added], RunMode.RUN) for _ in range(2))
        assert kept is not fresh and OmegaConf.to_yaml(kept) == OmegaConf.to_yaml(fresh)
        # other overrides, or a sweep, are composed anew
        assert program.get_mode("evaluate", overrides) is None
        assert program.compose_config("evaluate", ["run=b.trec"], RunMode.RUN).run == "b.trec"
        assert program.get_mode("evaluate", ["relevance=1,2", "hydra.mode=MULTIRUN"]) == RunMode.MULTIRUN
