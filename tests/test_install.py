"""An installed wheel works from anywhere, configurations included."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
PROJECT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the built wheel's content, to be put on the path of a Python that does not know the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(PROJECT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = folder.glob("*.whl")
    site = folder / "site"
    zipfile.ZipFile(wheel).extractall(site)
    return site


def test_the_wheel_holds_packages_prompts_and_configurations(installed):
    assert (installed / "specbench/conf/config.yaml").exists()
    assert (installed / "specbench/prompts/builtin/chat.jsonl").exists()
    assert (installed / "drafters/ngram.py").exists()
    assert not (installed / "tests").exists()
    assert list(installed.glob("*.dist-info/licenses/LICENSE"))


def test_the_installed_package_runs_from_another_folder_with_a_users_drafter(installed, tmp_path):
    (tmp_path / "conf/drafter").mkdir(parents=True)
    (tmp_path / "conf/drafter/mine.yaml").write_text("_target_: mine.Echo\n")
    (tmp_path / "mine.py").write_text(
        "from drafters.model_free import draft_rows\n"
        "from specbench.drafting import Drafter\n\n\n"
        "class Echo(Drafter):\n"
        "    def propose(self, batch, k):\n"
        "        return draft_rows(batch, k, lambda row: [batch.text(row)[-1]] * k)\n"
    )
    # -I keeps the checkout off the path; site-packages still offers the dependencies
    code = (
        f"import sys; sys.path[:0] = [{str(installed)!r}, {str(tmp_path)!r}]; "
        "import specbench; from specbench.__main__ import main; "
        f"assert specbench.__file__.startswith({str(installed)!r}), specbench.__file__; "
        "sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["target=tiny", "drafter=mine", "k=2", "dataset.limit=8", "max_new_tokens=8", "dtype=float32"]
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, "--config-dir", str(tmp_path / "conf"), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / done.stdout.strip().splitlines()[-1]
    assert json.loads((folder / "run.json").read_text())["drafter"]["name"] == "mine"
